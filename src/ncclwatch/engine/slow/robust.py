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
