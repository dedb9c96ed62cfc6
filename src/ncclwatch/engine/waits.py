"""Who waits for whom, and which ranks could go on and do not: read off the two ends of every connection.

An edge is only drawn where the steps of a connection prove that one side needs the other. What a rank could do and does not do is
a *stall*; a stall accuses nobody by itself: the rank may wait elsewhere (see ``locate``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from ncclwatch.engine.connections import ConnectionKey, hidden_peers
from ncclwatch.engine.edges import PROXY_STALLS, Nodes, Stall, StallMark, Wait, Why
from ncclwatch.engine.evidence import shared_memory
from ncclwatch.engine.evidence.base import Strength
from ncclwatch.engine.evidence.device import is_seen
from ncclwatch.engine.evidence.disagreements import find_mismatches
from ncclwatch.engine.evidence.proxies import ProxyReader, operation_text
from ncclwatch.engine.evidence.shared_memory import Hop, all_read, empty_hops, ring_inputs
from ncclwatch.engine.graph import Waits
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.nodes import HiddenNode, LinkNode, Node, RankNode, node_of
from ncclwatch.engine.rings import is_between, ring_written
from ncclwatch.engine.transfers import Column, Transfers, numbered
from ncclwatch.model.state import Communicator, Direction, HostConnection, ProxySub, Transport

RING_ENDS_RECEIVING = frozenset({"AllReduce", "AllGather", "ReduceScatter"})
"""Collectives whose ring ends with a receive on every rank (``src/device/all_reduce.h`` and its like)."""


def find_waits(job: Job) -> Waits:
    """Build the wait-for graph from the newest samples. O(operations + shared-memory connections)."""
    transfers, nodes = Transfers(job), Nodes()
    network = ProxyReader(job, transfers, nodes)
    edges, stalls = shared_memory.read(job)
    waits = Waits(edges, stalls, find_mismatches(transfers), columns=network.waits(), stall_columns=network.stalls(), nodes=nodes)
    inside = _Inside(job, waits)
    joiner = _Joiner(job, transfers, network, inside, waits)
    joiner.follow_begun()
    joiner.follow_stalls()
    inside.follow_unread()
    inside.follow_unread_messages()
    joiner.follow_idle()
    joiner.blame_proxies_before_links()
    return waits


class _Inside:
    """What follows from connections inside the nodes once it is known who is in an operation."""

    def __init__(self, job: Job, waits: Waits) -> None:
        self.job = job
        self.waits = waits
        self.groups = {
            group.id for group in job.groups.values() if any(own.host_connections for _, own in group.members.values())
        }
        """Communicators of which some connection inside a node is seen."""
        self._empty: set[tuple[int, int, int, int]] = set()
        """(communicator, reader, writer, channel) of what is known to wait for more."""
        self._written: dict[int, dict[int, dict[int, int]]] = {}
        """Of communicators that were asked about, how far each rank has come in the ring of a channel."""

    def nothing_written(
        self, group: Group, member: Member, communicator: Communicator, conn: HostConnection, *, weak: bool = False
    ) -> None:
        """A rank that has read all of a connection waits for its writer."""
        place = (group.id, communicator.rank, conn.peer, conn.channel if conn.connection_index == 0 else ~conn.channel)
        if place not in self._empty:
            self._empty.add(place)
            self.waits.added.append(shared_memory.nothing_written(self.job, group, member, communicator, conn, weak=weak))

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
            inputs = [c for c in ring_inputs(found[1], channel) if c.peer == rank and all_read(c)]
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


class _Joiner:
    """What the network shows and what lies inside the nodes, taken together."""

    def __init__(self, job: Job, transfers: Transfers, network: ProxyReader, inside: _Inside, waits: Waits) -> None:
        self.job = job
        self.transfers = transfers
        self.network = network
        self.inside = inside
        self.waits = waits

    def follow_stalls(self) -> None:
        """A GPU that stands still may itself wait for a rank inside its node: see that wait, or say that it is hidden."""
        for mark in [*map(self.waits.stall, self._worth_following().tolist()), *self.waits.added_stalls]:
            if mark.stall not in (Stall.GPU_NOT_PRODUCING, Stall.GPU_NOT_CONSUMING) or mark.key.point_to_point:
                continue
            rank, other = mark.key.source, mark.key.destination
            if mark.stall is Stall.GPU_NOT_CONSUMING:
                rank, other = other, rank
            found = self.job.groups[mark.key.group].members.get(rank)
            if found is None:
                continue
            if mark.stall is Stall.GPU_NOT_PRODUCING:
                self._empty_inputs(mark, found[1])
                self._dropped_input(mark, found[0], found[1])
            self._hidden_neighbours(mark, other, found[0], found[1])

    def _worth_following(self) -> Column:
        """Stalls of the network's transfers behind which something may be found: in a large job most ranks that stand still in
        the network have nothing inside their node, and their receive open.
        """
        stalls, transfers = self.network.found_stalls, self.transfers
        producing, consuming = self.network.shows(Stall.GPU_NOT_PRODUCING), self.network.shows(Stall.GPU_NOT_CONSUMING)
        chosen = np.flatnonzero((producing | consuming) & ~transfers.point_to_point[stalls.rows])
        rows = stalls.rows[chosen]
        _, first, which = np.unique(
            numbered((transfers.group[rows], transfers.rank[rows])), return_index=True, return_inverse=True
        )
        owners = zip(transfers.group[rows[first]].tolist(), transfers.rank[rows[first]].tolist(), strict=True)
        holders = [transfers.members.groups[place].members.get(rank) for place, rank in owners]
        inside = np.array([held is not None and _has_neighbours_inside(held[1]) for held in holders], np.bool_)
        worth: Column = chosen[inside[which.reshape(-1)] | (producing[chosen] & ~transfers.has_receive(rows))]
        return worth

    def _empty_inputs(self, mark: StallMark, communicator: Communicator) -> None:
        """Follow a ring backward through shared memory as long as nothing lies there to be read.

        In a ring that begins with a send, a rank that has entered has written: so who finds nothing waits for its predecessor.
        Who has not even made that first send has not entered: it waits in something before, inside the node most likely, and
        there for the same ranks more often than not. So these are weak waits.
        """
        begins_sending = mark.end is not None and mark.end.operation.collective in RING_ENDS_RECEIVING
        weak = mark.end is not None and mark.end.operation.algorithm == "Ring" and not has_produced(mark.end.sub)
        group = self.job.groups[mark.key.group]
        for hop in empty_hops(group, mark.key.channel, communicator.rank):
            for conn in hop.empty:
                self.inside.nothing_written(group, hop.member, hop.communicator, conn, weak=begins_sending and weak)
            if not begins_sending:
                break

    def _dropped_input(self, mark: StallMark, member: Member, communicator: Communicator) -> None:
        """A ring that still has to send has not received all, so its receive must be open; gone means that it failed.

        Newer proxies (2.27.5 among them) drop an operation whose transport reports an error and tell nobody (``progressOps``,
        ``src/proxy.cc``).
        """
        end, channel = mark.end, mark.key.channel
        if end is None or end.operation.algorithm != "Ring" or end.operation.collective not in RING_ENDS_RECEIVING:
            return
        previous = {ring.channel: ring.prev for ring in communicator.rings}.get(channel)
        if previous is None or (channel, previous, Direction.RECV, Transport.NET) not in communicator.transports:
            return
        if self.transfers.is_receiving(mark.key.group, channel, previous, communicator.rank, end.operation.op_count):
            return
        key = ConnectionKey(mark.key.group, channel, previous, communicator.rank, False)
        target: Node = node_of(self.job, key.group, previous)
        if isinstance(target, RankNode) and not self.job.member(target.index).halted:
            target = LinkNode(key.group, previous, communicator.rank)

        def describe() -> str:
            peer = self.job.rank_name(key.group, previous)
            numbers = f"channel {channel}, produced {end.sub.gpu_ready} of {end.sub.nsteps} steps"
            return f"{member.label} waits for {peer}, {Why.BROKEN}: {operation_text(end)}, {numbers}"

        self.waits.added.append(Wait(RankNode(member.index), target, Why.BROKEN, key, describe, end))

    def _hidden_neighbours(self, mark: StallMark, other: int, member: Member, communicator: Communicator) -> None:
        for peer_rank in hidden_peers(communicator, mark.key.channel):
            if peer_rank == other or is_seen(communicator, mark.key.channel, peer_rank):
                continue
            key = ConnectionKey(mark.key.group, mark.key.channel, peer_rank, communicator.rank, False)
            peer = self.job.rank_name(key.group, peer_rank)
            text = f"{member.label} may wait for {peer} inside the node, which the host cannot see"
            hidden = HiddenNode(key.group, peer_rank)
            wait = Wait(RankNode(member.index), hidden, Why.UNOBSERVED, key, partial(str, text), strength=Strength.POSSIBLE)
            self.waits.added.append(wait)

    def follow_begun(self) -> None:
        """Who comes after a rank in the middle of a ring operation, and has read all that it wrote, is in it and waits for more.

        Its own proxy may show nothing of that operation any more, or never have: a ring's last receive goes nowhere.
        """
        transfers = self.transfers
        groups = transfers.members.groups
        inside = np.array([group.id in self.inside.groups for group in groups], np.bool_)
        if not inside.any():
            return
        receiving = ~transfers.sends & transfers.begun & ~transfers.point_to_point & (transfers.done > 0)
        for row in np.flatnonzero(receiving & (transfers.done < transfers.nsteps) & inside[transfers.group]).tolist():
            operation, group = transfers.operations[row], groups[int(transfers.group[row])]
            if operation.algorithm != "Ring" or operation.collective not in RING_ENDS_RECEIVING:
                continue
            # What a rank has received it has sent on, and one part of its own: so much is still to come from it.
            rounds = max(group.nranks - 1, 1) * (2 if operation.collective == "AllReduce" else 1)
            nsteps = int(transfers.nsteps[row])
            if int(transfers.done[row]) - (-nsteps // rounds) < nsteps:
                self.inside.follow(group, int(transfers.channel[row]), int(transfers.rank[row]))

    def follow_idle(self) -> None:
        """A rank with nothing open that is waited for in one operation may still be in the one before, inside its node.

        It shows no transfer there; but when all its input through shared memory is read, back to a rank that has an older
        operation of this ring open, then that rank is what it waits for.
        """
        oldest: dict[tuple[int, int, int], int] | None = None
        done: set[tuple[int, int, int]] = set()
        transfers, found = self.transfers, self.network.found_waits
        rows = found.rows[self.network.waits_because(Why.NO_OPERATION)]
        for row in rows[~transfers.point_to_point[rows]].tolist():
            group, channel, rank = transfers.group_of(row), int(transfers.channel[row]), int(transfers.peer[row])
            if (group.id, channel, rank) in done:
                continue
            done.add((group.id, channel, rank))
            if next(empty_hops(group, channel, rank), None) is None:
                continue
            oldest = transfers.oldest_open() if oldest is None else oldest
            if (group.id, channel, rank) not in oldest:
                for hop in self._way_to_older(group, channel, rank, int(transfers.op_count[row]), oldest):
                    self.inside.nothing_written(group, hop.member, hop.communicator, hop.empty[0])

    def _way_to_older(
        self, group: Group, channel: int, rank: int, op_count: int, oldest: dict[tuple[int, int, int], int]
    ) -> list[Hop]:
        """The hops from a rank backward to one that has an operation before ``op_count`` open; none where there is no such."""
        way: list[Hop] = []
        for hop in empty_hops(group, channel, rank):
            way.append(hop)
            if len(hop.empty) != 1:
                break
            if oldest.get((group.id, channel, hop.empty[0].peer), op_count) < op_count:
                return way
        return []

    def blame_proxies_before_links(self) -> None:
        """Data that does not arrive says nothing about a link when the proxy at one of its ends stands still anyway.

        A request counts as handed to the network before the proxy has pushed all of it into the socket.
        """
        idle = {member.index for member in self.job.members if member.halted}
        for stall in PROXY_STALLS:
            idle |= set(np.unique(self.transfers.owner[self.network.found_stalls.rows[self.network.shows(stall)]]).tolist())
        targets = self.network.found_waits.target
        for place in np.flatnonzero(targets < 0).tolist():
            blamed = self._idle_end(self.waits.nodes.node(int(targets[place])), idle)
            if blamed is not None:
                targets[place] = blamed
        for number, wait in enumerate(self.waits.added):
            blamed = self._idle_end(wait.target, idle)
            if blamed is not None:
                self.waits.added[number] = replace(wait, target=blamed)

    def _idle_end(self, node: Node, idle: set[int]) -> RankNode | None:
        if not isinstance(node, LinkNode):
            return None
        holders = [self.job.groups[node.group_id].holder(rank) for rank in (node.source, node.destination)]
        return next((RankNode(one.index) for one in holders if one is not None and one.index in idle), None)


def _is_elsewhere(member: Member, own: Communicator) -> bool:
    """Whether a rank shows itself in the middle of a ring of another communicator, and in none of this one."""
    return not is_between(own) and any(is_between(other) for other in member.last.communicators if other.address != own.address)


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


def has_produced(sub: ProxySub) -> bool:
    """Whether the GPU has produced anything of a send; what cannot be told counts as produced."""
    return sub.done > 0 or sub.gpu_ready is None or sub.gpu_ready > 0 or sub.posted == 0


def _has_neighbours_inside(communicator: Communicator) -> bool:
    """Whether anything joins a rank to others inside its node that is, or should be, looked at."""
    if communicator.host_connections:
        return True
    net, shared = Transport.NET, Transport.SHM
    return any(transport is not net and transport is not shared for _, _, _, transport in communicator.transports)
