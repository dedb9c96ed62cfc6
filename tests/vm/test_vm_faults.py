"""Faults of the link under a running load: told with the right port."""

from __future__ import annotations

import subprocess
import time

import pytest

from ncclwatch.nic.links import LinkMonitor
from ncclwatch.nic.rdma import read_port
from ncclwatch.wire.flows import Flow, FlowState, FlowWatch
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.plane import WirePlane, monotonic_ns
from vm.fabric import Fabric
from vm.perftest import Processes, run_perftest

pytestmark = pytest.mark.vm


def test_a_link_that_goes_down_under_load(verbs_kernel: WireKernel, soft_roce: Fabric) -> None:
    """The link's fall is heard of, the port is down, and the flow over it stalls and then fails."""
    flows: list[Flow] = []
    with WirePlane(verbs_kernel, always=True) as plane, LinkMonitor() as monitor:

        def held(processes: Processes) -> None:
            if processes.client not in plane.processes:
                plane.watch(processes.client)
            plane.handle_events()

        with pytest.raises((RuntimeError, subprocess.TimeoutExpired)):
            run_perftest(
                "ib_write_bw",
                soft_roce,
                size=65536,
                iterations=10_000_000,
                held=held,
                while_running=lambda: fail(plane, soft_roce, flows),
            )
        try:
            (down,) = [event for event in monitor.events(timeout_s=1) if event.name == soft_roce.b.netdev]
            assert not down.up
            port = read_port(soft_roce.b.device)
            assert port is not None
            assert port.state == "down"
        finally:
            soft_roce.set_up()
    assert flows
    assert flows[-1].device == soft_roce.a.device
    assert flows[-1].state in (FlowState.STALLED, FlowState.ERROR)
    assert flows[-1].in_flight > 0 or flows[-1].errors


def fail(plane: WirePlane, fabric: Fabric, flows: list[Flow]) -> None:
    """Take the link down and look at the flow until something is said about it."""
    watch = FlowWatch()
    deadline = time.monotonic() + 30
    down = False
    while time.monotonic() < deadline:
        accounts = [account for account in plane.accounts() if account.posted]
        devices = {(account.pid, account.context): (plane.device_of(account), 1) for account in accounts}
        found = watch.look(accounts, monotonic_ns(), exact=True, devices=devices)
        flows += found
        if down and any(flow.state in (FlowState.STALLED, FlowState.ERROR) for flow in found):
            return
        if not down and any(account.completed > 10 for account in accounts):
            fabric.set_down(fabric.b)
            down = True
        time.sleep(0.1)
