"""A real NCCL job on a plan that is followed: a spine dies, the new plan is there, and the verdict of the running job says so;
a link of the plan becomes slow, and the plan is taken back."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pytest

from testbed.job import available
from testbed.path_jobs import (
    COUNT,
    RATIO,
    as_flow,
    ask,
    followers,
    hop,
    map_to,
    ncclwatch,
    pinned,
    recorded,
    seconds_each,
)
from testbed.spines import LEAVES, Spines

pytestmark = [
    pytest.mark.attach,
    pytest.mark.paced,
    pytest.mark.skipif(not available("2.27.5"), reason="NCCL 2.27.5 is not cached"),
]

SLOW = 500_000
"""Bytes a second: two fifths of what a flow has that shares a link with another one."""


def test_a_spine_dies_under_a_job_that_follows_a_plan(fabric: Spines, library: str, tmp_path: Path) -> None:
    """Flows apart on two spines. One dies: the network moves its flows onto the other, the next plan has nothing better, and the
    verdict of the slowed job names the dead link and what it costs."""
    flows, plan, recording = (tmp_path / name for name in ("flows.json", "plan.pins", "job.recording"))
    probes, seen, plans = ([tmp_path / f"host{leaf}.{what}" for leaf in range(LEAVES)] for what in ("probe", "seen", "pins"))
    alike = [as_flow(fabric, leaf, channel) for leaf in range(LEAVES) for channel in range(2)]
    flows.write_text(json.dumps({"schema": "ncclwatch.paths/1", "flows": alike}))
    ask(fabric, flows, probes)
    ncclwatch("paths", "plan", str(flows), *map(str, probes), "-o", str(plan))
    with fabric.job(pins=(library, str(plan)), count=COUNT) as job:
        apart = seconds_each(job)
        map_to(flows, job)
        ask(fabric, flows, probes)
        words = [["-o", str(plans[leaf]), "--keep", str(seen[leaf]), "--json"] for leaf in range(LEAVES)]
        with followers(fabric, flows, probes, words) as keepers:
            first = [json.loads(said.readline()) for said in keepers]
            # Flows weigh by their rates, two of a host 2 together: each has a link of its own.
            assert all(one["fullest_link"] < 1.99 for one in first), first
            while not all(file.exists() for file in seen):
                time.sleep(0.1)
            with recorded(recording, [job], *(word for file in seen for word in ("--paths", str(file)))):
                job.wait_progress(20)
                began = time.monotonic()
                fabric.down(0)
                second = [json.loads(said.readline()) for said in keepers]
                took = time.monotonic() - began
                # Both links of the spine go down one after the other: a first plan may be of the moment between.
                for leaf, said in enumerate(keepers):
                    until_living(said, second[leaf], leaf)
                crowded = seconds_each(job)
                job.wait_progress(20)
    assert took < 2.0, took
    assert crowded / apart >= RATIO, (crowded, apart)
    assert all(one["rerouted_by_the_network"] or one["dead"] for one in second), second
    text = ncclwatch("diagnose", str(recording))
    assert "dead link" in text and "10.80.0.2 is dead: none of" in text, text
    assert "costs at most" in text and "PREDICTED" in text, text
    page = tmp_path / "report.html"
    ncclwatch("report", str(recording), "-o", str(page))
    assert "is dead: none of" in page.read_text()


def until_living(lines: IO[str], one: dict[str, Any], leaf: int) -> None:
    """Until a plan has nothing left but the living spine for what a host sends; ends with the test's time at the latest."""
    while {hop(each) for each in one["connections"] if each["rank"] == leaf and each["hops"]} != {f"10.80.{leaf * 16 + 1}.2"}:
        one = json.loads(lines.readline())


@pytest.mark.long
def test_a_plan_on_which_rates_fall_is_taken_back(fabric: Spines, library: str, tmp_path: Path) -> None:
    """Flows crowd on one spine, and a plan moves them apart. Then the other spine becomes slow: slower than both flows on the one
    were. The plan is taken back at once, and the next communicator is as fast as the first.

    Paths are not looked at meanwhile: a probe that is lost before the slow link would make a new plan, and a new comparison.
    """
    flows = tmp_path / "flows.json"
    probes, plans = ([tmp_path / f"host{leaf}.{what}" for leaf in range(LEAVES)] for what in ("probe", "pins"))
    old = pinned(fabric, 40000, (0, 0))
    for plan in plans:
        plan.write_text(old)
    pins = (library, [str(plan) for plan in plans])
    words = [["-o", str(plans[0]), "--all", "--interval", "3600", "--json"], ["-o", str(plans[1]), "--all", "--interval", "3600"]]
    with ExitStack() as stack:
        with fabric.job(pins=pins, count=COUNT) as job:
            crowded = seconds_each(job)
            map_to(flows, job)
            ask(fabric, flows, probes)
            keepers = stack.enter_context(followers(fabric, flows, probes, words))
            for said, words_then in zip(keepers, ("compares_with_bytes_per_s", "will be compared with"), strict=True):
                until_says(said, words_then)
        assert all(plan.read_text() != old for plan in plans)
        with fabric.job(pins=pins, count=COUNT) as job:
            apart = seconds_each(job)
            for leaf in range(LEAVES):
                fabric.limit(leaf, 1, SLOW)
            slow = seconds_each(job)
            back = json.loads(until_says(keepers[0], "taken_back"))["taken_back"]
            until_says(keepers[1], "taken back: on the plan the slowest flow of this host has")
    assert back["after_bytes_per_s"] < 0.9 * back["before_bytes_per_s"], back
    assert [plan.read_text() for plan in plans] == [old, old]
    with fabric.job(pins=pins, count=COUNT) as job:
        recovered = seconds_each(job)
    assert crowded / apart >= RATIO and slow / recovered >= RATIO, (crowded, apart, slow, recovered)


def until_says(lines: IO[str], words: str) -> str:
    """The first line with these words; ends with the test's time at the latest."""
    while words not in (line := lines.readline()):
        assert line, f"it ended without '{words}'"
    return line
