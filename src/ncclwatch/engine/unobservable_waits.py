"""Waits that no transfer shows: what calls and counts prove, and whom a rank at which the waits end may wait for itself.

A rank with nothing open where one can look may wait inside its node, over a transport nobody can look into (NVLink and the like),
for a message, or in an operation with a rank that has ended: a proxy drops an operation whose transport reports an error, and
from v2.22 on mostly tells nobody (``progressOps``, ``src/proxy.cc``). In a ring of two nothing of it is left then: the GPU waits
for ever in a kernel of which memory shows no trace, and what was called after it lies there as if its GPU did not begin it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from ncclwatch.engine.case import Case
from ncclwatch.engine.connections import RING_ENDS_RECEIVING, is_hidden, ring_places, unseen_peers
from ncclwatch.engine.edges import Stall, StallMark, Wait, Why, enough_pairs, waits_for
from ncclwatch.engine.evidence.base import AbsentNode, HiddenNode, Node, RankNode, Strength
from ncclwatch.engine.evidence.calls import CallsFinding, operation_of
from ncclwatch.engine.evidence.device import gpu_state
from ncclwatch.engine.evidence.kernel import Census
from ncclwatch.engine.graph import Waits
from ncclwatch.engine.job import Group, Job, Member, launched
from ncclwatch.engine.stated import errors_of
from ncclwatch.model.device import KernelState
from ncclwatch.model.state import Communicator, Transport

NAME = "calls"
POSSIBLE = Strength.POSSIBLE

MOST_PEERS = 8
"""Bound: peers for which waits of one rank are drawn on one communicator: one of them is enough to go on from."""
MOST_CALLERS = 128
"""Bound: processes of which sends and receives are compared: each costs a walk through its kept calls."""
ASKED_OF_THE_BEHIND = 64
"""Bound: so many of the ranks that have not called an operation are asked whether they wait in an earlier one: one is enough."""


# --- drawn of every rank -----------------------------------------------------------------------------------------------


def calls_not_made(case: Case) -> Iterator[Wait]:
    """Waits of ranks that have called a collective for those that have not.

    Only of a rank of which memory shows nothing (its transports are hidden, or its transfers have not begun). One that memory
    shows at work may have called far ahead: for it the calls say nothing.
    """
    if not any(finding.behind for finding in case.findings.values()):
        return
    seen = case.waits.busy()
    for number, finding in case.findings.items():
        group = case.job.groups[number]
        behind = [member for rank in finding.behind if (member := group.holder(rank)) is not None]
        waiting = [m for rank in finding.waiting if (m := group.holder(rank)) is not None and m.index not in seen]
        if not behind or not waiting or before_is_open(group, finding, case.waits):
            continue
        operation = operation_of(finding.called, finding.sequence)
        what = f"#{finding.sequence} ({finding.called.text() if finding.called else 'an operation'})"
        for waiter, other in enough_pairs(waiting, behind):
            wait = _wait(case.job, group, waiter, group.ranks[other.index], Why.NOT_CALLED, what)
            yield replace(wait, operation=operation)


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


def counted_less(case: Case) -> Iterator[Wait]:
    """Where no transfer is open: waits for ranks that have called less on a communicator nobody can look into, by NCCL's counts.

    Not on communicators of which the calls tell. Only by counts of each collective: launches (``opCount``) count messages as
    well, of which the ranks of a pipeline make more or less by right. O(ranks x their communicators).
    """
    for group in case.job.groups.values() if case.blind else ():
        if group.id in case.findings and case.findings[group.id].behind:
            continue
        hidden = {rank for rank, (_, own) in group.members.items() if own.sequence_numbers and is_hidden(own)}
        counts = {rank: count for rank, count in _counts(group).items() if rank in hidden}
        least, most = min(counts.values(), default=0), max(counts.values(), default=0)
        ahead = [rank for rank, count in counts.items() if count == most]
        behind = [rank for rank, count in counts.items() if count < most]
        for waiter, rank in enough_pairs(ahead, behind) if least < most else ():
            yield _counted(case.job, group, waiter, rank, counts)


def messages_owed_by_all(case: Case) -> Iterator[Wait]:
    """Where no transfer is open: waits for peers that have not called the other half of a Send or Recv."""
    if case.blind:
        yield from _messages_owed(case, case.job.members)


# --- followed from where the waits end ---------------------------------------------------------------------------------


def called_less(case: Case) -> Iterator[Wait]:
    """Waits of a rank at the end for peers that have called less on a communicator nobody can look into.

    What a rank shows may come after what it waits in, where nothing of it is begun: then it waits for a peer that shows nothing.
    O(ranks at the end x their peers).
    """
    busy: set[int] | None = None
    for member, idle in _may_wait_inside(case):
        for group, _ in _hidden_groups(case.job, member):
            counts, own = _counts(group), group.ranks[member.index]
            least = min(counts.values(), default=0)
            if own not in counts or least >= counts[own]:
                continue
            for rank in [rank for rank, count in counts.items() if count == least][:MOST_PEERS]:
                other = group.members[rank][0]
                if idle or other.index not in (busy := case.waits.busy() if busy is None else busy):
                    yield _counted(case.job, group, own, rank, counts)


def hidden_peer(case: Case) -> Iterator[Wait]:
    """What an idle rank may wait for unseen: a peer that has called as much, and that waits for somebody else."""
    waiting: set[int] | None = None
    for sink in case.sinks:
        member = sink.member(case.job)
        if member is None or member.halted or sink.stalls:
            continue
        behind: set[int] | None = None
        for group, own in _hidden_groups(case.job, member):
            waiting = case.waits.waiting() if waiting is None else waiting
            mine = launched(member, own)
            for rank, (other, view) in group.members.items():
                if other.index == member.index or other.index not in waiting:
                    continue
                theirs = launched(other, view)
                if mine is not None and theirs is not None and theirs > mine:
                    continue
                behind = sink.behind() if behind is None else behind
                if other.index in behind:
                    continue
                text = "it waits itself, and what joins them cannot be looked into"
                yield _wait(case.job, group, member, rank, Why.UNOBSERVED, text, HiddenNode(group.id, rank), POSSIBLE)
                break


def message_owed(case: Case) -> Iterator[Wait]:
    """Waits of an idle rank for peers that have not called the other half of its Send or Recv."""
    yield from _messages_owed(case, _idle(case))


def message_possible(case: Case) -> Iterator[Wait]:
    """Waits of an idle rank for messages where the calls do not tell, or nobody recorded them: they end unseen."""
    messages = case.messages
    peers = messages.doubtful if messages is not None else partial(_by_memory, case.job)
    for member in _idle(case):
        for group, peer in peers(member):
            target: Node = HiddenNode(group.id, peer) if peer in group.members else AbsentNode(group.id, peer)
            text = "in a Send or Recv: what was read does not tell"
            yield _wait(case.job, group, member, peer, Why.UNOBSERVED, text, target, POSSIBLE, point_to_point=True)


def dropped_operation(case: Case) -> Iterator[Wait]:
    """Waits of a rank before its first step of what it shows, or that shows nothing, for peers that have ended.

    A rank that has called an operation its GPU has not begun is in something before it: without a trace of that, a neighbour
    nobody observed may be what it waits for as well. One that has not called is followed only to a peer that is known to have
    ended. O(ranks that are waited for x their communicators).
    """
    job = case.job
    gone = [member for member in job.members if member.gone]
    # Made once, and only where somebody is missing: it goes through all communicators of the job.
    census = cache(lambda: Census.of(job, case.known.complete_hosts))
    for member, idle in _may_wait_inside(case):
        for group, rank, target in _may_have_ended(job, member, gone, census, unseen_too=not idle):
            yield _wait(job, group, member, rank, Why.DROPPED, "", target, POSSIBLE)


def ring_before(case: Case) -> Iterator[Wait]:
    """Waits of a rank whose GPU has not begun what it shows for predecessors in rings through shared memory, of which it has read
    less than it has written; of one that shows nothing for those that nobody observed.

    AllReduce, AllGather and ReduceScatter write and read as much on each ring: who is between is in such an operation. Broadcasts
    and the like do not, and older releases do not tell whether there were any: then it is no more than a possibility.
    """
    for member, idle in _may_wait_inside(case):
        for group, own in case.job.held_by(member):
            names = set(own.sequence_numbers)
            for at in ring_places(own) if names <= RING_ENDS_RECEIVING else ():
                if at.unread or at.ahead <= 0 or (idle and at.ring.prev in group.members):
                    continue
                prev, text = at.ring.prev, f"it has written {at.written} steps of the ring itself, and read {at.read}"
                target, strength = (None, Strength.PROVEN) if names else (HiddenNode(group.id, prev), POSSIBLE)
                yield _wait(case.job, group, member, prev, Why.EMPTY, text, target, strength, channel=at.ring.channel)


def not_begun(job: Job, member: Member, mark: StallMark) -> bool:
    """Whether a stall is that of a GPU that may not have come to the operation yet."""
    if mark.stall not in (Stall.GPU_NOT_PRODUCING, Stall.GPU_NOT_CONSUMING):
        return False
    if gpu_state(job, member, mark.key.group) is KernelState.RUNNING:
        return False
    return mark.end is None or (mark.end.sub.done == 0 and not mark.end.sub.gpu_ready)


# --- parts -------------------------------------------------------------------------------------------------------------


def _idle(case: Case) -> list[Member]:
    """The running processes that others wait for and that have nothing open."""
    found = (sink.member(case.job) for sink in case.sinks if not sink.stalls)
    return [member for member in found if member is not None and not member.halted]


def _may_wait_inside(case: Case) -> Iterator[tuple[Member, bool]]:
    """The idle ones, and those that have begun nothing of what they show; which of the two."""
    for sink in case.sinks:
        member = sink.member(case.job)
        if member is not None and not member.halted and all(not_begun(case.job, member, mark) for mark in sink.stalls):
            yield member, not sink.stalls


def _hidden_groups(job: Job, member: Member) -> Iterator[tuple[Group, Communicator]]:
    return ((group, own) for group, own in job.held_by(member) if is_hidden(own))


def _counts(group: Group) -> dict[int, int]:
    """How many collectives each rank of a communicator has called by NCCL's counts, where that can be compared."""
    counts = {rank: launched(member, own) for rank, (member, own) in group.members.items()}
    return {rank: count for rank, count in counts.items() if count is not None}


