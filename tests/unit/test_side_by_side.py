"""Work by several processes: in order, and what a process takes with it that ends is done anew."""

from __future__ import annotations

import os
from functools import partial

import pytest

from ncclwatch.side_by_side import side_by_side


def who(item: int) -> tuple[int, int]:
    return item, os.getpid()


def dies_elsewhere(item: int, *, home: int) -> int:
    if item == 5 and os.getpid() != home:
        os._exit(9)
    return item


def test_all_is_done_in_order_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    done = list(side_by_side(who, range(10), chunk=2))
    assert [item for item, _ in done] == list(range(10))
    assert os.getpid() not in {process for _, process in done}


def test_a_process_that_ends_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert list(side_by_side(partial(dies_elsewhere, home=os.getpid()), range(8), chunk=2)) == list(range(8))


def test_one_cpu_or_one_chunk_is_worked_on_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {process for _, process in side_by_side(who, range(3), chunk=4)} == {os.getpid()}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert {process for _, process in side_by_side(who, range(9), chunk=2)} == {os.getpid()}
