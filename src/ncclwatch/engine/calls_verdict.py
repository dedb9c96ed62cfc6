"""Verdicts from the calls plane: ranks that have not called what the others wait in, and ranks that called something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ncclwatch.engine import explain
from ncclwatch.engine.calls import CallsFinding
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.ledger import Signature
from ncclwatch.engine.waits import RankNode, Waits
from ncclwatch.model.events import Function
from ncclwatch.model.verdict import Culprit, OperationRef, Verdict, VerdictClass


def judge_calls(job: Job, findings: Mapping[int, CallsFinding], waits: Waits, still: float, time: float) -> Verdict | None:
    """A verdict where the calls alone prove one: an inconsistent call (H2), or a free rank that has not called (H1)."""
    for number, finding in findings.items():
        if finding.inconsistent:
            return _inconsistent(job, job.groups[number], finding, still, time)
    waiting = {wait.waiter for wait in waits.edges}
    culprits: list[Culprit] = []
    evidence: list[str] = []
    # A rank may be behind on one communicator because it waits in another: then it is the other's victim.
    held_up = {(number, rank) for number, finding in findings.items() for rank in finding.waiting}
    for number, finding in findings.items():
        group = job.groups[number]
        for rank in finding.behind:
            member = _member(group, rank)
            if member is None or RankNode(member.index) in waiting or _waits_elsewhere(job, member, held_up, number):
                continue
            culprits.append(_culprit(group, rank, member, finding, "has not called the operation the others have called"))
            evidence += behind_lines(job, group, finding)
    if not culprits:
        return None
    victims = explain.fellows(job, culprits) - {m.index for m in job.members if any(c.pid == m.info.pid for c in culprits)}
    verdict = explain.build(job, VerdictClass.NOT_ENTERED, culprits, victims, evidence, still=still, time=time, confidence=0.9)
    return replace(verdict, planes=("state", "calls"))


def _waits_elsewhere(job: Job, member: Member, held_up: set[tuple[int, int]], but: int) -> bool:
    own = ((job.group_of[member.index, c.address], c.rank) for c in member.last.communicators)
    return any(place in held_up and place[0] != but for place in own)


def add_calls_evidence(job: Job, verdict: Verdict, findings: Mapping[int, CallsFinding]) -> Verdict:
    """Put what the calls plane knows of the accused ranks beside the evidence of the state plane."""
    accused = {culprit.pid for culprit in verdict.culprits}
    lines: list[str] = []
    for number, finding in findings.items():
        group = job.groups[number]
        members = (_member(group, rank) for rank in finding.behind)
        if any(member is not None and member.info.pid in accused for member in members):
            lines += behind_lines(job, group, finding)
    if not lines:
        return verdict
    return replace(verdict, evidence=(*verdict.evidence, *lines), planes=("state", "calls"))


def behind_lines(job: Job, group: Group, finding: CallsFinding) -> list[str]:
    """Who has not called what, as evidence."""
    what = finding.called.text() if finding.called else "the operation"
    behind = ", ".join(job.rank_name(group.id, rank) for rank in finding.behind)
    return [
        f"calls on communicator {group.hash:016x}: {behind} has not called #{finding.sequence} ({what}), "
        f"{len(finding.waiting)} other ranks have"
    ]


def _inconsistent(job: Job, group: Group, finding: CallsFinding, still: float, time: float) -> Verdict:
    groups = sorted(finding.groups.items(), key=lambda item: -len(item[1]))
    tie = len(groups[0][1]) == len(groups[1][1])
    odd = [(rank, signature) for signature, ranks in groups[0 if tie else 1 :] for rank in ranks]
    culprits = []
    for rank, signature in odd:
        member = _member(group, rank)
        if member is not None:
            reason = f"called {signature.text()} as #{finding.sequence}, unlike its peers"
            culprits.append(_culprit(group, rank, member, finding, reason, signature))
    evidence = [
        f"{', '.join(job.rank_name(group.id, rank) for rank in ranks)} called {signature.text()} as #{finding.sequence}"
        for signature, ranks in groups
    ]
    if tie:
        evidence.append("the groups are equally large: a tie")
    victims = {member.index for rank, (member, _) in group.members.items() if rank not in dict(odd)}
    verdict = explain.build(
        job, VerdictClass.INCONSISTENT, culprits, victims, evidence, still=still, time=time, confidence=0.5 if tie else 0.95
    )
    return replace(verdict, planes=("state", "calls"))


def _culprit(
    group: Group, rank: int, member: Member, finding: CallsFinding, reason: str, signature: Signature | None = None
) -> Culprit:
    own = group.members[rank][1]
    called = signature or finding.called
    known = called is not None and called.function in Function._value2member_map_
    name = Function(called.function).name.title().replace("_", "") if called is not None and known else ""
    return Culprit(
        rank=member.rank,
        comm_rank=rank,
        host=member.info.host,
        pid=member.info.pid,
        gpu=own.device,
        communicator=group.reference(),
        operation=OperationRef(name, finding.sequence),
        reason=reason,
    )


def _member(group: Group, rank: int) -> Member | None:
    found = group.members.get(rank)
    return found[0] if found else None
