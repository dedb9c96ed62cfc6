"""Rates of connections from the steps their proxies count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.collect.step_rates import StepRates, absolute_counts, in_network, running_counts
from ncclwatch.model.state import Direction, NetStep, OpPhase
from unit.synthetic import WORLD, Rank, communicator, process, recv, send

KEY = (1, 2, 0, 0, 1, Direction.SEND, 0)
MS = 1_000_000


def test_ccld_counts_how_often_the_count_was_caught_moving() -> None:
    """The example of CCL-D 4.1: eight sends in two leaps are 1/2, in seven they are 1/7."""
    fast, slow = StepRates(), StepRates()
    for time, count in enumerate([0, 4, 8, 8, 8, 8, 8, 8, 8]):
        fast.feed(time * MS, {KEY: count})
    for time, count in enumerate([0, 1, 2, 3, 4, 5, 6, 8, 8]):
        slow.feed(time * MS, {KEY: count})
    quick, late = fast.rate(KEY), slow.rate(KEY)
    assert quick is not None and late is not None
    assert (quick.rate, late.rate) == (1 / 2, 1 / 7)
    assert quick.per_second == late.per_second == pytest.approx(1000)
    assert (quick.steps, quick.looks) == (8, 9)
    assert quick.window_s == pytest.approx(0.008)


def test_one_look_is_no_rate_and_no_change_is_none() -> None:
    rates = StepRates()
    assert rates.rate(KEY) is None
    rates.feed(0, {KEY: 5})
    assert rates.rate(KEY) is None
    rates.feed(MS, {KEY: 5})
    still = rates.rate(KEY)
    assert still is not None
    assert (still.rate, still.per_second, still.changes) == (None, 0.0, 0)


def test_a_count_that_falls_back_is_not_progress() -> None:
    """The step up to which operations have begun is ahead of what a running one has done."""
    rates = StepRates()
    for time, count in enumerate([10, 18, 12, 14, 18, 20]):
        rates.feed(time * MS, {KEY: count})
    found = rates.rate(KEY)
    assert found is not None
    assert (found.steps, found.changes) == (20, 2)


def test_only_the_window_counts() -> None:
    rates = StepRates(window_ns=10 * MS)
    for time in range(100):
        rates.feed(time * MS, {KEY: time if time < 50 else 50})
    found = rates.rate(KEY)
    assert found is not None
    assert (found.per_second, found.changes, found.looks) == (0.0, 0, 11)


def test_a_process_that_is_gone_is_forgotten() -> None:
    rates = StepRates()
    rates.feed(0, {KEY: 1})
    rates.feed(1, {KEY: 1})
    rates.forget([1])
    assert rates.rate(KEY) is None


def test_the_counts_of_running_operations_are_absolute() -> None:
    own = (
        send(1, sent=10, done=8, produced=12),
        recv(3, posted=12, received=9, delivered=9, consumed=7),
        send(1, sent=90, done=90, produced=None, phase=OpPhase.READY, queued_behind=1),
    )
    (sample,) = Rank(0, 4, (communicator(0, 4),), own).looks(1)
    pid = process(0, 4).pid
    assert running_counts(sample) == {
        (pid, WORLD, 0, 0, 1, Direction.SEND, 0): 970,
        (pid, WORLD, 0, 0, 3, Direction.RECV, 0): 969,
    }
    assert in_network(sample) == {(pid, WORLD, 0, 0, 1, Direction.SEND, 0): 2}


def test_an_idle_connection_counts_what_it_has_come_to() -> None:
    used = (NetStep(0, 1, Direction.SEND, 0, 990), NetStep(1, 1, Direction.SEND, 0, 480))
    mine = replace(communicator(0, 4), net_steps=used)
    (sample,) = Rank(0, 4, (mine,), (send(1, sent=10, done=8, produced=12),)).looks(1)
    pid = process(0, 4).pid
    # On channel 0 an operation runs: it has come to less than its end, which is what the connection is set to.
    assert absolute_counts(sample) == {
        (pid, WORLD, 0, 0, 1, Direction.SEND, 0): 970,
        (pid, WORLD, 0, 1, 1, Direction.SEND, 0): 480,
    }


def test_how_long_a_count_has_stood_still() -> None:
    rates = StepRates(window_ns=10 * MS)
    assert rates.still_s(KEY) == 0
    for time in range(1, 50):
        rates.feed(time * MS, {KEY: min(time, 20)})
    assert rates.still_s(KEY) == pytest.approx(0.029)
    other = (*KEY[:3], 5, *KEY[4:])
    for time in range(100, 105):
        rates.feed(time * MS, {other: 7})
    # It may have stood still for longer; this much was seen.
    assert rates.still_s(other) == pytest.approx(0.004)
