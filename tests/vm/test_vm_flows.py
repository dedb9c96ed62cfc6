"""``flows`` on real NCCL over its InfiniBand transport: state, bursts of probes and ports put together, a line a flow."""

from __future__ import annotations

import time

import pytest

from ncclwatch.collect.flows import FlowCollector
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState
from ncclwatch.target.session import TargetProcess
from ncclwatch.wire.governor import Mode
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.session import WireSession
from testbed.job import available
from vm.fabric import Fabric

pytestmark = pytest.mark.vm

NCCL = "2.27.5"
BUDGET = 0.2


def test_a_line_for_every_connection_with_its_queue_pair(verbs_kernel: WireKernel, soft_roce: Fabric) -> None:
    if not available(NCCL):
        pytest.skip(f"NCCL {NCCL} is not in the cache")
    with soft_roce.job(NCCL, 2, count=1 << 16) as job:
        pids = list(job.pids)
        targets = [TargetProcess.open(pid) for pid in pids]
        wire = WireSession(Mode.BURSTS, BUDGET, kernel=verbs_kernel)
        try:
            collector = FlowCollector(targets, wire)
            collector.step()
            wire.start(collector.users())
            assert wire.running, wire.reason
            assert wire.reasons == dict.fromkeys(pids, "")
            found: list[FlowRecord] = []
            deadline = time.monotonic() + 200
            while not complete(found) and time.monotonic() < deadline:
                collector.step()
                found = collector.flows()
                time.sleep(0.02)
            worst = wire.worst()
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        finally:
            wire.close()
            for target in targets:
                target.close()
    assert complete(found), found
    devices = {pids[0]: soft_roce.a.device, pids[1]: soft_roce.b.device}
    for flow in found:
        assert (flow.network, flow.device, flow.port) == ("IB", devices[flow.pid], 1)
        assert flow.peer == 1 - (flow.rank or 0)
        assert flow.state in (FlowState.ACTIVE, FlowState.IDLE, FlowState.SLOW), flow
        assert flow.rdma is not None and not flow.rdma.exact and not flow.rdma.errors
    # No thread has paid more than it was told, in an emulated machine too.
    assert worst is not None and worst.share(now) <= BUDGET


def complete(flows: list[FlowRecord]) -> bool:
    """Whether a send of either rank has been seen at work by both planes, and every send has its queue pair."""
    sends = [flow for flow in flows if flow.direction == "send" and flow.kind is FlowKind.RDMA]
    working = {
        flow.rank
        for flow in sends
        if flow.rdma is not None and flow.rdma.completed and flow.bandwidth and flow.steps is not None and flow.steps.changes
    }
    return working == {0, 1} and all(flow.rdma is not None for flow in sends)
