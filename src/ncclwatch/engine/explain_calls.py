"""Hypotheses from what was called: ranks that have not called what the others have, and ranks that called something else.

Calls are told by their records (the calls plane), by what is open at the two ends of a connection, and by NCCL's own counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from ncclwatch.engine.call_patterns import Deviation, deviation_fact, find_alone_in_deviating, find_deviations
from ncclwatch.engine.case import Case
from ncclwatch.engine.edges import told, wait_facts
from ncclwatch.engine.evidence.base import Fact, FactKind
from ncclwatch.engine.evidence.calls import CallsFinding, behind_text, operation_of
from ncclwatch.engine.evidence.disagreements import Disagreement, Mismatch
from ncclwatch.engine.explain_waits import beside_unobserved, ends_of
from ncclwatch.engine.graph import Sink
from ncclwatch.engine.hypotheses import Cause, Hypothesis, Suspect
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.ledger import Signature
from ncclwatch.engine.nodes import RankNode
from ncclwatch.engine.stated import SHOWN
from ncclwatch.engine.suspects import accused, caller, names, observed, other_peers
from ncclwatch.engine.unobservable_waits import before_is_open
from ncclwatch.model.verdict import VerdictClass

TIE = 0.5
"""Fact: confidence where all sides of a disagreement are named: as likely wrong as right."""


# --- what is open at both ends of a connection -------------------------------------------------------------------------


def open_calls_differ(case: Case) -> Iterator[Hypothesis]:
    """The two ends of a connection work on different operations; where no vote or pattern tells which, both are named."""
    # Ranks that called different things hang whatever else the waits show: the disagreement is the cause.
    found = _compare_open_calls(case) if case.facts.of(FactKind.OPEN_OTHER) else None
    if found is not None:
        yield found


def _compare_open_calls(case: Case) -> Hypothesis | None:
    job, details = case.job, dict[int, str]()
    supports: list[Fact] = []
    tie = False
    for mismatch in case.facts.of(FactKind.OPEN_OTHER, Mismatch):
        ranks, how, even = mismatch.suspects()
        tie = tie or even
        supports += [told(line) for line in (*mismatch.lines(job), how)]
        for rank in ranks:
            member, call = job.groups[mismatch.subject].holder(rank), mismatch.calls.get(rank)
            if member is not None:
                details.setdefault(member.index, call.text() if call else "another operation")
    if not details:
        return None
    deviations = find_deviations(job, set(details), case.known.orders) if tie else {}
    confidence = TIE if tie else 0.9
    if deviations:
        # The side that broke its own pattern breaks the tie.
        details, confidence, tie = {index: details[index] for index in deviations}, 0.8, False
        supports += _deviation_facts(job, deviations)
    left_out = bool(deviations) and all(deviation.left_out for deviation in deviations.values())
    cause = Cause.LEFT_OUT if left_out else Cause.CALLED_OTHER
    own = case.waits.of(details)
    suspects = tuple(observed(job, job.member(index), own[index], (), cause, detail) for index, detail in details.items())
    verdict_class = VerdictClass.NOT_ENTERED if left_out else VerdictClass.INCONSISTENT
    victims = frozenset(other_peers(job, suspects))
    return Hypothesis("open-calls-differ", verdict_class, cause, suspects, victims, confidence, tuple(supports), tie=tie)


# --- NCCL's own counts -------------------------------------------------------------------------------------------------


def counts_differ(case: Case) -> Iterator[Hypothesis]:
    """NCCL's counts of each collective contradict each other; where neither a vote nor a pattern tells which, all are named."""
    found = _compare_counts(case)
    if found is not None:
        yield found


def _compare_counts(case: Case) -> Hypothesis | None:
    """What finished has left no trace but its count: ranks that called different things, though nothing of it is open."""
    job, ends = case.job, ends_of(case)
    at_ends = _at_the_ends(job, [*ends.cycles, *ends.ranks, *ends.beside_absent], [*ends.unseen, *ends.links])
    seen = case.facts.of(FactKind.CALLED_OTHER, Disagreement) if case.waits.open else ()
    disagreements = [found for found in seen if any(member.index in found.group.ranks for member in at_ends)]
    if not disagreements:
        return None
    found: dict[int, tuple[Member, str, Disagreement]] = {}
    supports: list[Fact] = []
    for disagreement in disagreements:
        supports += [told(line) for line in (*disagreement.lines(job), disagreement.how)]
        for rank, name in disagreement.odd.items():
            member = disagreement.group.members[rank][0]
            found.setdefault(member.index, (member, name, disagreement))
    tie = any(disagreement.tie for disagreement in disagreements)
    deviations = find_deviations(job, set(found), case.known.orders) if tie else {}
    if deviations:
        found, tie = {index: found[index] for index in deviations}, False
        supports += _deviation_facts(job, deviations)
    suspects = tuple(_counted(job, *one) for one in found.values())
    own = case.waits.of(found)
    supports += wait_facts(wait for index in found for wait in own[index])
    victims = frozenset({index for d in disagreements for index in d.group.ranks} - found.keys())
    return Hypothesis(
        "counts-differ", VerdictClass.INCONSISTENT, Cause.COUNTED_OTHER, suspects, victims, TIE if tie else 0.85, tuple(supports),
        tie=tie,
    )  # fmt: skip


