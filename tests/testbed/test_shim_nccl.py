"""The counter shim in real NCCL: every profiler interface, exact counts, a frozen rank's unfinished steps, nothing harmed.

``NCCLWATCH_SHIM_MATRIX=1`` adds the releases that have interfaces 1, 3, 5 and 6 as their newest (downloaded: 250 MB each).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ncclwatch.collect.device import DeviceWatch
from ncclwatch.collect.watched import Watched
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.device import DeviceSample, KernelState
from ncclwatch.model.state import ProcessSample, Transport
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.target.devconn import CounterPlace, counter_places
from ncclwatch.target.session import TargetProcess
from testbed.job import ROOT, Job, available, cache_folder
from unit.shim_harness import build_driver, build_shim

pytestmark = pytest.mark.attach

ITERATIONS = 23
NEWEST = {"2.27.5": 4, "2.32.3": 7}
MATRIX = {"2.23.4": 1, "2.26.2.post1": 3, "2.28.9": 5, "2.30.4": 6}
"""The newest profiler interface of releases that CI does not download."""

IN_MATRIX = pytest.mark.skipif(not os.environ.get("NCCLWATCH_SHIM_MATRIX"), reason="NCCLWATCH_SHIM_MATRIX=1 runs it")

KERNELS_FROM = 3
GPU_TIME_FROM = 4


def only(folder: Path, interface: int) -> Path:
    """The shim with one version of the interface alone: the names of the others lead nowhere."""
    data = build_shim().read_bytes()
    for number in range(1, 10):
        if number != interface:
            data = data.replace(b"ncclProfiler_v%d\0" % number, b"ncclProfiler_x%d\0" % number)
    path = folder / f"v{interface}" / "libncclwatch_counters.so"
    path.parent.mkdir()
    path.write_bytes(data)
    return path


def plugin(**more: str) -> dict[str, str | None]:
    return {"NCCL_PROFILER_PLUGIN": str(build_shim()), **more}


def fetch(version: str) -> None:
    if available(version):
        return
    if not os.environ.get("NCCLWATCH_SHIM_MATRIX"):
        pytest.skip(f"NCCL {version} is not in the cache; NCCLWATCH_SHIM_MATRIX=1 downloads it")
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "fetch_nccl.py", version, cache_folder() / version], check=True, timeout=600
    )


def look(job: Job, rank: int) -> ProcessSample:
    """One look at a rank by state plane and shim, attached for this look alone."""
    watched = Watched(TargetProcess.open(job.pid(rank)))
    try:
        assert watched.look() is None and watched.last is not None
        return watched.last
    finally:
        watched.close()


def settled(job: Job, rank: int, done: Callable[[DeviceSample], bool]) -> ProcessSample:
    """Look until the frame shows it: NCCL's threads report kernels a moment after the stream has ended."""
    for _ in range(100):
        sample = look(job, rank)
        assert sample.device is not None, job.logs()
        if done(sample.device):
            break
        time.sleep(0.05)
    return sample


def check_exact(job: Job, rank: int, interface: int) -> None:
    def complete(device: DeviceSample) -> bool:
        (own,) = device.communicators
        return own.operations == ITERATIONS and all(c.finished == ITERATIONS for c in own.channels) and not device.transfers

    sample = settled(job, rank, complete)
    device = sample.device
    assert device is not None
    (own,), (communicator,) = device.communicators, sample.communicators
    assert (device.entry, device.interface) == ("plugin", interface)
    assert (own.collectives, own.transfers) == (ITERATIONS, 0)
    assert own.rank == communicator.rank
    # To an interface before v4 a newer NCCL does not say the hash; the address joins it all the same.
    assert own.hash == communicator.hash or (own.hash is None and interface < GPU_TIME_FROM <= NEWEST.get(job.nccl, 0))
    assert 0 < own.inside_address - communicator.address < 4 << 20, "where NCCL keeps our context lies inside its communicator"
    assert own.nranks == (job.ranks if interface >= GPU_TIME_FROM else None)
    assert (device.unmatched, device.refused, device.torn, device.transfers) == (0, 0, 0, ())
    last = own.recent[-1]
    assert (last.ordinal, last.function, last.sequence, last.count) == (ITERATIONS, "AllReduce", ITERATIONS - 1, 65536)
    if interface < KERNELS_FROM:
        assert last.state is KernelState.UNOBSERVED and not own.channels
        return
    assert last.state is KernelState.FINISHED
    assert own.channels and {(c.started, c.finished) for c in own.channels} == {(ITERATIONS, ITERATIONS)}
    if interface >= GPU_TIME_FROM:
        assert last.channels == len(own.channels)
        assert last.duration_ns is not None and 0 < last.duration_ns < 60_000_000_000
    else:
        assert last.duration_ns is None


