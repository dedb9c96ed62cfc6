"""Which rank broke its own habit: left a call out, made another in its place, or swapped two."""

from __future__ import annotations

import numpy as np
import pytest

from ncclwatch.collect.call_order import RECORD, CallOrder
from ncclwatch.engine.call_order import Deviation, find_deviation
from ncclwatch.model.events import Function

TENSOR, DATA = 0x10, 0x20
KINDS = {
    "t": (TENSOR, (1, 64, 7)),
    "u": (TENSOR, (1, 128, 7)),
    "r": (DATA, (6, 256, 7)),
    "g": (DATA, (5, 256, 7)),
    "x": (TENSOR, (5, 9, 7)),
    "p": (0x30, (1, 16, 7)),
}


def order(calls: str) -> CallOrder:
    """A process's calls, a letter each."""
    made, records = CallOrder(), np.zeros(len(calls), RECORD)
    for n, letter in enumerate(calls):
        comm, (function, count, datatype) = KINDS[letter]
        records[n] = 1000 + n, comm, count, -1, Function.ALL_REDUCE + function, datatype, 0
    made.add(records)
    return made


ITERATION = "ttttttrg"


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (ITERATION * 4, None),
        (ITERATION * 4 + "ttt", None),
        # A tensor-parallel call is left out; the data-parallel one comes a call early.
        (ITERATION * 4 + "tttttr", Deviation(TENSOR, DATA, 0, left_out=True)),
        (ITERATION * 4 + "tttttrg", Deviation(TENSOR, DATA, 1, left_out=True)),
        # The first of two on one communicator is left out.
        (ITERATION * 4 + "ttttttg", Deviation(DATA, DATA, 0, left_out=True)),
        # Two are swapped: what was due comes next.
        (ITERATION * 4 + "ttttttgr", Deviation(DATA, DATA, 1, left_out=False)),
        # One of many alike is left out, and the host runs on: what follows is as after the last of them.
        (ITERATION * 4 + "tttttrg" + ITERATION * 2, Deviation(TENSOR, DATA, 17, left_out=True)),
        # Something that never comes is called in its place.
        (ITERATION * 4 + "tttx", Deviation(TENSOR, TENSOR, 0, left_out=False)),
        # Too little is known of a job that has just begun.
        ("ttttr", None),
        ("", None),
    ],
)
def test_what_broke_the_habit(calls: str, expected: Deviation | None) -> None:
    assert find_deviation(order(calls)) == expected


def test_a_habit_with_two_kinds_of_iterations_is_no_deviation() -> None:
    """Every fourth iteration reports its loss."""
    pattern = (ITERATION * 3 + "ttttttrgu") * 3
    assert find_deviation(order(pattern)) is None


LAYERS = "tttpttxp"
LONG = LAYERS * 6 + "rg"


def test_an_iteration_of_many_layers_ends_without_breaking_a_habit() -> None:
    """Inside it the layers are a pattern of their own: only what is longer than an iteration tells that they end."""
    assert find_deviation(order(LONG * 5)) is None
    assert find_deviation(order(LONG * 5 + LAYERS * 3 + "tttpt" + "xp" + LAYERS)) == Deviation(TENSOR, TENSOR, 9, left_out=True)
