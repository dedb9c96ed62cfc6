"""Hosts whose ranks are slow together, by what their calls say of their work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ncclwatch.engine.slow.blame import find
from ncclwatch.engine.slow.findings import Context, Kind
from ncclwatch.engine.slow.looks import Activity, Hold, LinkPlace, Look, Part
from ncclwatch.engine.slow.profile import Profile, add_up
from ncclwatch.engine.slow.together import explained_by_work, explained_hosts
from ncclwatch.model.identity import ProcessKey

RANKS, INSIDE = 8, 4
KEYS = [ProcessKey("boot", 100 + rank, 1, "build") for rank in range(RANKS)]
HOST = np.arange(RANKS) // INSIDE
GROWN = np.where(HOST == 0, 2.4, 1.0)


def profile() -> Profile:
    """Twelve looks: the first host's ranks are at work in most of them; in four the job waits for links of rank 3."""
    looks = []
    for second in range(12):
        link = LinkPlace(7, 7, RANKS, 3, 4, KEYS[3], KEYS[4])
        if second % 3 == 0:
            holds: tuple[Hold, ...] = (Hold(Part.LINK, 0.9, None, link, "AllReduce", 7),)
        else:
            holds = tuple(Hold(Part.GPU, 0.12, key, None, "AllReduce", 7) for key in KEYS[:INSIDE])
        working = [Activity.COMPUTES if rank < INSIDE or second % 4 == 1 else Activity.WAITS for rank in range(RANKS)]
        looks.append(Look(float(second), RANKS, holds, dict(zip(KEYS, working, strict=True))))
    return add_up(looks, KEYS)


def context(**more: object) -> Context:
    whole = Context(np.zeros(RANKS, np.int64), HOST, GROWN, lost=0.5, stretch=2.0, noise=0.02)
    return replace(whole, **more)  # type: ignore[arg-type]


def test_a_host_whose_work_has_grown_by_what_is_lost_is_named_and_not_its_link() -> None:
    assert explained_hosts(profile(), context()).tolist() == [True] * INSIDE + [False] * INSIDE
    assert [(f.kind, f.members) for f in find(profile(), context())] == [(Kind.COMPUTE, (0, 1, 2, 3))]


def test_the_link_is_named_as_well_where_the_work_is_as_it_was() -> None:
    as_ever = context(factor=np.ones(RANKS))
    assert not explained_hosts(profile(), as_ever).any()
    assert any(not f.kind.computes for f in find(profile(), as_ever))


def test_work_explains_nothing_where_it_has_grown_too_little_or_everywhere_or_for_some() -> None:
    members = np.arange(INSIDE)
    assert explained_by_work(members, profile(), context()) == 0.5
    assert explained_by_work(members, profile(), context(lost=None)) == 0.0
    assert explained_by_work(members, profile(), context(factor=np.where(HOST == 0, 1.3, 1.0))) == 0.0, (
        "a quarter of what is lost"
    )
    assert explained_by_work(members, profile(), context(factor=np.full(RANKS, 2.4))) == 0.0
    assert explained_by_work(members, profile(), context(factor=np.where(np.arange(RANKS) < 3, 2.4, 1.0))) == 0.0
