"""Machines with other work and CPU limits: want of CPUs everywhere names nobody, want of one rank or container names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ncclwatch.engine.slow.classify import held_back_alone, lacks_cpu, running_part, short_of_cpu
from ncclwatch.engine.slow.findings import Context
from ncclwatch.engine.slow.profile import add_up
from ncclwatch.engine.slow.snapshot import Activity, CpuTimes, Hold, Look, Part
from ncclwatch.model.verdict import SlowCause
from ncclwatch.model.verdict import SlowKind as Kind
from unit.engine.slow import cases as made
from unit.engine.slow.cases import Case, cases, link, own, sample

RANKS = 4
KEYS = made.KEYS[:RANKS]
CULPRIT = 1
NO_LIMIT = (0, 0, 0)


def crowded(part: Part, wait: Sequence[float], run: float, held: float = 0.6) -> list[Look]:
    """Ten samples a second apart in which one rank holds the others up; ``wait`` threads of each want a CPU, ``run`` run."""
    found = []
    for second in range(10):
        times = {key: CpuTimes(second, second * wait[rank], second * run) for rank, key in enumerate(KEYS)}
        # Not in every sample alike: a share has a scatter.
        holds = [own(CULPRIT, held * (0.9 + 0.2 * (second % 2)), part)] if held else []
        look = sample(holds, {CULPRIT}, {0, 2, 3}, RANKS)
        found.append(replace(look, time=float(second), cpu_times=times))
    return found


def context(before: list[Look] | None, lost: float | None = 0.5, hosts: int = 1) -> Context:
    return made.context(lost, hosts, RANKS, before=add_up(before, KEYS) if before is not None else None)


QUIET = crowded(Part.PROXY, [0.2] * RANKS, 0.2, held=0.0)
MANY = [3.0] * RANKS


def late_proxy(beside: float) -> list[Look]:
    """Of most waits samples do not show where they end; of those that they do, they end at one proxy (or two)."""
    seen = []
    for second in range(40):
        holds = [own(CULPRIT, 0.3, Part.PROXY)] if second % 4 == 0 else []
        if beside and second % 4 == 1:
            holds = [own(3, beside, Part.PROXY)]
        seen.append(sample(holds, (), range(RANKS), RANKS))
    return seen


def with_links(shares: Mapping[tuple[int, int], float], wait: Sequence[float]) -> list[Look]:
    """Links hold the job up, while threads want CPUs."""
    holds = tuple(link(*ends, share, RANKS) for ends, share in shares.items())
    return [replace(look, holds=holds) for look in crowded(Part.PROXY, wait, 0.2, held=0.0)]


def unknown(looks: list[Look]) -> list[Look]:
    """The same where nothing is known of CPUs."""
    return [replace(look, cpu_times={}) for look in looks]


OF_NIC = {(1, 2): 0.3, (0, 1): 0.25, (2, 3): 0.03}
APART = context(QUIET, hosts=4)


@cases(
    Case("a proxy that does not run, where CPUs are free", crowded(Part.PROXY, [0.4] * RANKS, 0.4), context(QUIET),
         [(Kind.PROXY, (CULPRIT,))]),
    Case("a proxy that sleeps, on a crowded host", crowded(Part.PROXY, [3.0, 1.0, 3.0, 3.0], 0.2), context(QUIET),
         [(Kind.PROXY, (CULPRIT,))]),
    Case("a proxy that waits for a CPU like its neighbours", crowded(Part.PROXY, MANY, 0.2), context(QUIET),
         disagrees="names 1 (proxy)"),
    Case("from the start, a proxy that alone is late: its NIC may be the one that all gradients pass",
         late_proxy(0.0), context(None, lost=None)),
    Case("from the start, another proxy is late as well", late_proxy(0.2), context(None, lost=None)),
    Case("a NIC that outweighs other links though all lack CPUs alike", with_links(OF_NIC, MANY), APART,
         [(Kind.NIC, (CULPRIT,))]),
    Case("a NIC, where others are late as well", with_links(OF_NIC | {(2, 3): 0.25}, MANY), APART),
    Case("a NIC of a rank that lacks CPUs more than the others", with_links(OF_NIC, [3.0, 5.0, 3.0, 3.0]), APART,
         disagrees="names 1 (network interface)"),
    Case("a NIC that explains too little", with_links({(1, 2): 0.2, (0, 1): 0.15}, MANY), context(QUIET, lost=0.9, hosts=4),
         disagrees="names 1 (network interface)"),
    Case("work on a crowded host that explains little", crowded(Part.GPU, MANY, 0.2, held=0.2), context(QUIET, lost=0.6),
         disagrees="names 1 (computation)"),
    Case("work on a crowded host that explains most", crowded(Part.GPU, MANY, 0.2, held=0.7), context(QUIET, lost=0.6),
         [(Kind.COMPUTE, (CULPRIT,))]),
    Case("a rank that alone lacks a CPU", crowded(Part.GPU, [0.2, 3.0, 0.2, 0.2], 0.2, held=0.4), context(QUIET, lost=0.6),
         [(None, (CULPRIT,))]),
    Case("nothing is known of CPUs", unknown(crowded(Part.PROXY, MANY, 0.2)), context(QUIET), [(Kind.PROXY, (CULPRIT,))]),
)  # fmt: skip
def test_crowded_hosts(case: Case) -> None:
    case.check()


def test_want_of_a_cpu_is_told_beside_the_past_and_the_others() -> None:
    assert short_of_cpu(add_up(crowded(Part.PROXY, MANY, 0.2), KEYS), add_up(QUIET, KEYS)).all()
    limited = add_up(crowded(Part.GPU, [0.2, 3.0, 0.2, 0.2], 0.2), KEYS)
    assert short_of_cpu(limited, add_up(QUIET, KEYS)).tolist() == [False, True, False, False]
    said = lacks_cpu(limited, context(QUIET), [CULPRIT])
    assert said is not None and said.word is SlowCause.CONTENDED
    assert said.text.startswith("CPU contention: on average 3.0 of its threads") and "others' 0.2" in said.text
    everywhere = add_up(crowded(Part.GPU, MANY, 0.2), KEYS)
    assert lacks_cpu(everywhere, context(QUIET), [CULPRIT]) is None, "all lack them alike"
    assert lacks_cpu(add_up(QUIET, KEYS), context(QUIET), [CULPRIT]) is None
    nothing = add_up(unknown(QUIET), KEYS)
    assert np.isnan(running_part(nothing)).all() and not short_of_cpu(nothing, None).any()


def test_a_sum_that_falls_because_a_thread_ended_is_left_out() -> None:
    first = {KEYS[0]: CpuTimes(0.0, 10.0, 1.0)}
    ended = {KEYS[0]: CpuTimes(1.0, 2.0, 1.5)}
    later = {KEYS[0]: CpuTimes(3.0, 3.0, 2.5)}
    profile = add_up([Look(t, 1, (), {}, times) for t, times in ((0.0, first), (1.0, ended), (3.0, later))], KEYS[:1])
    assert profile.cpu_wait.tolist() == [0.5] and profile.cpu_use.tolist() == [0.5]


# --- CPU limits ----------------------------------------------------------------------------------------------------------


def throttled(held_back: float, begin: float = 100.0, *, slow: bool = True, limited: Sequence[int] = (CULPRIT,)) -> list[Look]:
    """Thirty samples a second apart; rank 1 computes a little more than the others and its links are a little slower. A limit
    holds back who is ``limited``.
    """
    found = []
    for second in range(30):
        at = begin + second
        limit = int(10 * at), int(10 * at * held_back), 77
        times = {
            key: CpuTimes(at, at * 3.0, at * 0.4, *(limit if rank in limited else NO_LIMIT)) for rank, key in enumerate(KEYS)
        }
        holds: tuple[Hold, ...] = ()
        if slow and second % 10 == 0:
            holds = (own(1, 0.3),)
        elif slow and second % 10 == 5:
            holds = (link(1, 2, 0.5, RANKS),)
        activities = dict.fromkeys(KEYS, Activity.WAITS if second % 2 else Activity.COMPUTES)
        found.append(Look(at, RANKS, holds, activities, times))
    return found


def seldom(held_back: float, other: int = 0) -> list[Look]:
    """The same without slow links; rank 2 holds others up in so many samples."""
    looks = [replace(one, holds=one.holds if one.holds and one.holds[0].link is None else ()) for one in throttled(held_back)]
    return [replace(one, holds=(own(2, 0.25),)) if at % 5 == 2 and at < 5 * other else one for at, one in enumerate(looks)]


def at_proxy(held_back: float) -> list[Look]:
    """Rank 1 waits like the others, for its proxy holds them up."""
    return [replace(one, holds=(own(1, 0.5, Part.PROXY),) if at % 2 else ()) for at, one in enumerate(throttled(held_back))]


FREE = throttled(0.0, 1.0, slow=False)
SLOW = context(FREE, lost=0.25, hosts=4)
START = context(None, lost=None, hosts=4)
MOST = context(FREE, lost=0.6, hosts=4)


@cases(
    Case("a limit holds a rank back: its links as well", throttled(0.9), SLOW, [(Kind.HOST, (1,))]),
    Case("no limit", throttled(0.05), SLOW, never=[(Kind.HOST, (1,))]),
    Case("from the start", throttled(0.9), START, [(Kind.HOST, (1,))]),
    Case("from the start, no limit", throttled(0.0), START),
    Case(
        "ranks under one limit, of which one is waited for",
        throttled(0.9, limited=(1, 2)),
        SLOW,
        [(Kind.HOST, (1, 2))],
    ),
    Case("a limit, and waits end at the proxy that it holds back", at_proxy(0.9), MOST, [(Kind.HOST, (1,))]),
    Case("waits end at a proxy, and no limit", at_proxy(0.05), MOST, [(Kind.PROXY, (1,))]),
    Case("a limit, where few waits can be followed", seldom(0.9), MOST, [(Kind.HOST, (1,))]),
    Case("few waits can be followed, and no limit", seldom(0.05), MOST),
    Case(
        "a limit, and another is waited for more often",
        seldom(0.9, other=4),
        MOST,
        never=[(None, (1,))],
        disagrees="names 1 (host): none of the recordings has a limit that is another's",
    ),
)
def test_cpu_limits(case: Case) -> None:
    case.check()


def test_who_is_held_back_alone_is_told_beside_the_past_and_the_others() -> None:
    profile = add_up(throttled(0.9), KEYS)
    assert held_back_alone(profile, SLOW).tolist() == [False, True, False, False]
    said = lacks_cpu(profile, SLOW, [1])
    assert said is not None and said.word is SlowCause.THROTTLED and "90%" in said.text
    assert not held_back_alone(add_up(throttled(0.05), KEYS), SLOW).any()
    before = context(throttled(0.8, 1.0, slow=False), lost=0.25, hosts=4)
    assert not held_back_alone(profile, before).any(), "it was held back before as well"
    assert held_back_alone(add_up(throttled(0.9, limited=(1, 2)), KEYS), SLOW).tolist() == [False, True, True, False]
