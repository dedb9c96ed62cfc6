"""What the ends of connections say: who needs whom, and who could go on and does not, over the network and inside nodes.

All transfers over the network are compared at once, in columns (:class:`ncclwatch.engine.transfers.Compared`). Connections whose
head and tail can be seen (shared memory, and P2P where the device shim reads it) show by themselves that they are full, or that
data lies unread; not whether their reader is in an operation. Of a ring that goes through the network as well proxies tell that:
who is in an operation, and has read all there is, waits for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ncclwatch.engine.connections import (
    CONNECTION_SLOTS,
    RING_ENDS_RECEIVING,
    Rings,
    has_produced,
    is_ring,
    is_seen,
    memory_of,
    rings_inside,
    steps_unread,
    unseen_peers,
)
from ncclwatch.engine.edges import (
    GPU_STALLS,
    NOBODY,
    OF_THE_LINK,
    PROXY_STALLS,
    ConnectionKey,
    End,
    Stall,
    StallMark,
    Wait,
    Why,
    operation_text,
    stalls_at,
    wait_text,
    waits_for,
)
from ncclwatch.engine.evidence.base import (
    AbsentNode,
    F,
    Fact,
    FactColumns,
    FactKind,
    HiddenNode,
    LinkNode,
    Node,
    RankNode,
    Source,
    Strength,
    node_of,
)
from ncclwatch.engine.job import Group, Member
from ncclwatch.engine.transfers import SHOWN, Column
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

    def facts(self, case: Case) -> Iterator[FactColumns[Fact]]:
        """Waits and stalls, in columns. O(transfers)."""
        t, compared, nodes, target = case.transfers, case.transfers.compared, case.facts.nodes, _targets(case)
        stands = compared.showing(*Stall)
        waits, stalls = np.flatnonzero(~stands), np.flatnonzero(stands)

        def columns(kind: FactKind, found: Column, make: Callable[[int], F]) -> FactColumns[F]:
            rows = compared.rows[found]
            places = np.unique(t.group[rows[~t.point_to_point[rows]]]).tolist()
            collectives = frozenset(t.members.groups[place].id for place in places)
            return FactColumns(kind, t.owner[rows], target[found], np.zeros(len(rows), np.bool_), make, collectives)

        def wait(number: int) -> Wait:
            place = int(waits[number])
            end, far, why = *compared.ends(place), Why(SHOWN[compared.shows[place]])
            return Wait(
                subject=RankNode(end.member.index), object=nodes.node(int(target[place])), why=why, key=end.key, end=end,
                other=far, describe=partial(wait_text, case.job, end, far, why),
            )  # fmt: skip

        def stall(number: int) -> StallMark:
            place = int(stalls[number])
            return stalls_at(*compared.ends(place), Stall(SHOWN[compared.shows[place]]))

        yield columns(FactKind.WAITS_FOR, waits, wait)
        yield columns(FactKind.STANDS, stalls, stall)

    def coverage(self, case: Case) -> Iterator[str]:
        """Operations that no proxy shows, or that it shows alone."""
        yield from (text for transport, text in HIDDEN.items() if transport in case.job.joined.transports)
        if case.job.joined.captured:
            yield "operations captured in CUDA graphs: their replays make no calls; only proxy steps are seen"
        if case.job.joined.by_device:
            yield "operations that kernels start themselves (device API, GIN): neither calls nor proxy steps show them"


def _targets(case: Case) -> Column:
    """Whom each waits for: the peer, the link to it, or a peer that was not observed; numbers of nodes, ``NOBODY`` of a stall.

    Data that does not arrive says nothing about a link when the proxy at one of its ends stands still anyway: a request counts as
    handed to the network before the proxy has pushed all of it into the socket.
    """
    job, t, compared = case.job, case.transfers, case.transfers.compared
    rows, stands, of_links = compared.rows, compared.showing(*Stall), compared.showing(*OF_THE_LINK)
    target = np.where(of_links | stands, NOBODY, t.peer_index[rows])
    idle = {member.index for member in job.members if member.halted}
    idle |= set(t.owner[rows[compared.showing(*PROXY_STALLS)]].tolist())
    for place in np.flatnonzero((target < 0) & ~stands).tolist():
        row = int(rows[place])
        key = t.key(row)
        holders = [job.groups[key.group].holder(rank) for rank in (key.source, key.destination)]
        blamed = next((one.index for one in holders if one is not None and one.index in idle), None)
        link, absent = LinkNode(key.group, key.source, key.destination), AbsentNode(key.group, int(t.peer[row]))
        node = absent if not of_links[place] else link if blamed is None else RankNode(blamed)
        target[place] = case.facts.nodes.number(node)
    return target


# --- inside nodes ---------------------------------------------------------------------------------------------------------

OUTSIDE = frozenset({Transport.NET, Transport.SHM})
"""Transports of which all that the host could see is looked at in any case."""


class SharedMemory(Source):
    """Connections inside the nodes."""

    kinds = frozenset({FactKind.WAITS_FOR, FactKind.STANDS})

    def facts(self, case: Case) -> Iterator[Wait | StallMark]:
        """Waits for readers that leave a full connection, ranks that leave data unread, and waits of those who are known to be in
        an operation and have read all. O(connections + transfers).
        """
        return _Inside(case).facts()

    def coverage(self, case: Case) -> Iterator[str]:
        """That steps are all it sees."""
        if Transport.SHM in case.job.joined.transports:
            yield "shared-memory connections: steps are seen, the operation they belong to is not"


class _Inside:
    """The connections inside the nodes of one job."""

    def __init__(self, case: Case) -> None:
        self.job, self.transfers = case.job, case.transfers
        self._wait = partial(waits_for, case.job)
        self._rings: dict[int, Rings] = {}
        self._empty: set[tuple[int, int, int, int]] = set()
        """(communicator, reader, writer, channel) of what is known to wait for more."""
        compared = self.transfers.compared
        self._waiting: set[Node] = {
            *map(RankNode, np.unique(self.transfers.owner[compared.rows[~compared.showing(*Stall)]]).tolist()),
            *(RankNode(member.index) for member in self.job.members if member.halted),
        }
        """Of whom a wait is seen, and who waits for nobody."""

    def facts(self) -> Iterator[Wait | StallMark]:
        full, unread = self._full_and_unread() if self.job.joined.seen else ([], [])
        yield from full
        yield from unread
        self._waiting |= {wait.subject for wait in full}
        for group, row in self._receiving() if self.job.joined.seen else ():
            yield from self._follow(group, int(self.transfers.channel[row]), int(self.transfers.rank[row]))
        for place in self._standing():
            yield from self._behind_stall(place)
        for mark in unread:
            group, key = self.job.groups[mark.key.group], mark.key
            if not key.point_to_point:
                yield from self._hidden(group, key.channel, key.source, mark.member)
                yield from self._follow(group, key.channel, key.destination)
        for mark in unread:
            yield from self._answer(mark) if mark.key.point_to_point else ()

    # --- what a connection shows by itself -------------------------------------------------------------------------------

    def _full_and_unread(self) -> tuple[list[Wait], list[StallMark]]:
        full, unread = list[Wait](), list[StallMark]()
        for group in self.job.groups.values():
            for rank, (member, own) in group.members.items():
                for conn in own.host_connections:
                    left = steps_unread(conn) or 0
                    if conn.direction is Direction.SEND and left >= CONNECTION_SLOTS:
                        detail = f"{memory_of(conn)}, channel {conn.channel}, {left} steps lie unread"
                        point_to_point = conn.connection_index > 0
                        wait = partial(self._wait, sends=True, point_to_point=point_to_point)
                        full.append(wait(group, member, conn.peer, Why.FULL, detail, channel=conn.channel))
                    elif conn.direction is Direction.RECV and 0 < left <= CONNECTION_SLOTS:
                        unread.append(self._unread(group, rank, member, conn))
        return full, unread

    def _unread(self, group: Group, rank: int, member: Member, conn: HostConnection) -> StallMark:
        key = ConnectionKey(group.id, conn.channel, conn.peer, rank, conn.connection_index > 0)
        stall = Stall.GPU_NOT_CONSUMING

        def describe() -> str:
            where = f"{memory_of(conn)} from {self.job.rank_name(group.id, conn.peer)}, channel {conn.channel}"
            return f"{member.label}: {stall}: {where}, {steps_unread(conn)} steps lie unread"

        return StallMark(subject=RankNode(member.index), member=member, stall=stall, key=key, describe=describe)

    # --- rings that go through a node --------------------------------------------------------------------------------------

    def _receiving(self) -> Iterator[tuple[Group, int]]:
        """Receives of ring operations under way of which more is to come than the rank's last part: who comes after it in its
        node and has read all that it wrote is in the operation as well, whatever its own proxy shows.
        """
        t, groups = self.transfers, self.transfers.members.groups
        inside = np.array([any(own.host_connections for _, own in group.members.values()) for group in groups], np.bool_)
        open_here = ~t.sends & t.begun & ~t.point_to_point & (t.done > 0) & (t.done < t.nsteps)
        for row in np.flatnonzero(open_here & inside[t.group]).tolist():
            operation, group, nsteps = t.operation_of(row), t.group_of(row), int(t.nsteps[row])
            # What a rank has received it has sent on, and one part of its own: so much is still to come from it.
            rounds = max(group.nranks - 1, 1) * (2 if operation.collective == "AllReduce" else 1)
            if is_ring(operation) and int(t.done[row]) - (-nsteps // rounds) < nsteps:
                yield group, row

    def _standing(self) -> list[int]:
        """GPUs that stand still in the network, behind which something inside their node may be found."""
        t, compared, job = self.transfers, self.transfers.compared, self.job
        chosen = np.flatnonzero(compared.showing(*GPU_STALLS) & ~t.point_to_point[compared.rows])
        rows = compared.rows[chosen]
        worth = compared.showing(Stall.GPU_NOT_PRODUCING)[chosen] & ~t.receiving[rows]
        if job.joined.seen or job.joined.transports - OUTSIDE:
            inside = {
                (place, rank)
                for place, group in enumerate(t.members.groups) for rank, (_, own) in group.members.items()
                if own.host_connections or {link[3] for link in own.transports} - OUTSIDE
            }  # fmt: skip
            ranks = zip(t.group[rows].tolist(), t.rank[rows].tolist(), strict=True)
            worth |= np.array([rank in inside for rank in ranks], np.bool_)
        found: list[int] = chosen[worth].tolist()
        return found

    def _behind_stall(self, place: int) -> Iterator[Wait]:
        """What a GPU that stands still may wait for inside its node: that wait, or that it is hidden.

        In a ring that begins with a send, who has entered has written. Who has not waits in something before, there for the
        same ranks more often than not: those are weak waits.
        """
        compared, (end, _) = self.transfers.compared, self.transfers.compared.ends(place)
        group, channel = self.job.groups[end.key.group], end.key.channel
        rank, other = (end.key.source, end.key.destination) if end.sends else (end.key.destination, end.key.source)
        if rank not in group.members:
            return
        member = group.members[rank][0]
        if SHOWN[compared.shows[place]] is Stall.GPU_NOT_PRODUCING:
            weak = is_ring(end.operation) and not has_produced(end.sub)
            far = end.operation.collective in RING_ENDS_RECEIVING
            yield from self._follow(group, channel, rank, back=group.nranks if far else 1, weak=weak)
            if not self.transfers.receiving[compared.rows[place]]:
                yield from self._dropped(group, end, member)
        yield from self._hidden(group, channel, other, member)

    def _follow(self, group: Group, channel: int, rank: int, *, back: int = 0, weak: bool = False) -> Iterator[Wait]:
        """From a rank in an operation on along its ring, or so many ranks ``back``, as long as all is read: each waits for the
        one before. A ring collective begins with a send: of one that has written less than others of it that is not proven.
        """
        if group.id not in self._rings:
            self._rings[group.id] = rings_inside(group)
        places = self._rings[group.id].get(channel, {})
        written = [at.written for at in places.values() if at.written is not None]
        some_began = bool(written) and max(written) > min(written)
        at = places.get(rank)
        at = places.get(at.ring.next) if at is not None and not back else at
        for _ in range(back or group.nranks - 1):
            if at is None or at.source is None or at.unread != 0:
                return
            doubtful = weak if back else some_began and at.written == min(written)
            strength = Strength.LIKELY if doubtful else Strength.PROVEN
            yield from self._nothing_written(group, group.members[at.rank][0], at.source, strength)
            at = places.get(at.ring.prev if back else at.ring.next)

    def _nothing_written(self, group: Group, member: Member, conn: HostConnection, strength: Strength) -> Iterator[Wait]:
        point_to_point = conn.connection_index > 0
        place = (group.id, member.index, conn.peer, ~conn.channel if point_to_point else conn.channel)
        if place not in self._empty:
            self._empty.add(place)
            self._waiting.add(RankNode(member.index))
            detail = f"channel {conn.channel}, {memory_of(conn)}, all {conn.tail} steps read"
            wait = partial(self._wait, strength=strength, point_to_point=point_to_point)
            yield wait(group, member, conn.peer, Why.EMPTY, detail, channel=conn.channel)

    def _dropped(self, group: Group, end: End, member: Member) -> Iterator[Wait]:
        """A ring that still has to send has not received all, so its receive must be open; gone means that it failed: newer
        proxies (2.27.5 among them) drop what their transport reports as failed, without a word (``progressOps``,
        ``src/proxy.cc``).
        """
        channel, own = end.key.channel, group.members[group.ranks[member.index]][1]
        previous = next((ring.prev for ring in own.rings if ring.channel == channel), -1)
        if not is_ring(end.operation) or (channel, previous, Direction.RECV, Transport.NET) not in own.transports:
            return
        target = node_of(group, previous)
        link = isinstance(target, RankNode) and not self.job.member(target.index).halted
        leads = LinkNode(group.id, previous, own.rank) if link else target
        detail = f"{operation_text(end)}, channel {channel}, produced {end.sub.gpu_ready} of {end.sub.nsteps} steps"
        yield self._wait(group, member, previous, Why.BROKEN, detail, channel=channel, end=end, target=leads)

    def _hidden(self, group: Group, channel: int, other: int, member: Member) -> Iterator[Wait]:
        own = group.members[group.ranks[member.index]][1]
        for peer in sorted(unseen_peers(own, channel) - {other}):
            if not is_seen(own, channel, peer):
                wait = partial(
                    self._wait, strength=Strength.POSSIBLE, target=HiddenNode(group.id, peer), where=" inside the node"
                )
                yield wait(group, member, peer, Why.UNOBSERVED, "the host cannot see that", channel=channel)

    def _answer(self, mark: StallMark) -> Iterator[Wait]:
        """Who has sent another a message that lies unread there, and has none from it, may wait for that one's: shared memory
        does not show an open receive. Said of who shows no other wait.
        """
        group, key = self.job.groups[mark.key.group], mark.key
        if key.source not in group.members or group.members[key.source][0].index in self._waiting:
            return
        writer, own = group.members[key.source]
        place = (key.destination, Direction.RECV, key.channel)
        conns = [c for c in own.host_connections if (c.peer, c.direction, c.channel) == place and c.connection_index > 0]
        unread = [left for conn in conns if (left := steps_unread(conn)) is not None]
        if unread and not any(unread):
            yield from self._nothing_written(group, writer, conns[0], Strength.POSSIBLE)
