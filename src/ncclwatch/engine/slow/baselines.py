"""What is normal: robust baselines that learn, and the rules of four papers as functions of their inputs.

Robust means median and MAD (median absolute deviation, times 1.4826 for the standard deviation of a normal distribution): a few
odd values change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SIGMA = 1.4826

Values = NDArray[np.float64]


def median_mad(values: Sequence[float] | Values) -> tuple[float, float]:
    """Median and robust standard deviation; (nan, nan) of nothing."""
    array = np.asarray(values, np.float64)
    if not array.size:
        return float("nan"), float("nan")
    middle = float(np.median(array))
    return middle, SIGMA * float(np.median(np.abs(array - middle)))


LONGEST_TIMES = 5.0
"""A stretch that many times the usual is no stretch of work but the wait for an iteration's end."""


def slope(before: Values, now: Values) -> tuple[float, float]:
    """Theil-Sen fit ``now = factor × before + extra``: (factor, extra). Robust against 29 % of outliers.

    Applied to the times between calls of a rank: what grows in proportion is computation, what is added to each call is
    communication or the host. (nan, nan) where ``before`` hardly varies.
    """
    if not before.size or before.shape != now.shape:
        return float("nan"), float("nan")
    # Calls that follow each other at once have no work between them; they would make what is added look proportional.
    keep = before > 0.3 * float(np.quantile(before, 0.9))
    keep &= before <= LONGEST_TIMES * float(np.median(before[keep]))
    # A host that runs ahead and waits once an iteration calls without work between: then calls tell nothing.
    if float(before[keep].sum()) < 0.5 * float(before.sum()):
        return float("nan"), float("nan")
    before, now = before[keep], now[keep]
    order = np.argsort(before, kind="stable")
    x, y = before[order], now[order]
    if len(x) > 128:
        chosen = np.linspace(0, len(x) - 1, 128).astype(np.int64)
        x, y = x[chosen], y[chosen]
    i, j = np.triu_indices(len(x), 1)
    dx = x[j] - x[i]
    wide = dx > 0.25 * (float(np.quantile(x, 0.9)) if len(x) else 0.0)
    if np.count_nonzero(wide) < 8:
        return float("nan"), float("nan")
    factor = float(np.median((y[j] - y[i])[wide] / dx[wide]))
    return factor, float(np.median(y - factor * x))


@dataclass(slots=True)
class Baseline:
    """An adaptive normal value of something whose slowness matters.

    A value within ``accept`` of the normal is learned (MegaTrace's alpha, 5 % there), one that is larger is not; three in a row
    that are clearly smaller replace what was learned (the first ones were the warm-up). Keeps the last ``keep`` values.
    """

    accept: float = 0.05
    keep: int = 100
    minimum: int = 4
    values: deque[float] = field(default_factory=deque)
    _faster: list[float] = field(default_factory=list)

    @property
    def known(self) -> bool:
        """Whether enough was seen to say what is normal."""
        return len(self.values) >= self.minimum

    @property
    def normal(self) -> float:
        """The median of what was learned; nan before anything was."""
        return median_mad(list(self.values))[0]

    @property
    def spread(self) -> float:
        """Robust standard deviation of what was learned."""
        return median_mad(list(self.values))[1]

    def limit(self, share: float, sigmas: float = 6.0) -> float:
        """Above this a value is slow: ``share`` and ``sigmas`` standard deviations above normal."""
        return self.normal + max(share * self.normal, sigmas * self.spread)

    def learn(self, value: float) -> None:
        """Take a value in; a slow one leaves the baseline as it is."""
        if len(self.values) < self.minimum:
            self.values.append(value)
            return
        normal, spread = self.normal, self.spread
        tolerance = max(self.accept * normal, 4 * spread)
        if value < normal - tolerance:
            self._faster.append(value)
            if len(self._faster) >= 3:
                self.values = deque(self._faster)
                self._faster = []
        elif value <= normal + tolerance:
            self._faster = []
            self.values.append(value)
            if len(self.values) > self.keep:
                self.values.popleft()


# --- the papers' own rules --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CcldResult:
    """What CCL-D's equations 1-4 say of one window: durations in seconds; ``slow`` after repetition is the caller's."""

    t_base: float
    t_max: float
    t_min: float
    ratio: float
    """R, equation 3."""
    share: float
    """P, equation 4: 1 pure computation, 0 pure communication; nan where nothing is slow."""
    static: bool
    """The base is the administrator's: the slowness is there from the start."""


