"""Columns of integers: what a job shows thousands of times is compared in numpy, and made into objects only where it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
Flags = NDArray[np.bool_]

UNKNOWN = -(1 << 62)
"""Fact: stands in a column where there is no value."""
LIMIT = 1 << 60
"""Bound: values come out of the memory of other processes: sums and differences of two must still fit."""
WIDEST = 1 << 62
"""Bound: several columns are mixed into one integer below this."""


def column(values: Callable[[], Iterable[int]], count: int) -> Column:
    """``count`` integers; what would not fit is cut off. ``values`` may be asked twice."""
    try:
        return np.fromiter(values(), np.int64, count)
    except OverflowError:
        return np.fromiter((value if value == UNKNOWN else max(-LIMIT, min(LIMIT, value)) for value in values()), np.int64, count)


def numbered(columns: Sequence[Column]) -> Column:
    """One number a row from 0 on, the same for rows in which all columns are equal. O(n log n)."""
    mixed = np.zeros(len(columns[0]), np.int64)
    if not len(mixed):
        return mixed
    size = 1
    for values in columns:
        own, low, span = values, int(values.min()), int(values.max()) - int(values.min()) + 1
        if size * span > WIDEST:
            mixed, own = _dense(mixed), _dense(values)
            size, low, span = int(mixed.max()) + 1, 0, int(own.max()) + 1
        mixed = mixed * span + (own - low)
        size *= span
    return _dense(mixed)


def _dense(values: Column) -> Column:
    dense: Column = np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return dense


class Places:
    """Finds rows by a number from 0 on, of which several may be equal."""

    def __init__(self, numbers: Column, rows: Column, size: int) -> None:
        """``numbers``: one for each of ``rows``; all below ``size``."""
        order = np.argsort(numbers, kind="stable")
        self._rows = rows[order]
        self._count = np.bincount(numbers, minlength=size)
        self._first = np.cumsum(self._count) - self._count

    def rows(self, number: int) -> list[int]:
        """The rows with a number, in their order."""
        first = int(self._first[number])
        found: list[int] = self._rows[first : first + int(self._count[number])].tolist()
        return found

    def pairs(self, numbers: Column) -> Iterable[tuple[Column, Column]]:
        """For each of ``numbers`` every row that has it: pairs of (place in ``numbers``, row), as many at a time as places have
        that many rows.
        """
        left = np.arange(len(numbers))
        for turn in range(int(self._count[numbers].max(initial=0))):
            left = left[self._count[numbers[left]] > turn]
            yield left, self._rows[self._first[numbers[left]] + turn]
