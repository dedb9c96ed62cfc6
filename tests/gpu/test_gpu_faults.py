"""Faults of jobs whose kernels run on a real GPU: by each protocol and algorithm, over sockets and P2P, eager and replayed.

Ranks share the GPU, as if each were on a host of its own or, from NCCL 2.30 on, joined by P2P. Judged is what the commands
say. A snapshot of each hung job is kept where ``$OUT`` says.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpu.gpujob import STANDIN, VERSION, GpuJob, watched
from testbed.watcher import live, pids, run

RANKS, VICTIM = 4, 2
RELEASE = tuple(int(part) for part in VERSION.split(".")[:2])
ONE_HOST = RELEASE >= (2, 30)
"""Several ranks of a host may share a GPU."""


@dataclass(frozen=True)
class Way:
    """How ranks reach one another; ``protocol`` and ``algorithm`` empty: as NCCL likes."""

    protocol: str = ""
    algorithm: str = ""
    count: int = 1 << 12
    arguments: tuple[str, ...] = ()
    same_host: bool = False
    shim: bool = False

    def job(self, late: Mapping[int, Sequence[str]] | None = None) -> GpuJob:
        chosen = {"NCCL_PROTO": self.protocol, "NCCL_ALGO": self.algorithm} if self.protocol else {}
        arguments = ["--count", str(self.count), *self.arguments]
        return GpuJob(RANKS, arguments, env=chosen, shim=self.shim, same_host=self.same_host, late=late)


WAYS = {
    "LL-ring": Way("LL", "Ring"),
    "LL128-ring": Way("LL128", "Ring", 1 << 16),
    "Simple-ring": Way("Simple", "Ring", 1 << 20),
    "LL-tree": Way("LL", "Tree", 2),
    "Simple-tree": Way("Simple", "Tree", 1 << 20),
    "as-NCCL-likes": Way(),
    "graph": Way(arguments=("--graph",)),
    "shim": Way(count=1 << 20, shim=True),
}
P2P = {
    "P2P": Way(same_host=True),
    "P2P-Simple": Way("Simple", "Ring", 1 << 20, same_host=True),
    "P2P-graph": Way(arguments=("--graph",), same_host=True),
    "P2P-shim": Way(count=1 << 20, same_host=True, shim=True),
}
if ONE_HOST and not STANDIN:
    WAYS |= P2P


@dataclass(frozen=True)
class Fault:
    """What rank ``VICTIM`` does, and the classes that say so."""

    classes: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    line: str = ""
    real: bool = field(default=False, kw_only=True)


FAULTS = {
    "frozen": Fault(("stopped",)),
    "never-enters": Fault(("not-entered",), ("--skip-at", "20"), "skips"),
    # A kernel of the job's own is before the collective's: by memory alone it looks like one that has not come.
    "GPU-busy": Fault(("hardware", "not-entered"), ("--stall-at", "20"), "stalls", real=True),
}


def diagnosed(job: GpuJob, name: str) -> dict[str, Any]:
    """What ``ncclwatch diagnose`` says of a job that nobody watched before; a snapshot is kept."""
    if folder := os.environ.get("OUT"):
        run("snapshot", *pids(job), "--output", str(Path(folder) / f"gpu-{VERSION}-{name}.ncclwatch"))
    done = run("diagnose", "--json", *pids(job))
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    print(f"\n{name}: {said['class']}: {said['summary']} {said['rules']}")
    return said


HIDDEN = {(way, "GPU-busy") for way in ("P2P", "P2P-Simple", "P2P-graph")} | {("P2P-graph", "never-enters")}
"""Counters are in GPU memory alone, and no call is seen by who comes afterwards: without the shim nothing tells whom."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_the_rank_with_the_fault_is_named_by_who_comes_afterwards(way: str, fault: str) -> None:
    case = FAULTS[fault]
    if case.real and STANDIN:
        pytest.skip("GPU layer: the stand-in launches no kernels of the job")
    with WAYS[way].job({VICTIM: case.arguments}) as job:
        if case.line:
            job.wait_line(VICTIM, case.line)
        else:
            job.wait_iterations(5)
            os.kill(job.pid(VICTIM), signal.SIGSTOP)
        time.sleep(2)
        said = diagnosed(job, f"{way}-{fault}")
    told = f"{said['class']}: {said['summary']} {said['evidence']} {said['unobserved']}"
    if (way, fault) in HIDDEN:
        assert said["class"] == "unknown" and said["unobserved"], told
        return
    assert [culprit["rank"] for culprit in said["culprits"]] == [VICTIM], told
    assert said["class"] in case.classes, told


