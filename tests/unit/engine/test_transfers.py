"""Columns of the engine: numbering and finding rows against plain Python, and values that no healthy process has."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.engine.transfers import SPARSE, Places, column, matching, numbered
from ncclwatch.model.steps import LIMIT, UNKNOWN
from unit.synthetic import Rank, communicator, looks, recv, send

EXTREMES = (0, 1, 7, -1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


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


@pytest.mark.parametrize("seed", range(60))
def test_values_that_no_healthy_process_has_do_not_break_location(seed: int) -> None:
    """Memory of another process is not to be trusted: some verdict comes of anything."""
    chance = random.Random(seed)

    def odd(operation: object) -> object:
        [sub] = operation.subs  # type: ignore[attr-defined]
        names = chance.sample(
            ["channel", "peer", "nsteps", "base", "posted", "received", "transmitted", "done", "gpu_ready", "rank"], 3
        )
        return replace(operation, subs=(replace(sub, **{name: chance.choice(EXTREMES) for name in names}),))  # type: ignore[type-var]

    ranks = []
    for rank in range(4):
        operations = (
            send((rank + 1) % 4, sent=8, done=4, produced=8),
            recv((rank - 1) % 4, posted=12, received=4, delivered=4, consumed=4),
        )
        ranks.append(Rank(rank, 4, (communicator(rank, 4),), tuple(odd(one) for one in operations)))  # type: ignore[misc]
    assert diagnose(looks(ranks)).summary
