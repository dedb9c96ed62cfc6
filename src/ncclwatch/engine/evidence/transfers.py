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
    is_seen,
    memory_of,
    rings_inside,
    steps_unread,
    unseen_peers,
)
from ncclwatch.engine.edges import (
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
from ncclwatch.model.state import Direction, HostConnection, ProxyOperation, Transport

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

# --- the network ----------------------------------------------------------------------------------------------------------

HIDDEN = {
    Transport.COLLNET: "CollNet: the switch adds up inside the network; its own counters are not compared between ranks",
    Transport.UNKNOWN: "connections of a transport that was not recognised",
}


class Proxies(Source):
    """Transfers over the network, as the proxies at both ends hold them."""

    name = "proxies"
    plane = "state"
    kinds = frozenset({FactKind.WAITS_FOR, FactKind.STANDS})

    def facts(self, case: Case) -> Iterator[FactColumns[Fact]]:
        """Waits and stalls, in columns. O(transfers)."""
        found = _Found(case)
        yield found.columns(FactKind.WAITS_FOR, found.waits, found.make_wait)
        yield found.columns(FactKind.STANDS, found.stalls, found.make_stall)

    def coverage(self, case: Case) -> Iterator[str]:
        """Operations that no proxy shows, or that it shows alone."""
        yield from (text for transport, text in HIDDEN.items() if transport in case.job.joined.transports)
        if case.job.joined.captured:
            yield "operations captured in CUDA graphs: their replays make no calls; only proxy steps are seen"
        if case.job.joined.by_device:
            yield "operations that kernels start themselves (device API, GIN): neither calls nor proxy steps show them"


class _Found:
    """What the transfers of a job show, as facts: ``waits`` and ``stalls`` are rows of the comparison."""

    def __init__(self, case: Case) -> None:
        self.job, self.nodes, self.transfers, self.compared = case.job, case.facts.nodes, case.transfers, case.transfers.compared
        stands = self.compared.showing(*Stall)
        self.waits, self.stalls = np.flatnonzero(~stands), np.flatnonzero(stands)
        self.target = self._targets()

    def _targets(self) -> Column:
        """Whom each waits for: the peer, the link to it, or a peer that was not observed; numbers of nodes.

        Data that does not arrive says nothing about a link when the proxy at one of its ends stands still anyway: a request
        counts as handed to the network before the proxy has pushed all of it into the socket.
        """
        t, rows = self.transfers, self.compared.rows
        of_links = self.compared.showing(*OF_THE_LINK)
        target = np.where(of_links, NOBODY, t.peer_index[rows])
        target[self.stalls] = 0
        idle = {member.index for member in self.job.members if member.halted}
        idle |= set(t.owner[rows[self.compared.showing(*PROXY_STALLS)]].tolist())
        for place in np.flatnonzero(target < 0).tolist():
            key, row = t.key(int(rows[place])), int(rows[place])
            holders = [self.job.groups[key.group].holder(rank) for rank in (key.source, key.destination)]
            blamed = next((one.index for one in holders if one is not None and one.index in idle), None)
            link, absent = LinkNode(key.group, key.source, key.destination), AbsentNode(key.group, int(t.peer[row]))
            node = absent if not of_links[place] else link if blamed is None else RankNode(blamed)
            target[place] = self.nodes.number(node)
        target[self.stalls] = NOBODY
        return target

    def columns(self, kind: FactKind, found: Column, make: Callable[[int], F]) -> FactColumns[F]:
        """What was found, as facts."""
        t, rows = self.transfers, self.compared.rows[found]
        places = np.unique(t.group[rows[~t.point_to_point[rows]]]).tolist()
        collectives = frozenset(t.members.groups[place].id for place in places)
        return FactColumns(kind, t.owner[rows], self.target[found], np.zeros(len(rows), np.bool_), make, collectives)

    def make_wait(self, number: int) -> Wait:
        """One of the waits."""
        place = int(self.waits[number])
        end, far, why = *self.compared.ends(place), Why(SHOWN[self.compared.shows[place]])
        target = self.nodes.node(int(self.target[place]))
        return Wait(
            subject=RankNode(end.member.index), source=Proxies.name, object=target, why=why, key=end.key,
            end=end, other=far, describe=partial(wait_text, self.job, end, far, why),
        )  # fmt: skip

    def make_stall(self, number: int) -> StallMark:
        """One of the stalls."""
        place = int(self.stalls[number])
        return stalls_at(*self.compared.ends(place), Stall(SHOWN[self.compared.shows[place]]), Proxies.name)


# --- inside nodes ---------------------------------------------------------------------------------------------------------

OUTSIDE = frozenset({Transport.NET, Transport.SHM})
"""Transports of which all that the host could see is looked at in any case."""
GPU_STALLS = (Stall.GPU_NOT_PRODUCING, Stall.GPU_NOT_CONSUMING)


class SharedMemory(Source):
    """Connections inside the nodes."""

    name = "shared memory"
    plane = "state"
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
        self._wait = partial(waits_for, case.job, source=SharedMemory.name)
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
        """All that they show."""
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

        node, source = RankNode(member.index), SharedMemory.name
        return StallMark(subject=node, source=source, member=member, stall=stall, key=key, describe=describe)

    # --- rings that go through a node --------------------------------------------------------------------------------------

    def _receiving(self) -> Iterator[tuple[Group, int]]:
        """Receives of ring operations that are under way, and of which more is to come than the rank's last part: who comes after
        it in its node and has read all that it wrote is in the operation as well, though its own proxy may show nothing of it any
        more, or never have: a ring's last receive goes nowhere.
        """
        t, groups = self.transfers, self.transfers.members.groups
        inside = np.array([any(own.host_connections for _, own in group.members.values()) for group in groups], np.bool_)
        open_here = ~t.sends & t.begun & ~t.point_to_point & (t.done > 0) & (t.done < t.nsteps)
        for row in np.flatnonzero(open_here & inside[t.group]).tolist():
            operation, group, nsteps = t.operation_of(row), t.group_of(row), int(t.nsteps[row])
            # What a rank has received it has sent on, and one part of its own: so much is still to come from it.
            rounds = max(group.nranks - 1, 1) * (2 if operation.collective == "AllReduce" else 1)
            if _is_ring(operation) and int(t.done[row]) - (-nsteps // rounds) < nsteps:
                yield group, row

    def _standing(self) -> list[int]:
        """GPUs that stand still in the network, behind which something may be found: in a large job most have nothing inside
        their node, and their receive open.
        """
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
        """A GPU that stands still may itself wait for a rank inside its node: see that wait, or say that it is hidden.

        In a ring that begins with a send, a rank that has entered has written: so who finds nothing waits for its predecessor.
        Who has not even made that first send has not entered: it waits in something before, inside the node most likely, and
        there for the same ranks more often than not. So these are weak waits.
        """
        compared, (end, _) = self.transfers.compared, self.transfers.compared.ends(place)
        group, channel = self.job.groups[end.key.group], end.key.channel
        rank, other = (end.key.source, end.key.destination) if end.sends else (end.key.destination, end.key.source)
        if rank not in group.members:
            return
        member = group.members[rank][0]
        if SHOWN[compared.shows[place]] is Stall.GPU_NOT_PRODUCING:
            weak = _is_ring(end.operation) and not has_produced(end.sub)
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
        """A rank that has read all of a connection waits for its writer; said once."""
        point_to_point = conn.connection_index > 0
        place = (group.id, member.index, conn.peer, ~conn.channel if point_to_point else conn.channel)
        if place not in self._empty:
            self._empty.add(place)
            self._waiting.add(RankNode(member.index))
            detail = f"channel {conn.channel}, {memory_of(conn)}, all {conn.tail} steps read"
            wait = partial(self._wait, strength=strength, point_to_point=point_to_point)
            yield wait(group, member, conn.peer, Why.EMPTY, detail, channel=conn.channel)

    def _dropped(self, group: Group, end: End, member: Member) -> Iterator[Wait]:
        """A ring that still has to send has not received all, so its receive must be open; gone means that it failed.

        Newer proxies (2.27.5 among them) drop an operation whose transport reports an error and tell nobody (``progressOps``,
        ``src/proxy.cc``).
        """
        channel, own = end.key.channel, group.members[group.ranks[member.index]][1]
        previous = next((ring.prev for ring in own.rings if ring.channel == channel), -1)
        if not _is_ring(end.operation) or (channel, previous, Direction.RECV, Transport.NET) not in own.transports:
            return
        target = node_of(group, previous)
        link = isinstance(target, RankNode) and not self.job.member(target.index).halted
        leads = LinkNode(group.id, previous, own.rank) if link else target
        detail = f"{operation_text(end)}, channel {channel}, produced {end.sub.gpu_ready} of {end.sub.nsteps} steps"
        yield self._wait(group, member, previous, Why.BROKEN, detail, channel=channel, end=end, target=leads)

    def _hidden(self, group: Group, channel: int, other: int, member: Member) -> Iterator[Wait]:
        """Peers but for one that a rank may wait for inside its node, where nobody can look."""
        own = group.members[group.ranks[member.index]][1]
        for peer in sorted(unseen_peers(own, channel) - {other}):
            if not is_seen(own, channel, peer):
                wait = partial(
                    self._wait, strength=Strength.POSSIBLE, target=HiddenNode(group.id, peer), where=" inside the node"
                )
                yield wait(group, member, peer, Why.UNOBSERVED, "the host cannot see that", channel=channel)

    def _answer(self, mark: StallMark) -> Iterator[Wait]:
        """Who has sent another a message that lies unread there, and has none from it, may wait for that one's: neighbours in a
        pipeline send and receive in turn, and shared memory does not show an open receive. Said of who shows no other wait.
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


def _is_ring(operation: ProxyOperation) -> bool:
    """Whether all ranks send and receive as much in it."""
    return operation.algorithm == "Ring" and operation.collective in RING_ENDS_RECEIVING
