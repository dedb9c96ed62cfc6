"""What joins ranks and how far it can be looked into: transports, what a completed send proves, and the rings inside nodes.

Head and tail of such a connection count the same steps; only the protocol Simple moves the tail. In a ring each rank writes and
reads as much (``src/device/``): who has written more than it has read is amid an operation, who less than its peers is behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import NamedTuple

from ncclwatch.engine.edges import Wait, Why, waits_for
from ncclwatch.model.job import Group, Job, Member
from ncclwatch.model.state import ChannelRing, Communicator, Direction, HostConnection, ProcessSample, ProxyOperation, Transport

CONNECTION_SLOTS = 8
"""Fact: NCCL_STEPS, buffers of a connection, a sender is at most so many steps ahead (all tags, ``src/include/device.h``)."""
CHUNK_STEPS = CONNECTION_SLOTS // 2
"""Fact: what a rank writes at a time, in steps: its own part first, then what each rank before it has written (all tags:
``ALLREDUCE_CHUNKSTEPS`` and its like in ``src/include/collectives.h``).
"""
RING_ENDS_RECEIVING = frozenset({"AllReduce", "AllGather", "ReduceScatter"})
"""Collectives whose ring ends with a receive on every rank (``src/device/all_reduce.h`` and its like)."""


def is_ring(operation: ProxyOperation) -> bool:
    """Whether all ranks send and receive as much in it, and begin with a send."""
    return operation.algorithm == "Ring" and operation.collective in RING_ENDS_RECEIVING


# --- transports ---------------------------------------------------------------------------------------------------------

INVISIBLE = frozenset({Transport.P2P, Transport.NVLS, Transport.COLLNET, Transport.UNKNOWN})
"""Transports whose progress the host cannot see (NVLink and the like)."""


def is_hidden(communicator: Communicator) -> bool:
    """Whether a transport whose progress the host cannot see joins this rank to any other."""
    return any(transport in INVISIBLE for _, _, _, transport in communicator.transports)


def unseen_peers(communicator: Communicator) -> set[int]:
    """Peers joined to this rank by such a transport."""
    return {peer for _, peer, _, transport in communicator.transports if transport in INVISIBLE}


def beside_unobserved(job: Job, member: Member) -> bool:
    """Whether a transport nobody can look into joins a process to a rank that was not observed: it may wait for that one."""
    return any(unseen_peers(own) - group.members.keys() for group, own in job.held_by(member))


def hidden_on(communicator: Communicator, channel: int) -> set[int]:
    """Peers joined to this rank by such a transport on a channel, of which the device shim has not read all."""
    links = communicator.transports
    peers = {peer for on, peer, _, transport in links if transport in INVISIBLE and on == channel}
    return {peer for peer in peers if not is_seen(communicator, channel, peer)}


def neighbours(communicator: Communicator) -> set[int]:
    """Those beside this rank in any of its rings."""
    return {neighbour for ring in communicator.rings for neighbour in (ring.prev, ring.next)}


RELIABLE = "IB"
"""How the names of NCCL's own InfiniBand transport and of its SHARP plugin begin (``IB``, ``IBext_v8``)."""
ONE_MOMENT_S = 0.1
"""Unit: s. Samples of two hosts that are nearer are of one moment: nobody knows which was first. From: NTP keeps the clocks of
hosts within tens of ms.
"""


def has_arrived(operation: ProxyOperation, group: Group, sender: Member, receiver: Member) -> bool:
    """Whether what the sender has completed of an operation lay in the receiver's memory when that was read, so that only its own
    proxy is left to move: with NET/IB (reliable connections; ``ncclIbTest``, ``src/transport/net_ib.cc``). Over sockets a send
    completes once the kernel has taken it, which proves nothing.
    """
    return operation.net_name.startswith(RELIABLE) and was_before(group, sender, receiver)


