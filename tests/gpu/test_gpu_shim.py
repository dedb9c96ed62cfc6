"""On a machine with a GPU: the counter shim under real CUDA. Several ranks share the GPU.

``make gpu`` runs this and the measurements. With NCCLWATCH_GPU_STANDIN=1 the CPU testbed plays the GPU.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu.gpujob import STANDIN, VERSION, GpuJob
from ncclwatch.collect.device import DeviceWatch
from ncclwatch.collect.watched import Watched
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.device import DeviceSample, KernelState
from ncclwatch.model.state import ProcessSample, Transport
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.target.devconn import CounterPlace, counter_places
from ncclwatch.target.frame import FrameFile, WantedWord
from ncclwatch.target.session import TargetProcess
from testbed.job import cache_folder
from unit.shim_harness import build_shim

ITERATIONS = 23
RELEASE = tuple(int(part) for part in VERSION.split(".")[:2])


def look(pid: int) -> ProcessSample:
    watched = Watched(TargetProcess.open(pid))
    try:
        assert watched.look() is None and watched.last is not None
        return watched.last
    finally:
        watched.close()


def until(pid: int, condition: Callable[[DeviceSample], bool], what: str) -> DeviceSample:
    for _ in range(200):
        device = look(pid).device
        assert device is not None, "the shim is not loaded"
        if condition(device):
            return device
        time.sleep(0.05)
    raise AssertionError(f"{what}: {device}")


def test_counts_are_exact_and_times_are_the_gpus() -> None:
    with GpuJob(2, ["--iterations", str(ITERATIONS), "--hold", "--count", str(1 << 22)]) as job:
        for rank in range(2):
            job.wait_line(rank, f"iteration {ITERATIONS} ")
            device = until(
                job.pid(rank), lambda d: all(o.state is KernelState.FINISHED for o in d.communicators[0].recent), "kernels end"
            )
            (own,) = device.communicators
            assert (own.operations, own.collectives, own.rank, own.nranks) == (ITERATIONS, ITERATIONS, rank, 2)
            assert {(c.started, c.finished) for c in own.channels} == {(ITERATIONS, ITERATIONS)}
            assert (device.unmatched, device.refused) == (0, 0) and not device.transfers
            for operation in own.recent:
                assert operation.duration_ns and 10_000 < operation.duration_ns < 10_000_000_000


def test_the_sampler_is_ready_under_real_cuda() -> None:
    with GpuJob(2, ["--iterations", "3", "--hold"]) as job:
        for rank in range(2):
            job.wait_line(rank, "iteration 3 ")
            device = until(job.pid(rank), lambda d: d.sampler == "idle", "stream, event and pinned buffer were made")
            assert device.last_error == 0


class AllCounters:
    """Counters of every connection, whatever its transport."""

    def __init__(self, target: TargetProcess) -> None:
        self.target = target

    def counter_places(self) -> tuple[CounterPlace, ...]:
        kinds = frozenset({Transport.P2P, Transport.NET})
        return counter_places(self.target.decoder, self.target.communicator_states, kinds)


@pytest.mark.parametrize("period_s", [1.0, 0.1, 0.01, 0.001])
def test_rates_are_kept_while_kernels_run(period_s: float) -> None:
    """The copy engine answers beside running kernels, at the rate that is asked for; words in host memory are refused."""
    with GpuJob(2, ["--count", str(1 << 20)]) as job:
        job.wait_iterations(3)
        with TargetProcess.open(job.pid(0)) as target, _frame(job.pid(0)) as frame:
            target.sample()
            places = AllCounters(target).counter_places()[:64]
            assert places
            number = frame.ask([WantedWord(p.address, p.held_at) for p in places], period_s, 30)
            _until_header(frame, lambda: int(frame.header()["request_seen"]) == number)
            begun, before = time.monotonic(), int(frame.header()["rounds"])
            time.sleep(max(2.0, 3 * period_s))
            rounds, seconds = int(frame.header()["rounds"]) - before, time.monotonic() - begun
            header = frame.header()
            print(
                f"\nperiod {period_s} s: {rounds / seconds:.1f} rounds/s of {len(places)} words, last round "
                f"{int(header['round_duration_ns']) / 1e6:.3f} ms, last error {int(header['last_error'])}"
            )
            assert rounds >= 0.3 * seconds / period_s or rounds * int(header["round_duration_ns"]) > 0.3e9 * seconds
            assert int(header["last_error"]) == 0
        job.wait_iterations(3)


def _frame(pid: int) -> FrameFile:
    frame = FrameFile.find(pid)
    assert frame is not None
    return frame


def _until_header(frame: FrameFile, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, frame.header()
        time.sleep(0.005)


def test_copies_come_back_while_a_kernel_hangs() -> None:
    """Rank 1 is frozen, so rank 0's kernel spins for ever: its counters are still read, and say that nothing moves."""
    with GpuJob(2, ["--count", str(1 << 22)]) as job:
        job.wait_iterations(3)
        watch = DeviceWatch(job.pid(0))
        with TargetProcess.open(job.pid(0)) as target:
            try:
                sample = watch.look(target.sample(), AllCounters(target))
                os.kill(job.pid(1), signal.SIGSTOP)
                time.sleep(2)
                for _ in range(30):
                    sample = watch.look(target.sample(), AllCounters(target))
                    time.sleep(0.2)
                device = sample.device
                assert device is not None and not device.copy_engine_silent, "a spinning kernel does not stop the copy engine"
                assert any(
                    o.state in (KernelState.RUNNING, KernelState.NOT_STARTED) for c in device.communicators for o in c.recent
                )
            finally:
                os.kill(job.pid(1), signal.SIGCONT)
                watch.close()


