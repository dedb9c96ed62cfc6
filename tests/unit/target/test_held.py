"""Whether the memory of processes can be read: of several at once, one of which keeps its reader waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ncclwatch.target import held

FIRST, STUCK, LAST = 101, 102, 103


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Pids that were read of. Of one the read comes back once the test is over, and its thread seems to sleep in the kernel."""
    pids: list[int] = []
    over = threading.Event()

    def read_first(pid: int) -> bytes:
        pids.append(pid)
        if pid == STUCK:
            over.wait(60)
        return b"x"

    monkeypatch.setattr(held, "read_first", read_first)
    monkeypatch.setattr(held, "LOOK_S", 0.01)
    monkeypatch.setattr(held._Reader, "sleeps", True)
    monkeypatch.setattr(held, "_let", {})
    monkeypatch.setattr(held, "_left", {})
    yield pids
    over.set()


def test_several_are_asked_in_one_exchange_and_not_again_in_the_same_moment(asked: list[int]) -> None:
    held.check_all([FIRST, LAST])
    held.check(LAST)
    held.check(FIRST)
    assert asked == [FIRST, LAST]
    held._let[LAST] -= 2 * held.MOMENT_S
    held.check(LAST)
    assert asked == [FIRST, LAST, LAST]


def test_one_that_keeps_its_reader_waiting_is_told_when_it_is_asked_alone_and_the_others_are_read(asked: list[int]) -> None:
    held.check_all([FIRST, STUCK, LAST])
    assert asked == [FIRST, STUCK]
    held.check(FIRST)
    held.check(LAST)
    assert asked == [FIRST, STUCK, LAST], "who was behind it is asked alone"
    with pytest.raises(held.HeldError, match="102"):
        held.check(STUCK)
    held.check_all([FIRST, STUCK, LAST])
    assert asked.count(STUCK) == 1, "nobody waits for it a second time"
