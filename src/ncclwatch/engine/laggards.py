"""Ranks that lag in shared memory, read off how much each has written: in rings, and where all send to all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ncclwatch.engine.connections import CONNECTION_SLOTS, ConnectionKey
from ncclwatch.engine.edges import RankNode, Wait, Why
from ncclwatch.engine.job import Group, Job
from ncclwatch.engine.ring_positions import RingsUnderWay, ring_written
from ncclwatch.model.state import Communicator, Direction

CHUNK_STEPS = CONNECTION_SLOTS // 2
"""What a rank writes at a time, in steps: its own part first, then what each rank before it has written (all tags:
``ALLREDUCE_CHUNKSTEPS`` and its like in ``src/include/collectives.h``).
"""


def laggards(job: Job, amid: RingsUnderWay) -> Iterator[Wait]:
    """Waits for ranks that lag in a ring of shared memory.

    A rank whose own counters say that it waits there waits for the one before. All ranks of a ring write the same number of steps
    an operation, so one that has written less than the others has not come as far; and nobody ends a collective before the last
    has contributed. Of one that waits itself no other is said to wait, nor by whom is further ahead than it can be without it:
    they were read at different moments. ``amid``: who of each communicator is amid an operation.
    """
    for group in job.groups.values():
        if group.nranks < 2:
            continue
        waiting = {
            channel: {rank: position.prev for rank, position in ranks.items() if not position.unread}
            for channel, ranks in amid[group.id].items()
        }
        for channel, previous in waiting.items():
            for rank, prev in previous.items():
                if prev in group.members:
                    yield _wait(job, group, channel, rank, prev, "all that was written is read")
        if len(group.members) < group.nranks:
            continue
        for channel, tails in ring_written(group).items():
            least = min(tails.values())
            if len(tails) < group.nranks or least == max(tails.values()):
                continue
            behind = [rank for rank, tail in tails.items() if tail == least and rank not in waiting.get(channel, {})]
            after = {other: _hops(group, channel, other) for other in behind}
            for rank, tail in tails.items():
                for other in behind:
                    if 0 < tail - least <= CHUNK_STEPS * after[other].get(rank, 0):
                        yield _wait(job, group, channel, rank, other, f"{tail - least} steps behind")


def _hops(group: Group, channel: int, first: int) -> dict[int, int]:
    """How many ranks further on in the ring of a channel each rank is than the first."""
    following = {rank: ring.next for rank, (_, own) in group.members.items() for ring in own.rings if ring.channel == channel}
    found, rank = {first: 0}, following.get(first)
    while rank is not None and rank not in found:
        found[rank] = len(found)
        rank = following.get(rank)
    return found


def exchanges(job: Job) -> Iterator[Wait]:
    """Waits in groups of three ranks and more all of whom send to all through shared memory, as experts do.

    Who has written more to another than it has read from it, and has nothing of it to read, waits for it: both send the same
    number of steps each time. Where they do not somebody has read more than it wrote, and nothing is said; nor in a pipeline, in
    which nobody sends to all.
    """
    for group in job.groups.values():
        if group.nranks < 3 or not any(own.host_connections for _, own in group.members.values()):
            continue
        totals = {rank: _messages(own) for rank, (_, own) in group.members.items()}
        complete = all(len(peers) == group.nranks - 1 for peers in totals.values())
        if not complete or any(m.written < m.read for peers in totals.values() for m in peers.values()):
            continue
        for rank, peers in totals.items():
            for peer, m in peers.items():
                if not m.unread and 0 < m.written - m.read <= CONNECTION_SLOTS and peer in group.members:
                    yield _wait(job, group, m.channel, rank, peer, "all that was written is read", point_to_point=True)


@dataclass(slots=True)
class _Messages:
    """Steps a rank has written to another, read from it, and has yet to read, over all channels, one of which is ``channel``."""

    channel: int = 0
    written: int = 0
    read: int = 0
    unread: int = 0


def _messages(own: Communicator) -> dict[int, _Messages]:
    """Peer → what was sent and received through shared memory, of those with whom there is both."""
    found: dict[int, _Messages] = defaultdict(_Messages)
    for conn in own.host_connections:
        if conn.connection_index == 0 or not conn.head or not conn.tail:
            continue
        total = found[conn.peer]
        if conn.direction is Direction.SEND:
            total.written += conn.tail
        else:
            total.channel, total.read, total.unread = conn.channel, total.read + conn.head, total.unread + conn.tail - conn.head
    return {peer: total for peer, total in found.items() if total.written and total.read}


def _wait(job: Job, group: Group, channel: int, rank: int, other: int, how: str, *, point_to_point: bool = False) -> Wait:
    waiter, target = RankNode(group.members[rank][0].index), RankNode(group.members[other][0].index)
    key = ConnectionKey(group.id, channel, other, rank, point_to_point)
    name, peer = group.members[rank][0].label, job.rank_name(group.id, other)
    text = f"{name} waits for {peer}, {Why.EMPTY}: shared memory, channel {channel}, {how}"
    return Wait(waiter, target, Why.EMPTY, key, partial(str, text))
