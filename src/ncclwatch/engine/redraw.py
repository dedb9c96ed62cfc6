"""Rules that change the wait-for graph: waits that no transfer shows, and waits of cycles that are none.

A proxy drops what its transport reports as failed, from v2.22 on mostly without a word (``progressOps``, ``src/proxy.cc``), and
opens the receives of all that the host has called: so waits are drawn that it hides, and retracted where nothing has begun.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

from ncclwatch.engine import edges
from ncclwatch.engine.case import Case, Retraction
from ncclwatch.engine.edges import GPU_STALLS, OF_CALLS, PROXY_STALLS, End, Stall, StallMark, Wait, Why, has_produced, waits_for
from ncclwatch.engine.evidence.base import AbsentNode, HiddenNode, Node, RankNode, Strength, node_of
from ncclwatch.engine.evidence.calls import CallsFinding, called_less_often, operation_of
from ncclwatch.engine.evidence.device import gpu_state
from ncclwatch.engine.evidence.kernel import Census
from ncclwatch.engine.graph import Sink, Waits
from ncclwatch.engine.slow.kernels import Kernels, read_kernels
from ncclwatch.engine.stated import errors_of
from ncclwatch.model.device import KernelState
from ncclwatch.model.digraph import components
from ncclwatch.model.job import Group, Job, Member, launched
from ncclwatch.model.joined import has_arrived, is_hidden, neighbours, unseen_peers
from ncclwatch.model.rings import RING_ENDS_RECEIVING, all_messages_read, is_ring, ring_places, sends_over
from ncclwatch.model.state import ChannelRing, Communicator, Direction, ProxyOperation, Transport

MOST_PEERS = 8
"""Bound: peers for which waits of one rank are drawn on one communicator: one of them is enough to go on from."""
MOST_CALLERS = 128
"""Bound: processes of which sends and receives are compared: each costs a walk through its kept calls."""
ASKED_OF_THE_BEHIND = 64
"""Bound: so many of the ranks that have not called an operation are asked whether they wait in an earlier one: one does."""


# --- drawn of every rank -----------------------------------------------------------------------------------------------


def calls_not_made(case: Case) -> Iterator[Wait]:
    """Waits of ranks that have called a collective for those that have not.

    Only of a rank of which memory shows nothing: one that it shows at work may have called far ahead.
    """
    for number, finding in case.findings.items():
        group, asked = case.job.groups[number], finding.waiting if finding.behind else ()
        waiting = [rank for rank in asked if group.members[rank][0].index not in case.waits.busy]
        if waiting and not before_is_open(group, finding, case.waits):
            what = f"#{finding.sequence} ({finding.called.text() if finding.called else 'an operation'})"
            operation = operation_of(finding.called, finding.sequence)
            for waiter, rank in _enough_pairs(waiting, finding.behind):
                yield _wait(case, group, group.members[waiter][0], rank, Why.NOT_CALLED, what, operation=operation)


def before_is_open(group: Group, finding: CallsFinding, waits: Waits) -> bool:
    """Whether who has not called is seen waiting in an earlier collective there: that holds the group up, not the calls."""
    behind = {group.members[rank][0].index for rank in finding.behind}
    some = sorted(behind & waits.waiting)[:ASKED_OF_THE_BEHIND]
    return any(
        wait.subject == RankNode(index) and wait.key.group == group.id and not wait.key.point_to_point
        for index, own in waits.of(some).items()
        for wait in own
    )


def counted_less(case: Case) -> Iterator[Wait]:
    """Where no transfer is open: waits for ranks that have called less on a communicator nobody can look into, by NCCL's counts.

    Not where calls tell. Not by ``opCount``, which counts messages as well. O(ranks x their communicators).
    """
    for group in case.job.groups.values() if case.blind else ():
        if group.id in case.findings and case.findings[group.id].behind:
            continue
        hidden = {rank for rank, (_, own) in group.members.items() if own.sequence_numbers and is_hidden(own)}
        counts = {rank: count for rank, count in group.launches.items() if rank in hidden}
        most = max(counts.values(), default=0)
        ahead = [rank for rank, count in counts.items() if count == most]
        for waiter, rank in _enough_pairs(ahead, [rank for rank, count in counts.items() if count < most]):
            yield _counted(case, group, waiter, rank)


def messages_owed_by_all(case: Case) -> Iterator[Wait]:
    """Where no transfer is open: waits for peers that have not called the other half of a Send or Recv."""
    return _messages_owed(case, case.job.members if case.blind else ())


# --- followed from where the waits end ---------------------------------------------------------------------------------


def called_less(case: Case) -> Iterator[Wait]:
    """Waits for ranks that have called less where no transfer can be seen: of a rank at the end, and of one that is hidden.

    What a rank shows may come after what it waits in: then for a peer that shows nothing. O(ranks at the end x their peers).
    """
    after = cache(lambda index: case.waits.behind([RankNode(index)]))
    for member, idle in _may_wait_inside(case, unsure=True):
        for group, _ in _hidden_groups(case.job, member):
            counts, own = group.launches, group.ranks[member.index]
            least = min(counts.values(), default=0)
            behind = [rank for rank, count in counts.items() if count == least < counts.get(own, least)]
            for rank in behind[:MOST_PEERS]:
                peer = group.members[rank][0].index
                if idle or peer not in case.waits.busy or (peer in case.waits.waiting and peer not in after(member.index)):
                    yield _counted(case, group, own, rank)
    for node, wait in ((sink.nodes[0], wait) for sink in case.waits.ends.unseen for wait in sink.waits):
        if isinstance(node, HiddenNode):
            yield from _past_hidden(case, node, wait)


def hidden_peer(case: Case) -> Iterator[Wait]:
    """What an idle rank may wait for unseen: a peer that has called as much, and that waits for somebody else."""
    text = "it waits itself, and what joins them cannot be looked into"
    for member in _idle(case):
        behind = cache(partial(case.waits.behind, [RankNode(member.index)]))
        for group, own in _hidden_groups(case.job, member):
            mine = launched(member, own)
            for rank, (other, view) in group.members.items():
                if other.index == member.index or other.index not in case.waits.waiting:
                    continue
                theirs = launched(other, view)
                if (mine is None or theirs is None or theirs <= mine) and other.index not in behind():
                    yield _wait(case, group, member, rank, Why.UNOBSERVED, text, HiddenNode(group.id, rank))
                    break


def message_owed(case: Case) -> Iterator[Wait]:
    """Waits of an idle rank for peers that have not called the other half of its Send or Recv."""
    return _messages_owed(case, _idle(case))


def message_possible(case: Case) -> Iterator[Wait]:
    """Messages that may be waited for, unseen: by a rank that is idle, or has begun nothing where another has called less."""
    peers = case.messages.doubtful if case.messages is not None else partial(_by_memory, case.job)
    for member, group, peer in chain(((one, *asked) for one in _idle(case) for asked in peers(one)), _messages_of_less(case)):
        target: Node = HiddenNode(group.id, peer) if peer in group.members else AbsentNode(group.id, peer)
        text = "in a Send or Recv: what was read does not tell"
        yield _wait(case, group, member, peer, Why.UNOBSERVED, text, target, point_to_point=True)


def dropped_operation(case: Case) -> Iterator[Wait]:
    """Waits of a rank before its first step of what it shows, or that shows nothing, for peers that have ended.

    Of the first a neighbour nobody observed may be one as well. O(ranks that are waited for x their communicators).
    """
    gone = case.job.gone
    # Made once, and only where somebody is missing: it goes through all communicators of the job.
    census = cache(lambda: Census.of(case.job, case.known.complete_hosts))
    for member, idle in _may_wait_inside(case):
        failed = {own.address for own, _ in errors_of(member)}
        for group, own in case.job.held_by(member):
            ranks = [rank for other in gone if (rank := group.ranks.get(other.index)) is not None]
            # Of neighbours in rings: those joined by the network, for within a node nothing is dropped.
            joined = {peer for _, peer, _, transport in own.transports if transport is Transport.NET} & neighbours(own)
            for rank in sorted((joined | unseen_peers(own)) - group.members.keys()):
                runs = census().runs(group, rank)
                if runs is False or (runs is None and rank in joined and (not idle or own.address in failed)):
                    ranks.append(rank)
            for rank in ranks:
                yield _wait(case, group, member, rank, Why.DROPPED, "", node_of(group, rank))


def ring_before(case: Case) -> Iterator[Wait]:
    """Waits of a rank whose GPU has not begun what it shows for predecessors in rings through shared memory, of which it has
    read less than it has written; of one that shows nothing for those that nobody observed.

    Older releases do not tell whether there were Broadcasts and the like: then it is no more than a possibility.
    """
    for member, idle in _may_wait_inside(case):
        for group, own in case.job.held_by(member):
            names = set(own.sequence_numbers)
            for at in ring_places(own) if names <= RING_ENDS_RECEIVING else ():
                if at.unread or at.ahead <= 0 or (idle and at.ring.prev in group.members):
                    continue
                text = f"it has written {at.written} steps of the ring itself, and read {at.read}"
                hidden = HiddenNode(group.id, at.ring.prev) if not names else None
                yield _wait(case, group, member, at.ring.prev, Why.EMPTY, text, hidden, channel=at.ring.channel)


# --- parts of what is followed --------------------------------------------------------------------------------------------


def _may_wait_inside(case: Case, *, unsure: bool = False) -> Iterator[tuple[Member, bool]]:
    """Of ranks at which the waits end the idle ones, and those that have begun nothing of what they show; which of the two.

    ``unsure``: also of cycles of which it does not show whether anything has begun (trees: an inner rank receives first).
    """
    begun = has_moved if unsure else is_begun
    for sink in case.waits.sinks:
        if sink.is_cycle:
            ahead = {*sink.nodes} - {wait.subject for wait in sink.inside if begun(case.job, wait)}
            yield from ((case.job.member(one.index), False) for one in sink.nodes if isinstance(one, RankNode) and one in ahead)
        member = sink.member
        if member is not None and not member.halted and all(_gpu_not_begun(case.job, member, mark) for mark in sink.stalls):
            yield member, not sink.stalls


def _idle(case: Case) -> list[Member]:
    return [member for member, idle in _may_wait_inside(case) if idle]


def _gpu_not_begun(job: Job, member: Member, mark: StallMark) -> bool:
    if mark.stall not in GPU_STALLS or gpu_state(job, member, mark.key.group) is KernelState.RUNNING:
        return False
    return mark.end is None or not mark.end.sub.gpu_began


def _hidden_groups(job: Job, member: Member) -> Iterator[tuple[Group, Communicator]]:
    return ((group, own) for group, own in job.held_by(member) if is_hidden(own))


def _enough_pairs(waiting: Sequence[int], behind: Sequence[int]) -> list[tuple[int, int]]:
    """Who waits for whom where everybody waits and everybody behind is waited for: one wait for each is enough to follow."""
    return [(waiter, behind[0]) for waiter in waiting if behind] + [(waiting[0], other) for other in behind[1:]]


def _past_hidden(case: Case, node: HiddenNode, wait: Wait) -> Iterator[Wait]:
    """Waits at an end that NVLink hides. Who may wait for the hidden rank does, where that one has called less. The hidden rank
    waits in turn, where others wait for the first on a communicator on which it has called less.
    """
    job, door = case.job, wait.subject
    peer = job.groups[node.group_id].holder(node.comm_rank)
    if not isinstance(door, RankNode) or peer is None:
        return
    # Whether a message is owed counts of collectives do not tell.
    others = case.waits.of([door.index])[door.index] if not wait.key.point_to_point else ()
    asked = {one.key.group for one in others if one.object == door and one.why in OF_CALLS}
    for number in {node.group_id, *asked}:
        counts = (group := job.groups[number]).launches
        own, rank = (group.ranks.get(index, -1) for index in (door.index, peer.index))
        if not {own, rank} <= counts.keys():
            continue
        if number == node.group_id and counts[rank] < counts[own]:
            yield _counted(case, group, own, rank)
        elif number in asked and counts[own] < counts[rank]:
            yield replace(_counted(case, group, rank, own), subject=node)


def _counted(case: Case, group: Group, own: int, rank: int) -> Wait:
    detail = f"{group.launches[own]} calls there, {group.launches[rank]} by that one"
    return _wait(case, group, group.members[own][0], rank, Why.NOT_CALLED, detail)


def _messages_owed(case: Case, members: Sequence[Member]) -> Iterator[Wait]:
    if case.messages is not None and len(members) <= MOST_CALLERS:
        for member in members:
            for group, peer in case.messages.owed(member):
                yield _wait(case, group, member, peer, Why.NO_MESSAGE, "a Send or Recv", point_to_point=True)


def _by_memory(job: Job, member: Member) -> Iterator[tuple[Group, int]]:
    """Whom a process has connections for messages with, on a communicator on which no collective was ever called."""
    for group, own in job.held_by(member):
        if launched(member, own) == 0:
            yield from ((group, peer) for peer in sorted(unseen_peers(own)) if own.may_message(peer))


def _messages_of_less(case: Case) -> Iterator[tuple[Member, Group, int]]:
    """Whose message a rank that has begun nothing may wait for: of an end that has called less, or of one that waits for that."""
    members = dict(_may_wait_inside(case))
    behind = {case.job.groups[number].members[rank][0].index for number, one in case.findings.items() for rank in one.behind}
    less = {member.index for member in members if member.index in behind or any(called_less_often(case.job, member))}
    others = [member for member, idle in members.items() if not idle and member.index not in less]
    led = less | case.waits.behind(map(RankNode, less)) if less and others else less
    for member, group, own in ((one, *held) for one in others if led for held in case.job.held_by(one)):
        for peer in all_messages_read(own):
            if (other := group.holder(peer)) is not None and other.index in led:
                yield member, group, peer


def _wait(
    case: Case, group: Group, member: Member, rank: int, why: Why, detail: str, possible: Node | None = None, **more: Any
) -> Wait:  # fmt: skip
    """A wait on a communicator; ``possible``: where it leads, if it is no more than a possibility."""
    strength, where = Strength.POSSIBLE if possible is not None else Strength.PROVEN, f" on communicator {group.hash:016x}"
    return waits_for(case.job, group, member, rank, why, detail, target=possible, strength=strength, where=where, **more)


# --- retracted from cycles -----------------------------------------------------------------------------------------------


def not_begun(case: Case) -> Iterator[Retraction]:
    """Waits in operations that the waiter has not begun: its GPU has produced nothing, or its data for another operation lies
    unread, or its peer has the same open and was not kept by that from another collective, or it has called another before that
    is not over. One wait of a cycle stays.
    """
    for sink in case.waits.ends.cycles:
        idle = [wait for wait in sink.inside if not is_begun(case.job, wait) or _stands_elsewhere(case, wait)]
        at_hand = {wait.object for wait in sink.inside if wait.why is Why.FULL and not wait.key.point_to_point}
        elsewhere = [wait for wait in sink.inside if wait.weak and wait.subject in at_hand]
        after = [wait for wait in sink.inside if _comes_after(case, wait)]
        for doubtful in (idle, elsewhere, _called_later(case.job, sink), after, _passed_over(case, sink)):
            if 0 < len(doubtful) < len(sink.inside):
                yield from map(Retraction, doubtful)
                break


def not_completing(case: Case) -> Iterator[Retraction | StallMark]:
    """What one rank of a cycle waits for, where its sends over InfiniBand are not complete though they have been received."""
    for sink in case.waits.ends.cycles:
        found: dict[Node, list[StallMark]] = defaultdict(list)
        for wait in sink.inside:
            end, target, group = wait.end, wait.object, case.job.groups[wait.key.group]
            if wait.why is not Why.NOT_TAKEN or end is None or not isinstance(target, RankNode):
                continue
            if has_arrived(end.operation, group, case.job.member(target.index), end.member):
                found[wait.subject].append(edges.stalls_at(end, wait.other, Stall.PROXY_NOT_COMPLETING))
        if len(found) == 1:
            ((node, marks),) = found.items()
            yield from marks
            yield from (Retraction(wait) for wait in sink.inside if wait.subject == node)


def behind_in_ring(case: Case) -> Iterator[Retraction | Wait]:
    """What ranks wait for that are behind in a ring of shared memory, where a cycle closes only by likely waits.

    Ranks that are behind each other make a cycle still.
    """
    job = case.job
    lagging = cache(lambda: [wait for wait in edges.laggards(job, case.rings) if not _is_one_sided(job, wait)])
    for sink in case.waits.ends.cycles:
        if not any(wait.weak for wait in sink.inside):
            continue
        behind = [wait for wait in lagging() if {wait.subject, wait.object} <= set(sink.nodes)]
        following: dict[Node, list[Node]] = defaultdict(list)
        for wait in (*(wait for wait in sink.inside if _is_proven(job, wait)), *behind):
            following[wait.subject].append(wait.object)
        if all(len(found) == 1 for found in components(following)):
            ends = {wait.object for wait in behind} - following.keys()
            yield from (wait for wait in behind if wait.object in ends)
            yield from (Retraction(wait) for wait in sink.inside if wait.subject in ends)


# --- parts of what is retracted ------------------------------------------------------------------------------------------


def _is_proven(job: Job, wait: Wait) -> bool:
    if wait.weak or not is_begun(job, wait):
        return False
    end = wait.end
    return end is None or end.sub.done > 0 or (end.operation.direction is Direction.SEND and has_produced(end.sub))


def _is_one_sided(job: Job, wait: Wait) -> bool:
    """Whether ranks of a communicator may have written more than others by right: a broadcast goes one way."""
    counts = [own.sequence_numbers for _, own in job.groups[wait.key.group].members.values()]
    return any(own.get("Broadcast") or own.get("Reduce") for own in counts)


def is_begun(job: Job, wait: Wait) -> bool:
    """Whether the GPU of who waits may have begun the operation it waits in: what cannot be told counts as begun."""
    operation = wait.end.operation if wait.end is not None and not wait.key.point_to_point else None
    if operation is None or not is_ring(operation):
        return True
    return _sends(job, wait.subject, operation, operation.comm_address) is not False


def _comes_after(case: Case, wait: Wait) -> bool:
    """Whether by its recorded calls who waits is before another operation, and nothing shows that it has begun this one."""
    if (end := wait.end) is None or not isinstance(wait.subject, RankNode):
        return False
    begun = end.sub.gpu_began if wait.key.point_to_point else has_moved(case.job, wait)
    kernels = None if begun else _in_order(case, end.member)
    return kernels is not None and kernels.first is not None and kernels.of.get(end.operation.address) != kernels.first


def _in_order(case: Case, member: Member) -> Kernels:
    orders = case.known.orders
    return read_kernels(case.job, member, orders.find(member.info.host, member.info.pid) if orders is not None else None)


def _stands_elsewhere(case: Case, wait: Wait) -> bool:
    """Whether who waits in what shows no move stands still in the middle of an operation of another communicator."""
    if not isinstance(wait.subject, RankNode) or has_moved(case.job, wait):
        return False
    marks = (mark for mark in case.waits.stalls_of(wait.subject.index) if mark.key.group != wait.key.group)
    return any(mark.end is not None and (mark.stall in PROXY_STALLS or mark.end.sub.gpu_began) for mark in marks)


def has_moved(job: Job, wait: Wait) -> bool:
    """Whether it shows that the GPU of who waits has begun the operation: it has sent or taken some of it."""
    end = wait.end if not wait.key.point_to_point else None
    moved = end is None or end.sub.done > 0 or _sends(job, wait.subject, end.operation) is True or has_sent(job, end)
    return moved and is_begun(job, wait)


def has_sent(job: Job, end: End) -> bool:
    """Whether who receives in a collective has sent all that it has to pass on there: its send is over and gone."""
    operation, channel, members = end.operation, end.key.channel, job.groups[end.key.group].members
    # On behalf of whom a proxy receives is its record's word, and may be a rank that nobody observes.
    if end.sends or operation.collective not in RING_ENDS_RECEIVING or end.key.destination not in members:
        return False
    own = members[end.key.destination][1]
    ring = own.ring(channel) or ChannelRing(channel, -1, -1)
    return sends_over(end.member, own, channel, ring.next if is_ring(operation) else ring.parent, operation.op_count)


def _sends(job: Job, node: Node, operation: ProxyOperation, address: int | None = None) -> bool | None:
    """Whether a rank's GPU has produced anything of its send of an operation (``address``: of one communicator)."""
    same = operation.comm_hash, operation.op_count, Direction.SEND
    subs = [
        sub for own in (job.member(node.index).last.operations if isinstance(node, RankNode) else ())
        if (own.comm_hash, own.op_count, own.direction) == same and address in (None, own.comm_address) for sub in own.subs
    ]  # fmt: skip
    return any(map(has_produced, subs)) if subs else None


