"""Windows of work requests on a load of known size: what bursts, an order and exact counting say of it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.errors import NcclwatchError
from ncclwatch.model.state import Direction
from ncclwatch.model.work import Counting, FlowWindow, Scope
from ncclwatch.wire.child import Service
from ncclwatch.wire.governor import Mode
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.orders import Order, Owner, Owners, Report
from ncclwatch.wire.session import VerbsUser, WireSession
from wire.standin import Load, load

pytestmark = [pytest.mark.attach, pytest.mark.quiet]

RATE, SIZE = 2_000, 65_536


def owned(job: Load, accounts: WireSession) -> Owners:
    """As a connection of rank 0 to rank 1 would own the load's one queue pair."""
    assert accounts.plane is not None
    keys = [account.key for account in accounts.plane.accounts()] or [
        (job.pid, context, 0) for context in accounts.plane.processes[job.pid].contexts
    ]
    return Owners(tuple(Owner(*key, 0xABCD, 0, 2, 1, Direction.SEND, 0) for key in keys))


def collect(service: Service, wanted: int, seconds: float = 60) -> list[FlowWindow]:
    found: list[FlowWindow] = []
    deadline = time.monotonic() + seconds
    while sum(window.scope is Scope.FLOW for window in found) < wanted and time.monotonic() < deadline:
        report = service.step()
        if report is not None:
            found += report.windows
        time.sleep(0.01)
    return found


def answered(service: Service, order: Order) -> Report:
    """What an order is answered with, which must not take longer than two seconds."""
    service.take(order)
    began = time.monotonic()
    report = service.step()
    took = time.monotonic() - began
    assert report is not None and took < 2.0
    return report


def test_bursts_tell_the_rate_that_the_load_has(wire_kernel: WireKernel, load_program: Path) -> None:
    with load(load_program, posts=100_000_000, rate=RATE, bytes=SIZE, busy=0) as job:
        session = WireSession(Mode.BURSTS, 0.5, kernel=wire_kernel)
        service = Service(session)
        try:
            session.start([VerbsUser(job.pid, None, 0, files=tuple(job.files))])
            job.begin()
            collect(service, 1)
            service.take(owned(job, session))
            found = collect(service, 12)
            bill = service.report().bill
        finally:
            session.close()
    flows = [window for window in found if window.scope is Scope.FLOW]
    assert len(flows) >= 12
    for window in flows:
        assert (window.pid, window.rank, window.peer, window.channel, window.role) == (job.pid, 0, 1, 2, "data")
        assert (window.device, window.port) == ("standin0", 1)
        work = window.work
        assert work.counting is Counting.BURSTS
        assert 0 < work.coverage < 1 and work.seen_s >= 0.002
        assert work.posted is not None and work.posted_bytes == work.posted * SIZE
        assert work.in_flight is not None and 0 <= work.in_flight <= work.posted
    for before, after in itertools.pairwise(flows):
        assert after.work.begin_ns == before.work.end_ns, "windows follow one another without a gap"
    seen = sum(window.work.seen_s for window in flows)
    rate = sum(window.work.posted_bytes for window in flows) / seen
    # The load sleeps between two posts: on a busy machine it may be late, never early.
    assert 0.5 * RATE * SIZE < rate <= 1.05 * RATE * SIZE
    last = flows[-1].work
    assert last.uncertainty is not None and last.uncertainty < 0.5
    # A burst in which the load got no CPU may see no request from its posting to its end.
    assert any(
        None not in (work.throughput, work.latency_p50_ns, work.latency_p99_ns) for work in (window.work for window in flows)
    )
    ports = [window for window in found if window.scope is Scope.PORT]
    peers = [window for window in found if window.scope is Scope.PEER]
    assert ports[-1].work.posted == peers[-1].work.posted == last.posted
    assert (peers[-1].rank, peers[-1].peer, ports[-1].device) == (0, 1, "standin0")
    assert bill is not None and bill.bursts >= 12 and bill.worst_share is not None and bill.budget == 0.5


def test_an_order_is_answered_at_once_and_billed_apart(wire_kernel: WireKernel, load_program: Path) -> None:
    with load(load_program, posts=100_000_000, rate=RATE, bytes=SIZE, busy=0) as job:
        session = WireSession(Mode.BURSTS, 0.000_001, kernel=wire_kernel)
        service = Service(session)
        try:
            session.start([VerbsUser(job.pid, None, 0, files=tuple(job.files))])
            job.begin()
            time.sleep(0.2)
            report = answered(service, Order(7, (job.pid,), seconds=0.1, share=0.9))
        finally:
            session.close()
    (window,) = [window for window in report.windows if window.scope is Scope.FLOW]
    assert (window.order, window.work.counting) == (7, Counting.ORDER)
    assert window.work.posted and window.work.seen_s >= 0.1
    assert window.work.polls, "it asks for the completions of what it posts"
    assert report.bill is not None
    assert (report.bill.bursts, report.bill.ordered, report.bill.worst_share) == (0, 1, 0.0)
    assert report.bill.ordered_s > 0


