"""A real NCCL job on a plan that is followed: a spine dies, the new plan is there, and the verdict of the running job says so."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from testbed.job import available
from testbed.path_jobs import COUNT, ME, RATIO, as_flow, ask, hop, map_to, ncclwatch, seconds_each
from testbed.spines import LEAVES, Spines
from testbed.watcher import pids

pytestmark = [
    pytest.mark.attach,
    pytest.mark.quiet,
    pytest.mark.skipif(not available("2.27.5"), reason="NCCL 2.27.5 is not cached"),
]


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
        words = [*ME, "paths", "follow", str(flows), *map(str, probes), "--json"]
        keepers = [
            fabric.hosts[leaf].popen(
                [*words, "-o", str(plans[leaf]), "--keep", str(seen[leaf])],
                stdout=subprocess.PIPE, text=True,
            )
            for leaf in range(LEAVES)
        ]  # fmt: skip
        watch = [*ME, "record", *pids(job), "-o", str(recording)]
        recorder = None
        try:
            first = [json.loads(keeper.stdout.readline()) for keeper in keepers if keeper.stdout]
            # Flows weigh by their rates, two of a host 2 together: each has a link of its own.
            assert all(one["fullest_link"] < 1.99 for one in first), first
            while not all(file.exists() for file in seen):
                time.sleep(0.1)
            paths = [word for file in seen for word in ("--paths", str(file))]
            recorder = subprocess.Popen([*watch, *paths], stdout=subprocess.PIPE, text=True)
            assert recorder.stdout is not None and "recording 2 processes" in recorder.stdout.readline()
            job.wait_progress(20)
            began = time.monotonic()
            fabric.down(0)
            second = [json.loads(keeper.stdout.readline()) for keeper in keepers if keeper.stdout]
            took = time.monotonic() - began
            # Both links of the spine go down one after the other: a first plan may be of the moment between.
            for leaf, keeper in enumerate(keepers):
                until_living(keeper.stdout, second[leaf], leaf)
            crowded = seconds_each(job)
            job.wait_progress(20)
        finally:
            for keeper in keepers:
                keeper.kill()
                keeper.communicate()
            if recorder is not None:
                recorder.terminate()
                recorder.communicate(timeout=60)
    assert took < 2.0, took
    assert crowded / apart >= RATIO, (crowded, apart)
    assert all(one["rerouted_by_the_network"] or one["dead"] for one in second), second
    text = ncclwatch("diagnose", str(recording))
    assert "dead link" in text and "10.80.0.2 is dead: none of" in text, text
    assert "costs at most" in text and "PREDICTED" in text, text
    page = tmp_path / "report.html"
    ncclwatch("report", str(recording), "-o", str(page))
    assert "is dead: none of" in page.read_text()


def until_living(lines: Any, one: dict[str, Any], leaf: int) -> None:
    """Until a plan has nothing left but the living spine for what a host sends; ends with the test's time at the latest."""
    while {hop(each) for each in one["connections"] if each["rank"] == leaf and each["hops"]} != {f"10.80.{leaf * 16 + 1}.2"}:
        one = json.loads(lines.readline())
