"""Who or what holds up a slow job: all candidates compete for the same lost time in one conditional logit.

The log-odds of a candidate are the weighted sum of its terms (``terms``) and an intercept for its kind; "nobody" has one of its
own, and what it gains where the job pauses as a whole. Their softmax is the posterior probability of each, which is a verdict's
confidence. Weights and the probability from which on somebody is named are ``calibration``'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.calibration import TABLE, Weights
from ncclwatch.engine.slow.detect import LEAST_RATIO
from ncclwatch.engine.slow.findings import FEWEST_PAST, Context, Finding
from ncclwatch.engine.slow.profile import OWN, LinkKey, Profile
from ncclwatch.engine.slow.snapshot import LinkPlace, Part
from ncclwatch.engine.slow.terms import NETWORKS, RANKS, TERMS, WORK, CandidateKind, Members, Terms, measure, without
from ncclwatch.gc_pause import collector_at_rest
from ncclwatch.model.verdict import SlowKind as Kind

HOSTLY, KERNELLY = 0.3, 0.8
"""Parts of the waits for a rank that make it its host thread (which shows as the GPU while anything is queued), or its kernel
(which nearly always is only what the samples happened to see; it is communication). Unit: shares. From: chosen.
"""
MOSTLY_IDLE = 0.5
"""Nobody holds up a job that loses most of its time with nothing open on any rank. Unit: share. From: 565 recordings have 0."""
RIVALS = 3
"""Bound: candidates that are told beside the one that is named."""
SAID = 0.1
"""Bound: nats of a term below which it is not told."""


class Named(NamedTuple):
    """Who is named: a candidate by its number, all that are named by it, and the probability that they are at fault."""

    number: int
    members: Members
    chance: float


@collector_at_rest()
def find(profile: Profile, context: Context) -> list[Finding]:
    """Culprits; empty where nobody is likely enough. Of several each holds the job up, with one probability."""
    if profile.looks < FEWEST_PAST or context.idle > MOSTLY_IDLE:
        return []
    terms = measure(profile, context)
    weights, part = (TABLE.start, "start") if context.lost is None else (TABLE.since, "since")
    chances = posterior(log_odds(terms, weights), weights, context.idle)
    named = likeliest(terms, chances, TABLE.name_from[part], context)
    if named is None:
        return []
    others = [number for number in np.argsort(-chances)[: RIVALS + 1].tolist() if number != named.number][:RIVALS]
    rivals = [(terms.kinds[number].value, terms.members[number], float(chances[number])) for number in others]
    rivals = sorted([*rivals, ("nobody", (), float(1.0 - chances.sum()))], key=lambda rival: -rival[2])
    found = _finding(profile, context, terms, named, weights)
    # Without a healthy past only samples say what it costs, unless the kernel says that a limit takes CPU time.
    least = (LEAST_RATIO - 1.0) * min(len(found.members), 2)
    if context.lost is None and found.share < least and "throttled" not in dict(found.weighed):
        return []
    found.rivals, found.rule = tuple(rivals), f"slow-{part}"
    kind = terms.kinds[named.number]
    if kind is CandidateKind.TWO_RANKS:
        return _each(profile, context, found)
    if kind in NETWORKS and context.past is not None:
        return [found, *beside(profile, context, terms, named, weights, TABLE.name_from["beside"])]
    return [found]


def beside(profile: Profile, context: Context, terms: Terms, network: Named, weights: Weights, least: float) -> list[Finding]:
    """Whose work holds the job up beside a slow network: the same question, of the time that the network does not explain.

    Not the other way round: who works or lacks CPUs moves its data late, and its links seem slow. An end of a slow link is not
    told from it. Terms that say how well an excess fits a place, not what it costs, do not count: links make ranks late, too.
    """
    number, place, keys = network.number, set(network.members), terms.links[network.number]
    ends = {process for key in keys for process in key[:2]}
    near = place.union(at for at, process in enumerate(profile.processes) if process in ends)
    rest, left = without(profile, context, keys, float(terms.share[number]))
    others = measure(rest, left)
    weights = replace(weights, terms={name: weights.terms[name] for name in ("activity", "ends", "idle")})
    apart = [
        kind in WORK and (near.isdisjoint(members) or (kind is CandidateKind.HOST and place == set(members)))
        for kind, members in zip(others.kinds, others.members, strict=True)
    ]  # fmt: skip
    chances = posterior(np.where(apart, log_odds(others, weights), -np.inf), weights, left.idle)
    named = likeliest(others, chances, least, left)
    if named is None:
        return []
    found = replace(_finding(rest, left, others, named, weights), rule="slow-since")
    return _each(rest, left, found) if others.kinds[named.number] is CandidateKind.TWO_RANKS else [found]


def _each(profile: Profile, context: Context, found: Finding) -> list[Finding]:
    """The same of each of its ranks, with what each holds up; the first holds up most and tells what was weighed."""
    share, looks = profile.own()
    each: list[Finding] = []
    if context.late is not None:
        share = np.maximum(share, context.late.share)
    for at in sorted(found.members, key=lambda at: -share[at]):
        one = replace(found, members=(at,), share=float(share[at]), looks=int(looks[at]), keys=(profile.processes[at],))
        each.append(replace(one, weighed=(), rivals=()) if each else one)
    return each


def log_odds(terms: Terms, weights: Weights) -> NDArray[np.float64]:
    """Of each candidate, against one of which nothing is known: shape (candidates,)."""
    column = np.array([weights.terms.get(name, 0.0) for name in TERMS])
    odds: NDArray[np.float64] = terms.values @ column
    odds += np.array([weights.kinds.get(kind.value, 0.0) for kind in terms.kinds])
    return odds


def posterior(odds: NDArray[np.float64], weights: Weights, idle: float) -> NDArray[np.float64]:
    """The probability of each candidate; what is missing from 1 is nobody's."""
    nobody = weights.nobody + (weights.terms.get("idle", 0.0) * idle)
    every = np.append(odds, nobody)
    shares = np.exp(every - every.max())
    return np.asarray(shares[:-1] / shares.sum())


