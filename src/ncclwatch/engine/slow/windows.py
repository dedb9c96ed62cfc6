"""Whether a job runs slower than it did: iteration times against their own baseline, repeated before it counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from ncclwatch.engine.slow.baselines import Baseline
from ncclwatch.engine.slow.cadence import Iteration

SLOW_SHARE = 0.05
"""An iteration this much above normal is slow, if the noise is smaller than that."""
NOISE_SIGMAS = 6.0
REPEATED = 3
"""Slow iterations before a slow-down is one; a checkpoint or a pause is slow once."""
GROSS, GROSSLY_REPEATED = 5.0, 2
"""Two in a row that take so many times as long as what is slow at all are enough: a third may be minutes away."""
ENDED_AFTER = 4
"""Normal iterations in a row that end a slow-down; where it had longer gaps before, half as many again as the longest."""
RAISED_SIGMAS, RAISED_RUN = 2.5, 8
"""So many iterations in a row that are all so far above normal are slow, though the noise could explain each of them."""
SHIFT_RUN, SHIFT_PAST, SHIFT_RATIO, SHIFT_BACK = 12, 40, 1.2, 1.15
"""Of noisy iterations: the last so many are slow where three of four of them took longer than three of four of up to so many
before them, and their median is so many times that of those; until the last ones take on average at most so many times as long.
"""
STEADY = 6
"""So many more slow iterations than normal ones at the end are no pauses among others: what was before them is left out."""
WORSE = 1.5
LONGEST_WORSE = 60
"""The last iterations, up to so many, count alone where three of four took so many times as long as nearly all before them."""
LONGEST_GAP = 12
"""Normal iterations that pauses of their own rhythm (garbage collection) may leave between slow ones."""

SHORT_S, MOSTLY = 0.1, 0.8
"""What is taken for an iteration and lasts no longer may be a part of one (a schedule that interleaves has parts of several
lengths): it is slow where nearly all are, and not where long ones come and go.
"""


@dataclass(frozen=True, slots=True)
class SlowDown:
    """A stretch of slow iterations: since when (seconds on the clock of the iterations), normal and mean duration in it."""

    since: float
    normal_s: float
    mean_s: float
    iterations: int
    slow: int

    @property
    def ratio(self) -> float:
        """R: 1 means twice the normal time."""
        return self.mean_s / self.normal_s - 1.0

    @property
    def lost_share(self) -> float:
        """The share of the time that is lost now."""
        return 1.0 - self.normal_s / self.mean_s


@dataclass(slots=True)
class IterationWatch:
    """Iteration times of one job, from a process that stands for it (an iteration is as long on every rank)."""

    baseline: Baseline = field(default_factory=Baseline)
    recent: deque[tuple[Iteration, bool]] = field(default_factory=lambda: deque(maxlen=400))
    """(iteration, whether it was slow when it was seen)"""
    _last_end: float = 0.0
    _open: Iteration | None = None
    """The iteration at hand as far as it has come, once that is longer than a normal one may take."""
    _raised: list[float] = field(default_factory=list)
    """Durations of the last iterations, all of them raised, that were not learned yet."""
    _shifted: float | None = None
    """While noisy iterations as a whole take longer than they did: from which duration on one is slow."""
    _back_below: float = 0.0
    """And below which mean they are as they were."""

    def feed(self, iterations: Sequence[Iteration], at_hand: Iteration | None = None) -> None:
        """Take iterations in the order of their times; those seen before are left out.

        ``at_hand`` is the one that has not ended, up to the moment until which calls are known: it is slow as soon as it has
        taken longer than is normal, not only when it ends.
        """
        for iteration in iterations:
            if iteration.end <= self._last_end:
                continue
            self._last_end = iteration.end
            slow = self.baseline.known and iteration.duration > self._limit
            self.recent.append((iteration, slow))
            self._follow_shift()
            if self._shifted is None:
                self._learn(iteration.duration)
        slow = at_hand is not None and self.baseline.known and at_hand.duration > self._limit
        self._open = at_hand if slow else None

    @property
    def _limit(self) -> float:
        limit = self.baseline.limit(SLOW_SHARE, NOISE_SIGMAS)
        return limit if self._shifted is None else min(limit, self._shifted)

    def _last(self, number: int) -> list[tuple[Iteration, bool]]:
        """The last so many iterations, oldest first."""
        return list(islice(reversed(self.recent), number))[::-1]

    def _mark(self, number: int, limit: float | None) -> None:
        """Say anew of the last iterations which of them were slow: those longer than the limit, or none."""
        for back in range(1, min(number, len(self.recent)) + 1):
            iteration, _ = self.recent[-back]
            self.recent[-back] = (iteration, limit is not None and iteration.duration > limit)

    def _follow_shift(self) -> None:
        """Notice that iterations whose noise could explain each of them are longer as a whole, and when that ends."""
        if self._shifted is not None:
            # The mean: of pauses in every third iteration the median would say nothing.
            if np.mean([iteration.duration for iteration, _ in self._last(SHIFT_RUN)]) <= self._back_below:
                self._shifted = None
                self._mark(len(self.recent), None)
            return
        kept = self._last(SHIFT_RUN + SHIFT_PAST)
        now = np.array([iteration.duration for iteration, _ in kept[-SHIFT_RUN:]])
        past = np.array([iteration.duration for iteration, slow in kept[:-SHIFT_RUN] if not slow])
        # Where most of them are slow by themselves it is a slow-down without this.
        if len(past) < SHIFT_RUN or not self.baseline.known or 2 * sum(slow for _, slow in kept[-SHIFT_RUN:]) > SHIFT_RUN:
            return
        middle, usual = float(np.median(now)), float(np.median(past))
        if np.quantile(now, 0.25) <= np.quantile(past, 0.75) or middle < SHIFT_RATIO * usual:
            return
        self._shifted = float(np.sqrt(middle * usual))
        self._back_below = max(self._shifted, SHIFT_BACK * float(past.mean()))
        self._mark(SHIFT_RUN, self._shifted)
        # What was learned of these is no part of what is normal.
        self.baseline.values = deque(past[-self.baseline.keep :].tolist())

    def _learn(self, duration: float) -> None:
        """Learn an iteration's time unless it is one of many in a row that are raised: the job's pace has changed."""
        if self.baseline.known and duration > self.baseline.limit(SLOW_SHARE, RAISED_SIGMAS):
            self._raised.append(duration)
            if len(self._raised) >= RAISED_RUN:
                for back in range(1, min(len(self._raised), RAISED_RUN, len(self.recent)) + 1):
                    self.recent[-back] = (self.recent[-back][0], True)
                del self._raised[:-RAISED_RUN]
            return
        # A run that ended before it was long enough was noise.
        if len(self._raised) < RAISED_RUN:
            for value in self._raised:
                self.baseline.learn(value)
        self._raised.clear()
        self.baseline.learn(duration)

    def slow_down(self) -> SlowDown | None:
        """The slow-down that goes on now, if there is one and it has repeated."""
        if not self.baseline.known:
            return None
        stretch, slow = self._stretch()
        if not stretch:
            return None
        worse = _became_worse([i.duration for i in stretch])
        if worse:
            del stretch[worse:]
            slow = worse + (self._open is not None)
        mean = sum(i.duration for i in stretch) / len(stretch)
        normal = self.baseline.normal
        if mean <= normal * (1 + SLOW_SHARE):
            return None
        if normal < SHORT_S and slow < MOSTLY * len(stretch):
            return None
        return SlowDown(min(i.begin for i in stretch), normal, mean, len(stretch) + (self._open is not None), slow)

    def _stretch(self) -> tuple[list[Iteration], int]:
        """The iterations since the job is slow, newest first, and how many of them and of the one at hand are; none where it is
        not.
        """
        stretch: list[Iteration] = []
        upto = normal_run = slow = trailing = longest = 0
        more = best = steady = steady_slow = 0
        if self._open is not None:
            slow = more = 1
        for iteration, was_slow in reversed(self.recent):
            if was_slow:
                if not slow:
                    trailing = normal_run
                else:
                    longest = max(longest, normal_run)
            normal_run = 0 if was_slow else normal_run + 1
            if normal_run > LONGEST_GAP:
                break
            stretch.append(iteration)
            more += 1 if was_slow else -1
            if was_slow:
                slow += 1
                upto = len(stretch)
                if more >= best:
                    best, steady, steady_slow = more, upto, slow
        if slow < (GROSSLY_REPEATED if self._grossly_slow() else REPEATED) or trailing >= max(ENDED_AFTER, 1 + longest * 3 // 2):
            return [], 0
        if best >= STEADY:
            upto, slow = steady, steady_slow
        return stretch[:upto], slow

    def _grossly_slow(self) -> bool:
        """Whether the last two iterations, the one at hand counted, take many times as long as even a slow one."""
        last = [iteration for iteration, _ in self._last(GROSSLY_REPEATED)] + ([self._open] if self._open else [])
        least = GROSS * self._limit
        return len(last) >= GROSSLY_REPEATED and all(i.duration > least for i in last[-GROSSLY_REPEATED:])

    @property
    def duration(self) -> float | None:
        """The mean of the last iterations, in seconds."""
        last = [iteration.duration for iteration, _ in self._last(8)]
        return sum(last) / len(last) if last else None


def _became_worse(durations: Sequence[float]) -> int:
    """Of a slow-down, newest iteration first: how many of the last ones are much slower than those before; 0 where none are.

    A job that was disturbed and has become really slow is looked at as it is now.
    """
    values = np.array(durations)
    for number in range(min(LONGEST_WORSE, len(values) - REPEATED), REPEATED - 1, -1):
        now, past = values[:number], values[number:]
        if now[-1] > WORSE * np.quantile(past, 0.9) and np.quantile(now, 0.25) > WORSE * np.quantile(past, 0.9):
            return number
    return 0
