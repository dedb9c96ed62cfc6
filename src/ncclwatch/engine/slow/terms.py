"""What the records say for and against each candidate of a slow job: the terms of one likelihood.

A job that loses the share L of its time spends 1 - L as it always did, and L waiting for whoever holds it up. So in the samples
since it is slow each rank does what it did before, with weight 1 - L, and with weight L what its part in the slow-down makes
it do: a straggler works, whoever waits for it waits. Every candidate is asked how likely it makes what was sampled
(``activity``, ``ends``). What was measured elsewhere (late starts, CPU limits, run queues, round trips) are excesses by rank or
link, and a candidate is asked how well the excess is that of its members and of nobody else: a matched filter. So a rank of a
starved host explains a part of what the host explains, and one of two slow ranks a part of what both do. All candidates compete
for the same lost time in ``attribute``; here nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.candidates import FROM_START, CandidateKind, Candidates, Members, of_links, of_ranks
from ncclwatch.engine.slow.ends import Ends
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
MISREAD = 0.02
"""Bound: part of samples that say nothing at all; keeps every probability above 0."""
ASSUMED = np.array([0.6, 0.3, 0.1])
"""What a rank does in a healthy job, where too little was seen of this one."""
ASSUMED_LOST = 0.3
"""Share of the time that is lost, where nothing says how fast the job was. Unit: share. From: chosen, amid ``STEPS_LOST``.
"""
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
    explains: Shares
    """Part of what all waits have grown by that ends at each, 0 to 1."""
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
    every = [*of_ranks(straggler, places), *of_links(ends.source, ends.destination, ends.grown, places)]
    if context.lost is None:
        every = [one for one in every if one.kind in FROM_START]
    works = {kind: np.clip(pooled, -CREDIT, CREDIT) for kind in (CandidateKind.HOST, CandidateKind.WHOLE_HOST)}
    works |= {kind: np.clip(straggler, -CREDIT, CREDIT) for kind in (CandidateKind.RANK, CandidateKind.TWO_RANKS)}
    seen = _Seen(profile, ends, lost, works, excesses(profile, context, lost))
    found = [seen.terms(one) for one in every]
    return Terms(
        [kind for part in found for kind in part.kinds],
        [members for part in found for members in part.members],
        np.concatenate([part.values for part in found]),
        np.concatenate([part.share for part in found]),
        np.concatenate([part.explains for part in found]),
        np.concatenate([part.looks for part in found]),
        [links for part in found for links in part.links],
    )


# --- what ranks do -----------------------------------------------------------------------------------------------------------


def activity(profile: Profile, context: Context, lost: float) -> tuple[Shares, Shares]:
    """For each rank the log-likelihood ratio of what it was sampled at: straggler against waiter, and one of a pool against
    waiter.
    """
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
        # Logarithm of how much longer the work between calls takes than it did.
        "stretch": nothing if context.factor is None else _beyond(np.log(np.clip(context.factor, 0.2, 8.0))),
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


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was seen of a job, to be asked for the terms of candidates.

    ``works`` says by kind of candidate and rank how much likelier it is to hold up than to wait, ``excesses`` by term and rank
    what was measured.
    """

    profile: Profile
    ends: Ends
    lost: float
    works: dict[CandidateKind, Shares]
    excesses: dict[str, Shares]

    def terms(self, one: Candidates) -> Terms:
        """Of candidates of one kind: the work of their members, their links, or both; of proxies neither."""
        ends, profile, members, size = self.ends, self.profile, one.members, len(one.members)
        now, past, parts, looks = np.zeros(size), np.zeros(size), np.zeros(size), np.zeros(size)
        columns: dict[str, Shares] = {}
        if one.kind in self.works:
            now, past, looks = (_sum(values, members) for values in (ends.own, ends.own_past, profile.own_looks()))
            parts = parts + [len(ranks) for ranks in members]
            columns["activity"] = _sum(self.works[one.kind], members)
            columns |= {name: _match(values, members, FLOORS[name]) for name, values in self.excesses.items()}
        elif one.kind is CandidateKind.PROXY:
            now, past, looks = (_sum(v, members) for v in (ends.proxy, ends.proxy_past, profile.looks_held[Part.PROXY]))
            parts = parts + 1.0
            columns["asleep"] = _match(self.excesses["asleep"], members, FLOORS["asleep"])
        if one.kind.has_links:
            now, past = now + _sum(ends.link, one.links), past + _sum(ends.link_past, one.links)
            looks, parts = np.maximum(looks, _sum(ends.link_looks, one.links)), parts + [len(links) for links in one.links]
            columns["delayed"] = _match(ends.delayed, one.links, FLOORS["delayed"])
        columns["ends"] = ends.ratio(now, past, parts, self.lost)
        values = np.zeros((size, len(TERMS)))
        for name, column in columns.items():
            values[:, TERMS.index(name)] = column
        explains = np.clip((now - past) / ends.excess, 0.0, 1.0)
        held = self.profile.links
        links = [
            sorted((ends.links[at] for at in own if ends.links[at] in held), key=lambda key: -held[key]) for own in one.links
        ]
        return Terms([one.kind] * size, members, values, now - past, explains, looks.astype(np.int64), links)


def _sum(values: Shares, members: Sequence[Sequence[int]]) -> Shares:
    """The sum over the members of each candidate."""
    return np.array([values[np.asarray(one, np.int64)].sum() for one in members], np.float64)


def _match(values: Shares, members: Sequence[Sequence[int]], floor: float) -> Shares:
    """How well an excess is that of a candidate's members and of nobody else, 0 to 1 (a matched filter)."""
    sizes = np.array([len(one) for one in members], np.float64)
    match: Shares = _sum(values, members) / np.sqrt(sizes) / np.sqrt(float((values**2).sum()) + floor**2)
    return match