def likeliest(terms: Terms, chances: NDArray[np.float64], least: float, context: Context) -> Named | None:
    """Who most likely holds the job up, if that is likely enough.

    Links and NICs at one place count together: which of them it is need not be plain. So does all that a rank may be part of.
    Ranks that nothing tells apart, since what joins them is hidden, are named together.
    """
    if not len(chances):
        return None
    best, chance = int(np.argmax(chances)), float(chances.max())
    kind = terms.kinds[best]
    if kind in NETWORKS:
        near = set(terms.members[best])
        at_place = [one in NETWORKS and not near.isdisjoint(of) for one, of in zip(terms.kinds, terms.members, strict=True)]
        chance = float(chances[at_place].sum())
    elif (len(terms.members[best]) > 1 and chance >= least) or (kind in RANKS and chance < least):
        best, chance = _at_fault(terms, chances, best)
    if chance >= least:
        return Named(best, terms.members[best], chance)
    if context.hidden is None or kind not in RANKS:
        return None
    hidden = context.hidden[terms.members[best][0]]
    same = [
        (at, members[0]) for at, (kind, members) in enumerate(zip(terms.kinds, terms.members, strict=True))
        if kind is CandidateKind.RANK and context.hidden[members[0]] == hidden >= 0 and 2 * chances[at] >= chances[best]
    ]  # fmt: skip
    total = float(chances[[at for at, _ in same]].sum())
    return Named(best, tuple(rank for _, rank in same), total) if total >= least else None


def _at_fault(terms: Terms, chances: NDArray[np.float64], best: int) -> tuple[int, float]:
    """The likeliest candidate, or that rank of it alone which is most likely at fault, alone or with others. Given that it is,
    each other rank must be so too with the probability from which somebody is named beside a network.
    """
    total: dict[int, float] = defaultdict(float)
    for kind, members, chance in zip(terms.kinds, terms.members, chances.tolist(), strict=True):
        for member in members if kind in WORK else ():
            total[member] += chance
    ranks = sorted(terms.members[best], key=lambda at: -total[at])
    if len(ranks) > 1 and total[ranks[-1]] >= TABLE.name_from["beside"] * total[ranks[0]]:
        return best, float(chances[best])
    return terms.members.index((ranks[0],)), total[ranks[0]]


def _finding(profile: Profile, context: Context, terms: Terms, named: Named, weights: Weights) -> Finding:
    number, kind, members = named.number, terms.kinds[named.number], list(named.members)
    parts = [(name, weights.terms.get(name, 0.0) * float(value)) for name, value in zip(TERMS, terms.values[number], strict=True)]
    told = sorted((part for part in parts if abs(part[1]) >= SAID), key=lambda part: -abs(part[1]))
    share, looks = float(terms.share[number]), float(terms.looks[number])
    if named.members != terms.members[number]:
        share, looks = (float(values[members].sum()) for values in profile.own())
    found = Finding(Kind.PROXY, named.members, max(share, 0.0), int(looks), named.chance, weighed=tuple(told))
    found.keys = tuple(profile.processes[at] for at in members)
    if kind in WORK:
        found.kind = _part_of_ranks(profile, members, dict(told))
        if context.late is not None:
            found.share = max(found.share, float(context.late.share[members].sum()))
        return found
    # What only the links of a rank show may be its NIC's as well as its proxy's; the proxy is said where it shows itself.
    of = dict(parts)
    by_proxy = of["asleep"] > of["delayed"] or profile.looks_held[Part.PROXY][members].any()
    if kind is not CandidateKind.NIC or not by_proxy:
        found.keys = tuple(terms.links[number])
        found.link = _place_of(profile, context, named.members, terms.links[number]) if kind is CandidateKind.LINK else None
        found.kind = Kind.LINK if found.link is not None else Kind.NIC
    return found


def _part_of_ranks(profile: Profile, members: list[int], weighed: Mapping[str, float]) -> Kind:
    if max(weighed.get("late", 0.0), weighed.get("throttled", 0.0)) > 0:
        return Kind.HOST  # a host thread that calls late shows as the GPU's work while something is queued
    parts = {part: float(profile.hold[part][members].sum()) for part in OWN}
    total = sum(parts.values())
    if parts[Part.KERNEL] >= KERNELLY * total > 0:
        return Kind.KERNEL
    return Kind.HOST if parts[Part.HOST] >= HOSTLY * total > 0 else Kind.COMPUTE


def _place_of(profile: Profile, context: Context, members: Members, keys: Sequence[LinkKey]) -> LinkPlace | None:
    """Where in the job's communicators the connection of two ranks is, as waits for it or an earlier sample told."""
    if keys:
        return profile.places[keys[0]]
    before, ends = context.before, {profile.processes[at] for at in members}
    known = (*profile.places.values(), *(before.places.values() if before is not None else ()))
    return next((place for place in known if {place.sender, place.receiver} == ends), None)
