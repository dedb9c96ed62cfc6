"""CPU limits in a job that is slow: who is held back is blamed for that, and for its links as well."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from ncclwatch.engine.slow.blame import find

from ncclwatch.engine.slow.contention import held_back_alone, lacks_cpu
from ncclwatch.engine.slow.findings import Context, Kind
from ncclwatch.engine.slow.profile import add_up
from ncclwatch.engine.slow.snapshot import Activity, CpuTimes, Hold, LinkPlace, Look, Part
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import CpuLimit

RANKS = 4


KEYS = [ProcessKey("boot", 100 + rank, 1, "build") for rank in range(RANKS)]


def slow_looks(held_back: float, begin: float = 0.0, *, slow: bool = True) -> list[Look]:
    """Thirty looks a second apart; rank 1 computes a little more than the others and its links are a little slower."""
    found = []
    for second in range(30):
        at = begin + second
        limits = [CpuLimit(int(10 * at), int(10 * at * held_back), 77) if rank == 1 else CpuLimit(0, 0) for rank in range(RANKS)]
        times = {key: CpuTimes(at, at * 3.0, at * 0.4, limits[rank]) for rank, key in enumerate(KEYS)}
        link = LinkPlace(7, 7, RANKS, 1, 2, KEYS[1], KEYS[2])
        holds: tuple[Hold, ...] = ()
        if slow and second % 10 == 0:
            holds = (Hold(Part.GPU, 0.3, KEYS[1], None, "AllReduce", 7),)
        elif slow and second % 10 == 5:
            holds = (Hold(Part.LINK, 0.5, None, link, "AllReduce", 7),)
        activities = dict.fromkeys(KEYS, Activity.WAITS if second % 2 else Activity.COMPUTES)
        found.append(Look(at, RANKS, holds, activities, times))
    return found


def slow_context() -> Context:
    return Context(
        np.zeros(RANKS, np.int64), np.arange(RANKS), np.full(RANKS, np.nan), lost=0.25, stretch=1.33,
        before=add_up(slow_looks(0.0, begin=1.0, slow=False), KEYS), noise=0.05,
    )  # fmt: skip


def test_a_rank_that_a_limit_holds_back_is_blamed_for_its_links_as_well() -> None:
    found = find(add_up(slow_looks(0.9, begin=100.0), KEYS), slow_context())
    assert [(one.kind, one.members) for one in found] == [(Kind.HOST, (1,))]
    profile = add_up(slow_looks(0.9, begin=100.0), KEYS)
    assert "CPU throttling" in lacks_cpu(profile, slow_context(), [1]) and "90%" in lacks_cpu(profile, slow_context(), [1])


def test_the_same_without_a_limit_is_not_its_cpu() -> None:
    profile = add_up(slow_looks(0.05, begin=100.0), KEYS)
    assert not held_back_alone(profile, slow_context()).any()
    assert (Kind.HOST, (1,)) not in [(one.kind, one.members) for one in find(profile, slow_context())]


def test_a_limit_that_held_back_before_as_well_explains_nothing_new() -> None:
    profile = add_up(slow_looks(0.9, begin=100.0), KEYS)
    known = replace(slow_context(), before=add_up(slow_looks(0.8, begin=1.0, slow=False), KEYS))
    assert not held_back_alone(profile, known).any()


def test_from_the_start_a_limit_needs_no_past() -> None:
    start = replace(slow_context(), lost=None, before=None, stretch=1.0, noise=1.0)
    found = find(add_up(slow_looks(0.9, begin=100.0), KEYS), start)
    assert [(one.kind, one.members) for one in found] == [(Kind.HOST, (1,))]
    assert not find(add_up(slow_looks(0.0, begin=100.0), KEYS), start)


def test_ranks_under_one_limit_are_blamed_together() -> None:
    """Ranks 1 and 2 are in one container; only rank 1 is seen to hold the others up."""

    def shared(looks: list[Look]) -> list[Look]:
        done = []
        for look in looks:
            times = {k: replace(t, limit=look.cpu_times[KEYS[1]].limit) if k == KEYS[2] else t for k, t in look.cpu_times.items()}
            done.append(replace(look, cpu_times=times))
        return done

    profile = add_up(shared(slow_looks(0.9, begin=100.0)), KEYS)
    context = replace(slow_context(), equal=np.array([0, 0, 0, 0]))
    assert held_back_alone(profile, context).tolist() == [False, True, True, False]
    assert [(one.kind, one.members) for one in find(profile, context)] == [(Kind.HOST, (1, 2))]


def test_who_a_limit_alone_has_begun_to_hold_back_need_only_be_waited_for_most_often() -> None:
    """Where few waits can be followed, what looks see it hold up is next to nothing; the kernel says the rest."""

    def rarely(held_back: float, *, other: int = 0) -> list[Look]:
        looks = [
            replace(one, holds=one.holds if one.holds and one.holds[0].link is None else ())
            for one in slow_looks(held_back, 100.0)
        ]
        beside = (Hold(Part.GPU, 0.25, KEYS[2], None, "AllReduce", 7),)
        return [replace(one, holds=beside) if at % 5 == 2 and at < 5 * other else one for at, one in enumerate(looks)]

    context = replace(slow_context(), lost=0.6, stretch=2.5)
    assert add_up(rarely(0.9), KEYS).own()[1] < 0.035
    assert [(one.kind, one.members) for one in find(add_up(rarely(0.9), KEYS), context)] == [(Kind.HOST, (1,))]
    assert not find(add_up(rarely(0.05), KEYS), context), "nothing holds it back"
    assert (1,) not in [one.members for one in find(add_up(rarely(0.9, other=4), KEYS), context)], (
        "another is waited for more often"
    )
