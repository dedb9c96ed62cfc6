"""What the records say for and against each candidate of a slow job: the terms of one likelihood.

A job that loses the share L of its time spends 1 - L as it always did, and L waiting for whoever holds it up. So in the samples
since it is slow each rank does what it did before, with weight 1 - L, and with weight L what its part in the slow-down makes
it do: a straggler works, whoever waits for it waits. Every candidate is asked how likely it makes what was sampled
(``activity``, ``ends``). What was measured elsewhere (late starts, CPU limits, run queues, round trips) are excesses by rank or
link, and a candidate is asked how well the excess is that of its members and of nobody else: a matched filter. So a rank of a
starved host explains a part of what the host explains. All candidates compete for the same lost time in ``attribute``; here
nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.findings import FEWEST_PAST, Context
from ncclwatch.engine.slow.profile import LinkKey, Profile, Shares
from ncclwatch.engine.slow.snapshot import Part

FLOORS = {"late": 0.3, "stretch": 0.1, "throttled": 0.2, "asleep": 0.05, "delayed": 0.001}
"""Excesses of which a smaller one is noise, for each measured term: part of the lost time, logarithm of how much longer the work
between calls takes, part of the periods, logarithm of wanted CPUs, seconds. Unit: as said. From: chosen, below what any recorded
fault makes of it.
"""
TERMS = ("activity", "ends", *FLOORS)
"""Columns of :attr:`Terms.values`; each is about 0 for an innocent one, and at most of the order of 1 to 5."""

STRAGGLER = np.array([0.90, 0.05, 0.05])
WAITER = np.array([0.15, 0.75, 0.10])
POOLED = np.array([0.70, 0.25, 0.05])
"""What a rank does in lost time, as shares of works, waits, moves data: who holds the job up, who waits, and one of several
that hold it up by turns. The remainders are what a sample misreads: samples of two ranks are never of one moment.
"""
CREDIT = 8.0
"""What the samples of a rank say of its work counts for so much at most, since they depend on each other. Unit: nats. From:
cross-validation by job on 69 recordings (seeds 1001, 1401, 1101), of an earlier form: 8 and 12 alike, a logarithm worse.
"""
OWN_END = 0.7
"""Part of the lost time in which the waits that a sample shows end at the culprit; the others end at whom it holds up first."""
MISREAD = 0.02
"""Part of samples that say nothing at all: keeps every probability above 0."""
ASSUMED = np.array([0.6, 0.3, 0.1])
"""What a rank does in a healthy job, where too little was seen of this one."""
ASSUMED_LOST = 0.3
"""Share of the time that is lost, where nothing says how fast the job was."""
LEAST_GROWN, LEAST_BESIDE = 0.02, 0.25
"""Share of the time, and for a further culprit part of what is lost, that waits must have grown by to be divided among
candidates: of less the parts are chance.
"""
SEVERAL = 0.1
"""Part of what the links of a NIC or a host hold up that must lie outside the worst of them, for it to be theirs in common."""
STEPS_LOST = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Bound: shares of the time that a straggler may cost which was there from the start: the likeliest is taken."""


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
    explains: Shares
    """Part of what all waits have grown by that ends at each, 0 to 1."""
    looks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Samples in which each held others up."""

    def only(self, kept: Sequence[int] | NDArray[np.int64]) -> Terms:
        """Some of the candidates, by their numbers."""
        chosen = [int(number) for number in kept]
        return Terms(
            [self.kinds[number] for number in chosen], [self.members[number] for number in chosen], self.values[chosen],
            self.share[chosen], self.explains[chosen], self.looks[chosen],
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
    delayed: Shares
    """By how much longer messages of each link take to be acknowledged than they did, seconds."""
    total: float
    """Of all ends together."""
    excess: float
    """Of all that have grown together, in what they have grown by."""

    @classmethod
    def of(cls, profile: Profile, context: Context, kept: float, explained: Explained) -> _Ends:
        """``kept``: the part of the time that is not lost."""
        index = {key: at for at, key in enumerate(profile.processes)}
        before, size = context.past, len(profile.processes)
        measured = [(one, other, 0, 0, 0) for one, other in context.delayed if one in index and other in index]
        links = list(dict.fromkeys([*profile.links, *(before.links if before is not None else ()), *measured]))
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
        delayed = np.array(
            [context.delayed.get((one, other), 0.0) if one and other else 0.0 for one, other, *_ in links], np.float64
        )
        source = np.array([-1 if key[0] is None else index.get(key[0], -1) for key in links], np.int64)
        destination = np.array([-1 if key[1] is None else index.get(key[1], -1) for key in links], np.int64)
        least = LEAST_GROWN
        if explained.ranks:
            told = list(explained.ranks)
            of_link = np.isin(source, told) | np.isin(destination, told)
            own, own_past, proxy, proxy_past = (_without(values, told) for values in (own, own_past, proxy, proxy_past))
            link, link_past, delayed = (np.where(of_link, 0.0, values) for values in (link, link_past, delayed))
            least = max(least, LEAST_BESIDE * (1.0 - kept))
        total = float(own.sum() + proxy.sum() + link.sum())
        grown = (np.maximum(now - past, 0.0).sum() for now, past in ((own, own_past), (proxy, proxy_past), (link, link_past)))
        excess = max(float(sum(grown)), least)
        return cls(own, own_past, proxy, proxy_past, links, source, destination, link, link_past, delayed, total, excess)


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
    """The terms of every candidate of a job. O((ranks + places x links) x terms).

    ``explained`` are culprits found before: what they make everybody do is part of the usual then, and what is left of the lost
    time is to be explained.
    """
    lost = float(np.clip(context.lost if context.lost is not None else ASSUMED_LOST, 0.03, 0.97))
    ends = _Ends.of(profile, context, 1.0 - lost, explained)
    straggler, pooled = activity(profile, context, lost, explained.part)
    lost = max(0.03, lost * (1.0 - explained.part))
    if context.unseen is not None:  # they seem to be at work, and wait where nothing shows it
        straggler, pooled = (np.where(context.unseen, np.minimum(ratio, 0.0), ratio) for ratio in (straggler, pooled))
    seen = _Seen(profile, context, ends, lost)
    ranks: list[Members] = [(at,) for at in range(len(profile.processes))]
    places = context.places(profile.limits)
    parts = [
        seen.terms(CandidateKind.RANK, ranks, straggler),
        seen.terms(CandidateKind.PROXY, ranks),
        seen.terms(CandidateKind.HOST, places, pooled),
        *seen.networks(places, pooled),
    ]
    if context.lost is None:  # a healthy job may well spend half of its time on its network
        parts = [part for part in parts if not part.kinds or part.kinds[0] not in FROM_PAST]
    return Terms(
        [kind for part in parts for kind in part.kinds],
        [members for part in parts for members in part.members],
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.share for part in parts]),
        np.concatenate([part.explains for part in parts]),
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


# --- candidates --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """What was seen of a job, to be asked for the terms of candidates. ``lost``: the share of the time to be explained."""

    profile: Profile
    context: Context
    ends: _Ends
    lost: float

    def terms(
        self,
        kind: CandidateKind,
        members: list[Members],
        works: Shares | None = None,
        links: list[list[int]] | None = None,
    ) -> Terms:
        """Candidates of one kind: the work of their members (``works``: by rank, how much likelier it is to hold up than to
        wait), the links by their numbers, or both; with neither, their proxies.
        """
        ends, profile = self.ends, self.profile
        size = len(members)
        now, past, own, looks = np.zeros(size), np.zeros(size), np.zeros(size), np.zeros(size)
        columns: dict[str, Shares] = {}
        if works is not None:
            now, past, looks = (_sum(values, members) for values in (ends.own, ends.own_past, profile.own_looks()))
            own = own + [len(one) for one in members]
            columns["activity"] = _sum(np.clip(works, -CREDIT, CREDIT), members)
            columns |= {name: _match(values, members, FLOORS[name]) for name, values in self.excesses.items()}
        elif links is None:
            now, past, looks = (_sum(v, members) for v in (ends.proxy, ends.proxy_past, profile.looks_held[Part.PROXY]))
            own = own + 1.0
            columns["asleep"] = _match(self.excesses["asleep"], members, FLOORS["asleep"])
        if links is not None:
            seen = np.array([profile.link_looks[key] for key in ends.links], np.float64)
            now, past = now + _sum(ends.link, links), past + _sum(ends.link_past, links)
            looks, own = np.maximum(looks, _sum(seen, links)), own + [len(one) for one in links]
            columns["delayed"] = _match(ends.delayed, links, FLOORS["delayed"])
        values = np.zeros((size, len(TERMS)))
        for name, column in columns.items():
            values[:, TERMS.index(name)] = column
        values[:, TERMS.index("ends")] = self._ends(now, past, own)
        explains = np.clip((now - past) / ends.excess, 0.0, 1.0)
        return Terms([kind] * size, members, values, now - past, explains, looks.astype(np.int64))

    def networks(self, places: list[Members], pooled: Shares) -> list[Terms]:
        """Links, NICs, the links of hosts, and hosts as a whole. A link is told by its two ranks, whichever way data goes."""
        ends = self.ends
        known = np.flatnonzero((ends.source >= 0) & (ends.destination >= 0))
        pairs: dict[Members, list[int]] = {}
        nics: dict[Members, list[int]] = {}
        for link in known.tolist():
            one, other = sorted((int(ends.source[link]), int(ends.destination[link])))
            pairs.setdefault((one, other), []).append(link)
            for end in (one, other):
                nics.setdefault((end,), []).append(link)
        inside = [np.isin(ends.source[known], place) != np.isin(ends.destination[known], place) for place in places]
        leaving = {place: known[crossing].tolist() for place, crossing in zip(places, inside, strict=True) if crossing.any()}
        # Links between two hosts are those of the one as well as of the other: which it is does not show.
        between: dict[frozenset[int], Members] = {}
        for place, links in leaving.items():
            same = frozenset(links)
            between[same] = tuple(sorted({*between.get(same, ()), *place}))
        hosts = {place: sorted(links) for links, place in between.items()}
        return [
            self.terms(CandidateKind.LINK, list(pairs), links=list(pairs.values())),
            self._several(CandidateKind.NIC, nics),
            self._several(CandidateKind.HOST_NICS, hosts),
            self._several(CandidateKind.WHOLE_HOST, leaving, pooled),
        ]

    def _several(self, kind: CandidateKind, links: dict[Members, list[int]], works: Shares | None = None) -> Terms:
        """Candidates of several links each: what only one link shows is that link's."""
        grown = np.maximum(self.ends.link - self.ends.link_past, 0.0)
        kept = {one: numbers for one, numbers in links.items() if grown[numbers].max() < (1.0 - SEVERAL) * grown[numbers].sum()}
        return self.terms(kind, list(kept), works, list(kept.values()))

    def _ends(self, now: Shares, past: Shares, own: Shares) -> Shares:
        """Log-likelihood ratio of where the waits end: at the candidate's ``own`` ends for ``OWN_END`` of the lost time, or at
        any.
        """
        ends, lost = self.ends, self.lost
        chance = np.minimum(own / max(len(ends.own) * 2 + len(ends.links), 1), 0.5) / 2
        blamed, innocent = past + lost * OWN_END + 0.002, past + lost * chance + 0.002
        elsewhere = np.maximum(min(ends.total, 1.0) - np.minimum(now, 1.0), 0.0)
        missed = np.log(np.maximum(1 - blamed, 0.05) / np.maximum(1 - innocent, 0.05))
        ratio = self.profile.looks * (np.minimum(now, 1.0) * np.log(blamed / innocent) + elsewhere * missed)
        damped: Shares = np.sign(ratio) * np.log1p(np.abs(ratio))  # samples depend on each other: their number counts ever less
        return damped

    @cached_property
    def excesses(self) -> dict[str, Shares]:
        """What was measured of each rank beyond its own past and beyond the others, by term."""
        profile, context, past = self.profile, self.context, self.context.past

        def grown(of: Callable[[Profile], Shares]) -> Shares:
            """Beyond its own past, where it has one."""
            before = past.of(profile.processes, of(past)) if past is not None else np.zeros(len(profile.processes))
            return of(profile) - np.where(np.isfinite(before), before, 0.0)

        return {
            "late": np.zeros(len(profile.processes)) if context.late is None else np.minimum(context.late.share / self.lost, 1.0),
            "stretch": self._stretch,
            "throttled": _beyond(grown(lambda of: np.nan_to_num(of.held_back))),
            "asleep": _beyond(-grown(lambda of: np.log(np.maximum(of.cpu_wait + of.cpu_use, 0.01)))),
        }

    @property
    def _stretch(self) -> Shares:
        """Logarithm of how much longer the work between calls takes than it did, beyond the others."""
        factor = self.context.factor
        return np.zeros(len(self.profile.processes)) if factor is None else _beyond(np.log(np.clip(factor, 0.2, 8.0)))


def _sum(values: Shares, members: Sequence[Sequence[int]]) -> Shares:
    """The sum over the members of each candidate."""
    return np.array([values[np.asarray(one, np.int64)].sum() for one in members], np.float64)


def _match(values: Shares, members: Sequence[Sequence[int]], floor: float) -> Shares:
    """How well an excess is that of a candidate's members and of nobody else, 0 to 1 (a matched filter)."""
    sizes = np.array([len(one) for one in members], np.float64)
    match: Shares = _sum(values, members) / np.sqrt(sizes) / np.sqrt(float((values**2).sum()) + floor**2)
    return match


def _beyond(values: Shares) -> Shares:
    """Values beyond what three of four ranks exceed; 0 where it is not known."""
    known = values[np.isfinite(values)]
    usual = float(np.quantile(known, 0.25)) if len(known) else 0.0
    beyond: Shares = np.clip(np.nan_to_num(values - usual), 0.0, 2.0)
    return beyond
