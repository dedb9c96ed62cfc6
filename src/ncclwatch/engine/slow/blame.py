"""Who or what stands out: ranks and links that hold the job up more than their equals do, and more than they did before.

Only what others really wait for is blamed; a rank that is slow while nobody waits for it is harmless. A rank is compared with
ranks that do equal work and are seen by equal means; where there are none, only with its own past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.contention import alone_without_cpu, believed, carried_by_links, held_back_alone
from ncclwatch.engine.slow.findings import (
    BUSIER,
    FLOOR,
    NOISY,
    SLOWER,
    START_TOTAL_LOOKS,
    TOTAL_LOOKS,
    Context,
    Finding,
    Kind,
    stands_out,
)
from ncclwatch.engine.slow.lateness import Lateness
from ncclwatch.engine.slow.links import network_findings
from ncclwatch.engine.slow.looks import Part
from ncclwatch.engine.slow.profile import OWN, Profile, Shares
from ncclwatch.engine.slow.together import (
    AS_EVER,
    explained_by_work,
    explained_hosts,
    limited_together,
    outside,
    slower_than_equals,
    whole_hosts,
)


def find(profile: Profile, context: Context) -> list[Finding]:
    """Culprits, the costliest first."""
    if profile.looks < (START_TOTAL_LOOKS if context.lost is None else TOTAL_LOOKS):
        return []
    plain, limited = _plainly_at_work(profile, context), held_back_alone(profile, context)
    findings = network_findings(profile, context) + _ranks(profile, context, plain, limited)
    told = explained_hosts(profile, context)
    told[[at for f in findings if f.kind.computes for at in f.members if limited[at]]] = True
    findings = believed(_same_ranks(findings, plain, told), profile, context)
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


def _others(values: Shares, at: int, context: Context) -> float:
    """The mean of a rank's equals; 0 where it has none."""
    equals = context.equal == context.equal[at]
    equals[at] = False
    return float(values[equals].mean()) if context.equal[at] >= 0 and equals.any() else 0.0


MUCH_BUSIER = 1.3


