"""Queued and empty paths out of one-way delays, and when flows are said to crowd."""

from __future__ import annotations

import random

import pytest

from ncclwatch.model.paths import Load
from ncclwatch.paths.bottlenecks import crowd, loads

MS = 1_000_000
OFFSET = -7_000_000_000_000


def delays(queued: float, number: int, seed: int) -> list[int]:
    """One-way times of a path that is queued this share of the time, with an offset of clocks."""
    draw = random.Random(seed)
    return [
        OFFSET + draw.randint(50_000, 300_000) + (draw.randint(10, 60) * MS if draw.random() < queued else 0)
        for _ in range(number)
    ]


def test_queued_and_empty_paths_are_told_apart_whatever_the_clocks_say() -> None:
    seen = loads({(1, port): delays(0.7 if port % 2 else 0.0, 20, port) for port in range(8)})
    assert {path[1]: one.load for path, one in seen.items()} == {n: Load.QUEUED if n % 2 else Load.EMPTY for n in range(8)}
    assert all(one.confidence > 0.999 for one in seen.values())


def test_too_few_probes_say_nothing() -> None:
    seen = loads({(1, 1): delays(0.3, 30, 1), (1, 2): delays(0.0, 6, 2), (1, 3): delays(0.0, 4, 3), (1, 4): []})
    assert seen[1, 1].load is Load.QUEUED
    assert [seen[1, n].load for n in (2, 3, 4)] == [Load.UNKNOWN] * 3


def test_without_any_queue_no_path_is_empty() -> None:
    assert {one.load for one in loads({(1, n): delays(0.0, 30, n) for n in range(4)}).values()} == {Load.UNKNOWN}


def test_a_hiccup_of_the_host_is_no_queue() -> None:
    hiccup = delays(0.0, 30, 1)
    hiccup[7] += 40 * MS
    seen = loads({(1, 1): hiccup, (1, 2): delays(0.7, 30, 2)})
    assert (seen[1, 1].load, seen[1, 2].load) == (Load.EMPTY, Load.QUEUED)


WAITING = {"a": (40_000.0, 100.0), "b": (50_000.0, 100.0)}


def test_flows_crowd_where_others_paths_are_empty() -> None:
    seen = loads({(1, port): delays(0.7 if port % 2 else 0.0, 20, port) for port in range(4)})
    found = crowd(WAITING, seen)
    assert found is not None and found.flows == ("a", "b") and set(found.empty) == {(1, 0), (1, 2)} and found.confidence > 0.99


@pytest.mark.parametrize(
    ("flows", "share"),
    [(WAITING, 0.7), ({"a": WAITING["a"]}, 0.0), ({"a": WAITING["a"], "b": (120.0, 100.0)}, 0.0), ({}, 0.0)],
)
def test_where_every_path_is_queued_or_one_flow_alone_waits_nobody_crowds(
    flows: dict[object, tuple[float, float]], share: float
) -> None:
    assert crowd(flows, loads({(1, 1): delays(0.7, 20, 1), (1, 2): delays(share, 20, 2)})) is None


def test_a_link_that_is_filled_half_as_often_is_not_empty() -> None:
    """Two flows apart, one slower: probes by its link wait seldom, which is not never."""
    busy = {(1, 100 + n): [50_000_000] * 12 + [0] * 8 for n in range(3)}
    half = {(1, 200 + n): [50_000_000] * 4 + [0] * 16 for n in range(3)}
    found = loads({**busy, **half, (1, 300): [50_000_000] * 2 + [0] * 18, (1, 400): [0] * 40})
    assert {found[path].load for path in (*busy, *half)} == {Load.QUEUED}
    assert found[1, 300].load is Load.UNKNOWN and found[1, 400].load is Load.EMPTY
