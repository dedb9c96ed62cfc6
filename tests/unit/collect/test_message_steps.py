"""What of a process's messages inside its node is open, by calls and steps alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from ncclwatch.collect.call_order import ALIKE, RECORD, CallOrder
from ncclwatch.collect.message_steps import MessageSteps, Place
from ncclwatch.model.events import Function
from ncclwatch.model.state import Direction, HostConnection, ProcessSample, Transport
from unit.synthetic import Rank, communicator

PEER = 1
AT = communicator(0, 2, transport=Transport.SHM)
SENDS: Place = (AT.address, (True, PEER))
RECEIVES: Place = (AT.address, (False, PEER))


def sample_of(second: float, *ends: HostConnection) -> ProcessSample:
    """A sample that takes a millisecond, of a process with these ends of connections."""
    (taken,) = Rank(0, 2, (replace(AT, host_connections=ends),), host="node").looks(1)
    return replace(taken, time_ns=int(second * 1e9), wall_ns=int(second * 1e9))


def end(steps: int, direction: Direction = Direction.SEND, *, unread: int = 0, index: int = 1) -> HostConnection:
    sends = direction is Direction.SEND
    return HostConnection(0, PEER, direction, index, steps - unread if sends else steps, steps if sends else steps + unread)


def as_called(samples: Iterable[tuple[int, int]]) -> Callable[[int], dict[Place, int]]:
    """What had been called by a moment, of a process with a sample a second."""
    calls = {second: count for second, (count, _) in enumerate(samples, 1)}
    return lambda until_ns: {SENDS: calls.get(until_ns // 10**9, 0)}


def job(each: int, count: int, *, ahead: int = 0, seed: int = 1, batch: int = 16) -> list[tuple[int, int, float]]:
    """(calls, steps, what is open) of an iteration of ``batch`` messages that are called at once, at moments of any kind."""
    chance, found = random.Random(seed), list[tuple[int, int, float]]()
    for iteration in range(1, count + 1):
        calls = iteration * batch
        over = calls - chance.choice((batch, batch // 2, 3, 1, 0)) - ahead
        part = chance.randrange(each) if over < calls - ahead else 0
        made = max(0, over * each + part)
        found.append((calls, made, calls - made / each))
    return found


@pytest.mark.parametrize("each", [1, 4, 24])
@pytest.mark.parametrize("before", [0, 7_001])
def test_what_is_open_is_known_once_a_few_iterations_were_seen(each: int, before: int) -> None:
    played = job(each, 60)
    samples = [(calls, steps) for calls, steps, _ in played]
    steps, called = MessageSteps(), as_called(samples)
    said = []
    for second, (_, made) in enumerate(samples, 1):
        steps.take(sample_of(second, end(before + made)), called)
        said.append(steps.open().get(SENDS))
    late = [(one, left) for one, (_, _, left) in zip(said, played, strict=True)][30:]
    assert all(one == pytest.approx(left) for one, left in late), late


def test_a_host_that_is_always_ahead_is_known_to_be_where_all_its_calls_were_seen() -> None:
    samples = [(0, 0), *((calls, (calls - 1) * 24) for calls in range(2, 40))]
    steps, called = MessageSteps(), as_called(samples)
    for second, (_, made) in enumerate(samples, 1):
        steps.take(sample_of(second, end(made)), called)
    assert steps.open()[SENDS] == pytest.approx(1.0)


def test_messages_that_grow_are_learned_anew() -> None:
    samples = [(calls * 8, calls * 8 * 2) for calls in range(1, 31)]
    samples += [(240 + calls * 8, 480 + calls * 8 * 6) for calls in range(1, 41)]
    steps, called = MessageSteps(), as_called(samples)
    for second, (_, made) in enumerate(samples, 1):
        steps.take(sample_of(second, end(100 + made)), called)
    assert steps.open().get(SENDS, 0.0) == pytest.approx(0.0)


def test_small_messages_count_no_steps() -> None:
    steps = MessageSteps()
    for second in range(1, 40):
        # LL: the receiver says how far it is, the tail stays where it was.
        steps.take(sample_of(second, HostConnection(0, PEER, Direction.SEND, 1, second, 0)), lambda _: {SENDS: 1})
    assert steps.open() == {}


def test_a_receive_is_counted_by_what_was_read() -> None:
    steps = MessageSteps()
    for second in range(1, 30):
        made = end(second * 4, Direction.RECV, unread=2)
        steps.take(sample_of(second, made), lambda until_ns: {RECEIVES: until_ns // 10**9})
    assert steps.open()[RECEIVES] == pytest.approx(0.0)


def test_a_sample_is_learned_from_when_the_calls_up_to_its_end_are_known() -> None:
    steps, asked = MessageSteps(), list[int]()

    def called(until_ns: int) -> dict[Place, int]:
        asked.append(until_ns)
        return {}

    one, other = sample_of(1, end(4)), sample_of(2, end(8))
    steps.take(one, called)
    steps.take(one, called)
    steps.take(other, called)
    ends = [sample.time_ns + sample.duration_ns for sample in (one, other)]
    assert asked == [0, ends[0], ends[0], ends[1]]


def test_where_calls_are_no_longer_kept_nothing_is_forgotten() -> None:
    steps = MessageSteps()
    for second in range(1, 30):
        steps.take(sample_of(second, end(second * 4)), lambda until_ns: {SENDS: until_ns // 10**9})
    assert steps.open()[SENDS] == pytest.approx(0.0)
    calls = iter((None, {SENDS: 900}))
    steps.take(sample_of(900, end(899 * 4)), lambda _: next(calls))
    assert steps.open()[SENDS] == pytest.approx(1.0)


def test_of_messages_of_different_sizes_nothing_is_said_until_they_are_alike_again() -> None:
    order, made, said = CallOrder(), 0, list[bool]()
    sizes = [4] * 20 + [4, 7] * 20 + [4] * ((ALIKE + 40) // 4)
    for second, size in enumerate(sizes, 1):
        calls = np.zeros(4, RECORD)
        calls["function"], calls["comm"], calls["peer"], calls["count"] = Function.SEND, AT.address, PEER, size
        calls["time_ns"] = second * 10**9 - 10**8
        order.add(calls)
        made += 4 * size
        said.append(SENDS in order.open_inside(sample_of(second, end(9 + made))))
    assert said[19] and not any(said[21:60]) and said[-1]


def test_with_more_calls_since_a_sample_than_are_kept_nothing_is_miscounted() -> None:
    order, called = CallOrder(room=8), 0
    for second in range(1, 40):
        more = 2 if second != 30 else 50
        calls = np.zeros(more, RECORD)
        calls["function"], calls["comm"], calls["peer"], calls["count"] = Function.SEND, AT.address, PEER, 4
        calls["time_ns"] = second * 10**9 - 10**8 + np.arange(more)
        order.add(calls)
        called += more
        found = order.open_inside(sample_of(second, end(9 + 4 * (called - 1))))
    assert found[SENDS] == pytest.approx(0.0)


def test_a_connection_that_one_sample_misses_is_still_known() -> None:
    steps, called = MessageSteps(), as_called([(100 + second, 0) for second in range(1, 80)])
    for second in range(1, 80):
        ends = () if second == 50 else (end(9_000 + 4 * (99 + second)),)
        steps.take(sample_of(second, *ends), called)
        said = steps.open()
        assert said.get(SENDS) == (None if second == 50 else pytest.approx(0.0)) or second < 20, second


def test_steps_that_cannot_be_are_not_believed() -> None:
    """Memory of a process may hold anything; nothing that follows from it may be larger than what was called."""
    steps = MessageSteps()
    for second in range(1, 30):
        steps.take(sample_of(second, end(2**63 + second * 4)), lambda until_ns: {SENDS: until_ns // 10**9})
    assert SENDS in steps.open()
    steps.take(sample_of(30, end(0)), lambda until_ns: {SENDS: until_ns // 10**9})
    assert steps.open() == {}