def _counted(job: Job, group: Group, own: int, rank: int, counts: Mapping[int, int]) -> Wait:
    detail = f"{counts[own]} calls there, {counts[rank]} by that one"
    return _wait(job, group, group.members[own][0], rank, Why.NOT_CALLED, detail)


def _messages_owed(case: Case, members: Sequence[Member]) -> Iterator[Wait]:
    messages = case.messages
    if messages is None or len(members) > MOST_CALLERS:
        return
    for member in members:
        for group, peer in messages.owed(member):
            yield _wait(case.job, group, member, peer, Why.NO_MESSAGE, "a Send or Recv", point_to_point=True)


def _by_memory(job: Job, member: Member) -> Iterator[tuple[Group, int]]:
    """Whom a process may wait for in messages, by what memory shows: peers that it is connected with on a communicator on which
    no collective was ever called.
    """
    for group, own in job.held_by(member):
        if launched(member, own) == 0:
            yield from ((group, peer) for peer in sorted(unseen_peers(own)))


def _may_have_ended(
    job: Job, member: Member, gone: Sequence[Member], census: Callable[[], Census], *, unseen_too: bool
) -> Iterator[tuple[Group, int, Node]]:
    """Whom a rank may wait for without a trace: (communicator, rank in it, node)."""
    failed = {own.address for own, _ in errors_of(member)}
    for group, own in job.held_by(member):
        for other in gone:
            if (rank := group.rank_of(other)) is not None:
                yield group, rank, RankNode(other.index)
        # Of neighbours in rings: those joined by the network, for within a node nothing is dropped.
        joined = {peer for _, peer, _, transport in own.transports if transport is Transport.NET}
        joined &= {neighbour for ring in own.rings for neighbour in (ring.prev, ring.next)}
        for rank in sorted((joined | unseen_peers(own)) - group.members.keys()):
            runs = census().runs(group, rank)
            if runs is False or (runs is None and rank in joined and (unseen_too or own.address in failed)):
                yield group, rank, AbsentNode(group.id, rank)


def _wait(
    job: Job, group: Group, member: Member, rank: int, why: Why, detail: str, target: Node | None = None,
    strength: Strength = Strength.PROVEN, *, channel: int = 0, point_to_point: bool = False,
) -> Wait:  # fmt: skip
    """That a process waits, or may, for a rank of a communicator; ``target``: where the wait leads, if not to that rank."""
    return waits_for(
        job, group, member, rank, why, detail, source=NAME, channel=channel, point_to_point=point_to_point, strength=strength,
        target=target, where=f" on communicator {group.hash:016x}",
    )  # fmt: skip
