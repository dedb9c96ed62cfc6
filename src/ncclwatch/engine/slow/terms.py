"""What the records say for and against each candidate of a slow job: the terms of one likelihood.

A job that loses the share L of its time spends 1 - L as it always did, and L waiting for whoever holds it up. So in the samples
since it is slow each rank does what it did before, with weight 1 - L, and with weight L what its part in the slow-down makes
it do: a straggler works, whoever waits for it waits. Every candidate is asked how likely it makes what was sampled
(``activity``, ``ends``); what was measured elsewhere (call times, late starts, CPU limits, run queues, round trips) are terms
of their own. All candidates compete for the same lost time in ``attribute``; here nothing is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.findings import Context
from ncclwatch.engine.slow.profile import LinkKey, Profile, Shares
from ncclwatch.engine.slow.snapshot import Part

TERMS = (
    "activity",
    "ends",
    "dominance",
    "stretch",
    "late",
    "throttled",
    "cpu_wait",
    "asleep",
    "delayed",
    "even",
)
"""Columns of :attr:`Terms.values`; each is about 0 for an innocent one, and at most of the order of 1 to 5."""

STRAGGLER = np.array([0.90, 0.05, 0.05])
WAITER = np.array([0.15, 0.75, 0.10])
POOLED = np.array([0.70, 0.25, 0.05])
"""What a rank does in lost time, as shares of works, waits, moves data: who holds the job up, who waits, and one of several
that hold it up by turns. The remainders are what a sample misreads: samples of two ranks are never of one moment.
"""
OWN_END = 0.7
"""Part of the lost time in which the waits that a sample shows end at the culprit; the others end at whom it holds up first."""
MISREAD = 0.02
"""Part of samples that say nothing at all: keeps every probability above 0."""
ASSUMED = np.array([0.6, 0.3, 0.1])
"""What a rank does in a healthy job, where too little was seen of this one."""
PAST_SAMPLES = 4.0
"""Samples that the mean of a rank's peers counts for in its past; also the fewest samples that are a past at all."""
ASSUMED_LOST = 0.3
"""Share of the time that is lost, where nothing says how fast the job was."""
LEAST_GROWN, LEAST_BESIDE = 0.02, 0.25
"""Share of the time, and for a further culprit part of what is lost, that waits must have grown by to be divided among
candidates: of less the parts are chance.
"""
SEVERAL = 0.1
"""Part of what the links of a NIC or a host hold up that must lie outside the worst of them, for it to be theirs in common."""
STEPS_LOST = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Shares of the time that a straggler may cost which was there from the start: the likeliest is taken."""


class CandidateKind(StrEnum):
    """What a candidate is: which part of which ranks, or what lies between them."""

    RANK = "rank"
    """One rank's own work: its GPU, or its host thread."""
    HOST = "host"
    """The work of all ranks of a host, a node, or a CPU limit."""
    PROXY = "proxy"
    """A rank's proxy thread."""
    LINK = "link"
    """The connection of two ranks."""
    NIC = "nic"
    """All connections of one rank."""
    HOST_NICS = "host-nics"
    """All connections that leave a host."""
    WHOLE_HOST = "whole-host"
    """The work of all ranks of a host and all its connections."""

    @property
    def computes(self) -> bool:
        """Whether it counts as slow computation (CCL-D's S1); the rest is communication (S2)."""
        return self in (CandidateKind.RANK, CandidateKind.HOST, CandidateKind.WHOLE_HOST)


FROM_PAST = frozenset({CandidateKind.NIC, CandidateKind.HOST_NICS, CandidateKind.WHOLE_HOST})
"""Candidates only of a job that became slow."""
Members = tuple[int, ...]


