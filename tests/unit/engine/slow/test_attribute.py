"""Who is named for a slow job, from samples made by hand: culprits stand out by more than chance, or nobody is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ncclwatch.engine.slow import attribute
from ncclwatch.engine.slow.attribute import find, likeliest, log_odds, posterior
from ncclwatch.engine.slow.calibration import TABLE
from ncclwatch.engine.slow.findings import Context
from ncclwatch.engine.slow.profile import Profile, add_up
from ncclwatch.engine.slow.snapshot import Activity, Hold, Look, Part
from ncclwatch.engine.slow.terms import TERMS, CandidateKind, Members, Terms, measure
from ncclwatch.model.verdict import SlowKind as Kind
from unit.engine.slow.cases import (
    ALL,
    HEALTHY,
    KEYS,
    RANKS,
    Case,
    but,
    cases,
    context,
    late,
    link,
    own,
    sample,
)

# Cases with ``disagrees`` say what a person wants, and what the estimate says instead as its table stands: where that changes,
# the case fails, and the word goes.
SLOW = [sample([own(3, 0.8)], {3}, but(3))] * 9
MOSTLY_BUSY = [sample([], ALL if n % 5 < 3 else (), () if n % 5 < 3 else ALL) for n in range(20)]
PAST = add_up(MOSTLY_BUSY, KEYS)
ANY = None

# --- one rank ------------------------------------------------------------------------------------------------------------


def rarely_proven(times: int, rank: int = 3, other: float = 0.0, held: float = 0.3) -> list[Look]:
    """Samples in which a rank is at work and the others wait, of whom only one sample in three tells for whom."""
    proven = [own(rank, held), *([own(5, other)] if other else [])]
    return [sample(proven if number % 3 == 0 else [], {rank}, but(rank)) for number in range(times)]


FAR = rarely_proven(27)
SELDOM = [sample([own(3, 0.8)], {3}, but(3))] * 3 + HEALTHY[:1] * 26
BOTH = sample([own(rank, 0.4) for rank in (2, 3)], {2, 3}, but(2, 3))
ONLY = sample([own(3, 0.8)], {3}, but(3))
PACED = context(0.6, hosts=4)


@cases(
    Case("a slow rank", SLOW + HEALTHY, context(0.5), [(Kind.COMPUTE, (3,))]),
    Case("few samples accuse nobody", SLOW[:3], context(0.5)),
    Case("nobody is at fault in a healthy profile", HEALTHY * 4, context(0.5)),
    Case("from the start, far from all peers", FAR, context(None), [(ANY, (3,))]),
    Case("from the start, a peer holds up half as much", rarely_proven(27, other=0.15), context(None),
         disagrees="names 3 (computation)"),
    Case("a job that rests for most of the lost time", SLOW + HEALTHY, context(0.5, idle=0.6)),
    Case("from the start, who costs less than a twentieth", rarely_proven(27, held=0.12), context(None)),
    Case("from the start, in four samples only", rarely_proven(12), context(None), disagrees="names 3 (computation)"),
    Case("from the start, nobody is seen to wait",
         [replace(one, activities=dict.fromkeys(KEYS, Activity.TRANSFERS)) for one in FAR], context(None),
         disagrees="names 3 (computation)"),
    Case("from the start, one peer is no comparison", FAR, context(None, equal=np.arange(RANKS) // 2),
         disagrees="names 3 (computation)"),
    Case("from the start, without peers", SLOW + HEALTHY, context(None, equal=np.full(RANKS, -1))),
    Case("plainly at work, though few waits could be followed to it", HEALTHY + rarely_proven(15), context(0.6),
         [(Kind.COMPUTE, (3,))]),
    Case("another holds up nearly as much", HEALTHY + rarely_proven(15, other=0.2), context(0.6),
         disagrees="names 3 (computation)"),
    Case("all work as much",
         [replace(one, activities=dict.fromkeys(KEYS, Activity.COMPUTES)) for one in HEALTHY + rarely_proven(15)], context(0.6),
         disagrees="names 3 (computation)"),
    Case("nobody waits for it", [sample([own(3, 0.01)], {3}, but(3))] * 12, context(0.5)),
    Case("samples alone are too few", SELDOM, context(0.6, hosts=4)),
    Case("a peer of its tensor group is paced by it", [BOTH, ONLY, ONLY] * 5 + HEALTHY, PACED, [(ANY, (3,))]),
    Case("a peer of its tensor group is as slow", [BOTH] * 12 + HEALTHY, PACED, ranks=frozenset({2, 3})),
)  # fmt: skip
def test_one_rank(case: Case) -> None:
    case.check()


@pytest.mark.xfail(reason="chance names somebody in four of ten, however many the samples")
@pytest.mark.parametrize("past", [None, PAST], ids=["no past", "with a past"])
def test_chance_accuses_nobody(past: Profile | None) -> None:
    """In every sample another rank, drawn by chance, holds others up."""
    rng = np.random.default_rng(5)
    named = 0
    for _ in range(40):
        samples = []
        for _ in range(14):
            culprit = int(rng.integers(RANKS))
            waiting = set(rng.choice(RANKS, 4, replace=False).tolist()) - {culprit}
            samples.append(sample([own(culprit, 0.5)], {culprit}, waiting))
        named += bool(find(add_up(samples, KEYS), context(0.5, before=past)))
    assert named == 0


def pipelines() -> list[Look]:
    """Ranks 0-3 are the first stage of four pipelines, 4-7 the second. Rank 4 is slow; all of its pipeline is waited for at the
    gradients, and in many samples it is not known what its first stage does.
    """
    first = [sample([own(0, 0.3)], {0, 4}, but(0, 4))] * 6
    then = [sample([own(4, 0.15)], {4}, but(4))] * 8
    return first + [replace(one, activities={k: a for k, a in one.activities.items() if k != KEYS[0]}) for one in then]


def alike(second: float) -> list[Look]:
    return [sample([own(3, 0.16), own(5, second)], {3, 5}, {0, 1})] * 12


@cases(
    Case("two alike", alike(0.12), context(0.7), ranks=frozenset({3, 5})),
    Case("one beside which another holds up a little", alike(0.06), context(0.7), [(ANY, (3,))],
         disagrees="names 3 (computation) and 5 (computation), who works as much"),
    Case("the stage before it is an onlooker", pipelines(), context(0.6, equal=np.arange(RANKS) // 4), [(Kind.COMPUTE, (4,))],
         disagrees="names 0 (computation) and 4 (computation)"),
)  # fmt: skip
def test_two_ranks(case: Case) -> None:
    case.check()


# --- hosts that call late ------------------------------------------------------------------------------------------------

WORKING = [sample([], {0}, but(0))] * 12
IDLE = [sample([], (), but(0))] * 12
HIDDEN = [sample([], (), ())] * 12
LATER = [sample([own(3, 0.5)], {3}, but(3))] * 3 + [sample([], (), ALL)] * 12
INSIDE_NODE = [sample([own(2, 0.2), own(3, 0.05)], {2, 3}, but(2, 3))] * 12 + HEALTHY
PAIRS = np.arange(RANKS) // 2
RING = replace(
    late({0: 0.3}),
    late=np.array([10, 10, 9, 9, 8, 0, 0, 0]),
    seconds=np.array([0.3, 0.25, 0.2, 0.15, 0.1, 0.0, 0.0, 0.0]),
)
"""The others begin late as well, each a little less, though nobody waits for them."""


@cases(
    Case("one begins late and works while others wait", WORKING, context(0.5, late=late({0: 0.3})), [(Kind.HOST, (0,))]),
    Case("like its peers elsewhere: gradients ended late for them", WORKING,
         context(0.5, late=late(dict.fromkeys((0, 2, 4, 6), 0.3))), disagrees="names 0 (host)"),
    Case("only its own host is late beside it", WORKING, context(0.5, hosts=4, late=late({0: 0.3, 1: 0.3})),
         [(Kind.HOST, (0,))]),
    Case("who never works is no busier than the others", IDLE, context(0.7, late=late({0: 0.3}))),
    Case("nothing shows of anybody else", HIDDEN, context(0.7, late=late({0: 0.3})), [(Kind.HOST, (0,))],
         disagrees="names nobody"),
    Case("a link that ends at it explains as much", [sample([link(7, 0, 0.15)], {0}, but(0))] * 12,
         context(0.7, late=late({0: 0.2})), never=[(Kind.HOST, (0,))], disagrees="names 0 (host)"),
    Case("a link elsewhere explains nothing of it", [sample([link(4, 5, 0.15)], {0}, but(0))] * 12,
         context(0.7, late=late({0: 0.2})), among=[(Kind.HOST, (0,))]),
    Case("where a ring ends late, its last rank begins late", WORKING, context(0.7, late=RING), disagrees="names 0 (host)"),
    Case("an idle rank is later", WORKING, context(0.7, late=late({0: 0.2, 5: 0.3})), never=[(Kind.HOST, (0,))],
         disagrees="names 0 (host)"),
    Case("an idle rank is late, and less so", WORKING, context(0.7, late=late({0: 0.2, 5: 0.1})), [(Kind.HOST, (0,))]),
    Case("late by all that is lost", LATER, context(0.5, hosts=1, late=late({3: 0.5})), [(Kind.HOST, (3,))]),
    Case("late by a third of what is lost", LATER, context(0.5, hosts=1, late=late({3: 0.15}))),
    Case("another is as late", LATER, context(0.5, hosts=1, late=late({3: 0.5, 4: 0.5}))),
    Case("a collective ends late for it", [replace(one, holds=(*one.holds, link(2, 3, 0.3))) for one in LATER],
         context(0.5, hosts=1, late=late({3: 0.5})), never=[(Kind.HOST, (3,))]),
    Case("who waits for it inside the node, with a peer", INSIDE_NODE,
         context(0.3, late=late({3: 0.3}), alike=PAIRS, equal=PAIRS), [(Kind.HOST, (3,))]),
    Case("who waits for it inside the node, without peers", INSIDE_NODE,
         context(0.3, late=late({3: 0.3}), alike=PAIRS, equal=np.full(RANKS, -1)), [(Kind.HOST, (3,))]),
    Case("who waits for it inside the node, unseen", INSIDE_NODE,
         context(0.3, late=late({3: 0.3}), alike=PAIRS, equal=PAIRS, unseen=np.arange(RANKS) == 2), [(Kind.HOST, (3,))]),
)  # fmt: skip
def test_late_hosts(case: Case) -> None:
    case.check()


# --- hosts, nodes and stages ---------------------------------------------------------------------------------------------

INSIDE = 4
HOST = np.arange(RANKS) // INSIDE
ONE_HOST = np.zeros(RANKS, np.int64)
FIRST, SECOND = (0, 1, 2, 3), (4, 5, 6, 7)
APART = context(0.6, before=PAST)
"""Each rank is on a host of its own."""


def links(weights: dict[tuple[int, int], float], times: int = 8, waiting: frozenset[int] = but(3)) -> list[Look]:
    """Samples in which links hold the job up."""
    return [sample([link(*ends, weight) for ends, weight in weights.items()], (), waiting)] * times


def first_host(busy: Sequence[int] = FIRST) -> list[Look]:
    """The first host's ranks are at work in most samples; in four of twelve the job waits for a link of rank 3."""
    samples = []
    for second in range(12):
        holds = [link(3, 4, 0.9)] if second % 3 == 0 else [own(rank, 0.12) for rank in busy]
        working = ALL if second % 4 == 1 else busy
        samples.append(sample(holds, working, ALL.difference(working)))
    return samples