def test_a_hung_job_is_diagnosed_by_who_attaches_afterwards(tmp_path: Path) -> None:
    """Nothing was known of the job before it hung. A snapshot of it is kept where $OUT says."""
    from ncclwatch.target.image import record_snapshot

    with GpuJob(3, ["--count", str(1 << 20)]) as job:
        job.wait_iterations(3)
        os.kill(job.pid(1), signal.SIGSTOP)
        try:
            time.sleep(2)
            watched = [Watched(TargetProcess.open(pid)) for pid in job.pids]
            try:
                for _ in range(3):
                    for one in watched:
                        one.look()
                    time.sleep(0.7)
                verdict = diagnose([one.history for one in watched])
            finally:
                for one in watched:
                    one.close()
            folder = Path(os.environ.get("OUT", tmp_path))
            record_snapshot(job.pids, folder / f"hung-gpu-{VERSION}.ncclwatch", samples=2, interval=0.5)
        finally:
            os.kill(job.pid(1), signal.SIGCONT)
        assert verdict.verdict_class is VerdictClass.STOPPED, verdict.summary
        assert [culprit.pid for culprit in verdict.culprits] == [job.pid(1)]
        assert "device" in verdict.planes


@pytest.mark.real_gpu
@pytest.mark.skipif(RELEASE < (2, 30), reason="several ranks of a host on one GPU: NCCL 2.30 and later (NCCLWATCH_GPU_NCCL)")
def test_p2p_counters_name_a_rank_that_never_enters() -> None:
    """Ranks of one host joined by P2P: no proxy and no host counter; what stands there is read by the shims alone."""
    with GpuJob(2, ["--count", str(1 << 20)], same_host=True, late={1: ["--skip-at", "5"]}) as job:
        job.wait_line(1, "skips")
        time.sleep(1)
        watched = [Watched(TargetProcess.open(pid)) for pid in job.pids]
        try:
            for _ in range(8):
                for one in watched:
                    one.look()
                time.sleep(0.7)
            samples = [one.last for one in watched if one.last is not None]
            joined = {t for s in samples for c in s.communicators for _, _, _, t in c.transports}
            if Transport.P2P not in joined:
                pytest.skip(f"these ranks are joined by {sorted(joined)}, not P2P")
            counters = [c for s in samples if s.device for c in s.device.counters]
            assert counters and all(c.value is not None and not c.problem for c in counters), counters
            verdict = diagnose([one.history[-2:] for one in watched])
            assert [culprit.pid for culprit in verdict.culprits] == [job.pid(1)], verdict.summary
        finally:
            for one in watched:
                one.close()


@pytest.mark.real_gpu
def test_a_sampler_at_full_rate_disturbs_no_graph_capture() -> None:
    """The capture is in the strictest mode: one call of the shim that may not be made would end it with an error."""
    with GpuJob(2, ["--graph", "--iterations", "30", "--count", str(1 << 16)]) as job:
        asked: set[int] = set()
        deadline = time.monotonic() + 60
        while any(process.poll() is None for process in job.processes) and time.monotonic() < deadline:
            for pid in job.pids:
                frame = FrameFile.find(pid) if pid not in asked and Path(f"/proc/{pid}").exists() else None
                if frame is not None:
                    asked.add(pid)
                    with frame:
                        frame.ask([WantedWord(8, 8)] * 64, 0.001, 30)
            time.sleep(0.02)
        assert job.wait() == [0, 0], job.logs()
        assert len(asked) == 2


OLD = "2.21.5"
"""A release without a profiler interface."""


@pytest.mark.skipif(not (cache_folder() / OLD).exists(), reason=f"GPU layer: NCCL {OLD} is not in the cache")
def test_operations_by_preload_begin_and_end_on_the_gpu() -> None:
    with GpuJob(2, ["--iterations", str(ITERATIONS), "--hold"], nccl=OLD, shim=False, preload=True) as job:
        for rank in range(2):
            job.wait_line(rank, f"iteration {ITERATIONS} ")
            device = until(
                job.pid(rank),
                lambda d: all(o.state is KernelState.FINISHED for o in d.communicators[0].recent),
                "events are reached",
            )
            (own,) = device.communicators
            assert (device.entry, own.operations, own.rank, own.nranks) == ("preload", ITERATIONS, rank, 2)
            assert all(o.duration_ns and 1_000 < o.duration_ns < 10_000_000_000 for o in own.recent)


@pytest.mark.real_gpu
def test_injected_by_the_driver_the_sampler_finds_the_context() -> None:
    with GpuJob(2, ["--iterations", "3", "--hold"], shim=False, env={"CUDA_INJECTION64_PATH": str(build_shim())}) as job:
        for rank in range(2):
            job.wait_line(rank, "iteration 3 ")
            device = until(job.pid(rank), lambda d: d.sampler == "idle", "the primary context is taken over")
            assert device.entry == "injection" and device.last_error == 0


def test_results_are_right_and_ranks_end_well() -> None:
    with GpuJob(2, ["--iterations", "60", "--count", "20011"]) as job:
        assert job.wait() == [0, 0], job.logs()


@pytest.mark.skipif(STANDIN, reason="the stand-in driver has one context for all")
def test_without_the_shim_the_same_job_runs() -> None:
    with GpuJob(2, ["--iterations", "10"], shim=False) as job:
        assert job.wait() == [0, 0], job.logs()