@dataclass(slots=True)
class Terms:
    """Candidates and their terms. ``members`` index the profile's processes; ``values`` has shape (candidates, terms)."""

    kinds: list[CandidateKind]
    members: list[Members]
    values: NDArray[np.float64]
    share: Shares
    """Part of the job's time in which the samples' waits end at each candidate, beyond what they always did."""
    looks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Samples in which each held others up."""

    def only(self, kept: Sequence[int] | NDArray[np.int64]) -> Terms:
        """Some of the candidates, by their numbers."""
        chosen = [int(number) for number in kept]
        return Terms(
            [self.kinds[number] for number in chosen], [self.members[number] for number in chosen], self.values[chosen],
            self.share[chosen], self.looks[chosen],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Explained:
    """Culprits found before: ``ranks`` whose waits, proxies and links they explain, and the ``part`` of the lost time (0 to
    1).
    """

    ranks: frozenset[int]
    part: float


NOTHING = Explained(frozenset(), 0.0)


@dataclass(slots=True)
class _Ends:
    """Where the waits of the samples end: ranks, proxies and links, as shares of the time, now and in the healthy past (scaled
    to the part of the time that is not lost).
    """

    own: Shares
    own_past: Shares
    proxy: Shares
    proxy_past: Shares
    links: list[LinkKey]
    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    link: Shares
    link_past: Shares
    total: float
    """Of all ends together."""
    excess: float
    """Of all that have grown together, in what they have grown by."""

    @classmethod
    def of(cls, profile: Profile, context: Context, kept: float, explained: Explained) -> _Ends:
        """``kept``: the part of the time that is not lost."""
        index = {key: at for at, key in enumerate(profile.processes)}
        before, size = context.past, len(profile.processes)
        links = [*profile.links, *(key for key in (before.links if before is not None else ()) if key not in profile.links)]
        own, proxy = profile.own(), profile.hold[Part.PROXY]
        link = np.array([profile.links.get(key, 0.0) for key in links])
        if before is not None:
            own_past = kept * before.of(profile.processes, before.own(), 0.0)
            proxy_past = kept * before.of(profile.processes, before.hold[Part.PROXY], 0.0)
            link_past = kept * np.array([before.links.get(key, 0.0) for key in links])
        elif context.lost is not None:
            own_past, proxy_past, link_past = np.zeros(size), np.zeros(size), np.zeros(len(links))
        else:
            own_past, proxy_past, link_past = (
                _of_peers(own, context),
                _mean_of_others(proxy, size),
                _mean_of_others(link, 2 * size),
            )
        source = np.array([-1 if key[0] is None else index.get(key[0], -1) for key in links], np.int64)
        destination = np.array([-1 if key[1] is None else index.get(key[1], -1) for key in links], np.int64)
        least = LEAST_GROWN
        if explained.ranks:
            told = list(explained.ranks)
            of_link = np.isin(source, told) | np.isin(destination, told)
            own, own_past, proxy, proxy_past = (_without(values, told) for values in (own, own_past, proxy, proxy_past))
            link, link_past = np.where(of_link, 0.0, link), np.where(of_link, 0.0, link_past)
            least = max(least, LEAST_BESIDE * (1.0 - kept))
        total = float(own.sum() + proxy.sum() + link.sum())
        grown = (np.maximum(now - past, 0.0).sum() for now, past in ((own, own_past), (proxy, proxy_past), (link, link_past)))
        excess = max(float(sum(grown)), least)
        return cls(own, own_past, proxy, proxy_past, links, source, destination, link, link_past, total, excess)


def _without(values: Shares, ranks: list[int]) -> Shares:
    """The same, 0 for some ranks."""
    result = values.copy()
    result[ranks] = 0.0
    return result


def _of_peers(values: Shares, context: Context) -> Shares:
    """For each rank the median of its peers; its own where it has none: then nothing stands out."""
    result = values.copy()
    for at in range(len(values)):
        others = context.others(at)
        if len(others):
            result[at] = np.median(values[others])
    return result


def _mean_of_others(values: Shares, fewest: int) -> Shares:
    """For each value the mean of the others, of which there are so many at least (those that nobody waited for count as 0)."""
    mean: Shares = (values.sum() - values) / max(fewest - 1, len(values) - 1, 1)
    return mean


def measure(profile: Profile, context: Context, explained: Explained = NOTHING) -> Terms:
    """The terms of every candidate of a job. O((ranks + links) x terms).

    ``explained`` are culprits found before: what they make everybody do is part of the usual then, and what is left of the lost
    time is to be explained.
    """
    lost = float(np.clip(context.lost if context.lost is not None else ASSUMED_LOST, 0.03, 0.97))
    ends = _Ends.of(profile, context, 1.0 - lost, explained)
    straggler, pooled = activity(profile, context, lost, explained.part)
    lost = max(0.03, lost * (1.0 - explained.part))
    if context.unseen is not None:  # they seem to be at work, and wait where nothing shows it
        straggler, pooled = (np.where(context.unseen, np.minimum(ratio, 0.0), ratio) for ratio in (straggler, pooled))
    parts = [
        _ranks(profile, context, ends, lost, straggler),
        _proxies(profile, context, ends, lost),
        *_networks(profile, context, ends, lost),
        *_hosts(profile, context, ends, lost, pooled),
    ]
    if context.lost is None:  # a healthy job may well spend half of its time on its network
        parts = [part for part in parts if not part.kinds or part.kinds[0] not in FROM_PAST]
    return Terms(
        [kind for part in parts for kind in part.kinds],
        [members for part in parts for members in part.members],
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.share for part in parts]),
        np.concatenate([part.looks for part in parts]),
    )


# --- what ranks do -----------------------------------------------------------------------------------------------------------


def activity(profile: Profile, context: Context, lost: float, explained: float = 0.0) -> tuple[Shares, Shares]:
    """For each rank the log-likelihood ratio of what it was sampled at: straggler against waiter, and one of a pool against
    waiter. ``explained``: the part of the lost time in which everybody waits for a culprit found before.
    """
    now = _counts(profile)
    if context.lost is None:
        from_start = _straggler_from_start(now, context)
        return from_start, from_start
    usual = (1 - lost) * _usual(profile, context) + lost * explained * WAITER
    lost *= 1 - explained

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
    counts = _counts(before)
    place = {process: at for at, process in enumerate(before.processes)}
    rows = np.array([place.get(process, -1) for process in profile.processes])
    past = np.where(rows[:, None] >= 0, counts[rows], 0.0)
    mean = _mean_of_peers(past, context.alike if context.alike is not None else context.equal)
    shares: NDArray[np.float64] = (past + PAST_SAMPLES * mean) / (past.sum(axis=1, keepdims=True) + PAST_SAMPLES)
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
    """The same without a healthy past: against a rank that does what its peers do, one that works for the time they wait for
    it.
    """
    peers = _mean_of_peers(now, context.equal)
    usual = np.log((1 - MISREAD) * peers + MISREAD / 3)
    best = np.zeros(len(now))
    for lost in STEPS_LOST:
        moved = np.minimum(lost, 0.98 * peers[:, 1])
        slower = peers + moved[:, None] * np.array([1.0, -1.0, 0.0])
        best = np.maximum(best, (now * (np.log((1 - MISREAD) * slower + MISREAD / 3) - usual)).sum(axis=1))
    sizes = np.array([np.count_nonzero(context.equal == number) if number >= 0 else 0 for number in context.equal])
    return np.where(sizes >= 2, best, 0.0)


# --- candidates of each kind -------------------------------------------------------------------------------------------------


def _block(kind: CandidateKind, members: list[Members], share: Shares, looks: NDArray[np.int64], **terms: Shares) -> Terms:
    values = np.zeros((len(members), len(TERMS)))
    for name, column in terms.items():
        values[:, TERMS.index(name)] = column
    return Terms([kind] * len(members), members, values, share, looks)


def _log(values: Shares) -> Shares:
    """A log-likelihood ratio of samples that depend on each other: their number counts ever less."""
    damped: Shares = np.sign(values) * np.log1p(np.abs(values))
    return damped


def _end_term(profile: Profile, ends: _Ends, lost: float, now: Shares, past: Shares, own: Shares | float) -> Shares:
    """Log-likelihood ratio of where the waits end: at the candidate's ``own`` ends for ``OWN_END`` of the lost time, or at
    any.
    """
    chance = np.minimum(np.asarray(own) / max(len(ends.own) * 2 + len(ends.links), 1), 0.5) / 2
    blamed, innocent = past + lost * OWN_END + 0.002, past + lost * chance + 0.002
    elsewhere = np.maximum(min(ends.total, 1.0) - np.minimum(now, 1.0), 0.0)
    ratio = np.log(np.maximum(1 - blamed, 0.05) / np.maximum(1 - innocent, 0.05))
    return _log(profile.looks * (np.minimum(now, 1.0) * np.log(blamed / innocent) + elsewhere * ratio))


def _dominance(now: Shares, past: Shares, ends: _Ends) -> Shares:
    clipped: Shares = np.clip((now - past) / ends.excess, -0.5, 1.0)
    return clipped


def _ranks(profile: Profile, context: Context, ends: _Ends, lost: float, straggler: Shares) -> Terms:
    size = len(profile.processes)
    singles: list[Members] = [(at,) for at in range(size)]
    return _block(
        CandidateKind.RANK, singles, ends.own - ends.own_past, profile.own_looks().astype(np.int64),
        activity=_log(straggler),
        ends=_end_term(profile, ends, lost, ends.own, ends.own_past, 1.0),
        dominance=_dominance(ends.own, ends.own_past, ends),
        stretch=_stretch(context, singles),
        late=_late(context, lost, singles),
        throttled=_throttled(profile, context, singles),
        cpu_wait=_cpu_wait(profile, singles),
    )  # fmt: skip


def _hosts(profile: Profile, context: Context, ends: _Ends, lost: float, pooled: Shares) -> list[Terms]:
    places = context.places(profile.limits)
    if not places:
        return []

    def over(values: Shares) -> Shares:
        return np.array([values[list(members)].sum() for members in places])

    sizes = np.array([len(members) for members in places], np.float64)
    looks = np.array([profile.own_looks()[list(members)].max() for members in places], np.int64)
    own, past = over(ends.own), over(ends.own_past)
    work = _block(
        CandidateKind.HOST, places, own - past, looks,
        activity=_log(over(pooled)),
        ends=_end_term(profile, ends, lost, own, past, sizes),
        dominance=_dominance(own, past, ends),
        stretch=_stretch(context, places),
        late=_late(context, lost, places),
        throttled=_throttled(profile, context, places),
        cpu_wait=_cpu_wait(profile, places),
        even=over(np.where(pooled > 0, 1.0, 0.0)) / sizes,
    )  # fmt: skip
    link, place = _leaving(places, ends, len(profile.processes))
    nics = _of_links(CandidateKind.HOST_NICS, places, link, place, profile, context, ends, lost)
    return [work, nics, *_whole_hosts(profile, ends, lost, work, nics, (link, place))]


def _whole_hosts(
    profile: Profile, ends: _Ends, lost: float, work: Terms, nics: Terms, leaving: tuple[NDArray[np.int64], NDArray[np.int64]]
) -> list[Terms]:
    """Hosts of which both may be slow: those with several slow links."""
    chosen = [work.members.index(members) for members in nics.members]
    if not chosen:
        return []
    link, place = leaving
    size = len(work.members)
    over = [
        np.bincount(place, weights=values[link], minlength=size)[chosen].astype(np.float64)
        for values in (ends.link, ends.link_past)
    ]
    own, past = (np.array([values[list(members)].sum() for members in nics.members]) for values in (ends.own, ends.own_past))
    now, before = own + over[0], past + over[1]
    columns = {name: work.values[chosen, TERMS.index(name)] for name in ("activity", "stretch", "late", "throttled", "cpu_wait")}
    return [
        _block(
            CandidateKind.WHOLE_HOST, nics.members, now - before, np.maximum(work.looks[chosen], nics.looks),
            ends=_end_term(profile, ends, lost, now, before, 4.0),
            dominance=_dominance(now, before, ends),
            even=nics.values[:, TERMS.index("even")],
            **columns,
        )
    ]  # fmt: skip


def _leaving(places: list[Members], ends: _Ends, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Links with one end inside a place and the other outside: (number of the link, number of the place)."""
    links, found = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    left = list(range(len(places)))
    while left:  # places of one numbering (hosts, say) have no rank in common: they are done at once
        number = np.full(size + 1, -1, np.int64)  # the last is an end that was not observed
        for place in list(left):
            members = list(places[place])
            if (number[members] < 0).all():
                number[members] = place
                left.remove(place)
        one, other = number[ends.source], number[ends.destination]
        known = (ends.source >= 0) & (ends.destination >= 0) & (one != other)
        for end in (one, other):
            crossing = np.flatnonzero(known & (end >= 0))
            links.append(crossing)
            found.append(end[crossing])
    return np.concatenate(links), np.concatenate(found)


