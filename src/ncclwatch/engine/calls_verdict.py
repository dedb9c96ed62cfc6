"""Verdicts from the calls plane: ranks that have not called what the others wait in, and ranks that called something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ncclwatch.engine import explain
from ncclwatch.engine.calls import CallsFinding
from ncclwatch.engine.connections import ConnectionKey
from ncclwatch.engine.counted import launched
from ncclwatch.engine.edges import RankNode, Wait, Waits, Why, enough_pairs
from ncclwatch.engine.habits import LEFT_OUT, Orders, deviation_line, find_deviations
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.ledger import Ledger, Signature
from ncclwatch.engine.messages import Messages, beside_unobserved
from ncclwatch.model.events import Function
from ncclwatch.model.verdict import Culprit, OperationRef, Verdict, VerdictClass

ASKED_OF_THE_BEHIND = 64
"""So many of the ranks that have not called an operation are asked whether they wait in an earlier one: one is enough."""


def judge_calls(
    job: Job,
    findings: Mapping[int, CallsFinding],
    messages: Messages,
    orders: Orders | None,
    waits: Waits,
    still: float,
    time: float,
) -> Verdict | None:
    """A verdict where the calls alone prove one: an inconsistent call (H2), or a free rank that has not called (H1)."""
    for number, finding in findings.items():
        if finding.inconsistent:
            return _inconsistent(job, job.groups[number], finding, orders, still, time)
    blocked = call_waits(job, findings, messages) | waits.waiting()
    culprits: list[Culprit] = []
    evidence: list[str] = []
    for number, finding in findings.items():
        group = job.groups[number]
        if before_is_open(group, finding, waits):
            continue
        for rank in finding.behind:
            member = group.holder(rank)
            if member is None or member.gone or member.index in blocked or explain.names(culprits, member):
                continue
            operation = operation_of(finding.called, finding.sequence)
            culprits.append(culprit_of(group, rank, member, operation, "has not called the operation the others have called"))
            evidence += behind_lines(job, group, finding)
    if not culprits:
        return None
    victims = explain.other_fellows(job, culprits)
    verdict = explain.build(job, VerdictClass.NOT_ENTERED, culprits, victims, evidence, still=still, time=time, confidence=0.9)
    return replace(verdict, planes=("state", "calls"))


def leave_out_contradicted(job: Job, findings: Mapping[int, CallsFinding], ledger: Ledger) -> None:
    """Take back that ranks have not called what others have, where NCCL's own counts say that they have called as often.

    A record may be lost, or late, at the very end of what was called; what was called is counted in the process itself.
    """
    for number, finding in findings.items():
        group = job.groups[number]
        if not finding.behind or not (_counts_collectives(group) or not _has_messages(group, ledger)):
            continue
        counts = {rank: launched(*group.members[rank]) for rank in (*finding.behind, *finding.waiting) if rank in group.members}
        most = max((count for rank in finding.waiting if (count := counts.get(rank)) is not None), default=None)
        if most is not None:
            finding.behind = [rank for rank in finding.behind if (count := counts.get(rank)) is None or count < most]


def _counts_collectives(group: Group) -> bool:
    """Whether NCCL counts collectives alone on all ranks: else launches count, and those of messages among them."""
    return all(own.sequence_numbers for _, own in group.members.values())


def _has_messages(group: Group, ledger: Ledger) -> bool:
    places = (ledger.place(member.info.host, member.info.pid, own.address) for member, own in group.members.values())
    return any(place in ledger.point_to_point for place in places)


def add_call_waits(job: Job, findings: Mapping[int, CallsFinding], waits: Waits) -> bool:
    """Draw the waits that only the calls show, and say whether there were any.

    A rank of which memory shows nothing (its transports are hidden, or its transfers have not begun) and that has called a
    collective another has not called waits for that one. A rank that memory shows at work may have called far ahead: for it the
    calls say nothing.
    """
    if not any(finding.behind for finding in findings.values()):
        return False
    seen = waits.busy()
    added = False
    for number, finding in findings.items():
        group = job.groups[number]
        behind = [member for rank in finding.behind if (member := group.holder(rank)) is not None]
        waiting = [m for rank in finding.waiting if (m := group.holder(rank)) is not None and m.index not in seen]
        if not behind or not waiting or before_is_open(group, finding, waits):
            continue
        operation = operation_of(finding.called, finding.sequence)
        for waiter, other in enough_pairs(waiting, behind):
            key = ConnectionKey(number, 0, group.ranks[other.index], group.ranks[waiter.index], False)
            text = partial(_call_wait_text, waiter, other, finding)
            waits.added.append(
                Wait(RankNode(waiter.index), RankNode(other.index), Why.NOT_CALLED, key, text, operation=operation)
            )
        added = True
    return added


def before_is_open(group: Group, finding: CallsFinding, waits: Waits) -> bool:
    """Whether ranks that have not called the operation are still seen waiting in an earlier one of the same communicator.

    Then it is that one which holds the group up, and the others that have not called may stand in it unseen: not having called
    says nothing against them. (A link cut below an operation that a few ranks had already finished looks like this.)
    """
    behind = {member.index for rank in finding.behind if (member := group.holder(rank)) is not None}
    some = sorted(behind & waits.waiting())[:ASKED_OF_THE_BEHIND]
    return any(
        wait.waiter == RankNode(index) and wait.key.group == group.id and not wait.key.point_to_point
        for index, own in waits.of(some).items()
        for wait in own
    )


def _call_wait_text(waiter: Member, other: Member, finding: CallsFinding) -> str:
    what = finding.called.text() if finding.called else "an operation"
    return f"{waiter.label} has called #{finding.sequence} ({what}) and waits for {other.label}, {Why.NOT_CALLED}"


def call_waits(job: Job, findings: Mapping[int, CallsFinding], messages: Messages) -> set[int]:
    """Members that wait for somebody by what was called: they may be behind elsewhere for that very reason.

    A rank waits in a collective that another has not called, and in a Send or Recv that its peer has not matched; it may wait
    where the calls do not tell, or beside a rank that nobody observed.
    """
    blocked = {
        member.index
        for number, finding in findings.items()
        for rank in finding.waiting
        if (member := job.groups[number].holder(rank)) is not None
    }
    behind = (m for number, finding in findings.items() for rank in finding.behind if (m := job.groups[number].holder(rank)))
    for member in behind:
        if member.index not in blocked and (messages.may_wait(member) or beside_unobserved(job, member)):
            blocked.add(member.index)
    return blocked


def add_calls_evidence(job: Job, verdict: Verdict, findings: Mapping[int, CallsFinding]) -> Verdict:
    """Put what the calls plane knows of the accused ranks beside the evidence of the state plane."""
    lines: list[str] = []
    for number, finding in findings.items():
        group = job.groups[number]
        members = (group.holder(rank) for rank in finding.behind)
        if any(member is not None and explain.names(verdict.culprits, member) for member in members):
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


def _inconsistent(job: Job, group: Group, finding: CallsFinding, orders: Orders | None, still: float, time: float) -> Verdict:
    groups = sorted(finding.groups.items(), key=lambda item: -len(item[1]))
    wrong, how = finding.odd_ones
    odd = {rank: signature for signature in wrong for rank in finding.groups[signature]}
    evidence = [
        f"{', '.join(job.rank_name(group.id, rank) for rank in ranks)} called {signature.text()} as #{finding.odd_sequence}"
        for signature, ranks in groups
    ]
    if finding.ago:
        evidence.append(f"the ranks have called up to {finding.ago} operations since: NCCL does not compare what ranks call")
    evidence += [how] if how else []
    tie = len(wrong) == len(groups)
    confidence = explain.TIE if tie else 0.75 if how else 0.95
    verdict_class = VerdictClass.INCONSISTENT
    holders = {group.members[rank][0].index: rank for rank in odd if rank in group.members}
    deviations = find_deviations(job, set(holders), orders, proper=tie)
    if deviations:
        # What was called in the place of another may be what used to come next: then the other was left out.
        evidence += [deviation_line(job, job.member(index), deviation) for index, deviation in deviations.items()]
        if tie:
            odd, confidence = {holders[index]: odd[holders[index]] for index in deviations}, 0.8
        if len(deviations) == len(odd) and all(deviation.left_out for deviation in deviations.values()):
            verdict_class = VerdictClass.NOT_ENTERED
    culprits = []
    for rank, signature in odd.items():
        member = group.holder(rank)
        if member is not None:
            reason = f"called {signature.text()} as #{finding.odd_sequence}, unlike its peers"
            if verdict_class is VerdictClass.NOT_ENTERED:
                reason = LEFT_OUT
            culprits.append(culprit_of(group, rank, member, operation_of(signature, finding.odd_sequence), reason))
    victims = {member.index for rank, (member, _) in group.members.items() if rank not in odd}
    verdict = explain.build(job, verdict_class, culprits, victims, evidence, still=still, time=time, confidence=confidence)
    return replace(verdict, planes=("state", "calls"))


def culprit_of(group: Group, rank: int, member: Member, operation: OperationRef, reason: str) -> Culprit:
    """A rank of a communicator that is named for what it called, or has not called."""
    return Culprit(
        rank=member.rank,
        comm_rank=rank,
        host=member.info.host,
        pid=member.info.pid,
        gpu=group.members[rank][1].device,
        communicator=group.reference(),
        operation=operation,
        reason=reason,
    )


def operation_of(called: Signature | None, sequence: int | None) -> OperationRef:
    """A collective that was called, as a verdict names it."""
    known = called is not None and called.function in Function._value2member_map_
    name = Function(called.function).name.title().replace("_", "") if called is not None and known else ""
    return OperationRef(name, sequence)
