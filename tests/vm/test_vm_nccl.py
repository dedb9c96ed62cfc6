"""Real NCCL over its InfiniBand transport: each work request belongs to a flow, each flow to a channel and a peer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ncclwatch.model.state import Direction
from ncclwatch.target.session import TargetProcess
from ncclwatch.wire.flows import FlowState, FlowWatch, owners_by_key
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.nccl_queues import QueueOwner, queue_owners
from ncclwatch.wire.plane import WirePlane, monotonic_ns
from testbed.job import Job, available
from vm.fabric import Fabric

pytestmark = pytest.mark.vm

VERSION = "2.27.5"


@pytest.fixture(scope="module")
def job(soft_roce: Fabric) -> Iterator[Job]:
    if not available(VERSION):
        pytest.skip(f"NCCL {VERSION} is not in the cache")
    env = {"NCCL_IB_HCA": f"={soft_roce.a.device}", "NCCL_IB_GID_INDEX": str(soft_roce.a.gid_index), "NCCL_NET": "IB"}
    with Job(nccl=VERSION, ranks=2, shape="allreduce", transport="ib", count=1 << 18, env=env, start_timeout=200) as running:
        yield running


def owners_of(pid: int) -> tuple[list[QueueOwner], TargetProcess]:
    target = TargetProcess.open(pid)
    target.sample()
    found: list[QueueOwner] = []
    for state in target.communicator_states:
        found += queue_owners(target.decoder, state.record.hash, state.record.rank, state.connectors)
    return found, target


def test_every_flow_of_a_job_has_its_channel_and_peer(job: Job, verbs_kernel: WireKernel, soft_roce: Fabric) -> None:
    with WirePlane(verbs_kernel, exact=True) as plane:
        owners: dict[tuple[int, int, int], QueueOwner] = {}
        for rank in range(2):
            found, target = owners_of(job.pid(rank))
            with target:
                assert {owner.rank for owner in found} == {rank}
                assert {owner.peer for owner in found} == {1 - rank}
                assert {owner.direction for owner in found} == {Direction.SEND, Direction.RECV}
                assert len({owner.comm_hash for owner in found}) == 1
                process = plane.watch(job.pid(rank), target.layout, target.load_bias or 0)
            assert {context.found_by for context in process.contexts.values()} == {"nccl"}
            assert {context.device for context in process.contexts.values()} >= {soft_roce.a.device}
            owners |= owners_by_key(job.pid(rank), found)
        plane.attach()
        time.sleep(3)
        plane.detach()
        accounts = [account for account in plane.accounts() if account.posted]
        devices = {(account.pid, account.context): (plane.device_of(account), 1) for account in accounts}
        flows = FlowWatch().look(accounts, monotonic_ns(), exact=False, owners=owners, devices=devices)
    data = [flow for flow in flows if flow.role == "data"]
    control = [flow for flow in flows if flow.role == "control"]
    assert {(flow.rank, flow.peer, flow.direction) for flow in data} == {(0, 1, Direction.SEND), (1, 0, Direction.SEND)}
    # Receivers write where the sender may put the data: flows in the other direction.
    assert {flow.direction for flow in control} == {Direction.RECV}
    assert all(flow.device == soft_roce.a.device for flow in flows)
    assert all(flow.state is not FlowState.ERROR for flow in flows)
    # A ring of two: each rank sends as many bytes as it receives, on each channel.
    assert {flow.channel for flow in data if flow.rank == 0} == {flow.channel for flow in data if flow.rank == 1}