def _networks(profile: Profile, context: Context, ends: _Ends, lost: float) -> list[Terms]:
    """Links, and the NICs of the ranks at their ends. A link is told by its two ranks, whichever way data goes."""
    known = np.flatnonzero((ends.source >= 0) & (ends.destination >= 0))
    low, high = np.minimum(ends.source, ends.destination)[known], np.maximum(ends.source, ends.destination)[known]
    index = {key: at for at, key in enumerate(profile.processes)}
    delayed = ((index.get(one), index.get(other)) for one, other in context.delayed)
    told = {(min(a, b), max(a, b)) for a, b in delayed if a is not None and b is not None}
    pairs: list[Members] = sorted({*zip(low.tolist(), high.tolist(), strict=True), *told})
    if not pairs:
        return []
    number = {pair: at for at, pair in enumerate(pairs)}
    of_pair = np.array([number[pair] for pair in zip(low.tolist(), high.tolist(), strict=True)], np.int64)
    at_end = [np.flatnonzero(side >= 0) for side in (ends.source, ends.destination)]
    own, of_rank = np.unique(np.r_[ends.source[at_end[0]], ends.destination[at_end[1]]], return_inverse=True)
    ranks: list[Members] = [(at,) for at in own.tolist()]
    return [
        _of_links(CandidateKind.LINK, pairs, known, of_pair, profile, context, ends, lost),
        _of_links(CandidateKind.NIC, ranks, np.concatenate(at_end), of_rank.reshape(-1), profile, context, ends, lost),
    ]


