"""Whose work requests the nodes are asked to count: what is counted while a job stands tells its network from its proxies."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ncclwatch.model.job import Job
from ncclwatch.model.verdict import Verdict
from ncclwatch.model.work import WorkOrder

MOST_PIDS = 64
"""Bound: processes of one order, and of a job of which all are counted where nobody is named."""
STANDS_S = 3.0
"""Bound: a job of which nobody is named yet is counted once it has stood so long: before anybody is, after five seconds."""
AGAIN_NS = 30_000_000_000
"""Bound: a process is not counted again before."""
SAME_NS = 60_000_000_000
"""Bound: nor before this in one standstill. Counts stay what they are then, but a path may show only later that it is stuck."""
MOST_REMEMBERED = 100_000
"""Bound: processes of which it is remembered when they were counted."""


@dataclass(slots=True)
class Ordering:
    """Decides on orders, and remembers what it has ordered. ``newest`` is the number of the last order."""

    newest: int = 0
    _last: dict[tuple[str, int], int] = field(default_factory=dict)

    def orders(
        self, judged: Iterable[tuple[Job, Verdict]], hosts: Collection[str], now_ns: int, *, asked: bool = False
    ) -> list[WorkOrder]:
        """What to count on ``hosts`` now: all of a small job, of a large one who is named. O(members of jobs that stand)."""
        found: dict[tuple[str, bool], set[int]] = {}
        for job, verdict in judged if hosts else ():
            still = min((member.still_s for member in job.members if not member.gone), default=0.0)
            if not (asked or still >= STANDS_S or verdict.verdict_class.accuses):
                continue
            named = {(culprit.host, culprit.pid) for culprit in verdict.culprits}
            for member in job.members:
                place = member.info.host, member.info.pid
                if member.gone or place[0] not in hosts or not (len(job.members) <= MOST_PIDS or place in named):
                    continue
                ago = now_ns - self._last.get(place, -SAME_NS)
                if asked or ago >= (SAME_NS if ago < still * 1e9 else AGAIN_NS):
                    self._last[place] = now_ns
                    found.setdefault((place[0], still > 0), set()).add(place[1])
        if len(self._last) > MOST_REMEMBERED:
            self._last.clear()
        orders = []
        for (host, standing), pids in found.items():
            self.newest += 1
            orders.append(WorkOrder(self.newest, host, tuple(sorted(pids)[:MOST_PIDS]), standing))
        return orders
