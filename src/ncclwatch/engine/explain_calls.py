"""Hypotheses from what was called: ranks that have not called what the others have, and ranks that called something else.

Calls are told by their records (the calls plane), by what is open at the two ends of a connection, and by NCCL's own counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ncclwatch.engine.call_order import Owed, deviation_facts, find_alone_in_deviating, find_deviations
from ncclwatch.engine.case import Case, Hypothesis, Suspect, caller, naming, observed, peers
from ncclwatch.engine.edges import told, wait_facts
from ncclwatch.engine.evidence.base import Fact, FactKind, RankNode
from ncclwatch.engine.evidence.calls import Disagreement, operation_of
from ncclwatch.engine.redraw import before_is_open
from ncclwatch.engine.stated import SHOWN
from ncclwatch.model.cause import Cause
from ncclwatch.model.job import Group
from ncclwatch.model.joined import beside_unobserved, hides
from ncclwatch.model.verdict import VerdictClass

TIE = 0.5
"""Fact: confidence where all sides of a disagreement are named: as likely wrong as right."""
CALLS = ("state", "calls")


def _disagree(
    case: Case, groups: Iterable[Group], suspects: Iterable[Suspect], lines: Iterable[str], confidence: float, *, tie: bool,
    more: Iterable[Fact] = (), planes: tuple[str, ...] = ("state",),
) -> Iterator[Hypothesis]:  # fmt: skip
    """Who called something else; who broke its pattern breaks a tie. What comes next anyway means one was left out."""
    named: dict[int | None, Suspect] = {}
    for one in suspects:
        named.setdefault(one.index, one)
    if not named:
        return
    deviations = find_deviations(case.job, {index for index in named if index is not None}, case.known.orders, proper=tie)
    if tie and deviations:
        named, confidence, tie = {index: named[index] for index in deviations}, 0.8, False
    left_out = 0 < len(deviations) == len(named) and all(deviation.left_out for deviation in deviations.values())
    verdict_class = VerdictClass.NOT_ENTERED if left_out else VerdictClass.INCONSISTENT
    yield naming(
        verdict_class, [replace(one, cause=Cause.LEFT_OUT) if left_out else one for one in named.values()],
        {index for group in groups for index in group.ranks}, TIE if tie else confidence,
        [*(told(line) for line in lines if line), *more, *deviation_facts(case.job, deviations)], tie=tie, planes=planes,
    )  # fmt: skip


def _of_facts(
    case: Case, found: Sequence[Disagreement], suspects: Iterable[Suspect], confidence: float, *more: Fact
) -> Iterator[Hypothesis]:
    """What a source has seen of several communicators, told together."""
    lines, groups = (line for seen in found for line in (*seen.lines, seen.how)), [seen.group for seen in found]
    tie = any(seen.tie for seen in found)
    yield from _disagree(case, groups, suspects, lines, confidence, tie=tie, more=more)


def open_calls_differ(case: Case) -> Iterator[Hypothesis]:
    """The two ends of a connection work on different operations; where no vote or pattern tells which, both are named."""
    found = case.facts.of(FactKind.OPEN_OTHER, Disagreement)
    suspects = []
    for seen in found:
        members = {member.index: text for rank, text in seen.odd.items() if (member := seen.group.holder(rank)) is not None}
        for index, waits in (case.waits.of(members) if members else {}).items():
            suspects.append(observed(case.job, case.job.member(index), waits, (), Cause.CALLED_OTHER, members[index]))
    yield from _of_facts(case, found, suspects, 0.9)


def counts_differ(case: Case) -> Iterator[Hypothesis]:
    """NCCL's counts of each collective contradict each other; where neither a vote nor a pattern tells which, all are named."""
    ends = case.waits.ends
    at_ends = {node for sink in (*ends.cycles, *ends.ranks, *ends.beside_absent) for node in sink.nodes}
    at_ends |= {wait.subject for sink in (*ends.unseen, *ends.links) for wait in sink.waits}
    indices = {node.index for node in at_ends if isinstance(node, RankNode)}
    if not case.waits.open:  # Where NVLink joins ranks, who waits in what does not show.
        indices = {member.index for member in case.alive if hides(member)}
    found = [seen for seen in case.facts.of(FactKind.CALLED_OTHER, Disagreement) if not indices.isdisjoint(seen.group.ranks)]
    suspects = [caller(seen.group, rank, None, Cause.COUNTED_OTHER, name) for seen in found for rank, name in seen.odd.items()]
    own = case.waits.of({one.index for one in suspects if one.index is not None}) if found else {}
    yield from _of_facts(case, found, suspects, 0.85, *wait_facts(wait for waits in own.values() for wait in waits))


