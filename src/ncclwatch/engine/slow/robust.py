"""Robust statistics of times: a few odd values change nothing.

Robust means median and MAD (median absolute deviation, times 1.4826 for the standard deviation of a normal distribution).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SIGMA = 1.4826
"""Standard deviation of a normal distribution over its MAD."""

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