def _counted(job: Job, member: Member, name: str, disagreement: Disagreement) -> Suspect:
    suspect, group = observed(job, member, (), (), Cause.COUNTED_OTHER, name), disagreement.group
    place = replace(suspect.place, communicator=group.reference(), comm_rank=group.rank_of(member), operation=None)
    return replace(suspect, place=place)


def _at_the_ends(job: Job, ends: Sequence[Sink], beyond: Sequence[Sink]) -> list[Member]:
    """The observed processes at which the waits end, and those that wait for links or for what nobody sees."""
    found = {node.index for sink in ends for node in sink.nodes if isinstance(node, RankNode)}
    found |= {wait.waiter.index for sink in beyond for wait in sink.waits if isinstance(wait.waiter, RankNode)}
    return [job.member(index) for index in sorted(found)]


# --- records of calls --------------------------------------------------------------------------------------------------


def calls_differ(case: Case) -> Iterator[Hypothesis]:
    """Ranks called different things under one number; where neither a vote nor a pattern tells which, all are named."""
    found = _inconsistent(case)
    if found is not None:
        yield found


def not_called(case: Case) -> Iterator[Hypothesis]:
    """Ranks that wait for nobody and have not called the operation that others of their communicator have called."""
    if case.messages is None or _inconsistent(case) is not None:
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
            if names([suspect.place for suspect in suspects], member):
                continue
            operation = operation_of(finding.called, finding.sequence)
            suspects.append(caller(group, rank, member, operation, Cause.NOT_CALLED))
            supports.append(_behind_fact(case.job, group, finding))
    if suspects:
        victims = frozenset(other_peers(case.job, suspects))
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


def _inconsistent(case: Case) -> Hypothesis | None:
    for number, finding in case.findings.items() if case.messages is not None else ():
        if finding.inconsistent:
            return case.remember("inconsistent", lambda: _compare(case, case.job.groups[number], finding))  # noqa: B023
    return None


def _compare(case: Case, group: Group, finding: CallsFinding) -> Hypothesis:
    job, orders = case.job, case.known.orders
    wrong, how = finding.odd_ones
    odd = {rank: signature for signature in wrong for rank in finding.groups[signature]}
    supports = _call_facts(job, group, finding, how)
    tie = len(wrong) == len(finding.groups)
    confidence = TIE if tie else 0.75 if how else 0.95
    holders = {group.members[rank][0].index: rank for rank in odd if rank in group.members}
    deviations = find_deviations(job, set(holders), orders, proper=tie)
    # What was called in the place of another may be what used to come next: then the other was left out.
    supports += _deviation_facts(job, deviations)
    if tie and deviations:
        odd, confidence, tie = {holders[index]: odd[holders[index]] for index in deviations}, 0.8, False
    left_out = 0 < len(deviations) == len(odd) and all(deviation.left_out for deviation in deviations.values())
    cause = Cause.LEFT_OUT if left_out else Cause.CALLED_OTHER_AS
    suspects = tuple(_caller(group, rank, signature, finding, cause) for rank, signature in odd.items() if rank in group.members)
    victims = frozenset(member.index for rank, (member, _) in group.members.items() if rank not in odd)
    verdict_class = VerdictClass.NOT_ENTERED if left_out else VerdictClass.INCONSISTENT
    return Hypothesis(
        "calls-differ", verdict_class, cause, suspects, victims, confidence, tuple(supports), tie=tie, planes=("state", "calls")
    )


def _caller(group: Group, rank: int, signature: Signature, finding: CallsFinding, cause: Cause) -> Suspect:
    member, sequence = group.members[rank][0], finding.odd_sequence
    return caller(group, rank, member, operation_of(signature, sequence), cause, f"{signature.text()} as #{sequence}")


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
    culprits = [suspect.place for suspect in standing.suspects]
    beside: list[Fact] = []
    for number, finding in case.findings.items():
        group = case.job.groups[number]
        members = (group.holder(rank) for rank in finding.behind)
        if any(member is not None and names(culprits, member) for member in members):
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
        peers = found.others.text() if found.others is not None else "something else"
        for rank, signature in sorted(found.called.items()):
            member, called = group.holder(rank), signature.text()
            if member is not None:
                operation = operation_of(signature, found.sequence)
                suspect = caller(group, rank, member, operation, Cause.RUNS_ON, f"{called} where its peers called {peers}")
                suspects.append(replace(suspect, place=replace(suspect.place, stage=found.stages.get(rank, ""))))
                supports.append(told(f"{member.label} called {called} as #{found.sequence}, its peers {peers}", source="calls"))
        seen = f"; so in {found.times} of the last operations" if found.times > 1 else ""
        tie = "; which of them is wrong does not show" if found.others is None else ""
        text = f"communicator {group.hash:016x}: {found.ago} operations have been called since, alike on all ranks{seen}{tie}"
        supports.append(told(text, source="calls"))
    if suspects:
        victims -= accused(case.job, [suspect.place for suspect in suspects])
        yield Hypothesis(
            "conflict", VerdictClass.INCONSISTENT, Cause.RUNS_ON, tuple(suspects), frozenset(victims), 0.9, tuple(supports),
            planes=("state", "calls"),
        )  # fmt: skip


def _deviation_facts(job: Job, deviations: dict[int, Deviation]) -> list[Fact]:
    return [deviation_fact(job, job.member(index), deviation) for index, deviation in deviations.items()]
