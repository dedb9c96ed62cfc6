"""Who or what holds up a slow job: all candidates compete for the same lost time in one conditional logit.

The log-odds of a candidate are the weighted sum of its terms (``terms``) and an intercept for its kind; "nobody" has an
intercept of its own, and what it gains where the job pauses as a whole. Their softmax is the posterior probability of each,
which is what a verdict's confidence says. Weights and the probability from which on somebody is named come from recordings
(``calibration``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.calibration import TABLE, Weights
from ncclwatch.engine.slow.findings import FEWEST_PAST, Context, Finding, Kind
from ncclwatch.engine.slow.profile import OWN, LinkKey, Profile
from ncclwatch.engine.slow.snapshot import LinkPlace, Part
from ncclwatch.engine.slow.terms import NOTHING, TERMS, CandidateKind, Explained, Members, Terms, measure

FEWEST_SAMPLES = FEWEST_PAST
"""Samples since a job is slow before anybody is named: fewer are one moment."""
HOSTLY, KERNELLY = 0.3, 0.8
"""Parts of the waits for a rank that make it its host thread (which shows as the GPU while anything is queued), or its kernel
(which nearly always is only what the samples happened to see).
"""
MOST_EXPLAINED = 0.9
"""Part of the lost time that one culprit explains at most: samples see ends of waits, not their beginnings. Unit: share. From:
chosen; what is left is divided among further culprits, which few recordings have.
"""
RIVALS = 3
"""Bound: candidates that are told beside the one that is named."""
AS_MUCH = 0.85
"""A link is named rather than a NIC, and a NIC rather than a host's, where it explains at least this part of what that does."""
SAID = 0.1
"""Bound: nats of a term below which it is not told."""
NETWORKS = (CandidateKind.LINK, CandidateKind.NIC, CandidateKind.HOST_NICS)
MOST_CULPRITS = 4
"""Bound: a person can follow up no more at once, and what is left of the lost time after so many is noise."""


def find(profile: Profile, context: Context) -> list[Finding]:
    """Culprits, the likeliest first; empty where nobody is likely enough."""
    if profile.looks < FEWEST_SAMPLES:
        return []
    terms = measure(profile, context)
    weights, name_from = (TABLE.start, "start") if context.lost is None else (TABLE.since, "since")
    odds = log_odds(terms, weights)
    chances = posterior(odds, weights, context)
    found = likeliest(terms, chances, TABLE.name_from[name_from], context)
    if found is None:
        return []
    first = _finding(profile, context, terms, *found, weights)
    findings = [replace(first, rivals=_rivals(terms, chances, found[0]), rule=f"slow-{name_from}")]
    if terms.kinds[found[0]] is CandidateKind.WHOLE_HOST:
        findings.append(_links_too(profile, context, findings[0]))
    explained = NOTHING
    while len(findings) < MOST_CULPRITS and context.lost is not None:
        explained = also_explained(explained, terms, found[0])
        terms = beside(measure(profile, context, explained), explained.ranks)
        chances = posterior(log_odds(terms, TABLE.beside), TABLE.beside, context)
        found = likeliest(terms, chances, TABLE.name_from["beside"], context)
        if found is None:
            break
        further = _finding(profile, context, terms, *found, TABLE.beside)
        findings.append(replace(further, rivals=_rivals(terms, chances, found[0]), rule="slow-beside"))
    return findings


def _rivals(terms: Terms, chances: NDArray[np.float64], named: int) -> tuple[tuple[str, Members, float], ...]:
    """The likeliest of the other candidates, and nobody."""
    order = [number for number in np.argsort(-chances)[: RIVALS + 1].tolist() if number != named][:RIVALS]
    found = [(terms.kinds[number].value, terms.members[number], float(chances[number])) for number in order]
    return tuple(sorted([*found, ("nobody", (), float(1.0 - chances.sum()))], key=lambda rival: -rival[2]))


def also_explained(before: Explained, terms: Terms, number: int) -> Explained:
    """What is explained once a candidate is a culprit as well."""
    part = min(float(terms.explains[number]), MOST_EXPLAINED)
    return Explained(before.ranks | frozenset(terms.members[number]), before.part + (1 - before.part) * part)


def log_odds(terms: Terms, weights: Weights) -> NDArray[np.float64]:
    """Of each candidate, against one of which nothing is known: shape (candidates,)."""
    column = np.array([weights.terms.get(name, 0.0) for name in TERMS])
    odds: NDArray[np.float64] = terms.values @ column
    odds += np.array([weights.kinds.get(kind.value, 0.0) for kind in terms.kinds])
    return odds


def posterior(odds: NDArray[np.float64], weights: Weights, context: Context) -> NDArray[np.float64]:
    """The probability of each candidate; what is missing from 1 is nobody's."""
    nobody = weights.nobody + (weights.terms.get("idle", 0.0) * context.idle)
    every = np.append(odds, nobody)
    shares = np.exp(every - every.max())
    return np.asarray(shares[:-1] / shares.sum())


def beside(terms: Terms, taken: Collection[int]) -> Terms:
    """The candidates that have nothing in common with culprits found before."""
    return terms.only([number for number, members in enumerate(terms.members) if not set(members) & set(taken)])


