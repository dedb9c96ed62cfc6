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
    FLOOR_LIMITED,
    LOOKS,
    NOISY,
    SLOWER,
    START_TOTAL_LOOKS,
    TOTAL_LOOKS,
    Context,
    Finding,
    Kind,
    stands_out,
)
from ncclwatch.engine.slow.late_starts import late_by_itself, late_for_what_is_lost, late_together, without_onlookers
from ncclwatch.engine.slow.links import network_findings
from ncclwatch.engine.slow.looks import Part
from ncclwatch.engine.slow.profile import OWN, Profile, Shares
from ncclwatch.engine.slow.together import (
    AS_EVER,
    explained_by_work,
    explained_hosts,
    limited_together,
    longer_at_work,
    outside,
    slower_than_equals,
    whole_hosts,
    whole_stages,
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
    others = context.others(at)
    return float(values[others].mean()) if len(others) else 0.0


MUCH_BUSIER = 1.3


def _busier(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """Ranks whose own work takes more of the time than that of their equals, or than it did."""
    usual = _reference(profile.busy, context)
    # Few looks may see a rank at work by chance.
    chance = 2.0 * np.sqrt(np.clip(usual * (1.0 - usual), 0.0, None) / max(1, profile.looks))
    busier = profile.busy >= np.maximum(BUSIER * usual, usual + chance)
    before = context.before
    if before is not None and before.looks >= 4:
        past = before.of(profile.processes, before.busy)
        longer = profile.busy * context.stretch >= BUSIER * past
        chance = 2.0 * np.sqrt(np.clip(past * (1.0 - past), 0.0, None) / before.looks)
        much_longer = profile.busy * context.stretch >= np.maximum(MUCH_BUSIER * past, past + chance)
        # Where all equals are slow alike (a host that is a stage) only the past tells.
        busier = np.where(np.isnan(usual), longer, (busier & (longer | np.isnan(past))) | much_longer)
    slower = context.factor >= SLOWER
    # Nothing is as much as nothing: who is never seen at work is no busier than others, unless nothing shows of anybody (NVLink).
    works = (profile.busy > 0) | ~(profile.busy + profile.waits).any()
    return np.asarray((busier & works & _waits_less(profile, context)) | slower, np.bool_)


WAITS_LESS = 0.5
WAITS_SIGMAS = 1.5


def _waits_less(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """Ranks that wait clearly less than their equals: who holds the others up cannot wait as much as they do.

    True where nobody is seen to wait (NVLink), or where there are no equals.
    """
    result = np.ones(len(profile.waits), np.bool_)
    for at in range(len(result)):
        others = context.others(at)
        if not len(others):
            continue
        elsewhere = others[context.nodes[others] != context.nodes[at]]
        equals = profile.waits[elsewhere if len(elsewhere) else others]
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
        others = context.others(at)
        if len(others) < 3 or profile.busy[at] <= profile.busy[others].max():
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


FAR_TIMES, FAR_TIMES_LOOKS, FAR_LOOKS = 3.0, 2.0, 5


def _far_from_equals(profile: Profile, own: Shares, held: Shares, context: Context) -> NDArray[np.bool_]:
    """Ranks that hold others up three times as much as any of their equals does (three or more), in twice as many looks, and that
    of all of them work most and wait least.
    """
    result = np.zeros(len(own), np.bool_)
    for at in np.flatnonzero(held >= FAR_LOOKS).tolist():
        others = context.others(at)
        if len(others) < 3:
            continue
        more = own[at] >= FAR_TIMES * own[others].max() and held[at] >= FAR_TIMES_LOOKS * held[others].max()
        works = profile.busy[at] > profile.busy[others].max() and profile.waits[at] < profile.waits[others].min()
        result[at] = bool(more and works)
    return result


def _ranks(profile: Profile, context: Context, plain: NDArray[np.bool_], limited: NDArray[np.bool_]) -> list[Finding]:
    if context.late is not None:
        by_itself = np.where(late_together(context, context.late), 0.0, context.late.share)
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
    explains = late_for_what_is_lost(profile, context)
    busier = busier | explains
    if context.late is not None:
        late = late_by_itself(busier, profile, context.late)
        own, held = np.maximum(own, late), np.maximum(held, np.where(late > 0, context.late.late, 0))
    own, held = _handed_on(own, held, profile, context)
    # Whose late starts explain it is compared by those: what looks see of his equals may be their waiting for him.
    usual, shown = np.where(explains, 0.0, _reference(own, context)), profile.shown()
    findings: list[Finding] = []
    together = limited_together(limited, profile)
    whole = [*together, *(members for members in whole_hosts(own, held, busier, profile, context) if not limited[members].all())]
    taken = {at for members in whole for at in members.tolist()}
    stages = [members for members in whole_stages(own, held, profile, context) if taken.isdisjoint(members.tolist())]
    grown = [0.0] * len(whole) + [longer_at_work(members, profile, context) for members in stages]
    for members, longer in zip(whole + stages, grown, strict=True):
        share = max(float(own[members].sum()), explained_by_work(members, profile, context), longer)
        looks = int(held[members].max())
        elsewhere = outside(own, members, context)
        measured = slower_than_equals(members, context)
        if stands_out(share, looks, elsewhere, context, shown, measured=measured, limited=bool(limited[members].all())):
            findings.append(_of_ranks(profile, members, share, looks, elsewhere, context, alone))
    taken.update(at for members in stages for at in members.tolist())
    sigmas = float(np.interp(context.doubt, (0.0, NOISY), SHARE_SIGMAS))
    far = _far_from_equals(profile, own, held, context)
    # Whom the kernel holds back since the job is slow, and nobody else, need only be the one that is waited for most often.
    least = np.where(limited & (held >= max(LOOKS, held.max(initial=0))) & (context.lost is not None), FLOOR_LIMITED, FLOOR)
    for at in sorted(np.flatnonzero(own >= least).tolist(), key=lambda at: -own[at]):
        certain = (
            own[at] - _others(own, at, context) >= sigmas * profile.scatter[at]
            or alone[at]
            or _measured(at, own, context)
            or plain[at]
            or far[at]
        )
        if at in taken or not busier[at] or not certain or _is_onlooker(at, own, held, profile, context):
            continue
        members = np.array([at])
        measured = slower_than_equals(members, context)
        # Of two alike neither explains as much as one does.
        beside = bool(findings) and own[at] - _others(own, at, context) >= BESIDE_SIGMAS * profile.scatter[at]
        known = {"measured": measured or beside, "limited": bool(limited[at]), "far": bool(far[at])}
        if least[at] < FLOOR or stands_out(own[at], held[at], usual[at], context, shown, **known):
            findings.append(_of_ranks(profile, members, float(own[at]), int(held[at]), float(usual[at]), context, alone))
    findings = without_onlookers(findings, context)
    return [f for n, f in enumerate(findings) if n == 0 or _beside(f, findings[0], context)]


SHARE_SIGMAS = (2.0, 3.0)
"""Standard errors by which a share must exceed its equals' (in a quiet job, in a noisy one) where only looks speak for it."""

BESIDE_SIGMAS = 3.0
SECOND = 0.5
"""Beside a worse culprit a rank counts from this share of its, or where the times between its calls say that it is slow."""
SECOND_SLOWER = 0.25
PACED_ALIKE, PACED_SHARE = 0.8, 0.6
"""Who has slowed down by at least this part of another's factor, and holds others up by less than this part, is paced by it."""
OUTWORKED = 1.3
"""Another stage of the pipeline works so many times as much more than its equals as a rank does more than its own."""


def _measured(at: int, own: Shares, context: Context) -> bool:
    """Whether times of calls say as well that a rank is slow: its work takes longer, or its host begins late."""
    late = context.late is not None and bool(context.late.share[at] >= 0.5 * own[at])
    return late or bool(context.factor[at] >= SLOWER)


def _handed_on(own: Shares, held: Shares, profile: Profile, context: Context) -> tuple[Shares, Shares]:
    """Shares and looks in which each rank holds others up, without what others only seem to: who of a pipeline is waited for, and
    outworked by another stage of it, hands that on. Without a healthy past it does not: some pipeline is always the last.
    """
    own_now, held_now = own.copy(), held.copy()
    for at in np.flatnonzero(own >= FLOOR).tolist() if context.lost is not None else ():
        worker = _outworked_by(at, own, held, profile, context)
        if worker is not None:
            own_now[worker] += own[at]
            held_now[worker] = max(held_now[worker], held[at])
            own_now[at], held_now[at] = 0.0, 0
    return own_now, held_now


def _is_onlooker(at: int, own: Shares, held: Shares, profile: Profile, context: Context) -> bool:
    """Whether a rank only seems to hold others up: another does, and it with it."""
    return _paced_by_another(at, own, context) or _outworked_by(at, own, held, profile, context) is not None


def _paced_by_another(at: int, own: Shares, context: Context) -> bool:
    """Whether a rank seems to have become slower as an equal on its host did, who holds others up much more: it waits for it in
    the calls of a tensor group, and both seem to compute for as long as the quicker one does.
    """
    factor = context.factor[at]
    alike = (context.equal == context.equal[at]) & (context.nodes == context.nodes[at]) & (context.factor >= PACED_ALIKE * factor)
    return bool(context.equal[at] >= 0 and factor >= SLOWER and np.any(own[alike] * PACED_SHARE > own[at]))


def _outworked_by(at: int, own: Shares, held: Shares, profile: Profile, context: Context) -> int | None:
    """Which rank of another stage of the same pipeline works so much more, beside its equals, than a rank does, and holds others
    up in as many looks: at the gradients all that is late in a pipeline is waited for, whoever of it made it late. Nobody's where
    the rank's own calls say that it is slow.
    """
    if context.replica is None or context.replica[at] < 0 or context.equal[at] < 0 or _measured(at, own, context):
        return None
    worked = profile.worked()
    fellows = (context.replica == context.replica[at]) & (context.equal >= 0) & (context.equal != context.equal[at])
    excess = {n: float(worked[n]) - _others(worked, n, context) for n in (at, *np.flatnonzero(fellows).tolist())}
    more = [n for n in excess if n != at and excess[n] >= OUTWORKED * max(excess[at], 0.0) and held[n] >= held[at]]
    return max(more, key=lambda n: excess[n], default=None)


def _beside(finding: Finding, worst: Finding, context: Context) -> bool:
    """Whether a culprit beside a worse one is one: who is held up in ways the looks do not show seems to hold others up."""
    factors = context.factor[list(finding.members)]
    slower = bool(np.all(factors >= SLOWER))
    if finding.kind is Kind.COMPUTE and np.all(factors < AS_EVER):
        return False  # the times between its calls say that it works as fast as ever
    return finding.share >= (SECOND_SLOWER if slower else SECOND) * worst.share


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
    return before.of(profile.processes, before.own(), 0.0)


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