def test_of_a_process_that_posts_nothing_that_is_said(wire_kernel: WireKernel, load_program: Path) -> None:
    """A queue pair without a request has no account in the kernel; that nothing was posted was seen all the same."""
    with load(load_program, posts=10, rate=RATE) as job:
        session = WireSession(Mode.BURSTS, 0.000_001, kernel=wire_kernel)
        service = Service(session)
        try:
            session.start([VerbsUser(job.pid, None, 0, files=tuple(job.files))])
            service.take(owned(job, session))
            service.take(Order(1, (), seconds=0.05, share=0.9))
            report = service.step()
        finally:
            session.close()
    assert report is not None
    (window,) = [window for window in report.windows if window.scope is Scope.FLOW]
    assert (window.work.posted, window.work.completed, window.work.in_flight, window.work.posted_bytes) == (0, 0, 0, 0)
    assert window.work.seen_s >= 0.05 and window.work.throughput is None
    assert window.work.polls == 0, "nor does it ask for completions"


def test_exact_windows_add_up_to_everything(wire_kernel: WireKernel, load_program: Path) -> None:
    with load(load_program, posts=3_000, rate=2_000, bytes=SIZE) as job:
        session = WireSession(Mode.EXACT, kernel=wire_kernel)
        service = Service(session)
        try:
            session.start([VerbsUser(job.pid, None, 0, files=tuple(job.files))])
            service.begin_exact({job.pid})
            job.begin()
            expected = job.result()["qps"][0]
            service._next_exact = 0.0
            found = collect(service, 1)
        finally:
            session.close()
    flows = [window.work for window in found if window.scope is Scope.FLOW]
    assert sum(work.posted or 0 for work in flows) == expected["posted"]
    assert sum(work.completed or 0 for work in flows) == expected["signalled"]
    assert sum(work.completed_bytes for work in flows) == expected["posted"] * SIZE
    assert flows[-1].in_flight == 0
    assert flows[-1].coverage == 1.0 and flows[-1].uncertainty == 0.0


def exactly(kernel: WireKernel, job: Load) -> Service:
    """Every request of a load that is under way is counted from now on."""
    service = Service(WireSession(Mode.EXACT, kernel=kernel))
    service.session.start([VerbsUser(job.pid, None, 0, files=tuple(job.files))])
    job.begin()
    time.sleep(0.3)
    service.begin_exact({job.pid})
    return service


def test_exact_windows_of_a_job_under_way_have_latency_however_slowly_probes_come(
    wire_kernel: WireKernel, load_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is posted while probes come one by one must not wait for ever for a completion that nobody saw."""
    attach_one = wire_kernel._attach_one

    def slowly(site: Any) -> Any:
        time.sleep(0.05)
        return attach_one(site)

    monkeypatch.setattr(wire_kernel, "_attach_one", slowly)
    with load(load_program, posts=100_000_000, rate=RATE, bytes=SIZE, busy=0) as job:
        service = exactly(wire_kernel, job)
        try:
            flows = [window.work for window in collect(service, 2) if window.scope is Scope.FLOW]
        finally:
            service.session.close()
    for work in flows:
        assert work.counting is Counting.EXACT and work.coverage == 1.0 and work.seen_s > 1.9
        assert work.completed and work.latency_p50_ns and work.latency_p99_ns and work.throughput
        assert work.in_flight is not None and work.in_flight < 64, "no more than the load has in flight"
        # The load may be late on a busy machine, and is never early: what came before the window is not counted.
        assert 0 < work.posted_bytes / work.seen_s <= 1.05 * RATE * SIZE


def test_counting_exactly_an_order_is_answered_with_a_window_of_its_own(wire_kernel: WireKernel, load_program: Path) -> None:
    with load(load_program, posts=100_000_000, rate=RATE, bytes=SIZE, busy=0) as job:
        service = exactly(wire_kernel, job)
        try:
            time.sleep(0.2)
            report = answered(service, Order(9, (job.pid,), seconds=0.25, share=0.01))
        finally:
            service.session.close()
    before, ordered = (window for window in report.windows if window.scope is Scope.FLOW)
    assert (before.order, ordered.order) == (0, 9)
    assert ordered.work.counting is Counting.EXACT and ordered.work.posted and ordered.work.polls
    assert before.work.end_ns == ordered.work.begin_ns, "nothing went uncounted in between"
    assert 0.25 <= ordered.work.seen_s < 1.0 and ordered.work.coverage == 1.0


def test_a_failure_while_everything_is_counted_takes_no_probe_away(
    wire_kernel: WireKernel, load_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that went on without probes would say that nothing is posted any more."""
    with load(load_program, posts=100_000_000, rate=RATE, bytes=SIZE, busy=0) as job:
        service = exactly(wire_kernel, job)

        def fails() -> bool:
            raise NcclwatchError("a queue cannot be resolved", "")

        try:
            service._next_exact = 0.0
            with monkeypatch.context() as patch:
                patch.setattr(service.session, "step", fails)
                report = service.step()
            assert report is not None and "cannot be resolved" in report.reason and not report.windows
            service._next_exact = 0.0
            (work,) = [window.work for window in collect(service, 1) if window.scope is Scope.FLOW]
            assert work.posted and work.coverage == 1.0
            time.sleep(0.3)
            service._next_exact = 0.0
            (work,) = [window.work for window in collect(service, 1) if window.scope is Scope.FLOW]
            assert work.posted and work.counting is Counting.EXACT
        finally:
            service.session.close()
