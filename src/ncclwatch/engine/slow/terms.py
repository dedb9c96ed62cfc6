"""Who may hold up a slow job, and what the records say for and against each of these candidates: the terms of one likelihood.

A job that loses the share L of its time does 1 - L as it always did, and in L a straggler works and whoever waits for it waits.
Every candidate is asked how likely it makes what was sampled (``activity``, ``ends``), and how well excesses measured elsewhere
are those of its members and of nobody else. Candidates compete in ``attribute``; here nothing is decided.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.findings import FEWEST_PAST, Context
from ncclwatch.engine.slow.profile import LinkKey, Profile, Shares
from ncclwatch.engine.slow.snapshot import Part
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.rows import distinct

Members = tuple[int, ...]
"""Ranks by their place in the profile's processes."""
PAIRED = 8
"""Bound: of so many ranks, those that most likely work in the lost time, each two are a candidate."""
SEVERAL = 0.1
"""Part of what a host's links hold up that must lie outside the worst, to be theirs in common. Unit: share. From: chosen."""


class CandidateKind(StrEnum):
    """What a candidate is: which part of which ranks, or what lies between them."""

    RANK = "rank"  # one rank's own work: its GPU, or its host thread
    TWO_RANKS = "two-ranks"  # the work of two ranks, wherever they are, in the same lost time
    HOST = "host"  # the work of all ranks of a host, a node, or a CPU limit
    LINK = "link"  # the connection of two ranks
    NIC = "nic"  # all connections of one rank: its NIC, or its proxy, which leaves in the sockets what goes in and out
    HOST_NICS = "host-nics"  # all connections through the NICs of a host


RANKS = (CandidateKind.RANK, CandidateKind.TWO_RANKS)
WORK = (*RANKS, CandidateKind.HOST)
NETWORKS = (CandidateKind.LINK, CandidateKind.NIC, CandidateKind.HOST_NICS)

FLOORS = {"late": 0.3, "throttled": 0.2, "asleep": 0.05, "delayed": 0.001}
"""Excesses of which a smaller one is noise. Unit: part of the lost time, part of the periods, logarithm of wanted CPUs, seconds.
From: chosen, below what any recorded fault makes of it.
"""
TERMS = ("activity", "ends", *FLOORS)
"""Columns of :attr:`Terms.values`; about 0 for an innocent one. A large delay counts for more: a millisecond may be chance."""

