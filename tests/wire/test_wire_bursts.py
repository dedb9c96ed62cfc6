"""Bursts on a thread that polls without pause: they see its rate, are billed, and leave nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ncclwatch.model.network import FlowState
from ncclwatch.probes.instructions import CostClass
from ncclwatch.wire.bursts import Bursts
from ncclwatch.wire.governor import Governor, Mode
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.plane import WirePlane
from ncclwatch.wire.prices import hits_by_thread, measure_costs
from ncclwatch.wire.session import VerbsUser, WireSession
from wire.standin import load, load_under

pytestmark = [pytest.mark.attach, pytest.mark.quiet]


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


def test_a_process_in_a_pid_namespace_of_its_own(wire_kernel: WireKernel, load_program: Path) -> None:
    """As in a container: it is pid 1 to itself, and has another number here."""
    wrap = ("unshare", "--pid", "--fork", "--kill-child")
    with load_under(wrap, load_program, posts=307, chain=2) as job, WirePlane(wire_kernel, exact=True) as plane:
        assert Path(f"/proc/{job.pid}/status").read_text().split("NSpid:")[1].split()[:2] == [str(job.pid), "1"]
        plane.watch(job.pid, files=job.files)
        plane.attach()
        job.begin()
        expected = job.result()["qps"][0]
        (account,) = plane.accounts()
        assert (account.pid, account.posted, account.completed) == (job.pid, expected["posted"], expected["signalled"])
        assert sum(hits_by_thread(wire_kernel, {job.pid}).values()) > 307


def test_a_session_of_processes_some_of_which_use_rdma(wire_kernel: WireKernel, load_program: Path) -> None:
    with load(load_program, posts=100_000_000, rate=20_000) as job, load(load_program) as other:
        session = WireSession(Mode.BURSTS, 0.02, kernel=wire_kernel)
        try:
            session.start([VerbsUser(job.pid, None, 0, files=tuple(job.files)), VerbsUser(other.pid, None, 0, ("Socket",))])
            assert session.running and session.reason == ""
            assert session.reasons == {job.pid: "", other.pid: "NCCL uses TCP sockets here, not RDMA"}
            assert 0 < session.first_burst_s() < 1
            job.begin()
            deadline = time.monotonic() + 60
            flow = None
            while not (flow and flow.completed) and time.monotonic() < deadline:
                if session.step():
                    flow = next(iter(session.flows({}, {})), None)
                time.sleep(0.01)
            assert flow is not None
            assert (flow.pid, flow.device, flow.port, flow.exact) == (job.pid, "standin0", 1, False)
            assert flow.completed > 0 and flow.comm_hash is None
            assert flow.state in (FlowState.ACTIVE, FlowState.IDLE)
            worst, now = session.worst(), time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            # On a machine too busy to end a burst in time it may cost more than planned: then the next one waits for it.
            assert worst is not None and session.bursts is not None
            assert worst.share(now) <= 0.02 or not session.bursts.governor.due(now)
            assert "of its time (budget 2.000%)" in session.report()
        finally:
            session.close()


def test_exact_counting_tells_its_price_before_it_begins(wire_kernel: WireKernel, load_program: Path) -> None:
    with load(load_program, posts=5_003) as job:
        session = WireSession(Mode.EXACT, kernel=wire_kernel)
        try:
            session.start([VerbsUser(job.pid, None, 0, files=tuple(job.files))])
            price = session.trial()
            assert "a probed call costs" in price and "in a trial of 2 ms" in price
            assert session.plane is not None and not any(process.attached for process in session.plane.processes.values())
            session.begin_exact()
            job.begin()
            expected = job.result()["qps"][0]
            assert session.step()
            (flow,) = session.flows({}, {})
            assert (flow.posted, flow.completed, flow.in_flight, flow.exact) == (
                expected["posted"],
                expected["signalled"],
                0,
                True,
            )
        finally:
            session.close()