def at_work(waiting: Sequence[int] = ()) -> list[Look]:
    """The first node works while the others wait, mostly for its rank 3; the GPU of rank 0 is seen to be waited for now and
    then only. Ranks in ``waiting`` wait as those of the other node do.
    """
    samples = []
    for second in range(20):
        weights = {3: 0.3, 2: 0.2, 1: 0.12, 0: 0.02 if second % 8 else 0.2}
        working = ALL if second % 5 == 0 else set(FIRST).difference(waiting)
        samples.append(sample([own(rank, weight) for rank, weight in weights.items()], working, ALL.difference(working)))
    return samples


def second_half(weights: Sequence[float]) -> list[Look]:
    """The last ranks are at work while the others wait; every other sample tells that each holds them up so much."""
    samples = []
    for second in range(20):
        holds = [own(rank, weight) for rank, weight in zip(SECOND, weights, strict=True)] if second % 2 else []
        working = ALL if second % 5 == 0 else SECOND
        samples.append(sample(holds, working, ALL.difference(working)))
    return samples


def two_work(second_works: int) -> list[Look]:
    """Rank 4 is at work, rank 5 in so many samples, rank 6 in four; in four it shows whom they hold up."""
    samples = []
    for second in range(20):
        holds = [own(4, 0.15), own(5, 0.15)] if second % 5 == 0 else []
        working = {4, *([5] if second < second_works else []), *([6] if second % 5 == 1 else [])}
        samples.append(sample(holds, working, ALL.difference(working)))
    return samples


