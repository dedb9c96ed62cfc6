"""Work requests of processes that stand, counted once: for one verdict on a job that nobody watched when it came to stand."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ncclwatch.collect.flows import FlowCollector
from ncclwatch.collect.ordering import SECONDS
from ncclwatch.collect.watched import Watched
from ncclwatch.collect.work import WorkWatch
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.work import FlowWindow
from ncclwatch.target.session import TargetProcess
from ncclwatch.wire.governor import Mode
from ncclwatch.wire.orders import Order

NO_BUDGET = 1e-9
"""Share of a thread's time for bursts that nobody orders: there are none."""
STANDING_SHARE = 1.0
"""Share of a thread's time that the count may cost: it is made only while nothing moves."""


HEARD_EVERY_S = 0.02
"""How often the process that counts is heard while nothing else is done."""


class WorkCount:
    """Call :meth:`look` after each round of samples, and :meth:`rest` between two. Nothing is probed before the processes were
    seen to stand, and only once.
    """

    def __init__(self) -> None:
        self._flows = FlowCollector(())
        self._work = WorkWatch(Mode.BURSTS, NO_BUDGET)
        self._heard: list[FlowWindow] = []
        self._host = ""
        self._ready = False
        self.ordered = False
        self.answered = False
        """Whether the windows of the count have come."""

    def look(self, watched: Sequence[Watched]) -> dict[str, list[FlowWindow]]:
        """Have requests counted once nothing moves; the windows that have come, by host."""
        looks = [
            (one.target, one.last)
            for one in watched
            if isinstance(one.target, TargetProcess) and one.gone is None and one.last is not None
        ]
        hosts = {target.pid: target.info.host for target, _ in looks}
        self._host = next(iter(hosts.values()), "")
        try:
            stands = bool(looks) and all(one.stands for one in watched if one.pid in hosts)
            if stands or self.ordered:
                self._flows.observe(looks)
                self._work.follow(self._flows, [target for target, _ in looks])
            self._hear()
            if stands and not self.ordered and self._ready:
                self.ordered = self._work.order(Order(1, tuple(hosts), SECONDS, STANDING_SHARE))
        except (NcclwatchError, OSError):
            # A verdict needs no counts: without them it says less.
            return {}
        found, self._heard = self._heard, []
        by_host: dict[str, list[FlowWindow]] = {}
        for window in found:
            if window.pid in hosts:
                by_host.setdefault(hosts[window.pid], []).append(window)
        return by_host

    def rest(self, seconds: float) -> None:
        """Sleep, but no longer than until there is something to look for: requests can be counted now, or have been."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._hear():
            time.sleep(min(left, HEARD_EVERY_S))

    def _hear(self) -> bool:
        """Take what has been counted; whether that, or that anything can be, is new."""
        windows = [window for window in self._work.take(self._flows, self._host, looked=False) if window.order]
        was_ready, self._ready = self._ready, self._work.plane.running
        self._heard += windows
        self.answered |= bool(windows)
        return bool(windows) or (self._ready and not was_ready)

    def close(self) -> None:
        """Take the probes away."""
        self._work.close()
        self._flows.close()
