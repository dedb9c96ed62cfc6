"""Work by several processes: in order, and what a process takes with it that ends is done anew."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from ncclwatch.side_by_side import apart, beside, side_by_side


def who(item: int) -> tuple[int, int]:
    return item, os.getpid()


def children() -> set[str]:
    """Of this process, zombies as well. A test before may have left a helper of Python's own: that is none of the work's."""
    return {pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


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


def ends_at(item: int, *, ending: int) -> int:
    if item == ending:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def as_lost(item: int, code: int) -> int:
    return -1000 * item + code


@pytest.mark.parametrize("cpus", [{0}, {0, 1}])
def test_what_ends_its_process_is_told_and_the_rest_is_done(monkeypatch: pytest.MonkeyPatch, cpus: set[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
    done = list(side_by_side(partial(ends_at, ending=5), range(8), chunk=2, lost=as_lost))
    assert done == [0, 1, 2, 3, 4, -5000 - signal.SIGKILL, 6, 7]


@pytest.mark.parametrize("ending", [0, 2])
def test_work_apart_goes_on_behind_what_was_lost(ending: int) -> None:
    done = list(apart(partial(ends_at, ending=ending), range(3), as_lost))
    assert done == [-1000 * item - signal.SIGKILL if item == ending else item for item in range(3)]
    assert list(apart(who, [], as_lost)) == []
    assert os.getpid() not in {process for _, process in apart(who, range(3), lambda item, _: (item, 0))}


def test_who_stops_asking_leaves_no_process() -> None:
    asked = apart(who, range(100_000), lambda item, _: (item, 0))
    _, process = next(asked)
    asked.close()  # type: ignore[attr-defined]
    with pytest.raises(ChildProcessError):
        os.waitpid(process, os.WNOHANG)


def test_what_work_raises_is_raised_here() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        list(apart(int, ["1", "x"], lambda *_: 0))


def test_the_second_is_done_by_another_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    before = children()
    done = list(beside(who, range(4)))
    assert [item for item, _ in done] == list(range(4))
    assert [process == os.getpid() for _, process in done] == [True, False, True, True]
    assert {process for _, process in beside(who, range(4), alone=True)} == {os.getpid()}
    assert children() <= before


def test_a_second_that_is_lost_is_done_here_and_one_nobody_asks_for_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    before = children()
    assert list(beside(partial(dies_elsewhere, home=os.getpid()), [4, 5, 6])) == [4, 5, 6]
    asked = beside(int, ["1", "x"])
    assert next(asked) == 1
    asked.close()
    with pytest.raises(ValueError, match="invalid literal"):
        list(beside(int, ["1", "x"]))
    assert children() <= before
