"""Who waits for whom, and which ranks could go on and do not: read off the two ends of every connection.

An edge is only drawn where the steps of a connection prove that one side needs the other. What a rank could do and does not do is
a *stall*; a stall accuses nobody by itself: the rank may wait elsewhere (see ``locate``). How the counters are read: Mycroft
Table 4 (GPU not ready / not transmitted / not delivered, local or remote), NCCL ``src/transport/net.cc``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ncclwatch.engine.connections import CONNECTION_SLOTS, ConnectionKey, Connections, End, collect, hidden_peers
from ncclwatch.engine.device import is_seen
from ncclwatch.engine.edges import (
    PROXY_STALLS,
    AbsentNode,
    HiddenNode,
    LinkNode,
    Node,
    RankNode,
    Stall,
    StallMark,
    Wait,
    Waits,
    Why,
)
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.mismatch import find_mismatches
from ncclwatch.model.state import Communicator, Direction, HostConnection, OpPhase, Transport

SHARED_SLOTS = 16
"""NCCL_SHARED_STEPS (``src/include/device.h``)."""

RING_ENDS_RECEIVING = frozenset({"AllReduce", "AllGather", "ReduceScatter"})
"""Collectives whose ring ends with a receive on every rank (``src/device/all_reduce.h`` and its like)."""


def find_waits(job: Job) -> Waits:
    """Build the wait-for graph from the newest samples. O(operations + shared-memory connections)."""
    builder = _Builder(job, collect(job))
    builder.waits.mismatches = find_mismatches(job, builder.connections)
    for end in builder.connections.unfinished(Direction.SEND):
        builder.look_at_sender(end)
    for end in builder.connections.unfinished(Direction.RECV):
        builder.look_at_receiver(end)
    builder.look_at_queued()
    builder.look_at_shared_memory()
    builder.look_behind_stalls()
    builder.look_after_unread()
    builder.look_after_unread_messages()
    builder.look_before_idle()
    builder.blame_proxies_before_links()
    return builder.waits


class _Builder:
    def __init__(self, job: Job, connections: Connections) -> None:
        self.job = job
        self.connections = connections
        self.waits = Waits()
        self.halted = {RankNode(member.index) for member in job.members if member.stopped or member.gone}

    def node(self, group_id: int, comm_rank: int) -> RankNode | AbsentNode:
        group = self.job.groups.get(group_id)
        if group and comm_rank in group.members:
            return RankNode(group.members[comm_rank][0].index)
        return AbsentNode(group_id, comm_rank)

    def edge(self, end: End, target: Node, why: Why, numbers: Callable[[], str]) -> None:
        key = end.key

        def describe() -> str:
            where = f"{_operation_text(end)}, channel {key.channel}, {numbers()}"
            if isinstance(target, LinkNode):
                path = f"{self.job.rank_name(key.group, key.source)} → {self.job.rank_name(key.group, key.destination)}"
                return f"{path}: {why}: {where}"
            other = key.destination if end.operation.direction is Direction.SEND else key.source
            return f"{end.member.label} waits for {self.job.rank_name(key.group, other)}, {why}: {where}"

        self.waits.edges.append(Wait(RankNode(end.member.index), target, why, key, describe, end))

    def stall(self, end: End, stall: Stall, numbers: Callable[[], str]) -> None:
        def describe() -> str:
            return f"{end.member.label}: {stall}: {_operation_text(end)}, channel {end.key.channel}, {numbers()}"

        self.waits.stalls.append(StallMark(end.member, stall, end.key, describe, end))

    # --- network, sending side -------------------------------------------------------------------------------------

    def look_at_sender(self, end: End) -> None:
        sub = end.sub
        if self.proxy_holds_back(end):
            return
        self.proxy_opens_nothing(end)
        if sub.done < sub.transmitted:
            self.sent_not_completed(end)
        elif end.produced is not None and end.produced > end.transmitted:
            self.produced_not_sent(end)
        elif end.produced is not None:
            self.stall(end, Stall.GPU_NOT_PRODUCING, lambda: f"produced {sub.gpu_ready} of {sub.nsteps} steps")
        elif sub.transmitted < sub.nsteps:
            self.sender_of_unknown_readiness(end)

    def proxy_holds_back(self, end: End) -> bool:
        """Whether data is ready, the receiver has buffers, requests are free, and the proxy sends nothing: then it does not run.

        Only over sockets: with InfiniBand a send is also refused while the receiver's clear-to-send has not arrived.
        """
        sub = end.sub
        if end.produced is None or end.produced <= end.transmitted or end.operation.net_name != "Socket":
            return False
        receiver = self.connections.covering(Direction.RECV, end.key, end.transmitted)
        if receiver is None or receiver.posted <= end.transmitted or sub.transmitted - sub.done >= CONNECTION_SLOTS:
            return False

        def numbers() -> str:
            return f"produced {sub.gpu_ready}, sent {sub.transmitted}, completed {sub.done} of {sub.nsteps} steps"

        self.stall(end, Stall.PROXY_NOT_SENDING, lambda: f"{numbers()}; receiver posted {receiver.sub.posted}")
        return True

    def proxy_opens_nothing(self, end: End) -> None:
        """Opening a send buffer needs nobody else: a running proxy has always opened as many as the depth allows.

        The depth is shared among the transfers of one operation (``sendProxyProgress`` in ``src/transport/net.cc``).
        """
        sub = end.sub
        depth = min(CONNECTION_SLOTS, SHARED_SLOTS // max(1, len(end.operation.subs)))
        if sub.posted < min(sub.nsteps, sub.done + depth):
            self.stall(end, Stall.PROXY_NOT_OPENING, lambda: f"opened {sub.posted}, completed {sub.done} of {sub.nsteps} steps")

    def sent_not_completed(self, end: End) -> None:
        peer, step = self.node(end.key.group, end.key.destination), end.done

        def numbers() -> str:
            open_steps = end.sub.transmitted - end.sub.done
            return f"{open_steps} steps sent and not completed (completed {end.sub.done} of {end.sub.nsteps})"

        receiver = self.connections.covering(Direction.RECV, end.key, step)
        if isinstance(peer, AbsentNode):
            self.edge(end, peer, Why.UNOBSERVED, numbers)
        elif receiver is None and self.has_done(Direction.RECV, end.key, step):
            link = LinkNode(end.key.group, end.key.source, end.key.destination)
            self.edge(end, link, Why.UNCONFIRMED, lambda: f"{numbers()}; the receiver has finished this transfer")
        elif receiver is None:
            self.edge(end, peer, self.why_nothing_open(Direction.RECV, end.key, step), numbers)
        elif receiver.posted <= step or receiver.received > step:
            # No buffer open, or the bytes are there and only their acknowledgement is not: the receiver's side has to move.
            why = Why.NO_BUFFER if receiver.posted <= step else Why.NOT_TAKEN
            self.edge(
                end, peer, why, lambda: f"{numbers()}; receiver posted {receiver.sub.posted}, received {receiver.sub.received}"
            )
        else:
            link = LinkNode(end.key.group, end.key.source, end.key.destination)
            self.edge(end, link, Why.IN_NETWORK, lambda: f"{numbers()}; receiver posted {receiver.sub.posted}")

    def produced_not_sent(self, end: End) -> None:
        peer, step = self.node(end.key.group, end.key.destination), end.transmitted

        def numbers() -> str:
            return f"produced {end.sub.gpu_ready}, sent {end.sub.transmitted} of {end.sub.nsteps} steps"

        receiver = self.connections.covering(Direction.RECV, end.key, step)
        if isinstance(peer, AbsentNode):
            self.edge(end, peer, Why.UNOBSERVED, numbers)
        elif receiver is None:
            self.edge(end, peer, self.why_nothing_open(Direction.RECV, end.key, step), numbers)
        elif receiver.posted <= step:
            self.edge(end, peer, Why.NO_BUFFER, lambda: f"{numbers()}; receiver posted {receiver.sub.posted}")
        else:
            link = LinkNode(end.key.group, end.key.source, end.key.destination)
            self.edge(end, link, Why.NO_CREDIT, lambda: f"{numbers()}; receiver posted {receiver.sub.posted}")

    def sender_of_unknown_readiness(self, end: End) -> None:
        """Protocols LL and LL128 do not say by a counter what the GPU has produced; the receiver's credit decides."""
        receiver = self.connections.covering(Direction.RECV, end.key, end.transmitted)

        def numbers() -> str:
            return f"sent {end.sub.transmitted} of {end.sub.nsteps} steps"

        if receiver is not None and receiver.posted > end.transmitted:
            self.stall(end, Stall.GPU_NOT_PRODUCING, lambda: f"{numbers()}, receiver posted {receiver.sub.posted}")
        elif receiver is not None:
            peer = self.node(end.key.group, end.key.destination)
            self.edge(end, peer, Why.NO_BUFFER, lambda: f"{numbers()}; receiver posted {receiver.sub.posted}")

    # --- network, receiving side -----------------------------------------------------------------------------------

    def look_at_receiver(self, end: End) -> None:
        sub = end.sub
        if sub.transmitted > sub.done:

            def numbers() -> str:
                return f"delivered {sub.transmitted}, consumed {sub.done} of {sub.nsteps} steps"

            self.stall(end, Stall.GPU_NOT_CONSUMING, numbers)
        elif sub.received > sub.transmitted:
            self.stall(end, Stall.FLUSH, lambda: f"received {sub.received}, flushed {sub.transmitted} of {sub.nsteps} steps")
        elif sub.posted > sub.received:
            self.starving(end)
        else:
            self.stall(end, Stall.PROXY_NOT_POSTING, lambda: f"posted {sub.posted} of {sub.nsteps} steps, all of them consumed")

    def starving(self, end: End) -> None:
        peer, step = self.node(end.key.group, end.key.source), end.received

        def numbers() -> str:
            return f"received {end.sub.received} of {end.sub.nsteps} steps"

        sender = self.connections.covering(Direction.SEND, end.key, step)
        if isinstance(peer, AbsentNode):
            self.edge(end, peer, Why.UNOBSERVED, numbers)
        elif sender is None:
            why = self.why_nothing_open(Direction.SEND, end.key, step)
            if why is Why.LEFT_BEHIND:
                link = LinkNode(end.key.group, end.key.source, end.key.destination)
                self.edge(end, link, Why.IN_NETWORK, lambda: f"{numbers()}; the sender has finished this transfer")
            else:
                self.edge(end, peer, why, numbers)
        elif sender.transmitted > step:
            link = LinkNode(end.key.group, end.key.source, end.key.destination)
            self.edge(
                end,
                link,
                Why.IN_NETWORK,
                lambda: f"{numbers()}; sender sent {sender.sub.transmitted}, completed {sender.sub.done}",
            )
        elif sender.produced is not None and sender.produced > step:
            self.edge(
                end,
                peer,
                Why.NOT_TRANSMITTED,
                lambda: f"{numbers()}; sender produced {sender.sub.gpu_ready}, sent {sender.sub.transmitted}",
            )
        else:
            self.edge(end, peer, Why.GPU_NOT_READY, lambda: f"{numbers()}; sender has sent {sender.sub.transmitted}")

    def why_nothing_open(self, direction: Direction, key: ConnectionKey, step: int) -> Why:
        if self.connections.beyond(direction, key, step) or self.has_done(direction, key, step):
            return Why.LEFT_BEHIND
        return Why.NOT_BEGUN if (key, direction) in self.connections.queued else Why.NO_OPERATION

    def has_done(self, direction: Direction, key: ConnectionKey, step: int) -> bool:
        """Whether that side has finished the transfer with ``step``, of which the proxy's lists show nothing any more.

        Over sockets a send is done once the kernel has taken it: with the link down, its data may never arrive.
        """
        if (key, direction) in self.connections.queued:
            return False
        owner, peer = (key.source, key.destination) if direction is Direction.SEND else (key.destination, key.source)
        found = self.job.groups[key.group].members.get(owner)
        return found is not None and any(
            one.step > step
            for one in found[1].net_steps
            if (one.channel, one.peer, one.direction) == (key.channel, peer, direction)
            and (one.connection_index > 0) == key.point_to_point
        )

    def look_at_queued(self) -> None:
        """An operation at the head of its connection that stays unbegun means that the proxy thread does not run."""
        for ends in (*self.connections.senders.values(), *self.connections.receivers.values()):
            for end in ends:
                if end.operation.phase is OpPhase.READY and end.operation.queued_behind == 0:
                    self.stall(end, Stall.PROXY_NOT_BEGUN, partial("{} steps queued".format, end.sub.nsteps))

    # --- shared memory ---------------------------------------------------------------------------------------------

    def look_at_shared_memory(self) -> None:
        for group in self.job.groups.values():
            for rank, (member, communicator) in group.members.items():
                for conn in communicator.host_connections:
                    self.look_at_host_connection(group, rank, member, conn)

    def look_at_host_connection(self, group: Group, rank: int, member: Member, conn: HostConnection) -> None:
        """Head and tail are in the same steps at both ends; only the protocol Simple moves the tail."""
        if conn.head is None or conn.tail is None:
            return
        waiting = conn.tail - conn.head
        if conn.direction is Direction.SEND and waiting >= CONNECTION_SLOTS:
            target = self.node(group.id, conn.peer)
            key = ConnectionKey(group.id, conn.channel, rank, conn.peer, conn.connection_index > 0)
            why = Why.UNOBSERVED if isinstance(target, AbsentNode) else Why.FULL

            def describe() -> str:
                peer = self.job.rank_name(group.id, conn.peer)
                return f"{member.label} waits for {peer}, {_why(why, conn)}, channel {conn.channel}, {waiting} steps lie unread"

            self.waits.edges.append(Wait(RankNode(member.index), target, why, key, describe))
        elif conn.direction is Direction.RECV and 0 < waiting <= CONNECTION_SLOTS:
            key = ConnectionKey(group.id, conn.channel, conn.peer, rank, conn.connection_index > 0)

            def describe_unread() -> str:
                return (
                    f"{member.label}: {Stall.GPU_NOT_CONSUMING}: {_memory(conn)} from {self.job.rank_name(group.id, conn.peer)}, "
                    f"channel {conn.channel}, {waiting} steps lie unread"
                )

            self.waits.stalls.append(StallMark(member, Stall.GPU_NOT_CONSUMING, key, describe_unread))

    def look_behind_stalls(self) -> None:
        """A GPU that stands still may itself wait for a rank inside its node: see that wait, or say that it is hidden."""
        for mark in list(self.waits.stalls):
            if mark.stall not in (Stall.GPU_NOT_PRODUCING, Stall.GPU_NOT_CONSUMING) or mark.key.point_to_point:
                continue
            rank, other = mark.key.source, mark.key.destination
            if mark.stall is Stall.GPU_NOT_CONSUMING:
                rank, other = other, rank
            found = self.job.groups[mark.key.group].members.get(rank)
            if found is None:
                continue
            if mark.stall is Stall.GPU_NOT_PRODUCING:
                self.empty_inputs(mark, found[1])
                self.dropped_input(mark, found[0], found[1])
            self.hidden_neighbours(mark, other, found[0], found[1])

    def empty_inputs(self, mark: StallMark, communicator: Communicator) -> None:
        """Follow a ring backward through shared memory as long as nothing lies there to be read.

        In a ring that begins with a send, a rank that has entered has written: so who finds nothing waits for its predecessor.
        """
        begins_sending = mark.end is not None and mark.end.operation.collective in RING_ENDS_RECEIVING
        group = self.job.groups[mark.key.group]
        for hop in _empty_hops(group, mark.key.channel, communicator.rank):
            for conn in hop.empty:
                self.nothing_written(group, hop.member, hop.communicator, conn)
            if not begins_sending:
                break

    def nothing_written(self, group: Group, member: Member, communicator: Communicator, conn: HostConnection) -> None:
        key = ConnectionKey(group.id, conn.channel, conn.peer, communicator.rank, conn.connection_index > 0)
        target = self.node(group.id, conn.peer)
        why = Why.UNOBSERVED if isinstance(target, AbsentNode) else Why.EMPTY

        def describe() -> str:
            peer = self.job.rank_name(group.id, conn.peer)
            return f"{member.label} waits for {peer}, {_why(why, conn)}, channel {conn.channel}, all {conn.tail} steps read"

        self.waits.edges.append(Wait(RankNode(member.index), target, why, key, describe))

    def look_before_idle(self) -> None:
        """A rank with nothing open that is waited for in one operation may still be in the one before, inside its node.

        It shows no transfer there; but when all its input through shared memory is read, back to a rank that has an older
        operation of this ring open, then that rank is what it waits for.
        """
        oldest: dict[tuple[int, int, int], int] = {}
        for direction in (Direction.SEND, Direction.RECV):
            for end in self.connections.unfinished(direction):
                rank = end.key.source if direction is Direction.SEND else end.key.destination
                place, count = (end.key.group, end.key.channel, rank), end.operation.op_count
                if not end.key.point_to_point and count < oldest.get(place, count + 1):
                    oldest[place] = count
        done: set[tuple[int, int, int]] = set()
        for wait in list(self.waits.edges):
            if wait.why is not Why.NO_OPERATION or wait.key.point_to_point or wait.end is None:
                continue
            group, channel = self.job.groups[wait.key.group], wait.key.channel
            sends = wait.end.operation.direction is Direction.SEND
            rank = wait.key.destination if sends else wait.key.source
            if (group.id, channel, rank) in done or (group.id, channel, rank) in oldest:
                continue
            done.add((group.id, channel, rank))
            chain: list[_Hop] = []
            for hop in _empty_hops(group, channel, rank):
                chain.append(hop)
                if len(hop.empty) != 1:
                    break
                if oldest.get((group.id, channel, hop.empty[0].peer), wait.end.operation.op_count) < wait.end.operation.op_count:
                    for passed in chain:
                        self.nothing_written(group, passed.member, passed.communicator, passed.empty[0])
                    break

    def look_after_unread(self) -> None:
        """Who comes after a rank that leaves its ring input unread, and finds nothing itself, waits for it."""
        for mark in list(self.waits.stalls):
            if mark.end is not None or mark.key.point_to_point:
                continue
            group = self.job.groups[mark.key.group]
            rank = mark.key.destination
            for _ in range(group.nranks - 1):
                own = group.members.get(rank)
                following = {ring.channel: ring.next for ring in own[1].rings}.get(mark.key.channel) if own else None
                found = group.members.get(following) if following is not None else None
                if found is None or following == mark.key.destination:
                    break
                inputs = [c for c in _ring_inputs(found[1], mark.key.channel) if c.peer == rank and _all_read(c)]
                if not inputs:
                    break
                self.nothing_written(group, found[0], found[1], inputs[0])
                rank = found[1].rank

    def look_after_unread_messages(self) -> None:
        """Who has sent another a message that lies unread there, and has none from it, waits for that one's.

        Neighbours in a pipeline send and receive in turn, and shared memory does not show an open receive. Said only of a sender
        that shows no other wait, and where no circle comes of it.
        """
        after: dict[Node, set[Node]] = defaultdict(set)
        for wait in self.waits.edges:
            after[wait.waiter].add(wait.target)
        for mark in list(self.waits.stalls):
            source, target = self.node(mark.key.group, mark.key.source), self.node(mark.key.group, mark.key.destination)
            if mark.end is not None or not mark.key.point_to_point or not isinstance(source, RankNode) or source in self.halted:
                continue
            if after[source] - {target} or _reaches(after, target, source):
                continue
            group = self.job.groups[mark.key.group]
            member, communicator = group.members[mark.key.source]
            answers = [
                c
                for c in communicator.host_connections
                if (c.peer, c.direction, c.channel) == (mark.key.destination, Direction.RECV, mark.key.channel)
                and c.connection_index > 0
                and c.head is not None
                and c.tail is not None
            ]
            if answers and all(c.tail == c.head for c in answers):
                self.nothing_written(group, member, communicator, answers[0])
                after[source].add(target)

    def dropped_input(self, mark: StallMark, member: Member, communicator: Communicator) -> None:
        """A ring that still has to send has not received all, so its receive must be open; gone means that it failed.

        Newer proxies (2.27.5 among them) drop an operation whose transport reports an error and tell nobody (``progressOps``,
        ``src/proxy.cc``).
        """
        end = mark.end
        previous = {ring.channel: ring.prev for ring in communicator.rings}.get(mark.key.channel)
        if (
            end is None
            or previous is None
            or end.operation.algorithm != "Ring"
            or end.operation.collective not in RING_ENDS_RECEIVING
        ):
            return
        if (mark.key.channel, previous, Direction.RECV, Transport.NET) not in communicator.transports:
            return
        key = ConnectionKey(mark.key.group, mark.key.channel, previous, communicator.rank, False)
        receives = self.connections.receivers.get(key, ())
        if any(receive.operation.op_count == end.operation.op_count for receive in receives):
            return
        if (key, Direction.RECV) in self.connections.queued:
            return
        target: Node = self.node(key.group, previous)
        if isinstance(target, RankNode) and target not in self.halted:
            target = LinkNode(key.group, previous, communicator.rank)

        def describe() -> str:
            peer = self.job.rank_name(key.group, previous)
            numbers = f"{_operation_text(end)}, channel {key.channel}, produced {end.sub.gpu_ready} of {end.sub.nsteps} steps"
            return f"{member.label} waits for {peer}, {Why.BROKEN}: {numbers}"

        self.waits.edges.append(Wait(RankNode(member.index), target, Why.BROKEN, key, describe, end))

    def hidden_neighbours(self, mark: StallMark, other: int, member: Member, communicator: Communicator) -> None:
        for peer_rank in hidden_peers(communicator, mark.key.channel):
            if peer_rank == other or is_seen(communicator, mark.key.channel, peer_rank):
                continue
            key = ConnectionKey(mark.key.group, mark.key.channel, peer_rank, communicator.rank, False)
            peer = self.job.rank_name(key.group, peer_rank)
            text = f"{member.label} may wait for {peer} inside the node, which the host cannot see"
            hidden = HiddenNode(key.group, peer_rank)
            self.waits.edges.append(Wait(RankNode(member.index), hidden, Why.UNOBSERVED, key, partial(str, text)))

    def blame_proxies_before_links(self) -> None:
        """Data that does not arrive says nothing about a link when the proxy at one of its ends stands still anyway.

        A request counts as handed to the network before the proxy has pushed all of it into the socket.
        """
        idle = {RankNode(mark.member.index) for mark in self.waits.stalls if mark.stall in PROXY_STALLS}
        idle |= self.halted
        for number, wait in enumerate(self.waits.edges):
            if isinstance(wait.target, LinkNode):
                ends = (self.node(wait.target.group_id, rank) for rank in (wait.target.source, wait.target.destination))
                blamed = next((node for node in ends if node in idle), None)
                if blamed is not None:
                    self.waits.edges[number] = replace(wait, target=blamed)