@cases(
    Case("all ranks of a host of two", [sample([own(2, 0.4), own(3, 0.4)], {2, 3}, but(2, 3))] * 10 + HEALTHY,
         context(0.5, hosts=4), [(ANY, (2, 3))]),
    Case("a host whose ranks work, and its link now and then", first_host(), context(0.5, hosts=2),
         [(Kind.COMPUTE, FIRST)]),
    Case("the only link between two hosts", links({(3, 4): 0.9}) + HEALTHY, context(0.5, hosts=2),
         [(Kind.LINK, (3, 4))]),
    Case("a host that works while others wait", at_work(), context(0.5, hosts=2), [(ANY, FIRST)]),
    Case("a node that works while others wait", at_work(), context(0.5, host=ONE_HOST, node=HOST), [(ANY, FIRST)]),
    Case("not whole where one of it waits", at_work((0,)), context(0.5, hosts=2), never=[(ANY, FIRST)]),
    Case("not a part of a host or node", at_work(), context(0.5, host=ONE_HOST), never=[(ANY, FIRST)]),
    Case("half of the peers, on hosts of their own", second_half((0.3, 0.13, 0.13, 0.13)), APART, ranks=frozenset(SECOND),
         disagrees="names 4 (computation)"),
    Case("half of the peers, whose waits do not show", second_half((0.3, 0.13, 0.13, 0.13)),
         replace(APART, unseen=HOST == 1), never=[(ANY, (rank,)) for rank in SECOND]),
    Case("half of the peers, of which one holds others up", second_half((0.3, 0.02, 0.02, 0.02)), APART,
         never=[(ANY, (rank,)) for rank in SECOND[1:]]),
    Case("a stage, on hosts of their own", second_half([0.12] * INSIDE), replace(APART, equal=HOST), ranks=frozenset(SECOND),
         disagrees="names nobody"),
    Case("a stage, whose waits do not show", second_half([0.12] * INSIDE), replace(APART, equal=HOST, unseen=HOST == 1)),
    Case("a stage, without a past", second_half([0.12] * INSIDE), replace(APART, equal=HOST, before=None)),
    Case("a stage, of which one is waited for", second_half((0.03, 0.3, 0.03, 0.03)), replace(APART, equal=HOST),
         never=[(ANY, (rank,)) for rank in (4, 6, 7)]),
    Case("two of the peers, though few waits show it", two_work(18), APART, ranks=frozenset({4, 5})),
    Case("one of the peers, and another that works half of the time", two_work(10), APART, never=[(ANY, (5,))]),
    Case("two of the peers that work as long as ever", two_work(18), replace(APART, before=add_up(two_work(18), KEYS), lost=0.23),
         never=[(ANY, (5,)), (ANY, (4, 5))]),
)  # fmt: skip
def test_hosts_nodes_and_stages(case: Case) -> None:
    case.check()


