"""The last minutes of a job, for a judge that takes over: everything is heard, and judged at few moments, closer to now the more.

What a session has to know of the past is since when something stands. Calls are heard all; looks are judged at moments each twice
as far back as the next, so that a takeover takes a few judgements however far it looks back.
"""

from __future__ import annotations

import time

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.knowledge.session import InformedSession

BACK_S = 120.0
"""So far back it is heard. Messages that build on none before them come twice a minute."""
MARKS_S = (64.0, 32.0, 16.0, 8.0, 4.0, 2.0)
"""Moments at which it is judged, before now."""
BUDGET_S = 2.0
"""Of CPU time for these: a takeover must not wait for a past that takes longer."""


class Replay:
    """One takeover. ``lives`` are those of the agents that were heard, by host."""

    def __init__(self, session: InformedSession) -> None:
        self.session = session
        self.lives: dict[str, str] = {}
        self._now_ns, self._wall_ns = time.monotonic_ns(), time.time_ns()
        self._marks = [self._now_ns - int(back * 1e9) for back in MARKS_S]
        self._spent_s = 0.0

    def take(self, life: str, batch: NodeBatch, at_ns: int) -> None:
        """Hear a batch that was sent on at ``at_ns`` (CLOCK_REALTIME)."""
        # The server's clock may be ahead of ours by a little.
        moment = min(self._now_ns - (self._wall_ns - at_ns), time.monotonic_ns())
        while self._marks and moment >= self._marks[0]:
            self._judge(self._marks.pop(0))
        self.lives[batch.host] = life
        self.session.feed(batch, moment, wall_ns=at_ns)

    def _judge(self, mark_ns: int) -> None:
        if self._spent_s > BUDGET_S or not self.session.nodes:
            return
        began = time.thread_time()
        self.session.judge(mark_ns)
        self._spent_s += time.thread_time() - began
