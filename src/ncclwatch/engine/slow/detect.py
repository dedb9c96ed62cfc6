"""Whether a job runs slower than it did: one change-point test on its iteration times.

Either all of late come from the distribution that was learned while the job was healthy, or those since some moment from another:
the largest Bayes factor (Dirichlet-multinomial over a few bins) decides. A slow-down ends as clearly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lgamma

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.cadence import Iteration
from ncclwatch.engine.slow.calibration import TABLE

WINDOW = 60
"""Bound: newest iterations among which a change point is looked for; cost is linear in it."""
LEARNED = 200
"""Bound: newest healthy iterations that are remembered: what is usual may drift."""
FEWEST_HEALTHY = 8
"""Iterations before anything is called usual. Unit: iterations. From: the prior counts as thirty; fewer hardly change it."""
LEAST_RATIO = 1.05
"""A smaller change is not worth anybody's time. Unit: ratio of means. From: CCL-D's smallest injected slow-down is more."""
WORSE_RATIO = 1.5
"""A slow-down so much worse, or milder, is another. Unit: ratio of means. From: chosen; costs a third of the time by itself."""
ENOUGH = 3
"""Of a kind so many are needed to say anything of it: iterations that are healthy, slow or late, collectives on GPUs, samples.
Unit: any of these. From: the median of fewer is one outlier, and what happens once (a checkpoint) can lie across the end of an
iteration and make two of them slow (drawn 502-36).
"""
FAR = 1.25
"""The last bin begins so far above what is slow. Unit: ratio. From: it shows 3 of 9 recorded jobs with pauses twice as early."""
FAR_LONGER = 5.0
"""So many times as long as the longest healthy one: then one iteration is enough to name a network. Unit: ratio.
From: where times are as heavy-tailed as 1/x², the iteration after eight is as long in 0.4 % of the cases.
"""
HEALTHY_PRIOR = np.array([15.0, 12.0, 2.0, 0.3])
"""Pseudo-counts of healthy iterations by bin: as if thirty had been seen, two of them slow by chance, hardly any a checkpoint."""
OTHER_PRIOR = np.array([0.5, 0.5, 0.5, 2.0])
"""The same since a change, of which nothing is known: half a one (Jeffreys) for each bin of a quarter more."""
SLOW_FROM = 2
"""Fact: the first bin that is slow, as ``_edges`` makes them."""


@dataclass(frozen=True, slots=True)
class SlowDown:
    """A stretch of slow iterations: since when, and since when after its last lull (``newest``, of which the other figures are),
    in seconds on the clock of the iterations; usual and mean duration.
    """

    since: float
    newest: float
    normal_s: float
    mean_s: float
    iterations: int
    slow: int
    alone: bool = False
    """Too few iterations to tell it from a pause, each of them far longer than any before."""

    @property
    def ratio(self) -> float:
        """How much longer an iteration takes: 1 means twice the usual time (CCL-D's R)."""
        return self.mean_s / self.normal_s - 1.0

    @property
    def lost_share(self) -> float:
        """The share of the time that is lost now, 0 to 1."""
        return 1.0 - self.normal_s / self.mean_s


@dataclass(slots=True)
class _State:
    """A slow-down: its newest durations, and the evidence that it is ``over`` (Page's cumulative sum, never below 0)."""

    since: float
    durations: list[float] = field(default_factory=list)
    over: float = 0.0


@dataclass(slots=True)
class IterationWatch:
    """Iteration times of one job, from one process that stands for it (an iteration takes as long on every rank)."""

    healthy: deque[Iteration] = field(default_factory=lambda: deque(maxlen=LEARNED))
    """What the job took while it was healthy, oldest first; the newest ``WINDOW`` may yet turn out to be slow."""
    slow: _State | None = None
    lull: tuple[float, float] | None = None
    """From when to when it seemed over, amid what goes on."""
    _past: tuple[float, float] | None = None
    """From when to when iterations were slow before."""
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    _last_end: float = 0.0
    _open: Iteration | None = None

    def feed(self, iterations: Sequence[Iteration], at_hand: Iteration | None = None) -> None:
        """Take iterations in time order, new ones only; ``at_hand``: the open one, by what it has taken so far."""
        for iteration in [iteration for iteration in iterations if iteration.end > self._last_end]:
            self._last_end = iteration.end
            self._recent.append(iteration.duration)
            if self.slow is None:
                self.healthy.append(iteration)
                self._look_for_change()
            else:
                self._go_on(iteration)
        self._open = at_hand
        if self.slow is None and at_hand is not None and self.known:
            self._look_for_change(at_hand)

    @property
    def known(self) -> bool:
        """Whether enough iterations were seen to say what is usual."""
        return len(self.healthy) >= FEWEST_HEALTHY or self.slow is not None

    @property
    def usual(self) -> NDArray[np.float64]:
        """Durations of the healthy iterations, seconds."""
        return np.array([iteration.duration for iteration in self.healthy])

    @property
    def duration(self) -> float | None:
        """The mean of the last iterations, seconds."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    @property
    def may_go_on(self) -> tuple[float, float] | None:
        """The slow-down before, if so late that another is the same one: what comes and goes (pauses, sleeps) has lulls."""
        past = self._past
        return past if past is not None and sum(one.begin >= past[1] for one in self.healthy) <= WINDOW else None

    @property
    def slow_s(self) -> float:
        """For how many seconds iterations have been slow; 0 while the job runs as it did."""
        return max(self._last_end, self._open.end if self._open else 0.0) - self.slow.since if self.slow else 0.0

    def limit(self) -> float:
        """The duration from which on an iteration is slow, seconds; infinite while nothing is usual."""
        return float(_edges(self.usual)[SLOW_FROM - 1]) if self.known else float("inf")

    def slow_down(self) -> SlowDown | None:
        """The slow-down that goes on now; ``None`` while the job runs as it did."""
        if self.slow is None:
            return None
        limit, durations = self.limit(), list(self.slow.durations)
        if self._open is not None and self._open.duration > limit:
            durations.append(self._open.duration)
        normal, mean = float(self.usual.mean()), float(np.mean(durations))
        newest = max(self.slow.since, self._last_end - sum(self.slow.durations))
        slow = SlowDown(self.slow.since, newest, normal, mean, len(durations), sum(duration > limit for duration in durations))
        return slow if mean >= LEAST_RATIO * normal else None

    def far_longer(self) -> SlowDown | None:
        """The newest iterations, the one at hand among them, where each is far longer than all before, and they are few."""
        begun, durations = [one.begin for one in self.healthy], [one.duration for one in self.healthy]
        if self._open is not None:
            begun.append(self._open.begin)
        for start in range(max(FEWEST_HEALTHY, len(durations) - ENOUGH + 1), len(begun)):
            past, since = durations[:start], durations[start:]
            least = FAR_LONGER * max(past)
            if self._open is not None and self._open.duration >= least:
                since.append(self._open.duration)
            if since and min(since) >= least:
                first, many = begun[start], len(since)
                return SlowDown(first, first, float(np.mean(past)), float(np.mean(since)), many, many, alone=True)
        return None

    def _look_for_change(self, at_hand: Iteration | None = None) -> None:
        """Set ``slow`` where the newest iterations come from another distribution than those before."""
        kept = [*self.healthy, *([at_hand] if at_hand is not None else [])]
        start = change_point(np.array([one.end - one.begin for one in kept]))  # a property for each takes three times as long
        if start is not None:
            # All of them tell what is slow: by the first few alone it would seem over before the next pause.
            begin, durations = kept[start].begin, [iteration.duration for iteration in list(self.healthy)[start:]]
            if (past := self.may_go_on) is not None:
                begin, self.lull = past[0], (past[1], begin)
            self.slow = _State(begin, durations)
            self.healthy = deque(kept[:start], maxlen=LEARNED)

    def _go_on(self, iteration: Iteration) -> None:
        """One more iteration of a slow-down: it may end it, or be the beginning of a worse one."""
        if (state := self.slow) is None:
            return
        edges = _edges(self.usual)
        at = int(np.searchsorted(edges, iteration.duration))
        healthy = _bins(self.usual, edges) + HEALTHY_PRIOR
        now = _bins(np.array(state.durations), edges) + OTHER_PRIOR
        state.over = max(0.0, state.over + float(np.log(healthy[at] / healthy.sum()) - np.log(now[at] / now.sum())))
        state.durations.append(iteration.duration)
        if state.over > TABLE.change_log_bayes_factor:
            self.slow, self._past = None, (state.since, iteration.end)
            return
        del state.durations[:-WINDOW]
        durations = np.maximum(state.durations, 1e-9)
        # One that has become far milder is to be explained by what is seen since, too: what made it worse may be gone.
        if changed := change_point(durations, WORSE_RATIO) or change_point(1.0 / durations, WORSE_RATIO, ENOUGH):
            kept = state.durations[changed:]
            # Whether it is slow still is asked as of any other stretch: what was worse says nothing of it.
            since = _bins(np.array(kept), edges)
            still = log_bayes_factor(_bins(self.usual, edges), since) > TABLE.change_log_bayes_factor
            self._past = state.since, iteration.end
            self.slow = _State(iteration.end - sum(kept), kept) if still and since[SLOW_FROM:].sum() >= ENOUGH else None


def change_point(durations: NDArray[np.float64], least_ratio: float = LEAST_RATIO, fewest: int = FEWEST_HEALTHY) -> int | None:
    """The place from which on durations (seconds, oldest first) come from another, slower distribution; ``None`` if none.

    ``fewest``: so many are left before it at least. Of rates (1/s) it finds where iterations become faster. O(``WINDOW`` x bins).
    """
    size = len(durations)
    best, found = TABLE.change_log_bayes_factor, None
    starts = np.arange(size - ENOUGH, max(fewest, size - WINDOW) - 1, -1)
    # Of a healthy job hardly any start is worth a closer look, and it is asked at every iteration.
    total = durations.cumsum()
    past_mean, mean = total[starts - 1] / starts, (total[-1:] - total[starts - 1]) / (size - starts)
    for start in starts[mean >= least_ratio * past_mean].tolist():
        edges = _edges(durations[:start])
        since = _bins(durations[start:], edges)
        if since[SLOW_FROM:].sum() >= ENOUGH:
            factor = log_bayes_factor(_bins(durations[:start], edges), since)
            best, found = max((best, found), (factor, start), key=lambda one: one[0])
    return found


def log_bayes_factor(past: NDArray[np.float64], since: NDArray[np.float64]) -> float:
    """Natural logarithm of the odds that counts by bin ``since`` come from a distribution of their own, against that of ``past``.

    Of their own means, with equal odds: all iterations changed (any distribution over the bins), or only some did (pauses: those
    that are not slow are distributed as ever).
    """
    healthy = HEALTHY_PRIOR + past
    slow, normal = since[SLOW_FROM:], since[:SLOW_FROM]
    some = _evidence(np.ones(2), np.array([normal.sum(), slow.sum()]))
    some += _evidence(OTHER_PRIOR[SLOW_FROM:], slow)
    some += _evidence(healthy[:SLOW_FROM], normal)
    return float(np.logaddexp(_evidence(OTHER_PRIOR, since), some) - np.log(2.0) - _evidence(healthy, since))


def _evidence(prior: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """Logarithm of the probability of counts by bin (Dirichlet-multinomial): a ratio of two multivariate beta functions."""
    after, before = (sum(map(lgamma, values.tolist())) - lgamma(float(values.sum())) for values in (prior + counts, prior))
    return after - before


def _edges(past: NDArray[np.float64]) -> NDArray[np.float64]:
    """Upper edges of the bins but the last, seconds: the median, what nine of ten stay below, and ``FAR`` times that."""
    middle, high = np.quantile(past, (0.5, 0.9)).tolist()
    slow = max(high, LEAST_RATIO * middle)
    return np.array([middle, slow, slow * FAR])


def _bins(durations: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.bincount(np.searchsorted(edges, durations), minlength=len(edges) + 1).astype(np.float64)
