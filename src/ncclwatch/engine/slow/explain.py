"""A judgement of slowness as a verdict: who, where, since when, what it costs, and how that is known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ncclwatch.engine.beside import RAISE_LIMITS, all_held_back
from ncclwatch.engine.connections import is_hidden
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.slow.classify import cause, classify, costs, held_back_alone, short_cause, starts_late, works_slower
from ncclwatch.engine.slow.findings import Finding, Kind
from ncclwatch.engine.topology.labels import DATA_WORDS
from ncclwatch.engine.topology.model import Role, Topology
from ncclwatch.engine.verdict import RAISE_LIMIT
from ncclwatch.model.verdict import (
    CommunicatorRef,
    Culprit,
    LinkRef,
    OperationRef,
    Step,
    StepKind,
    Verdict,
    VerdictClass,
    places,
    stands_in,
)  # fmt: skip
from ncclwatch.text import compressed

if TYPE_CHECKING:
    from ncclwatch.engine.slow.detect import SlowDown
    from ncclwatch.engine.slow.watch import Judgement

WORTH_SAYING, FEWEST_ITERATIONS = 0.15, 8
"""A job that is so much slower than it was, for so many iterations, is said to be, also where nobody is named. Unit: share,
iterations. From: chosen: three times the least slow-down, as long as it takes to know what is usual.
"""
PLAIN_RATIO = 1.0
"""One that takes twice as long is from the first moment on that counts as a slow-down: its iterations may take minutes.
Unit: ratio beyond 1. From: chosen.
"""

WORDS = {
    VerdictClass.SLOW_COMPUTATION: "slow computation",
    VerdictClass.SLOW_COMMUNICATION: "slow communication",
    VerdictClass.SLOW_MIXED: "slow computation and communication",
}
NEXT_STEPS = {
    Kind.COMPUTE: "on {host}: compare clocks, power and temperature with a healthy GPU (nvidia-smi -q -d CLOCK,PERFORMANCE)",
    Kind.HOST: "on {host}: look at its CPU (top -H -p {pid}; cgroup cpu.stat) and at what it does (py-spy dump --pid {pid})",
    Kind.KERNEL: "on {host}: compare PCIe link width and speed with a healthy GPU (nvidia-smi -q -d PCIE)",
    Kind.PROXY: "on {host}: see whether the proxy threads get CPU (top -H -p {pid})",
    Kind.NIC: "on {host}: look at the NIC (ethtool -S, rdma statistic) for errors, pauses and its speed",
    Kind.LINK: "look at the path between the two hosts: port errors, retransmissions, congestion",
}

TERM_WORDS = {
    "activity": "works in the lost time and does not wait",
    "ends": "the waits end there",
    "late": "its host thread begins iterations late",
    "stretch": "the work between its calls takes longer",
    "throttled": "a CPU limit holds it back",
    "asleep": "its threads want CPUs less than its neighbours'",
    "delayed": "round trips on its links have grown",
}
"""The terms of the likelihood (terms.TERMS) in words."""

BEFORE_ALL = " in forward of micro-batch 0"
LOADER_TOO = (
    "on {host}: look at its data loader as well (py-spy dump --pid {pid}): the time goes before the iteration's first pass ends"
)


def holds(job: Job, judgement: Judgement) -> bool:
    """Whether all who are blamed are still there."""
    present = {member.info.key for member in job.members}
    return all(judgement.profile.processes[at] in present for finding in judgement.findings for at in finding.members)


def verdict(job: Job, judgement: Judgement, topology: Topology | None = None) -> Verdict:
    """The verdict of a judgement with at least one finding, which ``holds``."""
    findings = judgement.findings
    # Processes come and go: a judgement knows them by what they are, not by where they stand in a list.
    by_key = {member.info.key: member for member in job.members}
    members = {at: by_key[key] for at, key in enumerate(judgement.profile.processes) if key in by_key}
    kind = classify(judgement)
    culprits: list[Culprit] = []
    for finding in findings:
        for culprit in _culprits(job, members, judgement, finding, topology):
            if culprit.pid is None or not any(other.is_at(culprit.host, culprit.pid, culprit.rank) for other in culprits):
                culprits.append(culprit)
    link = next((f for f in findings if f.kind is Kind.LINK), None)
    group = _group(job, judgement, link or findings[0])
    named = places(culprits)
    victims = sorted(
        member.rank for at, member in members.items()
        if member.rank is not None
        and not stands_in(named, member.info.host, member.info.pid, member.rank)
        and judgement.profile.waits[at] > 0.1
    )  # fmt: skip
    return Verdict(
        verdict_class=kind,
        summary=_summary(kind, members, judgement),
        culprits=tuple(culprits),
        victims=tuple(victims),
        # Where others happen to wait most changes from look to look; only a link belongs to one communicator.
        communicator=_reference(group, topology) if link is not None else None,
        stage=culprits[0].stage if culprits else "",
        link=_link(link),
        since=judgement.since,
        time=max(member.last.wall_ns for member in job.members) / 1e9,
        confidence=_confidence(judgement),
        evidence=_evidence(members, judgement),
        unobserved=_unobserved(job, judgement),
        next_steps=_next_steps(members, judgement),
        planes=("state", *(("calls",) if judgement.iteration_s is not None else ()), *(("device",) if judgement.timed else ())),
        rules=tuple(dict.fromkeys(finding.rule for finding in findings if finding.rule)),
        trail=tuple(_trail(members, judgement)),
    )


def _trail(members: Mapping[int, Member], judgement: Judgement) -> Iterator[Step]:
    """How the candidates were weighed: what speaks for those that are named, and which others lost."""
    for finding in judgement.findings:
        names = _names([members[at] for at in finding.members], [members[at].label for at in finding.members])
        for term, part in finding.weighed:
            yield Step(StepKind.FACT, finding.rule, f"{names}: {TERM_WORDS[term]} ({part:+.1f} in the logarithm of the odds)")
    for finding in judgement.findings:
        for kind, rival, chance in finding.rivals:
            held = [members[at] for at in rival if at in members]
            who = _names(held, [member.label for member in held]) if held else "nobody"
            yield Step(StepKind.LOST, finding.rule, f"{who}{f' ({kind})' if held else ''}: {chance:.1%}", finding.rule)
    for finding in judgement.findings:
        names = _names([members[at] for at in finding.members], [members[at].label for at in finding.members])
        yield Step(StepKind.STANDS, finding.rule, f"{names} ({finding.kind}): {finding.confidence:.1%}")


def unlocated(job: Job, running: Verdict, slow: SlowDown) -> Verdict:
    """The verdict on a job that runs, with the word that it is slow though nobody stands out: nobody is accused."""
    if slow.ratio < WORTH_SAYING or (slow.ratio < PLAIN_RATIO and slow.iterations < FEWEST_ITERATIONS):
        return running
    hidden = any(is_hidden(own) for member in job.members for own in member.last.communicators)
    why = "what NVLink and the like join waits unseen" if hidden else "no rank holds the others up more than its equals do"
    steps = ["compare clocks, power and temperature of all GPUs: `nvidia-smi -q -d CLOCK,PERFORMANCE`"]
    if hidden:
        steps.append("start the job with the counter shim to see inside the nodes (docs/device-plane.md)")
    if limits := all_held_back(job):
        steps.insert(0, RAISE_LIMITS)
    return replace(
        running,
        evidence=(*running.evidence, limits) if limits else running.evidence,
        summary=f"{running.summary}, but slower than it did: {_pace(slow)}; who holds it up does not show",
        unobserved=(*running.unobserved, f"who makes the job slow: {why}"),
        next_steps=(*running.next_steps, *steps),
        planes=(*running.planes, "calls") if "calls" not in running.planes else running.planes,
    )


def _pace(slow: SlowDown) -> str:
    return f"iterations take {slow.mean_s:.2f} s instead of {slow.normal_s:.2f} s ({slow.ratio:+.0%})"


def _culprits(
    job: Job, members: Mapping[int, Member], judgement: Judgement, finding: Finding, topology: Topology | None
) -> list[Culprit]:  # fmt: skip
    group = _group(job, judgement, finding)
    reason = str(finding.kind) + (f": {why}" if (why := cause(judgement, finding)) else "")
    result = []
    for at in finding.members:
        member = members[at]
        own = next(
            (c for c in member.last.communicators if group and group.rank_of(member) == c.rank and c.hash == group.hash), None
        )
        result.append(
            Culprit(
                rank=member.rank,
                comm_rank=own.rank if own else None,
                host=member.info.host,
                pid=member.info.pid,
                gpu=own.device if own else None,
                communicator=_reference(group, topology) if own else None,
                operation=_operation(judgement, finding),
                stage=_stage(job, judgement, finding, topology, member.rank),
                link=_link(finding),
                reason=reason,
            )
        )
    return result


def _waited_in(judgement: Judgement, finding: Finding) -> Counter[tuple[int, str]]:
    """(group, operation) → looks in which others waited there for the culprit."""
    total: Counter[tuple[int, str]] = Counter()
    for key in finding.keys:
        total.update(judgement.profile.operations.get(key, Counter()))
    return total


def _group(job: Job, judgement: Judgement, finding: Finding) -> Group | None:
    if finding.link is not None:
        return job.groups.get(finding.link.group)
    common = _waited_in(judgement, finding).most_common(1)
    return job.groups.get(common[0][0][0]) if common else None


def _reference(group: Group | None, topology: Topology | None) -> CommunicatorRef | None:
    if group is None:
        return None
    role = _role(group, topology)
    return CommunicatorRef(f"{group.hash:016x}", group.nranks, str(role) if role else "")


def _role(group: Group | None, topology: Topology | None) -> Role | None:
    known = topology.by_id.get(group.id) if topology is not None and group is not None else None
    return known.role if known is not None and known.role is not Role.UNSURE else None


def _operation(judgement: Judgement, finding: Finding) -> OperationRef | None:
    common = _waited_in(judgement, finding).most_common(1)
    return OperationRef(common[0][0][1]) if common and common[0][0][1] else None


def _link(finding: Finding | None) -> LinkRef | None:
    if finding is None or finding.link is None:
        return None
    place = finding.link
    return LinkRef(place.source, place.destination, "net", place.channels)


_DOES = {
    Role.TENSOR: "tensor-parallel {op}",
    Role.PIPELINE: "pipeline transfer",
    Role.DATA: "data-parallel {op}",
    Role.CONTEXT: "context-parallel {op}",
    Role.EXPERT: "expert-parallel {op}",
}


def _operation_name(op: str, group: Group | None, role: Role | None) -> str:
    """What others wait in; shared memory and NVLink show which group it is, and not which operation."""
    if role not in _DOES:
        return f"{op or 'an operation'} of {group.nranks} ranks" if group else op
    name = _DOES[role].format(op=op or "operation")
    if role is Role.DATA and op:
        name += f" ({DATA_WORDS.get(op, 'parameters')})"
    return name


def _stage(job: Job, judgement: Judgement, finding: Finding, topology: Topology | None, rank: int | None) -> str:
    """Where in the iteration, as far as the looks tell."""
    names = []
    for (number, op), _ in _waited_in(judgement, finding).most_common(2):
        group = job.groups.get(number)
        name = _operation_name(op, group, _role(group, topology))
        if name and name not in names:
            names.append(name)
    where = ""
    if topology is not None and rank is not None and 0 <= rank < topology.world:
        if topology.stage[rank] >= 0:
            where += f", pipeline stage {int(topology.stage[rank])}"
        if topology.tensor_index[rank] >= 0 and (topology.layout.tp or 1) > 1:
            where += f", TP rank {int(topology.tensor_index[rank])}"
    held = _pass(judgement, finding)
    if finding.kind is Kind.COMPUTE:
        return f"compute{held}{where}" + (f" (others wait in {', '.join(names)})" if names else "")
    if finding.kind is Kind.HOST:
        return f"host, between calls{held}{where}" + (f" (others wait in {', '.join(names)})" if names else "")
    return ", ".join(names) + where


LOOKS = 3
"""Samples at a culprit below which no pass is named. Unit: samples. From: two may be one moment."""
MOSTLY = 0.75
"""Part of the looks at a culprit in which it was in one pass, for that pass to be named. Unit: share. From: chosen; it decides on
words alone.
"""


def _pass(judgement: Judgement, finding: Finding) -> str:
    """`` in backward of micro-batch 5`` where a culprit holds others up in one pass, or one kind of pass, and not throughout."""
    seen: Counter[str] = Counter()
    for key in finding.keys:
        seen.update(judgement.profile.passes.get(key, Counter()))
    total = sum(seen.values())
    if total < LOOKS:
        return ""
    kinds: Counter[str] = Counter()
    for text, times in seen.items():
        kinds[text.partition(" of ")[0]] += times
    for counted, share in ((seen, MOSTLY), (kinds, 0.9)):
        text, times = counted.most_common(1)[0]
        if times >= share * total:
            return f" in {text}"
    return ""


MANY = 3
"""Bound: from so many ranks on they are named together."""


def _names(blamed: Sequence[Member], each: Sequence[str]) -> str:
    """``each`` in a row, or ``ranks 0-7`` where they are many."""
    ranks = [member.rank for member in blamed if member.rank is not None]
    return f"ranks {compressed(ranks)}" if len(ranks) == len(blamed) >= MANY else ", ".join(each)


def _summary(kind: VerdictClass, members: Mapping[int, Member], judgement: Judgement) -> str:
    slow, findings = judgement.slow, judgement.findings
    parts = []
    every = costs(findings, slow, judgement.iteration_s, judgement.path_costs)
    for finding, cost in zip(findings[:3], every, strict=False):
        blamed = [members[at] for at in finding.members]
        names = _names(blamed, [f"rank {m.rank}" if m.rank is not None else f"pid {m.info.pid} on {m.info.host}" for m in blamed])
        if finding.link is not None and len(blamed) == 2:
            names = f"the link from {names.replace(', ', ' to ')}"
        # With one culprit the loss says it all.
        price = f", {cost.text()}" if cost is not None and (slow is None or len(findings) > 1) else ""
        word = f": {short}" if (short := short_cause(judgement, finding)) else ""
        parts.append(f"{names} ({finding.kind}{word}{price})")
    pace = "as long as the job has been watched"
    if slow is not None:
        lost = f"{slow.lost_share:.0%} of the time is lost"
        pace = f"{_pace(slow)}: {lost}"
    return f"{WORDS[kind]}: the others wait for {'; '.join(parts)}; {pace}"


def _evidence(members: Mapping[int, Member], judgement: Judgement) -> tuple[str, ...]:
    profile, slow = judgement.profile, judgement.slow
    lines: list[str] = []
    if slow is not None:
        lines.append(
            f"iteration time {slow.mean_s:.3f} s over {slow.iterations} iterations, {slow.slow} of them slow; normally "
            f"{slow.normal_s:.3f} s: {slow.mean_s - slow.normal_s:.3f} s an iteration are lost"
        )
    every = costs(judgement.findings, slow, judgement.iteration_s, judgement.path_costs)
    for finding, price in zip(judgement.findings, every, strict=True):
        names = _names([members[at] for at in finding.members], [members[at].label for at in finding.members])
        what = f"link {' → '.join(members[at].label for at in finding.members)}" if finding.link else f"{names}: {finding.kind}"
        # Who is judged by its late starts is not by looks: how many of them were late is said below.
        seen = "" if starts_late(judgement, finding) else f", in {min(finding.looks, profile.looks)} of {profile.looks} samples"
        lines.append(
            f"{what} holds the job up for {finding.share:.0%} of all ranks' time{seen}"
            + (f"; it {price.text()}" if price is not None else "")
        )
        if finding.kind.computes:
            for at in finding.members[:4]:
                name, busy, waits = members[at].label, profile.busy[at], profile.waits[at]
                lines.append(f"{name} works in {busy:.0%} of the samples and waits for others in {waits:.0%}")
                if (start := judgement.starts.get(members[at].info.key)) is not None:
                    lines.append(f"{name}: {start.text()}")
                factor, extra = judgement.factors[at], judgement.extras[at]
                if not math.isnan(factor):
                    grew = f"{factor:.2f} times what it was, plus {extra * 1e3:.1f} ms a call"
                    lines.append(f"{name}: the time between its calls is {grew}")
        elif works_slower(judgement, finding):
            factor = float(judgement.factors[list(finding.members)].mean())
            lines.append(f"{names}: work between calls takes {factor:.2f} times as long as well")
        if why := cause(judgement, finding):
            lines.append(f"{names}: {why}")
    return (*lines[: 16 - len(judgement.paths)], *judgement.paths)


def _unobserved(job: Job, judgement: Judgement) -> tuple[str, ...]:
    lines = []
    if not judgement.timed:
        lines.append("when GPUs begin and end is inferred from NCCL's counters; kernels themselves are not timed")
    elif judgement.no_path:
        lines.append(f"the critical path of an iteration: {judgement.no_path}")
    if judgement.clocks:
        lines.append(judgement.clocks)
    missing = sum(len(group.missing) for group in job.groups.values())
    if missing:
        lines.append(f"{missing} ranks of communicators were not observed")
    if judgement.slow is None:
        lines.append("no healthy past was seen: ranks are compared with ranks that do equal work")
    return tuple(lines)


SUREST = 0.99
"""Bound: no estimate from samples is surer than this, whatever its odds."""


def _confidence(judgement: Judgement) -> float:
    """The posterior probability that everybody named holds the job up: one decision, whatever it names."""
    return min(SUREST, round(judgement.findings[0].confidence, 2))


def _next_steps(members: Mapping[int, Member], judgement: Judgement) -> tuple[str, ...]:
    steps: list[str] = []
    for finding in judgement.findings:
        first = members[finding.members[0]].info if finding.members else None
        texts = [NEXT_STEPS[finding.kind]]
        if finding.kind is Kind.COMPUTE and _pass(judgement, finding) == BEFORE_ALL:
            texts.append(LOADER_TOO)
        if finding.kind.computes and held_back_alone(judgement.profile, judgement.context)[list(finding.members)].all():
            texts.insert(0, RAISE_LIMIT)
        steps += [text.format(host=first.host if first else "its host", pid=first.pid if first else "PID") for text in texts]
    return tuple(dict.fromkeys(steps))
