"""Work requests of processes that stand, counted once: for one verdict on a job that nobody watched when it came to stand."""

from __future__ import annotations

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


class WorkCount:
    """Call :meth:`look` after each round of samples. Nothing is probed before the processes were seen to stand."""

    def __init__(self) -> None:
        self._flows = FlowCollector(())
        self._work = WorkWatch(Mode.BURSTS, NO_BUDGET)
        self.ordered = False

    def look(self, watched: Sequence[Watched]) -> dict[str, list[FlowWindow]]:
        """Have requests counted once nothing moves; the windows that have come, by host."""
        looks = [
            (one.target, one.last)
            for one in watched
            if isinstance(one.target, TargetProcess) and one.gone is None and one.last is not None
        ]
        hosts = {target.pid: target.info.host for target, _ in looks}
        try:
            stands = bool(looks) and all(one.stands for one in watched if one.pid in hosts)
            if stands or self.ordered:
                self._flows.observe(looks)
                self._work.follow(self._flows, [target for target, _ in looks])
            found = self._work.take(self._flows, next(iter(hosts.values()), ""), looked=False)
            if stands and not self.ordered and self._work.plane.running:
                self.ordered = self._work.order(Order(1, tuple(hosts), SECONDS, STANDING_SHARE))
        except (NcclwatchError, OSError):
            # A verdict needs no counts: without them it says less.
            return {}
        by_host: dict[str, list[FlowWindow]] = {}
        for window in found:
            if window.order and window.pid in hosts:
                by_host.setdefault(hosts[window.pid], []).append(window)
        return by_host

    def close(self) -> None:
        """Take the probes away."""
        self._work.close()
        self._flows.close()
