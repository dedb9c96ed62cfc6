"""What CPU limits of control groups add to a verdict: who has used up the share of a period stands still for the rest of it."""

from __future__ import annotations

from dataclasses import replace
from statistics import median_low

from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.topology.labels import compressed
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass, places, stands_in

HELD_BACK = 0.25
"""From this part of a limit's periods on a rank is held back."""
HELD_TIMES = 2.0
"""A rank that is held back so many times as much as most others is held back by a limit of its own."""
CRAWL_TIMES, CRAWL_S = 6.0, 60.0
"""Whoever is held back may stand still so many times as long as others, and up to so many seconds: it runs in each period."""
FEW_PERIODS = 10
"""A second of a limit's usual periods (100 ms): of fewer no share can be told."""
RAISE_LIMIT = "on {host}: raise the CPU limit of process {pid} (of its container or pod; `cat /proc/{pid}/cgroup`, cpu.max there)"
RAISE_LIMITS = "raise the CPU limits of the job's containers or pods, or take them away"


def held_back(member: Member) -> float | None:
    """The part of the periods between its samples in which a limit held a process back; ``None`` where that is not known."""
    known = [sample.cpu_limit for sample in member.samples if sample.cpu_limit is not None]
    rise = known[-1].since(known[0]) if len(known) > 1 else None
    return None if rise is None else min(1.0, rise[1] / max(1, rise[0]))


def add_cpu_limits(job: Job, verdict: Verdict) -> Verdict:
    """A verdict that names ranks, with the limits that hold these back: what looks like standing still may be that."""
    named = places(verdict.culprits)
    held: list[tuple[Member, float]] = []
    for member in job.members if named and verdict.verdict_class.accuses else ():
        part = held_back(member) if stands_in(named, member.info.host, member.info.pid, member.rank) else None
        if part is not None and part >= HELD_BACK:
            held.append((member, part))
    if not held:
        return verdict
    lines = [f"{member.label}: a CPU limit holds it back in {part:.0%} of the limit's periods" for member, part in held]
    steps = [RAISE_LIMIT.format(host=member.info.host, pid=member.info.pid) for member, _ in held]
    if len(held) == len(verdict.culprits):
        who, least = "it" if len(held) == 1 else "them", min(part for _, part in held)
        verdict = replace(verdict, summary=f"{verdict.summary}; a CPU limit holds {who} back in {least:.0%} of its periods")
    return replace(
        verdict, evidence=(*lines, *verdict.evidence), next_steps=tuple(dict.fromkeys((*steps, *verdict.next_steps)))
    )  # fmt: skip


def crawl_patience(patience: float) -> float:
    """For how long whoever is held back may stand still, where others may for ``patience`` seconds."""
    return max(patience, min(CRAWL_TIMES * patience, CRAWL_S))


def merely_crawls(job: Job, verdict: Verdict, pause: Verdict) -> Verdict | None:
    """What to say instead of a verdict on a standstill that names nobody but ranks that are held back, most others not, or links
    with such a rank at an end: ``pause`` (that it is too early to say anything) with the limits. ``None`` where it does not.
    """
    if verdict.verdict_class not in (VerdictClass.NOT_ENTERED, VerdictClass.HARDWARE):
        return None
    parts = {member.index: _held_back_of_late(member) for member in job.members}
    least = max(HELD_BACK, HELD_TIMES * median_low(parts.values()))
    found: dict[int, Member] = {}
    for culprit in verdict.culprits:
        slow = [member for member in _involved(job, culprit) if parts[member.index] >= least]
        if not slow:
            return None
        found |= {member.index: member for member in slow}
    crawling = [found[index] for index in sorted(found)]
    if not crawling:
        return None
    ranks = [member.rank for member in crawling if member.rank is not None]
    who = f"rank{'s' if len(ranks) != 1 else ''} {compressed(ranks)}" if ranks else f"{len(crawling)} processes"
    text = f"a CPU limit holds {who} back in {min(parts[member.index] for member in crawling):.0%} of its periods"
    steps = [RAISE_LIMIT.format(host=member.info.host, pid=member.info.pid) for member in crawling]
    return replace(pause, summary=f"{pause.summary}; {text}", next_steps=(*dict.fromkeys(steps), *pause.next_steps))


def _held_back_of_late(member: Member) -> float:
    """:func:`held_back`; of a process under whose limit hardly a period has passed meanwhile, of all that have.

    (Seen on Linux 6.18: for seven seconds no thread of a process with a fiftieth of a CPU got any, nor did a period end.)
    """
    known = [sample.cpu_limit for sample in member.samples if sample.cpu_limit is not None]
    of_late = held_back(member) or 0.0
    if known and known[-1].periods and known[-1].periods - known[0].periods < FEW_PERIODS:
        return max(of_late, min(1.0, known[-1].throttled / known[-1].periods))
    return of_late


def _involved(job: Job, culprit: Culprit) -> list[Member]:
    """The rank a culprit is; both ends where it is the end of a link, since either may keep that from carrying."""
    if culprit.link is None:
        named = places([culprit])
        return [member for member in job.members if stands_in(named, member.info.host, member.info.pid, member.rank)]
    from ncclwatch.engine.suspects import group_of

    group = group_of(job, culprit)
    ends = (culprit.link.source, culprit.link.destination) if group is not None else ()
    return [member for end in ends if group is not None and (member := group.holder(end)) is not None]


def all_held_back(job: Job) -> str:
    """What to say where CPU limits hold at least half of all ranks back; empty where they do not."""
    parts = [part for member in job.members if (part := held_back(member)) is not None and part >= HELD_BACK]
    if 2 * len(parts) < len(job.members) or not parts:
        return ""
    return (
        f"CPU limits hold {len(parts)} of {len(job.members)} ranks back, in {min(parts):.0%} to {max(parts):.0%} of their periods"
    )
