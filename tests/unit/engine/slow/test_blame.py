"""Who is blamed for a slow job, from looks made by hand: culprits stand out by more than chance, or nobody is named."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from ncclwatch.engine.slow.blame import find

from ncclwatch.engine.slow.cadence import Cadence, Iteration
from ncclwatch.engine.slow.findings import Context, Kind
from ncclwatch.engine.slow.lateness import Lateness, measure
from ncclwatch.engine.slow.profile import add_up
from ncclwatch.engine.slow.snapshot import Activity, Hold, LinkPlace, Look, Part
from ncclwatch.model.identity import ProcessKey

RANKS = 8
KEYS = [ProcessKey("boot", 100 + rank, 1, "build") for rank in range(RANKS)]


def look(holds: list[Hold], busy: set[int], waiting: set[int]) -> Look:
    activities = {
        key: Activity.COMPUTES if rank in busy else Activity.WAITS if rank in waiting else Activity.TRANSFERS
        for rank, key in enumerate(KEYS)
    }
    return Look(float(len(holds)), RANKS, tuple(holds), activities)


def context(lost: float | None, hosts: int = RANKS, **more: object) -> Context:
    host = np.arange(RANKS) // (RANKS // hosts)
    return Context(np.zeros(RANKS, np.int64), host, np.full(RANKS, np.nan), lost, 1.0 / (1.0 - (lost or 0.0)), **more)  # type: ignore[arg-type]


def link(source: int, destination: int, weight: float) -> Hold:
    place = LinkPlace(7, 0xABC, RANKS, source, destination, KEYS[source], KEYS[destination], (0,))
    return Hold(Part.LINK, weight, None, place, "AllReduce", 7)


OTHERS = set(range(RANKS)) - {3}
SLOW = [look([Hold(Part.GPU, 0.8, KEYS[3], None, "AllReduce", 7)], {3}, OTHERS)] * 9
FAST = [look([], set(range(RANKS)), set())] * 6


def test_a_slow_rank_is_named() -> None:
    found = find(add_up(SLOW + FAST, KEYS), context(0.5))
    assert [(f.kind, f.members) for f in found] == [(Kind.COMPUTE, (3,))]


def rarely_proven(times: int, rank: int = 3, other: float = 0.0) -> list[Look]:
    """Looks in which a rank is at work and the others wait, of whom only one look in three tells for whom."""
    proven = [Hold(Part.GPU, 0.3, KEYS[rank], None, "AllReduce", 7)]
    beside = [Hold(Part.GPU, other, KEYS[5], None, "AllReduce", 7)] if other else []
    rest = look([], {rank}, OTHERS)
    return [look([*proven, *beside], {rank}, OTHERS) if number % 3 == 0 else rest for number in range(times)]


def test_from_the_start_who_is_far_from_all_equals_is_named_for_a_smaller_share() -> None:
    """Three times what any equal holds up, in twice as many looks, working most and waiting least: in healthy jobs nobody is."""
    far = rarely_proven(27)
    assert [f.members for f in find(add_up(far, KEYS), context(None))] == [(3,)]
    assert find(add_up(rarely_proven(27, other=0.15), KEYS), context(None)) == [], "an equal holds up half as much"
    assert find(add_up(rarely_proven(12), KEYS), context(None)) == [], "in four looks only"
    asleep = [replace(one, activities=dict.fromkeys(one.activities, Activity.TRANSFERS)) for one in far]
    assert find(add_up(asleep, KEYS), context(None)) == [], "nobody is seen to wait"
    apart = replace(context(None), equal=np.arange(RANKS) // 2)
    assert find(add_up(far, KEYS), apart) == [], "one equal is no comparison"


def test_who_is_plainly_at_work_is_named_though_few_waits_could_be_followed_to_it() -> None:
    working = FAST + rarely_proven(15)
    made = context(0.6, noise=0.2)
    profile = add_up(working, KEYS)
    assert profile.shown() < 0.2 and profile.own()[3] < 0.2 * 0.6 and profile.own()[3] < 3 * profile.scatter[3]
    assert [(f.kind, f.members) for f in find(profile, made)] == [(Kind.COMPUTE, (3,))]
    assert find(add_up(FAST + rarely_proven(15, other=0.2), KEYS), made) == [], "another holds up as much"
    assert find(add_up(FAST[:1] + rarely_proven(6), KEYS), made) == [], "too few looks"
    everybody = [replace(one, activities=dict.fromkeys(KEYS, Activity.COMPUTES)) for one in working]
    assert find(add_up(everybody, KEYS), made) == [], "all work as much"


def test_a_host_that_begins_late_like_its_equals_elsewhere_is_not_late_by_itself() -> None:
    working = [look([], {0}, set(range(1, RANKS)))] * 12

    def late(ranks: set[int], hosts: int) -> list[tuple[Kind, tuple[int, ...]]]:
        share = np.where(np.isin(np.arange(RANKS), list(ranks)), 0.3, 0.0)
        lateness = Lateness(share, np.where(share > 0, 10, 0), 12, 2 * share)
        return [(f.kind, f.members) for f in find(add_up(working, KEYS), context(0.5, hosts=hosts, late=lateness))]

    assert late({0}, RANKS) == [(Kind.HOST, (0,))]
    assert late({0, 2, 4, 6}, RANKS) == [], "the gradients ended late for all of them"
    assert late({0, 1}, 4) == [(Kind.HOST, (0,))], "only its own host is late"


def test_where_a_ring_ends_late_its_last_rank_begins_late_and_is_not_late_by_itself() -> None:
    """The others begin late as well, each a little less, though nobody waits for them. Who never works is no busier than they."""
    working = [look([], {0}, set(range(1, RANKS)))] * 12
    idle = [look([], set(), set(range(1, RANKS)))] * 12
    share, times = np.where(np.arange(RANKS) == 0, 0.3, 0.0), np.array([10, 10, 9, 9, 8, 0, 0, 0])

    def named(looks: list[Look], seconds: list[float]) -> list[tuple[Kind, tuple[int, ...]]]:
        lateness = Lateness(share, times, 12, np.array(seconds))
        return [(f.kind, f.members) for f in find(add_up(looks, KEYS), context(0.7, late=lateness))]

    assert named(working, [0.3, 0.01, 0.01, 0.01, 0.01, 0.0, 0.0, 0.0]) == [(Kind.HOST, (0,))], "others by next to nothing"
    assert named(working, [0.3, 0.25, 0.2, 0.15, 0.1, 0.0, 0.0, 0.0]) == []
    assert named(idle, [0.3, 0.01, 0.01, 0.01, 0.01, 0.0, 0.0, 0.0]) == []
    hidden = [look([], set(), set())] * 12
    assert named(hidden, [0.3, 0.01, 0.01, 0.01, 0.01, 0.0, 0.0, 0.0]) == [(Kind.HOST, (0,))], "nothing shows of anybody"


def test_who_gets_its_data_late_or_is_late_beside_an_idle_rank_that_is_later_is_not_late_by_itself() -> None:
    def named(holds: list[Hold], share: dict[int, float]) -> list[tuple[Kind, tuple[int, ...]]]:
        late = np.array([share.get(rank, 0.0) for rank in range(RANKS)])
        lateness = Lateness(late, np.where(late > 0, 10, 0), 12, 2 * late)
        looks = [look(holds, {0}, set(range(1, RANKS)))] * 12
        found = find(add_up(looks, KEYS), context(0.7, late=lateness))
        return [(f.kind, f.members) for f in found if f.kind is Kind.HOST]

    assert named([], {0: 0.2}) == [(Kind.HOST, (0,))]
    assert named([link(7, 0, 0.15)], {0: 0.2}) == []
    assert named([link(4, 5, 0.15)], {0: 0.2}) == [(Kind.HOST, (0,))]
    assert named([], {0: 0.2, 5: 0.3}) == []
    assert named([], {0: 0.2, 5: 0.1}) == [(Kind.HOST, (0,))]


def test_of_a_late_pipeline_who_works_less_beside_its_equals_than_another_stage_is_not_named() -> None:
    """All of the pipeline is waited for at the gradients; in many looks it is not known what the first stage does."""
    stage, pipeline = np.arange(RANKS) // 4, np.arange(RANKS) % 4
    first = [look([Hold(Part.GPU, 0.3, KEYS[0], None, "AllReduce", 7)], {0, 4}, set(range(1, RANKS)) - {4})] * 6
    then = [look([Hold(Part.GPU, 0.15, KEYS[4], None, "AllReduce", 7)], {4}, set(range(1, RANKS)) - {4})] * 8
    unknown = [replace(one, activities={k: a for k, a in one.activities.items() if k != KEYS[0]}) for one in then]
    known = context(0.6, replica=pipeline)
    known = replace(known, equal=stage)
    profile = add_up(first + unknown, KEYS)
    assert (0,) in [f.members for f in find(profile, replace(known, replica=None))]
    assert (0,) not in [f.members for f in find(profile, known)]
    assert (0,) in [f.members for f in find(profile, replace(known, replica=np.arange(RANKS)))], "other pipelines are no fellows"
    measured = replace(known, factor=np.where(np.arange(RANKS) == 0, 2.0, np.nan))
    assert (0,) in [f.members for f in find(profile, measured)], "its calls say that it is slow"
    found = [f for f in find(profile, known) if f.kind is Kind.COMPUTE]
    assert [f.members for f in found] == [(4,)]
    assert found[0].share == pytest.approx(float(profile.own()[[0, 4]].sum())), "what the first stage seemed to hold up is its"


def test_two_alike_each_explain_less_than_one_does() -> None:
    def found(second: float) -> list[tuple[int, ...]]:
        holds = [Hold(Part.GPU, weight, KEYS[rank], None, "AllReduce", 7) for rank, weight in ((3, 0.16), (5, second))]
        profile = add_up([look(holds, {3, 5}, {0, 1})] * 12, KEYS)
        assert profile.shown() > 0.85 and second < 0.2 * 0.7 * profile.shown(), "too little by itself"
        return [f.members for f in find(profile, context(0.7))]

    assert found(0.12) == [(3,), (5,)]
    assert found(0.06) == [(3,)]


def test_a_link_that_outweighs_all_others_explains_its_part_of_the_waits_that_show() -> None:
    """Half of the waits show where they end; of two links alike neither has to be why."""

    def found(others: float) -> list[tuple[Kind, tuple[int, ...]]]:
        shown = look([link(1, 2, 0.2), link(5, 6, others)], set(), set(range(RANKS)))
        looks = [shown, look([], set(), set(range(RANKS)))] * 8
        return [(f.kind, f.members) for f in find(add_up(looks, KEYS), context(0.6))]

    assert found(0.02) == [(Kind.LINK, (1, 2))]
    assert found(0.15) == []


def with_factors(lost: float, factors: dict[int, float], hosts: int = 4) -> Context:
    made = context(lost, hosts=hosts)
    return replace(made, factor=np.array([factors.get(rank, 1.0) for rank in range(RANKS)]))


def test_a_rank_whose_calls_say_that_it_is_slow_needs_fewer_looks_to_agree() -> None:
    seldom = add_up([look([Hold(Part.GPU, 0.8, KEYS[3], None, "AllReduce", 7)], {3}, OTHERS)] * 3 + FAST[:1] * 26, KEYS)
    assert 0.1 * 0.6 < seldom.own()[3] < 0.2 * 0.6
    assert find(seldom, context(0.6, hosts=4)) == [], "looks alone"
    assert [f.members for f in find(seldom, with_factors(0.6, {3: 2.5}))] == [(3,)]
    assert find(seldom, with_factors(0.6, dict.fromkeys(range(RANKS), 2.5))) == [], "all have become slower alike"


def test_a_fellow_of_a_tensor_group_is_paced_by_the_slow_rank() -> None:
    """Both call in step, and for a third of the time both compute."""
    both = look([Hold(Part.GPU, 0.4, KEYS[rank], None, "AllReduce", 7) for rank in (2, 3)], {2, 3}, OTHERS - {2})
    only = look([Hold(Part.GPU, 0.8, KEYS[3], None, "AllReduce", 7)], {3}, OTHERS)
    paced = with_factors(0.6, {2: 2.4, 3: 2.5})
    assert [f.members for f in find(add_up([both, only, only] * 5 + FAST, KEYS), paced)] == [(3,)]
    assert [f.members for f in find(add_up([both] * 12 + FAST, KEYS), paced)] == [(2, 3)], "equally slow"


def test_noise_is_measured_by_the_slow_down() -> None:
    assert context(0.3, noise=0.1).doubt == 0.1, "less than twice as slow"
    assert context(0.8, noise=0.1).doubt == pytest.approx(0.025), "five times as slow"


def test_noise_accuses_nobody() -> None:
    rng = np.random.default_rng(5)
    for _ in range(40):
        looks = []
        for _ in range(14):
            culprit = int(rng.integers(RANKS))
            waiting = set(rng.choice(RANKS, 4, replace=False).tolist()) - {culprit}
            looks.append(look([Hold(Part.GPU, 0.5, KEYS[culprit], None, "AllReduce", 7)], {culprit}, waiting))
        assert find(add_up(looks, KEYS), context(0.5)) == []


def test_few_looks_or_no_equals_accuse_nobody() -> None:
    assert find(add_up(SLOW[:4], KEYS), context(0.5)) == []
    alone = Context(np.full(RANKS, -1), np.arange(RANKS), np.full(RANKS, np.nan), None)
    assert find(add_up(SLOW + FAST, KEYS), alone) == [], "from the start only equals can tell"


def test_a_rank_nobody_waits_for_is_harmless() -> None:
    harmless = [look([Hold(Part.GPU, 0.01, KEYS[3], None, "AllReduce", 7)], {3}, OTHERS)] * 12
    assert find(add_up(harmless, KEYS), context(0.5)) == []


def test_a_link_an_interface_and_a_host() -> None:
    one = [look([link(2, 3, 0.6)], set(), OTHERS)] * 8
    assert [(f.kind, f.members) for f in find(add_up(one, KEYS), context(0.6))] == [(Kind.LINK, (2, 3))]
    both = [look([link(2, 3, 0.4), link(3, 4, 0.4)], set(), OTHERS)] * 8
    assert [(f.kind, f.members) for f in find(add_up(both, KEYS), context(0.6))] == [(Kind.NIC, (3,))]
    uneven = [look([link(2, 3, 0.6), link(3, 4, 0.2)], set(), OTHERS)] * 8
    assert [(f.kind, f.members) for f in find(add_up(uneven, KEYS), context(0.6))] == [(Kind.LINK, (2, 3))]
    pairs = ((1, 2), (2, 5), (3, 6), (7, 3), (3, 4))
    many = [look([link(a, b, 0.15) for a, b in pairs], set(), OTHERS)] * 8
    assert [(f.kind, f.members) for f in find(add_up(many, KEYS), context(0.6, hosts=4))] == [(Kind.NIC, (2, 3))]


def test_all_ranks_of_a_host_are_named_as_one() -> None:
    slow = {2, 3}
    holds = [Hold(Part.GPU, 0.4, KEYS[rank], None, "AllReduce", 7) for rank in sorted(slow)]
    looks = [look(holds, slow, set(range(RANKS)) - slow)] * 10 + FAST
    assert [f.members for f in find(add_up(looks, KEYS), context(0.5, hosts=4))] == [(2, 3)]


def cadence(begins: list[float]) -> Cadence:
    made = Cadence()
    for number, (begin, end) in enumerate(itertools.pairwise(begins)):
        made.iterations.append(Iteration(begin, end, number))
    made.first = list(made.iterations)[:8]
    return made


def test_a_host_that_is_late_by_more_than_half_an_iteration_is_measured_by_the_iterations_numbers() -> None:
    durations = [0.5] * 10 + [0.9] * 12
    begins = [0.0, *np.cumsum(durations).tolist()]
    # The others begin when the last has ended; rank 0 only 0.55 s later, which is nearer to the others' next iteration.
    late = cadence([b + (0.55 if n >= 10 else 0.0) for n, b in enumerate(begins)])
    others = [cadence(begins) for _ in range(3)]
    for made in others[1:]:
        # They were counted from another iteration on, which the numbers' difference while all was well tells.
        made.iterations = deque(replace(i, number=i.number + 7) for i in made.iterations)
        made.first = list(made.iterations)[:8]
    measured = measure([late, *others], [5.0] * 4, 0.5, np.zeros(4, np.int64))
    assert measured.late[0] >= 10 and measured.seconds[0] == pytest.approx(0.55) and measured.share[0] > 0.3
    assert not measured.share[1:].any()
    others[2].first.clear()
    unknown = measure([late, *others], [5.0] * 4, 0.5, np.zeros(4, np.int64))
    assert unknown.share[3] == 0 and unknown.share[0] > 0.3, "its numbers cannot be compared"


def test_a_late_host_is_measured_and_believed_only_if_it_costs() -> None:
    equal = np.zeros(4, np.int64)
    costly = [0.2] * 6 + [0.5, 0.2] * 6
    for durations, believed in ((costly, True), ([0.2] * 18, False)):
        begins = [0.0, *np.cumsum(durations).tolist()]
        usual = [cadence(begins) for _ in range(3)]
        # Rank 2 begins every other iteration late; only where those are longer was anybody held up.
        late = cadence([b + (0.1 if n >= 6 and n % 2 == 0 else 0.0) for n, b in enumerate(begins)])
        measured = measure([usual[0], usual[1], late, usual[2]], [1.2] * 4, 0.2, equal)
        assert measured.late[2] >= 3 and (measured.share[2] > 0.1) == believed
        assert not measured.share[[0, 1, 3]].any()


def test_of_two_equals_the_past_tells_which_is_late_also_when_it_is_forgotten() -> None:
    begins = [0.0, *np.cumsum([0.2] * 6 + [0.5, 0.2] * 6).tolist()]
    usual = cadence(begins)
    late = cadence([b + (0.3 if n >= 6 and n % 2 == 0 else 0.0) for n, b in enumerate(begins)])
    pair = np.zeros(2, np.int64)
    measured = measure([usual, late], [1.2] * 2, 0.2, pair)
    assert measured.late.tolist() == [0, 6] and measured.share[1] > 0.3
    for made in (usual, late):
        made.iterations = deque(i for i in made.iterations if i.number >= 6)
    assert not measure([usual, late], [1.2] * 2, 0.2, pair).share.any(), "of two that differ nobody knows which is late"
    kept = measure([usual, late], [1.2] * 2, 0.2, pair, measured.usual)
    assert kept.late.tolist() == [0, 6] and kept.share[1] > 0.3


def test_who_waits_inside_a_node_for_a_host_that_calls_late_is_not_blamed() -> None:
    """Rank 3 calls late, and rank 2, its only equal, seems to compute while it waits through shared memory."""
    holds = [Hold(Part.GPU, 0.2, KEYS[2], None, "AllGather", 7), Hold(Part.GPU, 0.05, KEYS[3], None, "AllGather", 7)]
    looks = [look(holds, {2, 3}, OTHERS - {2})] * 12 + FAST
    share = np.where(np.arange(RANKS) == 3, 0.3, 0.0)
    late = Lateness(share, np.where(share > 0, 12, 0), 12, share)
    pairs = context(0.3, late=late, alike=np.arange(RANKS) // 2)
    for equal in (np.arange(RANKS) // 2, np.full(RANKS, -1)):
        found = find(add_up(looks, KEYS), replace(pairs, equal=equal))
        assert [(f.kind, f.members) for f in found] == [(Kind.HOST, (3,))]
    slower = replace(pairs, factor=np.where(np.arange(RANKS) == 2, 2.0, 1.0))
    assert {f.members for f in find(add_up(looks, KEYS), slower)} == {(2,), (3,)}, "its calls say that it is slow as well"


def test_an_adapter_whose_links_are_half_of_all_is_told_from_them() -> None:
    keys, seen = KEYS[:4], {(2, 3): 6, (3, 2): 6, (0, 2): 3, (2, 0): 3, (1, 0): 1}
    four = Context(np.zeros(4, np.int64), np.zeros(4, np.int64), np.full(4, np.nan), 0.7, 3.3)
    looks = [look([link(*ends, 0.5)], set(), {0, 1, 2, 3}) for ends, times in seen.items() for _ in range(times)]
    looks += [look([], set(), {0, 1, 2, 3})] * 21
    assert [(f.kind, f.members) for f in find(add_up(looks, keys), four)] == [(Kind.NIC, (2,))]


def between_two_hosts(share: float) -> list[Look]:
    """All links between ranks 0-3 and 4-7 are as slow as each other."""
    pairs = ((0, 4), (1, 5), (6, 2), (7, 3))
    return [look([link(a, b, share) for a, b in pairs], set(), OTHERS)] * 14


def test_slow_links_between_two_hosts_are_both_ends() -> None:
    found = find(add_up(between_two_hosts(0.2), KEYS), context(0.9, hosts=2))
    assert [(f.kind, f.members) for f in found] == [(Kind.NIC, tuple(range(RANKS)))]
    of_one_machine = replace(context(0.9, hosts=1), node=np.arange(RANKS) // 4)
    found = find(add_up(between_two_hosts(0.2), KEYS), of_one_machine)
    assert [f.members for f in found] == [tuple(range(RANKS))], "nodes as NCCL tells them apart"


def test_a_job_of_two_hosts_may_always_have_waited_for_its_links() -> None:
    assert find(add_up(between_two_hosts(0.2), KEYS), context(None, hosts=2)) == []
    two = [look([link(3, 4, 0.4), link(7, 0, 0.4)], set(), OTHERS)] * 14
    assert find(add_up(two, KEYS), context(None, hosts=2)) == [], "one as much as the other"
    one = [look([link(3, 4, 0.7), link(7, 0, 0.05)], set(), OTHERS)] * 14
    assert [f.members for f in find(add_up(one, KEYS), context(None, hosts=2))] == [(3, 4)], "one alone"


def test_who_begins_late_by_all_that_is_lost_need_not_wait_much_less() -> None:
    """In shared memory all seem to wait most of the time."""
    seldom = [look([Hold(Part.GPU, 0.5, KEYS[3], None, "AllReduce", 7)], {3}, OTHERS)] * 3
    looks = seldom + [look([], set(), set(range(RANKS)))] * 12
    share = np.where(np.arange(RANKS) == 3, 0.5, 0.0)
    late = Lateness(share, np.where(share > 0, 12, 0), 12, share)

    def named(looks: list[Look], late: Lateness) -> list[tuple[Kind, tuple[int, ...]]]:
        return [(f.kind, f.members) for f in find(add_up(looks, KEYS), context(0.5, hosts=1, late=late))]

    assert named(looks, late) == [(Kind.HOST, (3,))]
    assert named(looks, replace(late, share=0.3 * share)) == [], "it does not explain what is lost"
    together = Lateness(share + share[::-1], late.late + late.late[::-1], 12, share + share[::-1])
    assert named(looks, together) == [], "another is as late"
    carried = [replace(one, holds=(*one.holds, link(2, 3, 0.3))) for one in looks]
    assert (Kind.HOST, (3,)) not in named(carried, late), "a collective ends late for it"


def test_whose_gpu_is_plainly_at_work_is_not_blamed_for_its_proxy_as_well() -> None:
    holds = [Hold(Part.GPU, 0.3, KEYS[3], None, "AllReduce", 7), Hold(Part.PROXY, 0.3, KEYS[3], None, "AllReduce", 7)]
    both = [look(holds, {3}, OTHERS)] * 12 + FAST
    assert [(f.kind, f.members) for f in find(add_up(both, KEYS), context(0.6))] == [(Kind.COMPUTE, (3,))]
    sleeping = [look(holds[1:], set(), OTHERS)] * 12 + FAST
    assert [(f.kind, f.members) for f in find(add_up(sleeping, KEYS), context(0.6))] == [(Kind.PROXY, (3,))]
