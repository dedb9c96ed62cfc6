"""Who or what stands out: ranks and links that hold the job up more than their equals do, and more than they did before.

Only what others really wait for is blamed; a rank that is slow while nobody waits for it is harmless. A rank is compared with ranks
that do equal work and are seen by equal means; where there are none, only with its own past.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.looks import LinkPlace, Part
from ncclwatch.engine.slow.profile import OWN, LinkKey, Profile, Shares

FLOOR = 0.035
"""Below this share of the job's time nothing is blamed."""
EXPLAINS = 0.15
"""A culprit must explain at least this share of the time that was lost."""
LOOKS = 3
"""Looks in which a culprit must have held others up."""

START_SHARE = 0.15
START_LOOKS = 6
START_TOTAL_LOOKS = 12
START_TIMES = 4.0
"""Without a healthy past: the share, the looks, and how many times what its equals have."""

BUSIER = 1.12
"""A rank that is blamed for its own work must be this much busier than its equals or its past."""


class Kind(StrEnum):
    """What a finding is about."""

    COMPUTE = "computation"
    HOST = "host"
    KERNEL = "communication kernel"
    PROXY = "proxy"
    NIC = "network interface"
    LINK = "link"

    @property
    def computes(self) -> bool:
        """Whether it counts as slow computation (S1); the rest is communication (S2)."""
        return self in (Kind.COMPUTE, Kind.HOST)


@dataclass(slots=True)
class Finding:
    """One culprit: ``members`` index the profile's processes; ``share`` of the job's time spent waiting for it."""

    kind: Kind
    members: tuple[int, ...]
    share: float
    looks: int
    reference: float
    link: LinkPlace | None = None
    keys: tuple[object, ...] = ()
    evidence: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Context:
    """What is known besides the looks. Arrays of shape (processes,).

    ``equal`` numbers sets of equal ranks (−1: no equals); ``host`` numbers hosts. ``factor`` is how much longer a rank's stretches of
    work last than before (nan: not known), ``lost`` the share of time that is lost compared with the healthy past (``None`` without
    one), ``stretch`` how much longer an iteration is than in ``before``.
    """

    equal: NDArray[np.int64]
    host: NDArray[np.int64]
    factor: Shares
    lost: float | None
    stretch: float = 1.0
    before: Profile | None = None


def find(profile: Profile, context: Context) -> list[Finding]:
    """Culprits, the costliest first."""
    if context.lost is None and profile.looks < START_TOTAL_LOOKS:
        return []
    findings = _links(profile, context) + _ranks(profile, context)
    findings = _same_ranks(findings)
    return sorted(findings, key=lambda finding: -finding.share)


# --- ranks --------------------------------------------------------------------------------------------------------------------


def _reference(values: Shares, context: Context) -> Shares:
    """What is usual among equals: the lower quartile of the others in the set, so that half of them may be slow; nan without."""
    result = np.full(len(values), np.nan)
    for number in np.unique(context.equal[context.equal >= 0]):
        places = np.flatnonzero(context.equal == number)
        if len(places) >= 2:
            result[places] = float(np.quantile(values[places], 0.25, method="lower"))
    return result


def _enough(share: float, looks: float, reference: float, context: Context) -> bool:
    """Whether a share of holding others up stands out."""
    excess = share - (0.0 if np.isnan(reference) else reference)
    if context.lost is not None:
        return bool(looks >= LOOKS and excess >= max(FLOOR, EXPLAINS * context.lost))
    return bool(
        not np.isnan(reference)
        and looks >= START_LOOKS
        and excess >= START_SHARE
        and share >= START_TIMES * max(reference, FLOOR / 2)
    )


