"""Jobs that replay CUDA graphs: hangs are laid to whom eager jobs name, and calls that graphs hold count where they run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.verdict import VerdictClass
from testbed.job import Job, has_secret_memory
from testbed.test_diagnose_faults import VICTIM, judge, wait_until_it_stands
from testbed.test_diagnose_job import judge_frozen, look, opened
from testbed.watcher import Live, live, pids
from unit.shim_harness import build_driver, build_shim

pytestmark = pytest.mark.attach

VERSIONS = ("2.21.5", "2.27.5", "2.32.3")
ONCE_LESS = ("--fault", f"skip:rank={VICTIM},at=20", "--iterations", "40", "--hold")
"""With one replay less a job goes on, one operation apart: it hangs where the others wait in the last one."""


@dataclass(frozen=True)
class Case:
    """A fault in a job of replays, and what is said of it by its memory alone."""

    extra: tuple[str, ...]
    transport: Literal["socket", "shm", "mixed"]
    expected: tuple[VerdictClass, ...] = (VerdictClass.NOT_ENTERED,)


CASES = {
    "stuck": Case(("--fault", f"stuck:rank={VICTIM},at=20"), "socket"),
    "once-less": Case(ONCE_LESS, "socket"),
    "once-less-shm": Case(ONCE_LESS, "shm"),
    # In the middle of a replay the GPU is seen to stop; at its beginning it looks like one that has not come (no device plane).
    "stalled-gpu": Case(
        ("--fault", f"stall_gpu:rank={VICTIM},at=20,group=world,delay_us=3000", "--compute-us", "1000"),
        "mixed",
        (VerdictClass.NOT_ENTERED, VerdictClass.HARDWARE),
    ),
    "stalled-proxy": Case(("--fault", f"stall_proxy:rank={VICTIM},at=20"), "socket", (VerdictClass.HARDWARE,)),
}


SHORT = ("once-less", "stalled-gpu")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in CASES])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_rank_with_the_fault_is_named_as_in_eager_jobs(version: str, name: str) -> None:
    case = CASES[name]
    with Job(version, 4, "graph", case.transport, count=100_000, extra=case.extra, wait_for="nothing") as job:
        wait_until_it_stands(job, creation=False)
        verdict = judge(job.pids)
    told = f"{verdict.verdict_class}: {verdict.summary} {verdict.evidence}"
    assert verdict.verdict_class in case.expected, told
    named = {culprit.rank for culprit in verdict.culprits}
    # A proxy that stops in the middle of one send shows no more than its link.
    assert named == {VICTIM} or (name == "stalled-proxy" and verdict.link is not None and VICTIM in named), told
    assert any("CUDA graphs" in line for line in verdict.unobserved), verdict.unobserved


@pytest.mark.parametrize("version", VERSIONS)
def test_a_healthy_job_of_replays_is_silent_and_a_frozen_rank_is_named(version: str) -> None:
    with Job(version, 4, "graphs", "mixed", count=5000) as job:
        with opened(job) as targets:
            for _ in range(3):
                verdict = diagnose(look(targets, 0.5))
                assert not verdict.verdict_class.accuses, f"{verdict.summary} {verdict.evidence}"
        verdict = judge_frozen(job, VICTIM)
    told = f"{verdict.summary} {verdict.evidence}"
    assert verdict.verdict_class is VerdictClass.STOPPED, told
    assert [culprit.rank for culprit in verdict.culprits] == [VICTIM], told


def watched_from_the_start(job: Job, watcher: Live) -> None:
    """Let a job begin that waits at its gate, once its calls are recorded."""
    watcher.wait_for("rank", count=job.ranks)
    job.open_gate()


def accused(watcher: Live) -> list[dict[str, Any]]:
    verdicts = [data["verdict"] for data in watcher.of("verdict")]
    return [verdict for verdict in verdicts if verdict["culprits"]]


@pytest.mark.skipif(not has_secret_memory(), reason="no secret memory (memfd_secret)")
def test_replays_are_counted_by_the_calls_they_hold() -> None:
    """Over P2P memory shows nothing at all: launches alone tell which replay the rank has not made, and what it holds."""
    extra = ("--gate", *ONCE_LESS)
    with Job("2.27.5", 4, "graph", "p2p", count=20_000, extra=extra, wait_for="nothing") as job:
        job.wait_gate()
        with live(*pids(job)) as watcher:
            watched_from_the_start(job, watcher)
            verdict = watcher.wait_for("verdict")["verdict"]
            seen = {data["rank"]: data["operations"] for data in watcher.of("rank")}
            assert watcher.end() == 0
    told = f"{verdict['class']}: {verdict['summary']} {verdict['evidence']}"
    assert verdict["class"] == "not-entered", told
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [VICTIM], told
    # One eager call before the capture, 40 replays; the capture itself calls nothing.
    assert seen == {rank: 41 - (rank == VICTIM) for rank in range(4)}
    line = f"has not called #40 (AllReduce of {20_000} x float32), 3 other ranks have"
    assert any("calls and replays of CUDA graphs" in one and line in one for one in verdict["evidence"]), told
    assert not any("CUDA graphs" in one for one in verdict["unobserved"]), verdict["unobserved"]


@pytest.mark.skipif(not has_secret_memory(), reason="no secret memory (memfd_secret)")
def test_a_rank_frozen_in_replays_over_nvlink_is_named_by_memory_alone() -> None:
    with Job("2.27.5", 4, "graph", nvlinks=4, as_nccl_likes=True, count=20_000) as job:
        verdict = judge_frozen(job, VICTIM)
    told = f"{verdict.verdict_class}: {verdict.summary} {verdict.evidence}"
    assert verdict.verdict_class is VerdictClass.STOPPED, told
    assert [culprit.rank for culprit in verdict.culprits] == [VICTIM], told


@pytest.mark.skipif(not has_secret_memory(), reason="no secret memory (memfd_secret)")
@pytest.mark.parametrize("shape", ["graph", pytest.param("allreduce", marks=pytest.mark.long)])
def test_a_gpu_that_stalls_over_nvlink_is_named_with_the_shim(shape: str) -> None:
    """Counters in GPU memory, which nobody can read from outside, are read by the shim inside each process."""
    env = {"NCCL_PROFILER_PLUGIN": str(build_shim()), "LD_PRELOAD": str(build_driver())}
    extra = ("--fault", f"stall_gpu:rank={VICTIM},at=20,group=world,delay_us=1000")
    with Job("2.27.5", 4, shape, "p2p", count=1_000_000, extra=extra, env=env, wait_for="nothing") as job:
        job.wait_line(VICTIM, "gpu stalled", 60)
        wait_until_it_stands(job, creation=False)
        command = [sys.executable, "-m", "ncclwatch", "diagnose", "--json", *map(str, job.pids)]
        said = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    assert said["class"] in ("hardware", "not-entered"), said
    assert [culprit["rank"] for culprit in said["culprits"]] == [VICTIM], said
    assert any("P2P (GPU memory)" in line for line in said["evidence"]), said
    assert not any("P2P/NVLink" in line for line in said["unobserved"]), said


@pytest.mark.skipif(not has_secret_memory(), reason="no secret memory (memfd_secret)")
def test_a_gpu_that_has_not_begun_is_named_by_the_shim_where_no_counter_tells() -> None:
    """LL128 counts nothing that lies unread: that the GPUs of the others are in what this one has not begun is all there is."""
    env = {"NCCL_PROFILER_PLUGIN": str(build_shim()), "LD_PRELOAD": str(build_driver())}
    extra = ("--fault", f"stall_gpu:rank={VICTIM},at=20", "--compute-us", "100000")
    with Job("2.27.5", 4, "allreduce", "p2p", count=20_000, protocol="LL128", extra=extra, env=env, wait_for="nothing") as job:
        job.wait_line(VICTIM, "gpu stalled between", 60)
        wait_until_it_stands(job, creation=False)
        command = [sys.executable, "-m", "ncclwatch", "diagnose", "--json", *map(str, job.pids)]
        said = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    assert said["class"] == "not-entered", said
    assert [culprit["rank"] for culprit in said["culprits"]] == [VICTIM], said
    assert any("whose GPU has not begun it" in line for line in said["evidence"]), said


SERVING = ("--layers", "2", "--pause-us", "5000", "--prefill-every", "8")


def test_a_rank_that_serves_another_batch_is_named() -> None:
    """It replays the graph of half as many requests: the job runs on, with wrong results."""
    extra = ("--gate", *SERVING, "--fault", f"other_size:rank={VICTIM},at=21")
    with Job("2.32.3", 4, "serving", "mixed", count=1000, extra=extra, wait_for="nothing") as job:
        job.wait_gate()
        with live(*pids(job)) as watcher:
            watched_from_the_start(job, watcher)
            verdict = watcher.wait_for("verdict")["verdict"]
            assert watcher.end() == 0
    told = f"{verdict['class']}: {verdict['summary']} {verdict['evidence']}"
    assert verdict["class"] == "inconsistent", told
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [VICTIM], told
    assert "called AllReduce of 1000 x float32 where its peers called AllReduce of 2000 x float32" in verdict["summary"], told


IDLE = (*SERVING, "--idle-every", "30", "--idle-us", "600000000")


def serve_until_idle(job: Job) -> None:
    """Until no requests come any more."""
    deadline = time.monotonic() + 60
    while {job.progress(rank) for rank in range(4)} != {29}:
        assert time.monotonic() < deadline, job.logs()
        time.sleep(0.1)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_requests_are_no_hang(version: str) -> None:
    with Job(version, 4, "serving", "mixed", count=1000, extra=IDLE) as job:
        serve_until_idle(job)
        with opened(job) as targets:
            verdict = diagnose(look(targets, 0.3))
    assert verdict.verdict_class is VerdictClass.IDLE, f"{verdict.verdict_class}: {verdict.summary} {verdict.evidence}"


@pytest.mark.long
def test_no_requests_are_no_hang_for_longer_than_a_hang_takes_to_be_told() -> None:
    with Job("2.27.5", 4, "serving", "mixed", count=1000, extra=IDLE) as job, live(*pids(job)) as watcher:
        serve_until_idle(job)
        watcher.wait_for("rank", count=len(watcher.of("rank")) + 4 * 14)
        assert accused(watcher) == []
        assert watcher.end() == 0


# Iterations of 0.1 s: what was normal is seen for seconds, also where it takes seconds to attach.
SLOW = {
    "loader": ("host: begins iterations late", f"loader:rank={VICTIM},at=150,us=300000"),
    "slow_gpu": ("computation", f"slow_gpu:rank={VICTIM},at=150,factor=4"),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind == "slow_gpu")) for kind in SLOW])
def test_a_rank_that_becomes_slow_between_replays_is_named(kind: str) -> None:
    """Launches are calls too, of graphs that were captured before anybody watched. What one holds is opened once the GPU comes to
    it: that nothing is open does not mean that the host is late.
    """
    words, fault = SLOW[kind]
    extra = ("--compute-us", "100000", "--fault", fault)
    with Job("2.27.5", 4, "graph", count=20_000, extra=extra) as job, live(*pids(job)) as watcher:
        verdict = watcher.wait_for("verdict", timeout=90)["verdict"]
        assert watcher.end() == 0
    assert verdict["class"] == "slow-computation" and words in verdict["summary"], verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [VICTIM], verdict
