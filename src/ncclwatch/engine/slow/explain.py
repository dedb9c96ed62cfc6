"""A judgement of slowness as a verdict: who, where, since when, what it costs, and how that is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ncclwatch.engine.beside import all_held_back
from ncclwatch.engine.slow.classify import Cause, Cost, Judgement, cause, costs
from ncclwatch.engine.slow.detect import ENOUGH, FEWEST_HEALTHY, LEAST_RATIO, SlowDown
from ncclwatch.engine.slow.findings import Finding
from ncclwatch.engine.slow.lateness import MOSTLY
from ncclwatch.model.job import Group, Job, Member
from ncclwatch.model.joined import hides
from ncclwatch.model.next_steps import LOADER_TOO, RAISE_LIMIT, RAISE_LIMITS, SLOW_STEPS
from ncclwatch.model.topology import DATA_WORDS, PARALLEL, Role, Topology
from ncclwatch.model.verdict import (
    CommunicatorRef,
    Culprit,
    LinkRef,
    OperationRef,
    SlowCause,
    Step,
    StepKind,
    Verdict,
    VerdictClass,
    places,
    stands_in,
)  # fmt: skip
from ncclwatch.model.verdict import SlowKind as Kind
from ncclwatch.text import compressed

PLAIN_RATIO = 1.0
"""A job that takes twice as long is said to at once: its iterations may take minutes. Unit: ratio beyond 1. From: chosen."""
MANY = 3
"""Bound: from so many ranks on they are named together."""
MOST_LINES = 16
"""Bound: lines of evidence."""
SUREST = 0.99
"""Bound: no estimate from samples is surer than this, whatever its odds."""

WORDS = {
    VerdictClass.SLOW_COMPUTATION: "slow computation",
    VerdictClass.SLOW_COMMUNICATION: "slow communication",
    VerdictClass.SLOW_MIXED: "slow computation and communication",
}

TERM_WORDS = {
    "activity": "works in the lost time and does not wait",
    "ends": "the waits end there",
    "late": "its host thread begins iterations late",
    "throttled": "a CPU limit holds it back",
    "asleep": "its threads want CPUs less than its neighbours'",
    "delayed": "round trips on its links have grown",
}
"""The terms of the likelihood (terms.TERMS) in words."""
BEFORE_ALL = " in forward of micro-batch 0"


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
    every = costs(findings, judgement.slow, judgement.iteration_s, judgement.gpus.costs)
    told = [
        _Told(job, judgement, topology, finding, [members[at] for at in finding.members], cost, cause(judgement, finding))
        for finding, cost in zip(findings, every, strict=True)
    ]
    culprits: list[Culprit] = []
    for one in told:
        for member in one.blamed:
            if not stands_in(places(culprits), member.info.host, member.info.pid, member.rank):
                culprits.append(one.culprit(member))
    planes = {"state": True, "calls": judgement.iteration_s is not None, "device": judgement.gpus.told}
    link = next((one for one in told if one.finding.kind is Kind.LINK), None)
    named = places(culprits)
    waiting = [member for at, member in members.items() if judgement.profile.waits[at] > 0.1]
    victims = (m.rank for m in waiting if m.rank is not None and not stands_in(named, m.info.host, m.info.pid, m.rank))
    return Verdict(
        verdict_class=judgement.verdict_class, summary=_summary(told, judgement), culprits=tuple(culprits),
        victims=tuple(sorted(victims)),
        # Where others happen to wait most changes from look to look; only a link belongs to one communicator.
        communicator=link.reference if link is not None else None,
        stage=culprits[0].stage if culprits else "", link=link.link if link is not None else None, since=judgement.since,
        time=job.time, confidence=min(SUREST, round(findings[0].confidence, 2)),
        evidence=_evidence(told, judgement), unobserved=_unobserved(job, told, judgement),
        next_steps=tuple(dict.fromkeys(step for one in told for step in one.next_steps())),
        planes=tuple(plane for plane, known in planes.items() if known),
        rules=tuple(dict.fromkeys(finding.rule for finding in findings if finding.rule)), trail=tuple(_trail(told, members)),
    )  # fmt: skip


def unlocated(job: Job, running: Verdict, slow: SlowDown) -> Verdict:
    """That a job runs slower and nobody stands out; only of what is plain, and lasts long enough to know what is usual."""
    least = ENOUGH * (LEAST_RATIO - 1)
    if slow.ratio < least or (slow.ratio < PLAIN_RATIO and slow.iterations < FEWEST_HEALTHY):
        return running
    hidden = any(map(hides, job.members))
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


@dataclass(slots=True)
class _Told:
    """A finding with what is said of it: whom it blames, what it costs and why."""

    job: Job
    judgement: Judgement
    topology: Topology | None
    finding: Finding
    blamed: list[Member]
    cost: Cost | None
    cause: Cause

    @property
    def names(self) -> str:
        return _names(self.blamed)

    @property
    def awaited(self) -> list[tuple[Group | None, str]]:
        """Communicators and operations in which others waited for the culprit, those of most looks first."""
        every = (self.judgement.profile.operations.get(key, Counter()) for key in self.finding.keys)
        total = sum(every, Counter[tuple[int, str]]())
        return [(self.job.groups.get(number), operation) for (number, operation), _ in total.most_common()]

    @property
    def group(self) -> Group | None:
        if self.finding.link is not None:
            return self.job.groups.get(self.finding.link.group)
        return next((group for group, _ in self.awaited), None)

    @property
    def reference(self) -> CommunicatorRef | None:
        """That communicator with its role, which its hash would not tell: two may have one."""
        if (group := self.group) is None:
            return None
        role = self.role(group)
        return replace(group.reference(), role="" if role is Role.UNSURE else str(role))

    @property
    def link(self) -> LinkRef | None:
        place = self.finding.link
        return LinkRef(place.source, place.destination, "net", place.channels) if place is not None else None

    def role(self, group: Group | None) -> Role:
        known = self.topology.by_id.get(group.id) if self.topology is not None and group is not None else None
        return known.role if known is not None else Role.UNSURE

    def culprit(self, member: Member) -> Culprit:
        finding, group, awaited = self.finding, self.group, self.awaited
        place = (group.ranks.get(member.index), group.hash) if group is not None else None
        own = next((c for c in member.last.communicators if (c.rank, c.hash) == place), None)
        return Culprit(
            rank=member.rank, comm_rank=own.rank if own else None, host=member.info.host, pid=member.info.pid,
            gpu=own.device if own else None, communicator=self.reference if own else None,
            operation=OperationRef(awaited[0][1]) if awaited and awaited[0][1] else None,
            stage=self.stage(member.rank), link=self.link,
            reason=f"{finding.kind}: {self.cause.text}" if self.cause.text else str(finding.kind),
        )  # fmt: skip

    def stage(self, rank: int | None) -> str:
        """Where in the iteration, as far as the looks tell."""
        waited_in = (self.operation_name(op, group) for group, op in self.awaited[:2])
        names, where, topology = ", ".join(filter(None, dict.fromkeys(waited_in))), "", self.topology
        if topology is not None and rank is not None and 0 <= rank < topology.world:
            if topology.stage[rank] >= 0:
                where += f", pipeline stage {int(topology.stage[rank])}"
            if topology.tensor_index[rank] >= 0 and (topology.layout.tp or 1) > 1:
                where += f", TP rank {int(topology.tensor_index[rank])}"
        if not self.finding.kind.computes:
            return names + where
        what = "compute" if self.finding.kind is Kind.COMPUTE else "host, between calls"
        return f"{what}{self.held_pass()}{where}" + (f" (others wait in {names})" if names else "")

    def operation_name(self, op: str, group: Group | None) -> str:
        """What others wait in; shared memory and NVLink show which group it is, and not which operation."""
        role = self.role(group)
        if role is Role.PIPELINE:
            return "pipeline transfer"
        if role not in PARALLEL:
            return f"{op or 'an operation'} of {group.nranks} ranks" if group else op
        moved = f" ({DATA_WORDS.get(op, 'parameters')})" if role is Role.DATA and op else ""
        return f"{role}-parallel {op or 'operation'}{moved}"

    def held_pass(self) -> str:
        """`` in backward of micro-batch 5`` where it holds others up in one pass, or one kind of pass, and not throughout."""
        seen = sum((self.judgement.profile.passes.get(key, Counter()) for key in self.finding.keys), Counter[str]())
        kinds: Counter[str] = Counter()
        for text, times in seen.items():
            kinds[text.partition(" of ")[0]] += times
        for counted, share in ((seen, MOSTLY), (kinds, 0.9)) if seen.total() >= ENOUGH else ():
            text, times = counted.most_common(1)[0]
            if times >= share * seen.total():
                return f" in {text}"
        return ""

    def evidence(self) -> Iterator[str]:
        finding, judgement, names = self.finding, self.judgement, self.names
        profile = judgement.profile
        what = f"link {' → '.join(member.label for member in self.blamed)}" if finding.link else f"{names}: {finding.kind}"
        # Who is judged by its late starts is not by looks: how many of them were late is said below.
        seen = "" if judgement.starts_late(finding) else f", in {min(finding.looks, profile.looks)} of {profile.looks} samples"
        price = f"; it {self.cost.text()}" if self.cost is not None else ""
        yield f"{what} holds the job up for {finding.share:.0%} of all ranks' time{seen}{price}"
        if finding.kind.computes:
            for at, member in zip(finding.members[:4], self.blamed, strict=False):
                busy, waits = profile.busy[at], profile.waits[at]
                yield f"{member.label} works in {busy:.0%} of the samples and waits for others in {waits:.0%}"
                if (start := judgement.gpus.starts.get(member.info.key)) is not None:
                    yield f"{member.label}: {start.text()}"
        if self.cause.text:
            yield f"{names}: {self.cause.text}"

    def next_steps(self) -> Iterator[str]:
        kind, first = self.finding.kind, self.blamed[0].info
        texts = [SLOW_STEPS[kind]]
        if kind is Kind.COMPUTE and self.held_pass() == BEFORE_ALL:
            texts.append(LOADER_TOO)
        if self.cause.word is SlowCause.THROTTLED:
            texts.insert(0, RAISE_LIMIT)
        yield from (text.format(host=first.host, pid=first.pid) for text in texts)


def _names(blamed: Sequence[Member], name: Callable[[Member], str] = lambda member: member.label) -> str:
    """The ``name`` of each in a row, or ``ranks 0-7`` where they are many."""
    ranks = [member.rank for member in blamed if member.rank is not None]
    return f"ranks {compressed(ranks)}" if len(ranks) == len(blamed) >= MANY else ", ".join(map(name, blamed))


def _pace(slow: SlowDown) -> str:
    if slow.alone:
        return f"an iteration takes {slow.mean_s:.1f} s instead of {slow.normal_s:.2f} s, as none did before"
    return f"iterations take {slow.mean_s:.2f} s instead of {slow.normal_s:.2f} s ({slow.ratio:+.0%})"


def _summary(told: Sequence[_Told], judgement: Judgement) -> str:
    slow, parts = judgement.slow, []
    for one in told[:3]:
        names = _names(one.blamed, lambda member: f"rank {member.rank}" if member.rank is not None else member.label)
        if one.finding.link is not None and len(one.blamed) == 2:
            names = f"the link from {names.replace(', ', ' to ')}"
        word = f": {one.cause.word}" if one.cause.word else ""
        # With one culprit the loss says it all.
        price = f", {one.cost.text()}" if one.cost is not None and (slow is None or len(told) > 1) else ""
        parts.append(f"{names} ({one.finding.kind}{word}{price})")
    pace = "as long as the job has been watched"
    if slow is not None:
        pace = f"{_pace(slow)}: {slow.lost_share:.0%} of the time is lost"
    return f"{WORDS[judgement.verdict_class]}: the others wait for {'; '.join(parts)}; {pace}"


def _evidence(told: Sequence[_Told], judgement: Judgement) -> tuple[str, ...]:
    slow, lines = judgement.slow, [line for one in told for line in one.evidence()]
    if slow is not None:
        lines.insert(
            0,
            f"iteration time {slow.mean_s:.3f} s over {slow.iterations} iteration{'s' * (slow.iterations > 1)}, "
            f"{slow.slow} slow; normally {slow.normal_s:.3f} s: {slow.mean_s - slow.normal_s:.3f} s an iteration are lost",
        )
    return (*lines[: MOST_LINES - len(judgement.gpus.paths)], *judgement.gpus.paths)


def _unobserved(job: Job, told: Sequence[_Told], judgement: Judgement) -> tuple[str, ...]:
    tied = [one for one in told if len(one.blamed) > 1 and one.finding.kind is Kind.COMPUTE and all(map(hides, one.blamed))]
    lines = [f"which of {one.names} it is: what joins them inside the node hides that" for one in tied]
    lines += judgement.gpus.unobserved
    if not judgement.gpus.told:
        lines.append("when GPUs begin and end is inferred from NCCL's counters; kernels themselves are not timed")
    if missing := sum(len(group.missing) for group in job.groups.values()):
        lines.append(f"{missing} ranks of communicators were not observed")
    if judgement.slow is None:
        lines.append("no healthy past was seen: ranks are compared with ranks that do equal work")
    return tuple(lines)


def _trail(told: Sequence[_Told], members: Mapping[int, Member]) -> Iterator[Step]:
    """How the candidates were weighed: what speaks for those that are named, and which others lost."""
    for one in told:
        for term, part in one.finding.weighed:
            text = f"{one.names}: {TERM_WORDS[term]} ({part:+.1f} in the logarithm of the odds)"
            yield Step(StepKind.FACT, one.finding.rule, text)
    for one in told:
        for kind, rival, chance in one.finding.rivals:
            held = [members[at] for at in rival if at in members]
            who = f"{_names(held)} ({kind})" if held else "nobody"
            yield Step(StepKind.LOST, one.finding.rule, f"{who}: {chance:.1%}", one.finding.rule)
    for one in told:
        text = f"{one.names} ({one.finding.kind}): {one.finding.confidence:.1%}"
        yield Step(StepKind.STANDS, one.finding.rule, text)
