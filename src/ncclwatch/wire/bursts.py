"""Bursts of probes on the data path, as the governor plans them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator

from ncclwatch.wire.accounts import QueuePairAccount
from ncclwatch.wire.governor import MIN_BURST_S, Governor
from ncclwatch.wire.kernel import hurry
from ncclwatch.wire.plane import WirePlane, monotonic_ns
from ncclwatch.wire.prices import Price, Tally, price_of, tallies

MAX_ORDER_S = 2.0
SLICE_S = 0.001
"""How often the account is looked at while probes are in place."""
WINDOW_S = 2.0
"""The length of a window where every request is counted."""


class Bursts:
    """Attaches and detaches a plane's probes when its governor says so.

    Where it is known where every process takes completions (:attr:`WirePlane.can_be_light`), probes are hit by work alone. They
    then stay in place as long as that costs half of the budget at most: ``unbroken``.
    """

    def __init__(self, plane: WirePlane, governor: Governor) -> None:
        self.plane = plane
        self.governor = governor
        self._completed: dict[tuple[int, int, int], int] = {}
        self.counted_ns = (0, 0)
        """From when to when was counted last: every request in between, none outside."""
        self.unbroken = False
        """Whether probes stay in place, and every request is counted."""
        self.complete = False
        """Whether what was counted last goes on from what was counted before it."""
        self._doubt = 0
        """Signs, so far, that some completions are taken elsewhere."""
        self._heavy = False
        """Whether that was seen: then polls are probed, for good."""

    def step(self) -> list[QueuePairAccount] | None:
        """Run a whole burst if one is due (a quarter of a second at most), and return the accounts after it, else ``None``.

        Their windows, rates and latencies are of this burst; counts of requests and bytes are sums over all bursts so far and
        miss what happened in between: they are never differenced into "in flight". While probes stay in place there are new
        accounts every :data:`WINDOW_S`.
        """
        now = monotonic_ns()
        self._enrol(now)
        if self.unbroken:
            return self._go_on(now)
        if not self.governor.due(now):
            return None
        with _hurried():
            light = self.plane.can_be_light and not self._heavy
            self.begin(light=light)
            cut_short = self._wait()
            if not light or cut_short or not self.governor.affords_all(monotonic_ns(), self._tallies()):
                return self._sound(self.stop(cut_short=cut_short))
            accounts = self._turn(self.counted_ns[0])
            self.unbroken = True
            return self._sound(accounts)

    def order(self, seconds: float, share: float, pids: Collection[int] | None = None) -> list[QueuePairAccount]:
        """Run a burst that somebody asked for, of these processes (all), and return the accounts after it."""
        self._enrol(monotonic_ns())
        with _hurried():
            self.begin(ordered=(min(max(seconds, MIN_BURST_S), MAX_ORDER_S), share), pids=pids)
            return self.stop(cut_short=self._wait())

    def begin(
        self, *, ordered: tuple[float, float] | None = None, pids: Collection[int] | None = None, light: bool = False
    ) -> None:
        """Begin a burst, whatever the plan was; ``ordered`` as in :meth:`Governor.begin`, ``light`` as in
        :meth:`WirePlane.attach`.
        """
        self._completed = {account.key: account.completed for account in self.plane.accounts()}
        before = self._tallies()
        # Probes come and go one after the other; between two writes to a map all of them count.
        self.plane.attach(pids, paused=True, light=light)
        # The length counts from here, the hits from before: attaching takes its time, and its hits cost as well.
        self.plane.kernel.new_generation()
        began_ns = monotonic_ns()
        self.counted_ns = (began_ns, began_ns)
        self.complete = False
        self.governor.begin(began_ns, before, ordered=ordered)

    def stop(self, *, cut_short: bool = False) -> list[QueuePairAccount]:
        """End the burst that is on, whatever the plan was."""
        self.plane.kernel.pause()
        ended_ns = monotonic_ns()
        self.counted_ns = (self.counted_ns[0], ended_ns)
        self.unbroken = False
        self.plane.detach()
        accounts = self.plane.accounts()
        # Without probes nothing is counted: from now on whoever attaches some is, the calibration too.
        self.plane.kernel.resume()
        completions = max((account.completed - self._completed.get(account.key, 0) for account in accounts), default=0)
        self.governor.end(ended_ns, self._tallies(), completions, cut_short=cut_short)
        return accounts

    def _go_on(self, now_ns: int) -> list[QueuePairAccount] | None:
        """While probes stay in place: new accounts where a window is over, or where they must go."""
        late = any(process.sites and not process.attached for process in self.plane.processes.values())
        if self.governor.exhausted(now_ns, self._tallies()):
            return self.interrupted(cut_short=True)
        if late or not self.plane.can_be_light:
            return self.interrupted()
        if now_ns - self.counted_ns[1] < WINDOW_S * 1e9:
            return None
        self.complete = True
        return self._sound(self._turn(self.counted_ns[1]))

    def interrupted(self, *, cut_short: bool = False) -> list[QueuePairAccount] | None:
        """Take probes away that stay in place; the accounts since the last window."""
        self.counted_ns = (self.counted_ns[1], self.counted_ns[1])
        self.complete = True
        with _hurried():
            return self._sound(self.stop(cut_short=cut_short))

    def _turn(self, began_ns: int) -> list[QueuePairAccount]:
        """The accounts of what was counted since a moment; probes stay in place."""
        accounts, now = self.plane.accounts(), monotonic_ns()
        self.counted_ns = (began_ns, now)
        self.governor.renew(now, self._tallies())
        return accounts

    def _sound(self, accounts: list[QueuePairAccount]) -> list[QueuePairAccount] | None:
        """These accounts, or ``None`` where completions are taken at a place that is not probed: then polls are, from now on.

        Requests of a queue pair complete in order (IBTA, reliable connection). So one that is passed over has completed unseen.
        """
        if not self.plane.light:
            return accounts
        doubt = sum(account.skipped for account in accounts) + self.plane.kernel.counters()["unattributed"]
        known, self._doubt = self._doubt, doubt
        if doubt <= known:
            return accounts
        self._heavy = True
        if self.unbroken:
            self.stop()
        return None

    def abort(self) -> None:
        """Something failed in the middle of a burst: take its probes away, and bill what they have cost."""
        self.unbroken = False
        self.plane.detach()
        self.plane.kernel.resume()
        if self.governor.attached:
            self.governor.end(monotonic_ns(), self._tallies(), 0, cut_short=True)

    def _tallies(self) -> dict[tuple[int, int], Tally]:
        return tallies(self.plane.kernel, self.prices)

    @property
    def prices(self) -> dict[int, Price]:
        """What a hit costs in each process of this plane."""
        return {
            pid: price_of(self.governor.costs, [*process.sites.values(), *process.taken])
            for pid, process in self.plane.processes.items()
        }

    def _enrol(self, now_ns: int) -> None:
        for pid, process in self.plane.processes.items():
            if process.sites:
                self.governor.enrol(pid, now_ns)

    def _wait(self) -> bool:
        """Sleep until the burst is over; whether that was because an account ran out."""
        prices = self.prices
        while not self.governor.due(now := monotonic_ns()):
            if self.governor.exhausted(now, tallies(self.plane.kernel, prices)):
                return True
            time.sleep(SLICE_S)
        return False


@contextlib.contextmanager
def _hurried() -> Iterator[None]:
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    hurry()
    try:
        yield
    finally:
        hurry(usual)
