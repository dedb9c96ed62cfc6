"""The simulation beside real NCCL, counter by counter: a rank that never enters an AllReduce, and what its peers' memory then
shows.
"""

from __future__ import annotations

import math
import time

import pytest

from ncclwatch.model.state import Direction, ProcessSample
from ncclwatch.simulate.disturbance import Disturbance
from ncclwatch.simulate.geometry import Paths, cut
from ncclwatch.simulate.scenario import Layout, Network
from ncclwatch.simulate.steps import StepNetwork, counters, run_group
from ncclwatch.target.session import TargetProcess
from testbed.job import VERSIONS, Job, available

RANKS, ABSENT = 4, 2
COUNT = 1 << 18
"""Small enough for the kernel to hold all that a rank can send ahead: how much more it takes depends on its tuning."""
Shown = dict[tuple[int, str], set[tuple[int | None, ...]]]
"""What each side of each rank shows; one value when all channels stand alike."""


FUNCTIONS = {"allreduce": "AllReduce", "allgather": "AllGather", "reducescatter": "ReduceScatter"}


def simulated(shape: str, fault: str, channels: int) -> Shown:
    """(nsteps, posted, received, transmitted, done, GPU ready) of each side of each rank, on one channel."""
    network = Network(intra_node="net", net="socket", channels=channels)
    function = FUNCTIONS[shape]
    whole = COUNT * 4 * (1 if shape == "allreduce" else RANKS)  # the program counts elements of one rank
    pieces = cut(network, function, RANKS, whole)
    started = [0.0] * RANKS
    started[ABSENT] = math.inf
    launched = started if fault == "pause" else [0.0] * RANKS
    steps = StepNetwork(Paths(Layout(dp=RANKS, ranks_per_node=1), network), Disturbance(), 1, 1e-6)
    trace = run_group(steps, function, range(RANKS), pieces, started, launched)
    shown: Shown = {}
    for rank in range(RANKS):
        if rank == ABSENT and fault == "pause":
            continue
        for end in trace.ends[rank]:
            c = counters(end, pieces.slice_steps, 0.0, 1e6)
            if c.done == pieces.steps:
                continue  # the proxy has dropped what is complete
            received = None if end.send else c.received  # NCCL leaves it stale on the sending side
            side = "send" if end.send else "recv"
            shown[rank, side] = {(pieces.steps, c.posted, received, c.transmitted, c.done, c.gpu_ready)}
    return shown


def real(samples: list[ProcessSample]) -> tuple[Shown, int]:
    """The same of the processes; and how many channels there are."""
    shown: Shown = {}
    channels = set()
    for rank, sample in enumerate(samples):
        for operation in sample.operations:
            for sub in operation.subs:
                channels.add(sub.channel)
                send = operation.direction is Direction.SEND
                received = None if send else sub.received
                value = (sub.nsteps, sub.posted, received, sub.transmitted, sub.done, sub.gpu_ready)
                shown.setdefault((rank, str(operation.direction)), set()).add(value)
    return shown, len(channels)


def look(pid: int) -> ProcessSample:
    with TargetProcess.open(pid) as target:
        return target.sample()


def compare(version: str, shape: str, fault: str) -> None:
    if not available(version):
        pytest.skip(f"NCCL {version} is not in the cache")
    text = f"{fault}:rank={ABSENT},at=3" + (",for=1,us=3.6e9" if fault == "pause" else "")
    with Job(version, RANKS, shape, "socket", count=COUNT, extra=["--fault", text]) as job:
        job.wait_line(ABSENT, f"fault {fault} begins")
        deadline = time.monotonic() + 60
        shown, channels = real([look(job.pid(rank)) for rank in range(RANKS)])
        # The others go on until they have come as far as they can.
        while not (channels and shown == simulated(shape, fault, channels)) and time.monotonic() < deadline:
            time.sleep(0.5)
            shown, channels = real([look(job.pid(rank)) for rank in range(RANKS)])
        assert shown == simulated(shape, fault, channels)


@pytest.mark.attach
@pytest.mark.parametrize("version", VERSIONS)
def test_the_counters_of_a_hung_all_reduce_are_those_of_the_simulation(version: str) -> None:
    compare(version, "allreduce", "pause")


@pytest.mark.attach
@pytest.mark.parametrize("fault", ["pause", "stall_gpu"])
@pytest.mark.parametrize("shape", list(FUNCTIONS))
def test_other_collectives_and_a_gpu_that_stands(shape: str, fault: str) -> None:
    compare("2.27.5", shape, fault)


def simulated_memory(shape: str, channels: int) -> dict[tuple[int, str], set[int]]:
    """Steps that lie unread in each ring connection in shared memory, at either end, where a rank's host never calls."""
    network = Network(intra_node="shm", net="socket", channels=channels)
    function = FUNCTIONS[shape]
    pieces = cut(network, function, RANKS, COUNT * 4 * (1 if shape == "allreduce" else RANKS))
    started = [0.0] * RANKS
    started[ABSENT] = math.inf
    steps = StepNetwork(Paths(Layout(dp=RANKS, ranks_per_node=RANKS), network), Disturbance(), 1, 1e-6)
    trace = run_group(steps, function, range(RANKS), pieces, started, started)
    shown: dict[tuple[int, str], set[int]] = {}
    for rank in range(RANKS):
        for end in trace.ends[rank]:
            unread = (len(end.connection.produced) - len(end.connection.consumed)) * pieces.slice_steps
            shown.setdefault((rank, "send" if end.send else "recv"), set()).add(unread)
    return shown


def real_memory(samples: list[ProcessSample]) -> tuple[dict[tuple[int, str], set[int]], int]:
    """The same of the processes, and how many channels there are."""
    shown: dict[tuple[int, str], set[int]] = {}
    channels = set()
    for rank, sample in enumerate(samples):
        for communicator in sample.communicators:
            rings = {ring.channel: ring for ring in communicator.rings}
            for conn in communicator.host_connections:
                ring = rings.get(conn.channel)
                if ring is None or conn.head is None or conn.tail is None or conn.connection_index:
                    continue
                if conn.peer == (ring.next if conn.direction is Direction.SEND else ring.prev):
                    channels.add(conn.channel)
                    shown.setdefault((rank, str(conn.direction)), set()).add(conn.tail - conn.head)
    return shown, len(channels)


@pytest.mark.attach
@pytest.mark.parametrize("shape", list(FUNCTIONS))
def test_what_lies_unread_in_shared_memory_is_what_the_simulation_says(shape: str) -> None:
    if not available("2.27.5"):
        pytest.skip("NCCL 2.27.5 is not in the cache")
    fault = f"pause:rank={ABSENT},at=3,for=1,us=3.6e9"
    with Job("2.27.5", RANKS, shape, "shm", count=COUNT, extra=["--fault", fault]) as job:
        job.wait_line(ABSENT, "fault pause begins")
        deadline = time.monotonic() + 30
        shown, channels = real_memory([look(job.pid(rank)) for rank in range(RANKS)])
        while not (channels and shown == simulated_memory(shape, channels)) and time.monotonic() < deadline:
            time.sleep(0.5)
            shown, channels = real_memory([look(job.pid(rank)) for rank in range(RANKS)])
        assert shown == simulated_memory(shape, channels)
        assert any(unread != {0} for unread in shown.values())
