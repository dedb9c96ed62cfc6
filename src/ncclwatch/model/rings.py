"""Rings: how ranks move data along them, where a rank stands in one inside its node, and what ranks have written to each other.

Head and tail of a connection count the same steps; only the protocol Simple moves the tail. In a ring each rank writes and reads
as much (``src/device/``): who has written more than it has read is amid an operation, who less than its peers is behind.

In AllReduce, AllGather and ReduceScatter a rank sends a part of its own first. What it takes after that it sends on, but for the
last part of a round (``runRing`` in ``src/device/all_reduce.h`` and its like, all tags). So the steps that a rank has taken from
the network tell how many it has written to the next, and those that it has sent into the network how many it has read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

from ncclwatch.model.job import Group, Member, launched
from ncclwatch.model.state import ChannelRing, Communicator, Direction, HostConnection, ProxyOperation, Transport

CONNECTION_SLOTS = 8
"""Fact: NCCL_STEPS, buffers of a connection, a sender is at most so many steps ahead (all tags, ``src/include/device.h``)."""
CHUNK_STEPS = CONNECTION_SLOTS // 2
"""Fact: what a rank writes at a time, in steps: its own part first, then what each rank before it has written (all tags:
``ALLREDUCE_CHUNKSTEPS`` and its like in ``src/include/collectives.h``).
"""
RING_ENDS_RECEIVING = frozenset({"AllReduce", "AllGather", "ReduceScatter"})
"""Collectives whose ring ends with a receive on every rank (``src/device/all_reduce.h`` and its like)."""
RINGS_ALONE = RING_ENDS_RECEIVING - {"AllReduce"}
"""Those that between nodes of several GPUs have no tree (``src/graph/tuning.cc``)."""


def is_ring(operation: ProxyOperation) -> bool:
    """Whether all ranks send and receive as much in it, and begin with a send."""
    return operation.algorithm == "Ring" and operation.collective in RING_ENDS_RECEIVING


# --- where head and tail are seen ------------------------------------------------------------------------------------


def steps_unread(connection: HostConnection) -> int | None:
    """Steps that were written into a connection inside a node and not read; ``None`` where that is not seen."""
    if connection.head is None or connection.tail is None:
        return None
    return max(0, connection.tail - connection.head)


def all_messages_read(own: Communicator) -> list[int]:
    """Peers inside its node of whose messages none lies unread, as far as that is seen: a receive from one may wait. NCCL has
    connections of their own for messages (``connIndex`` 1, ``src/enqueue.cc``). O(connections).
    """
    receives = (end for end in own.host_connections if end.connection_index > 0 and end.direction is Direction.RECV)
    return [end.peer for end in receives if not steps_unread(end)]


def memory_of(connection: HostConnection) -> str:
    """Where the buffers of a connection inside a node lie."""
    return "shared memory" if connection.transport is Transport.SHM else "P2P (GPU memory)"


class RingPlace(NamedTuple):
    """Where a rank stands in a ring inside its node, by its connections there; ``None``: not seen."""

    rank: int
    ring: ChannelRing
    source: HostConnection | None
    sink: HostConnection | None
    receives_last: bool = False
    """Whether it has sent into the network all that its rank before has called, and so only receives any more."""

    @property
    def read(self) -> int | None:
        """Steps read from the rank before."""
        return self.source.head if self.source is not None else None

    @property
    def unread(self) -> int | None:
        """Steps that lie ready for it."""
        return steps_unread(self.source) if self.source is not None else None

    @property
    def written(self) -> int | None:
        """Steps written to the next rank."""
        return self.sink.tail if self.sink is not None else None

    @property
    def ahead(self) -> int:
        """By how many steps it has written more than it has read; 0 where that is not seen."""
        return self.written - self.read if self.written is not None and self.read is not None else 0


def ring_places(own: Communicator) -> Iterator[RingPlace]:
    """Where a rank stands in each of its rings that goes through its node. O(connections)."""
    ends = {(end.channel, end.peer, end.direction): end for end in own.host_connections if end.connection_index == 0}
    for ring in own.rings if ends else ():
        source = ends.get((ring.channel, ring.prev, Direction.RECV))
        sink = ends.get((ring.channel, ring.next, Direction.SEND))
        if source is not None or sink is not None:
            yield RingPlace(own.rank, ring, source, sink)


class Ring(dict[int, RingPlace]):
    """One ring of a communicator as far as it goes through nodes: rank → where that stands."""

    @property
    def written(self) -> dict[int, int]:
        """Steps that each rank has written to the next, where that is seen."""
        return {rank: at.written for rank, at in self.items() if at.written is not None}

    @property
    def amid(self) -> dict[int, RingPlace]:
        """Who is ahead by less than a connection holds, so amid an operation; nobody where one has read more (a Broadcast)."""
        one_sided = any(at.ahead < 0 for at in self.values())
        ahead = ((rank, at) for rank, at in self.items() if 0 < at.ahead <= CONNECTION_SLOTS or at.receives_last)
        return {} if one_sided else dict(ahead)

    def hops(self, first: int) -> dict[int, int]:
        """How many ranks further on in the ring than one others are, as far as it is known."""
        found, rank = dict[int, int](), first
        while rank in self and rank not in found:
            found[rank] = len(found)
            rank = self[rank].ring.next
        return found


def rings_inside(group: Group) -> dict[int, Ring]:
    """The rings of a communicator that go through nodes, by channel. O(connections)."""
    found: dict[int, Ring] = defaultdict(Ring)
    for rank, (member, own) in group.members.items():
        for place in ring_places(own):
            # Where data lies at a rank from which the ring leaves the node.
            last = bool(place.unread) and place.written is None and _has_sent_all(group, member, own, place.ring)
            found[place.ring.channel][rank] = place._replace(receives_last=True) if last else place
    return found


def _has_sent_all(group: Group, member: Member, own: Communicator, ring: ChannelRing) -> bool:
    """Whether a rank's sends into the network are over in all operations that its rank before has called: each begins with one.

    Without a count of each collective there may have been a Broadcast, of which the last rank sends nothing.
    """
    called, before = launched(member, own), group.members.get(ring.prev)
    asked = launched(*before) if before is not None else None
    if called is None or asked is None or called < asked or not set() < own.sequence_numbers.keys() <= RINGS_ALONE:
        return False
    return sends_over(member, own, ring.channel, ring.next)


def sends_over(member: Member, own: Communicator, channel: int, peer: int, op_count: int | None = None) -> bool:
    """Whether the network joins a rank to a peer, and nothing to send there is open in its proxy: of one operation, or of any."""
    if member.last.torn or (channel, peer, Direction.SEND, Transport.NET) not in own.transports:
        return False
    sends = (
        one for one in member.last.operations
        if one.comm_address == own.address and one.direction is Direction.SEND and op_count in (None, one.op_count)
    )  # fmt: skip
    return all((sub.channel, sub.peer) != (channel, peer) for one in sends for sub in one.subs)


def steps_written(group: Group, inside: Mapping[int, Ring]) -> list[dict[int, int]]:
    """Of each ring of a communicator the steps that each rank has written to the next, where that is seen. Inside its node
    (``inside``: as of :func:`rings_inside`) these are the steps written. Into the network they are those of operations that its
    proxy has begun. Rings in which nothing was written are left out.
    """
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, (_, own) in group.members.items():
        sends = (one for one in own.net_steps if one.direction is Direction.SEND and not one.connection_index)
        sent = {(one.channel, one.peer): one.step for one in sends}
        for ring in own.rings:
            place = inside.get(ring.channel, Ring()).get(rank)
            if steps := (place.written if place is not None else None) or sent.get((ring.channel, ring.next)):
                found[ring.channel][rank] = steps
    return list(found.values())


def steps_unlike(written: Mapping[int, int], count: int, nranks: int, through: Set[int], *, ended: bool) -> dict[int, bool]:
    """Who has written more (true) or less in a ring than ``count`` calls alike amount to, as the others have; everybody where
    that does not tell.

    ``through``: ranks that are in another communicator by now. They have ended all of these calls; the last of them may not have
    begun yet, unless nothing of it is open (``ended``).
    """
    least, most = min(written.values()), max(written.values())
    each = -(-most // count) if count else 0
    # With more steps than that calls of other sizes come to the same number. What a communicator of one rank shows is damaged.
    if nranks < 2 or not 0 < least < count * (count - 1):
        return dict.fromkeys(written, False)
    # Without those that have ended it goes on no further than the ring lets it: what is more is several calls.
    if not least % count and most - least <= CHUNK_STEPS * (nranks - 1):
        return {rank: True for rank, steps in written.items() if steps > least}
    if each * (count - 1) > least or each % (nranks - 1):
        return dict.fromkeys(written, False)
    whole = {each * count, each * (count if ended else count - 1)}
    return {rank: False for rank, steps in written.items() if rank in through and steps not in whole}


# --- by what goes through the network --------------------------------------------------------------------------------


def has_written(own: Communicator, operation: ProxyOperation) -> bool | None:
    """Whether a rank that receives a ring's data from the network has written to the next in shared memory, which its kernel does
    first, or could have and has not; ``None`` where that does not show.

    A connection of the ring that stands at the step where the operation begins was not written to. Where other algorithms used
    it too its count means nothing: then who reads nothing of what was delivered tells.
    """
    sinks = {at.ring.channel: at.sink for at in ring_places(own)}
    counts = operation.protocol == "Simple" and operation.collective in RING_ENDS_RECEIVING
    known: list[bool] = []
    for sub in operation.subs:
        sink = sinks.get(sub.channel)
        if sink is None or sink.tail is None or (unread := steps_unread(sink)) is None or unread > CONNECTION_SLOTS:
            continue
        written = sink.tail - sub.base
        if counts and 0 < written <= sub.nsteps:
            known.append(True)
        elif unread < CHUNK_STEPS and (sub.transmitted or (counts and written == 0)):
            known.append(False)
    return any(known) if known else None


class Between(NamedTuple):
    """Steps that lie between two ranks: at least, at most."""

    least: int
    most: int


class RingSteps(NamedTuple):
    """How one operation moves along a ring: steps of a ``round`` over all ranks, of the own ``part``, and of a ``slice``."""

    round: int
    part: int
    slice: int

    @classmethod
    def of(cls, operation: ProxyOperation, nranks: int, nsteps: int) -> RingSteps | None:
        """Of one of these collectives, of so many ranks and steps; ``None`` where it moves in some other way."""
        part = CHUNK_STEPS if operation.slice_steps > 1 else 1  # LL, LL128 and registered buffers move a step at a time.
        whole = (nranks - 1) * part * (2 if operation.collective == "AllReduce" else 1)
        return cls(whole, part, operation.slice_steps) if whole > 0 and nsteps % whole == 0 else None

    def between(self, taken: int, sent: int) -> Between:
        """What the first rank of a node has written and the last has not read: ``taken`` from the network, ``sent`` into it."""
        (wrote, most_wrote), (read, most_read) = self._written(taken), self._read(sent)
        return Between(wrote - most_read, most_wrote - read)

    def _written(self, taken: int) -> tuple[int, int]:
        rounds, inside = divmod(taken, self.round)
        most = rounds * self.round + min(inside + self.part, self.round)
        return (most if inside else rounds * self.round), most

    def _read(self, sent: int) -> tuple[int, int]:
        rounds, inside = divmod(sent, self.round)
        least = rounds * self.round + (max(inside - self.part, 0) if inside else -self.part)
        return max(least, 0), (max(least, 0) if inside else rounds * self.round)
