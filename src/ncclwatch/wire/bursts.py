"""Bursts of probes on the data path, as the governor plans them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection

from ncclwatch.wire.accounts import QueuePairAccount
from ncclwatch.wire.governor import MIN_BURST_S, Governor
from ncclwatch.wire.kernel import hurry
from ncclwatch.wire.plane import WirePlane, monotonic_ns
from ncclwatch.wire.prices import Price, Tally, price_of, tallies

MAX_ORDER_S = 2.0
SLICE_S = 0.001
"""How often the account is looked at while probes are in place."""


class Bursts:
    """Attaches and detaches a plane's probes when its governor says so."""

    def __init__(self, plane: WirePlane, governor: Governor) -> None:
        self.plane = plane
        self.governor = governor
        self._completed: dict[tuple[int, int, int], int] = {}
        self.counted_ns = (0, 0)
        """From when to when the last burst counted: every request in between, none outside."""

    def step(self) -> list[QueuePairAccount] | None:
        """Run a whole burst if one is due (a quarter of a second at most), and return the accounts after it, else ``None``.

        Their windows, rates and latencies are of this burst; counts of requests and bytes are sums over all bursts so far and
        miss what happened in between: they are never differenced into "in flight".
        """
        now = monotonic_ns()
        self._enrol(now)
        if not self.governor.due(now):
            return None
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        hurry()
        try:
            self.begin()
            cut_short = self._wait()
            return self.stop(cut_short=cut_short)
        finally:
            hurry(usual)

    def order(self, seconds: float, share: float, pids: Collection[int] | None = None) -> list[QueuePairAccount]:
        """Run a burst that somebody asked for, of these processes (all), and return the accounts after it."""
        self._enrol(monotonic_ns())
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        hurry()
        try:
            self.begin(ordered=(min(max(seconds, MIN_BURST_S), MAX_ORDER_S), share), pids=pids)
            return self.stop(cut_short=self._wait())
        finally:
            hurry(usual)

    def begin(self, *, ordered: tuple[float, float] | None = None, pids: Collection[int] | None = None) -> None:
        """Begin a burst, whatever the plan was; ``ordered`` as in :meth:`Governor.begin`."""
        self._completed = {account.key: account.completed for account in self.plane.accounts()}
        before = self._tallies()
        # Probes come and go one after the other; between two writes to a map all of them count.
        self.plane.attach(pids, paused=True)
        # The length counts from here, the hits from before: attaching takes its time, and its hits cost as well.
        self.plane.kernel.new_generation()
        began_ns = monotonic_ns()
        self.counted_ns = (began_ns, began_ns)
        self.governor.begin(began_ns, before, ordered=ordered)

    def stop(self, *, cut_short: bool = False) -> list[QueuePairAccount]:
        """End the burst that is on, whatever the plan was."""
        self.plane.kernel.pause()
        ended_ns = monotonic_ns()
        self.counted_ns = (self.counted_ns[0], ended_ns)
        self.plane.detach()
        accounts = self.plane.accounts()
        # Without probes nothing is counted: from now on whoever attaches some is, the calibration too.
        self.plane.kernel.resume()
        completions = max((account.completed - self._completed.get(account.key, 0) for account in accounts), default=0)
        self.governor.end(ended_ns, self._tallies(), completions, cut_short=cut_short)
        return accounts

    def abort(self) -> None:
        """Something failed in the middle of a burst: take its probes away, and bill what they have cost."""
        self.plane.detach()
        self.plane.kernel.resume()
        if self.governor.attached:
            self.governor.end(monotonic_ns(), self._tallies(), 0, cut_short=True)

    def _tallies(self) -> dict[tuple[int, int], Tally]:
        return tallies(self.plane.kernel, self.prices)

    @property
    def prices(self) -> dict[int, Price]:
        """What a hit costs in each process of this plane."""
        return {pid: price_of(self.governor.costs, process.sites.values()) for pid, process in self.plane.processes.items()}

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