STRAGGLER = np.array([0.90, 0.05, 0.05])
WAITER = np.array([0.15, 0.75, 0.10])
POOLED = np.array([0.70, 0.25, 0.05])
"""What a rank does in lost time, as shares of works, waits, moves data: who holds the job up, who waits, and one of several that
hold it up by turns. The remainders are what a sample misreads.
"""
CREDIT = 16.0
"""What the samples of a rank say of its work counts for so much at most, since they depend on each other. Unit: nats. From: of
102 recorded jobs that became slow 85 are right with 8, 88 with 16 and with 30; one odd rank must not outweigh all else.
"""
MISREAD, NEVER = 0.02, 0.002
"""Bound: parts of the samples that say nothing at all, and of the time: they keep every probability above 0."""
ASSUMED = np.array([0.6, 0.3, 0.1])
"""What a rank does in a healthy job, where too little was seen of this one."""
ASSUMED_LOST = 0.3
"""Share of the time that is lost, where nothing says how fast the job was. Unit: share. From: chosen, amid ``STEPS_LOST``."""
LOST = 0.03, 0.97
"""Bound: the share of the time that is lost is taken for no less, and no more."""
OWN_END = 0.7
"""Part of the lost time in which waits are seen to end at the culprit, and not at whom it holds up first. Unit: share. From:
chosen; the weight of the term takes up what it is off by.
"""
INDEPENDENT = 40.0
"""Samples follow each other and see one state twice: n of them count as n / (1 + n / 40). Unit: samples. From: leaving out one
seed at a time (1001, 1101, 1401, 1402): 12 to 40 alike, a logarithm of the ratio names no second rank.
"""
STEPS_LOST = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Bound: shares of the time that a straggler may cost which was there from the start: the likeliest is taken."""


@dataclass(slots=True)
class Terms:
    """Candidates and their terms. ``members`` index the profile's processes; ``values`` has shape (candidates, terms).

    ``share``: part of the job's time in which the samples' waits end at each, beyond what they always did; ``looks``: samples in
    which it held others up; ``links``: those of its links that others were seen to wait for, that hold the job up most first.
    """

    kinds: list[CandidateKind]
    members: list[Members]
    values: NDArray[np.float64]
    share: Shares
    looks: NDArray[np.int64]
    links: list[list[LinkKey]]


def measure(profile: Profile, context: Context) -> Terms:
    """The terms of every candidate of a job. O((ranks + places x links) x terms)."""
    lost = float(np.clip(context.lost if context.lost is not None else ASSUMED_LOST, *LOST))
    ends = _ends(profile, context, 1.0 - lost)
    straggler, pooled = _activity(profile, context, lost)
    if context.unseen is not None:  # they seem to be at work, and wait where nothing shows it
        straggler, pooled = (np.where(context.unseen, -CREDIT, ratio) for ratio in (straggler, pooled))
    places, since = context.places(profile.limits), context.lost is not None
    every = [*_of_ranks(straggler, places, since), *(_of_links(ends, places, len(profile.processes)) if since else ())]

    def members_of(*kinds: CandidateKind) -> list[Members]:
        return [one.members if one.kind in kinds else () for one in every]

    measured = _excesses(profile, context, lost)
    # A CPU limit holds back the threads of a rank's proxy as well: waits for that end at the rank's work, too.
    limited = set(np.flatnonzero(measured["throttled"] > FLOORS["throttled"]).tolist())
    proxies = [of if kind is CandidateKind.NIC or (kind in WORK and limited.issuperset(of)) else () for kind, of, _ in every]
    workers, links = members_of(*WORK), [one.links for one in every]
    at_ranks = [_sum(own, workers) + _sum(proxy, proxies) for own, proxy in zip(ends.own, ends.proxy, strict=True)]
    at_links = [_sum(values, links) for values in ends.link]
    now, past, looks = at_ranks[0] + at_links[0], at_ranks[1] + at_links[1], np.maximum(at_ranks[2], at_links[2])
    sizes = [list(map(len, parts)) for parts in (workers, proxies, links)]
    alone, together = members_of(*RANKS), members_of(CandidateKind.HOST)
    pairs = [at for at, one in enumerate(every) if one.kind is CandidateKind.TWO_RANKS]
    columns = {
        "activity": _sum(np.clip(straggler, -CREDIT, CREDIT), alone) + _sum(np.clip(pooled, -CREDIT, CREDIT), together),
        "ends": ends.ratio(now, past, np.sum(sizes, axis=0), lost, profile.looks),
        "late": _match(measured["late"], workers, FLOORS["late"], pairs),
        "throttled": _match(measured["throttled"], workers, FLOORS["throttled"], pairs),
        "asleep": _match(measured["asleep"], members_of(*WORK, CandidateKind.NIC), FLOORS["asleep"], pairs),
        "delayed": _match(ends.delayed, links, FLOORS["delayed"], []) * np.log1p(ends.delayed.max(initial=0) / FLOORS["delayed"]),
    }
    seen = [[ends.links[at] for at in own if ends.links[at] in profile.links] for own in links]
    return Terms(
        [one.kind for one in every], [one.members for one in every], np.stack([columns[name] for name in TERMS], axis=1),
        now - past, looks.astype(np.int64), [sorted(own, key=lambda key: -profile.links[key]) for own in seen],
    )  # fmt: skip


def without(profile: Profile, context: Context, links: Collection[LinkKey], share: float) -> tuple[Profile, Context]:
    """What is left of the lost time, and of what was seen in it, once ``links`` hold the job up for a ``share`` of all time, in
    which every rank waits. Raises ValueError without a healthy past: what is left is small, and nothing else tells it.
    """
    if context.lost is None or (past := context.past) is None:
        raise ValueError("no healthy past")
    lost = float(np.clip(context.lost, *LOST))
    explained = float(np.clip(share, 0.0, lost - LOST[0]))
    kept, waited = np.array([1.0 - lost, explained]) / (1.0 - lost + explained)
    before = replace(
        past, busy=kept * past.busy + waited * WAITER[0], waits=kept * past.waits + waited * WAITER[1],
        hold={part: kept * held for part, held in past.hold.items()},
    )  # fmt: skip
    left = replace(profile, links={key: value for key, value in profile.links.items() if key not in links})
    return left, replace(context, lost=lost - explained, before=before, late=None, delayed={})


def _sum(values: Shares, members: Sequence[Sequence[int]]) -> Shares:
    sizes = np.array([len(one) for one in members], np.int64)
    every = np.fromiter(chain.from_iterable(members), np.int64, int(sizes.sum()))
    return np.bincount(np.repeat(np.arange(len(sizes)), sizes), values[every], len(sizes)).astype(np.float64)


def _match(values: Shares, members: Sequence[Sequence[int]], floor: float, pairs: list[int]) -> Shares:
    """How well an excess is of a candidate's members alone, 0 to 1: a squared matched filter. Both of a pair must have it."""
    sizes, total = np.array([max(len(one), 1) for one in members], np.float64), _sum(values, members)
    total[pairs] = [2.0 * values[list(members[at])].min() for at in pairs]
    return np.asarray(total**2 / sizes / (float((values**2).sum()) + floor**2))


