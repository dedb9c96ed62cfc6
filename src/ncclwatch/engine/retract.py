"""Cycles of waits that are none: a rank does not wait in an operation that its GPU has not begun.

A proxy opens the receives of all that the host has called, so each of them seems to wait for its sender. A ring collective begins
with a send: while nothing of it is produced, although buffers are free, the GPU is before the operation and not in it. Waits
inside a cycle that are not begun are retracted, as long as some that are begun remain: one rank at least waits for something.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ncclwatch.engine.case import Case, Retraction
from ncclwatch.engine.connections import RING_ENDS_RECEIVING, acknowledges, has_produced, laggards, was_before
from ncclwatch.engine.edges import End, Stall, StallMark, Wait, Why, stalls_at, wait_facts
from ncclwatch.engine.evidence.base import Node, RankNode
from ncclwatch.engine.graph import Sink, components
from ncclwatch.engine.job import Job, Member
from ncclwatch.model.state import Direction, ProxyOperation, ProxySub, Transport

ONE_SIDED = ("Broadcast", "Reduce")


def not_begun(case: Case) -> Iterator[Retraction]:
    """Waits in operations that the waiter has not begun: its GPU has produced nothing, or its data for another operation lies
    unread, or its peer has the same receive open and was not kept by that from the collective. One wait of a cycle stays.
    """
    job = case.job
    for sink in _cycles(case):
        idle = [wait for wait in sink.inside if not is_begun(job, wait)]
        at_hand = {wait.target for wait in sink.inside if wait.why is Why.FULL and not wait.key.point_to_point}
        elsewhere = [wait for wait in sink.inside if wait.weak and wait.waiter in at_hand]
        for doubtful in (idle, elsewhere, _called_later(job, sink)):
            if 0 < len(doubtful) < len(sink.inside):
                yield from map(_retraction, doubtful)
                break


def not_completing(case: Case) -> Iterator[Retraction | StallMark]:
    """What one rank of a cycle waits for, where its sends over InfiniBand are not complete though they have been received.

    The receiver's adapter acknowledges what it takes. Who does not learn of it, and is waited for, has a proxy that stands still.
    """
    for sink in _cycles(case):
        found: dict[Node, list[StallMark]] = defaultdict(list)
        for wait in sink.inside:
            mark = _not_completed(case.job, wait)
            if mark is not None:
                found[wait.waiter].append(mark)
        if len(found) == 1:
            ((node, marks),) = found.items()
            yield from marks
            yield from (_retraction(wait) for wait in sink.inside if wait.waiter == node)


def behind_in_ring(case: Case) -> Iterator[Retraction | Wait]:
    """What ranks wait for that are behind in a ring of shared memory, where a cycle closes only by likely waits.

    Hosts that ran ahead have everything open. Where all else waits, the operation of which one rank has written less than its
    peers is the one that is under way. Ranks that are behind each other make a cycle still.
    """
    cycles = [sink for sink in _cycles(case) if any(wait.weak for wait in sink.inside)]
    if not cycles:
        return
    job = case.job
    lagging = [wait for wait in laggards(job) if not _is_one_sided(job, wait)]
    for sink in cycles:
        nodes = set(sink.nodes)
        behind = [wait for wait in lagging if wait.waiter in nodes and wait.target in nodes]
        following = _following([*(wait for wait in sink.inside if _is_proven(job, wait)), *behind])
        if any(len(found) > 1 for found in components(following)):
            continue
        ends = {wait.target for wait in behind} - following.keys()
        yield from (wait for wait in behind if wait.target in ends)
        yield from (_retraction(wait) for wait in sink.inside if wait.waiter in ends)


def _cycles(case: Case) -> list[Sink]:
    return [sink for sink in case.sinks if sink.is_cycle]


def _retraction(wait: Wait) -> Retraction:
    return Retraction(wait.number, wait_facts([wait])[0])


def _following(waits: Sequence[Wait]) -> dict[Node, list[Node]]:
    following: dict[Node, list[Node]] = defaultdict(list)
    for wait in waits:
        following[wait.waiter].append(wait.target)
    return following


def _not_completed(job: Job, wait: Wait) -> StallMark | None:
    end, target = wait.end, wait.target
    if wait.why is not Why.NOT_TAKEN or end is None or not isinstance(target, RankNode) or not acknowledges(end.operation):
        return None
    if not was_before(job.groups[wait.key.group], job.member(target.index), end.member):
        return None
    return stalls_at(end, wait.other, Stall.PROXY_NOT_COMPLETING, wait.source)


def _is_proven(job: Job, wait: Wait) -> bool:
    """Whether something shows that the waiter has begun the operation: it has consumed or sent some of it."""
    if wait.weak or not is_begun(job, wait):
        return False
    end = wait.end
    return end is None or end.sub.done > 0 or (end.operation.direction is Direction.SEND and has_produced(end.sub))


def _is_one_sided(job: Job, wait: Wait) -> bool:
    """Whether ranks of a communicator may have written more than others by right: a broadcast goes one way."""
    members = job.groups[wait.key.group].members.values()
    return any(own.sequence_numbers.get(name, 0) for _, own in members for name in ONE_SIDED)


def is_begun(job: Job, wait: Wait) -> bool:
    """Whether the GPU of who waits may have begun the operation it waits in: what cannot be told counts as begun."""
    end, waiter = wait.end, wait.waiter
    if end is None or not isinstance(waiter, RankNode) or wait.key.point_to_point:
        return True
    operation = end.operation
    if operation.algorithm != "Ring" or operation.collective not in RING_ENDS_RECEIVING:
        return True
    sends = _sends(job, waiter, operation)
    own = [sub for other in sends if other.comm_address == operation.comm_address for sub in other.subs]
    return not own or any(map(has_produced, own))


def has_sent(case: Case, end: End) -> bool:
    """Whether a rank that has a receive open has completed the send that the operation begins with: no proxy shows that any more.

    Proxies are given both together (ncclProxySaveOp, src/proxy.cc); with PXN it is a neighbour's proxy that sends.
    """
    operation, channel, group = end.operation, end.sub.channel, case.job.groups[end.key.group]
    rank = group.rank_of(end.member)
    if operation.direction is not Direction.RECV or rank is None or end.member.last.torn:
        return False
    if operation.algorithm != "Ring" or operation.collective not in RING_ENDS_RECEIVING:
        return False
    own = group.members[rank][1]
    following = next((ring.next for ring in own.rings if ring.channel == channel), -1)
    if (channel, following, Direction.SEND, Transport.NET) not in own.transports:
        return False
    sends = (
        (near, sub)
        for near in case.remember("hosts", lambda: _by_host(case.job))[end.member.info.host]
        for other in near.last.operations
        if (other.comm_hash, other.op_count) == (operation.comm_hash, operation.op_count) and other.direction is Direction.SEND
        for sub in other.subs if sub.channel == channel
    )  # fmt: skip
    return not any(sub.rank == rank or (sub.rank is None and near is end.member) for near, sub in sends)


def _by_host(job: Job) -> dict[str, list[Member]]:
    hosts: dict[str, list[Member]] = defaultdict(list)
    for member in job.members:
        hosts[member.info.host].append(member)
    return hosts


def _sends(job: Job, node: RankNode, operation: ProxyOperation) -> list[ProxyOperation]:
    """A rank's own sends of an operation, on whatever communicators of its hash."""
    return [
        own
        for own in job.member(node.index).last.operations
        if (own.comm_hash, own.op_count) == (operation.comm_hash, operation.op_count) and own.direction is Direction.SEND
    ]


