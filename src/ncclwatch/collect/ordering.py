"""Counts of work requests that an engine orders, as far as this node's own options allow: who asks cannot raise the price."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ncclwatch.collect.node import NodeCollector
from ncclwatch.model.work import WorkOrder
from ncclwatch.wire.orders import Order

SECONDS = 0.25
"""The length of a count that is ordered."""
LEAST_S = 2.0
"""Orders that come faster are refused."""
LOOK_LEAST_S = 5.0
"""The same of orders to look where processes stand."""
STANDING_BUDGET = 0.05
"""Share of a thread's time that orders may cost while its process stands, unless the user says otherwise: no work is slowed."""


@dataclass(slots=True)
class OrderDesk:
    """Takes orders for one collector: to count, and to look. ``budget`` is the share of a thread's time that counts may cost
    while the process moves, ``standing_budget`` while it stands, which is looked at here.
    """

    collector: NodeCollector
    budget: float
    standing_budget: float = STANDING_BUDGET
    clock: Callable[[], float] = time.monotonic
    taken: int = 0
    refused: int = 0
    _last: float = field(default=float("-inf"))
    _last_look: float = field(default=float("-inf"))

    def take(self, order: WorkOrder) -> str:
        """Do it, if that is allowed; a line that says what is done, or why it is not, empty where that need not be said."""
        pids = tuple(pid for pid in order.pids if pid in self.collector.watched)
        now = self.clock()
        if order.look:
            return self._look(order, pids, now)
        standing = bool(pids) and all(self.collector.watched[pid].stands for pid in pids)
        share = max(self.standing_budget, self.budget) if standing else self.budget
        why = ""
        if not pids:
            why = "none of its processes is watched here"
        elif order.standing and not standing:
            why = "it is for a job that stands, and the job moves"
        elif now - self._last < LEAST_S:
            why = f"the one before came less than {LEAST_S:.0f} s ago"
        if why:
            return self._refuse(order, why)
        # A path is probed beside the count, or without it: of sockets there is nothing to count.
        probes = self.collector.probe_paths(pids) if standing else 0
        probed = f"{probes} path{'s' if probes != 1 else ''} on which they stand still {'is' if probes == 1 else 'are'} probed"
        if share <= 0:
            why = "this agent's options allow none"
        elif not self.collector.order(Order(order.number, pids, SECONDS, share)):
            why = "no work requests can be counted here"
        if why and not probes:
            # Where nothing can be counted, the plane has said so already when it began.
            told = self._refuse(order, why)
            return told if share <= 0 else ""
        self._last = now
        self.taken += 1
        if why:
            return f"{probed}, as ordered; work requests are not counted: {why}"
        state = "stand" if standing else "move"
        who = "process" if len(pids) == 1 else "processes"
        return (
            f"work requests of {len(pids)} {who} are counted for {SECONDS} s, as ordered; they {state}, "
            f"so that this may cost {share:.3g} of a thread's time" + (f"; {probed}" if probes else "")
        )

    def _look(self, order: WorkOrder, pids: Sequence[int], now: float) -> str:
        """Have looked at where processes stand; the verdict will say what was seen."""
        why = ""
        if not pids:
            why = "none of them is watched here"
        elif now - self._last_look < LOOK_LEAST_S:
            why = f"the look before came less than {LOOK_LEAST_S:.0f} s ago"
        elif not self.collector.look_at(pids):
            why = "it is switched off, or another look is under way"
        if why:
            self.refused += 1
            return f"order {order.number} to look where processes stand is refused: {why}"
        self._last_look = now
        self.taken += 1
        return ""

    def _refuse(self, order: WorkOrder, why: str) -> str:
        self.refused += 1
        return f"order {order.number} to count work requests is refused: {why}"
