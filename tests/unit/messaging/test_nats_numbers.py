"""Which batches of a life are new, whatever order and numbers somebody sends: each once, and bounded."""

from __future__ import annotations

import random

import pytest

from ncclwatch.messaging.nats_hub import MISSING, _is_new, _Life
from ncclwatch.messaging.reader import BatchReader


def life() -> _Life:
    return _Life("j", "a", BatchReader(), 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_each_is_new_once_in_any_order_within_the_window(seed: int) -> None:
    source, one = random.Random(seed), life()
    numbers = list(range(300))
    # As a window under way is sent again: nobody overtakes by more than 64.
    numbers.sort(key=lambda n: n + source.uniform(0, 64))
    first = [n for n in [*numbers, *numbers] if _is_new(one, n)]
    # What came before the very first is older than this engine.
    assert sorted(first) == [n for n in range(300) if n >= numbers[0] or n in first]
    assert len(first) == len(set(first)) and set(first) >= set(range(numbers[0], 300))


def test_a_gap_of_any_size_costs_little() -> None:
    one = life()
    for n in (0, 10**18, 2 * 10**18, 5):
        _is_new(one, n)
    assert len(one.missing) <= 2 * MISSING
    assert not _is_new(one, 10**18) and not _is_new(one, 7)