def likeliest(terms: Terms, chances: NDArray[np.float64], least: float, context: Context) -> tuple[int, Members, float] | None:
    """The likeliest candidate (number, members, probability), if its place is likely enough.

    Which of several links and NICs at one place it is need not be plain for the place to be: they count together. Ranks that
    nothing tells apart, since what joins them is hidden, are named together.
    """
    if not len(chances):
        return None
    best, chance = int(np.argmax(chances)), float(chances.max())
    if terms.kinds[best] in NETWORKS:
        best, chance = _place(terms, chances)
    if chance >= least:
        return best, terms.members[best], chance
    if context.hidden is None or terms.kinds[best] is not CandidateKind.RANK:
        return None
    same = [
        at
        for at, (kind, members) in enumerate(zip(terms.kinds, terms.members, strict=True))
        if kind is CandidateKind.RANK and context.hidden[members[0]] == context.hidden[terms.members[best][0]] >= 0
        and 2 * chances[at] >= chances[best]
    ]  # fmt: skip
    total = float(chances[same].sum())
    return (best, tuple(sorted(terms.members[at][0] for at in same)), total) if total >= least else None


def _place(terms: Terms, chances: NDArray[np.float64]) -> tuple[int, float]:
    """Of the links, NICs and hosts' links that compete for the same waits: the one that explains them, and the probability that
    it is there. What explains more by more links is believed only where it explains clearly more.
    """
    networks = [number for number, kind in enumerate(terms.kinds) if kind in NETWORKS]
    explains = terms.explains
    most = max(float(explains[number]) for number in networks)
    enough = AS_MUCH * most if most > 0 else most
    best = min(
        (number for number in networks if explains[number] >= enough),
        key=lambda number: (NETWORKS.index(terms.kinds[number]), -explains[number]),
    )
    near = set(terms.members[best])
    for number in networks:
        if terms.kinds[number] is CandidateKind.LINK and near & set(terms.members[best]) & set(terms.members[number]):
            near |= set(terms.members[number])
    return best, float(sum(chances[number] for number in networks if not near.isdisjoint(terms.members[number])))


# --- as findings -------------------------------------------------------------------------------------------------------------


def _finding(
    profile: Profile, context: Context, terms: Terms, number: int, members: Members, confidence: float, weights: Weights
) -> Finding:
    kind = terms.kinds[number]
    parts = [(name, weights.terms.get(name, 0.0) * float(value)) for name, value in zip(TERMS, terms.values[number], strict=True)]
    weighed = tuple(sorted(((name, part) for name, part in parts if abs(part) >= SAID), key=lambda item: -abs(item[1])))
    share, looks = float(terms.share[number]), int(terms.looks[number])
    if len(members) > len(terms.members[number]):
        share = float((profile.own()[list(members)]).sum())
    found = Finding(Kind.PROXY, members, max(share, 0.0), looks, confidence, weighed=weighed)
    if kind.computes:
        return _of_ranks(profile, context, found)
    if kind is CandidateKind.PROXY:
        return replace(found, keys=tuple(profile.processes[at] for at in members))
    keys = _links_of(profile, context, kind, members)
    place = profile.places.get(keys[0]) if keys and kind is CandidateKind.LINK else None
    if kind is CandidateKind.LINK and place is None:
        place = _place_of(profile, context, members)
    return replace(
        found, kind=Kind.LINK if kind is CandidateKind.LINK and place is not None else Kind.NIC, keys=tuple(keys), link=place
    )


def _of_ranks(profile: Profile, context: Context, found: Finding) -> Finding:
    """Which part of the ranks it is: the GPU, the host thread, or the communication kernel."""
    members = list(found.members)
    parts = {part: float(profile.hold[part][members].sum()) for part in OWN}
    kind = Kind.HOST if parts[Part.HOST] >= HOSTLY * sum(parts.values()) > 0 else Kind.COMPUTE
    if parts[Part.KERNEL] >= KERNELLY * sum(parts.values()) > 0:
        kind = Kind.KERNEL
    weighed = dict(found.weighed)
    # A host thread that calls late shows as the GPU's work while something is queued.
    by_host = max(weighed.get("late", 0.0), weighed.get("throttled", 0.0))
    if by_host > 0:
        kind = Kind.HOST
    share = found.share
    if context.late is not None:
        share = max(share, float(context.late.share[members].sum()))
    return replace(found, kind=kind, share=share, keys=tuple(profile.processes[at] for at in members))


def _links_too(profile: Profile, context: Context, found: Finding) -> Finding:
    """The links of a host that is slow in its work and in its links."""
    keys = tuple(_links_of(profile, context, CandidateKind.HOST_NICS, found.members))
    share = sum(profile.links[key] for key in keys)
    return replace(found, kind=Kind.NIC, share=share, looks=sum(profile.link_looks[key] for key in keys), keys=keys)


def _links_of(profile: Profile, context: Context, kind: CandidateKind, members: Members) -> list[LinkKey]:
    """The links that a candidate consists of, those that hold the job up most first."""
    index = {key: at for at, key in enumerate(profile.processes)}
    inside = set(members)

    def belongs(key: LinkKey) -> bool:
        ends = [index.get(end, -1) if end is not None else -1 for end in key[:2]]
        within = [end in inside for end in ends]
        if kind is CandidateKind.HOST_NICS and all(within):  # of two hosts that have but each other
            return bool(context.nodes[ends[0]] != context.nodes[ends[1]])
        return all(within) if kind is CandidateKind.LINK else any(within) if kind is CandidateKind.NIC else within[0] != within[1]

    return sorted((key for key in profile.links if belongs(key)), key=lambda key: -profile.links[key])


def _place_of(profile: Profile, context: Context, members: Members) -> LinkPlace | None:
    """Where in the job's communicators the connection of two ranks is, as the wire or an earlier sample told."""
    before = context.before
    for known in (profile.places, before.places if before is not None else {}):
        for place in known.values():
            if {place.sender, place.receiver} == {profile.processes[at] for at in members}:
                return place
    return None
