"""What the ends of connections say: who needs whom, and who could go on and does not, over the network and inside nodes.

Head and tail of a connection inside a node show that it is full, or that data lies unread; not whether its reader is in an
operation. Of a ring that goes through the network as well proxies tell that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from ncclwatch.engine import edges
from ncclwatch.engine.edges import NOBODY, ConnectionKey, End, Stall, StallMark, Wait, Why, waits_for
from ncclwatch.engine.evidence import base
from ncclwatch.engine.evidence.base import FactColumns, FactKind, RankNode, Source, Strength
from ncclwatch.engine.transfers import SHOWN, Compared
from ncclwatch.model.columns import Column, is_among
from ncclwatch.model.job import Group, Member, launched
from ncclwatch.model.joined import hidden_on
from ncclwatch.model.rings import CONNECTION_SLOTS, RING_ENDS_RECEIVING, Ring, RingSteps, is_ring, memory_of, steps_unread
from ncclwatch.model.rows import distinct
from ncclwatch.model.state import Direction, HostConnection, Transport

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

# --- the network ----------------------------------------------------------------------------------------------------------

HIDDEN = {
    Transport.COLLNET: "CollNet: the switch adds up inside the network; its own counters are not compared between ranks",
    Transport.UNKNOWN: "connections of a transport that was not recognised",
}


class Proxies(Source):
    """Transfers over the network, as the proxies at both ends hold them."""

    kinds = frozenset({FactKind.WAITS_FOR, FactKind.STANDS})

    def facts(self, case: Case) -> Iterator[FactColumns[base.Fact]]:
        """Waits and stalls, in columns. O(transfers)."""
        t, compared, target = case.transfers, case.compared, _targets(case)
        stands = compared.showing(*Stall)
        for kind, chosen in ((FactKind.WAITS_FOR, ~stands), (FactKind.STANDS, stands)):
            places, rows = np.flatnonzero(chosen), compared.rows[chosen]
            groups = distinct(t.group[rows[~t.point_to_point[rows]]]).tolist()
            make, certain = partial(_fact, compared, case.facts.nodes, places, target), np.zeros(len(rows), np.bool_)
            collectives = frozenset(t.groups[place].id for place in groups)
            yield FactColumns(kind, t.owner[rows], target[chosen], certain, make, collectives)

    def coverage(self, case: Case) -> Iterator[str]:
        """Operations that no proxy shows, or that it shows alone."""
        yield from (text for transport, text in HIDDEN.items() if transport in case.job.transports)
        if any(own.device_initiated for own in case.job.views):
            yield "operations that kernels start themselves (device API, GIN): neither calls nor proxy steps show them"


def _fact(compared: Compared, nodes: base.Nodes, places: Column, target: Column, number: int) -> Wait | StallMark:
    place = int(places[number])
    (end, other), shows = compared.ends(place), SHOWN[compared.shows[place]]
    if isinstance(shows, Stall):
        return edges.stalls_at(end, other, shows)
    return Wait(
        subject=RankNode(end.member.index), object=nodes.node(int(target[place])), why=shows, key=end.key, end=end,
        other=other, describe=partial(edges.wait_text, compared.transfers.job, end, other, shows),
    )  # fmt: skip


def _targets(case: Case) -> Column:
    """Whom each waits for: the peer, the link to it, or a peer that was not observed; numbers of nodes, ``NOBODY`` of a stall.

    Data that does not arrive says nothing about a link when the proxy at one of its ends stands still anyway: a request counts
    as handed to the network before the proxy has pushed all of it into the socket.
    """
    job, t, compared = case.job, case.transfers, case.compared
    rows, stands, of_links = compared.rows, compared.showing(*Stall), compared.showing(*edges.OF_THE_LINK)
    target = np.where(of_links | stands, NOBODY, t.peer_index[rows])
    idle = {member.index for member in job.halted}
    idle |= set(t.owner[rows[compared.showing(*edges.PROXY_STALLS)]].tolist())
    for place in np.flatnonzero((target < 0) & ~stands).tolist():
        row = int(rows[place])
        key = t.key(row)
        node: base.Node = base.AbsentNode(key.group, int(t.peer[row]))
        if of_links[place]:
            ends = [base.node_of(t.group_of(row), rank) for rank in (key.source, key.destination)]
            node = next((end for end in ends if end in idle), base.LinkNode(key.group, key.source, key.destination))
        target[place] = case.facts.nodes.number(node)
    return target


# --- inside nodes ---------------------------------------------------------------------------------------------------------

OUTSIDE = frozenset({Transport.NET, Transport.SHM})
"""Transports of which all that the host could see is looked at in any case."""


class SharedMemory(Source):
    """Connections inside the nodes."""

    kinds = frozenset({FactKind.WAITS_FOR, FactKind.STANDS})

    def facts(self, case: Case) -> Iterator[Wait | StallMark]:
        """Waits for who leaves a connection full or data unread, and of who has read all. O(connections + transfers)."""
        return _Inside(case).facts()

    def coverage(self, case: Case) -> Iterator[str]:
        """That steps are all it sees."""
        if Transport.SHM in case.job.transports:
            yield "shared-memory connections: steps are seen, the operation they belong to is not"


class _Inside:
    def __init__(self, case: Case) -> None:
        self.case, self.job, self.transfers, self.compared = case, case.job, case.transfers, case.compared
        self._in_network = set(self.transfers.owner[self.compared.rows[~self.compared.showing(*Stall)]].tolist())
        """Indices of the processes of which a wait is seen in the network."""
        self._seen = any(own.host_connections for own in case.job.views)
        self._empty: set[ConnectionKey] = set()
        """What is known to have been read to the end by who waits for more."""
        t = self.transfers
        moved = t.begun & ~t.point_to_point & (t.done < t.nsteps) & np.where(t.sends, t.produced > 0, t.done > 0)
        self._amid = set(t.owner[moved].tolist())
        """Indices of the processes whose GPU is in the middle of a collective, by what it has taken or produced."""
        self._found: set[int] = set()
        """Indices of the processes of which a wait inside a node was found."""

    def facts(self) -> Iterator[Wait | StallMark]:
        alone = [*self._full_and_unread()] if self._seen else []
        full, unread = [one for one in alone if isinstance(one, Wait)], [one for one in alone if isinstance(one, StallMark)]
        yield from full
        yield from unread
        self._found |= {wait.subject for wait in full if isinstance(wait.subject, RankNode)}
        for row in self._receiving() if self._seen or self.job.transports - OUTSIDE else ():
            yield from self._follow(self.transfers.group_of(row), int(self.transfers.channel[row]), int(self.transfers.rank[row]))
            yield from self._last_part(row)
        for place in self._standing():
            yield from self._behind_stall(place)
        for mark in unread:
            group, key = self.job.groups[mark.key.group], mark.key
            if not key.point_to_point:
                yield from self._hidden(group, key.channel, key.source, mark.member)
                yield from self._follow(group, key.channel, key.destination)
        for mark in unread:
            yield from self._answer(mark.key) if mark.key.point_to_point else ()

    def _full_and_unread(self) -> Iterator[Wait | StallMark]:
        for group in self.job.groups.values():
            for rank, (member, own) in group.members.items():
                for conn in own.host_connections:
                    left = steps_unread(conn) or 0
                    if conn.direction is Direction.SEND and left >= CONNECTION_SLOTS:
                        yield self._waits(group, member, conn, Why.FULL, f"{left} steps lie unread")
                    elif conn.direction is Direction.RECV and 0 < left <= CONNECTION_SLOTS:
                        yield self._unread(group, rank, member, conn)

    def _unread(self, group: Group, rank: int, member: Member, conn: HostConnection) -> StallMark:
        def describe() -> str:
            where = f"{memory_of(conn)} from {self.job.rank_name(group.id, conn.peer)}, channel {conn.channel}"
            return f"{member.label}: {Stall.GPU_NOT_CONSUMING}: {where}, {steps_unread(conn)} steps lie unread"

        key, at = ConnectionKey(group.id, conn.channel, conn.peer, rank, conn.connection_index > 0), RankNode(member.index)
        return StallMark(subject=at, member=member, stall=Stall.GPU_NOT_CONSUMING, key=key, describe=describe)

    def _waits(
        self, group: Group, member: Member, conn: HostConnection, why: Why, detail: str, strength: Strength = Strength.PROVEN
    ) -> Wait:
        return waits_for(
            self.job, group, member, conn.peer, why, f"{memory_of(conn)}, channel {conn.channel}, {detail}", channel=conn.channel,
            sends=conn.direction is Direction.SEND, point_to_point=conn.connection_index > 0, strength=strength,
        )  # fmt: skip

    def _receiving(self) -> Iterator[int]:
        """Receives under way of which more comes than the last part: who is next in the node and has read all is in it, too."""
        t = self.transfers
        open_here = ~t.sends & t.begun & ~t.point_to_point & (t.done > 0) & (t.done < t.nsteps)
        for row in np.flatnonzero(open_here).tolist():
            operation, nsteps = t.operation_of(row), int(t.nsteps[row])
            # What a rank has received it has sent on, and one part of its own: so much is still to come from it.
            rounds = max(t.group_of(row).nranks - 1, 1) * (2 if operation.collective == "AllReduce" else 1)
            if is_ring(operation) and int(t.done[row]) - (-nsteps // rounds) < nsteps:
                yield row

    def _last_part(self, row: int) -> Iterator[Wait]:
        """The next rank in the ring, by NVLink, if it has sent all: it still has to read what this one has yet to receive."""
        t, group, channel = self.transfers, self.transfers.group_of(row), int(self.transfers.channel[row])
        if (rank := int(t.rank[row])) not in group.members:
            return
        member, own = group.members[rank]
        ring = own.ring(channel)
        if ring is None or ring.next not in hidden_on(own, channel) or ring.next not in group.members:
            return
        peer, view = group.members[ring.next]
        sends_on = any(link[0] == channel and link[2:] == (Direction.SEND, Transport.NET) for link in view.transports)
        if sends_on and not len(self._of(row, ring.next, sends=True)) and launched(peer, view) == launched(member, own):
            self._amid.add(peer.index)
            yield waits_for(self.job, group, peer, own.rank, Why.EMPTY, f"the last part, channel {channel}", channel=channel)

    def _of(self, row: int, rank: int, *, sends: bool) -> Sequence[int]:
        """Rows of a rank in the operation and on the channel of another."""
        t = self.transfers
        return self._rows.get((int(t.group[row]), int(t.channel[row]), int(t.op_count[row]), rank, sends), ())

    @cached_property
    def _rows(self) -> dict[tuple[int, int, int, int, bool], list[int]]:
        """Rows by communicator, channel, operation, rank and side. Made once, and only where NVLink hides something."""
        t, found = self.transfers, defaultdict[tuple[int, int, int, int, bool], list[int]](list)
        columns = [one.tolist() for one in (t.group, t.channel, t.op_count, t.rank, t.sends)]
        for row, place in enumerate(zip(*columns, strict=True)):
            found[place].append(row)
        return found

    @cached_property
    def _newest(self) -> dict[tuple[int, int, int, bool], int]:
        """The newest collective by communicator, channel, rank and side (messages have odd numbers of their own)."""
        return {(place[0], place[1], *place[3:]): place[2] for place in sorted(self._rows) if not place[2] & 1}

    def _standing(self) -> list[int]:
        """GPUs that stand still in the network, behind which something inside their node may be found."""
        t, compared = self.transfers, self.compared
        chosen = np.flatnonzero(compared.showing(*edges.GPU_STALLS) & ~t.point_to_point[compared.rows])
        rows = compared.rows[chosen]
        inside = [
            member.index
            for group in (t.groups if self._seen or self.job.transports - OUTSIDE else ())
            for member, own in group.members.values()
            if own.host_connections or {link[3] for link in own.transports} - OUTSIDE
        ]
        dropped = compared.showing(Stall.GPU_NOT_PRODUCING)[chosen] & ~t.receiving[rows]
        found: list[int] = chosen[dropped | is_among(t.owner[rows], inside)].tolist()
        # Rings first: who is amid one has not begun a tree of another communicator.
        return sorted(found, key=lambda place: not is_ring(t.operation_of(int(compared.rows[place]))))

    def _behind_stall(self, place: int) -> Iterator[Wait | StallMark]:
        """Whom a GPU that stands still may wait for in its node; likely, where it has not written its ring's first send."""
        end, _ = self.compared.ends(place)
        group, channel = self.job.groups[end.key.group], end.key.channel
        rank, other = (end.key.source, end.key.destination) if end.sends else (end.key.destination, end.key.source)
        if rank not in group.members:
            return
        member = group.members[rank][0]
        if SHOWN[self.compared.shows[place]] is Stall.GPU_NOT_PRODUCING:
            weak = is_ring(end.operation) and not edges.has_produced(end.sub)
            far = end.operation.collective in RING_ENDS_RECEIVING
            yield from self._follow(group, channel, rank, back=group.nranks if far else 1, weak=weak)
            if not self.transfers.receiving[self.compared.rows[place]]:
                yield from self._dropped(group, end, member)
            if end.operation.algorithm == "Tree":
                strength = Strength.POSSIBLE if edges.has_produced(end.sub) else Strength.LIKELY
                yield from self._children(group, channel, rank, other, strength)
        if not is_ring(end.operation):
            if member.index not in self._amid or edges.has_produced(end.sub):
                yield from self._hidden(group, channel, other, member)
        elif (ring := group.members[rank][1].ring(channel)) is not None:
            row, peer = int(self.compared.rows[place]), ring.prev if end.sends else ring.next
            yield from self._beside_in_ring(row, end, group, member, peer)

    def _beside_in_ring(self, row: int, end: End, group: Group, member: Member, peer: int) -> Iterator[Wait | StallMark]:
        """Whether a GPU at which a ring enters or leaves the node waits for the one that NVLink joins to it there, by the steps
        that both have taken from the network or sent into it; possible where the ring goes on inside the node. A GPU that is amid
        another operation has not begun this one.
        """
        channel, own = end.key.channel, group.members[group.ranks[member.index]][1]
        begun = edges.has_produced(end.sub) if end.sends else end.sub.done > 0
        if peer not in hidden_on(own, channel) or (not begun and member.index in self._amid):
            return
        moved, own_moved = self._moved(row, peer, sends=not end.sends), end.sub.of_gpu(sends=end.sends)
        steps = RingSteps.of(end.operation, group.nranks, end.sub.nsteps) if moved is not None else None
        if steps is None or moved is None:
            yield self._possible(group, member, peer, channel)
            return
        lies = steps.between(moved, own_moved) if end.sends else steps.between(own_moved, moved)
        if lies.most < 0 and not end.sends:  # More was sent on than this one's proxy knows to be taken.
            self._amid.add(member.index)
            yield edges.stalls_at(end, None, Stall.PROXY_NOT_POSTING)
            return
        can = lies.least >= steps.slice if end.sends else lies.most + steps.slice <= CONNECTION_SLOTS
        cannot = lies.most <= 0 if end.sends else lies.least + steps.slice > CONNECTION_SLOTS
        if cannot:
            between = f"{max(lies.least, 0)} to {lies.most} steps lie" if lies.most > 0 else "nothing lies"
            said = f"{between} between them, by what they have taken and sent, channel {channel}"
            why = Why.EMPTY if end.sends else Why.FULL
            yield waits_for(self.job, group, member, peer, why, said, channel=channel, sends=not end.sends)
        elif not can:
            yield self._possible(group, member, peer, channel)

    def _moved(self, row: int, peer: int, *, sends: bool) -> int | None:
        """A GPU's steps in another's operation; all if that is gone and a later came: they end in order. ``None``: unknown."""
        rows, t = self._of(row, peer, sends=sends), self.transfers
        if rows:
            return t.end(rows[0]).sub.of_gpu(sends=sends) if len(rows) == 1 else None
        newest = self._newest.get((int(t.group[row]), int(t.channel[row]), peer, sends), -1)
        return int(t.nsteps[row]) if newest > t.op_count[row] else None

    def _follow(self, group: Group, channel: int, rank: int, *, back: int = 0, weak: bool = False) -> Iterator[Wait]:
        """From a rank on along its ring, or ``back``, while all is read: each waits for the one before."""
        written = (ring := self.case.rings[group.id].get(channel, Ring())).written.values()
        fewest = min(written) if written and max(written) > min(written) else None
        at = ring.get(rank)
        at = ring.get(at.ring.next) if at is not None and not back else at
        for _ in range(back or group.nranks - 1):
            if at is None or at.source is None or at.unread != 0:
                return
            member, doubtful = group.members[at.rank][0], weak if back else fewest is not None and at.written == fewest
            # A GPU that is amid an operation elsewhere has not begun the one it has written nothing of.
            if back or not doubtful or member.index not in self.case.amid:
                yield from self._nothing_written(group, member, at.source, Strength.LIKELY if doubtful else Strength.PROVEN)
            at = ring.get(at.ring.prev if back else at.ring.next)

    def _children(self, group: Group, channel: int, top: int, parent: int, strength: Strength) -> Iterator[Wait]:
        """From the top of a tree in a node on to all below, while all is read: each sends on what its children gave it."""
        todo = [top]
        for rank in todo:
            for conn in group.members[rank][1].host_connections if rank in group.members else ():
                place = (conn.channel, conn.direction, conn.connection_index > 0)
                if place == (channel, Direction.RECV, False) and conn.peer not in (*todo, parent) and steps_unread(conn) == 0:
                    todo.append(conn.peer)
                    yield from self._nothing_written(group, group.members[rank][0], conn, strength)

    def _nothing_written(self, group: Group, member: Member, conn: HostConnection, strength: Strength) -> Iterator[Wait]:
        wait = self._waits(group, member, conn, Why.EMPTY, f"all {conn.tail} steps read", strength)
        if wait.key not in self._empty:
            self._empty.add(wait.key)
            self._found.add(member.index)
            yield wait

    def _dropped(self, group: Group, end: End, member: Member) -> Iterator[Wait]:
        """A ring that still has to send has not received all, so its receive must be open; gone means that it failed: newer
        proxies (2.27.5 among them) drop what their transport reports as failed (``progressOps``, ``src/proxy.cc``).
        """
        channel, own = end.key.channel, group.members[group.ranks[member.index]][1]
        ring = own.ring(channel) if is_ring(end.operation) else None
        if ring is None or (channel, ring.prev, Direction.RECV, Transport.NET) not in own.transports:
            return
        target = base.node_of(group, ring.prev)
        link = isinstance(target, RankNode) and not self.job.member(target.index).halted
        leads = base.LinkNode(group.id, ring.prev, own.rank) if link else target
        detail = f"{edges.operation_text(end)}, channel {channel}, produced {end.sub.gpu_ready} of {end.sub.nsteps} steps"
        yield waits_for(self.job, group, member, ring.prev, Why.BROKEN, detail, channel=channel, end=end, target=leads)

    def _hidden(self, group: Group, channel: int, other: int, member: Member) -> Iterator[Wait]:
        own = group.members[group.ranks[member.index]][1]
        for peer in sorted(hidden_on(own, channel) - {other}):
            yield self._possible(group, member, peer, channel)

    def _possible(self, group: Group, member: Member, peer: int, channel: int) -> Wait:
        return waits_for(
            self.job, group, member, peer, Why.UNOBSERVED, "the host cannot see that", channel=channel,
            strength=Strength.POSSIBLE, target=base.HiddenNode(group.id, peer), where=" inside the node",
        )  # fmt: skip

    def _answer(self, key: ConnectionKey) -> Iterator[Wait]:
        """Who shows no wait, and whose message lies unread, may wait for that one's: an open receive does not show."""
        group = self.job.groups[key.group]
        if key.source not in group.members:
            return
        writer, own = group.members[key.source]
        if writer.halted or writer.index in self._found | self._in_network:
            return
        place = (key.destination, Direction.RECV, key.channel)
        conns = [c for c in own.host_connections if (c.peer, c.direction, c.channel) == place and c.connection_index > 0]
        unread = [left for conn in conns if (left := steps_unread(conn)) is not None]
        if unread and not any(unread):
            yield from self._nothing_written(group, writer, conns[0], Strength.POSSIBLE)
