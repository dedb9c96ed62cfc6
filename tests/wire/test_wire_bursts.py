"""Bursts on a thread that polls without pause: they see its rate, are billed, and leave nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ncclwatch.probes.sites import CostClass
from ncclwatch.wire.bursts import Bursts
from ncclwatch.wire.governor import Governor, hits_by_thread, measure_costs
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.plane import WirePlane
from wire.standin import load

pytestmark = pytest.mark.attach


def test_a_hit_costs_something_and_single_steps_cost_more(wire_kernel: WireKernel) -> None:
    costs = measure_costs(wire_kernel)
    assert 0 < costs[CostClass.EMULATED].entry_ns < costs[CostClass.SINGLE_STEPPED].entry_ns
    assert costs[CostClass.EMULATED].return_ns > 0


def test_a_burst_on_a_busy_polling_thread(wire_kernel: WireKernel, load_program: Path) -> None:
    with load(load_program, posts=100_000_000, rate=20_000) as job, WirePlane(wire_kernel) as plane:
        plane.watch(job.pid, files=job.files)
        bursts = Bursts(plane, Governor(measure_costs(wire_kernel)))
        job.begin()
        accounts = None
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (accounts and accounts[0].bandwidth() is not None):
            accounts = bursts.step() or accounts
            time.sleep(0.005)
        assert accounts is not None
        assert [account.pid for account in accounts] == [job.pid]
        assert accounts[0].bandwidth() is not None
        assert not bursts.governor.attached
        worst = bursts.governor.worst(time.clock_gettime_ns(time.CLOCK_MONOTONIC))
        assert worst is not None and (worst.pid, worst.tid) == (job.pid, job.pid)
        # Detached means detached: millions of polls later the count is still the same.
        hits = hits_by_thread(wire_kernel, {job.pid})
        time.sleep(0.2)
        assert hits_by_thread(wire_kernel, {job.pid}) == hits


def test_a_process_without_verbs_is_unavailable_with_a_reason(wire_kernel: WireKernel, load_program: Path) -> None:
    with load(load_program) as job, WirePlane(wire_kernel) as plane:
        process = plane.watch(job.pid)
        assert process.sites == {}
        assert "has not loaded libibverbs" in process.unavailable
