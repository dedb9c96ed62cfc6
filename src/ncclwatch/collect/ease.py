"""Looks that widen while all is well, and narrow while a culprit is looked for.

A look reads every structure of NCCL, and looks are what an agent costs. Whoever judges a job says when it can do with few of them
(:meth:`Ease.allow`): it has been healthy for a while, and was looked at often enough to know what is usual. Then a pulse of each
process tells, twice an interval, whether it moves (:mod:`ncclwatch.target.pulse`), and memory is read as a whole every
``widest_s`` seconds alone. The first process that stands though it moved, and whatever else happens, makes looks as frequent as
ever for a while: samples taken only when something stands would be no picture of the job.

The other way round, samples are what tells who holds up a slow job. While a job is slow and nobody is named yet, or a network
alone, its judge asks for more of them; what it asks for is bounded there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ncclwatch.target.held import check_all

if TYPE_CHECKING:
    from ncclwatch.collect.watched import Watched

WIDEST_S = 15.0
"""Seconds between two looks while all is well, by default."""
LONG_CALM_S, RARER = 600.0, 4
"""After so many seconds in which all was well looks are so many times rarer still: what is usual has been seen often by then."""
ALLOWED_S = 5.0
"""For so long an allowance holds: an engine that is gone allows nothing."""
STEADY_S = 10.0
"""After something stood still, or happened, looks are steady for so long."""
NARROW = 3
"""Looks in the time of one, while a culprit is looked for."""
NARROW_S = 2.5
"""For so long such a wish holds."""
MOST_SHARE = 0.4
"""Of a core that such looks may take: a node of which they would take more is looked at as ever. Eight ranks take half of it."""


@dataclass(slots=True)
class Ease:
    """Decides whether a look is due. ``widest_s`` 0: always. Times are those of ``time.monotonic``, seconds."""

    widest_s: float = 0.0
    _until: float = 0.0
    _steady_until: float = 0.0
    _narrow_until: float = 0.0
    _look_s: float = 0.0
    """CPU time of a look, smoothed."""
    _calm_since: float = math.inf
    """Since when looks have been far apart."""
    _span: int = -1

    def allow(self, now: float, *, well: bool = True, narrow: bool = False) -> None:
        """All is well with every job of the node, or not; ``narrow``: a culprit is looked for."""
        if narrow:
            self._narrow_until = now + NARROW_S
        if well:
            self._until = now + ALLOWED_S
        else:
            self._until = 0.0
            self.disturb(now)

    def disturb(self, now: float) -> None:
        """Something happened: look as often as ever for a while."""
        self._steady_until = now + STEADY_S

    def looked(self, cpu_s: float) -> None:
        """A look took so much CPU time."""
        self._look_s += (cpu_s - self._look_s) / (4 if self._look_s else 1)

    def interval(self, now: float, steady_s: float) -> float:
        """Seconds between two looks that are not wide, where ``steady_s`` are usual."""
        narrow = now < self._narrow_until and self._search_cores(steady_s) <= MOST_SHARE
        return steady_s / NARROW if narrow else steady_s

    def search_share(self, steady_s: float) -> float:
        """The share of all CPUs that looks take while a culprit is looked for."""
        return self._search_cores(steady_s) / (os.cpu_count() or 1)

    def _search_cores(self, steady_s: float) -> float:
        """The same, of one core."""
        return self._look_s * NARROW / steady_s

    def is_wide(self, now: float) -> bool:
        """Whether looks may be far apart now."""
        return self.widest_s > 0 and self._steady_until <= now < self._until

    def is_due(self, now: float, clock_s: float) -> bool:
        """Whether to look. ``clock_s`` is the clock that nodes have in common: they look in the same moment of each
        ``widest_s`` seconds of it, after a long calm of each ``RARER`` times as many.
        """
        wide = self.is_wide(now)
        self._calm_since = min(self._calm_since, now) if wide else math.inf
        apart_s = self.widest_s * (RARER if now - self._calm_since >= LONG_CALM_S else 1)
        span = math.floor(clock_s / apart_s) if apart_s > 0 else 0
        due = not wide or span != self._span
        if due:
            self._span = span
        return due


def all_go_on(watched: Collection[Watched]) -> bool:
    """Whether every process does what it did: moves on, or rests as it did."""
    check_all(one.pid for one in watched)
    # Each is asked, also after one that does not: its next answer is to be about the time from now on.
    answers = [one.goes_on() for one in watched]
    return all(answers)
