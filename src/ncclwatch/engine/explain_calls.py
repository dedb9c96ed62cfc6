"""Hypotheses from what was called: ranks that have not called what the others have, and ranks that called something else.

Calls are told by their records (the calls plane), by what is open at the two ends of a connection, and by NCCL's own counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from ncclwatch.engine.call_patterns import Deviation, deviation_fact, find_alone_in_deviating, find_deviations
from ncclwatch.engine.case import Case, Cause, Hypothesis, Suspect, naming
from ncclwatch.engine.edges import told, wait_facts
from ncclwatch.engine.evidence.base import Fact, FactKind, RankNode
from ncclwatch.engine.evidence.calls import CallsFinding, behind_text, operation_of
from ncclwatch.engine.evidence.disagreements import Disagreement
from ncclwatch.engine.explain_waits import beside_unobserved, ends_of
from ncclwatch.engine.job import Group, Job
from ncclwatch.engine.sends_and_receives import Messages
from ncclwatch.engine.stated import SHOWN
from ncclwatch.engine.suspects import caller, observed, peers
from ncclwatch.engine.unobservable_waits import before_is_open
from ncclwatch.model.verdict import VerdictClass

TIE = 0.5
"""Fact: confidence where all sides of a disagreement are named: as likely wrong as right."""


# --- ranks called something else ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Odd:
    """Ranks of a communicator that called something else than the others: whom to name, and the lines that say so."""

    group: Group
    suspects: list[Suspect]
    lines: list[str]
    tie: bool = False
    source: str = "state"


def _disagree(case: Case, found: list[_Odd], confidence: float, more: Iterable[Fact] = ()) -> Iterator[Hypothesis]:
    """Ranks that called something else than their peers. The side that broke its own pattern breaks a tie.

    What was called in the place of another may be what used to come next: then the other was left out.
    """
    suspects: dict[int | None, Suspect] = {}
    for one in (one for odd in found for one in odd.suspects):
        suspects.setdefault(one.index, one)
    if not suspects:
        return
    tie = any(odd.tie for odd in found)
    deviations = find_deviations(case.job, {index for index in suspects if index is not None}, case.known.orders, proper=tie)
    victims = {index for odd in found for index in odd.group.ranks}
    if tie and deviations:
        suspects, confidence, tie = {index: suspects[index] for index in deviations}, 0.8, False
    left_out = 0 < len(deviations) == len(suspects) and all(deviation.left_out for deviation in deviations.values())
    verdict_class = VerdictClass.NOT_ENTERED if left_out else VerdictClass.INCONSISTENT
    supports = [*(told(line, source=odd.source) for odd in found for line in odd.lines), *more]
    yield naming(
        verdict_class, [replace(one, cause=Cause.LEFT_OUT) if left_out else one for one in suspects.values()], victims,
        TIE if tie else confidence, [*supports, *_deviation_facts(case.job, deviations)], tie=tie,
        planes=tuple(dict.fromkeys(("state", *(odd.source for odd in found)))),
    )  # fmt: skip


def open_calls_differ(case: Case) -> Iterator[Hypothesis]:
    """The two ends of a connection work on different operations; where no vote or pattern tells which, both are named."""
    job, found = case.job, []
    for seen in case.facts.of(FactKind.OPEN_OTHER, Disagreement):
        members = {member.index: text for rank, text in seen.odd.items() if (member := seen.group.holder(rank)) is not None}
        own = case.waits.of(members) if members else {}
        suspects = [observed(job, job.member(index), own[index], (), Cause.CALLED_OTHER, text) for index, text in members.items()]
        found.append(_Odd(seen.group, suspects, [*seen.lines, seen.how], seen.tie))
    yield from _disagree(case, found, 0.9)


def counts_differ(case: Case) -> Iterator[Hypothesis]:
    """NCCL's counts of each collective contradict each other; where neither a vote nor a pattern tells which, all are named.

    What finished has left no trace but its count: ranks that called different things, though nothing of it is open.
    """
    if not case.waits.open:
        return
    job, ends = case.job, ends_of(case)
    at_ends = {node for sink in (*ends.cycles, *ends.ranks, *ends.beside_absent) for node in sink.nodes}
    at_ends |= {wait.waiter for sink in (*ends.unseen, *ends.links) for wait in sink.waits}
    indices = {node.index for node in at_ends if isinstance(node, RankNode)}
    found = []
    for seen in case.facts.of(FactKind.CALLED_OTHER, Disagreement):
        if not indices.isdisjoint(seen.group.ranks):
            suspects = []
            for rank, name in seen.odd.items():
                suspect = observed(job, seen.group.members[rank][0], (), (), Cause.COUNTED_OTHER, name)
                place = replace(suspect.place, communicator=seen.group.reference(), comm_rank=rank, operation=None)
                suspects.append(replace(suspect, place=place, group=seen.group.id))
            found.append(_Odd(seen.group, suspects, [*seen.lines, seen.how], seen.tie))
    named = {one.index for odd in found for one in odd.suspects if one.index is not None}
    own = case.waits.of(named) if named else {}
    yield from _disagree(case, found, 0.85, wait_facts(wait for waits in own.values() for wait in waits))


def calls_differ(case: Case) -> Iterator[Hypothesis]:
    """Ranks called different things under one number; where neither a vote nor a pattern tells which, all are named."""
    number, finding = _inconsistent(case)
    if finding is None:
        return
    group, sequence = case.job.groups[number], finding.odd_sequence
    wrong, how = finding.odd_ones
    suspects = [
        caller(
            group, rank, member, operation_of(signature, sequence), Cause.CALLED_OTHER_AS, f"{signature.text()} as #{sequence}"
        )
        for signature in wrong for rank in finding.groups[signature] if (member := group.holder(rank)) is not None
    ]  # fmt: skip
    lines = [
        f"{', '.join(case.job.rank_name(group.id, rank) for rank in ranks)} called {signature.text()} as #{sequence}"
        for signature, ranks in sorted(finding.groups.items(), key=lambda item: -len(item[1]))
    ]
    if finding.ago:
        lines.append(f"the ranks have called up to {finding.ago} operations since: NCCL does not compare what ranks call")
    odd = _Odd(group, suspects, [*lines, *([how] if how else [])], len(wrong) == len(finding.groups), "calls")
    yield from _disagree(case, [odd], 0.75 if how else 0.95)


def conflict(case: Case) -> Iterator[Hypothesis]:
    """Ranks of a job that goes on which called something else than their peers, and agree with them since."""
    known, standing = case.known, case.standing
    if known.conflicts is None or known.ledger is None or standing is None or standing.cause is not Cause.PROGRESS:
        return
    suspects: list[Suspect] = []
    supports: list[Fact] = []
    victims: set[int] = set()
    for found in known.conflicts.find(case.job, case.time, known.ledger, known.totals, known.stage_of):
        group = case.job.groups[found.group]
        victims |= group.ranks.keys()
        usual = found.others.text() if found.others is not None else "something else"
        for rank, signature in sorted(found.called.items()):
            member, called = group.holder(rank), signature.text()
            if member is not None:
                operation = operation_of(signature, found.sequence)
                suspect = caller(group, rank, member, operation, Cause.RUNS_ON, f"{called} where its peers called {usual}")
                suspects.append(replace(suspect, place=replace(suspect.place, stage=found.stages.get(rank, ""))))
                supports.append(told(f"{member.label} called {called} as #{found.sequence}, its peers {usual}", source="calls"))
        seen = f"; so in {found.times} of the last operations" if found.times > 1 else ""
        tie = "; which of them is wrong does not show" if found.others is None else ""
        text = f"communicator {group.hash:016x}: {found.ago} operations have been called since, alike on all ranks{seen}{tie}"
        supports.append(told(text, source="calls"))
    if suspects:
        yield naming(VerdictClass.INCONSISTENT, suspects, victims, 0.9, supports, planes=("state", "calls"))


def _inconsistent(case: Case) -> tuple[int, CallsFinding | None]:
    """The first communicator of which the records of calls contradict each other."""
    found = case.findings.items() if case.messages is not None else ()
    return next(((number, finding) for number, finding in found if finding.inconsistent), (0, None))


# --- calls that were not made ------------------------------------------------------------------------------------------


def not_called(case: Case) -> Iterator[Hypothesis]:
    """Ranks that wait for nobody and have not called the operation that others of their communicator have called."""
    if case.messages is None or _inconsistent(case)[1] is not None:
        return
    blocked = _blocked(case, case.messages) | case.waits.waiting()
    suspects: dict[int, Suspect] = {}
    supports: list[Fact] = []
    for number, finding in case.findings.items():
        group = case.job.groups[number]
        for rank in () if before_is_open(group, finding, case.waits) else finding.behind:
            member = group.holder(rank)
            if member is not None and not member.gone and member.index not in blocked | suspects.keys():
                operation = operation_of(finding.called, finding.sequence)
                suspects[member.index] = caller(group, rank, member, operation, Cause.NOT_CALLED)
                supports.append(behind_fact(case.job, group, finding))
    if suspects:
        victims, named = peers(case.job, list(suspects.values())), suspects.values()
        yield naming(VerdictClass.NOT_ENTERED, named, victims, 0.9, supports, planes=("state", "calls"))


def _blocked(case: Case, messages: Messages) -> set[int]:
    """Members that wait for somebody by what was called: they may be behind elsewhere for that very reason.

    A rank waits in a collective that another has not called, and in a Send or Recv that its peer has not matched; it may wait
    where the calls do not tell, or beside a rank that nobody observed.
    """
    blocked: set[int] = set()
    for number, finding in case.findings.items():
        waiting, behind = (
            [member for rank in ranks if (member := case.job.groups[number].holder(rank)) is not None]
            for ranks in (finding.waiting, finding.behind)
        )
        blocked |= {member.index for member in waiting}
        blocked |= {member.index for member in behind if messages.may_wait(member) or beside_unobserved(case.job, member)}
    return blocked


def behind_fact(job: Job, group: Group, finding: CallsFinding) -> Fact:
    """Who has not called what, as evidence."""
    return Fact(FactKind.CALLED_LESS, None, "calls", object=group.id, describe=partial(behind_text, job, group, finding))


def left_out(case: Case) -> Iterator[Hypothesis]:
    """The few ranks of a job that stands which alone have left out what they always called.

    Who has left a call out is one behind in all that follows: the waits may well end at somebody else.
    """
    standing = case.standing
    if not case.waits.open or standing is None or not (standing.tie or standing.open_to_doubt):
        return
    job, found = case.job, find_alone_in_deviating(case.job, case.known.orders)
    deviations = {index: deviation for index, deviation in found.items() if deviation.left_out}
    if deviations:
        suspects = [observed(job, job.member(index), (), (), Cause.LEFT_OUT) for index in deviations]
        supports = (*_deviation_facts(job, deviations), *wait_facts(case.waits.first(SHOWN)))
        yield naming(VerdictClass.NOT_ENTERED, suspects, (member.index for member in job.members), 0.6, supports)


def _deviation_facts(job: Job, deviations: dict[int, Deviation]) -> list[Fact]:
    return [deviation_fact(job, job.member(index), deviation) for index, deviation in deviations.items()]
