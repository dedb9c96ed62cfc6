"""Who may hold up a slow job, and what the records say for and against each of these candidates: the terms of one likelihood.

A job that loses the share L of its time spends 1 - L as it always did, and L waiting for whoever holds it up. So in the samples
since it is slow each rank does what it did before, with weight 1 - L, and with weight L what its part in the slow-down makes
it do: a straggler works, whoever waits for it waits. Every candidate is asked how likely it makes what was sampled
(``activity``, ``ends``). What was measured elsewhere are excesses by rank or link, and a candidate is asked how well the excess
is that of its members and of nobody else: a matched filter. All candidates compete for the same lost time in ``attribute``; here
nothing is decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.findings import FEWEST_PAST, Context
from ncclwatch.engine.slow.profile import LinkKey, Profile, Shares
from ncclwatch.engine.slow.snapshot import Part

Members = tuple[int, ...]
"""Ranks by their place in the profile's processes."""

PAIRED = 8
"""Bound: of so many ranks, those that most likely work in the lost time, each two are a candidate."""
SEVERAL = 0.1
"""Part of what the links of a host hold up that must lie outside the worst of them, for it to be theirs in common. Unit: share.
From: chosen; of less than a tenth the samples cannot tell.
"""


class CandidateKind(StrEnum):
    """What a candidate is: which part of which ranks, or what lies between them."""

    RANK = "rank"
    """One rank's own work: its GPU, or its host thread."""
    TWO_RANKS = "two-ranks"
    """The work of two ranks, wherever they are, in the same lost time."""
    HOST = "host"
    """The work of all ranks of a host, a node, or a CPU limit."""
    LINK = "link"
    """The connection of two ranks."""
    NIC = "nic"
    """All connections of one rank: its NIC, or its proxy, which leaves in the sockets what has come and what should go out."""
    HOST_NICS = "host-nics"
    """All connections that leave a host."""
    WHOLE_HOST = "whole-host"
    """The work of all ranks of a host and all its connections."""

    @property
    def computes(self) -> bool:
        """Whether it counts as slow computation (CCL-D's S1); the rest is communication (S2)."""
        return self in WORK

    @property
    def has_links(self) -> bool:
        """Whether links are part of it."""
        return self in (*NETWORKS, CandidateKind.WHOLE_HOST)


RANKS = (CandidateKind.RANK, CandidateKind.TWO_RANKS)
WORK = (*RANKS, CandidateKind.HOST, CandidateKind.WHOLE_HOST)
NETWORKS = (CandidateKind.LINK, CandidateKind.NIC, CandidateKind.HOST_NICS)
FROM_START = (CandidateKind.RANK, CandidateKind.HOST, CandidateKind.LINK, CandidateKind.NIC)
"""Candidates also without a healthy past: a healthy job may well spend half of its time on its network, and at two ranks."""

FLOORS = {"late": 0.3, "throttled": 0.2, "asleep": 0.05, "delayed": 0.001}
"""Excesses of which a smaller one is noise, for each measured term: part of the lost time, part of the periods, logarithm of
wanted CPUs, seconds. Unit: as said. From: chosen, below what any recorded fault makes of it.
"""
TERMS = ("activity", "ends", *FLOORS)
"""Columns of :attr:`Terms.values`; each is about 0 for an innocent one, and at most of the order of 1 to 5."""