# --- links, NICs and proxies ---------------------------------------------------------------------------------------------

BETWEEN_HOSTS = [sample([link(a, b, 0.2) for a, b in ((0, 4), (1, 5), (6, 2), (7, 3))], (), but(3))] * 14
HALF_OF_ALL = {(2, 3): 6, (3, 2): 6, (0, 2): 3, (2, 0): 3, (1, 0): 1}
GPU_AND_PROXY = [sample([own(3, 0.3), own(3, 0.3, Part.PROXY)], {3}, but(3))] * 12 + HEALTHY


def rarely_links(weights: dict[tuple[int, int], float]) -> list[Look]:
    """The same, and of as many waits again the samples do not show where they end."""
    return links(weights, 8, ALL) + [sample([], (), ALL)] * 8


@cases(
    Case("a link", links({(2, 3): 0.6}), context(0.6), [(Kind.LINK, (2, 3))]),
    Case("a NIC by both of its links", links({(2, 3): 0.4, (3, 4): 0.4}), context(0.6), [(Kind.NIC, (3,))]),
    Case("a link beside a lesser one", links({(2, 3): 0.6, (3, 4): 0.2}), context(0.6), [(Kind.LINK, (2, 3))],
         disagrees="names 3 (network interface)"),
    Case("the NICs of a host", links(dict.fromkeys(((1, 2), (2, 5), (3, 6), (7, 3), (3, 4)), 0.15)), context(0.6, hosts=4),
         [(Kind.NIC, (2, 3))]),
    Case("a link that outweighs all others", rarely_links({(1, 2): 0.2, (5, 6): 0.02}), context(0.6), [(Kind.LINK, (1, 2))],
         disagrees="names nobody"),
    Case("neither of two links alike", rarely_links({(1, 2): 0.2, (5, 6): 0.15}), context(0.6)),
    Case("a NIC whose links are half of all",
         [sample([link(*ends, 0.5)], (), ALL, 4) for ends, times in HALF_OF_ALL.items() for _ in range(times)]
         + [sample([], (), ALL, 4)] * 21, context(0.7, hosts=1, ranks=4), [(Kind.NIC, (2,))]),
    Case("links between two hosts are both ends", BETWEEN_HOSTS, context(0.9, hosts=2), [(Kind.NIC, tuple(range(RANKS)))]),
    Case("links between two nodes are both ends", BETWEEN_HOSTS, context(0.9, host=ONE_HOST, node=HOST),
         [(ANY, tuple(range(RANKS)))]),
    Case("from the start, two hosts may always have waited for their links", BETWEEN_HOSTS, context(None, hosts=2)),
    Case("from the start, one link as much as the other", links({(3, 4): 0.4, (7, 0): 0.4}, 14), context(None, hosts=2)),
    Case("from the start, one link alone: it may be the one that all gradients pass",
         links({(3, 4): 0.7, (7, 0): 0.05}, 14), context(None, hosts=2)),
    Case("from the start, a host that works while others wait: it may just be sampled later", at_work(),
         context(None, hosts=2, equal=HOST)),
    Case("a GPU that is plainly at work, and not its proxy as well", GPU_AND_PROXY, context(0.6), [(Kind.COMPUTE, (3,))]),
    Case("a proxy that sleeps",
         [sample([own(3, 0.3, Part.PROXY)], (), but(3))] * 12 + HEALTHY, context(0.6), [(Kind.PROXY, (3,))]),
)  # fmt: skip
def test_links_and_proxies(case: Case) -> None:
    case.check()


