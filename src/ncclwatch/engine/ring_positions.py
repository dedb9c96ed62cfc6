"""How far a rank has come in its rings through shared memory, read off how much it has written and read.

AllReduce, AllGather and ReduceScatter write and read as much on each ring (``src/device/``: every rank passes on what it gets).
A rank that has written more than it has read is in the middle of one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ncclwatch.engine.connections import CONNECTION_SLOTS
from ncclwatch.engine.job import Group, Job
from ncclwatch.model.state import Communicator, Direction


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


def is_between(own: Communicator) -> bool:
    """Whether a rank is in the middle of an operation of a communicator, as far as its rings show."""
    return any(position.between for position in ring_positions(own))


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