STRAGGLER = np.array([0.90, 0.05, 0.05])
WAITER = np.array([0.15, 0.75, 0.10])
POOLED = np.array([0.70, 0.25, 0.05])
"""What a rank does in lost time, as shares of works, waits, moves data: who holds the job up, who waits, and one of several
that hold it up by turns. The remainders are what a sample misreads: samples of two ranks are hardly ever of one moment.
"""
CREDIT = 16.0
"""What the samples of a rank say of its work counts for so much at most, since they depend on each other. Unit: nats. From: of
102 recorded jobs that became slow 85 are right with 8, 88 with 16 and with 30; one odd rank must not outweigh all else.
"""
MISREAD = 0.02
"""Bound: part of samples that say nothing at all; keeps every probability above 0."""
ASSUMED = np.array([0.6, 0.3, 0.1])
"""What a rank does in a healthy job, where too little was seen of this one."""
ASSUMED_LOST = 0.3
"""Share of the time that is lost, where nothing says how fast the job was. Unit: share. From: chosen, amid ``STEPS_LOST``.
"""
OWN_END = 0.7
"""Part of the lost time in which the waits that a sample shows end at the culprit; the others end at whom it holds up first.
Unit: share. From: chosen; the weight of the term takes up what it is off by.
"""
INDEPENDENT = 40.0
"""Samples follow each other and see one state twice: n of them count as n / (1 + n / 40). Unit: samples. From: leaving out one
seed at a time (1001, 1101, 1401, 1402): 12 to 40 alike, a logarithm of the ratio names no second rank.
"""
NEVER = 0.002
"""Bound: keeps every probability above 0."""
STEPS_LOST = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Bound: shares of the time that a straggler may cost which was there from the start: the likeliest is taken."""


@dataclass(slots=True)
class Terms:
    """Candidates and their terms. ``members`` index the profile's processes; ``values`` has shape (candidates, terms)."""

    kinds: list[CandidateKind]
    members: list[Members]
    values: NDArray[np.float64]
    share: Shares
    """Part of the job's time in which the samples' waits end at each candidate, beyond what they always did."""
    looks: NDArray[np.int64]
    """Samples in which each held others up."""
    links: list[list[LinkKey]]
    """The links that are part of each and that others were seen to wait for, those that hold the job up most first."""


def measure(profile: Profile, context: Context) -> Terms:
    """The terms of every candidate of a job. O((ranks + places x links) x terms)."""
    lost = float(np.clip(context.lost if context.lost is not None else ASSUMED_LOST, 0.03, 0.97))
    ends = Ends.of(profile, context, 1.0 - lost)
    straggler, pooled = activity(profile, context, lost)
    if context.unseen is not None:  # they seem to be at work, and wait where nothing shows it
        straggler, pooled = (np.where(context.unseen, -CREDIT, ratio) for ratio in (straggler, pooled))
    places = context.places(profile.limits)
    every = [*of_ranks(straggler, places), *of_links(ends.source, ends.destination, ends.grown, places, len(profile.processes))]
    if context.lost is None:
        every = [one for one in every if one.kind in FROM_START]
    works = {kind: np.clip(pooled, -CREDIT, CREDIT) for kind in (CandidateKind.HOST, CandidateKind.WHOLE_HOST)}
    works |= {kind: np.clip(straggler, -CREDIT, CREDIT) for kind in (CandidateKind.RANK, CandidateKind.TWO_RANKS)}
    measured = excesses(profile, context, lost)
    found = [_terms(one, profile, ends, lost, works, measured) for one in every]
    return Terms(
        [kind for part in found for kind in part.kinds],
        [members for part in found for members in part.members],
        np.concatenate([part.values for part in found]),
        np.concatenate([part.share for part in found]),
        np.concatenate([part.looks for part in found]),
        [links for part in found for links in part.links],
    )


# --- what ranks do -----------------------------------------------------------------------------------------------------------


def activity(profile: Profile, context: Context, lost: float) -> tuple[Shares, Shares]:
    """For each rank the log-likelihood ratio of what it was sampled at: straggler against waiter, pooled against waiter."""
    now = _counts(profile)
    if context.lost is None:
        from_start = _straggler_from_start(now, context)
        return from_start, from_start
    usual = (1 - lost) * _usual(profile, context)

    def logs(part: NDArray[np.float64]) -> NDArray[np.float64]:
        mixed: NDArray[np.float64] = np.log((1 - MISREAD) * (usual + lost * part) + MISREAD / 3)
        return mixed

    waiter = logs(WAITER)
    return (now * (logs(STRAGGLER) - waiter)).sum(axis=1), (now * (logs(POOLED) - waiter)).sum(axis=1)


def _counts(profile: Profile) -> NDArray[np.float64]:
    """Samples in which each rank worked, waited, moved data: shape (ranks, 3)."""
    works, waits = profile.busy * profile.seen, profile.waits * profile.seen
    return np.stack([works, waits, np.maximum(profile.seen - works - waits, 0.0)], axis=1)


