"""The period of a sequence of calls: what ends an iteration."""

from __future__ import annotations

import numpy as np
import pytest

from ncclwatch.collect.cadence import NONE, Period, find, fingerprints

TENSOR, DATA, GATHER, SEND, RECEIVE = (np.uint64(0x9E3779B97F4A7C15) * np.arange(1, 6, dtype=np.uint64)).tolist()
TRAINING = [TENSOR] * 16 + [DATA, GATHER]


def period_of(calls: list[int], times: list[float] | None = None) -> Period:
    return find(np.array(calls, np.uint64), np.array(times if times is not None else range(len(calls)), np.float64))


def ends(calls: list[int], period: Period) -> list[int]:
    return np.flatnonzero(fingerprints(np.array(calls, np.uint64), period.run) == np.uint64(period.marker)).tolist()


def test_an_iteration_ends_with_the_last_of_what_comes_once_in_it() -> None:
    period = period_of(TRAINING * 4)
    assert period.length == 18 and ends(TRAINING * 4, period) == [17, 35, 53, 71]
    assert period_of((TRAINING * 4)[5:]) == period, "wherever it is taken up"


def test_nothing_that_was_seen_less_than_three_times_is_a_period() -> None:
    assert period_of([]) == NONE
    assert period_of([DATA, GATHER, DATA, GATHER]) == NONE
    assert period_of([TENSOR] * 72 + [DATA] + [TENSOR] * 72 + [DATA]).length == 1, "an inner loop is all there is yet"


def test_calls_that_come_in_any_order_inside_do_not_matter() -> None:
    rng = np.random.default_rng(0)
    calls = [token for _ in range(5) for token in [*rng.permutation([TENSOR] * 8 + [SEND] * 8).tolist(), DATA, GATHER]]
    period = period_of(calls)
    assert period.length == 18 and calls[ends(calls, period)[0]] == GATHER


def test_what_was_called_before_and_is_over_is_no_period() -> None:
    assert period_of([SEND, RECEIVE] * 10 + TRAINING * 4).length == 18
    assert period_of([SEND, RECEIVE] * 10 + [TENSOR, DATA, DATA, TENSOR, TENSOR, DATA]) == NONE


def test_an_evaluation_between_does_not_hide_the_period() -> None:
    assert period_of(TRAINING * 4 + [TENSOR] * 24 + TRAINING * 4).length == 18


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_where_no_call_comes_once_a_change_of_what_is_called_ends_an_iteration(micro_batches: int) -> None:
    calls = ([TENSOR, TENSOR, SEND] * micro_batches + [RECEIVE, TENSOR, TENSOR] * micro_batches) * 4
    period = period_of(calls)
    assert period.length == 6 * micro_batches and period.run > 1
    assert set(np.diff(ends(calls, period))) == {period.length}


def test_of_two_calls_that_alternate_the_one_before_the_pause_is_the_last() -> None:
    for offset in (0, 1):
        calls = ([DATA, GATHER] * 10)[offset:]
        times = [k // 2 + (0.01 if k % 2 else 0.0) for k in range(20)][offset:]
        assert calls[ends(calls, period_of(calls, times))[0]] == GATHER
