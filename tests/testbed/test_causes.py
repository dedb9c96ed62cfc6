"""The cause that a verdict tells, of faults that are real: what happened to which rank, and nothing of the others.

A line of the tables below is a fault of one rank, and the row of knowledge that must come first. Of faults that are not here
docs/knowledge.md names the test that plays them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from testbed.cpu_share import CpuShare, can_limit
from testbed.job import Job, Transport
from testbed.watcher import live, pids, run

pytestmark = pytest.mark.attach

VICTIM = 1
RANKS = 3

HANGS = {
    # Fault of Python → row, what the rank is said to be doing.
    "loader": ("data-loader", "data-loader"),
    "gil": ("gil-held", "gil-held"),
    "user": ("user-code", "user-code"),
}
ENDS: dict[str, tuple[Callable[[Job, Path], None], str]] = {
    "killed": (lambda job, file: job.kill(VICTIM), "crashed-by-signal"),
    "exception": (lambda job, file: strike(file), "left-with-status"),
}


TRAINING = ("--tp", "2", "--micro-batches", "2", "--layers", "1", "--forward-us", "20000", "--gradients", "65536")
ROOM, SHARE = 4.0, 0.03
"""Of a processor: a limit that holds nobody back, and one by which an iteration takes several times as long."""
CROWD = 40
"""Threads that share one processor: what each gets of it is as little as :data:`SHARE`."""
FEW_CPUS: dict[str, tuple[tuple[int, ...], Transport, tuple[int, ...] | None]] = {
    "one rank": ((VICTIM,), "shm", None),
    "ranks of a host": ((0, 1), "mixed", (2, 2)),
}
"""Who is left with one processor, and what joins the ranks."""
HEALTHY = 30
"""Iterations by which a watcher knows what is usual."""


def strike(file: Path) -> None:
    """The victim's fault begins."""
    made = file.with_suffix(".new")
    made.write_text(str(VICTIM))
    made.rename(file)


def job(fault: str, file: Path) -> Job:
    return Job(nccl="2.27.5", ranks=RANKS, count=1 << 12, extra=("--pause-us", "20000"), python=(fault, str(file)))


def check(verdict: dict[str, Any], row: str) -> None:
    """The victim alone, and the row first."""
    assert [one["rank"] for one in verdict["culprits"]] == [VICTIM], verdict
    assert verdict["knowledge"][0]["row"] == row, verdict["knowledge"]


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=[pytest.mark.long] * (fault == "user")) for fault in HANGS])
def test_what_a_rank_does_instead_is_the_cause(tmp_path: Path, fault: str) -> None:
    row, doing = HANGS[fault]
    with job(fault, tmp_path / "fault") as running:
        healthy = json.loads(run("diagnose", "--json", *pids(running)).stdout)
        assert (healthy["class"], healthy["culprits"], healthy["knowledge"]) == ("running", [], []), healthy
        strike(tmp_path / "fault")
        # A thread that wants the GIL wakes every 5 ms, if the machine lets it: one look in several must see it.
        for _ in range(6 if fault == "gil" else 1):
            verdict = json.loads(run("diagnose", "--json", *pids(running)).stdout)
            if doing in verdict["culprits"][0]["doing"]:
                break
        check(verdict, row)
        assert doing in verdict["culprits"][0]["doing"], verdict
        # Their loops are alike, and nothing of that kind is said of those that wait.
        others = [one for one in json.loads(run("stacks", "--json", *pids(running)).stdout) if one["rank"] != VICTIM]
        assert len(others) == RANKS - 1
        assert not any(doing in one["doing"] for one in others if doing != "user-code"), others


@pytest.mark.parametrize("fault", ENDS)
def test_how_a_rank_ended_is_the_cause(tmp_path: Path, fault: str) -> None:
    begin, row = ENDS[fault]
    with job("raise", tmp_path / "fault") as running, live(*pids(running)) as watcher:
        watcher.wait_for("rank", count=2 * RANKS)
        assert not watcher.of("verdict")
        begin(running, tmp_path / "fault")
        verdict = watcher.wait_for("verdict")["verdict"]
        check(verdict, row)


def bind(running: Job, ranks: Sequence[int], cpu: int) -> None:
    """All threads of these ranks may run on one processor only, and so may those that they start."""
    for rank in ranks:
        for thread in Path(f"/proc/{running.pid(rank)}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cpu})


@pytest.mark.quiet
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors, of which one can be left to others")
@pytest.mark.parametrize(
    ("victims", "transport", "hosts"),
    [pytest.param(*case, id=name, marks=[pytest.mark.long] * (name != "one rank")) for name, case in FEW_CPUS.items()],
)
def test_fewer_cpus_are_the_cause_of_slow_ranks(
    tmp_path: Path, victims: tuple[int, ...], transport: Transport, hosts: tuple[int, ...] | None
) -> None:
    """A CPU set that becomes too small for the threads in it, while the peers keep theirs."""
    file = tmp_path / "fault"
    extra = (*TRAINING, "--fault", f"load:rank={victims[-1]},at=0,threads={CROWD},when={file}")
    with (
        Job("2.27.5", 4, "training", transport, hosts=hosts, count=4096, extra=extra) as running,
        live(*pids(running)) as watcher,
    ):
        watcher.wait_for("rank", count=8)
        running.wait_progress(HEALTHY, timeout=120)
        assert not watcher.of("verdict")
        bind(running, victims, min(os.sched_getaffinity(0)))
        strike(file)
        found = watcher.wait_for("verdict", timeout=120)["verdict"]
    assert {one["rank"] for one in found["culprits"]} <= set(victims), found
    # That threads want CPUs may be plain as well: then that comes first, and beside it that the set is small.
    assert found["knowledge"][0]["row"] in ("cpu-set", "cpu-contention"), found["knowledge"]
    assert any("CPUs it may use: 1; of most peers" in line for line in found["differences"]), found


@pytest.mark.quiet
@pytest.mark.skipif(not can_limit(), reason="needs root and a cgroup hierarchy with a processor controller")
def test_a_cpu_limit_is_the_cause_of_a_slow_rank() -> None:
    """The limit of the control group that it has been in all the time, as a container is: told by name, with what to raise."""
    with (
        Job("2.27.5", 4, "training", count=4096, extra=TRAINING) as running,
        CpuShare([running.pid(VICTIM)], ROOM) as group,
        live(*pids(running)) as watcher,
    ):
        watcher.wait_for("rank", count=8)
        running.wait_progress(HEALTHY, timeout=120)
        group.limit(SHARE)
        found = watcher.wait_for("verdict", timeout=120)["verdict"]
        check(found, "cpu-limit")
        assert found["class"] == "slow-computation" and "CPU throttling" in found["summary"], found
        assert any("limits.cpu" in step for step in found["knowledge"][0]["do"]), found
