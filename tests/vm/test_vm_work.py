"""Windows of work requests as ``attach`` has them, beside samples, of real NCCL over its InfiniBand transport: what they say is
what the collective must move, and with the collector every probe goes, however it ends."""

from __future__ import annotations

from typing import Any

import pytest

from testbed import work_checks
from testbed.job import Job, available
from vm.fabric import Fabric

pytestmark = [pytest.mark.vm, pytest.mark.long]

VERSION = "2.32.3"
COUNT = 1 << 16
"""Floats of one AllReduce: with two ranks each sends as many bytes as the buffer has."""
PAUSE_US = 50_000
"""Between two calls: ranks that wait spin, and leave nothing of an emulated machine to whoever counts."""


def job_of(soft_roce: Fabric, **options: Any) -> Job:
    if not available(VERSION):
        pytest.skip(f"NCCL {VERSION} is not in the cache")
    return soft_roce.job(VERSION, 2, count=COUNT, extra=("--time", "--pause-us", str(PAUSE_US)), **options)


def test_exact_windows_are_what_the_collective_must_move(soft_roce: Fabric) -> None:
    with job_of(soft_roce) as job:
        devices = (soft_roce.a.device, soft_roce.b.device)
        work_checks.exact_windows_are_what_must_move(work_checks.Moves(job, COUNT * 4), devices)


def test_every_request_is_counted_while_that_is_cheap(soft_roce: Fabric) -> None:
    with job_of(soft_roce) as job:
        work_checks.every_request_is_counted_while_that_is_cheap(work_checks.Moves(job, COUNT * 4))


def test_bursts_tell_rates_and_an_order_is_answered(soft_roce: Fabric) -> None:
    with job_of(soft_roce) as job:
        work_checks.bursts_tell_rates_and_an_order_is_answered(work_checks.Moves(job, COUNT * 4))


def test_a_collector_that_is_killed_leaves_no_probe_behind(soft_roce: Fabric) -> None:
    with job_of(soft_roce) as job:
        work_checks.a_killed_collector_leaves_no_probe_behind(job)


def test_what_goes_in_a_burst_leaves_no_probe_behind_and_nothing_unsaid(soft_roce: Fabric) -> None:
    try:
        # A long timeout of the adapter: no error of NCCL's is to end the ranks meanwhile.
        with job_of(soft_roce, env={"NCCL_IB_TIMEOUT": "22"}) as job:
            work_checks.what_goes_in_a_burst_is_answered_for(job, soft_roce.b.netdev, lambda: soft_roce.set_down(soft_roce.b))
    finally:
        soft_roce.set_up()
