"""What the operating system and NCCL state outright: progress, stopped and ended processes, communicators in creation.

C4 names initialisation faults as its blind spot (section on limitations). NCCL sets hash, rank and size of a communicator before
the ranks meet (``src/init.cc``, ``ncclCommInitRankFunc``), so the waiting ranks can be read while the creation hangs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from operator import attrgetter

from ncclwatch.engine.case import Case, Hypothesis, Suspect, absent, caller, naming, nobody, observed, peers
from ncclwatch.engine.edges import Why, told, wait_facts
from ncclwatch.engine.evidence.base import AbsentNode, Fact, FactKind, RankNode
from ncclwatch.engine.evidence.kernel import Census
from ncclwatch.engine.graph import Sink
from ncclwatch.engine.patience import HANG_FLOOR_S, LONGEST_PATIENCE_S
from ncclwatch.model.cause import Cause
from ncclwatch.model.job import Group, Member
from ncclwatch.model.joined import hides, is_hidden
from ncclwatch.model.state import Communicator
from ncclwatch.model.verdict import Culprit, VerdictClass

HEALTHY = frozenset({"ncclSuccess", "ncclInProgress"})
READY_STATES = frozenset({None, "ncclSuccess"})
_INIT_STATE = attrgetter("init_state")
SHOWN = 4
"""Bound: waits shown of a pause, or beside who has ended (its peers' transfers with it may be gone); ranks in a line."""


def all_ended(case: Case) -> Iterator[Hypothesis]:
    """Every observed process has ended."""
    if not case.alive:
        yield Hypothesis(VerdictClass.IDLE, Cause.ALL_ENDED, confidence=1.0)


def one_sample(case: Case) -> Iterator[Hypothesis]:
    """One sample cannot tell a pause from a hang."""
    if len(case.newcomers) == len(case.alive):
        yield nobody(Cause.ONE_SAMPLE)


def progress(case: Case) -> Iterator[Hypothesis]:
    """NCCL moved between the last two samples of some process."""
    if case.still == 0.0:
        notes = tuple(_halted_facts(case, (member for member in case.job.halted if member.stopped)))
        yield Hypothesis(VerdictClass.RUNNING, Cause.PROGRESS, confidence=1.0, supports=notes)


def halted(case: Case) -> Iterator[Hypothesis]:
    """Processes that a signal or a debugger has stopped, and those, observed or not, that have ended while others needed them."""
    yield from _halted(case, 0.99)


def ended_behind(case: Case) -> Iterator[Hypothesis]:
    """Ended or stopped processes that only followed waits lead to: less sure than `halted`."""
    if case.waits.open and (case.trail.drawn or case.trail.retracted):
        yield from _halted(case, 0.85)


def _halted(case: Case, confidence: float) -> Iterator[Hypothesis]:
    job, ended = case.job, _ended_ranks(case)
    halted = [*(member for member in case.job.halted if member.stopped), *_missed(case)]
    if not halted and not ended:
        return
    ends = {sink.member.index: sink for sink in case.waits.sinks if sink.member is not None}
    suspects: list[Suspect] = []
    supports: list[Fact] = []
    first = wait_facts(case.waits.first(SHOWN))[:SHOWN]
    for member in halted:
        waits = ends[member.index].waits if member.index in ends else []
        cause = Cause.STOPPED_BY_DEBUGGER if member.last.run_state == "t" else Cause.STOPPED
        suspects.append(observed(job, member, waits, (), Cause.ENDED if member.gone else cause))
        supports += [*_halted_facts(case, [member]), *wait_facts(waits)]
        # Its neighbours' transfers with it may be gone, or hidden inside the node.
        supports += first if member.gone or not waits else []
    for node, sink in ended.items():
        suspects.append(absent(job, sink, node, Cause.ENDED_UNSEEN))
        supports += wait_facts(sink.waits)
    supports += _error_facts(job.members)
    victims = _victims(case, halted, {*ends}, [*(ends[m.index] for m in halted if m.index in ends), *ended.values()], suspects)
    verdict_class = VerdictClass.DEAD if ended or any(member.gone for member in halted) else VerdictClass.STOPPED
    yield naming(verdict_class, suspects, victims, confidence if victims else 0.8, supports)


def _missed(case: Case) -> list[Member]:
    """Who ended while others needed them, as waits show, or a collective that stands still (proxies drop waits)."""
    gone = case.job.gone
    if not gone or any(map(errors_of, case.alive)):
        return gone
    needed = {node.index for sink in case.waits.sinks if sink.waits for node in sink.nodes if isinstance(node, RankNode)}
    alive, failed = {one.index for one in case.alive}, {one.index for one in gone if one.info.key in case.known.failed}
    for group in map(case.job.groups.__getitem__, case.waits.collectives()):
        # Where all have ended by themselves nobody is left who needs any: what they were last seen in, they ended.
        left = group.missing or not alive.isdisjoint(group.ranks)
        needed |= group.ranks.keys() if left else failed & group.ranks.keys()
    if case.still >= HANG_FLOOR_S:  # Of who waits for it between GPUs nothing is seen: whoever failed is taken to be needed.
        needed |= {one.index for one in gone if one.info.key in case.known.failed and hides(one)}
    return [member for member in gone if member.index in needed]


def _ended_ranks(case: Case) -> dict[AbsentNode, Sink]:
    """Ranks that were not observed and have ended, that others wait for, or, if none are, of a collective that stands still."""
    job = case.job
    unseen = {node: sink for sink in case.waits.sinks if not sink.is_cycle and isinstance(node := sink.nodes[0], AbsentNode)}
    # Of whom waits end at nothing more is seen: it may wait in any communicator that it holds. Who has ended waits in none.
    collectives, ends = case.waits.collectives(), [end for sink in case.waits.sinks if (end := sink.member) and not end.gone]
    needed = (*sorted(collectives), *sorted({group.id for member in ends for group, _ in job.held_by(member)} - collectives))
    standing = [group for number in needed if len((group := job.groups[number]).members) < group.nranks]
    if not unseen and not standing:
        return {}
    census = Census.of(job, case.known.complete_hosts)

    def runs(node: AbsentNode) -> bool | None:
        """Whether the process runs, of what is heard; ``None`` where that is not known."""
        group = job.groups[node.group_id]
        return True if (group.hash, node.comm_rank) in case.known.silent else census.runs(group, node.comm_rank)

    heard = {node: runs(node) for node in unseen}
    found = [node for node, running in heard.items() if running is False]
    unsure = [node for node, running in heard.items() if running is None]
    found += [node for node in unsure if any(wait.why is Why.BROKEN for wait in unseen[node].waits)]
    ended = {job.global_rank(*node[:2]) for node in found} - {None}
    gone = {member.index for member in job.gone}

    @cache
    def explained(number: int) -> bool:
        """Whether a rank of this group is known to have ended, and so explains its errors."""
        group = job.groups[number]
        return not gone.isdisjoint(group.ranks) or not ended.isdisjoint(job.global_rank(number, at) for at in range(group.nranks))

    def missed(sink: Sink) -> bool:
        """Whether who waits for it reports an error that no other end explains."""
        waiting = {wait.subject.index for wait in sink.waits if isinstance(wait.subject, RankNode)}
        return any(not explained(job.number(i, own)) for i in waiting for own, _ in errors_of(job.member(i)))

    found += [node for node in unsure if node not in found and missed(unseen[node])]
    if found or not case.waits.sinks or not census.whole:
        return {node: unseen[node] for node in found}
    missing = (AbsentNode(group.id, rank) for group in standing for rank in group.missing)
    return {node: Sink((node,), case.job) for node in missing if runs(node) is False}


def _victims(case: Case, halted: Sequence[Member], held: set[int], ends: Sequence[Sink], suspects: Sequence[Suspect]) -> set[int]:
    """Who waits for them: everybody in a collective that stands still with one of them does in the end."""
    victims = case.waits.victims(ends) | peers(case.job, suspects)
    indices, missing = {member.index for member in halted}, {suspect.group for suspect in suspects if suspect.index is None}
    victims |= {index for number in missing for index in held & case.job.groups[number].ranks.keys()}
    for number in case.waits.collectives():
        if number in missing or not indices.isdisjoint(case.job.groups[number].ranks):
            victims |= case.job.groups[number].ranks.keys()
    return (victims | case.waits.behind(map(RankNode, victims))) - indices


def _halted_facts(case: Case, members: Iterable[Member]) -> list[Fact]:
    return [fact for member in members for fact in case.facts.about(FactKind.HALTED, RankNode(member.index))]


def errors_of(member: Member) -> list[tuple[Communicator, str]]:
    """Communicators whose asynchronous result is an error, with the result."""
    return [(own, own.async_result) for own in member.last.communicators if own.async_result and own.async_result not in HEALTHY]


def _error_facts(members: Iterable[Member]) -> list[Fact]:
    return [
        told(f"{member.label} reports {result} on communicator {own.hash:016x}")
        for member in members for own, result in errors_of(member)
    ]  # fmt: skip


def creation(case: Case) -> Iterator[Hypothesis]:
    """Ranks wait for each other in the creation of a communicator; whoever has not come is named."""
    creating = [
        group for group in case.job.groups.values()
        if not READY_STATES.issuperset(map(_INIT_STATE, group.views))
        and any(own.init_state not in READY_STATES and not own.aborted for own in group.views)
    ]  # fmt: skip
    if case.waits.open or not creating:
        return
    group = max(creating, key=lambda candidate: candidate.nranks)
    # A missing rank may be a process without any communicator: which one is evident where the communicator spans the job.
    others = [member for member in reversed([*case.job.members, *case.loners]) if member.index not in group.ranks]
    by_rank = {member.info.rank: member for member in others if member.info.world_size == group.nranks}
    found = {rank: by_rank[rank] for rank in group.missing if rank in by_rank}
    supports = tuple(told(line) for line in _creation_lines(case, group, found))
    # Ranks of a job need about the same time before they come: imports, a checkpoint, a busy machine.
    prepared = max(case.known.prepared.get(member.info.key, 0.0) for member, _ in group.members.values())
    patience_s = case.known.creation_patience_s
    if case.still < (patience_s and max(patience_s, min(prepared, LONGEST_PATIENCE_S))) or not found:
        yield nobody(Cause.CREATING, supports, group=group.id)
        return
    suspects = [
        Suspect(Culprit(member.info.rank, rank, member.info.host, member.info.pid, None, group.reference()), Cause.NOT_JOINED)
        for rank, member in found.items()
    ]
    confidence = 0.8 if len(found) == len(group.missing) else 0.5
    yield naming(VerdictClass.INIT_HANG, suspects, group.ranks, confidence, supports)


def _creation_lines(case: Case, group: Group, found: dict[int, Member]) -> Iterator[str]:
    waiting = ", ".join(member.label for _, (member, _) in sorted(group.members.items())[:8])
    yield f"waiting in the creation of communicator {group.hash:016x} ({group.nranks} ranks): {waiting}"
    yield from (f"{member.label} has not come" for member in found.values())
    unseen = [rank for rank in group.missing if rank not in found]
    if unseen:
        names = ", ".join(f"rank {rank}" for rank in unseen[:16])
        yield f"{names} of this communicator {'was' if len(unseen) == 1 else 'were'} not observed"
        # Who says nothing of its rank may belong to any job: it is worth a look, and no more.
        nameless = [member.label for member in case.loners if member.info.rank is None and not member.gone]
        if nameless:
            yield f"without any communicator, and of unknown rank, so perhaps among those: {', '.join(nameless[:8])}"
    if not group.missing:
        yield "all ranks have come"


def pause(case: Case) -> Iterator[Hypothesis]:
    """Nothing moves, but not for long enough to accuse a rank that merely computes, or to say anything by calls."""
    if case.still >= case.patience_s:
        return
    if case.waits.open:
        cause = Cause.TCP_TRIES if case.patience_s == case.retries_s else Cause.PAUSE
        yield nobody(cause, first_waits(case), seconds=case.patience_s)
    else:
        yield from nothing_open(case)


def nothing_open(case: Case) -> Iterator[Hypothesis]:
    """No transfer is open that can be seen: NCCL reports an error, transports hide others, or the job computes."""
    if case.waits.open:
        return
    job, suspects = case.job, []
    for member in job.members:
        for own, result in errors_of(member)[:1]:
            suspects.append(caller(job.groups[job.number(member.index, own)], own.rank, None, Cause.NCCL_ERROR, result))
    if suspects:
        yield naming(VerdictClass.ERROR, suspects, (), 0.9, _error_facts(job.members))
    elif case.still >= case.patience_s and any(map(is_hidden, job.views)):
        yield nobody(Cause.NOTHING_SEEN, _halted_facts(case, job.gone))
    else:
        yield Hypothesis(VerdictClass.IDLE, Cause.NOTHING_OPEN, confidence=0.7)


def first_waits(case: Case) -> tuple[Fact, ...]:
    """The first waits that lead to ends: what is shown of a pause."""
    return tuple(wait_facts(wait for sink in case.waits.sinks[:SHOWN] for wait in sink.waits[:SHOWN]))
