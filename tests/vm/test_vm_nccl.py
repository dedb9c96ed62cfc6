"""Real NCCL over its InfiniBand transport: each work request belongs to a flow, each flow to a channel and a peer."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable

import pytest

from ncclwatch.model.state import Direction
from ncclwatch.wire.accounts import QueuePairAccount
from ncclwatch.wire.flows import Flow, FlowState, FlowWatch
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.nccl_queues import QueueOwner
from ncclwatch.wire.plane import WirePlane, monotonic_ns
from testbed.job import VERSIONS, Job, available
from vm.fabric import Fabric
from vm.guest import FULL_VARIABLE
from vm.owners import connections_of
from vm.perftest import endless_writes, wait_for_posts

pytestmark = pytest.mark.vm

RANKS = 2
COUNT = 1 << 18
ITERATIONS = 3
STRANGER = ("-Q", "1", "-t", "2")
"""Options of somebody else's traffic: two small requests at a time, for the job is to have the most of the emulated machine."""
SLICE_STEPS = 2
"""Steps that one send of the Simple ring moves (ALLREDUCE_SLICESTEPS, ``src/include/device.h``: NCCL_STEPS / 4)."""


@pytest.mark.parametrize("version", VERSIONS if FULL_VARIABLE in os.environ else ["2.21.5"])
def test_requests_and_bytes_are_what_the_collective_must_move(version: str, verbs_kernel: WireKernel, soft_roce: Fabric) -> None:
    """From the first request on, for a known number of AllReduces: what a ring moves, and nothing else (not a retransmission,
    not a request of another connection), is in the accounts; each belongs to a channel and a peer. Traffic of somebody else over
    the same port is told from it."""
    if not available(version):
        pytest.skip(f"NCCL {version} is not in the cache")
    # Connections are made with the communicator, and the first operation a while after that, so that no request is missed.
    extra = ("--gate", "--pause-us", "1500000", "--time")
    job = soft_roce.job(
        version, RANKS, count=COUNT, iterations=ITERATIONS, hold=True, extra=extra, env={"NCCL_RUNTIME_CONNECT": "0"},
        wait_for="nothing",
    )  # fmt: skip
    with WirePlane(verbs_kernel, exact=True, always=True) as plane, job:
        for rank in range(RANKS):
            job.wait_line(rank, "waits at the gate", timeout=120)
        plane.follow_everyone()
        with endless_writes(soft_roce, size=4096, options=STRANGER) as stranger:
            wait_for_posts(plane, stranger.client)
            job.log_path(0).with_name("gate").touch()
            finish(job, plane)
            everything = [account for account in plane.accounts() if account.posted]
        accounts = [account for account in everything if account.pid in job.pids]
        owners, steps = connections_of(job)
        flows = flows_of(plane, accounts, owners)
        others = [flow for flow in flows_of(plane, everything, owners) if not flow.belongs_to_job]
    assert {(flow.pid, flow.device) for flow in others} == {(stranger.client, soft_roce.a.device)}
    assert {(flow.rank, flow.peer, flow.direction) for flow in flows if flow.role == "data"} == {
        (0, 1, Direction.SEND),
        (1, 0, Direction.SEND),
    }
    # Receivers write where the sender may put the data: flows of the other direction.
    assert {flow.direction for flow in flows if flow.role == "control"} == {Direction.RECV}
    assert all(flow.belongs_to_job and flow.state is not FlowState.ERROR for flow in flows), flows
    assert {(flow.rank, flow.device) for flow in flows} == {(0, soft_roce.a.device), (1, soft_roce.b.device)}
    moved: Counter[int | None] = Counter()
    for account in accounts:
        owner = owners[account.key]
        step = steps[account.pid, owner.channel, owner.peer, owner.direction]
        assert step % SLICE_STEPS == 0
        assert account.posted == step // SLICE_STEPS, f"{account.role()} {owner}"
        assert (account.unmatched, account.skipped, account.errors, account.in_flight) == (0, 0, 0, 0)
        if owner.direction is Direction.SEND:
            moved[owner.rank] += sum(size for _, size in account.opcodes.values())
            assert account.retired_bytes == sum(size for _, size in account.opcodes.values())
    # A ring of n ranks sends 2 (n - 1) / n of the buffer from each rank, whatever the channels.
    assert moved == dict.fromkeys(range(RANKS), ITERATIONS * COUNT * 4 * 2 * (RANKS - 1) // RANKS)


def finish(job: Job, plane: WirePlane, timeout: float = 200) -> None:
    """Let the job do its iterations, taking in queue pairs as they are made."""
    deadline = time.monotonic() + timeout
    while any(job.progress(rank) < ITERATIONS for rank in range(RANKS)):
        plane.handle_events()
        assert time.monotonic() < deadline and all(map(job.alive, range(RANKS))), job.logs()
        time.sleep(0.01)


def flows_of(
    plane: WirePlane, accounts: Iterable[QueuePairAccount], owners: dict[tuple[int, int, int], QueueOwner]
) -> list[Flow]:
    known = list(accounts)
    devices = {(account.pid, account.context): (plane.device_of(account), 1) for account in known}
    return FlowWatch().look(known, monotonic_ns(), exact=True, owners=owners, devices=devices)
