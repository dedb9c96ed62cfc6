"""How far a rank has come in its rings through shared memory, read off how much it has written and read.

AllReduce, AllGather and ReduceScatter write and read as much on each ring (``src/device/``: every rank passes on what it gets).
A rank that has written more than it has read is in the middle of one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ncclwatch.engine.job import Group
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


def ring_positions(own: Communicator) -> Iterator[RingPosition]:
    """Its rings with both ends known. O(connections)."""
    ends = {(c.channel, c.peer, c.direction): c for c in own.host_connections if c.connection_index == 0}
    for ring in own.rings:
        source = ends.get((ring.channel, ring.prev, Direction.RECV))
        sink = ends.get((ring.channel, ring.next, Direction.SEND))
        if source is None or sink is None or source.head is None or source.tail is None or sink.tail is None:
            continue
        yield RingPosition(ring.channel, ring.prev, sink.tail, source.head, source.tail - source.head)


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