def _busier(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """Ranks whose own work takes more of the time than that of their equals, or than it did."""
    usual = _reference(profile.busy, context)
    busier = profile.busy >= BUSIER * usual
    before = context.before
    if before is not None and before.looks >= 4:
        past = np.full(len(profile.busy), np.nan)
        known = {key: at for at, key in enumerate(before.processes)}
        for at, key in enumerate(profile.processes):
            if key in known:
                past[at] = before.busy[known[key]]
        longer = profile.busy * context.stretch >= BUSIER * past
        busier = np.where(np.isnan(usual), longer, busier & (longer | np.isnan(past)))
    slower = context.factor >= BUSIER
    return np.asarray(busier | slower, np.bool_)


def _ranks(profile: Profile, context: Context) -> list[Finding]:
    own, held = profile.own(), profile.own_looks()
    if context.before is not None:
        own = np.maximum(own - _past(profile, context.before), 0.0)
    usual = _reference(own, context)
    busier = _busier(profile, context)
    findings: list[Finding] = []
    whole = _whole_hosts(own, held, busier, context)
    for members in whole:
        share, looks = float(own[members].sum()), int(held[members].max())
        if _enough(share, looks, float(np.nansum(usual[members])), context):
            findings.append(_of_ranks(profile, members, share, looks, float(np.nansum(usual[members]))))
    taken = {at for members in whole for at in members.tolist()}
    for at in np.argsort(-own, kind="stable").tolist():
        if own[at] < FLOOR:
            break
        if at not in taken and busier[at] and _enough(own[at], held[at], usual[at], context):
            findings.append(_of_ranks(profile, np.array([at]), float(own[at]), int(held[at]), float(usual[at])))
    # A rank that holds up far less than the worst is likely to be held up itself, in ways the looks do not show.
    largest = max((f.share for f in findings), default=0.0)
    return [f for f in findings if f.share >= 0.3 * largest]


def _of_ranks(profile: Profile, members: NDArray[np.int64], share: float, looks: int, reference: float) -> Finding:
    parts = {part: float(profile.hold[part][members].sum()) for part in OWN}
    most = max(parts, key=lambda part: parts[part])
    # A host that calls late shows as the GPU's work as long as something is queued.
    kind = {Part.GPU: Kind.COMPUTE, Part.HOST: Kind.HOST, Part.KERNEL: Kind.KERNEL}[most]
    if kind is not Kind.HOST and parts[Part.HOST] >= 0.3 * sum(parts.values()):
        kind = Kind.HOST
    return Finding(kind, tuple(members.tolist()), share, looks, reference, keys=tuple(profile.processes[m] for m in members))


def _past(profile: Profile, before: Profile) -> Shares:
    if before.looks < 4:
        return np.zeros(len(profile.processes))
    known = dict(zip(before.processes, before.own().tolist(), strict=True))
    return np.array([known.get(key, 0.0) for key in profile.processes])


def _whole_hosts(own: Shares, held: Shares, busier: NDArray[np.bool_], context: Context) -> list[NDArray[np.int64]]:
    """Hosts of which every rank holds others up alike, while no other host's do."""
    numbers = np.unique(context.host)
    if len(numbers) < 2:
        return []
    found: list[NDArray[np.int64]] = []
    totals = {int(n): float(own[context.host == n].sum()) for n in numbers}
    for number in numbers.tolist():
        members = np.flatnonzero(context.host == number)
        if len(members) < 2 or totals[number] < FLOOR:
            continue
        share = own[members] / totals[number]
        others = [total for n, total in totals.items() if n != number]
        spread = share.max() <= 0.7 and np.count_nonzero(own[members] >= 0.01) == len(members)
        if spread and bool(busier[members].mean() >= 0.75) and totals[number] >= 2.0 * float(np.median(others)) and held[members].max() >= 2:
            found.append(members)
    return found


# --- links, network interfaces, proxies ------------------------------------------------------------------------------------


def _links(profile: Profile, context: Context) -> list[Finding]:
    index = {key: at for at, key in enumerate(profile.processes)}
    shares = dict(profile.links)
    if context.before is not None and context.before.looks >= 4:
        shares = {key: max(0.0, share - context.before.links.get(key, 0.0)) for key, share in shares.items()}
    proxies = profile.hold[Part.PROXY]
    findings: list[Finding] = []
    touched: set[int] = set()
    for at in np.argsort(-proxies, kind="stable").tolist():
        others = np.delete(proxies, at)
        usual = float(np.quantile(others, 0.75)) if len(others) else 0.0
        looks = int(profile.looks_held[Part.PROXY][at])
        incident = sum(share for key, share in shares.items() if index.get(key[0]) == at or index.get(key[1]) == at)  # type: ignore[arg-type]
        if proxies[at] >= FLOOR and _enough(float(proxies[at]), looks, usual, context) and proxies[at] >= 0.3 * incident:
            share = float(proxies[at] + incident)
            findings.append(Finding(Kind.PROXY, (at,), share, looks, usual, keys=(profile.processes[at],)))
            touched.add(at)
    usual = _usual_link(shares, len(profile.processes))
    elevated = {key: share for key, share in shares.items() if share >= max(0.02, 2.5 * usual) and profile.link_looks[key] >= 2}
    ends: dict[int, list[LinkKey]] = defaultdict(list)
    for key in elevated:
        for end in (key[0], key[1]):
            if end in index:
                ends[index[end]].append(key)
    for members in _interfaces(elevated, ends, profile, context):
        keys = {key for at in members for key in ends[at]}
        share = sum(shares[key] for key in keys)
        looks = max((profile.link_looks[key] for key in keys), default=0)
        if not touched.intersection(members) and _enough(share, looks, usual, context):
            findings.append(Finding(Kind.NIC, members, share, looks, usual, keys=tuple(keys)))
            touched.update(members)
    for key, share in sorted(elevated.items(), key=lambda item: -item[1]):
        members = tuple(index[end] for end in (key[0], key[1]) if end in index)
        if touched.intersection(members) or not _enough(share, profile.link_looks[key], usual, context):
            continue
        findings.append(Finding(Kind.LINK, members, share, profile.link_looks[key], usual, profile.places[key], (key,)))
        touched.update(members)
    largest = max((f.share for f in findings), default=0.0)
    return [f for f in findings if f.share >= 0.3 * largest]


def _usual_link(shares: dict[LinkKey, float], processes: int) -> float:
    """What a link usually holds up: the median over links, of which a ring has as many as ranks; unseen ones count as nothing."""
    values = sorted(shares.values())
    values = [0.0] * max(0, processes - len(values)) + values
    return float(np.median(values)) if values else 0.0


def _interfaces(
    elevated: dict[LinkKey, float], ends: dict[int, list[LinkKey]], profile: Profile, context: Context
) -> list[tuple[int, ...]]:
    """Ranks (or all ranks of a host) whose links to several neighbours are slow: what they have in common is theirs."""
    found: list[tuple[int, ...]] = []
    total = sum(elevated.values())
    if not total:
        return []
    index = {key: at for at, key in enumerate(profile.processes)}
    for number in np.unique(context.host).tolist():
        members = np.flatnonzero(context.host == number)
        if len(members) < 2 or len(members) == len(context.host):
            continue
        inside = set(members.tolist())
        keys = [key for key in elevated if {index.get(key[0], -1), index.get(key[1], -1)} & inside]  # type: ignore[arg-type]
        covered = {at for at in inside if any(at in (index.get(k[0], -1), index.get(k[1], -1)) for k in keys)}  # type: ignore[arg-type]
        largest = max((elevated[key] for key in keys), default=0.0)
        part = sum(elevated[key] for key in keys)
        if covered == inside and part >= 0.7 * total and largest <= 0.5 * part and len(keys) >= len(inside):
            found.append(tuple(sorted(inside)))
    if found:
        return found
    for at, keys in ends.items():
        neighbours = {end for key in keys for end in (key[0], key[1]) if index.get(end, -1) != at}  # type: ignore[arg-type]
        part = sum(elevated[key] for key in keys)
        largest = max(elevated[key] for key in keys)
        if len(neighbours) >= 2 and part >= 0.6 * total and largest <= 0.85 * part:
            found.append((at,))
    # Of two ends that qualify, the one with more.
    return sorted(found, key=lambda m: -sum(elevated[key] for key in ends[m[0]]))[:1]


def _same_ranks(findings: Sequence[Finding]) -> list[Finding]:
    """A rank that is held up by its own slow link or proxy is not blamed for its work as well, unless that is the larger part."""
    network = [f for f in findings if not f.kind.computes]
    kept: list[Finding] = []
    for finding in findings:
        if finding.kind.computes:
            same = [f for f in network if set(f.members) & set(finding.members)]
            if any(f.share > 2 * finding.share for f in same):
                continue
        kept.append(finding)
    return kept
