"""How far ranks have come in rings through shared memory, read off how much each has written and read, and who is behind.

AllReduce, AllGather and ReduceScatter write and read as much on each ring (``src/device/``: every rank passes on what it gets).
A rank that has written more than it has read is in the middle of one of them; one that has written less than its peers is behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ncclwatch.engine.connections import CONNECTION_SLOTS, ConnectionKey, ring_of, steps_unread
from ncclwatch.engine.edges import Wait, Why
from ncclwatch.engine.evidence.base import Strength
from ncclwatch.engine.job import Group, Job
from ncclwatch.engine.nodes import AbsentNode, RankNode, node_of
from ncclwatch.model.state import Communicator, Direction, HostConnection, Transport

NAME = "rings"
RING_ENDS_RECEIVING = frozenset({"AllReduce", "AllGather", "ReduceScatter"})
"""Collectives whose ring ends with a receive on every rank (``src/device/all_reduce.h`` and its like)."""


class RingPosition(NamedTuple):
    """One ring of a rank, both of whose neighbours are joined by shared memory: steps since the connections were made.

    ``unread``: steps that lie ready for it.
    """

    channel: int
    prev: int
    written: int
    read: int
    unread: int

    @property
    def between(self) -> bool:
        """Whether it has written more than it has read."""
        return self.written > self.read

    @property
    def is_amid(self) -> bool:
        """The same, by what an operation under way can make of it: each rank writes its own part first and passes on what it has
        read, so it is ahead by less than a connection holds. (A Broadcast leaves more of a difference, and for good.)
        """
        return 0 < self.written - self.read <= CONNECTION_SLOTS


def ring_positions(own: Communicator) -> Iterator[RingPosition]:
    """Its rings with both ends known. O(connections)."""
    ends = {(c.channel, c.peer, c.direction): c for c in own.host_connections if c.connection_index == 0}
    for ring in own.rings:
        source = ends.get((ring.channel, ring.prev, Direction.RECV))
        sink = ends.get((ring.channel, ring.next, Direction.SEND))
        if source is None or sink is None or source.head is None or source.tail is None or sink.tail is None:
            continue
        yield RingPosition(ring.channel, ring.prev, sink.tail, source.head, source.tail - source.head)


def under_way(group: Group) -> dict[int, dict[int, RingPosition]]:
    """Channel → rank in a communicator → where it stands, of those who are amid an operation in a ring of shared memory.

    Nobody of a ring in which somebody has read more than it wrote, as the last of a Broadcast has. O(connections).
    """
    found: dict[int, dict[int, RingPosition]] = defaultdict(dict)
    uneven: set[int] = set()
    for rank, (_, own) in group.members.items():
        for position in ring_positions(own) if own.host_connections else ():
            if position.written < position.read:
                uneven.add(position.channel)
            elif position.is_amid:
                found[position.channel][rank] = position
    return {channel: ranks for channel, ranks in found.items() if channel not in uneven}


RingsUnderWay = Mapping[int, Mapping[int, Mapping[int, RingPosition]]]
"""Communicator (``group`` of the job) → as of :func:`under_way`."""


def all_under_way(job: Job) -> RingsUnderWay:
    """:func:`under_way` of every communicator of a job. O(connections)."""
    return {group.id: under_way(group) for group in job.groups.values()}


def ring_written(group: Group) -> dict[int, dict[int, int]]:
    """Channel → rank in a communicator → steps it has written to the next in the ring, of those joined to it by shared memory.

    O(connections of the communicator).
    """
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, (_, own) in group.members.items():
        if not own.host_connections:
            continue
        following = {ring.channel: ring.next for ring in own.rings}
        for conn in own.host_connections:
            sends = conn.direction is Direction.SEND and conn.connection_index == 0 and following.get(conn.channel) == conn.peer
            if sends and conn.tail is not None:
                found[conn.channel][rank] = conn.tail
    return found


CHUNK_STEPS = CONNECTION_SLOTS // 2
"""Fact: what a rank writes at a time, in steps: its own part first, then what each rank before it has written (all tags:
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
                    yield waits_for_more(job, group, channel, rank, prev, "all that was written into shared memory is read")
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
                        yield waits_for_more(job, group, channel, rank, other, f"{tail - least} steps behind in shared memory")


def _hops(group: Group, channel: int, first: int) -> dict[int, int]:
    """How many ranks further on in the ring of a channel each rank is than the first."""
    found: dict[int, int] = {}
    rank: int | None = first
    while rank in group.members and rank not in found:
        found[rank] = len(found)
        ring = ring_of(group.members[rank][1], channel)
        rank = ring.next if ring is not None else None
    return found


# --- who has read all ------------------------------------------------------------------------------------------------


def empty_hops(group: Group, channel: int, rank: int) -> Iterator[tuple[Communicator, list[HostConnection]]]:
    """From a rank backward through the ring inputs in shared memory of which all is read, while only one feeds it: each rank's
    view, and those of its inputs of which all is read.
    """
    seen: set[int] = set()
    while rank not in seen and rank in group.members:
        seen.add(rank)
        _, communicator = group.members[rank]
        empty = [conn for conn in ring_inputs(communicator, channel) if steps_unread(conn) == 0]
        if empty:
            yield communicator, empty
        if len(empty) != 1:
            return
        rank = empty[0].peer


def ring_inputs(communicator: Communicator, channel: int) -> Iterator[HostConnection]:
    """Connections inside the node that feed this rank's ring on a channel; all of the channel's where the ring is unknown."""
    if not communicator.host_connections:
        return
    ring = ring_of(communicator, channel)
    for conn in communicator.host_connections:
        if conn.channel != channel or conn.direction is not Direction.RECV or conn.connection_index != 0:
            continue
        if conn.transport in (Transport.SHM, Transport.P2P) and (ring is None or ring.prev == conn.peer):
            yield conn


def waits_for_more(
    job: Job, group: Group, channel: int, reader: int, writer: int, how: str, strength: Strength = Strength.PROVEN,
    *, point_to_point: bool = False,
) -> Wait:  # fmt: skip
    """That a rank which is known to be in an operation, and has read all of a connection, waits for its writer."""
    target, member = node_of(job, group.id, writer), group.members[reader][0]
    key = ConnectionKey(group.id, channel, writer, reader, point_to_point)
    why = Why.UNOBSERVED if isinstance(target, AbsentNode) else Why.EMPTY

    def describe() -> str:
        return f"{member.label} waits for {job.rank_name(group.id, writer)}, {why}: channel {channel}, {how}"

    return Wait(
        subject=RankNode(member.index), source=NAME, object=target, why=why, key=key, strength=strength, describe=describe
    )
