"""Columns of integers: numbering and finding rows against plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ncclwatch.model.columns import SPARSE, Places, column, matching, numbered
from ncclwatch.model.steps import LIMIT, UNKNOWN


@pytest.mark.parametrize("seed", range(10))
def test_equal_rows_have_equal_numbers_and_others_have_not(seed: int) -> None:
    chance = random.Random(seed)
    rows = [tuple(chance.choice([0, 1, 5, -3, 2**61, -(2**61)]) for _ in range(4)) for _ in range(200)]
    numbers = numbered([np.array(values, np.int64) for values in zip(*rows, strict=True)]).tolist()
    assert len(set(zip(rows, numbers, strict=True))) == len(set(rows)) == len(set(numbers))
    assert min(numbers) >= 0 and max(numbers) < SPARSE * len(rows)


@pytest.mark.parametrize("seed", range(10))
def test_pairs_are_all_rows_with_the_same_number(seed: int) -> None:
    chance = np.random.default_rng(seed)
    held, asked = chance.integers(0, 12, 30), chance.integers(0, 12, 20)
    places = Places(held, np.arange(100, 130), 12)
    found = [pair for place, row in places.pairs(asked) for pair in zip(place.tolist(), row.tolist(), strict=True)]
    expected = [(i, 100 + j) for i, number in enumerate(asked) for j, other in enumerate(held) if number == other]
    assert sorted(found) == expected
    assert places.rows(3).tolist() == [100 + j for j, other in enumerate(held) if other == 3]


@pytest.mark.parametrize("seed", range(10))
def test_a_row_is_matched_with_the_first_that_is_equal(seed: int) -> None:
    chance = np.random.default_rng(seed)
    among, wanted = chance.integers(0, 4, (2, 30)) << 40, chance.integers(0, 5, (2, 50)) << 40
    held = list(zip(*among.tolist(), strict=True))
    expected = [held.index(row) if row in held else -1 for row in zip(*wanted.tolist(), strict=True)]
    assert matching((*wanted,), among).tolist() == expected
    assert matching((*wanted,), among[:, :0]).tolist() == [-1] * 50


def test_what_does_not_fit_is_cut_off_and_unknown_stays_unknown() -> None:
    assert column(lambda: iter([1, 2**64 - 1, -(2**70), UNKNOWN])).tolist() == [1, LIMIT, -LIMIT, UNKNOWN]
