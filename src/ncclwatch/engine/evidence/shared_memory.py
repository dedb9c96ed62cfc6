"""What connections whose head and tail can be seen show by themselves: shared memory, and P2P where the device shim reads it.

Head and tail count the same steps at both ends; only the protocol Simple moves the tail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ncclwatch.engine.connections import CONNECTION_SLOTS, ConnectionKey
from ncclwatch.engine.edges import Stall, StallMark, Wait, Why, wait_facts
from ncclwatch.engine.evidence.base import Coverage, Fact, FactKind, Source, Strength
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.nodes import AbsentNode, RankNode, node_of
from ncclwatch.model.state import Communicator, Direction, HostConnection, Transport

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "shared memory"


class SharedMemory(Source):
    """Connections inside the nodes."""

    name = NAME
    plane = "state"
    kinds = frozenset({FactKind.WAITS_FOR, FactKind.STANDS})

    def facts(self, case: Case) -> Iterator[Fact]:
        """Waits for readers that leave a full connection, and ranks that leave data unread. O(connections)."""
        waits, stalls = read(case.job)
        yield from (replace(fact, source=NAME) for fact in wait_facts(waits))
        yield from (replace(mark.fact, source=NAME) for mark in stalls)

    def coverage(self, case: Case) -> Coverage:
        """Connections inside the nodes whose head and tail could be read."""
        joined = [own for group in case.job.groups.values() for _, own in group.members.values()]
        seen = sum(conn.head is not None and conn.tail is not None for own in joined for conn in own.host_connections)
        wanted = sum(kind in (Transport.SHM, Transport.P2P) for own in joined for _, _, _, kind in own.transports)
        missing = () if seen >= wanted else (f"{wanted - seen} of {wanted} connections inside nodes are not seen",)
        return Coverage(NAME, min(seen, wanted), wanted, missing)


def read(job: Job) -> tuple[list[Wait], list[StallMark]]:
    """Waits and stalls that a connection shows by itself. O(connections)."""
    waits: list[Wait] = []
    stalls: list[StallMark] = []
    for group in job.groups.values():
        for rank, (member, communicator) in group.members.items():
            for conn in communicator.host_connections:
                if conn.head is None or conn.tail is None or conn.tail == conn.head:
                    continue
                unread = conn.tail - conn.head
                if conn.direction is Direction.SEND and unread >= CONNECTION_SLOTS:
                    waits.append(_full(job, group, rank, member, conn))
                elif conn.direction is Direction.RECV and 0 < unread <= CONNECTION_SLOTS:
                    stalls.append(_unread(job, group, rank, member, conn))
    return waits, stalls


def _full(job: Job, group: Group, rank: int, member: Member, conn: HostConnection) -> Wait:
    target = node_of(job, group.id, conn.peer)
    key = ConnectionKey(group.id, conn.channel, rank, conn.peer, conn.connection_index > 0)
    why = Why.UNOBSERVED if isinstance(target, AbsentNode) else Why.FULL

    def describe() -> str:
        peer, unread = job.rank_name(group.id, conn.peer), (conn.tail or 0) - (conn.head or 0)
        return f"{member.label} waits for {peer}, {_why(why, conn)}, channel {conn.channel}, {unread} steps lie unread"

    return Wait(RankNode(member.index), target, why, key, describe)


def _unread(job: Job, group: Group, rank: int, member: Member, conn: HostConnection) -> StallMark:
    key = ConnectionKey(group.id, conn.channel, conn.peer, rank, conn.connection_index > 0)

    def describe() -> str:
        peer, unread = job.rank_name(group.id, conn.peer), (conn.tail or 0) - (conn.head or 0)
        return (
            f"{member.label}: {Stall.GPU_NOT_CONSUMING}: {_memory(conn)} from {peer}, "
            f"channel {conn.channel}, {unread} steps lie unread"
        )

    return StallMark(member, Stall.GPU_NOT_CONSUMING, key, describe)


def nothing_written(
    job: Job, group: Group, member: Member, communicator: Communicator, conn: HostConnection, *, weak: bool = False
) -> Wait:
    """That a rank which has read all of a connection waits for its writer, where it is known to be in an operation."""
    key = ConnectionKey(group.id, conn.channel, conn.peer, communicator.rank, conn.connection_index > 0)
    target = node_of(job, group.id, conn.peer)
    why = Why.UNOBSERVED if isinstance(target, AbsentNode) else Why.EMPTY

    def describe() -> str:
        peer = job.rank_name(group.id, conn.peer)
        return f"{member.label} waits for {peer}, {_why(why, conn)}, channel {conn.channel}, all {conn.tail} steps read"

    strength = Strength.LIKELY if weak else Strength.PROVEN
    return Wait(RankNode(member.index), target, why, key, describe, strength=strength)


class Hop(NamedTuple):
    """A rank on the way backward through a ring, and those of its inputs of which all is read."""

    member: Member
    communicator: Communicator
    empty: list[HostConnection]


def empty_hops(group: Group, channel: int, rank: int) -> Iterator[Hop]:
    """From a rank backward through the ring inputs in shared memory of which all is read, while only one feeds it."""
    seen: set[int] = set()
    while rank not in seen and rank in group.members:
        seen.add(rank)
        member, communicator = group.members[rank]
        empty = [conn for conn in ring_inputs(communicator, channel) if all_read(conn)]
        if empty:
            yield Hop(member, communicator, empty)
        if len(empty) != 1:
            return
        rank = empty[0].peer


def ring_inputs(communicator: Communicator, channel: int) -> Iterator[HostConnection]:
    """Connections inside the node that feed this rank's ring on a channel; all of the channel's where the ring is unknown."""
    if not communicator.host_connections:
        return
    previous = {ring.channel: ring.prev for ring in communicator.rings}.get(channel)
    for conn in communicator.host_connections:
        if conn.channel != channel or conn.direction is not Direction.RECV or conn.connection_index != 0:
            continue
        if conn.transport in (Transport.SHM, Transport.P2P) and previous in (None, conn.peer):
            yield conn


def all_read(conn: HostConnection) -> bool:
    """Whether everything written into a connection is known to have been read."""
    return conn.head is not None and conn.tail is not None and conn.tail <= conn.head


def _why(why: Why, conn: HostConnection) -> str:
    """The reason and where the buffers lie, in words that fit both."""
    reason = str(why) if conn.transport is Transport.SHM else str(why).replace("shared memory", "its buffer")
    return f"{reason}: {_memory(conn)}"


def _memory(conn: HostConnection) -> str:
    """Where the buffers of a connection without a proxy lie."""
    return "shared memory" if conn.transport is Transport.SHM else "P2P (GPU memory)"