def _usual(profile: Profile, context: Context) -> NDArray[np.float64]:
    """What each rank did in the healthy past, as shares: shape (ranks, 3)."""
    before = context.past
    if before is None:
        return np.tile(ASSUMED, (len(profile.processes), 1))
    past = np.stack([before.of(profile.processes, column, 0.0) for column in _counts(before).T], axis=1)
    mean = _mean_of_peers(past, context.alike if context.alike is not None else context.equal)
    shares: NDArray[np.float64] = (past + FEWEST_PAST * mean) / (past.sum(axis=1, keepdims=True) + FEWEST_PAST)
    return shares


def _mean_of_peers(counts: NDArray[np.float64], sets: NDArray[np.int64]) -> NDArray[np.float64]:
    """What the peers of each rank did, as shares; of a rank without peers what all others did."""
    total = counts.sum(axis=0)
    base = (total + 1.0) / (total.sum() + 3.0)
    others = total - counts
    for number in np.unique(sets[sets >= 0]):
        members = sets == number
        if np.count_nonzero(members) > 1:
            others[members] = counts[members].sum(axis=0) - counts[members]
    shares: NDArray[np.float64] = (others + base) / (others.sum(axis=1, keepdims=True) + 1.0)
    return shares


def _straggler_from_start(now: NDArray[np.float64], context: Context) -> Shares:
    """The same without a healthy past: of one that works while its peers wait for it, against one that does what they do."""
    peers = _mean_of_peers(now, context.equal)
    usual = np.log((1 - MISREAD) * peers + MISREAD / 3)
    best = np.zeros(len(now))
    for lost in STEPS_LOST:
        moved = np.minimum(lost, 0.98 * peers[:, 1])
        slower = peers + moved[:, None] * np.array([1.0, -1.0, 0.0])
        best = np.maximum(best, (now * (np.log((1 - MISREAD) * slower + MISREAD / 3) - usual)).sum(axis=1))
    sizes = np.array([np.count_nonzero(context.equal == number) if number >= 0 else 0 for number in context.equal])
    return np.where(sizes >= 2, best, 0.0)


# --- what was measured of ranks ----------------------------------------------------------------------------------------------


def excesses(profile: Profile, context: Context, lost: float) -> dict[str, Shares]:
    """What was measured of each rank beyond its own past and beyond the others, by term."""
    past, nothing = context.past, np.zeros(len(profile.processes))

    def grown(of: Callable[[Profile], Shares]) -> Shares:
        """Beyond its own past, where it has one."""
        before = past.of(profile.processes, of(past)) if past is not None else nothing
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
    beyond: Shares = np.clip(np.nan_to_num(values - usual), 0.0, 2.0)
    return beyond


# --- candidates --------------------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """All of one kind: the ranks that each is named by, and the links that are part of it, by number."""

    kind: CandidateKind
    members: list[Members]
    links: list[list[int]]


def of_ranks(works: Shares, places: Sequence[Members]) -> list[Candidates]:
    """Ranks, places, and each two of the ranks that are likeliest (``works``) to work in the lost time."""
    ranks: list[Members] = [(at,) for at in range(len(works))]
    likely = np.sort(np.argsort(-works, kind="stable")[:PAIRED]).tolist()
    pairs: list[Members] = [pair for pair in combinations(likely, 2) if pair not in places]
    kinds = (
        (CandidateKind.RANK, ranks), (CandidateKind.TWO_RANKS, pairs), (CandidateKind.HOST, list(places)),
    )  # fmt: skip
    return [Candidates(kind, members, [[] for _ in members]) for kind, members in kinds]


