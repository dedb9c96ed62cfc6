"""Put roles of communicators and places in the iteration into a verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.ledger import Ledger
from ncclwatch.engine.suspects import names
from ncclwatch.engine.topology.model import Phase, Role, Stage
from ncclwatch.engine.topology.namer import StageNamer
from ncclwatch.engine.topology.words import compressed
from ncclwatch.model.state import Communicator
from ncclwatch.model.verdict import CommunicatorRef, Culprit, OperationRef, Verdict, VerdictClass, places, stands_in

SHOWN = 3
"""Lines on where victims stand."""

NOT_CALLED = (VerdictClass.NOT_ENTERED,)
"""Classes whose culprits have yet to make the call that the others wait in."""

HALTED = (VerdictClass.STOPPED, VerdictClass.DEAD)
"""Classes of jobs that go on: where their ranks are at this moment says nothing."""

LATEST = 4
LOOKED_AT = 16
"""Members of a communicator that are asked where an operation stands."""


@dataclass(slots=True)
class _Context:
    job: Job
    namer: StageNamer
    ledger: Ledger


def name_stages(verdict: Verdict, job: Job, namer: StageNamer, ledger: Ledger) -> Verdict:
    """The verdict with roles and stages, as far as they are known; unchanged where nothing is."""
    if not verdict.culprits or namer.learned is None:
        return verdict
    context = _Context(job, namer, ledger)
    # Where all places are known already, what was found lies back or goes on: where the others are now says nothing of it.
    past = verdict.verdict_class.slow or namer.by_counts or all(culprit.stage for culprit in verdict.culprits)
    culprits = tuple(_named(context, culprit, verdict.verdict_class) for culprit in verdict.culprits)
    first = next((c for c in culprits if c.stage), culprits[0])
    communicator = verdict.communicator
    same = next(
        (c.communicator for c in culprits if c.communicator and communicator and c.communicator.hash == communicator.hash), None
    )
    return replace(
        verdict,
        culprits=culprits,
        communicator=same or communicator,
        stage=verdict.stage or first.stage,
        evidence=(*verdict.evidence, *(() if past else _victim_lines(context, verdict))),
    )


def name_places(judged: Sequence[tuple[Job, Verdict]]) -> list[Verdict]:
    """Verdicts from memory alone, with the roles and places in the layout that NCCL's counts tell."""
    if not any(verdict.culprits for _, verdict in judged):
        return [verdict for _, verdict in judged]
    namer, samples = StageNamer(), [member.last for job, _ in judged for member in job.members]
    namer.note_samples(samples)
    namer.fall_back(samples)
    return [name_stages(verdict, job, namer, Ledger()) for job, verdict in judged]


def _named(context: _Context, culprit: Culprit, verdict_class: VerdictClass) -> Culprit:
    reference = culprit.communicator
    if reference is None or (culprit.stage and reference.role):
        return culprit
    holders = _holders(context.job, reference, culprit)
    role = next(
        (r for m, c in holders if (r := context.namer.role_of(m.info.host, m.info.pid, c.address)) is not Role.UNSURE), None
    )
    if role is None and not context.namer.by_counts:
        return culprit
    known = bool(culprit.stage) or verdict_class.slow
    stage = None if known or context.namer.by_counts else _stage(context, culprit, holders, verdict_class)
    if stage is None and not known:
        stage = _place(context, culprit, role or Role.UNSURE, verdict_class)
    return replace(
        culprit,
        communicator=reference if role in (None, Role.UNUSED) else replace(reference, role=str(role)),
        stage=stage.text() if stage is not None else culprit.stage,
    )


def _holders(job: Job, reference: CommunicatorRef, culprit: Culprit) -> list[tuple[Member, Communicator]]:
    """The members of the culprit's communicator, its own process first."""
    for group in job.groups.values():
        if f"{group.hash:016x}" != reference.hash or group.nranks != reference.nranks:
            continue
        held = group.members.get(culprit.comm_rank) if culprit.comm_rank is not None else None
        own = held is not None and names([culprit], held[0])
        if own or culprit.pid is None:
            others = [pair for rank, pair in group.members.items() if rank != culprit.comm_rank]
            return [held, *others] if held is not None else others
    return []


def _stage(
    context: _Context, culprit: Culprit, holders: list[tuple[Member, Communicator]], verdict_class: VerdictClass
) -> Stage | None:
    """Where the culprit stands, from its own calls or, without them, where the operation stands that others wait in."""
    if not holders:
        return None
    namer = context.namer
    own = holders[0] if names([culprit], holders[0][0]) else None
    if own is not None:
        host, pid = own[0].info.host, own[0].info.pid
        if verdict_class in NOT_CALLED:
            return namer.stage_of(host, pid, calls_ago=-1)
        if verdict_class in HALTED:
            # The host runs ahead of its GPU: the oldest operation that is open is where it stands.
            return _oldest_open(context, own[0]) or namer.stage_of(host, pid, calls_ago=-1)
        if verdict_class is VerdictClass.HARDWARE and culprit.link is None:
            open_now = _oldest_open(context, own[0])
            if open_now is not None:
                return open_now
    # What memory says stands still is found among the calls by NCCL's own count of them.
    for member, communicator in holders[:LOOKED_AT]:
        ago = _calls_since(context.ledger, member, communicator, culprit.operation)
        if ago is not None:
            found = namer.stage_of(member.info.host, member.info.pid, communicator.address, calls_ago=ago)
            return _at_home(context, found, own)
    for member, communicator in holders[:LOOKED_AT]:
        found = _latest(context, member, communicator, culprit.operation)
        if found is not None:
            return _at_home(context, found, own)
    return None


