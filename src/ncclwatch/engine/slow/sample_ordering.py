"""What two samples of different processes prove of one another: they are read one after the other, and the job runs meanwhile.

Counters only rise. Who waits for a rank that was read later really waited: until then it had not come. A rank that was read
earlier may have come in between, and data that was "sent and not received" may have been received: that proves nothing, unless
hardly any time lay between, or who waits had already waited at the look before. On a machine with much to do, reading all ranks
can take longer than an iteration.
"""

from __future__ import annotations

from ncclwatch.engine.edges import Wait
from ncclwatch.engine.job import Job
from ncclwatch.engine.nodes import LinkNode, RankNode
from ncclwatch.model.state import ProcessSample

NEAR_SHARE = 0.03
"""Samples that are nearer together than this share of an iteration are taken for one moment."""
NEAR_S = 0.02
"""The same where iterations are not known."""


def near(iteration_s: float | None) -> float:
    """How far apart samples of one moment may be, seconds."""
    return NEAR_SHARE * iteration_s if iteration_s is not None else NEAR_S


class Moments:
    """Says of waits whether the times of the samples they are read off leave a doubt. ``near_s``: so much is no time."""

    def __init__(self, job: Job, near_s: float) -> None:
        self._job = job
        self._near_ns = near_s * 1e9
        self._last = {member.index: member.last for member in job.members}

    def prove(self, wait: Wait) -> bool:
        """Whether who is waited for had been read late enough to know that it had not come."""
        if isinstance(wait.target, LinkNode):
            group = self._job.groups.get(wait.target.group_id)
            ends = [group.members.get(rank) if group else None for rank in (wait.target.source, wait.target.destination)]
            first, then = (end[0].last if end else None for end in ends)
        else:
            first = self._last.get(wait.waiter.index) if isinstance(wait.waiter, RankNode) else None
            then = self._last.get(wait.target.index) if isinstance(wait.target, RankNode) else None
        if first is None or then is None or self._follows(first, then):
            return True
        return not isinstance(wait.target, LinkNode) and self._waited_before(wait, then)

    def _waited_before(self, wait: Wait, then: ProcessSample) -> bool:
        """Whether the look before showed the waiter's end as it stands now: it waited before the other was read."""
        if wait.end is None or len(wait.end.member.samples) < 2:
            return False
        before, operation, sub = wait.end.member.samples[-2], wait.end.operation, wait.end.sub
        stood = any(
            one.address == operation.address and one.op_count == operation.op_count and sub in one.subs
            for one in before.operations
        )
        return stood and self._follows(before, then)

    def _follows(self, first: ProcessSample, then: ProcessSample) -> bool:
        if first is then:
            return True
        return first.wall_ns + first.duration_ns - then.wall_ns <= self._near_ns