def calls_differ(case: Case) -> Iterator[Hypothesis]:
    """Ranks called different things under one number; where neither a vote nor a pattern tells which, all are named."""
    number, finding = next(((number, finding) for number, finding in case.findings.items() if finding.groups), (-1, None))
    if finding is None:
        return
    group, sequence = case.job.groups[number], finding.odd_sequence
    suspects = [
        caller(group, rank, operation_of(signature, sequence), Cause.CALLED_OTHER_AS, f"{signature.text()} as #{sequence}")
        for signature in finding.odd for rank in finding.groups[signature]
    ]  # fmt: skip
    lines = [
        f"{', '.join(case.job.rank_name(group.id, rank) for rank in ranks)} called {signature.text()} as #{sequence}"
        for signature, ranks in sorted(finding.groups.items(), key=lambda item: -len(item[1]))
    ]
    if finding.ago:
        lines.append(f"the ranks have called up to {finding.ago} operations since: NCCL does not compare what ranks call")
    tie, confidence = len(finding.odd) == len(finding.groups), 0.75 if finding.how else 0.95
    yield from _disagree(case, [group], suspects, [*lines, finding.how], confidence, tie=tie, planes=CALLS)


def conflict(case: Case) -> Iterator[Hypothesis]:
    """Ranks of a job that goes on which called something else than their peers, once or ever since."""
    known, standing = case.known, case.standing
    if standing is None or standing.cause is not Cause.PROGRESS or known.ledger is None or known.stage_of is None:
        return
    suspects, lines, victims = list[Suspect](), list[str](), set[int]()
    for found in known.conflicts.find(case.job, case.time, known.ledger, known.stage_of):
        group = case.job.groups[found.group]
        victims |= group.ranks.keys()
        usual = found.others.text() if found.others is not None else "something else"
        for rank, signature in sorted((rank, made) for rank, made in found.called.items() if rank in group.members):
            operation, called = operation_of(signature, found.sequence), signature.text()
            suspect = caller(group, rank, operation, Cause.RUNS_ON, f"{called} where its peers called {usual}")
            suspects.append(replace(suspect, place=replace(suspect.place, stage=found.stages.get(rank, ""))))
            lines.append(f"{group.members[rank][0].label} called {called} as #{found.sequence}, its peers {usual}")
        since = f"{found.ago} operations have been called since, alike on all ranks; " if found.ago else ""
        seen = f"so in {found.times} of the last operations"
        tie = "; which of them is wrong does not show" if found.others is None else ""
        lines.append(f"communicator {group.hash:016x}: {since}{seen}{tie}")
    if suspects:
        yield naming(VerdictClass.INCONSISTENT, suspects, victims, 0.9, map(told, lines), planes=CALLS)


def not_called(case: Case) -> Iterator[Hypothesis]:
    """Ranks that wait for nobody and have not called the operation that others of their communicator have called."""
    if case.messages is None or any(finding.groups for finding in case.findings.values()):
        return
    findings = [(case.job.groups[number], finding) for number, finding in case.findings.items()]
    # Who waits for somebody by what was called, or may, may be behind elsewhere for that very reason.
    blocked = case.waits.waiting | {group.members[rank][0].index for group, finding in findings for rank in finding.waiting}
    for member in (group.members[rank][0] for group, finding in findings for rank in finding.behind):
        if any(owed is not Owed.NO for _, _, owed in case.messages.of(member)) or beside_unobserved(case.job, member):
            blocked.add(member.index)
    suspects, supports = dict[int, Suspect](), list[Fact]()
    for group, finding in findings:
        for rank in () if before_is_open(group, finding, case.waits) else finding.behind:
            member = group.members[rank][0]
            if not member.gone and member.index not in blocked | suspects.keys():
                operation = operation_of(finding.called, finding.sequence)
                suspects[member.index] = caller(group, rank, operation, Cause.NOT_CALLED)
                supports += case.facts.about(FactKind.CALLED, group.id)
    if suspects:
        victims, named = peers(case.job, list(suspects.values())), suspects.values()
        yield naming(VerdictClass.NOT_ENTERED, named, victims, 0.9, supports, planes=CALLS)


def left_out(case: Case) -> Iterator[Hypothesis]:
    """The few ranks of a job that stands which alone have left out what they always called."""
    job, standing = case.job, case.standing
    if not case.waits.open or standing is None or not (standing.tie or standing.open_to_doubt):
        return
    deviations = {index: one for index, one in find_alone_in_deviating(job, case.known.orders).items() if one.left_out}
    if deviations:
        suspects = [observed(job, job.member(index), (), (), Cause.LEFT_OUT) for index in deviations]
        supports = (*deviation_facts(job, deviations), *wait_facts(case.waits.first(SHOWN)))
        yield naming(VerdictClass.NOT_ENTERED, suspects, (member.index for member in job.members), 0.6, supports)