def _busier(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """Ranks whose own work takes more of the time than that of their equals, or than it did."""
    usual = _reference(profile.busy, context)
    # Few looks may see a rank at work by chance.
    chance = 2.0 * np.sqrt(np.clip(usual * (1.0 - usual), 0.0, None) / max(1, profile.looks))
    busier = profile.busy >= np.maximum(BUSIER * usual, usual + chance)
    before = context.before
    if before is not None and before.looks >= 4:
        past = np.full(len(profile.busy), np.nan)
        known = {key: at for at, key in enumerate(before.processes)}
        for at, key in enumerate(profile.processes):
            if key in known:
                past[at] = before.busy[known[key]]
        longer = profile.busy * context.stretch >= BUSIER * past
        chance = 2.0 * np.sqrt(np.clip(past * (1.0 - past), 0.0, None) / before.looks)
        much_longer = profile.busy * context.stretch >= np.maximum(MUCH_BUSIER * past, past + chance)
        # Where all equals are slow alike (a host that is a stage) only the past tells.
        busier = np.where(np.isnan(usual), longer, (busier & (longer | np.isnan(past))) | much_longer)
    slower = context.factor >= SLOWER
    return np.asarray((busier & _waits_less(profile, context)) | slower, np.bool_)


WAITS_LESS = 0.5
WAITS_SIGMAS = 1.5


def _waits_less(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """Ranks that wait clearly less than their equals: who holds the others up cannot wait as much as they do.

    True where nobody is seen to wait (NVLink), or where there are no equals.
    """
    result = np.ones(len(profile.waits), np.bool_)
    for at in range(len(result)):
        if context.equal[at] < 0:
            continue
        equals = profile.waits[(context.equal == context.equal[at]) & (context.host != context.host[at])]
        if not len(equals):
            others = context.equal == context.equal[at]
            others[at] = False
            equals = profile.waits[others]
        usual = float(np.median(equals))
        if usual > 0:
            middle = (usual + float(profile.waits[at])) / 2
            chance = float(np.sqrt(middle * (1 - middle) * (1 + 1 / len(equals)) / max(1, profile.looks)))
            result[at] = profile.waits[at] <= min(WAITS_LESS * usual, usual - WAITS_SIGMAS * chance)
    return result


PLAIN_SIGMAS, PLAIN_LOOKS, PLAIN_TIMES = 3.0, 8, 2.0


def _plainly_at_work(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """A rank seen at work so much more often than its equals, the busiest of whom it is, and waiting so much less, that it is no
    chance, while nobody else holds up half as much: then it matters little how many of the others' waits could be followed to it.
    """
    result, own = np.zeros(len(profile.busy), np.bool_), profile.own()
    for at in range(len(result)):
        others = np.flatnonzero((context.equal == context.equal[at]) & (np.arange(len(result)) != at))
        if context.equal[at] < 0 or len(others) < 3 or profile.busy[at] <= profile.busy[others].max():
            continue
        if profile.seen[at] < PLAIN_LOOKS or own[at] < PLAIN_TIMES * np.delete(own, at).max():
            continue
        differences = (
            profile.busy[at] - np.median(profile.busy[others]), np.median(profile.waits[others]) - profile.waits[at]
        )  # fmt: skip
        usual = np.clip((np.median(profile.busy[others]), np.median(profile.waits[others])), 0.1, 0.9)
        chance = np.sqrt(usual * (1 - usual) / max(1.0, float(profile.seen[at])))
        result[at] = bool(np.all(np.array(differences) >= PLAIN_SIGMAS * chance))
    return result


def _ranks(profile: Profile, context: Context, plain: NDArray[np.bool_], limited: NDArray[np.bool_]) -> list[Finding]:
    if context.late is not None:
        by_itself = np.where(_late_together(context, context.late), 0.0, context.late.share)
        context = replace(context, late=replace(context.late, share=by_itself))
    own, held = profile.own(), profile.own_looks()
    if context.before is not None:
        # In seconds of an iteration: waits that were always there are a smaller share of a longer one.
        own = np.maximum(own - _past(profile, context.before) / context.stretch, 0.0)
    busier, alone = _busier(profile, context), alone_without_cpu(profile, context) | limited
    # Who has no CPU does not move its data either.
    own = np.where(alone, own + profile.hold[Part.PROXY], own)
    held = np.where(alone, held + profile.looks_held[Part.PROXY], held)
    if limited.any():
        carried, carrying = carried_by_links(profile, context)
        own, held = np.where(limited, own + carried, own), np.where(limited, held + carrying, held)
    busier = busier | alone
    if context.unseen is not None:
        # They seem to be at work; only times of their own that say so count against them.
        waiting = context.unseen & ~(context.factor >= SLOWER)
        own, held = np.where(waiting, 0.0, own), np.where(waiting, 0, held)
    explains = _late_for_what_is_lost(profile, context)
    busier = busier | explains
    if context.late is not None:
        # A rank also begins late when the collective before ended late for it; only one that is busier is late by itself.
        late = np.where(busier, context.late.share, 0.0)
        own, held = np.maximum(own, late), np.maximum(held, np.where(late > 0, context.late.late, 0))
    # Whose late starts explain it is compared by those: what looks see of his equals may be their waiting for him.
    usual, shown = np.where(explains, 0.0, _reference(own, context)), profile.shown()
    findings: list[Finding] = []
    together = limited_together(limited, profile)
    whole = [*together, *(members for members in whole_hosts(own, held, busier, profile, context) if not limited[members].all())]
    for members in whole:
        share = max(float(own[members].sum()), explained_by_work(members, profile, context))
        looks = int(held[members].max())
        elsewhere = outside(own, members, context)
        measured = slower_than_equals(members, context)
        if stands_out(share, looks, elsewhere, context, shown, measured=measured, limited=bool(limited[members].all())):
            findings.append(_of_ranks(profile, members, share, looks, elsewhere, context, alone))
    taken = {at for members in whole for at in members.tolist()}
    sigmas = float(np.interp(context.doubt, (0.0, NOISY), SHARE_SIGMAS))
    for at in np.argsort(-own, kind="stable").tolist():
        if own[at] < FLOOR:
            break
        certain = (
            own[at] - _others(own, at, context) >= sigmas * profile.scatter[at]
            or alone[at]
            or _measured(at, own, context)
            or plain[at]
        )
        if at in taken or not busier[at] or not certain or _paced_by_another(at, own, context):
            continue
        members = np.array([at])
        measured = slower_than_equals(members, context)
        if stands_out(own[at], held[at], usual[at], context, shown, measured=measured, limited=bool(limited[at])):
            findings.append(_of_ranks(profile, members, float(own[at]), int(held[at]), float(usual[at]), context, alone))
    findings = _without_onlookers(findings, context)
    return [f for n, f in enumerate(findings) if n == 0 or _beside(f, findings[0], context)]


SHARE_SIGMAS = (2.0, 3.0)
"""Standard errors by which a share must exceed its equals' (in a quiet job, in a noisy one) where only looks speak for it."""

SECOND = 0.5
"""Beside a worse culprit a rank counts from this share of its, or where the times between its calls say that it is slow."""
SECOND_SLOWER = 0.25
PACED_ALIKE, PACED_SHARE = 0.8, 0.6
"""Who has slowed down by at least this part of another's factor, and holds others up by less than this part, is paced by it."""


LATE_TOGETHER = 0.25
LATE_EXPLAINS, LATE_TIMES, LATE_CARRIED, LATE_WAITS = 0.5, 2.0, 0.3, 0.1
LATE_ALL = 0.6
"""From this part of what is lost on, late starts explain it."""


def _late_together(context: Context, late: Lateness) -> NDArray[np.bool_]:
    """Ranks that begin late like many of their equals on other hosts: the collective before has ended late for all of them."""
    result = np.zeros(len(context.equal), np.bool_)
    for at in np.flatnonzero(late.share > 0).tolist():
        equals = context.equal == context.equal[at]
        equals[at] = False
        others = equals & (context.host != context.host[at])
        others = others if others.any() else equals
        result[at] = others.any() and float((late.share[others] >= 0.5 * late.share[at]).mean()) > LATE_TOGETHER
    return result


def _late_for_what_is_lost(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """Ranks that begin so late that it explains most of what is lost, alone among their equals, and that are seen to hold others
    up more than these usually do, and not by their links: for whom a collective ends late, that one waits more than others.

    In shared memory all seem to wait most of the time, so who holds them up need not be seen to wait much less.
    """
    result = np.zeros(len(context.equal), np.bool_)
    if context.late is None or context.lost is None:
        return result
    alike = context.equal if context.alike is None else context.alike
    share, own = context.late.share, profile.own()
    for at in np.flatnonzero((share > 0) & (share >= LATE_EXPLAINS * context.lost)).tolist():
        others = np.flatnonzero((alike == alike[at]) & (np.arange(len(result)) != at))
        if alike[at] < 0 or not len(others) or share[others].max() >= LATE_TOGETHER * share[at]:
            continue
        key = profile.processes[at]
        carried = sum(part for link, part in profile.links.items() if key in link[:2]) + profile.hold[Part.PROXY][at]
        result[at] = _holds_more(at, others, own, profile, context) and carried <= LATE_CARRIED * share[at]
    return result


def _holds_more(at: int, others: NDArray[np.int64], own: Shares, profile: Profile, context: Context) -> bool:
    """Whether a rank holds others up more than its equals do. Beside a single one, which may be an onlooker inside the node, or
    such as are seen by other means: whether it waits no more than they do.
    """
    if len(others) > 1 and np.all(context.equal[others] == context.equal[at]) and context.equal[at] >= 0:
        return bool(own[at] > LATE_TIMES * float(np.median(own[others])))
    return bool(own[at] > 0 and profile.waits[at] <= profile.waits[others].max() + LATE_WAITS)


def _measured(at: int, own: Shares, context: Context) -> bool:
    """Whether times of calls say as well that a rank is slow: its work takes longer, or its host begins late."""
    late = context.late is not None and bool(context.late.share[at] >= 0.5 * own[at])
    return late or bool(context.factor[at] >= SLOWER)


def _paced_by_another(at: int, own: Shares, context: Context) -> bool:
    """Whether a rank seems to have become slower as an equal on its host did, who holds others up much more: it waits for it in
    the calls of a tensor group, and both seem to compute for as long as the quicker one does.
    """
    factor = context.factor[at]
    alike = (context.equal == context.equal[at]) & (context.host == context.host[at]) & (context.factor >= PACED_ALIKE * factor)
    return bool(context.equal[at] >= 0 and factor >= SLOWER and np.any(own[alike] * PACED_SHARE > own[at]))


def _beside(finding: Finding, worst: Finding, context: Context) -> bool:
    """Whether a culprit beside a worse one is one: who is held up in ways the looks do not show seems to hold others up."""
    factors = context.factor[list(finding.members)]
    slower = bool(np.all(factors >= SLOWER))
    if finding.kind is Kind.COMPUTE and np.all(factors < AS_EVER):
        return False  # the times between its calls say that it works as fast as ever
    return finding.share >= (SECOND_SLOWER if slower else SECOND) * worst.share


def _without_onlookers(findings: list[Finding], context: Context) -> list[Finding]:
    """Where the late starts of one host explain nearly all that is lost, only times of their own count against the others: who
    waits inside a node for a host that calls late seems to be at work.
    """
    late, lost = context.late, context.lost
    if late is None or lost is None or lost <= 0:
        return findings
    if not any(f.kind is Kind.HOST and float(late.share[list(f.members)].sum()) >= LATE_ALL * lost for f in findings):
        return findings
    return [f for f in findings if f.kind is not Kind.COMPUTE or np.all(context.factor[list(f.members)] >= SLOWER)]


def _of_ranks(
    profile: Profile, members: NDArray[np.int64], share: float, looks: int, reference: float, context: Context,
    alone: NDArray[np.bool_],
) -> Finding:  # fmt: skip
    """A finding about ranks; ``alone``: who has no CPU while others have."""
    parts = {part: float(profile.hold[part][members].sum()) for part in OWN}
    most = max(parts, key=lambda part: parts[part])
    # A host that calls late shows as the GPU's work as long as something is queued.
    kind = {Part.GPU: Kind.COMPUTE, Part.HOST: Kind.HOST, Part.KERNEL: Kind.KERNEL}[most]
    if kind is not Kind.HOST and parts[Part.HOST] >= 0.3 * sum(parts.values()):
        kind = Kind.HOST
    if alone[members].all():
        kind = Kind.HOST
    if context.late is not None and float(context.late.share[members].sum()) >= 0.5 * share:
        kind = Kind.HOST
    return Finding(kind, tuple(members.tolist()), share, looks, reference, keys=tuple(profile.processes[m] for m in members))


def _past(profile: Profile, before: Profile) -> Shares:
    if before.looks < 4:
        return np.zeros(len(profile.processes))
    known = dict(zip(before.processes, before.own().tolist(), strict=True))
    return np.array([known.get(key, 0.0) for key in profile.processes])


def _same_ranks(findings: Sequence[Finding], plain: NDArray[np.bool_], told: NDArray[np.bool_]) -> list[Finding]:
    """A rank that is held up by its own slow link or proxy is not blamed for its work as well, unless that is the larger part.

    Nor is one whose GPU is plainly at work for a proxy that seems late now and then: while that sleeps the GPU does not work. Nor
    are the links and proxies of those of whom the kernel (a CPU limit) or the calls (a host's work) have told why they are slow.
    """
    working = {at for f in findings if f.kind is Kind.COMPUTE for at in f.members if plain[at]}
    network = [f for f in findings if not f.kind.computes and not told[list(f.members)].any()]
    network = [f for f in network if not (f.kind is Kind.PROXY and working.issuperset(f.members))]
    kept: list[Finding] = []
    for finding in findings:
        if finding.kind.computes:
            same = [f for f in network if set(f.members) & set(finding.members)]
            if any(f.share > 2 * finding.share for f in same):
                continue
        elif finding not in network:
            continue
        kept.append(finding)
    return kept