@pytest.mark.parametrize("version", ["2.27.5", "2.32.3"])
def test_every_interface_that_a_release_knows(version: str, tmp_path: Path) -> None:
    """One job, each rank with another version of the interface; NCCL's own stand-in kernels write the counters it reads."""
    interfaces = range(1, NEWEST[version] + 1)
    for interface in interfaces:
        only(tmp_path, interface)
    choose = f'export NCCL_PROFILER_PLUGIN={shlex.quote(str(tmp_path))}/v$((RANK+1))/libncclwatch_counters.so; exec "$@"'
    with Job(version, len(interfaces), iterations=ITERATIONS, hold=True, wrap=["sh", "-c", choose, "sh"]) as job:
        for rank in range(job.ranks):
            job.wait_line(rank, f"iteration {ITERATIONS}")
        for rank, interface in enumerate(interfaces):
            check_exact(job, rank, interface)


@pytest.mark.parametrize(("version", "interface"), MATRIX.items())
def test_the_newest_interface_of_other_releases(version: str, interface: int) -> None:
    fetch(version)
    with Job(version, 2, iterations=ITERATIONS, hold=True, env=plugin()) as job:
        for rank in range(job.ranks):
            job.wait_line(rank, f"iteration {ITERATIONS}")
            check_exact(job, rank, interface)


@pytest.mark.parametrize("version", ["2.27.5", "2.32.3"])
def test_a_frozen_ranks_unfinished_steps_are_in_its_frame(version: str) -> None:
    victim = 1
    with Job(version, 3, env=plugin()) as job:
        job.wait_progress(3)
        watched = [Watched(TargetProcess.open(pid)) for pid in job.pids]
        try:
            for attempt in range(20):
                job.freeze(victim)
                time.sleep(0.5)
                for one in watched:
                    one.look()
                last = watched[victim].last
                frozen = last.device if last is not None else None
                assert frozen is not None
                running = any(operation.state is KernelState.RUNNING for one in frozen.communicators for operation in one.recent)
                if running and any(t.steps_finished < t.nsteps for t in frozen.transfers):
                    break
                job.thaw(victim)  # it was frozen between two operations, or where only one of its threads had begun the next
                time.sleep(0.01 * attempt)
            assert frozen is not None and running
            assert all(t.steps_finished <= t.nsteps and t.rank == victim for t in frozen.transfers)
            # Its successor's steps say what they wait for, and the whole is judged as without the shim.
            waits: set[str] = set()
            deadline = time.monotonic() + 20
            while waits != {"nothing has arrived"} and time.monotonic() < deadline:
                time.sleep(0.3)  # on a busy machine the others still do what they can without it
                for one in watched:
                    one.look()
                successor = watched[victim + 1].last
                assert successor is not None and successor.device is not None, "it has the shim too"
                waits = {w.state for t in successor.device.transfers if not t.is_send and t.peer == victim for w in t.waits}
            assert waits == {"nothing has arrived"}
            verdict = diagnose([one.history for one in watched])
            while verdict.verdict_class is VerdictClass.RUNNING and time.monotonic() < deadline:
                # On a busy machine the others still do what they can without it.
                time.sleep(0.3)
                for one in watched:
                    one.look()
                verdict = diagnose([one.history for one in watched])
            assert verdict.verdict_class is VerdictClass.STOPPED and [c.rank for c in verdict.culprits] == [victim]
            assert "device" in verdict.planes
        finally:
            job.thaw(victim)
            for one in watched:
                one.close()


