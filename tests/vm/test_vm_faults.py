"""Faults of the wire under a running load: told with the right port."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from ncclwatch.nic.links import LinkMonitor
from ncclwatch.nic.rdma import read_port
from ncclwatch.wire.flows import Flow, FlowState, FlowWatch
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.plane import WirePlane, monotonic_ns
from vm.fabric import Fabric
from vm.perftest import Processes, endless_writes

pytestmark = pytest.mark.vm

TROUBLE = (FlowState.SLOW, FlowState.STALLED, FlowState.ERROR)


def test_a_wire_that_slows_down_and_then_goes_down(verbs_kernel: WireKernel, soft_roce: Fabric) -> None:
    """One load: half its rate is a slow wire on its port; a link that falls is heard of at once, and the flow over it stalls."""
    with WirePlane(verbs_kernel, always=True) as plane, LinkMonitor() as monitor:

        def held(processes: Processes) -> None:
            if processes.client not in plane.processes:
                plane.watch(processes.client)
            plane.handle_events()

        watch = Watch(plane)
        try:
            with endless_writes(soft_roce, held=held) as processes:
                clean = watch.until(lambda flow: flow.expected is not None and watch.looks > 20)
                assert clean.pid == processes.client
                assert clean.expected is not None
                assert [flow for flow in watch.seen if flow.state in TROUBLE] == []
                soft_roce.limit(soft_roce.a, clean.expected / 3)
                slow = watch.until(lambda flow: flow.state is FlowState.SLOW)
                assert slow.device == soft_roce.a.device
                assert slow.bandwidth is not None and slow.bandwidth < clean.expected * 0.8
                # SoftRoCE may keep to its retry timers for minutes after the limit is gone: whether it recovers is not ours.
                soft_roce.limit(soft_roce.a, None)
                monitor.events()
                before = monotonic_ns()
                soft_roce.set_down(soft_roce.b)
                (down,) = [event for event in monitor.events(timeout_s=1) if event.name == soft_roce.b.netdev]
                assert not down.up
                assert before <= down.time_ns <= monotonic_ns()
                stalled = watch.until(lambda flow: flow.state in (FlowState.STALLED, FlowState.ERROR))
                assert stalled.device == soft_roce.a.device
                assert stalled.in_flight > 0 or stalled.errors
                port = read_port(soft_roce.b.device)
                assert port is not None
                assert port.state == "down"
        finally:
            soft_roce.set_up()


class Watch:
    """Looks at the flows of a plane ten times a second."""

    def __init__(self, plane: WirePlane) -> None:
        self._plane = plane
        self._flows = FlowWatch()
        self.seen: list[Flow] = []
        self.looks = 0

    def until(self, holds: Callable[[Flow], bool], timeout: float = 60) -> Flow:
        """Look until that is so of a flow, and return it."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._plane.handle_events()
            accounts = [account for account in self._plane.accounts() if account.posted]
            devices = {(account.pid, account.context): (self._plane.device_of(account), 1) for account in accounts}
            found = self._flows.look(accounts, monotonic_ns(), exact=True, devices=devices)
            self.seen += found
            self.looks += 1
            for flow in found:
                if holds(flow):
                    return flow
            time.sleep(0.1)
        raise AssertionError(f"not within {timeout:g} s: {self.seen[-3:]}")
