"""Reading real NCCL from outside: frozen ranks, every transport and shape of the testbed, processes that go away."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclwatch.errors import NcclwatchError, TargetError, TargetGoneError
from ncclwatch.model.state import Direction, OpPhase, ProcessSample, Transport
from ncclwatch.target.image import load_snapshot, record_snapshot
from ncclwatch.target.session import TargetProcess
from testbed.job import VERSIONS, Job, available, library

pytestmark = [pytest.mark.attach, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

WITHOUT_MAGICS = "2.19.3"
SETTLE_S = 30.0
"""Longest wait for the ranks that wait for a frozen one to have moved all they can."""


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    if not available(request.param):
        pytest.skip(f"NCCL {request.param} is not in the cache")
    return str(request.param)


@pytest.fixture
def frozen(version: str) -> Iterator[Job]:
    """Four ranks in AllReduce, each on its own host; rank 2 is stopped and the others have come to rest."""
    with Job(version, 4, "allreduce", "socket", count=1 << 20) as job:
        job.freeze(2)
        settle(job)
        yield job
        job.thaw(2)


def look(job: Job) -> list[ProcessSample]:
    samples = []
    for pid in job.pids:
        with TargetProcess.open(pid) as target:
            samples.append(target.sample())
    return samples


def settle(job: Job) -> None:
    """Wait until nothing moves any more: the same state three times in a row."""
    states: list[object] = []
    deadline = time.monotonic() + SETTLE_S
    while len(states) < 3 or states[-3:] != [states[-1]] * 3:
        assert time.monotonic() < deadline, "the job goes on although a rank is frozen"
        states.append([(s.communicators, s.operations, s.pending) for s in look(job)])
        time.sleep(0.2)


def subs(sample: ProcessSample, direction: Direction) -> dict[tuple[int, int], list[tuple[int, int, int, int, int]]]:
    """(channel, peer) → what runs there: absolute steps of the start, posted, received, transmitted and done."""
    found: dict[tuple[int, int], list[tuple[int, int, int, int, int]]] = {}
    for op in sample.operations:
        if op.direction is direction and op.phase is OpPhase.PROGRESS:
            for sub in op.subs:
                counters = (0, sub.posted, sub.received, sub.transmitted, sub.done)
                start, posted, received, transmitted, done = (sub.base + counter for counter in counters)
                found.setdefault((sub.channel, sub.peer), []).append((start, posted, received, transmitted, done))
    return found


def test_a_frozen_rank_and_its_neighbours(frozen: Job) -> None:
    samples = look(frozen)
    assert [sample.run_state == "T" for sample in samples] == [False, False, True, False]
    assert [sample.process.rank for sample in samples] == [0, 1, 2, 3]
    assert len({sample.communicators[0].hash for sample in samples}) == 1
    for rank, sample in enumerate(samples):
        (comm,) = sample.communicators
        assert (comm.rank, comm.nranks, comm.nnodes, comm.init_state, comm.aborted) == (rank, 4, 4, "ncclSuccess", False)
        assert all((ring.prev, ring.next) == ((rank - 1) % 4, (rank + 1) % 4) for ring in comm.rings)
        assert {transport for *_, transport in comm.transports} == {Transport.NET}
        assert sample.torn == 0
        assert not sample.truncated
        assert not sample.unavailable
        for op in sample.operations:
            assert (op.comm_hash, op.transport, op.net_name) == (comm.hash, Transport.NET, "Socket")
            assert (op.collective, op.protocol, op.algorithm) == ("AllReduce", "Simple", "Ring")
            assert all((sub.rank, sub.net_device, sub.net_device_name) == (rank, 0, "lo") for sub in op.subs)
    # The rank behind the frozen one waits for it: credit given, nothing arrived.
    waiting = subs(samples[3], Direction.RECV)
    assert waiting
    assert all(peer == 2 and posted > received for (_, peer), runs in waiting.items() for _, posted, received, _, _ in runs)
    # Nobody has received more than the other end of the connection has handed to the network.
    for rank, sample in enumerate(samples):
        before = samples[(rank - 1) % 4]
        sends = subs(before, Direction.SEND)
        for (channel, peer), runs in subs(sample, Direction.RECV).items():
            assert peer == (rank - 1) % 4
            for _, _, received, _, _ in runs:
                for _, _, _, transmitted, _ in sends.get((channel, rank), []):
                    assert received <= transmitted


def test_what_is_still_stays_still_and_a_snapshot_shows_the_same(frozen: Job, tmp_path: Path) -> None:
    path = tmp_path / "hung.ncw"
    began = time.monotonic_ns()
    record_snapshot(frozen.pids, path, samples=2, interval=0.2)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size < 200_000
    recorded = load_snapshot(path)
    assert [len(samples) for samples in recorded] == [2] * 4
    for live, (first, second) in zip(look(frozen), recorded, strict=True):
        for sample in (first, second):
            assert sample.process.key == live.process.key
            assert sample.communicators == live.communicators
            assert sample.operations == live.operations
            assert sample.pending == live.pending
            assert (sample.run_state == "T") == (live.run_state == "T")
            assert sample.torn == 0
        # A process that is read late in the first round may have less than the interval between its samples.
        assert second.time_ns > first.time_ns > began
        assert second.time_ns >= began + 200_000_000


@pytest.mark.parametrize("shape", ["allreduce", "alltoall", "pipeline"])
def test_a_running_job_is_read_without_garbage(version: str, shape: str) -> None:
    with Job(version, 4, shape, "socket", count=1 << 16) as job:
        targets = [TargetProcess.open(pid) for pid in job.pids]
        moved: dict[int, set[int]] = {rank: set() for rank in range(4)}
        for _ in range(40):
            for rank, target in enumerate(targets):
                sample = target.sample()
                (comm,) = sample.communicators
                assert (comm.rank, comm.nranks) == (rank, 4)
                moved[rank].add(comm.op_count or 0)
                for op in sample.operations:
                    assert op.comm_hash == comm.hash
                    assert op.transport is Transport.NET
                    for sub in op.subs:
                        assert 0 <= sub.peer < 4
                        assert sub.peer != rank
                        assert sub.done <= sub.transmitted <= sub.posted <= sub.nsteps + op.slice_steps
                        assert op.phase is OpPhase.PROGRESS or (sub.base, sub.posted, sub.done) == (0, 0, 0)
            time.sleep(0.02)
        for target in targets:
            target.close()
    assert all(len(counts) > 1 for counts in moved.values())


def test_shared_memory_shows_head_and_tail(version: str) -> None:
    with Job(version, 3, "allreduce", "shm", count=1 << 20) as job, TargetProcess.open(job.pid(1)) as target:
        first = target.sample()
        job.wait_progress(2)
        second = target.sample()
        job.freeze(0)
        settle(job)
        still = [target.sample(), target.sample()]
        with TargetProcess.open(job.pid(2)) as neighbour:
            other_end = {
                (c.channel, c.peer): c for c in neighbour.sample().communicators[0].host_connections if c.direction == "recv"
            }
    for sample in (first, second, *still):
        (comm,) = sample.communicators
        assert sample.operations == ()
        assert {transport for *_, transport in comm.transports} == {Transport.SHM}
        assert all(c.head is not None and c.tail is not None and c.head <= c.tail for c in comm.host_connections)
    neighbours = {"send": 2, "recv": 0}
    ring = {c.direction for c in second.communicators[0].host_connections if c.peer == neighbours[c.direction]}
    assert ring == {"send", "recv"}
    assert first.communicators[0].host_connections != second.communicators[0].host_connections
    assert still[0].communicators[0].host_connections == still[1].communicators[0].host_connections
    for c in still[1].communicators[0].host_connections:
        if c.direction == "send" and (c.channel, 1) in other_end and c.peer == 2:
            assert (c.head, c.tail) == (other_end[c.channel, 1].head, other_end[c.channel, 1].tail)


def test_hosts_of_three_and_one(version: str) -> None:
    with Job(version, 4, "allreduce", "mixed", hosts=(3, 1), count=1 << 20) as job:
        job.freeze(3)
        settle(job)
        samples = look(job)
        job.thaw(3)
    kinds = [{transport for *_, transport in sample.communicators[0].transports} for sample in samples]
    assert kinds[1] == {Transport.SHM}
    assert kinds[3] == {Transport.NET}
    assert {sample.communicators[0].nnodes for sample in samples} == {2}
    assert [sample.communicators[0].local_ranks for sample in samples] == [3, 3, 3, 1]
    hosts = [peer.host_hash for peer in samples[0].communicators[0].peers]
    assert hosts[0] == hosts[1] == hosts[2] != hosts[3]
    assert samples[1].operations == ()
    senders = [rank for rank in range(3) if subs(samples[rank], Direction.SEND)]
    receivers = [rank for rank in range(3) if subs(samples[rank], Direction.RECV)]
    assert len(senders) <= 1
    assert len(receivers) <= 1
    assert senders or receivers


def test_point_to_point(version: str) -> None:
    with Job(version, 3, "sendrecv", "socket", count=1 << 20) as job:
        job.freeze(1)
        settle(job)
        samples = look(job)
        job.thaw(1)
    waiting = [op for op in samples[2].operations if op.direction is Direction.RECV]
    assert waiting
    for op in waiting:
        assert op.is_point_to_point
        assert op.pattern == "Recv"
        assert {sub.peer for sub in op.subs} == {1}


def test_split_communicators_are_told_apart(version: str) -> None:
    with Job(version, 4, "split", "socket", count=1 << 18) as job:
        samples = look(job)
    for rank, sample in enumerate(samples):
        assert len(sample.communicators) >= 3
        world = max(sample.communicators, key=lambda comm: comm.nranks)
        assert (world.rank, world.nranks) == (rank, 4)
        assert len({comm.address for comm in sample.communicators}) == len(sample.communicators)
        known = {comm.hash for comm in sample.communicators}
        for op in sample.operations:
            assert op.comm_hash in known


def test_split_communicators_that_share_a_proxy(version: str) -> None:
    with Job(version, 4, "split", "socket", count=1 << 18, env={"NCCL_COMM_SPLIT_SHARE_RESOURCES": "1"}) as job:
        samples = look(job)
    for sample in samples:
        assert all(comm.shares_resources for comm in sample.communicators)
        assert len({comm.parent_hash for comm in sample.communicators if comm.parent_hash is not None}) == 1
        assert len({op.address for op in sample.operations}) == len(sample.operations), "one proxy, read once"
        known = {comm.hash for comm in sample.communicators}
        assert all(op.comm_hash in known or set(op.owners) <= known for op in sample.operations)


@pytest.mark.parametrize("ras", ["0", "1"])
def test_found_through_ras_or_without(version: str, ras: str) -> None:
    with Job(version, 2, "multicomm", "socket", env={"NCCL_RAS_ENABLE": ras}) as job, TargetProcess.open(job.pid(0)) as target:
        sample = target.sample()
        assert len(sample.communicators) == 3
        finders = {comm.finder for comm in sample.communicators}
        if ras == "1" and target.layout.symbols.get("ncclComms"):
            assert finders == {"kept-by-nccl"}
        # Looking through all memory finds no more and no fewer.
        target.search(60.0, everything=True)
        assert target.search_report.complete
        assert [comm.address for comm in target.sample().communicators] == [comm.address for comm in sample.communicators]


def test_communicators_without_magics() -> None:
    if not available(WITHOUT_MAGICS):
        pytest.skip(f"NCCL {WITHOUT_MAGICS} is not in the cache")
    with Job(WITHOUT_MAGICS, 3, "idle", "socket", wait_for="ready") as job:
        samples = look(job)
    assert len({sample.communicators[0].hash for sample in samples}) == 1
    for rank, sample in enumerate(samples):
        assert sample.process.version == (2, 19, 3)
        (comm,) = sample.communicators
        assert (comm.rank, comm.nranks, comm.finder, comm.init_state) == (rank, 3, "invariants", "ncclSuccess")
        assert [(ring.prev, ring.next) for ring in comm.rings][:1] == [((rank - 1) % 3, (rank + 1) % 3)]


# -- processes that go away ------------------------------------------------------------------------------------------------------


def test_a_killed_target_is_one_clear_error(version: str) -> None:
    """Killed at a random moment of sampling: whatever was read before was sane, and then one error with one line."""
    with Job(version, 2, "allreduce", "socket", count=1 << 16) as job, TargetProcess.open(job.pid(1)) as target:
        killer = threading.Timer(0.3, job.kill, (1,))
        killer.start()
        with pytest.raises(TargetGoneError) as caught:
            while True:
                for comm in target.sample().communicators:
                    assert (comm.rank, comm.nranks) == (1, 2)
        killer.join()
    assert "\n" not in str(caught.value)


RELOADS = """
import ctypes, os, sys, time
ctypes.CDLL(sys.argv[1])
time.sleep(0.05)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], *sys.argv[1:]])
"""


def test_exec_in_a_loop_is_never_mistaken_for_the_target(version: str) -> None:
    """A process that loads NCCL and replaces itself, again and again: opening and sampling give the truth or one clear error."""
    process = subprocess.Popen([sys.executable, "-c", RELOADS, str(library(version)), RELOADS])
    opened = lost = 0
    try:
        deadline = time.monotonic() + 60
        while lost < 5:
            assert time.monotonic() < deadline, (opened, lost)
            try:
                target = TargetProcess.open(process.pid)
            except NcclwatchError as error:
                assert "\n" not in str(error)
                continue
            opened += 1
            with target, pytest.raises(TargetGoneError):
                while True:
                    assert target.sample().communicators == ()
            lost += 1
    finally:
        process.kill()
        process.wait()
    assert opened == lost


def test_a_target_that_becomes_another_program() -> None:
    """The program execs while it is sampled; the pid stays, the address space does not."""
    version = next(iter(v for v in VERSIONS if available(v)), None)
    if version is None:
        pytest.skip("no NCCL in the cache")
    with Job(version, 2, "allreduce", "socket", count=1 << 16, wrap=["sh", "-c", '"$@"; exec sleep 60', "sh"]) as job:
        children = Path(f"/proc/{job.pid(0)}/task/{job.pid(0)}/children").read_text().split()
        with pytest.raises(TargetError):
            TargetProcess.open(job.pid(0))
        with TargetProcess.open(int(children[0])) as target:
            assert target.sample().communicators


def test_a_communicator_made_later_is_found(version: str) -> None:
    """The target is opened while it has one communicator or none; the others appear in later samples, without RAS and without
    a hint.
    """
    environment = {"NCCL_RAS_ENABLE": "0"}
    with Job(version, 2, "multicomm", "socket", env=environment, wait_for="nothing") as job:
        target = None
        deadline = time.monotonic() + 60
        while target is None:
            assert time.monotonic() < deadline
            try:
                target = TargetProcess.open(job.pid(0))
            except NcclwatchError:
                time.sleep(0.05)
        counts: list[int] = []
        while not counts or counts[-1] < 3:
            assert time.monotonic() < deadline, counts
            counts.append(len(target.sample().communicators))
            time.sleep(0.2)
        assert counts == sorted(counts)
        target.close()
