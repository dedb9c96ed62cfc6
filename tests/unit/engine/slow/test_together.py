"""Hosts whose ranks are slow together, by what their calls say of their work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from ncclwatch.engine.slow.blame import find
from ncclwatch.engine.slow.together import explained_by_work, explained_hosts, longer_at_work

from ncclwatch.engine.slow.findings import Context, Kind
from ncclwatch.engine.slow.profile import Profile, add_up
from ncclwatch.engine.slow.snapshot import Activity, Hold, LinkPlace, Look, Part
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


def at_work(waiting: tuple[int, ...] = ()) -> Profile:
    """Twenty looks at a job whose first node works while the others wait, mostly for its rank 3; the GPU of rank 0 is seen to
    be waited for now and then only. Ranks in ``waiting`` wait as those of the other node do.
    """
    looks = []
    for second in range(20):
        weights = {3: 0.3, 2: 0.2, 1: 0.12, 0: 0.02 if second % 8 else 0.2}
        holds = tuple(Hold(Part.GPU, weight, KEYS[rank], None, "AllReduce", 7) for rank, weight in weights.items())
        working = [rank < INSIDE and rank not in waiting for rank in range(RANKS)]
        did = [Activity.COMPUTES if works or second % 5 == 0 else Activity.WAITS for works in working]
        looks.append(Look(float(second), RANKS, holds, dict(zip(KEYS, did, strict=True))))
    return add_up(looks, KEYS)


def named(profile: Profile, context: Context) -> list[tuple[int, ...]]:
    return [finding.members for finding in find(profile, context)]


def test_a_node_that_works_while_all_others_wait_is_named_whole_whoever_is_waited_for_most() -> None:
    """Of its ranks those of a later pipeline stage are waited for first."""
    unknown = np.full(RANKS, np.nan)
    assert named(at_work(), context(factor=unknown)) == [(0, 1, 2, 3)]
    assert named(at_work(), context(factor=unknown, host=np.zeros(RANKS, np.int64), node=HOST)) == [(0, 1, 2, 3)]
    assert (0, 1, 2, 3) not in named(at_work(waiting=(0,)), context(factor=unknown))
    assert (0, 1, 2, 3) not in named(at_work(), context(factor=unknown, host=np.zeros(RANKS, np.int64)))


def test_work_that_has_grown_explains_a_node_of_a_host_too() -> None:
    one_host = context(host=np.zeros(RANKS, np.int64), node=HOST)
    assert explained_hosts(profile(), one_host).tolist() == [True] * INSIDE + [False] * INSIDE


BUSY = dict.fromkeys(KEYS, Activity.COMPUTES)
HEALTHY = [Look(float(n), RANKS, (), BUSY if n % 5 < 3 else dict.fromkeys(KEYS, Activity.WAITS)) for n in range(20)]


def second_half_works(weights: Sequence[float]) -> list[Look]:
    """Looks in which the last ranks are at work while the others wait, every other one of them known to hold up so much each."""
    looks = []
    for second in range(20):
        held = zip(KEYS[INSIDE:], weights, strict=True)
        holds = tuple(Hold(Part.GPU, weight, key, None, "AllReduce", 7) for key, weight in held) if second % 2 else ()
        did = [Activity.COMPUTES if rank >= INSIDE or second % 5 == 0 else Activity.WAITS for rank in range(RANKS)]
        looks.append(Look(30.0 + second, RANKS, holds, dict(zip(KEYS, did, strict=True))))
    return looks


def test_half_of_a_stage_that_alone_works_longer_than_it_did_is_named_whoever_of_it_is_waited_for() -> None:
    """Each rank is on a host of its own; of what is usual among equals nothing is left where half of them are slow."""
    apart = context(
        factor=np.full(RANKS, np.nan), equal=np.zeros(RANKS, np.int64), host=np.arange(RANKS), before=add_up(HEALTHY, KEYS),
        lost=0.6, stretch=2.5, exposed=np.ones(RANKS, np.bool_),
    )  # fmt: skip
    uneven = add_up(second_half_works((0.3, 0.13, 0.13, 0.13)), KEYS)
    assert named(uneven, apart) == [(4, 5, 6, 7)]
    assert (4, 5, 6, 7) not in named(uneven, replace(apart, exposed=HOST == 0)), "some of its waits may be unseen"
    assert (4, 5, 6, 7) not in named(uneven, replace(apart, lost=None, before=None)), "from the start nothing says that it grew"
    rarely = add_up(second_half_works((0.3, 0.02, 0.02, 0.02)), KEYS)
    assert (4, 5, 6, 7) not in named(rarely, apart), "only one of them holds anybody up"


def test_a_stage_that_works_longer_than_it_did_while_the_others_wait_is_named_whole() -> None:
    """Each of its ranks is on a host of its own, and has no equal that would tell."""
    stage = np.arange(RANKS) // INSIDE
    looks = second_half_works([0.12] * INSIDE)
    apart = context(
        factor=np.full(RANKS, np.nan), equal=stage, host=np.arange(RANKS), before=add_up(HEALTHY, KEYS), lost=0.6, stretch=2.5,
        exposed=np.ones(RANKS, np.bool_),
    )  # fmt: skip
    assert named(add_up(looks, KEYS), replace(apart, exposed=HOST == 0)) == [], "some of its waits may be unseen"
    assert named(add_up(looks, KEYS), apart) == [(4, 5, 6, 7)]
    assert named(add_up(looks, KEYS), replace(apart, before=None)) == [], "whether it works longer is not known"
    working = [replace(one, activities=BUSY) for one in HEALTHY]
    assert named(add_up(looks, KEYS), replace(apart, before=add_up(working, KEYS), stretch=1.2)) == [], "as long as ever"
    one = [replace(at, holds=tuple(replace(h, weight=0.3 if h.process == KEYS[5] else 0.03) for h in at.holds)) for at in looks]
    assert (4, 5, 6, 7) not in named(add_up(one, KEYS), apart), "one of them is waited for"


def two_work(second_works: int) -> Profile:
    """Twenty looks in which rank 4 is at work, rank 5 in so many of them, rank 6 in four; in four it shows whom they hold up."""
    looks = []
    for second in range(20):
        holds = tuple(Hold(Part.GPU, 0.15, key, None, "AllReduce", 7) for key in KEYS[4:6]) if second % 5 == 0 else ()
        working = {4: True, 5: second < second_works, 6: second % 5 == 1}
        did = [Activity.COMPUTES if working.get(rank) else Activity.WAITS for rank in range(RANKS)]
        looks.append(Look(30.0 + second, RANKS, holds, dict(zip(KEYS, did, strict=True))))
    return add_up(looks, KEYS)


def test_two_of_equal_ranks_that_alone_work_longer_are_named_though_few_waits_show_it() -> None:
    """Two slow GPUs of a tensor group: they wait for nobody, and of all others it shows in few looks for whom they do."""
    apart = context(
        factor=np.full(RANKS, np.nan), equal=np.zeros(RANKS, np.int64), host=np.arange(RANKS), before=add_up(HEALTHY, KEYS),
        lost=0.6, stretch=2.5, exposed=np.ones(RANKS, np.bool_),
    )  # fmt: skip
    (found,) = find(two_work(18), apart)
    assert (found.members, found.share) == ((4, 5), 0.6), "all that is lost, by how much longer they are at work"
    assert (4, 5) not in named(two_work(10), apart), "one that is slow, and its fellow"
    assert (4, 5) not in named(two_work(18), replace(apart, before=two_work(18), stretch=1.3)), "as long as ever"
    assert longer_at_work(np.array([4, 5]), two_work(18), replace(apart, before=two_work(18))) == pytest.approx(0.57)
    assert longer_at_work(np.array([4, 5]), two_work(18), replace(apart, before=two_work(18), stretch=1.3)) == 0.0
