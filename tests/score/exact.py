"""Exact bounds for counts: Clopper-Pearson for a share of judgements, Garwood for a rate of events.

Both invert the tail sum of the distribution by bisection; nothing but the standard library is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

CONFIDENCE = 0.95
_STEPS = 60
"""Halvings of a bisection: more would not change a double."""


@dataclass(frozen=True, slots=True)
class Share:
    """So many of so many, with its exact interval."""

    count: int
    of: int
    low: float
    high: float

    @property
    def text(self) -> str:
        """As the tables print it."""
        if not self.of:
            return "0 of 0"
        return f"{self.count} of {self.of} ({self.count / self.of:.1%}; {self.low:.1%} to {self.high:.1%})"


def share(count: int, of: int, confidence: float = CONFIDENCE) -> Share:
    """The two-sided Clopper-Pearson interval: shares for which neither so many or more nor so many or fewer are too unlikely."""
    if not 0 <= count <= of:
        raise ValueError(f"{count} of {of} is no share")
    tail = (1 - confidence) / 2
    low = _solve(lambda p: binomial_tail(count, of, p) - tail) if count else 0.0
    high = _solve(lambda p: tail - (1 - binomial_tail(count + 1, of, p))) if count < of else 1.0
    return Share(count, of, low, high)


def binomial_tail(count: int, of: int, p: float) -> float:
    """Probability of ``count`` or more of ``of``: the regularised incomplete beta function at p, of count and of - count + 1."""
    if count <= 0:
        return 1.0
    if count > of or p <= 0:
        return 0.0
    if p >= 1:
        return 1.0
    ways = math.lgamma(of + 1)
    terms = (
        math.exp(ways - math.lgamma(k + 1) - math.lgamma(of - k + 1) + k * math.log(p) + (of - k) * math.log1p(-p))
        for k in range(count, of + 1)
    )
    return min(1.0, math.fsum(terms))


def rate_bound(events: int, hours: float, confidence: float = CONFIDENCE) -> float:
    """The exact one-sided upper bound of events an hour (Poisson): a higher rate would bring so few too rarely."""
    if hours <= 0:
        return math.inf
    most = 10.0 + 3 * events  # the bound is below that: 3.0 at no event, and it grows by less than 2 for each
    return _solve(lambda mean: (1 - confidence) - poisson_head(events, mean), most) / hours


def poisson_head(events: int, mean: float) -> float:
    """Probability of ``events`` or fewer."""
    if mean <= 0:
        return 1.0
    return min(1.0, math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(events + 1)))


def _solve(rising: Callable[[float], float], most: float = 1.0) -> float:
    """Where a rising function of 0 to ``most`` crosses zero."""
    low, high = 0.0, most
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
