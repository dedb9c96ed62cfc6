"""``flows`` on real NCCL over its InfiniBand transport: state, bursts of probes and ports put together, a line a flow; and a
port that goes down below an AllReduce is told."""

from __future__ import annotations

import os
import time

import pytest

from ncclwatch.cli.network_text import link_line
from ncclwatch.collect.flows import FlowCollector
from ncclwatch.collect.network import NetworkWatch
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, LinkChange, NetworkLook
from ncclwatch.target.session import TargetProcess
from ncclwatch.wire.governor import Mode
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.session import WireSession
from testbed.job import VERSIONS, available
from vm.fabric import Fabric
from vm.guest import FULL_VARIABLE

pytestmark = pytest.mark.vm

BUDGET = 0.2


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS if FULL_VARIABLE in os.environ else ["2.32.3"])
def test_a_line_for_every_connection_with_its_queue_pair(version: str, verbs_kernel: WireKernel, soft_roce: Fabric) -> None:
    if not available(version):
        pytest.skip(f"NCCL {version} is not in the cache")
    with soft_roce.job(version, 2, count=1 << 16, extra=("--pause-us", "50000")) as job:  # who waits spins
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
            pull_a_port(targets, soft_roce)
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


def pull_a_port(targets: list[TargetProcess], fabric: Fabric) -> None:
    """A port is switched off while ranks AllReduce over it: what ``attach`` watches the network with says so within a second,
    with the port and who uses it."""
    network = NetworkWatch("guest", kernel_log=False)
    try:
        deadline = time.monotonic() + 60
        while used_by(looked := network.look([target.sample() for target in targets]), fabric.b.device) != (1,):
            assert time.monotonic() < deadline, looked.nics
        fabric.set_down(fabric.b)
        down_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        told: list[LinkChange] = []
        while not told:
            told = [change for change in network.news().changes if change.name == fabric.b.netdev and not change.up]
            assert time.monotonic() < deadline + 10
        assert told[0].time_ns < down_ns + 1_000_000_000
        after = network.look([target.sample() for target in targets])
    finally:
        network.close()
        fabric.set_up()
    line = link_line(told[0], looked.nics)
    name = f"{fabric.b.device}:1"
    assert line == f"link {fabric.b.netdev} on guest is DOWN (switched off), and {name} with it; rank 1 uses it"
    (port,) = [nic for nic in after.nics if nic.name == name]
    assert (port.up, port.state.split()[0], port.used_by) == (False, "down", (1,))


def used_by(look: NetworkLook, device: str) -> tuple[int, ...]:
    return next((nic.used_by for nic in look.nics if nic.name == f"{device}:1"), ())


def complete(flows: list[FlowRecord]) -> bool:
    """Whether a send of either rank has been seen at work by both planes, and every send has its queue pair."""
    sends = [flow for flow in flows if flow.direction == "send" and flow.kind is FlowKind.RDMA]
    working = {
        flow.rank
        for flow in sends
        if flow.rdma is not None and flow.rdma.completed and flow.bandwidth and flow.steps is not None and flow.steps.changes
    }
    return working == {0, 1} and all(flow.rdma is not None for flow in sends)