# --- what ranks do -----------------------------------------------------------------------------------------------------------


def _activity(profile: Profile, context: Context, lost: float) -> tuple[Shares, Shares]:
    """For each rank the log-likelihood ratio of what it was sampled at: straggler against waiter, pooled against waiter."""
    now = _counts(profile)
    if context.lost is None:
        from_start = _straggler_from_start(now, context)
        return from_start, from_start
    usual = (1 - lost) * _usual(profile, context)
    straggler, pooled, waiter = (_logs(usual + lost * part) for part in (STRAGGLER, POOLED, WAITER))
    return (now * (straggler - waiter)).sum(axis=1), (now * (pooled - waiter)).sum(axis=1)


def _logs(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithms of probabilities, of which none is 0."""
    return np.asarray(np.log((1 - MISREAD) * shares + MISREAD / 3))


def _counts(profile: Profile) -> NDArray[np.float64]:
    """Samples in which each rank worked, waited, moved data: shape (ranks, 3)."""
    works, waits = profile.busy * profile.seen, profile.waits * profile.seen
    return np.stack([works, waits, np.maximum(profile.seen - works - waits, 0.0)], axis=1)


def _usual(profile: Profile, context: Context) -> NDArray[np.float64]:
    """What each rank did in the healthy past, as shares: shape (ranks, 3)."""
    before = context.past
    if before is None:
        return np.tile(ASSUMED, (len(profile.processes), 1))
    past = _counts(before)
    mean = _mean_of_peers(past, context.alike if context.alike is not None else context.equal)
    shares: NDArray[np.float64] = (past + FEWEST_PAST * mean) / (past.sum(axis=1, keepdims=True) + FEWEST_PAST)
    return shares


def _mean_of_peers(counts: NDArray[np.float64], sets: NDArray[np.int64]) -> NDArray[np.float64]:
    """What the peers of each rank did, as shares; of a rank without peers what all others did."""
    total = counts.sum(axis=0)
    base = (total + 1.0) / (total.sum() + 3.0)
    others = total - counts
    for number in distinct(sets[sets >= 0]):
        members = sets == number
        if np.count_nonzero(members) > 1:
            others[members] = counts[members].sum(axis=0) - counts[members]
    shares: NDArray[np.float64] = (others + base) / (others.sum(axis=1, keepdims=True) + 1.0)
    return shares


def _straggler_from_start(now: NDArray[np.float64], context: Context) -> Shares:
    """The same without a healthy past: of one that works while its peers wait for it, against one that does what they do."""
    peers = _mean_of_peers(now, context.equal)
    usual, best = _logs(peers), np.zeros(len(now))
    for lost in STEPS_LOST:
        moved = np.minimum(lost, 0.98 * peers[:, 1])
        slower = peers + moved[:, None] * np.array([1.0, -1.0, 0.0])
        best = np.maximum(best, (now * (_logs(slower) - usual)).sum(axis=1))
    return np.where([len(context.others(at)) > 0 for at in range(len(now))], best, 0.0)


# --- what was measured of ranks ----------------------------------------------------------------------------------------------


def _excesses(profile: Profile, context: Context, lost: float) -> dict[str, Shares]:
    """What was measured of each rank beyond its own past and beyond the others, by term."""
    past, nothing = context.past, np.zeros(len(profile.processes))

    def grown(of: Callable[[Profile], Shares]) -> Shares:
        """Beyond its own past, where it has one."""
        before = of(past) if past is not None else nothing
        return of(profile) - np.where(np.isfinite(before), before, 0.0)

    return {
        "late": nothing if context.late is None else np.minimum(context.late.share / lost, 1.0),
        "throttled": _beyond(grown(lambda of: np.nan_to_num(of.held_back))),
        "asleep": _beyond(-grown(lambda of: np.log(np.maximum(of.cpu_wait + of.cpu_use, 0.01)))),
    }


def _beyond(values: Shares) -> Shares:
    """Values beyond what three of four ranks exceed; 0 where it is not known."""
    known = values[np.isfinite(values)]
    usual = float(np.quantile(known, 0.25)) if len(known) else 0.0
    return np.asarray(np.clip(np.nan_to_num(values - usual), 0.0, 2.0))


# --- candidates --------------------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """The ranks that it is named by, and the links that are part of it, by number."""

    kind: CandidateKind
    members: Members
    links: Sequence[int] = ()


def _of_ranks(works: Shares, places: Sequence[Members], pairs: bool) -> Iterator[Candidate]:
    """Ranks, with ``pairs`` each two of the ranks that are likeliest (``works``) to work in the lost time, and places."""
    likely = np.sort(np.argsort(-works, kind="stable")[:PAIRED]).tolist()
    yield from (Candidate(CandidateKind.RANK, (at,)) for at in range(len(works)))
    yield from (Candidate(CandidateKind.TWO_RANKS, pair) for pair in combinations(likely, 2) if pairs and pair not in places)
    yield from (Candidate(CandidateKind.HOST, place) for place in places)


def _of_links(ends: Ends, places: Sequence[Members], ranks: int) -> Iterator[Candidate]:
    """Links, NICs, and the links of hosts. A link is told by its two ranks, whichever way data goes.

    What only one link of a host shows is that link's. Healthy jobs, too, spend half of their time on one link, or at two ranks.
    """
    pairs: dict[Members, list[int]] = defaultdict(list)
    nics: dict[Members, list[int]] = {(at,): [] for at in range(ranks)}
    for link in np.flatnonzero((ends.source >= 0) & (ends.destination >= 0)).tolist():
        one, other = sorted((int(ends.source[link]), int(ends.destination[link])))
        pairs[one, other].append(link)
        nics[one,].append(link)
        nics[other,].append(link)
    # Links between two hosts are those of the one as well as of the other. Which it is does not show; who has no link does.
    # Nor does it show whether what joins ranks of one host over the network passes its NICs: with it and without.
    through: dict[Members, list[int]] = {}
    owners: dict[Members, list[Members]] = defaultdict(list)
    for place in places:
        times = Counter(link for at in place for link in nics[at,])
        if crossing := sorted(link for link, inside in times.items() if inside == 1):
            owners[tuple(crossing)].append(place)
            if len(crossing) < len(times):
                through[place] = sorted(times)
    hosts: dict[Members, list[int]] = {}
    for joint, of in owners.items():
        joined = distinct([ends.source[list(joint)], ends.destination[list(joint)]])
        hosts[of[0] if len(of) == 1 else tuple(joined.tolist())] = list(joint)
    yield from (Candidate(CandidateKind.LINK, pair, own) for pair, own in pairs.items())
    yield from (Candidate(CandidateKind.NIC, rank, own) for rank, own in nics.items())
    grown = np.maximum(ends.link.now - ends.link.past, 0.0)
    for members, own in chain(through.items(), hosts.items()):
        if grown[own].max() < (1.0 - SEVERAL) * grown[own].sum():
            yield Candidate(CandidateKind.HOST_NICS, members, own)


# --- where waits end ---------------------------------------------------------------------------------------------------------


class Waited(NamedTuple):
    """Shares of the time that waits end there, the same in the past (scaled to what is not lost), and samples."""

    now: Shares
    past: Shares
    looks: Shares


@dataclass(slots=True)
class Ends:
    """Where waits end: at ranks' ``own`` work, at their ``proxy``, or in ``links`` (-1: end not observed), and their delays."""

    own: Waited
    proxy: Waited
    link: Waited
    links: list[LinkKey]
    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    delayed: Shares

    def ratio(self, now: Shares, past: Shares, parts: NDArray[np.int64], lost: float, looks: int) -> Shares:
        """Log-likelihood ratio of each candidate: waits end at its ``parts`` ends for ``OWN_END`` of the lost time, or at any."""
        total = float(self.own.now.sum() + self.proxy.now.sum() + self.link.now.sum())
        chance = np.minimum(parts / max(len(self.own.now) * 2 + len(self.links), 1), 0.5) / 2
        blamed, innocent = past + lost * OWN_END + NEVER, past + lost * chance + NEVER
        elsewhere = np.maximum(min(total, 1.0) - np.minimum(now, 1.0), 0.0)
        missed = np.log(np.maximum(1 - blamed, 0.05) / np.maximum(1 - innocent, 0.05))
        samples = looks / (1.0 + looks / INDEPENDENT)
        ratio: Shares = samples * (np.minimum(now, 1.0) * np.log(blamed / innocent) + elsewhere * missed)
        return ratio


def _ends(profile: Profile, context: Context, kept: float) -> Ends:
    """``kept``: the part of the time that is not lost."""
    index: dict[ProcessKey | None, int] = {key: at for at, key in enumerate(profile.processes)}
    before, size = context.past, len(profile.processes)
    delays: dict[LinkKey, float] = {(one, other, 0, 0, 0): seconds for (one, other), seconds in context.delayed.items()}
    measured = (key for key in delays if key[0] in index and key[1] in index)
    links: list[LinkKey] = list(dict.fromkeys([*profile.links, *(before.links if before is not None else ()), *measured]))

    def by_link(values: Mapping[LinkKey, float]) -> Shares:
        return np.array([values.get(key, 0.0) for key in links], np.float64)

    (own, own_looks), proxy, link = profile.own(), profile.hold[Part.PROXY], by_link(profile.links)
    now = own, proxy, link
    if before is not None:
        past = [kept * held for held in (before.own()[0], before.hold[Part.PROXY], by_link(before.links))]
    elif context.lost is not None:
        past = [np.zeros(len(held)) for held in now]
    else:  # beside its peers; without any nothing stands out
        peers = [own[others] if len(others := context.others(at)) else own[[at]] for at in range(size)]
        past = [np.array([np.median(values) for values in peers]), proxy, link]
    looks = own_looks, profile.looks_held[Part.PROXY], by_link(profile.link_looks)
    of_own, of_proxy, of_links = map(Waited, now, past, looks)
    pairs = [(index.get(one, -1), index.get(other, -1)) for one, other, *_ in links]
    source, destination = np.array(pairs, np.int64).reshape(-1, 2).T
    return Ends(of_own, of_proxy, of_links, links, source, destination, by_link(delays))
