"""Columns of integers by the hundred thousand: numbered, matched and found by number without a step of Python for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ncclwatch.model.steps import bounded

Column = NDArray[np.int64]
Flags = NDArray[np.bool_]

WIDEST = 1 << 62
"""Bound: several columns are mixed into one integer below this."""
FEW = 8
"""Bound: so many values are compared one by one."""
SPARSE = 4
"""Bound: numbers that are below so many times the rows need not be made dense."""


def column(values: Callable[[], Iterable[int]]) -> Column:
    """Integers as a column; what would not fit is cut off. ``values`` may be asked twice."""
    try:
        return np.fromiter(values(), np.int64)
    except OverflowError:
        return np.fromiter(map(bounded, values()), np.int64)


def numbered(columns: Sequence[Column]) -> Column:
    """One number a row from 0 on, the same for rows in which all columns are equal: few more than rows. O(n log n)."""
    mixed, size = _mixed(columns)
    return mixed if size <= SPARSE * len(mixed) else _dense(mixed)


def _mixed(columns: Sequence[Column]) -> tuple[Column, int]:
    """The columns in one, and what its numbers from 0 on are below."""
    mixed, size = np.zeros(len(columns[0]), np.int64), 1
    if not len(mixed):
        return mixed, size
    every = np.array(columns)
    lows, highs = every.min(axis=1).tolist(), every.max(axis=1).tolist()
    for values, low, high in zip(columns, lows, highs, strict=True):
        own, span = values - low, high - low + 1
        if size * span > WIDEST:
            mixed, own = _dense(mixed), _dense(values)
            size, span = int(mixed.max()) + 1, int(own.max()) + 1
        if span > 1:
            mixed, size = mixed * span + own, size * span
    return mixed, size


def _dense(values: Column) -> Column:
    return np.asarray(np.unique(values, return_inverse=True)[1].reshape(-1), np.int64)


def matching(wanted: Sequence[Column], among: Sequence[Column] | Column) -> Column:
    """For each row of the columns ``wanted`` the first one of those of ``among`` that is equal; else -1. O(n log n)."""
    numbers, size = numbered([np.concatenate(both) for both in zip(among, wanted, strict=True)]), len(among[0])
    row_of = np.full(int(numbers.max(initial=-1)) + 1, -1)
    row_of[numbers[:size][::-1]] = np.arange(size)[::-1]
    return row_of[numbers[size:]]


def is_among(values: Column, few: Sequence[int] | Column) -> Flags:
    """For each value whether it is one of ``few``. So few are compared one by one, which is quicker than numpy's ``isin``."""
    if len(few) > FEW:
        return np.isin(values, few)
    found = np.zeros(len(values), np.bool_)
    for one in few:
        found |= values == one
    return found


def has_one(numbers: Column, chosen: Flags) -> Flags:
    """For each row whether any of the ``chosen`` has its number; these are from 0 on."""
    found = np.zeros(int(numbers.max(initial=-1)) + 1, np.bool_)
    found[numbers[chosen]] = True
    return found[numbers]


def medians(values: NDArray[np.float64], key: Column) -> tuple[NDArray[np.float64], Column]:
    """The median of the values of each key (0 to the largest; nan where there is none), and of how many it is."""
    sizes = np.bincount(key)
    ordered, first = np.append(values[np.lexsort((values, key))], np.nan), np.cumsum(sizes) - sizes
    middle = (ordered[first + np.maximum(sizes - 1, 0) // 2] + ordered[first + sizes // 2]) / 2
    return np.where(sizes, middle, np.nan), sizes


class Places:
    """Finds rows by a number from 0 on, of which several may be equal."""

    def __init__(self, numbers: Column, rows: Column, size: int) -> None:
        """``numbers``: one for each of ``rows``; all below ``size``."""
        self._rows = rows[np.argsort(numbers, kind="stable")]
        self._count = np.bincount(numbers, minlength=size)
        self._first = np.cumsum(self._count) - self._count

    def rows(self, number: int) -> Column:
        """The rows with a number, in their order."""
        return self._rows[self._first[number] :][: self._count[number]]

    def pairs(self, numbers: Column) -> Iterator[tuple[Column, Column]]:
        """For each of ``numbers`` every row that has it: pairs of (place in ``numbers``, row), one row of each at a time."""
        left = np.arange(len(numbers))
        for turn in range(int(self._count[numbers].max(initial=0))):
            left = left[self._count[numbers[left]] > turn]
            yield left, self._rows[self._first[numbers[left]] + turn]
