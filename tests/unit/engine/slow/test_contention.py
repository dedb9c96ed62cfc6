"""Machines with other work: samples taken one after the other, and ranks that wait for CPUs, accuse nobody."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from ncclwatch.engine.slow.blame import find

from ncclwatch.engine.connections import ConnectionKey
from ncclwatch.engine.edges import Wait, Why
from ncclwatch.engine.job import Job, assemble
from ncclwatch.engine.nodes import LinkNode, RankNode
from ncclwatch.engine.slow.contention import lacks_cpu, running_part, short_of_cpu
from ncclwatch.engine.slow.findings import Context, Kind
from ncclwatch.engine.slow.profile import Profile, add_up
from ncclwatch.engine.slow.sample_ordering import Moments, near
from ncclwatch.engine.slow.snapshot import Activity, CpuTimes, Hold, LinkPlace, Look, Part
from ncclwatch.engine.waits import find_waits
from ncclwatch.model.identity import ProcessKey
from unit.synthetic import SECOND, Rank, communicator, recv, send

RANKS = 4
KEYS = [ProcessKey("boot", 100 + rank, 1, "build") for rank in range(RANKS)]
CULPRIT = 1


def looks(part: Part, wait: list[float], run: float, begin: float = 0.0, held: float = 0.6) -> list[Look]:
    """Ten looks a second apart in which one rank holds the others up; ``wait`` threads of each want a CPU, ``run`` run."""
    found = []
    for second in range(10):
        at = begin + second
        activities = {key: Activity.COMPUTES if rank == CULPRIT else Activity.WAITS for rank, key in enumerate(KEYS)}
        times = {key: CpuTimes(at, at * wait[rank], at * run) for rank, key in enumerate(KEYS)}
        # Not in every look: a share has a scatter.
        holds = (Hold(part, held * (0.9 + 0.2 * (second % 2)), KEYS[CULPRIT], None, "AllReduce", 7),)
        found.append(Look(at, RANKS, holds if held else (), activities, times))
    return found


def context(before: list[Look] | None, lost: float = 0.5, hosts: int = 1) -> Context:
    past = add_up(before, KEYS) if before is not None else None
    host = np.arange(RANKS) * hosts // RANKS
    return Context(np.zeros(RANKS, np.int64), host, np.full(RANKS, np.nan), lost, 1 / (1 - lost), past, noise=0.2)


QUIET = looks(Part.PROXY, [0.2] * RANKS, 0.2, held=0.0)


def test_a_proxy_that_does_not_run_is_named_where_cpus_are_free_and_where_its_rank_does_not_want_them() -> None:
    free = add_up(looks(Part.PROXY, [0.4] * RANKS, 0.4), KEYS)
    assert [(f.kind, f.members) for f in find(free, context(QUIET))] == [(Kind.PROXY, (CULPRIT,))], "polling costs the same part"
    asleep = add_up(looks(Part.PROXY, [3.0, 1.0, 3.0, 3.0], 0.2), KEYS)
    assert [(f.kind, f.members) for f in find(asleep, context(QUIET))] == [(Kind.PROXY, (CULPRIT,))]


def test_a_proxy_that_waits_for_a_cpu_like_its_neighbours_is_not_to_blame() -> None:
    crowded = add_up(looks(Part.PROXY, [3.0] * RANKS, 0.2), KEYS)
    assert short_of_cpu(crowded, add_up(QUIET, KEYS)).all()
    assert find(crowded, context(QUIET)) == []


def test_a_proxy_that_alone_is_late_explains_its_part_of_the_waits_that_show() -> None:
    """Of most waits the looks do not show where they end; of those that they do, they end at one proxy."""

    def named(beside: float) -> list[tuple[Kind, tuple[int, ...]]]:
        seen = []
        for second in range(40):
            holds = [Hold(Part.PROXY, 0.3, KEYS[CULPRIT], None, "AllReduce", 7)] if second % 4 == 0 else []
            if beside and second % 4 == 1:
                holds = [Hold(Part.PROXY, beside, KEYS[3], None, "AllReduce", 7)]
            seen.append(Look(float(second), RANKS, tuple(holds), dict.fromkeys(KEYS, Activity.WAITS)))
        return [(f.kind, f.members) for f in find(add_up(seen, KEYS), context(None))]

    assert named(0.0) == [(Kind.PROXY, (CULPRIT,))]
    assert named(0.2) == [], "another proxy is late as well"


def test_a_nic_that_outweighs_all_other_links_is_named_though_all_lack_cpus_alike() -> None:
    def with_links(shares: dict[tuple[int, int], float], wait: list[float]) -> Profile:
        made = looks(Part.PROXY, wait, 0.2, held=0.0)
        holds = [
            Hold(Part.LINK, share, None, LinkPlace(7, 1, RANKS, a, b, KEYS[a], KEYS[b]), "AllReduce", 7)
            for (a, b), share in shares.items()
        ]
        return add_up([replace(look, holds=tuple(holds)) for look in made], KEYS)

    slow = {(1, 2): 0.3, (0, 1): 0.25, (2, 3): 0.03}
    named = find(with_links(slow, [3.0] * RANKS), context(QUIET, hosts=4))
    assert [(f.kind, f.members) for f in named] == [(Kind.NIC, (CULPRIT,))]
    assert find(with_links(slow | {(2, 3): 0.25}, [3.0] * RANKS), context(QUIET, hosts=4)) == [], "others are late as well"
    assert find(with_links(slow, [3.0, 5.0, 3.0, 3.0]), context(QUIET, hosts=4)) == [], "it lacks CPUs more than they do"
    assert find(with_links(slow, [3.0] * RANKS), context(QUIET, lost=0.9, hosts=4)) != []
    assert find(with_links({(1, 2): 0.2, (0, 1): 0.15}, [3.0] * RANKS), context(QUIET, lost=0.9, hosts=4)) == [], "too little"


def test_work_is_blamed_on_a_crowded_host_only_if_it_explains_most_of_what_is_lost() -> None:
    little = add_up(looks(Part.GPU, [3.0] * RANKS, 0.2, held=0.2), KEYS)
    assert find(little, context(QUIET, lost=0.6)) == []
    much = add_up(looks(Part.GPU, [3.0] * RANKS, 0.2, held=0.7), KEYS)
    assert [(f.kind, f.members) for f in find(much, context(QUIET, lost=0.6))] == [(Kind.COMPUTE, (CULPRIT,))]


def test_a_rank_that_alone_lacks_a_cpu_is_named() -> None:
    limited = add_up(looks(Part.GPU, [0.2, 3.0, 0.2, 0.2], 0.2, held=0.4), KEYS)
    assert short_of_cpu(limited, add_up(QUIET, KEYS)).tolist() == [False, True, False, False]
    assert [f.members for f in find(limited, context(QUIET, lost=0.6))] == [(CULPRIT,)]
    said = lacks_cpu(limited, context(QUIET), [CULPRIT])
    assert said.startswith("CPU contention: on average 3.0 of its threads") and "others' 0.2" in said
    crowded = add_up(looks(Part.GPU, [3.0] * RANKS, 0.2), KEYS)
    assert lacks_cpu(crowded, context(QUIET), [CULPRIT]) == "", "all lack them alike"
    assert lacks_cpu(add_up(QUIET, KEYS), context(QUIET), [CULPRIT]) == ""


def test_cpu_times_that_are_not_known_change_nothing() -> None:
    unknown = add_up(
        [Look(look.time, look.ranks, look.holds, look.activities) for look in looks(Part.PROXY, [3.0] * 4, 0.2)], KEYS
    )
    assert np.isnan(running_part(unknown)).all() and not short_of_cpu(unknown, None).any()
    assert [f.kind for f in find(unknown, context(QUIET))] == [Kind.PROXY]


def test_a_sum_that_falls_because_a_thread_ended_is_left_out() -> None:
    first = {KEYS[0]: CpuTimes(0.0, 10.0, 1.0)}
    ended = {KEYS[0]: CpuTimes(1.0, 2.0, 1.5)}
    later = {KEYS[0]: CpuTimes(3.0, 3.0, 2.5)}
    profile = add_up([Look(t, 1, (), {}, times) for t, times in ((0.0, first), (1.0, ended), (3.0, later))], KEYS[:1])
    assert profile.cpu_wait.tolist() == [0.5] and profile.cpu_use.tolist() == [0.5]


# --- samples one after the other ------------------------------------------------------------------------------------------


def job_read_at(*begun_ms: float, took_ms: float = 10.0) -> Job:
    samples = [SimpleNamespace(wall_ns=int(ms * 1e6), duration_ns=int(took_ms * 1e6)) for ms in begun_ms]
    members = [SimpleNamespace(index=index, last=sample) for index, sample in enumerate(samples)]
    group = SimpleNamespace(members={index: (member, None) for index, member in enumerate(members)})
    return cast(Job, SimpleNamespace(members=members, groups={7: group}))


def wait(waiter: int, target: int | LinkNode) -> Wait:
    key = ConnectionKey(7, 0, 0, 1, False)
    return Wait(RankNode(waiter), target if isinstance(target, LinkNode) else RankNode(target), Why.EMPTY, key, str)


@pytest.mark.parametrize(("first", "second", "proven"), [(0.0, 200.0, True), (200.0, 0.0, False), (12.0, 0.0, True)])
def test_a_wait_is_proven_by_reading_who_is_waited_for_later(first: float, second: float, proven: bool) -> None:
    moments = Moments(job_read_at(first, second), near_s=0.03)
    assert moments.prove(wait(0, 1)) is proven
    assert moments.prove(wait(1, 1)), "what one sample says of itself needs no second"


def test_data_is_under_way_if_the_receiver_was_read_later() -> None:
    link = LinkNode(7, 0, 1)
    assert Moments(job_read_at(0.0, 200.0), 0.03).prove(wait(1, link))
    assert not Moments(job_read_at(200.0, 0.0), 0.03).prove(wait(1, link))


def test_who_already_waited_at_the_look_before_waits_though_read_later() -> None:
    """Rank 1 starves and was read after rank 0, which it waits for; it had starved before rank 0 was read."""
    idle = {"received": 4, "delivered": 4, "consumed": 4}
    target = Rank(0, 2, (communicator(0, 2),), (send(1, sent=4, done=4, produced=4),))
    waiter = Rank(1, 2, (communicator(1, 2),), (recv(0, posted=12, **idle),))
    later = [replace(one, wall_ns=one.wall_ns + SECOND // 2) for one in waiter.looks()]
    (job,) = assemble([target.looks(), later])
    (starves,) = [one for one in find_waits(job).all() if one.waiter == RankNode(job.members[1].index)]
    assert Moments(job, near_s=0.02).prove(starves)
    came = [replace(later[0], operations=()), later[1]]
    (job,) = assemble([target.looks(), came])
    (starves,) = [one for one in find_waits(job).all() if one.waiter == RankNode(job.members[1].index)]
    assert not Moments(job, near_s=0.02).prove(starves), "it may have come since"


def test_how_near_is_near_goes_by_the_iteration() -> None:
    assert near(10.0) > 0.1 > near(None) > near(0.1)