def _of_links(
    kind: CandidateKind, members: list[Members], link: NDArray[np.int64], candidate: NDArray[np.int64],
    profile: Profile, context: Context, ends: _Ends, lost: float,
) -> Terms:  # fmt: skip
    """Candidates that are sets of links: each of ``link`` belongs to the one of ``candidate`` beside it."""

    def over(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(candidate, weights=values[link], minlength=len(members)).astype(np.float64)

    now, past, grown = over(ends.link), over(ends.link_past), np.maximum(ends.link - ends.link_past, 0.0)
    seen = np.array([profile.link_looks[key] for key in ends.links], np.float64)
    largest = np.zeros(len(members))
    np.maximum.at(largest, candidate, grown[link])
    total = over(grown)
    index = {key: at for at, key in enumerate(profile.processes)}
    told = [{index[end] for end in pair if end in index} for pair in context.delayed]
    common = set.intersection(*told) if told else set()
    whole = kind is CandidateKind.HOST_NICS
    delayed = np.zeros(len(members))
    if common:
        delayed = np.array([float(common == set(own) or (whole and common <= set(own))) for own in members])
    even = np.where(total > 0, 1.0 - largest / np.maximum(total, 1e-9), 0.0)
    found = _block(
        kind, members, now - past, over(seen).astype(np.int64),
        ends=_end_term(profile, ends, lost, now, past, over(np.ones(len(ends.links)))),
        dominance=_dominance(now, past, ends),
        delayed=delayed,
        even=even,
    )  # fmt: skip
    # What only one link shows is that link's.
    return found if kind is CandidateKind.LINK else found.only(np.flatnonzero((even >= SEVERAL) | (delayed > 0)))


def _proxies(profile: Profile, context: Context, ends: _Ends, lost: float) -> Terms:
    singles: list[Members] = [(at,) for at in range(len(profile.processes))]
    return _block(
        CandidateKind.PROXY, singles, ends.proxy - ends.proxy_past, profile.looks_held[Part.PROXY].astype(np.int64),
        ends=_end_term(profile, ends, lost, ends.proxy, ends.proxy_past, 1.0),
        dominance=_dominance(ends.proxy, ends.proxy_past, ends),
        asleep=_asleep(profile, context),
    )  # fmt: skip


# --- what was measured elsewhere ---------------------------------------------------------------------------------------------


def _beside(values: Shares, members: Members) -> float:
    """The median of all other ranks; nan without any that is known."""
    others = np.delete(values, list(members))
    others = others[np.isfinite(others)]
    return float(np.median(others)) if len(others) else float("nan")


def _compared(values: Shares, places: list[Members]) -> Shares:
    """For each candidate what all its members have at least, less what the others usually have; 0 where either is not known."""
    if len(places) == len(values) and len(values) > 64:  # of so many ranks one does not move the median
        rest = np.nanmedian(values) if np.isfinite(values).any() else np.nan
        differences: Shares = np.nan_to_num(values - rest)
        return differences
    least = np.array([values[list(members)].min() for members in places])
    beyond: Shares = np.nan_to_num(least - np.array([_beside(values, members) for members in places]))
    return beyond


def _stretch(context: Context, places: list[Members]) -> Shares:
    """Logarithm of how much longer the work between calls takes than it did, beside that of the others."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.clip(context.factor, 0.2, 8.0))
    clipped: Shares = np.clip(_compared(logs, places), -1.0, 2.0)
    return clipped


def _late(context: Context, lost: float, places: list[Members]) -> Shares:
    """Part of the lost time for which hosts begin iterations late, as far as they alone do: where a collective ends late, all
    ranks behind it begin late.
    """
    if context.late is None:
        return np.zeros(len(places))
    shares = context.late.share
    if len(places) == len(shares):
        least, total = shares, shares
    else:
        least = np.array([shares[list(members)].min() for members in places])
        total = np.array([shares[list(members)].sum() for members in places])
    part: Shares = np.minimum(1.0, least / lost) * total / max(float(shares.sum()), 1e-9)
    return part


def _throttled(profile: Profile, context: Context, places: list[Members]) -> Shares:
    """Part of its periods in which a CPU limit holds a rank back, beyond what it did before and does to the others."""
    now = np.nan_to_num(profile.held_back)
    if not now.any():
        return np.zeros(len(places))
    before = context.past
    past = before.of(profile.processes, before.held_back, 0.0) if before is not None else np.zeros(len(now))
    return np.maximum(_compared(now - np.nan_to_num(past), places), 0.0)


def _cpu_wait(profile: Profile, places: list[Members]) -> Shares:
    """Logarithm of how many threads wait for a CPU, beside the others' (a third of a thread is nothing)."""
    clipped: Shares = np.clip(_compared(np.log(profile.cpu_wait + 0.3), places), -1.0, 2.0)
    return clipped


def _asleep(profile: Profile, context: Context) -> Shares:
    """How much less the threads of a rank want CPUs than those of its neighbours on the host, who poll: logarithm, 0 unknown."""
    logs = np.log(profile.cpu_wait + 0.3)
    result = np.zeros(len(logs))
    for number in np.unique(context.host):
        here = np.flatnonzero(context.host == number)
        for at in here if 1 < len(here) <= 64 else ():
            rest = logs[here[here != at]]
            result[at] = np.nan_to_num(np.median(rest) - logs[at])
    clipped: Shares = np.clip(result, -1.0, 2.0)
    return clipped