@pytest.mark.parametrize(
    ("version", "shape", "extra"),
    [
        ("2.32.3", "split", ("--split-share",)),
        ("2.27.5", "abort", ("--abort-after", "0.5")),
        ("2.21.5", "pipeline", ()),
        pytest.param("2.27.5", "multicomm", ("--config",), marks=IN_MATRIX),
        pytest.param("2.21.5", "abort", ("--abort-after", "0.5"), marks=IN_MATRIX),
    ],
)
def test_results_are_right_with_the_shim(version: str, shape: str, extra: Sequence[str]) -> None:
    env: dict[str, str | None] = plugin() if version != "2.21.5" else {"LD_PRELOAD": f"{build_shim()}:{build_driver()}"}
    with Job(version, 4, shape, "mixed", iterations=2, count=20011, verify=True, extra=extra, env=env, wait_for="nothing") as job:
        assert job.wait(120) == [0] * 4, job.logs()
        assert all(job.lines(rank)[-1].endswith(", 0 wrong") for rank in range(4)), job.logs()


def test_calls_and_their_ends_without_a_plugin_interface() -> None:
    """NCCL 2.21: LD_PRELOAD. The driver, and so the end of an operation on the GPU, is the stand-in's."""
    env = {"LD_PRELOAD": f"{build_shim()}:{build_driver()}"}
    with Job("2.21.5", 2, iterations=ITERATIONS, hold=True, env=env) as job:
        for rank in range(2):
            job.wait_line(rank, f"iteration {ITERATIONS}")

        def complete(device: DeviceSample) -> bool:
            return all(o.state is KernelState.FINISHED for c in device.communicators for o in c.recent)

        sample = settled(job, 0, complete)
        device, (communicator,) = sample.device, sample.communicators
        assert device is not None
        (own,) = device.communicators
        assert (device.entry, device.interface, device.unmatched) == ("preload", 0, 0)
        assert (own.inside_address, own.rank, own.nranks) == (communicator.address, 0, 2)
        assert (own.operations, own.collectives) == (ITERATIONS, ITERATIONS)
        assert all(o.state is KernelState.FINISHED and o.duration_ns for o in own.recent)
        assert {o.function for o in own.recent} == {"AllReduce"}


def test_the_sampler_reads_what_nccl_keeps() -> None:
    """Counters of real connections by the shim, against the same words read from outside. All memory counts as the GPU's here."""
    env = plugin(LD_PRELOAD=str(build_driver()), STANDIN_CUDA_ALL="1")
    with Job("2.27.5", 2, iterations=ITERATIONS, hold=True, env=env) as job:
        for rank in range(2):
            job.wait_line(rank, f"iteration {ITERATIONS}")
        with TargetProcess.open(job.pid(0)) as target:

            class Looked:
                def counter_places(self) -> tuple[CounterPlace, ...]:
                    return counter_places(target.decoder, target.communicator_states, frozenset({Transport.NET}))

            watch = DeviceWatch(job.pid(0))
            try:
                for _ in range(100):
                    sample = watch.look(target.sample(), Looked())
                    assert sample.device is not None and not watch.problem
                    counters = sample.device.counters
                    if counters and all(counter.value is not None for counter in counters):
                        break
                    time.sleep(0.05)
                places = Looked().counter_places()
                outside = target.decoder.reader.read_many([(place.address, 8) for place in places])
                assert len(counters) == len(places) >= 4
                values = [int.from_bytes(data or b"", "little") for data in outside]
                assert [counter.value for counter in counters] == values and any(values)
                assert not any(counter.problem or counter.stale for counter in counters)
            finally:
                watch.close()


def test_a_plugin_that_is_not_there_does_not_matter() -> None:
    """A wrong path is NCCL's business: the job runs without the shim, and we say that it is not loaded."""
    with Job("2.27.5", 2, env={"NCCL_PROFILER_PLUGIN": "/nonexistent/libncclwatch_counters.so"}) as job:
        assert look(job, 0).device is None