# --- work beside a slow network ------------------------------------------------------------------------------------------------


def shared(work: Sequence[int], often: int, links: Sequence[tuple[int, int]] = ((0, 1),)) -> list[Look]:
    """Of 24 samples some in which ranks work, the rest of those that tell in which links hold everybody up."""
    at_links = [sample([link(*ends, 0.9 / len(links)) for ends in links], (), ALL)]
    at_work = [sample([own(rank, 0.9 / len(work)) for rank in work], work, but(*work))] if work else []
    return at_links * (20 - often) + at_work * often + [sample([], ALL, ())] * 4


IN_HOST = ((0, 1), (1, 2), (2, 3), (3, 4), (7, 0))
WITH_PAST = context(0.8, before=add_up(HEALTHY * 2, KEYS))
PAST_IN_HOSTS = context(0.8, hosts=2, before=add_up(HEALTHY * 2, KEYS))


@cases(
    Case("a rank elsewhere", shared((5,), 7), WITH_PAST, [(Kind.LINK, (0, 1)), (Kind.COMPUTE, (5,))]),
    Case("the ranks of the host whose links are slow", shared((0, 1, 2, 3), 6, IN_HOST), PAST_IN_HOSTS,
         [(Kind.NIC, (0, 1, 2, 3)), (Kind.COMPUTE, (0, 1, 2, 3))]),
    Case("nobody: all of the lost time is the link's", shared((), 0), WITH_PAST, [(Kind.LINK, (0, 1))]),
    Case("seen once", shared((5,), 1), WITH_PAST, [(Kind.LINK, (0, 1))]),
    Case("an end of the link is not told from it", shared((1,), 5), WITH_PAST, never=[(Kind.COMPUTE, (1,))]),
    Case("without a healthy past", shared((5,), 7), context(0.8), never=[(Kind.COMPUTE, (5,))]),
)  # fmt: skip
def test_work_beside_a_slow_network(case: Case) -> None:
    case.check()


# --- the posterior -------------------------------------------------------------------------------------------------------


def measured(samples: Sequence[Look], known: Context) -> tuple[Terms, np.ndarray]:
    terms = measure(add_up(samples, KEYS), known)
    return terms, posterior(log_odds(terms, TABLE.since), TABLE.since, known.idle)


