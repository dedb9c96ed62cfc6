"""Whose work requests are to be counted now: of jobs that stand or slow, the suspects', and of one that was asked about."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ncclwatch.engine.diagnose import still_seconds
from ncclwatch.engine.job import Job, Member
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
        """What is to be counted on ``hosts``, where it can be, after these verdicts. O(members of jobs that stand or slow)."""
        found: dict[tuple[str, bool], list[int]] = {}
        for job, verdict in judged if hosts else ():
            still = min((still_seconds(member) for member in job.members if not member.gone), default=0.0)
            standing = still > 0
            if not (asked or still >= STANDS_S or verdict.verdict_class.accuses):
                continue
            for member in _suspects(job, verdict):
                place = member.info.host, member.info.pid
                if member.gone or place[0] not in hosts:
                    continue
                ago = now_ns - self._last.get(place, -SAME_NS)
                if not asked and ago < (SAME_NS if standing and ago < still * 1e9 else AGAIN_NS):
                    continue
                self._last[place] = now_ns
                found.setdefault((place[0], standing), []).append(place[1])
        if len(self._last) > MOST_REMEMBERED:
            self._last.clear()
        orders = []
        for (host, standing), pids in found.items():
            self.newest += 1
            orders.append(WorkOrder(self.newest, host, tuple(sorted(set(pids))[:MOST_PIDS]), standing))
        return orders


def _suspects(job: Job, verdict: Verdict) -> Sequence[Member]:
    """All of a small job, whose flows with those named count as well; of a large one those that are named."""
    if len(job.members) <= MOST_PIDS:
        return job.members
    named = {(culprit.host, culprit.pid) for culprit in verdict.culprits}
    return [member for member in job.members if (member.info.host, member.info.pid) in named]