def was_before(group: Group, sender: Member, receiver: Member) -> bool:
    """Whether the sender had come to where it is, by this sample or one that shows the same, before the receiver was read."""
    read_ns = receiver.last.wall_ns - (int(ONE_MOMENT_S * 1e9) if sender.info.host != receiver.info.host else 0)
    shown = _transfers_of(group, sender.last)
    alike = takewhile(lambda sample: _transfers_of(group, sample) == shown, reversed(sender.samples))
    return any(sample.wall_ns + sample.duration_ns <= read_ns for sample in alike)


def _transfers_of(group: Group, sample: ProcessSample) -> object:
    steps = [own.net_steps for own in sample.communicators if own.hash == group.hash]
    return [operation for operation in sample.operations if operation.comm_hash == group.hash], steps


# --- connections inside nodes ---------------------------------------------------------------------------------------------


def steps_unread(connection: HostConnection) -> int | None:
    """Steps that were written into a connection inside a node and not read; ``None`` where that is not seen."""
    if connection.head is None or connection.tail is None:
        return None
    return max(0, connection.tail - connection.head)


def memory_of(connection: HostConnection) -> str:
    """Where the buffers of a connection inside a node lie."""
    return "shared memory" if connection.transport is Transport.SHM else "P2P (GPU memory)"


def is_seen(communicator: Communicator, channel: int, peer: int) -> bool:
    """Whether all that joins this rank to a peer on a channel by P2P was read by the device shim."""
    wanted = {str(d) for c, p, d, transport in communicator.transports if (c, p, transport) == (channel, peer, Transport.P2P)}
    seen = {str(conn.direction) for conn in communicator.host_connections if (conn.channel, conn.peer) == (channel, peer)}
    return bool(wanted) and wanted <= seen


class RingPlace(NamedTuple):
    """Where a rank stands in a ring inside its node: steps read from the rank before, and written; ``None``: not seen."""

    rank: int
    ring: ChannelRing
    source: HostConnection | None
    read: int | None
    unread: int | None
    """Steps that lie ready for it."""
    written: int | None

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
            read, unread = (source.head, steps_unread(source)) if source is not None else (None, None)
            yield RingPlace(own.rank, ring, source, read, unread, sink.tail if sink is not None else None)


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
        return {} if one_sided else {rank: at for rank, at in self.items() if 0 < at.ahead <= CONNECTION_SLOTS}

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
    for rank, (_, own) in group.members.items():
        for place in ring_places(own):
            found[place.ring.channel][rank] = place
    return found


def laggards(job: Job, rings: Mapping[int, Mapping[int, Ring]]) -> Iterator[Wait]:
    """Waits for ranks that lag in a ring of shared memory; ``rings``: as of :attr:`Case.rings`. O(connections).

    A rank whose own counters say that it waits waits for the one before. Who has written less than all others of its ring has
    not come as far, and nobody ends a collective before the last has contributed. For one that waits itself no other is said to
    wait, nor who is further ahead than it can be without it: they were read at different moments.
    """
    for group in job.groups.values():
        for channel, ring in rings[group.id].items() if group.nranks > 1 else ():
            waiting = {rank: at.ring.prev for rank, at in ring.amid.items() if not at.unread}
            for rank, prev in waiting.items():
                if prev in group.members:
                    yield _lags(job, group, channel, rank, prev, "all that was written into shared memory is read")
            written = ring.written
            least = min(written.values(), default=0)
            if len(written) < group.nranks or least == max(written.values()):
                continue
            for other in [rank for rank, steps in written.items() if steps == least and rank not in waiting]:
                hops = ring.hops(other)
                for rank, steps in written.items():
                    if 0 < steps - least <= CHUNK_STEPS * hops.get(rank, 0):
                        yield _lags(job, group, channel, rank, other, f"{steps - least} steps behind in shared memory")


def _lags(job: Job, group: Group, channel: int, reader: int, writer: int, how: str) -> Wait:
    return waits_for(job, group, group.members[reader][0], writer, Why.EMPTY, f"channel {channel}, {how}", channel=channel)
