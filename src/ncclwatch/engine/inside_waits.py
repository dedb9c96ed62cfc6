"""Waits inside a node: connections whose head and tail can be seen (shared memory, P2P with the shim), and rings of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ncclwatch.engine.connections import CONNECTION_SLOTS, ConnectionKey
from ncclwatch.engine.edges import Stall, StallMark, Wait, Why
from ncclwatch.engine.evidence.base import Strength
from ncclwatch.engine.graph import Waits
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.nodes import AbsentNode, RankNode
from ncclwatch.engine.rings import is_between, ring_written
from ncclwatch.model.state import Communicator, Direction, HostConnection, Transport


class Hop(NamedTuple):
    """A rank on the way backward through a ring, and those of its inputs of which all is read."""

    member: Member
    communicator: Communicator
    empty: list[HostConnection]


class InsideReader:
    """Draws the waits that connections inside a node show."""

    def __init__(self, job: Job, waits: Waits) -> None:
        self.job = job
        self.waits = waits
        self.groups: set[int] = set()
        """Communicators of which some connection inside a node is seen."""
        self._empty: set[tuple[int, int, int, int]] = set()
        """(communicator, reader, writer, channel) of what is known to wait for more."""
        self._written: dict[int, dict[int, dict[int, int]]] = {}
        """Of communicators that were asked about, how far each rank has come in the ring of a channel."""

    def read(self) -> None:
        """Waits and stalls that a connection shows by itself. O(connections)."""
        for group in self.job.groups.values():
            for rank, (member, communicator) in group.members.items():
                if communicator.host_connections:
                    self.groups.add(group.id)
                for conn in communicator.host_connections:
                    if conn.tail != conn.head:
                        self._read_one(group, rank, member, conn)

    def _read_one(self, group: Group, rank: int, member: Member, conn: HostConnection) -> None:
        """Head and tail are in the same steps at both ends; only the protocol Simple moves the tail."""
        if conn.head is None or conn.tail is None:
            return
        waiting = conn.tail - conn.head
        if conn.direction is Direction.SEND and waiting >= CONNECTION_SLOTS:
            target = node_of(self.job, group.id, conn.peer)
            key = ConnectionKey(group.id, conn.channel, rank, conn.peer, conn.connection_index > 0)
            why = Why.UNOBSERVED if isinstance(target, AbsentNode) else Why.FULL

            def describe() -> str:
                peer = self.job.rank_name(group.id, conn.peer)
                return f"{member.label} waits for {peer}, {_why(why, conn)}, channel {conn.channel}, {waiting} steps lie unread"

            self.waits.added.append(Wait(RankNode(member.index), target, why, key, describe))
        elif conn.direction is Direction.RECV and 0 < waiting <= CONNECTION_SLOTS:
            key = ConnectionKey(group.id, conn.channel, conn.peer, rank, conn.connection_index > 0)

            def describe_unread() -> str:
                return (
                    f"{member.label}: {Stall.GPU_NOT_CONSUMING}: {_memory(conn)} from {self.job.rank_name(group.id, conn.peer)}, "
                    f"channel {conn.channel}, {waiting} steps lie unread"
                )

            self.waits.added_stalls.append(StallMark(member, Stall.GPU_NOT_CONSUMING, key, describe_unread))

    def nothing_written(
        self, group: Group, member: Member, communicator: Communicator, conn: HostConnection, *, weak: bool = False
    ) -> None:
        """A rank that has read all of a connection waits for its writer."""
        place = (group.id, communicator.rank, conn.peer, conn.channel if conn.connection_index == 0 else ~conn.channel)
        if place in self._empty:
            return
        self._empty.add(place)
        key = ConnectionKey(group.id, conn.channel, conn.peer, communicator.rank, conn.connection_index > 0)
        target = node_of(self.job, group.id, conn.peer)
        why = Why.UNOBSERVED if isinstance(target, AbsentNode) else Why.EMPTY

        def describe() -> str:
            peer = self.job.rank_name(group.id, conn.peer)
            return f"{member.label} waits for {peer}, {_why(why, conn)}, channel {conn.channel}, all {conn.tail} steps read"

        strength = Strength.LIKELY if weak else Strength.PROVEN
        self.waits.added.append(Wait(RankNode(member.index), target, why, key, describe, strength=strength))

    def follow_unread(self) -> None:
        """Who comes after a rank that leaves its ring input unread, and finds nothing itself, waits for it."""
        for mark in list(self.waits.added_stalls):
            if mark.end is not None or mark.key.point_to_point:
                continue
            self.follow(self.job.groups[mark.key.group], mark.key.channel, mark.key.destination)

    def follow(self, group: Group, channel: int, first: int) -> None:
        """Everybody after a rank in its ring who finds nothing to read waits for the one before.

        A ring collective begins with a send: of one that has written less than others of the ring that is not proven, nor of one
        that is in the middle of another ring, and shows nothing of this one.
        """
        if group.id not in self._written:
            self._written[group.id] = ring_written(group)
        written = self._written[group.id].get(channel, {})
        least = min(written.values(), default=0)
        some_began = max(written.values(), default=0) > least
        rank = first
        for _ in range(group.nranks - 1):
            own = group.members.get(rank)
            following = {ring.channel: ring.next for ring in own[1].rings}.get(channel) if own else None
            found = group.members.get(following) if following is not None else None
            if found is None or following == first:
                break
            inputs = [c for c in _ring_inputs(found[1], channel) if c.peer == rank and _all_read(c)]
            if not inputs:
                break
            weak = (some_began and written.get(found[1].rank) == least) or _is_elsewhere(*found)
            self.nothing_written(group, found[0], found[1], inputs[0], weak=weak)
            rank = found[1].rank

    def follow_unread_messages(self) -> None:
        """Who has sent another a message that lies unread there, and has none from it, waits for that one's.

        Neighbours in a pipeline send and receive in turn, and shared memory does not show an open receive. Said only of a sender
        that shows no other wait, and where no cycle comes of it.
        """
        marks = [mark for mark in self.waits.added_stalls if mark.end is None and mark.key.point_to_point]
        if not marks:
            return
        after: dict[int, set[int]] = defaultdict(set)
        for waiter, target in zip(*(ends.tolist() for ends in self.waits.ends()), strict=True):
            after[waiter].add(target)
        for mark in marks:
            group = self.job.groups[mark.key.group]
            writer, target = group.holder(mark.key.source), mark.member.index
            if writer is None or writer.halted or after[writer.index] - {target} or _reaches(after, target, writer.index):
                continue
            communicator = group.members[mark.key.source][1]
            place = (mark.key.destination, Direction.RECV, mark.key.channel)
            answers = [
                c
                for c in communicator.host_connections
                if (c.peer, c.direction, c.channel) == place
                and c.connection_index > 0
                and c.head is not None
                and c.tail is not None
            ]
            if answers and all(c.tail == c.head for c in answers):
                self.nothing_written(group, writer, communicator, answers[0])
                after[writer.index].add(target)


def node_of(job: Job, group_id: int, comm_rank: int) -> RankNode | AbsentNode:
    """The process that is a rank of a communicator, or that rank as one nobody observed."""
    group = job.groups.get(group_id)
    holder = group.holder(comm_rank) if group is not None else None
    return RankNode(holder.index) if holder is not None else AbsentNode(group_id, comm_rank)


def empty_hops(group: Group, channel: int, rank: int) -> Iterator[Hop]:
    """From a rank backward through the ring inputs in shared memory of which all is read, while only one feeds it."""
    seen: set[int] = set()
    while rank not in seen and rank in group.members:
        seen.add(rank)
        member, communicator = group.members[rank]
        empty = [conn for conn in _ring_inputs(communicator, channel) if _all_read(conn)]
        if empty:
            yield Hop(member, communicator, empty)
        if len(empty) != 1:
            return
        rank = empty[0].peer


def _ring_inputs(communicator: Communicator, channel: int) -> Iterator[HostConnection]:
    """Connections inside the node that feed this rank's ring on a channel; all of the channel's where the ring is unknown."""
    if not communicator.host_connections:
        return
    previous = {ring.channel: ring.prev for ring in communicator.rings}.get(channel)
    for conn in communicator.host_connections:
        if conn.channel != channel or conn.direction is not Direction.RECV or conn.connection_index != 0:
            continue
        if conn.transport in (Transport.SHM, Transport.P2P) and previous in (None, conn.peer):
            yield conn


def _is_elsewhere(member: Member, own: Communicator) -> bool:
    """Whether a rank shows itself in the middle of a ring of another communicator, and in none of this one."""
    return not is_between(own) and any(is_between(other) for other in member.last.communicators if other.address != own.address)


def _all_read(conn: HostConnection) -> bool:
    """Whether everything written into a connection is known to have been read."""
    return conn.head is not None and conn.tail is not None and conn.tail <= conn.head


def _reaches(after: Mapping[int, set[int]], begin: int, end: int) -> bool:
    """Whether the waits lead from one node to another."""
    seen, left = {begin}, [begin]
    while left:
        node = left.pop()
        if node == end:
            return True
        new = after.get(node, set()) - seen
        seen |= new
        left += new
    return False


def _why(why: Why, conn: HostConnection) -> str:
    """The reason and where the buffers lie, in words that fit both."""
    reason = str(why) if conn.transport is Transport.SHM else str(why).replace("shared memory", "its buffer")
    return f"{reason}: {_memory(conn)}"


def _memory(conn: HostConnection) -> str:
    """Where the buffers of a connection without a proxy lie."""
    return "shared memory" if conn.transport is Transport.SHM else "P2P (GPU memory)"
