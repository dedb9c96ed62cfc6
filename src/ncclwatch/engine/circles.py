"""Circles of waits that are none: a rank does not wait in an operation that its GPU has not begun.

A proxy opens the receives of all that the host has called, so each of them seems to wait for its sender. A ring collective begins
with a send: while nothing of it is produced, although buffers are free, the GPU stands before the operation and not in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from ncclwatch.engine.delivered import acknowledges, was_before
from ncclwatch.engine.edges import Node, RankNode, Stall, StallMark, Wait, Why
from ncclwatch.engine.graph import components
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.laggards import laggards
from ncclwatch.engine.locate import Sink
from ncclwatch.engine.ring_positions import all_under_way
from ncclwatch.engine.waits import RING_ENDS_RECEIVING, has_produced
from ncclwatch.model.state import Direction, ProxyOperation, ProxySub

ONE_SIDED = ("Broadcast", "Reduce")


def break_false_circles(job: Job, sinks: Sequence[Sink]) -> list[Sink]:
    """The sinks, circles among them replaced by where the waits in them end that are begun; circles of which no wait is begun
    stay as they are. O(waits inside circles).
    """
    parts = [part for sink in sinks for part in (_parts(job, sink) if sink.is_cycle else [sink])]
    parts = [_not_completing(job, part) if part.is_cycle else part for part in parts]
    weak = [part.is_cycle and any(wait.weak for wait in part.inside) for part in parts]
    lagging = [wait for wait in laggards(job, all_under_way(job)) if not _is_one_sided(job, wait)] if any(weak) else []
    return [
        end for part, doubtful in zip(parts, weak, strict=True) for end in (_behind(job, part, lagging) if doubtful else [part])
    ]


def _not_completing(job: Job, sink: Sink) -> Sink:
    """The one rank of a circle whose sends over InfiniBand are not complete though they have been received; else the circle.

    The receiver's adapter acknowledges what it takes. Who does not learn of it, and is waited for, has a proxy that stands still.
    """
    found: dict[Node, list[StallMark]] = defaultdict(list)
    for wait in sink.inside:
        end, target = wait.end, wait.target
        if wait.why is not Why.NOT_TAKEN or end is None or not isinstance(target, RankNode) or not acknowledges(end.operation):
            continue
        if was_before(job.groups[wait.key.group], job.member(target.index), end.member):
            described = partial(_received, end.member, wait)
            found[wait.waiter].append(StallMark(end.member, Stall.PROXY_NOT_COMPLETING, wait.key, described, end))
    if len(found) != 1:
        return sink
    ((node, marks),) = found.items()
    return _end_at(sink, node, sink.inside, marks)


def _received(member: Member, wait: Wait) -> str:
    return f"{member.label}: {Stall.PROXY_NOT_COMPLETING}: {wait.text.partition(f'{Why.NOT_TAKEN}: ')[2]}"


def _end_at(sink: Sink, node: Node, waits: Sequence[Wait], marks: Sequence[StallMark] = ()) -> Sink:
    """One rank of a circle as the end of those of these waits, and of those into the circle, that lead to it."""
    into = [wait for wait in (*waits, *sink.waits) if wait.target == node]
    stalls = [mark for mark in sink.stalls if RankNode(mark.member.index) == node]
    return Sink((node,), sink.graph, into, [], [*stalls, *marks])


def _behind(job: Job, sink: Sink, lagging: Sequence[Wait]) -> list[Sink]:
    """The ranks of a circle that are behind in a ring of shared memory, where it closes only by waits that are not proven to be
    begun; else the circle.

    Hosts that ran ahead have everything open. Where all else waits, the operation of which one rank has written less than its
    fellows is the one that is under way. Ranks that are behind each other make a circle still.
    """
    nodes = set(sink.nodes)
    lag = [wait for wait in lagging if wait.waiter in nodes and wait.target in nodes]
    proven = [wait for wait in sink.inside if _is_proven(job, wait)] + lag
    following: dict[Node, list[Node]] = defaultdict(list)
    for wait in proven:
        following[wait.waiter].append(wait.target)
    if any(len(found) > 1 for found in components(sink.nodes, following)):
        return [sink]
    ends = [_end_at(sink, node, proven) for node in sorted({wait.target for wait in lag} - following.keys(), key=repr)]
    return ends or [sink]


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


def _sends(job: Job, node: RankNode, operation: ProxyOperation) -> list[ProxyOperation]:
    """A rank's own sends of an operation, on whatever communicators of its hash."""
    return [
        own
        for own in job.member(node.index).last.operations
        if (own.comm_hash, own.op_count) == (operation.comm_hash, operation.op_count) and own.direction is Direction.SEND
    ]


def _called_later(job: Job, sink: Sink) -> set[int]:
    """Receives of a circle (by ``id``) that do not keep their rank from what it is waited for in, as a fellow's equal ones show.

    A fellow in a collective that the rank has not begun has the same receive open, and began the collective nevertheless: the
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
        if owing and is_begun(job, wait) and _stands_before(job, wait):
            owed[wait.target].add(wait.waiter)
    found = set()
    for node, waiting in owed.items():
        as_fellows = {transfer for fellow in waiting for transfer in _open_receives(job, fellow)}
        for wait in receives[node]:
            end = wait.end
            if end is not None and wait.target not in waiting and _transfer(end.operation, end.sub) in as_fellows:
                found.add(id(wait))
    return found


def _open_receives(job: Job, node: Node) -> list[tuple[int, int, str]]:
    if not isinstance(node, RankNode):
        return []
    operations = [o for o in job.member(node.index).last.operations if o.is_point_to_point and o.direction is Direction.RECV]
    return [_transfer(operation, sub) for operation in operations for sub in operation.subs if sub.done < sub.nsteps]


def _transfer(operation: ProxyOperation, sub: ProxySub) -> tuple[int, int, str]:
    """What ranks with the same part in a program have in common of a receive."""
    return operation.op_count, sub.nsteps, operation.collective


def _stands_before(job: Job, wait: Wait) -> bool:
    """Whether a rank that is waited for in a collective shows its own part of it, and has not begun that."""
    end, target = wait.end, wait.target
    if end is None or not isinstance(target, RankNode):
        return False
    own = [sub for operation in _sends(job, target, end.operation) for sub in operation.subs]
    return bool(own) and not any(map(has_produced, own))


def _parts(job: Job, sink: Sink) -> list[Sink]:
    # Whose data lies unread in the one operation is not held up in the other, of which nothing shows that it has begun it.
    at_hand = {wait.target for wait in sink.inside if wait.why is Why.FULL and not wait.key.point_to_point}
    later = _called_later(job, sink)
    begun = [
        wait for wait in sink.inside
        if is_begun(job, wait) and not (wait.weak and wait.waiter in at_hand) and id(wait) not in later
    ]  # fmt: skip
    if not begun or len(begun) == len(sink.inside):
        return [sink]
    following: dict[Node, list[Node]] = defaultdict(list)
    for wait in begun:
        following[wait.waiter].append(wait.target)
    found = []
    for nodes in components(sink.nodes, following):
        own = set(nodes)
        inside = [wait for wait in begun if wait.waiter in own]
        if any(wait.target not in own for wait in inside):
            continue
        into = [wait for wait in (*begun, *sink.waits) if wait.target in own and wait.waiter not in own]
        if not into and not inside:
            continue
        stalls = [mark for mark in sink.stalls if RankNode(mark.member.index) in own]
        found.append(Sink(tuple(sorted(own, key=repr)), sink.graph, into, inside, stalls))
    return found