def of_links(
    source: NDArray[np.int64], destination: NDArray[np.int64], grown: Shares, places: Sequence[Members], ranks: int
) -> list[Candidates]:
    """Links, NICs, the links of hosts, and hosts as a whole. A link is told by its two ranks, whichever way data goes.

    ``source`` and ``destination`` are the ranks at the ends of each link (-1: not observed), ``grown`` by how much more others
    wait for it. What only one link of a host shows is that link's.
    """
    known = np.flatnonzero((source >= 0) & (destination >= 0))
    pairs: dict[Members, list[int]] = {}
    nics: dict[Members, list[int]] = {}
    for link in known.tolist():
        one, other = sorted((int(source[link]), int(destination[link])))
        pairs.setdefault((one, other), []).append(link)
        for end in (one, other):
            nics.setdefault((end,), []).append(link)
    leaving: dict[Members, list[int]] = {}
    for place in places:
        ends = Counter(link for at in place for link in nics.get((at,), ()))
        if crossing := sorted(link for link, inside in ends.items() if inside == 1):
            leaving[place] = crossing
    # Links between two hosts are those of the one as well as of the other. Which it is does not show; who has no link does.
    owners: dict[tuple[int, ...], list[Members]] = {}
    for place, links in leaving.items():
        owners.setdefault(tuple(links), []).append(place)
    hosts: dict[Members, list[int]] = {}
    for joint, of in owners.items():
        joined = np.unique(np.concatenate([source[list(joint)], destination[list(joint)]]))
        hosts[of[0] if len(of) == 1 else tuple(joined.tolist())] = list(joint)

    def several(links: list[int]) -> bool:
        return bool(grown[links].max() < (1.0 - SEVERAL) * grown[links].sum())

    found = [
        Candidates(CandidateKind.LINK, list(pairs), list(pairs.values())),
        Candidates(CandidateKind.NIC, [(at,) for at in range(ranks)], [nics.get((at,), []) for at in range(ranks)]),
    ]
    for kind, links_of in ((CandidateKind.HOST_NICS, hosts), (CandidateKind.WHOLE_HOST, leaving)):
        kept = {members: links for members, links in links_of.items() if several(links)}
        found.append(Candidates(kind, list(kept), list(kept.values())))
    return found


def _terms(
    one: Candidates,
    profile: Profile,
    ends: Ends,
    lost: float,
    works: Mapping[CandidateKind, Shares],
    measured: Mapping[str, Shares],
) -> Terms:
    """Of candidates of one kind: the work or the proxies of their members, their links, or both.

    ``works`` says by kind of candidate and rank how much likelier it is to hold up than to wait, ``measured`` are excesses of
    ranks by term.
    """
    members, size = one.members, len(one.members)
    now, past, parts, looks = np.zeros(size), np.zeros(size), np.zeros(size), np.zeros(size)
    columns: dict[str, Shares] = {}
    if one.kind in works:
        now, past, looks = (_sum(values, members) for values in (ends.own, ends.own_past, profile.own_looks()))
        parts = parts + [len(ranks) for ranks in members]
        columns["activity"] = _sum(works[one.kind], members)
        columns |= {name: _match(values, members, FLOORS[name]) for name, values in measured.items()}
    elif one.kind is CandidateKind.NIC:
        now, past, looks = (_sum(v, members) for v in (ends.proxy, ends.proxy_past, profile.looks_held[Part.PROXY]))
        parts = parts + 1.0
        columns["asleep"] = _match(measured["asleep"], members, FLOORS["asleep"])
    if one.kind.has_links:
        now, past = now + _sum(ends.link, one.links), past + _sum(ends.link_past, one.links)
        looks, parts = np.maximum(looks, _sum(ends.link_looks, one.links)), parts + [len(links) for links in one.links]
        columns["delayed"] = _match(ends.delayed, one.links, FLOORS["delayed"])
    columns["ends"] = ends.ratio(now, past, parts, lost)
    values = np.stack([columns.get(name, np.zeros(size)) for name in TERMS], axis=1)
    held = profile.links
    links = [sorted((ends.links[at] for at in own if ends.links[at] in held), key=lambda k: -held[k]) for own in one.links]
    return Terms([one.kind] * size, members, values, now - past, looks.astype(np.int64), links)


def _sum(values: Shares, members: Sequence[Sequence[int]]) -> Shares:
    """The sum over the members of each candidate."""
    sizes = np.array([len(one) for one in members], np.int64)
    every = np.fromiter(chain.from_iterable(members), np.int64, int(sizes.sum()))
    return np.bincount(np.repeat(np.arange(len(sizes)), sizes), values[every], len(sizes)).astype(np.float64)