def _passed_over(case: Case, sink: Sink) -> list[Wait]:
    """Waits that show no move, in a collective that another rank of the cycle has called, too, while it is amid an earlier one.
    Where a rank's calls were recorded, these tell.
    """
    ends = [(wait, wait.end) for wait in sink.inside if wait.end is not None and not wait.key.point_to_point]
    amid = [at for wait, at in ends if has_moved(case.job, wait)]
    open_ = [(wait, end) for wait, end in ends if end not in amid and _in_order(case, end.member).first is None]
    return [wait for wait, end in open_ if any(_both_called(at, end) for at in amid)]


def _both_called(first: End, end: End) -> bool:
    """Whether both processes have called both collectives, which are of different communicators."""
    return first.key.group != end.key.group and has_open(first.member, end.operation) and has_open(end.member, first.operation)


def has_open(member: Member, operation: ProxyOperation) -> bool:
    """Whether a process has this operation open as well."""
    return any((one.comm_hash, one.op_count) == (operation.comm_hash, operation.op_count) for one in member.last.operations)


def _called_later(job: Job, sink: Sink) -> list[Wait]:
    """Receives that a peer has open as well, which began the collective nevertheless, and that none in it is to answer."""
    receives = [(wait, wait.end) for wait in sink.inside if wait.key.point_to_point and wait.end is not None]
    receiving = {wait.subject for wait, _ in receives}
    owed: dict[Node, set[Node]] = defaultdict(set)
    for wait in (*sink.inside, *sink.waits):
        if wait.end is None or wait.key.point_to_point or wait.object not in receiving or wait.subject in owed[wait.object]:
            continue
        if is_begun(job, wait) and _sends(job, wait.object, wait.end.operation) is False:
            owed[wait.object].add(wait.subject)
    # What ranks with the same part in a program have in common of a receive.
    open_at = {
        node: {
            (one.op_count, sub.nsteps, one.collective)
            for peer in waiting if isinstance(peer, RankNode)
            for one in job.member(peer.index).last.operations if one.is_point_to_point and one.direction is Direction.RECV
            for sub in one.subs if sub.done < sub.nsteps
        }
        for node, waiting in owed.items()
    }  # fmt: skip
    return [
        wait for wait, end in receives
        if wait.object not in owed[wait.subject]
        and (end.operation.op_count, end.sub.nsteps, end.operation.collective) in open_at.get(wait.subject, ())
    ]  # fmt: skip