def _place(context: _Context, culprit: Culprit, role: Role, verdict_class: VerdictClass) -> Stage | None:
    """Without calls: the culprit's place in the layout, and the operation where memory shows that it is in it."""
    namer = context.namer
    place = namer.place_of(culprit.host, culprit.pid) if culprit.pid is not None else namer.place_of_rank(culprit.rank)
    if culprit.operation is None or verdict_class in (*NOT_CALLED, *HALTED):
        return place
    return replace(place or Stage(Phase.EITHER), role=role, function=culprit.operation.name)


def _latest(context: _Context, member: Member, communicator: Communicator, operation: OperationRef | None) -> Stage | None:
    """The latest call on a communicator, of the operation named where one of the last few was."""
    host, pid = member.info.host, member.info.pid
    last = [context.namer.stage_of(host, pid, communicator.address, calls_ago=ago) for ago in range(LATEST)]
    named = (stage for stage in last if stage is not None and operation is not None and stage.function == operation.name)
    return next(named, last[0])


def _oldest_open(context: _Context, member: Member) -> Stage | None:
    """The stage of the first operation, in the order of the calls, that a process has not finished."""
    best: tuple[int, Stage] | None = None
    for operation in member.last.operations:
        number = context.job.find_group(member, operation.comm_address, operation.comm_hash)
        found_in = context.job.groups.get(number) if number is not None else None
        rank = found_in.rank_of(member) if found_in is not None else None
        if found_in is None or rank is None:
            continue
        communicator = found_in.members[rank][1]
        ago: int | None = 0
        if not operation.is_point_to_point:
            reference = OperationRef(operation.collective, operation.sequence, operation.protocol or "?")
            ago = _calls_since(context.ledger, member, communicator, reference)
        if ago is None:
            continue
        found = context.namer.call_of(member.info.host, member.info.pid, communicator.address, calls_ago=ago)
        # Where no pattern is known (the function is not, then) nothing tells which of them is the oldest.
        if found is not None and found[1].function and (best is None or found[0] > best[0]):
            best = found
    return best[1] if best is not None else None


def _at_home(context: _Context, stage: Stage | None, own: tuple[Member, Communicator] | None) -> Stage | None:
    """A stage that was read off a peer, with the culprit's own place in pipeline and tensor group."""
    if stage is None or own is None:
        return stage
    mine = context.namer.stage_of(own[0].info.host, own[0].info.pid, own[1].address)
    return stage.at_home_of(mine) if mine is not None else stage


def _calls_since(ledger: Ledger, member: Member, communicator: Communicator, operation: OperationRef | None) -> int | None:
    """How many collectives a rank has called after the one with NCCL's number ``operation.sequence``; ``None`` where unknown.

    Only for what the state plane named (it knows the protocol): sequence numbers of the calls plane count otherwise.
    """
    row = ledger.rows.get(ledger.place(member.info.host, member.info.pid, communicator.address))
    if row is None or operation is None or operation.sequence is None or not operation.protocol:
        return None
    _, history = ledger.history(row)
    at = np.flatnonzero(history["op_count"] == operation.sequence)
    return len(history) - 1 - int(at[-1]) if len(at) else None


def _victim_lines(context: _Context, verdict: Verdict) -> list[str]:
    """Where the ranks that wait stand: those in one place together."""
    accused = places(verdict.culprits)
    wanted = set(verdict.victims)
    texts: dict[str, list[int]] = defaultdict(list)
    for member in context.job.members:
        if member.rank is None or member.rank not in wanted or stands_in(accused, member.info.host, member.info.pid, member.rank):
            continue
        stage = context.namer.stage_of(member.info.host, member.info.pid)
        if stage is not None:
            texts[replace(stage, tensor_index=-1).text()].append(member.rank)
    lines = sorted(texts.items(), key=lambda item: (-len(item[1]), item[1]))
    shown = [f"latest call of rank{'s' if len(ranks) > 1 else ''} {compressed(ranks)}: {text}" for text, ranks in lines[:SHOWN]]
    if len(lines) > SHOWN:
        more, elsewhere = sum(len(ranks) for _, ranks in lines[SHOWN:]), len(lines) - SHOWN
        shown.append(f"… and {more} more rank{'s' if more > 1 else ''} in {elsewhere} other place{'s' if elsewhere > 1 else ''}")
    return shown
