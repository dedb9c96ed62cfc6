"""The wait-for graph of a job as it is drawn: what the sources say, and what follows of several of them together.

What a rank could do and does not do is a *stall*; a stall accuses nobody by itself, for the rank may wait elsewhere. Of a ring
that goes through the network and through shared memory each source sees a part: whoever is known by one of them to be in an
operation, and has read all there is by the other, waits for more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ncclwatch.engine.connections import ConnectionKey, hidden_peers, memory_of, ring_of, steps_unread
from ncclwatch.engine.edges import Stall, StallMark, Wait, Why
from ncclwatch.engine.evidence.base import FactKind, Strength
from ncclwatch.engine.evidence.device import is_seen
from ncclwatch.engine.evidence.proxies import TransferColumns, operation_text
from ncclwatch.engine.graph import Waits
from ncclwatch.engine.job import Group, Member
from ncclwatch.engine.nodes import HiddenNode, LinkNode, Node, RankNode, node_of
from ncclwatch.engine.rings import NAME, RING_ENDS_RECEIVING, empty_hops, ring_inputs, ring_written, waits_for_more
from ncclwatch.engine.transfers import Column, numbered
from ncclwatch.model.state import Communicator, Direction, HostConnection, ProxySub, Transport

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case


OUTSIDE = frozenset({Transport.NET, Transport.SHM})
"""Transports of which all that the host could see is looked at in any case."""


def find_waits(case: Case) -> Waits:
    """Draw the wait-for graph. O(operations + connections inside the nodes)."""
    return _Joiner(case, Waits.drawn(case.job, case.facts)).joined()


class _Joiner:
    """What several sources show, taken together."""

    def __init__(self, case: Case, seen: Waits) -> None:
        self.job, self.transfers, self.seen = case.job, case.transfers, seen
        self.added: list[Wait] = []
        stalls = case.facts.parts(FactKind.STANDS)
        self.network = next((part for part in stalls if isinstance(part, TransferColumns)), None)
        self.inside = [fact for fact in stalls if isinstance(fact, StallMark)]
        """What ranks could do and do not, by what lies inside the nodes."""
        self._empty: set[tuple[int, int, int, int]] = set()
        """(communicator, reader, writer, channel) of what is known to wait for more."""
        self._written: dict[int, dict[int, dict[int, int]]] = {}
        """Of communicators that were asked about, how far each rank has come in the ring of a channel."""

    def joined(self) -> Waits:
        """The graph of what was seen, and of what follows from it."""
        self._follow_begun()
        self._follow_stalls()
        self._follow_unread()
        self._follow_unread_messages()
        return self.seen.plus(self.added) if self.added else self.seen

    def _nothing_written(self, group: Group, communicator: Communicator, conn: HostConnection, *, weak: bool = False) -> None:
        """A rank that has read all of a connection waits for its writer."""
        place = (group.id, communicator.rank, conn.peer, conn.channel if conn.connection_index == 0 else ~conn.channel)
        if place not in self._empty:
            self._empty.add(place)
            self.added.append(
                waits_for_more(
                    self.job, group, conn.channel, communicator.rank, conn.peer,
                    f"{memory_of(conn)}, all {conn.tail} steps read", Strength.LIKELY if weak else Strength.PROVEN,
                    point_to_point=conn.connection_index > 0,
                )
            )  # fmt: skip

    # --- stalls of the network ---------------------------------------------------------------------------------------

    def _follow_stalls(self) -> None:
        """A GPU that stands still may itself wait for a rank inside its node: see that wait, or say that it is hidden."""
        for mark in [*map(self.seen.stalls.__getitem__, self._worth_following().tolist()), *self.inside]:
            rank, other = mark.key.source, mark.key.destination
            if mark.stall is Stall.GPU_NOT_CONSUMING:
                rank, other = other, rank
            found = self.job.groups[mark.key.group].members.get(rank)
            if found is None or mark.key.point_to_point:
                continue
            if mark.stall is Stall.GPU_NOT_PRODUCING:
                self._empty_inputs(mark, found[1])
                self._dropped_input(mark, *found)
            self._hidden_neighbours(mark, other, *found)

    def _worth_following(self) -> Column:
        """Numbers of the network's stalls behind which something may be found: in a large job most ranks that stand still in the
        network have nothing inside their node, and their receive open.
        """
        t, stalls = self.transfers, self.network
        if stalls is None:
            return np.zeros(0, np.int64)
        chosen = np.flatnonzero(stalls.showing(Stall.GPU_NOT_PRODUCING, Stall.GPU_NOT_CONSUMING) & ~t.point_to_point[stalls.rows])
        rows = stalls.rows[chosen]
        produces = stalls.showing(Stall.GPU_NOT_PRODUCING)[chosen]
        worth: Column = chosen[produces & ~t.has_receive(rows)]
        if not self.job.joined.seen and self.job.joined.transports <= OUTSIDE:
            return worth
        _, first, which = np.unique(numbered((t.group[rows], t.rank[rows])), return_index=True, return_inverse=True)
        owners = zip(t.group[rows[first]].tolist(), t.rank[rows[first]].tolist(), strict=True)
        holders = [t.members.groups[place].members.get(rank) for place, rank in owners]
        inside = np.array([held is not None and _has_neighbours_inside(held[1]) for held in holders], np.bool_)
        return np.union1d(worth, chosen[inside[which.reshape(-1)]])

    def _empty_inputs(self, mark: StallMark, communicator: Communicator) -> None:
        """Follow a ring backward through shared memory as long as nothing lies there to be read.

        In a ring that begins with a send, a rank that has entered has written: so who finds nothing waits for its predecessor.
        Who has not even made that first send has not entered: it waits in something before, inside the node most likely, and
        there for the same ranks more often than not. So these are weak waits.
        """
        begins_sending = mark.end is not None and mark.end.operation.collective in RING_ENDS_RECEIVING
        weak = mark.end is not None and mark.end.operation.algorithm == "Ring" and not has_produced(mark.end.sub)
        group = self.job.groups[mark.key.group]
        for own, empty in empty_hops(group, mark.key.channel, communicator.rank):
            for conn in empty:
                self._nothing_written(group, own, conn, weak=begins_sending and weak)
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
        ring = ring_of(communicator, channel)
        previous = ring.prev if ring is not None else None
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

        self.added.append(
            Wait(
                subject=RankNode(member.index), source=NAME, object=target, why=Why.BROKEN, key=key, describe=describe, end=end
            )
        )  # fmt: skip

    def _hidden_neighbours(self, mark: StallMark, other: int, member: Member, communicator: Communicator) -> None:
        for peer_rank in hidden_peers(communicator, mark.key.channel):
            if peer_rank == other or is_seen(communicator, mark.key.channel, peer_rank):
                continue
            key = ConnectionKey(mark.key.group, mark.key.channel, peer_rank, communicator.rank, False)
            peer = self.job.rank_name(key.group, peer_rank)
            text = f"{member.label} may wait for {peer} inside the node, which the host cannot see"
            hidden = HiddenNode(key.group, peer_rank)
            self.added.append(
                Wait(
                    subject=RankNode(member.index), source=NAME, object=hidden, why=Why.UNOBSERVED, key=key,
                    strength=Strength.POSSIBLE, describe=partial(str, text),
                )
            )  # fmt: skip

    # --- rings through shared memory -------------------------------------------------------------------------------

    def _follow_begun(self) -> None:
        """Who comes after a rank in the middle of a ring operation, and has read all that it wrote, is in it and waits for more.

        Its own proxy may show nothing of that operation any more, or never have: a ring's last receive goes nowhere.
        """
        transfers, groups = self.transfers, self.transfers.members.groups
        if not self.job.joined.seen:
            return
        inside = np.array([any(own.host_connections for _, own in group.members.values()) for group in groups], np.bool_)
        receiving = ~transfers.sends & transfers.begun & ~transfers.point_to_point & (transfers.done > 0)
        for row in np.flatnonzero(receiving & (transfers.done < transfers.nsteps) & inside[transfers.group]).tolist():
            operation, group = transfers.operation_of(row), transfers.group_of(row)
            if operation.algorithm != "Ring" or operation.collective not in RING_ENDS_RECEIVING:
                continue
            # What a rank has received it has sent on, and one part of its own: so much is still to come from it.
            rounds = max(group.nranks - 1, 1) * (2 if operation.collective == "AllReduce" else 1)
            nsteps = int(transfers.nsteps[row])
            if int(transfers.done[row]) - (-nsteps // rounds) < nsteps:
                self._follow(group, int(transfers.channel[row]), int(transfers.rank[row]))

    def _follow_unread(self) -> None:
        """Who comes after a rank that leaves its ring input unread, and finds nothing itself, waits for it."""
        for mark in self.inside:
            if not mark.key.point_to_point:
                self._follow(self.job.groups[mark.key.group], mark.key.channel, mark.key.destination)

    def _follow(self, group: Group, channel: int, first: int) -> None:
        """Everybody after a rank in its ring who finds nothing to read waits for the one before.

        A ring collective begins with a send: of one that has written less than others of the ring that is not proven.
        """
        if group.id not in self._written:
            self._written[group.id] = ring_written(group)
        written = self._written[group.id].get(channel, {})
        least = min(written.values(), default=0)
        some_began = max(written.values(), default=0) > least
        rank = first
        for _ in range(group.nranks - 1):
            ring = ring_of(group.members[rank][1], channel) if rank in group.members else None
            if ring is None or ring.next == first or ring.next not in group.members:
                break
            own = group.members[ring.next][1]
            inputs = [c for c in ring_inputs(own, channel) if c.peer == rank and steps_unread(c) == 0]
            if not inputs:
                break
            self._nothing_written(group, own, inputs[0], weak=some_began and written.get(ring.next) == least)
            rank = ring.next

    def _follow_unread_messages(self) -> None:
        """Who has sent another a message that lies unread there, and has none from it, waits for that one's.

        Neighbours in a pipeline send and receive in turn, and shared memory does not show an open receive. Said only of a sender
        that shows no other wait, and where no cycle comes of it.
        """
        marks = [mark for mark in self.inside if mark.key.point_to_point]
        graph = self.seen.plus(self.added) if marks else self.seen
        after: dict[int, set[int]] = defaultdict(set)
        for waiter, waited_for in zip(graph.waiters.tolist(), graph.targets.tolist(), strict=True) if marks else ():
            after[waiter].add(waited_for)
        for mark in marks:
            group = self.job.groups[mark.key.group]
            writer, target = group.holder(mark.key.source), mark.member.index
            if writer is None or writer.halted or after[writer.index] - {target} or _reaches(after, target, writer.index):
                continue
            own = group.members[mark.key.source][1]
            place = (mark.key.destination, Direction.RECV, mark.key.channel)
            conns = [c for c in own.host_connections if (c.peer, c.direction, c.channel) == place and c.connection_index > 0]
            unread = [left for conn in conns if (left := steps_unread(conn)) is not None]
            if unread and not any(unread):
                self._nothing_written(group, own, conns[0])
                after[writer.index].add(target)


def _reaches(after: Mapping[int, set[int]], begin: int, end: int) -> bool:
    """Whether the waits lead from one node to another."""
    seen, left = {begin}, [begin]
    while left:
        new = after.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return end in seen


def has_produced(sub: ProxySub) -> bool:
    """Whether the GPU has produced anything of a send; what cannot be told counts as produced."""
    return sub.done > 0 or sub.gpu_ready is None or sub.gpu_ready > 0 or sub.posted == 0


def _has_neighbours_inside(communicator: Communicator) -> bool:
    """Whether anything joins a rank to others inside its node that is, or should be, looked at."""
    return bool(communicator.host_connections) or not {link[3] for link in communicator.transports} <= OUTSIDE
