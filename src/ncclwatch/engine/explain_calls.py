"""Hypotheses from what was called: ranks that have not called what the others have, and ranks that called something else.

Calls are told by their records (the calls plane), by what is open at the two ends of a connection, and by NCCL's own counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ncclwatch.engine.call_patterns import Deviation, deviation_fact, find_alone_in_deviating, find_deviations
from ncclwatch.engine.case import Case, Cause, Hypothesis, Suspect
from ncclwatch.engine.edges import told, wait_facts
from ncclwatch.engine.evidence.base import Fact, FactKind
from ncclwatch.engine.evidence.calls import CallsFinding, behind_text, operation_of
from ncclwatch.engine.evidence.disagreements import Disagreement, Mismatch
from ncclwatch.engine.explain_waits import beside_unobserved, ends_of
from ncclwatch.engine.graph import Sink
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.nodes import RankNode
from ncclwatch.engine.stated import SHOWN
from ncclwatch.engine.suspects import caller, observed, peers
from ncclwatch.engine.unobservable_waits import before_is_open
from ncclwatch.model.verdict import VerdictClass

TIE = 0.5
"""Fact: confidence where all sides of a disagreement are named: as likely wrong as right."""


# --- ranks called something else ---------------------------------------------------------------------------------------


def _disagree(
    case: Case, rule: str, suspects: dict[int, Suspect], supports: list[Fact], confidence: float, groups: Iterable[Group],
    *, tie: bool, planes: tuple[str, ...] = ("state",),
) -> Iterator[Hypothesis]:  # fmt: skip
    """Ranks that called something else than their peers. The side that broke its own pattern breaks a tie.

    What was called in the place of another may be what used to come next: then the other was left out.
    """
    deviations = find_deviations(case.job, set(suspects), case.known.orders, proper=tie)
    if tie and deviations:
        suspects, confidence, tie = {index: suspects[index] for index in deviations}, 0.8, False
    left_out = 0 < len(deviations) == len(suspects) and all(deviation.left_out for deviation in deviations.values())
    named = [replace(suspect, cause=Cause.LEFT_OUT) if left_out else suspect for suspect in suspects.values()]
    if named:
        victims = frozenset({index for group in groups for index in group.ranks} - suspects.keys())
        yield Hypothesis(
            rule, VerdictClass.NOT_ENTERED if left_out else VerdictClass.INCONSISTENT, named[0].cause, tuple(named), victims,
            TIE if tie else confidence, (*supports, *_deviation_facts(case.job, deviations)), tie=tie, planes=planes,
        )  # fmt: skip


def open_calls_differ(case: Case) -> Iterator[Hypothesis]:
    """The two ends of a connection work on different operations; where no vote or pattern tells which, both are named."""
    job, details = case.job, dict[int, str]()
    supports: list[Fact] = []
    mismatches, tie = case.facts.of(FactKind.OPEN_OTHER, Mismatch), False
    for mismatch in mismatches:
        ranks, how, even = mismatch.suspects()
        tie = tie or even
        supports += [told(line) for line in (*mismatch.lines(job), how)]
        for rank in ranks:
            member, call = job.groups[mismatch.subject].holder(rank), mismatch.calls.get(rank)
            if member is not None:
                details.setdefault(member.index, call.text() if call else "another operation")
    own = case.waits.of(details) if details else {}
    suspects = {
        index: observed(job, job.member(index), own[index], (), Cause.CALLED_OTHER, text) for index, text in details.items()
    }
    groups = [job.groups[mismatch.subject] for mismatch in mismatches]
    yield from _disagree(case, "open-calls-differ", suspects, supports, 0.9, groups, tie=tie)


def counts_differ(case: Case) -> Iterator[Hypothesis]:
    """NCCL's counts of each collective contradict each other; where neither a vote nor a pattern tells which, all are named.

    What finished has left no trace but its count: ranks that called different things, though nothing of it is open.
    """
    if not case.waits.open:
        return
    job, ends = case.job, ends_of(case)
    at_ends = _at_the_ends(job, [*ends.cycles, *ends.ranks, *ends.beside_absent], [*ends.unseen, *ends.links])
    seen = case.facts.of(FactKind.CALLED_OTHER, Disagreement)
    disagreements = [found for found in seen if any(member.index in found.group.ranks for member in at_ends)]
    suspects, supports = dict[int, Suspect](), list[Fact]()
    for found in disagreements:
        supports += [told(line) for line in (*found.lines(job), found.how)]
        for rank, name in found.odd.items():
            member = found.group.members[rank][0]
            suspect = observed(job, member, (), (), Cause.COUNTED_OTHER, name)
            place = replace(suspect.place, communicator=found.group.reference(), comm_rank=rank, operation=None)
            suspects.setdefault(member.index, replace(suspect, place=place, group=found.group.id))
    own = case.waits.of(suspects) if suspects else {}
    supports += wait_facts(wait for index in suspects for wait in own[index])
    tie, groups = any(found.tie for found in disagreements), [found.group for found in disagreements]
    yield from _disagree(case, "counts-differ", suspects, supports, 0.85, groups, tie=tie)


def _at_the_ends(job: Job, ends: Sequence[Sink], beyond: Sequence[Sink]) -> list[Member]:
    """The observed processes at which the waits end, and those that wait for links or for what nobody sees."""
    found = {node.index for sink in ends for node in sink.nodes if isinstance(node, RankNode)}
    found |= {wait.waiter.index for sink in beyond for wait in sink.waits if isinstance(wait.waiter, RankNode)}
    return [job.member(index) for index in sorted(found)]


# --- records of calls --------------------------------------------------------------------------------------------------


def calls_differ(case: Case) -> Iterator[Hypothesis]:
    """Ranks called different things under one number; where neither a vote nor a pattern tells which, all are named."""
    number, finding = _inconsistent(case)
    if finding is None:
        return
    group, sequence = case.job.groups[number], finding.odd_sequence
    wrong, how = finding.odd_ones
    suspects = {
        member.index: caller(
            group, rank, member, operation_of(signature, sequence), Cause.CALLED_OTHER_AS, f"{signature.text()} as #{sequence}"
        )
        for signature in wrong for rank in finding.groups[signature] if (member := group.holder(rank)) is not None
    }  # fmt: skip
    supports, tie = _call_facts(case.job, group, finding, how), len(wrong) == len(finding.groups)
    yield from _disagree(
        case, "calls-differ", suspects, supports, 0.75 if how else 0.95, [group], tie=tie, planes=("state", "calls")
    )


def not_called(case: Case) -> Iterator[Hypothesis]:
    """Ranks that wait for nobody and have not called the operation that others of their communicator have called."""
    if case.messages is None or _inconsistent(case)[1] is not None:
        return
    blocked = _blocked(case) | case.waits.waiting()
    suspects: list[Suspect] = []
    supports: list[Fact] = []
    for number, finding in case.findings.items():
        group = case.job.groups[number]
        if before_is_open(group, finding, case.waits):
            continue
        for rank in finding.behind:
            member = group.holder(rank)
            if member is None or member.gone or member.index in blocked:
                continue
            if any(suspect.index == member.index for suspect in suspects):
                continue
            operation = operation_of(finding.called, finding.sequence)
            suspects.append(caller(group, rank, member, operation, Cause.NOT_CALLED))
            supports.append(_behind_fact(case.job, group, finding))
    if suspects:
        victims = frozenset(peers(case.job, suspects) - {suspect.index for suspect in suspects})
        yield Hypothesis(
            "not-called", VerdictClass.NOT_ENTERED, Cause.NOT_CALLED, tuple(suspects), victims, 0.9, tuple(supports),
            planes=("state", "calls"),
        )  # fmt: skip


def _blocked(case: Case) -> set[int]:
    """Members that wait for somebody by what was called: they may be behind elsewhere for that very reason.

    A rank waits in a collective that another has not called, and in a Send or Recv that its peer has not matched; it may wait
    where the calls do not tell, or beside a rank that nobody observed.
    """
    job, messages = case.job, case.messages
    blocked = {
        member.index
        for number, finding in case.findings.items()
        for rank in finding.waiting
        if (member := job.groups[number].holder(rank)) is not None
    }
    for number, finding in case.findings.items():
        for rank in finding.behind:
            member = job.groups[number].holder(rank)
            if member is None or member.index in blocked or messages is None:
                continue
            if messages.may_wait(member) or beside_unobserved(job, member):
                blocked.add(member.index)
    return blocked


def _behind_fact(job: Job, group: Group, finding: CallsFinding) -> Fact:
    """Who has not called what, as evidence."""
    return Fact(FactKind.CALLED_LESS, None, "calls", object=group.id, describe=partial(behind_text, job, group, finding))


def _inconsistent(case: Case) -> tuple[int, CallsFinding | None]:
    """The first communicator of which the records of calls contradict each other."""
    found = case.findings.items() if case.messages is not None else ()
    return next(((number, finding) for number, finding in found if finding.inconsistent), (0, None))


def _call_facts(job: Job, group: Group, finding: CallsFinding, how: str) -> list[Fact]:
    lines = [
        f"{', '.join(job.rank_name(group.id, rank) for rank in ranks)} called {signature.text()} as #{finding.odd_sequence}"
        for signature, ranks in sorted(finding.groups.items(), key=lambda item: -len(item[1]))
    ]
    if finding.ago:
        lines.append(f"the ranks have called up to {finding.ago} operations since: NCCL does not compare what ranks call")
    lines += [how] if how else []
    return [told(line, source="calls") for line in lines]


# --- beside a hypothesis -----------------------------------------------------------------------------------------------


def calls_beside(case: Case) -> Iterator[Hypothesis]:
    """What the records of calls say of the ranks that where the waits end has named."""
    standing = case.standing
    if standing is None or case.messages is None or "calls" in standing.planes:
        return
    beside: list[Fact] = []
    for number, finding in case.findings.items():
        group = case.job.groups[number]
        members = (group.holder(rank) for rank in finding.behind)
        if any(member is not None and member.index in standing.named for member in members):
            beside.append(_behind_fact(case.job, group, finding))
    if beside:
        yield standing.beside_it("calls-beside", beside, planes=("state", "calls"))


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
        suspects = tuple(observed(job, job.member(index), (), (), Cause.LEFT_OUT) for index in deviations)
        supports = (*_deviation_facts(job, deviations), *wait_facts(case.waits.first(SHOWN)))
        victims = frozenset({member.index for member in job.members} - deviations.keys())
        yield Hypothesis("left-out", VerdictClass.NOT_ENTERED, Cause.LEFT_OUT, suspects, victims, 0.6, supports)


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
    waiting = frozenset(victims - {suspect.index for suspect in suspects})
    if suspects:
        yield Hypothesis(
            "conflict", VerdictClass.INCONSISTENT, Cause.RUNS_ON, tuple(suspects), waiting, 0.9, tuple(supports),
            planes=("state", "calls"),
        )  # fmt: skip


def _deviation_facts(job: Job, deviations: dict[int, Deviation]) -> list[Fact]:
    return [deviation_fact(job, job.member(index), deviation) for index, deviation in deviations.items()]