@pytest.mark.parametrize("way", WAYS)
def test_a_healthy_job_is_silent_and_a_frozen_rank_is_named_live(way: str) -> None:
    """The calls are traced by uprobes in a process that uses real CUDA."""
    with WAYS[way].job() as job:
        job.wait_iterations(3)
        with live(*pids(job)) as watcher:
            attached = watcher.wait_for("attached")
            assert attached["planes"]["calls"]["running"], attached
            watcher.wait_for("rank", count=8 * RANKS)
            job.wait_iterations(5)
            assert not watcher.of("verdict"), watcher.of("verdict")
            os.kill(job.pid(VICTIM), signal.SIGSTOP)
            frozen = time.monotonic()
            verdict = watcher.wait_for("verdict")["verdict"]
            print(f"\n{way}: named {time.monotonic() - frozen:.1f} s after it was frozen")
            assert [culprit["rank"] for culprit in verdict["culprits"]] == [VICTIM], verdict
            os.kill(job.pid(VICTIM), signal.SIGCONT)
            watcher.wait_for("recovery")
            job.wait_iterations(3)
            assert watcher.end() == 0


def test_a_rank_that_replays_once_less_is_named_live() -> None:
    """It hangs one operation apart. Not over P2P: the graph is captured before anybody watches, and memory shows nothing."""
    arguments = ("--graph", "--gate", "--iterations", "45", "--hold", "--late-ms", "10")
    with replace(WAYS["graph"], arguments=arguments).job({VICTIM: ("--omit", "40")}) as job:
        for rank in range(RANKS):
            job.wait_line(rank, "ready")
        with live(*pids(job)) as watcher:
            watcher.wait_for("rank", count=RANKS)
            job.open_gate()
            verdict = watcher.wait_for("verdict")["verdict"]
            assert watcher.end() == 0
    print(f"\n{verdict['summary']}")
    assert verdict["class"] == "not-entered", verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [VICTIM], verdict


EAGER_AND_GRAPH = ["as-NCCL-likes", "graph", *(["P2P", "P2P-graph"] if ONE_HOST and not STANDIN else [])]


@pytest.mark.parametrize("way", EAGER_AND_GRAPH)
def test_a_rank_that_becomes_late_is_named_live(way: str) -> None:
    """It computes for 0.2 s more before each operation, after a time in which all was well."""
    told_slow(way, ("--late-ms", "20"), ("--slow-at", "600", "--slow-ms", "200"))


@pytest.mark.skipif(STANDIN, reason="GPU layer: the stand-in launches no kernels of the job")
@pytest.mark.parametrize("way", ["as-NCCL-likes", "graph"])
def test_a_gpu_that_becomes_slow_is_named_live(way: str) -> None:
    """Its kernel before each operation takes 60 ms more. All hosts go on alike. Over P2P nothing shows whose GPU it is."""
    told_slow(way, ("--late-ms", "10", "--compute-ms", "2"), ("--slow-at", "400", "--slow-compute-ms", "60"))


def told_slow(way: str, all_ranks: tuple[str, ...], victim: tuple[str, ...]) -> None:
    """A job whose rank ``VICTIM`` becomes slow: silence before, then that rank and no other."""
    with replace(WAYS[way], arguments=(*WAYS[way].arguments, *all_ranks)).job({VICTIM: victim}) as job:
        job.wait_iterations(3)
        with watched(job, f"gpu-{VERSION}-{way}-{victim[-2][2:]}") as watcher:
            job.wait_line(VICTIM, "slows")
            slows = time.monotonic()
            assert not watcher.of("verdict"), watcher.of("verdict")
            verdict = watcher.wait_for("verdict", timeout=90)["verdict"]
            print(f"\n{way}: after {time.monotonic() - slows:.1f} s: {verdict['class']}: {verdict['summary']}")
            assert watcher.end() == 0
    assert verdict["class"] in ("slow-computation", "slow-mixed"), verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [VICTIM], verdict


@pytest.mark.parametrize("way", EAGER_AND_GRAPH)
def test_a_healthy_job_stays_silent(way: str) -> None:
    """Forty seconds of it, with computing between the operations."""
    busy = ("--late-ms", "10", *(() if STANDIN else ("--compute-ms", "2")))
    with replace(WAYS[way], arguments=(*WAYS[way].arguments, *busy)).job() as job:
        job.wait_iterations(3)
        with watched(job, f"gpu-{VERSION}-{way}-healthy") as watcher:
            time.sleep(40)
            assert not watcher.of("verdict"), watcher.of("verdict")
            assert watcher.end() == 0


@pytest.mark.skipif(STANDIN, reason="GPU layer: a report of the real NVML")
def test_the_state_of_the_gpu_is_read() -> None:
    done = run("gpus", "--json")
    assert done.returncode == 0, done.stderr
    print(done.stdout[:2000])
    assert "NVIDIA" in done.stdout