def _reaches(after: Mapping[Node, set[Node]], begin: Node, end: Node) -> bool:
    """Whether the waits lead from one rank to another."""
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


def _ring_inputs(communicator: Communicator, channel: int) -> Iterator[HostConnection]:
    """Shared-memory connections that feed this rank's ring on a channel; all of the channel's where the ring is unknown."""
    previous = {ring.channel: ring.prev for ring in communicator.rings}.get(channel)
    for conn in communicator.host_connections:
        if conn.channel != channel or conn.direction is not Direction.RECV or conn.connection_index != 0:
            continue
        if conn.transport in (Transport.SHM, Transport.P2P) and previous in (None, conn.peer):
            yield conn


def _all_read(conn: HostConnection) -> bool:
    """Whether everything written into a connection is known to have been read."""
    return conn.head is not None and conn.tail is not None and conn.tail <= conn.head


class _Hop(NamedTuple):
    """A rank on the way backward through a ring, and those of its inputs of which all is read."""

    member: Member
    communicator: Communicator
    empty: list[HostConnection]


def _empty_hops(group: Group, channel: int, rank: int) -> Iterator[_Hop]:
    """From a rank backward through the ring inputs in shared memory of which all is read, while only one feeds it."""
    seen: set[int] = set()
    while rank not in seen and rank in group.members:
        seen.add(rank)
        member, communicator = group.members[rank]
        empty = [conn for conn in _ring_inputs(communicator, channel) if _all_read(conn)]
        if empty:
            yield _Hop(member, communicator, empty)
        if len(empty) != 1:
            return
        rank = empty[0].peer


def _operation_text(end: End) -> str:
    operation = end.operation
    name = operation.collective or ("point-to-point" if operation.is_point_to_point else "operation")
    verb = "sending" if operation.direction is Direction.SEND else "receiving"
    return f"{name} #{operation.sequence} {verb}"