def _match(values: Shares, members: Sequence[Sequence[int]], floor: float) -> Shares:
    """The part of an excess that is explained by its being alike for a candidate's members and for nobody else, 0 to 1: a matched
    filter, squared, as its likelihood goes by sums of squares. Of what chance strews over many hardly anything is anybody's.
    """
    sizes = np.array([max(len(one), 1) for one in members], np.float64)
    match: Shares = _sum(values, members) ** 2 / sizes / (float((values**2).sum()) + floor**2)
    return match


@dataclass(slots=True)
class Ends:
    """Shares of the time that the waits end there; ``past``: the same in the healthy past, scaled to the part of the time that is
    not lost. ``own`` and ``proxy`` by rank, ``link`` by link.
    """

    looks: int
    own: Shares
    own_past: Shares
    proxy: Shares
    proxy_past: Shares
    links: list[LinkKey]
    source: NDArray[np.int64]
    """Ranks at the ends of each link; -1 for one that was not observed."""
    destination: NDArray[np.int64]
    link: Shares
    link_past: Shares
    link_looks: Shares
    delayed: Shares
    """By how much longer messages of each link take to be acknowledged than they did, seconds."""

    @classmethod
    def of(cls, profile: Profile, context: Context, kept: float) -> Ends:
        """``kept``: the part of the time that is not lost."""
        index = {key: at for at, key in enumerate(profile.processes)}
        before, size = context.past, len(profile.processes)
        measured = [(one, other, 0, 0, 0) for one, other in context.delayed if one in index and other in index]
        links: list[LinkKey] = list(dict.fromkeys([*profile.links, *(before.links if before is not None else ()), *measured]))
        own, proxy = profile.own(), profile.hold[Part.PROXY]
        link = np.array([profile.links.get(key, 0.0) for key in links])
        if before is not None:
            own_past = kept * before.of(profile.processes, before.own(), 0.0)
            proxy_past = kept * before.of(profile.processes, before.hold[Part.PROXY], 0.0)
            link_past = kept * np.array([before.links.get(key, 0.0) for key in links])
        elif context.lost is not None:
            own_past, proxy_past, link_past = np.zeros(size), np.zeros(size), np.zeros(len(links))
        else:  # beside its peers; without any nothing stands out
            peers = [own[others] if len(others := context.others(at)) else own[[at]] for at in range(size)]
            own_past = np.array([np.median(values) for values in peers])
            proxy_past, link_past = _mean_of_others(proxy, size), _mean_of_others(link, 2 * size)
        source = np.array([-1 if one is None else index.get(one, -1) for one, *_ in links], np.int64)
        destination = np.array([-1 if other is None else index.get(other, -1) for _, other, *_ in links], np.int64)
        delayed = [context.delayed.get((key[0], key[1]), 0.0) if key[0] and key[1] else 0.0 for key in links]
        looks = np.array([profile.link_looks[key] for key in links], np.float64)
        return cls(
            profile.looks, own, own_past, proxy, proxy_past, links, source, destination, link, link_past, looks,
            np.array(delayed, np.float64),
        )  # fmt: skip

    @property
    def grown(self) -> Shares:
        """By how much more others wait for each link."""
        return np.maximum(self.link - self.link_past, 0.0)

    def ratio(self, now: Shares, past: Shares, parts: Shares, lost: float) -> Shares:
        """Log-likelihood ratio of each candidate: waits end at its ``parts`` ends for ``OWN_END`` of the lost time, or at any."""
        total = float(self.own.sum() + self.proxy.sum() + self.link.sum())
        chance = np.minimum(parts / max(len(self.own) * 2 + len(self.link), 1), 0.5) / 2
        blamed, innocent = past + lost * OWN_END + NEVER, past + lost * chance + NEVER
        elsewhere = np.maximum(min(total, 1.0) - np.minimum(now, 1.0), 0.0)
        missed = np.log(np.maximum(1 - blamed, 0.05) / np.maximum(1 - innocent, 0.05))
        samples = self.looks / (1.0 + self.looks / INDEPENDENT)
        ratio: Shares = samples * (np.minimum(now, 1.0) * np.log(blamed / innocent) + elsewhere * missed)
        return ratio


def _mean_of_others(values: Shares, fewest: int) -> Shares:
    """For each value the mean of the others, of which there are so many at least (those that nobody waited for count as 0)."""
    mean: Shares = (values.sum() - values) / max(fewest - 1, len(values) - 1, 1)
    return mean