def _called_later(job: Job, sink: Sink) -> list[Wait]:
    """Receives that do not keep their rank from what it is waited for in.

    A peer in a collective that the rank has not begun has the same receive open, and began the collective nevertheless: the
    program has that one first. Not where whoever the receive is from waits in that collective as well: the rank's own order may
    be another.
    """
    receives: dict[Node, list[Wait]] = defaultdict(list)
    for wait in sink.inside:
        if wait.key.point_to_point and wait.end is not None:
            receives[wait.waiter].append(wait)
    owed: dict[Node, set[Node]] = defaultdict(set)
    for wait in (*sink.inside, *sink.waits):
        owing = not wait.key.point_to_point and wait.target in receives and wait.waiter not in owed[wait.target]
        if owing and is_begun(job, wait) and _is_before(job, wait):
            owed[wait.target].add(wait.waiter)
    found = []
    for node, waiting in owed.items():
        as_peers = {transfer for peer in waiting for transfer in _open_receives(job, peer)}
        for wait in receives[node]:
            end = wait.end
            if end is not None and wait.target not in waiting and _transfer(end.operation, end.sub) in as_peers:
                found.append(wait)
    return found


def _open_receives(job: Job, node: Node) -> list[tuple[int, int, str]]:
    if not isinstance(node, RankNode):
        return []
    member: Member = job.member(node.index)
    operations = [o for o in member.last.operations if o.is_point_to_point and o.direction is Direction.RECV]
    return [_transfer(operation, sub) for operation in operations for sub in operation.subs if sub.done < sub.nsteps]


def _transfer(operation: ProxyOperation, sub: ProxySub) -> tuple[int, int, str]:
    """What ranks with the same part in a program have in common of a receive."""
    return operation.op_count, sub.nsteps, operation.collective


def _is_before(job: Job, wait: Wait) -> bool:
    """Whether a rank that is waited for in a collective shows its own part of it, and has not begun that."""
    end, target = wait.end, wait.target
    if end is None or not isinstance(target, RankNode):
        return False
    own = [sub for operation in _sends(job, target, end.operation) for sub in operation.subs]
    return bool(own) and not any(map(has_produced, own))