EVERYTHING = {
    "a straggler": (SLOW + HEALTHY, context(0.5)),
    "a link": (links({(2, 3): 0.6}), context(0.6)),
    "a host": (at_work(), context(0.5, hosts=2)),
    "nothing": (HEALTHY, context(0.3)),
    "everything at once": (SLOW + at_work() + links({(2, 3): 0.6}), context(0.7, hosts=2, late=late({3: 0.5}))),
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_posterior_is_shared_among_candidates_and_nobody(name: str) -> None:
    _, chances = measured(*EVERYTHING[name])
    assert np.isfinite(chances).all() and (chances >= 0).all() and 0 < chances.sum() <= 1


def test_nobody_is_likeliest_without_evidence() -> None:
    for lost in (0.05, 0.3, 0.6):
        _, chances = measured(MOSTLY_BUSY, context(lost, before=PAST))
        assert chances.max() < 1 - chances.sum(), lost
        assert find(PAST, context(lost, before=PAST)) == []
    assert find(PAST, context(None)) == []


def test_nothing_sampled_names_nobody() -> None:
    assert find(add_up([], KEYS), context(0.5)) == []


def test_idle_time_speaks_for_nobody() -> None:
    """What the job pauses as a whole nobody in it costs; how much that counts is the table's."""
    terms, _ = measured(*EVERYTHING["a straggler"])
    weights = replace(TABLE.since, terms={**TABLE.since.terms, "idle": 4.0})
    odds = log_odds(terms, weights)
    named = [posterior(odds, weights, idle).sum() for idle in (0.0, 0.5, 1.0)]
    assert named[0] > named[1] > named[2]
    assert TABLE.since.terms["idle"] >= 0


def test_nobody_is_named_twice() -> None:
    for samples, known in EVERYTHING.values():
        named = [set(finding.members) for finding in find(add_up(samples, KEYS), known) if finding.kind is not Kind.NIC]
        assert sum(map(len, named)) == len(set().union(*named))


def blank(kinds: list[CandidateKind], members: list[Members]) -> Terms:
    """Candidates of which nothing is known."""
    size = len(kinds)
    nothing = np.zeros(size)
    return Terms(kinds, members, np.zeros((size, len(TERMS))), nothing, np.zeros(size, np.int64), [[]] * size)


def test_two_ranks_are_named_where_both_are_plain_and_else_the_plainer_one() -> None:
    one, two = CandidateKind.RANK, CandidateKind.TWO_RANKS
    terms = blank([one, one, one, two, two], [(3,), (5,), (6,), (3, 5), (3, 6)])
    found = likeliest(terms, np.array([0.1, 0.0, 0.0, 0.85, 0.02]), 0.65, context(0.5))
    assert found is not None and (found.members, found.chance) == ((3, 5), 0.85)
    found = likeliest(terms, np.array([0.1, 0.05, 0.0, 0.6, 0.2]), 0.65, context(0.5))
    assert found is not None and found.members == (3,) and found.chance == pytest.approx(0.9), "whoever the other is"
    assert likeliest(terms, np.array([0.3, 0.2, 0.1, 0.2, 0.1]), 0.65, context(0.5)) is None
    found = likeliest(terms, np.array([0.25, 0.0, 0.0, 0.74, 0.0]), 0.65, context(0.5))
    assert found is not None and found.members == (3,), "it is at fault by itself once in four"
    assert found.chance == pytest.approx(0.99)
    found = likeliest(terms, np.array([0.1, 0.1, 0.0, 0.7, 0.0]), 0.65, context(0.5))
    assert found is not None and (found.members, found.chance) == ((3, 5), 0.7), "if one is, so is the other"


def test_of_a_host_whose_one_rank_may_be_all_of_it_that_rank_is_named() -> None:
    terms = blank([CandidateKind.RANK, CandidateKind.HOST], [(2,), (2, 3)])
    found = likeliest(terms, np.array([0.27, 0.72]), 0.65, context(0.5))
    assert found is not None and found.members == (2,) and found.chance == pytest.approx(0.99)
    found = likeliest(terms, np.array([0.02, 0.9]), 0.65, context(0.5))
    assert found is not None and found.members == (2, 3)
    assert likeliest(terms, np.array([0.4, 0.5]), 0.65, context(0.5)) is None, "whole hosts are not guessed at"


def test_links_and_nics_of_one_place_count_together() -> None:
    """Named is the likeliest of them."""
    kinds = [CandidateKind.LINK, CandidateKind.NIC, CandidateKind.LINK, CandidateKind.RANK]
    terms = blank(kinds, [(2, 3), (3,), (6, 7), (5,)])
    for of_link, named in ((0.3, (3,)), (0.36, (2, 3))):
        found = likeliest(terms, np.array([of_link, 0.65 - of_link, 0.1, 0.2]), 0.6, context(0.5))
        assert found is not None and found.members == named and found.chance == pytest.approx(0.65)
    assert likeliest(terms, np.array([0.3, 0.25, 0.25, 0.2]), 0.6, context(0.5)) is None


def test_ranks_that_nothing_tells_apart_are_named_together() -> None:
    """What joins them is hidden: which of them waits for which does not show."""
    terms = blank([CandidateKind.RANK] * 3, [(1,), (2,), (5,)])
    chances = np.array([0.45, 0.4, 0.05])
    hidden = np.where(np.arange(RANKS) < 4, 0, -1)
    found = likeliest(terms, chances, 0.8, context(0.5, hidden=hidden))
    assert found is not None and found.members == (1, 2) and found.chance == pytest.approx(0.85)
    assert likeliest(terms, chances, 0.8, context(0.5, hidden=np.full(RANKS, -1))) is None
    assert likeliest(terms, chances, 0.8, context(0.5)) is None


def test_what_a_finding_says_was_weighed_is_what_was_weighed() -> None:
    (found,) = find(add_up(SLOW + HEALTHY, KEYS), context(0.5))
    assert 0.5 < found.confidence <= 1 and found.looks == len(SLOW) and found.keys == (KEYS[3],)
    assert found.share == pytest.approx(0.8 * len(SLOW) / len(SLOW + HEALTHY))
    assert {name for name, _ in found.weighed} <= set(TERMS)
    sizes = [abs(part) for _, part in found.weighed]
    assert sizes == sorted(sizes, reverse=True) and found.weighed[0][1] > 0


def permuted(samples: Sequence[Look], order: Sequence[int]) -> list[Look]:
    """The same with rank ``order[i]`` in the place of rank i."""
    key = {KEYS[old]: KEYS[new] for old, new in enumerate(order)}

    def moved(hold: Hold) -> Hold:
        place = hold.link
        if place is not None and place.sender is not None and place.receiver is not None:
            place = replace(place, source=order[place.source], destination=order[place.destination],
                            sender=key[place.sender], receiver=key[place.receiver])  # fmt: skip
        return replace(hold, process=key[hold.process] if hold.process is not None else None, link=place)

    return [
        replace(one, holds=tuple(map(moved, one.holds)), activities={key[k]: activity for k, activity in one.activities.items()})
        for one in samples
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", EVERYTHING)
def test_who_is_named_does_not_depend_on_the_order_of_ranks(name: str, seed: int) -> None:
    samples, known = EVERYTHING[name]
    order = np.random.default_rng(seed).permutation(RANKS)
    back = np.argsort(order)
    other = replace(
        known, equal=known.equal[back], host=known.host[back],
        late=replace(known.late, share=known.late.share[back], late=known.late.late[back], seconds=known.late.seconds[back])
        if known.late is not None else None,
    )  # fmt: skip
    before = {(f.kind, frozenset(order[list(f.members)].tolist())) for f in find(add_up(samples, KEYS), known)}
    after = find(add_up(permuted(samples, order.tolist()), KEYS), other)
    assert {(f.kind, frozenset(f.members)) for f in after} == before


def test_a_table_may_name_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probability from which on somebody is named is the table's, and nothing else decides."""
    samples, known = EVERYTHING["a straggler"]
    never = replace(TABLE, name_from={"since": 1.01, "start": 1.01})
    monkeypatch.setattr(attribute, "TABLE", never)
    assert find(add_up(samples, KEYS), known) == []


def test_of_two_hosts_no_places_are_compared_by_samples_alone() -> None:
    limits = np.full(RANKS, -1)
    assert not context(None, hosts=2).places(limits)
    assert context(0.5, hosts=2).places(limits) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert context(None, hosts=4).places(limits) == [(0, 1), (2, 3), (4, 5), (6, 7)]
