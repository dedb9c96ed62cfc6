"""A training job over SoftRoCE whose network is disturbed: each fault shows in the job itself, and in what is said of it."""

from __future__ import annotations

import os
import statistics
import time

import pytest

from ncclwatch.nic.links import LinkMonitor
from ncclwatch.nic.rdma import read_port
from ncclwatch.wire.flows import FlowWatch
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.plane import WirePlane, monotonic_ns
from testbed.job import Job
from testbed.network_times import measure, spread
from vm.fabric import Fabric
from vm.guest import FULL_VARIABLE
from vm.hangs import watch
from vm.owners import connections_of
from vm.perftest import Processes, endless_writes, wait_for_posts

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(FULL_VARIABLE not in os.environ, reason=f"part of the full matrix: set {FULL_VARIABLE}"),
]

LAYOUT = ("--micro-batches", "1", "--layers", "1", "--forward-us", "1000", "--gradients", "32768", "--time")
RATE = 150e3
"""Bytes a second to which the wire is limited: a small part of what the emulated machine moves on a bad day, so that the wire
decides how long an iteration takes, which sends about as much."""


@pytest.mark.timeout(1200)
def test_limit_background_and_a_port_that_goes_down(verbs_kernel: WireKernel, soft_roce: Fabric) -> None:
    """Mycroft's injections 6, 2 and 1 on one job: NIC bandwidth, background traffic, NIC down."""
    with soft_roce.job("2.27.5", 2, shape="training", count=1024, extra=LAYOUT, start_timeout=200) as job:
        clean = measure(job, 12, timeout=120)
        least = statistics.median(clean) + 5 * spread(clean)
        try:
            soft_roce.limit(soft_roce.a, RATE)
            limited = measure(job, 4, timeout=200)
            assert statistics.mean(limited) > least, f"{limited} beside {clean}"
            crowded = measure_crowded(job, verbs_kernel, soft_roce)
            assert statistics.mean(crowded) > 1.3 * statistics.mean(limited), f"{crowded} beside {limited}"
        finally:
            soft_roce.limit(soft_roce.a, None)
        measure(job, 2, timeout=120)
        port_goes_down(job, soft_roce)


def measure_crowded(job: Job, kernel: WireKernel, fabric: Fabric) -> list[float]:
    """Iterations beside a perftest on the same port, which the accounts of the queue pairs tell from the job's own traffic."""
    with WirePlane(kernel, exact=True, always=True) as plane:
        for rank in range(2):
            plane.watch(job.pid(rank))

        def held(both: Processes) -> None:
            if both.client not in plane.processes:
                plane.watch(both.client)
            plane.handle_events()

        # Few requests at a time and a patient adapter: what waits in the limited port's queue is not to be sent again.
        with endless_writes(fabric, size=4096, options=("-Q", "1", "-t", "8", "-q", "4", "-u", "23"), held=held) as stranger:
            wait_for_posts(plane, stranger.client)
            times = measure(job, 3, timeout=300)
            plane.handle_events()
            accounts = [account for account in plane.accounts() if account.posted]
            owners, _ = connections_of(job)
            devices = {(account.pid, account.context): (plane.device_of(account), 1) for account in accounts}
            flows = FlowWatch().look(accounts, monotonic_ns(), exact=True, owners=owners, devices=devices)
    on_port = [flow for flow in flows if flow.device == fabric.a.device]
    assert {flow.pid for flow in on_port if flow.belongs_to_job} == {job.pid(0)}
    assert {flow.pid for flow in on_port if not flow.belongs_to_job} == {stranger.client}
    return times


def port_goes_down(job: Job, fabric: Fabric) -> None:
    """The job hangs; the port is told within a second, and nobody but the link or the rank behind the port is named."""
    with LinkMonitor() as monitor:
        before = monotonic_ns()
        fabric.set_down(fabric.b)
        try:
            (down,) = [event for event in monitor.events(timeout_s=1) if event.name == fabric.b.netdev]
            assert not down.up and before <= down.time_ns <= monotonic_ns()
            port = read_port(fabric.b.device)
            assert port is not None and port.state == "down"
            verdict, _ = watch(job.pids, 40, time.monotonic())
            assert verdict is not None
            progress = [job.progress(rank) for rank in range(2)]
            time.sleep(2)
            assert [job.progress(rank) for rank in range(2)] == progress, "the job was to hang"
        finally:
            fabric.set_up()
    said = f"{verdict.verdict_class}: {verdict.summary} {verdict.evidence}"
    # Hardware, or the error that NCCL reports once the adapter has given up.
    assert verdict.verdict_class in ("hardware", "error"), said
    assert {culprit.rank for culprit in verdict.culprits} <= {0, 1}, said