@dataclass(slots=True)
class Ccld:
    """CCL-D 4.2 as published: ``initial`` is the administrator's T_base, ``theta`` the threshold of R, alpha and beta of P.

    The dynamic base is the mean of T_max over the first min(100 rounds, rounds of two minutes). ``repetitions`` windows must be
    slow before location. Barriers (AllReduce of at most 4 bytes) are the caller's to leave out.
    """

    initial: float
    theta: float = 3.0
    alpha: float = 0.4
    beta: float = 0.6
    repetitions: int = 1
    window_s: float = 60.0
    rounds: int = 100
    learn_s: float = 120.0
    _learned: list[float] = field(default_factory=list)
    _first: float | None = None
    _slow: int = 0

    def base(self) -> tuple[float, bool]:
        """T_base and whether it is the configured one (equation 1)."""
        if self._first is not None and self._complete:
            return float(np.mean(self._learned)), False
        return self.initial, True

    _complete: bool = False

    def window(self, times: Sequence[float], durations: Sequence[Sequence[float]]) -> CcldResult:
        """Judge one window: ``durations[k]`` are the ranks' durations in the round that began at ``times[k]`` (equations 2-4)."""
        base, static = self.base()
        ranges = [max(row) - min(row) for row in durations]
        chosen = int(np.argmax(ranges))
        t_max, t_min = max(durations[chosen]), min(durations[chosen])
        ratio = (t_max - base) / base
        share = (t_max - t_min) / (t_max - base) if t_max > base else float("nan")
        self._slow = self._slow + 1 if ratio > self.theta else self._slow
        for time, row in zip(times, durations, strict=True):
            if self._complete:
                break
            self._first = time if self._first is None else self._first
            if len(self._learned) >= self.rounds or time - self._first > self.learn_s:
                self._complete = True
                break
            self._learned.append(max(row))
        return CcldResult(base, t_max, t_min, ratio, share, static)

    @property
    def confirmed(self) -> bool:
        """Whether slow windows have repeated often enough for location."""
        return self._slow > self.repetitions

    def kind(self, share: float) -> str:
        """S1, S2 or S3 by P."""
        if share > self.beta:
            return "S1"
        return "S2" if share < self.alpha else "S3"


def theta_from(ratios: Sequence[float]) -> float:
    """CCL-D's threshold of R, determined statistically: mean plus three standard deviations of healthy windows, at least 1."""
    values = np.asarray(ratios, np.float64)
    return max(1.0, float(values.mean() + 3 * values.std())) if values.size else 3.0


MEGATRACE_GATE = 0.9
"""Iterations at or above this share of the average performance are not analysed (MegaTrace/VenusTrace, parameter settings)."""


def megatrace_gate(duration: float, average: float) -> bool:
    """Whether an iteration is so slow that it is analysed at all."""
    return average > 0 and average / duration < MEGATRACE_GATE


@dataclass(slots=True)
class MegatraceMean:
    """MegaTrace's mean of one graph node: updated while within alpha, anomalous beyond beta, from the third iteration on."""

    alpha: float = 0.05
    beta: float = 0.50
    mean: float = 0.0
    seen: int = 0

    def observe(self, value: float) -> bool:
        """Take a value; whether it is anomalous."""
        self.seen += 1
        if self.seen < 3 or self.mean == 0.0:
            self.mean = value if self.seen == 1 else (self.mean * (self.seen - 1) + value) / self.seen
            return False
        change = (value - self.mean) / self.mean
        if abs(change) <= self.alpha:
            self.mean += (value - self.mean) / self.seen
        return change > self.beta


MYCROFT_LATE_S = 1.0


def mycroft_late(starts: Values, ends: Values, late_s: float = MYCROFT_LATE_S) -> NDArray[np.bool_]:
    """Ranks that constantly start or end more than a second later than the others (Mycroft Algorithm 2).

    ``starts`` and ``ends`` have shape (rounds, ranks), seconds; compared with each round's median.
    """
    late = (starts - np.median(starts, axis=1, keepdims=True) > late_s) | (ends - np.median(ends, axis=1, keepdims=True) > late_s)
    result: NDArray[np.bool_] = late.mean(axis=0) > 0.5
    return result


def mycroft_trigger(throughput: float, normal: float, interval: float, usual: float) -> bool:
    """Mycroft Algorithm 1: throughput halved or interval between operations doubled."""
    return throughput < 0.5 * normal or interval > 2.0 * usual
