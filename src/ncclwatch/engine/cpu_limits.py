"""What CPU limits of control groups add to a verdict: who has used up the share of a period stands still for the rest of it."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.engine.job import Job, Member
from ncclwatch.model.verdict import Verdict, places, stands_in

HELD_BACK = 0.25
"""From this part of a limit's periods on a rank is held back."""
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


def all_held_back(job: Job) -> str:
    """What to say where CPU limits hold at least half of all ranks back; empty where they do not."""
    parts = [part for member in job.members if (part := held_back(member)) is not None and part >= HELD_BACK]
    if 2 * len(parts) < len(job.members) or not parts:
        return ""
    return (
        f"CPU limits hold {len(parts)} of {len(job.members)} ranks back, in {min(parts):.0%} to {max(parts):.0%} of their periods"
    )
