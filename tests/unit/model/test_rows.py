"""Records by the thousand: the same as one by one, whatever values their columns hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ncclwatch.model.rows import both, by_value, distinct, joined, last_of, narrowed

RECORD = np.dtype({"names": ["one", "two"], "formats": ["<u8", "<u2"], "offsets": [0, 10], "itemsize": 24})


@pytest.mark.parametrize("kinds", [1, 3, 1000, 1 << 20])
def test_places_by_value_keep_the_order_within_one_value(kinds: int) -> None:
    column = np.random.default_rng(kinds).integers(0, kinds, 200_000 if kinds > 1 << 16 else 3000).astype(np.uint64)
    order, bounds = by_value(column)
    assert (order == np.argsort(column, kind="stable")).all()
    assert (bounds == np.r_[0, np.flatnonzero(np.diff(column[order])) + 1, len(column)]).all()


def test_a_narrower_record_has_the_values_of_its_fields() -> None:
    records = np.zeros(5, RECORD)
    records["one"], records["two"] = np.arange(5), np.arange(5)[::-1]
    found = narrowed(records, np.dtype([("two", "<u2")]))
    assert found.dtype.names == ("two",) and found["two"].tolist() == [4, 3, 2, 1, 0]


def test_of_nothing_there_is_nothing() -> None:
    order, bounds = by_value(np.zeros(0, np.uint32))
    assert len(order) == 0 and bounds.tolist() == [0]
    assert last_of(np.zeros(0, np.uint32)).tolist() == []


def test_where_values_come_last() -> None:
    assert last_of(np.array([7, 9, 7, 3, 9, 3, 3])).tolist() == [2, 4, 6]
    # Hashes that differ by as little as the numbers beside them are told apart.
    words, numbers = np.array([160, 161, 160, 161, 161], np.uint64), np.array([2, 1, 2, 1, 2], np.uint16)
    assert last_of(both(words, numbers)).tolist() == [2, 3, 4]


def test_parts_joined_are_the_records_one_after_the_other() -> None:
    parts = []
    for number in range(3):
        part = np.zeros(number + 1, RECORD)
        part["one"], part["two"] = number, np.arange(number + 1)
        parts.append(part)
    # Every second record of a larger array: not one after the other in memory.
    parts.append(np.repeat(parts[2], 2)[::2])
    whole = joined(parts)
    assert whole.dtype == RECORD
    assert whole["one"].tolist() == [0, 1, 1, 2, 2, 2, 2, 2, 2]
    assert whole["two"].tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2]
    assert joined(parts[:1]) is parts[0]


@pytest.mark.parametrize(
    "values", [[], [3, 1, 3, 2], np.array([[2, 1], [1, 2]]), np.array(["b", "a", "b"]), np.array([5], np.uint8)]
)
def test_distinct_values_are_those_of_numpy(values: Any) -> None:
    found, expected = distinct(values), np.unique(values)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()
