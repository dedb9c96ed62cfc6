"""The wire plane in a process of its own: ``python -m ncclwatch.wire.child BUDGET MODE``.

Bursts are timed by the millisecond and hurry; finding devices and queue pairs reads much memory. Here neither holds up a sample
of who collects. It does what it is told on standard input and answers on standard output (:mod:`ncclwatch.wire.orders`). It ends
at once when its input closes: who started it is gone, and its probes, which are descriptors of this process, go with it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ncclwatch.errors import NcclwatchError
from ncclwatch.model.work import Counting, FlowWindow, Scope
from ncclwatch.target.binary import NcclBinary
from ncclwatch.target.discover import examine, layout_of
from ncclwatch.target.layout import Layout
from ncclwatch.wire import orders
from ncclwatch.wire.bursts import MAX_ORDER_S, WINDOW_S
from ncclwatch.wire.governor import MIN_BURST_S, Mode
from ncclwatch.wire.orders import Bill, Follow, Order, Owner, Owners, Report, User
from ncclwatch.wire.plane import monotonic_ns
from ncclwatch.wire.session import VerbsUser, WireSession
from ncclwatch.wire.windows import QpKey, WorkWindows

STEP_S = 0.25
"""How long nothing is looked at while nothing is due."""
IDLE_STEPS = 4
"""Steps with nothing to do before the memory of a process is searched: whoever asks at the beginning is answered first."""
TELL_EVERY_S = 5.0
"""How often the bill is told where nothing else is."""
MOST_WORDS = 300


@dataclass(slots=True)
class Service:
    """A wire session that follows orders. ``answer`` sends a report."""

    session: WireSession
    windows: WorkWindows = field(default_factory=WorkWindows)
    owners: dict[QpKey, Owner] = field(default_factory=dict)
    waiting: list[Order] = field(default_factory=list)
    """Orders that are still to be carried out."""
    _next_exact: float = 0.0
    _own: tuple[int, int] = (0, 0)

    def take(self, message: object) -> None:
        """Do what one message says; bursts that it orders come with :meth:`step`."""
        if isinstance(message, Follow):
            self._follow(message.users)
        elif isinstance(message, Owners):
            self.owners = {owner.key: owner for owner in message.owners}
        elif isinstance(message, Order):
            self.waiting.append(message)

    def _follow(self, users: Iterable[User]) -> None:
        wanted = {user.pid: user for user in users}
        known = set(self.session.reasons)
        for pid in known - wanted.keys():
            self.session.drop(pid)
            self.windows.forget(pid)
        fresh = [_verbs_user(user) for pid, user in wanted.items() if pid not in known]
        if fresh:
            # Where every request is to be counted all functions are probed from the beginning; else an order need not wait for
            # those that NCCL does not use.
            self.session.start(fresh, quick=self.session.mode is not Mode.EXACT)
            if self.session.mode is Mode.EXACT and self.session.running:
                self.begin_exact({user.pid for user in fresh})

    def begin_exact(self, pids: set[int]) -> None:
        """Every request of these processes is counted from now on. What their accounts hold came while probes did."""
        self.session.begin_exact()
        self.session.step()
        self.windows.begin(self.session.accounts, self.session.counted & pids, monotonic_ns(), self.session.polls())
        self._next_exact = time.monotonic() + WINDOW_S

    def step(self) -> Report | None:
        """Carry out an order or run a burst, if one is due; what came of it."""
        session = self.session
        if session.plane is None or session.bursts is None:
            self.waiting.clear()
            return None
        try:
            if self.waiting:
                return self._ordered(self.waiting.pop(0))
            if session.mode is Mode.EXACT:
                if time.monotonic() < self._next_exact:
                    return None
                self._next_exact = time.monotonic() + WINDOW_S
                return self.report(self._exact(session.counted))
            if not session.step():
                return None
        except NcclwatchError as error:
            # A process that went in the middle of a burst: what was attached is taken away, and the others go on. Exact counts go
            # on with the probes that they have.
            if session.mode is not Mode.EXACT:
                session.bursts.abort()
            return self.report(reason=str(error))
        return self.report(self._counted())

    def _ordered(self, order: Order) -> Report:
        assert self.session.bursts is not None and self.session.plane is not None  # noqa: S101 - the caller looked
        self.session.plane.handle_events()
        pids = self.session.counted & set(order.pids) if order.pids else self.session.counted
        if not pids:
            return self.report(reason="none of the processes of an order can be counted")
        if self.session.mode is Mode.EXACT:
            before = self._exact(pids)
            time.sleep(min(max(order.seconds, MIN_BURST_S), MAX_ORDER_S))
            return self.report([*before, *self._exact(pids, order.number)])
        before = []
        if self.session.bursts.unbroken and (accounts := self.session.bursts.interrupted()) is not None:
            self.session.take(accounts)
            before = self._counted()
        self.session.take(self.session.bursts.order(order.seconds, order.share, pids))
        return self.report([*before, *self._windows(Counting.ORDER, self.session.bursts.counted_ns, order.number, pids)])

    def _counted(self) -> list[FlowWindow]:
        """What was counted since the last window, where probes stay in place, or else in the last burst."""
        assert self.session.bursts is not None  # noqa: S101 - the caller looked
        began_ns, ended_ns = self.session.bursts.counted_ns
        if self.session.bursts.complete:
            return self._windows(Counting.EXACT, (None, ended_ns))
        return self._windows(Counting.BURSTS, (began_ns, ended_ns))

    def _exact(self, pids: set[int], order: int = 0) -> list[FlowWindow]:
        """What these processes did since their last window; nothing went unseen."""
        self.session.step()
        return self._windows(Counting.EXACT, (None, monotonic_ns()), order, pids)

    def _windows(
        self, counting: Counting, counted_ns: tuple[int | None, int], order: int = 0, pids: set[int] | None = None
    ) -> list[FlowWindow]:
        accounts, plane = self.session.accounts, self.session.plane
        windows = self.windows.take(
            accounts,
            self.owners,
            self.session.devices(accounts),
            pids=self.session.counted if pids is None else pids,
            counting=counting,
            began_ns=counted_ns[0],
            ended_ns=counted_ns[1],
            order=order,
            polls=self.session.polls(),
        )
        if plane is not None and plane.light:
            # Of another library's queue pairs, posts are seen where NCCL's are, and completions are not.
            return [window for window in windows if window.scope is not Scope.FLOW or window.comm_hash is not None]
        return windows

    def report(self, windows: Iterable[FlowWindow] = (), *, reason: str = "") -> Report:
        """Windows, whether the plane runs, and its bill."""
        session = self.session
        return Report(tuple(windows), session.running, reason or session.reason, dict(session.reasons), self._bill())

    def _bill(self) -> Bill:
        session = self.session
        if session.bursts is None:
            return Bill(session.budget)
        governor, worst = session.bursts.governor, session.worst()
        ordered = max((thread.ordered_ns for thread in governor.threads.values()), default=0.0) / 1e9
        share, resident = self._cost()
        return Bill(
            budget=session.budget,
            bursts=governor.bursts,
            worst_share=None if worst is None else worst.share(monotonic_ns()),
            ordered=governor.ordered,
            ordered_s=ordered,
            words=session.report()[:MOST_WORDS],
            own_share=share,
            rss_bytes=resident,
        )

    def _cost(self) -> tuple[float, int]:
        now, spent = time.monotonic_ns(), time.process_time_ns()
        before, spent_before = self._own
        self._own = now, spent
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - read every few seconds
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return ((spent - spent_before) / max(now - before, 1) if before else 0.0), resident


def _verbs_user(user: User) -> VerbsUser:
    """A process with the layout of its NCCL, where that is known: without, its devices are found in its memory all the same."""
    layout: Layout | None = None
    bias = 0
    binaries: tuple[NcclBinary, ...] = ()
    try:
        found = examine(user.pid)
        binaries = found.binary, *found.others
        layout, bias = layout_of(found), found.binary.bias or 0
    except (NcclwatchError, OSError):
        pass
    return VerbsUser(user.pid, layout, bias, user.networks, binaries=binaries)


def _listen(inbox: queue.SimpleQueue[object]) -> None:
    """Read messages until the input ends, and with it this process, whatever it is doing."""
    frames = orders.orders()
    while True:
        data = os.read(0, 1 << 16)
        if not data:
            os._exit(0)
        try:
            for message in frames.feed(data):
                inbox.put(message)
        except NcclwatchError as error:
            print(error, file=sys.stderr)
            os._exit(1)


def main() -> None:
    """Follow orders until the input ends. The arguments are the budget as a share, and ``bursts`` or ``exact``."""
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(inbox,), daemon=True).start()
    service = Service(WireSession(Mode(sys.argv[2]), float(sys.argv[1])))
    next_told = 0.0
    idle = 0
    while True:
        idle += 1
        try:
            service.take(inbox.get(timeout=0 if service.waiting else STEP_S))
            while True:
                idle = 0
                service.take(inbox.get_nowait())
        except queue.Empty:
            pass
        report = service.step()
        if idle >= IDLE_STEPS:
            service.session.search()
        now = time.monotonic()
        if report is None and now >= next_told:
            report = service.report()
        if report is not None:
            next_told = now + TELL_EVERY_S
            _write(orders.framed(report))


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
