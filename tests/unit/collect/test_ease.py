"""Looks that widen while all is well, and are steady again when a process stands."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from itertools import pairwise

import pytest

from ncclwatch.cli.agent import agent
from ncclwatch.cli.attach import attach
from ncclwatch.cli.live import LiveSession
from ncclwatch.collect.ease import (
    ALLOWED_S,
    LONG_CALM_S,
    MOST_SHARE,
    NARROW,
    NARROW_S,
    RARER,
    STEADY_S,
    WIDEST_S,
    Ease,
    all_go_on,
)
from ncclwatch.collect.flows import CALM_INTERVAL_S, REST_INTERVAL_S, FlowCollector
from ncclwatch.collect.node import NodeCollector
from ncclwatch.collect.watched import Watched
from ncclwatch.errors import NcclwatchError, TargetGoneError
from unit import fake_targets
from unit.fake_targets import FakeTarget
from unit.synthetic import frozen_ring, moved


class Beating(FakeTarget):
    """A process that moves between all its looks, and whose pulse can be set."""

    beats: bool | NcclwatchError = True

    def moved(self) -> bool:
        if isinstance(self.beats, NcclwatchError):
            raise self.beats
        return self.beats


def beating(count: int = 2000) -> dict[int, Beating]:
    targets = {}
    for rank in frozen_ring(2, 4, run_state="S"):
        samples = rank.looks(1)
        for _ in range(count):
            later = moved(samples[-1])
            samples.append(replace(later, time_ns=later.time_ns + 10**9, wall_ns=later.wall_ns + 10**9))
        targets[samples[0].process.pid] = Beating(samples)
    return targets


def watched(*, moves: bool = True) -> tuple[Watched, Beating]:
    target = next(iter(beating(8).values()))
    if not moves:
        target.looks = target.looks[:1]
    one = Watched(target)
    one.look()
    one.look()
    return one, target


def test_looks_are_steady_until_somebody_says_that_all_is_well() -> None:
    ease = Ease(15.0)
    assert all(ease.is_due(100.0 + second, 1000.0 + second) for second in range(30))
    assert all(Ease(0.0).is_due(100.0 + second, 0.0) for second in range(3)), "and always, where none are to be far apart"


def test_an_allowance_leaves_one_look_to_each_span_of_the_common_clock_and_expires() -> None:
    ease = Ease(15.0)
    taken = []
    for second in range(60):
        ease.allow(100.0 + second)
        if ease.is_due(100.0 + second, 1000.0 + second):
            taken.append(second)
    # 1005, 1020, 1035, 1050 are multiples of 15; the first look is the one at hand.
    assert taken == [0, 5, 20, 35, 50]
    later = 159.0 + ALLOWED_S
    assert ease.is_wide(later - 0.1) and not ease.is_wide(later)


def test_after_a_long_calm_looks_are_rarer_until_something_happens() -> None:
    ease, taken = Ease(15.0), []
    for second in range(int(2 * LONG_CALM_S)):
        if second == LONG_CALM_S + 200:
            ease.disturb(float(second))
        ease.allow(float(second))
        if ease.is_due(float(second), 3000.0 + second):
            taken.append(second)
    steps = {second: later - second for second, later in pairwise(taken)}
    assert {step for at, step in steps.items() if at < LONG_CALM_S} == {15}
    calm = [at for at in steps if LONG_CALM_S <= at < LONG_CALM_S + 180]
    assert {steps[at] for at in calm[1:]} == {15 * RARER}, "and the looks are at moments that other nodes have in common"
    assert all((3000 + at) % (15 * RARER) == 0 for at in calm[1:])
    after = [step for at, step in steps.items() if at > LONG_CALM_S + 200 + STEADY_S + 15]
    assert set(after) == {15}, "a new calm begins as the first did"


def test_nodes_look_in_the_same_moment() -> None:
    nodes = Ease(15.0), Ease(15.0)
    taken: tuple[list[int], list[int]] = ([], [])
    for second in range(40):
        for node, found in zip(nodes, taken, strict=True):
            # The second node was told a little later.
            if second >= 7 * (node is nodes[1]):
                node.allow(50.0 + second)
            if node.is_due(50.0 + second, 2000.0 + second):
                found.append(second)
    assert [second for second in taken[0] if second > 10] == [second for second in taken[1] if second > 10]


def test_what_happens_makes_looks_steady_for_a_while() -> None:
    ease = Ease(15.0)
    ease.allow(100.0)
    assert ease.is_wide(100.0)
    ease.disturb(100.0)
    ease.allow(101.0)
    assert not ease.is_wide(101.0)
    ease.allow(100.0 + STEADY_S)
    assert ease.is_wide(100.0 + STEADY_S)
    ease.allow(111.0, well=False)
    ease.allow(112.0)
    assert not ease.is_wide(112.0), "something was not well a second ago"


def test_looks_are_nearer_while_a_culprit_is_looked_for() -> None:
    ease = Ease(15.0)
    assert ease.interval(100.0, 1.0) == 1.0
    ease.allow(100.0, well=False, narrow=True)
    assert ease.interval(100.0 + NARROW_S - 0.1, 1.0) == 1.0 / NARROW and not ease.is_wide(100.5)
    assert ease.interval(100.0 + NARROW_S, 1.0) == 1.0, "nobody asked again"


def test_looks_that_cost_too_much_are_not_nearer() -> None:
    ease = Ease()
    ease.looked(MOST_SHARE / NARROW - 0.01)
    ease.allow(100.0, narrow=True)
    assert ease.interval(100.0, 1.0) < 1.0
    ease.looked(2.0)
    assert ease.interval(100.0, 1.0) == 1.0
    for _ in range(20):
        ease.looked(0.05)
    assert ease.interval(100.0, 1.0) < 1.0, "one look that took long is forgotten"


def test_what_looks_for_a_culprit_take_is_a_share_of_all_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    ease = Ease()
    ease.looked(0.09)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert ease.search_share(1.0) == pytest.approx(NARROW * 0.045)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    assert ease.search_share(1.0) < 0.003


@pytest.mark.parametrize(("moves", "beats", "goes_on"), [
    (True, True, True), (True, False, False), (False, False, True), (False, True, False),
    (True, TargetGoneError("it exited", ""), False),
])  # fmt: skip
def test_a_process_goes_on_that_does_what_it_did(moves: bool, beats: bool | NcclwatchError, goes_on: bool) -> None:
    one, target = watched(moves=moves)
    target.beats = beats
    assert one.stands is not moves
    assert one.goes_on() is goes_on and all_go_on([one]) is goes_on


def test_a_process_that_was_looked_at_once_or_cannot_be_asked_is_looked_at() -> None:
    target = next(iter(beating(3).values()))
    one = Watched(target)
    one.look()
    assert not one.goes_on()
    plain = Watched(FakeTarget(target.looks))
    plain.look()
    plain.look()
    assert not plain.goes_on()


@contextmanager
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NodeCollector, dict[int, Beating]]]:
    targets = beating()
    fake_targets.install(monkeypatch, dict(targets))
    found = NodeCollector(every=False, interval_s=0.02, wake_s=1.0, widest_s=30.0)
    try:
        found.start(list(targets), calls=False, network=False)
        for _ in range(4):
            found.step()
        yield found, targets
    finally:
        found.close()


def looks(found: NodeCollector, steps: int) -> int:
    taken = 0
    for _ in range(steps):
        found.ease.allow(time.monotonic())
        taken += found.step().looked
    return taken


def test_a_node_that_is_well_is_hardly_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector(monkeypatch) as (found, _):
        assert looks(found, 20) <= 2


def test_a_node_is_looked_at_more_often_while_a_culprit_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector(monkeypatch) as (found, _):
        found.interval_s = 0.3

        def taken() -> int:
            until, count = time.monotonic() + 1.5, 0
            while time.monotonic() < until:
                count += found.step(until=until).looked
            return count

        assert taken() <= 6
        found.ease.allow(time.monotonic(), well=False, narrow=True)
        assert taken() >= 8


def test_attach_looks_more_often_while_its_engine_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    session = LiveSession(every=False)
    try:
        for searched, apart in ((False, 1.0), (True, 1.0 / NARROW)):
            monkeypatch.setattr(session, "searching", lambda found=searched: frozenset({"node1"} if found else ()))
            session._ease(100.0 + 10 * searched)
            assert session.collector.ease.interval(100.5 + 10 * searched, 1.0) == apart
    finally:
        session.close()


def test_the_first_process_that_stands_is_looked_at_at_once_and_all_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector(monkeypatch) as (found, targets):
        looks(found, 4)
        next(iter(targets.values())).beats = False
        assert looks(found, 12) >= 8
        next(iter(targets.values())).beats = True
        assert looks(found, 4) >= 3, "steady for a while, though it moves again"


def test_an_end_is_told_no_later_than_by_steady_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector(monkeypatch) as (found, targets):
        looks(found, 4)
        target = next(iter(targets.values()))
        target.beats = TargetGoneError("it exited", "look again")
        target.looks = [target.beats]
        changes = []
        for _ in range(6):
            found.ease.allow(time.monotonic())
            changes += [change.pid for change in found.step().changes]
    assert changes == [target.info.pid]


def test_connections_are_looked_up_rarely_while_all_is_well_and_at_once_when_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found, looked = FlowCollector(()), []
    monkeypatch.setattr(found, "_look_at_connections", lambda: looked.append(1))
    found.observe([], calm=True)
    found._connections_at -= CALM_INTERVAL_S + 1
    found.observe([], calm=True)
    assert len(looked) == 1
    found.observe([])
    found.observe([])
    assert len(looked) == 2
    found._connections_at -= REST_INTERVAL_S
    found.observe([], calm=True)
    found.refresh()
    found.observe([], calm=True)
    assert len(looked) == 4


@pytest.mark.parametrize("command", [attach, agent])
def test_the_option_says_what_the_collector_does(command: Callable[..., object]) -> None:
    assert signature(command).parameters["calm_interval"].default == WIDEST_S
