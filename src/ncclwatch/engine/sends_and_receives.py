"""Sends and receives that the peer has not matched, told from the calls where nobody can look at the connection (NVLink).

A rank that has not called a collective may wait for a message instead. How many messages two processes have called since
somebody watches differs by what was under way when watching began, so numbers are compared only where they mean the same:
since the making of the communicator, or since the newest collective that both have called on a communicator they share (what
a program sends before it is received before it). Else a rank is compared with peers in its place of other pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from ncclwatch.engine.alignment import Alignment, align, rows_of
from ncclwatch.engine.call_patterns import Orders
from ncclwatch.engine.connections import unseen_peers
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.model.events import Function
from ncclwatch.model.state import Communicator, Transport

PEERS = 4
"""Bound: ranks in the same place of other pipelines that a process is compared with: one is enough, and the first may not be
kept.
"""

MATCHING = {Function.SEND: Function.RECV, Function.RECV: Function.SEND}


class Owed(Enum):
    """Whether a peer has yet to match a call."""

    YES = "it has called more than its peer has matched"
    NO = "all it has called is matched"
    UNKNOWN = "the calls do not tell"


@dataclass(slots=True)
class Messages:
    """Who waits for whom in sends and receives that only the calls show. ``totals`` as of :class:`case.Known`."""

    job: Job
    ledger: Ledger
    totals: Mapping[Place, tuple[int, int]]
    orders: Orders | None
    _alignments: dict[int, Alignment] = field(default_factory=dict)
    _orders: dict[int, _Calls | None] = field(default_factory=dict)

    def of(self, member: Member) -> Iterator[tuple[Group, int, Owed]]:
        """What a process has called of sends and receives over connections nobody can look into: (communicator, peer, answer)."""
        for group, own in self.job.held_by(member):
            made = self.ledger.point_to_point.get(self._place(member, own), {})
            seen = _visible_peers(own)
            for peer in sorted({peer for _, peer in made} - seen):
                answers = {self._owed(group, member, peer, Function(called)) for called, to in made if to == peer}
                yield group, peer, Owed.YES if Owed.YES in answers else Owed.UNKNOWN if Owed.UNKNOWN in answers else Owed.NO

    def owed(self, member: Member) -> Iterator[tuple[Group, int, Member]]:
        """Peers that have not matched what a process has called, each with who holds that rank."""
        for group, peer, owed in self.of(member):
            if owed is Owed.YES and (other := group.holder(peer)) is not None:
                yield group, peer, other

    def doubtful(self, member: Member) -> Iterator[tuple[Group, int]]:
        """Peers a process may wait for; none of them where it is known to wait for one."""
        found = list(self.of(member))
        if not any(owed is Owed.YES and peer in group.members for group, peer, owed in found):
            yield from ((group, peer) for group, peer, owed in found if owed is not Owed.NO)

    def may_wait(self, member: Member) -> bool:
        """Whether a process waits for a message, or may."""
        return any(owed is not Owed.NO for _, _, owed in self.of(member))

    def _place(self, member: Member, own: Communicator) -> Place:
        return self.ledger.place(member.info.host, member.info.pid, own.address)

    def _owed(self, group: Group, member: Member, peer: int, called: Function) -> Owed:
        other = group.members.get(peer)
        if other is None:
            return Owed.UNKNOWN
        own = group.members[group.ranks[member.index]][1]
        mine, theirs = self._place(member, own), self._place(*other)
        if self.ledger.seen_from_birth(mine) and self.ledger.seen_from_birth(theirs):
            made = self.ledger.point_to_point.get(mine, {}).get((called, peer), 0)
            matched = self.ledger.point_to_point.get(theirs, {}).get((MATCHING[called], own.rank), 0)
            return Owed.YES if made > matched else Owed.NO
        makes, matches = (own.address, (called is Function.SEND, peer)), (other[1].address, (called is Function.RECV, own.rank))
        since = self._since_common(member, other[0])
        if since is not None:
            return Owed.YES if _number(since[0], makes) > _number(since[1], matches) else Owed.NO
        return Owed.NO if self._waits_for_no_more_than_a_peer(group, member, other[0], makes, matches) else Owed.UNKNOWN

    def _waits_for_no_more_than_a_peer(self, group: Group, member: Member, other: Member, makes: _Way, matches: _Way) -> bool:
        """Whether a process has no more to wait for than a peer with the same place in a pipeline beside it, that has called what
        this one has not: messages that hold up one of them would hold up both.
        """
        place, peer = group.ranks[member.index], makes[1][1]
        for beside_it, beside in islice(self._beside(group, member, makes[1]), PEERS):
            its_peer, view = beside.members[peer][0], beside.members[peer][1]
            mine, theirs = self._since_common(member, beside_it, ahead=True), self._since_common(other, its_peer)
            if mine is None or theirs is None:
                continue
            called = (beside.members[place][1].address, makes[1])
            more = _number(mine[0], makes) - _number(mine[1], called)
            matched = _number(theirs[0], matches) - _number(theirs[1], (view.address, matches[1]))
            if more <= matched:
                return True
        return False

    def _beside(self, group: Group, member: Member, way: tuple[bool, int]) -> Iterator[tuple[Member, Group]]:
        """Processes that have this one's place in a communicator like ``group``, and call the same there, each with that."""
        place, called = group.ranks[member.index], (Function.SEND if way[0] else Function.RECV, way[1])
        alike = [g for g in self.job.groups.values() if g.nranks == group.nranks and g.id != group.id and not g.missing]
        for beside in alike:
            beside_it = beside.holder(place)
            if beside_it is None or beside_it.halted or member.index in beside.ranks:
                continue
            if called in self.ledger.point_to_point.get(self._place(beside_it, beside.members[place][1]), {}):
                yield beside_it, beside

    def _since_common(self, member: Member, other: Member, *, ahead: bool = False) -> tuple[_Calls, _Calls] | None:
        """The calls of two processes since the newest collective both have called; ``None`` where there is none that is kept.

        ``ahead``: only on a communicator on which the other has called more.
        """
        mine, theirs = self._calls(member), self._calls(other)
        if mine is None or theirs is None:
            return None
        for group, _ in self.job.held_by(member):
            if other.index not in group.ranks:
                continue
            alignment = self._align(group)
            numbers = [self._called(group, alignment, one) for one in (member, other)]
            if numbers[0] is None or numbers[1] is None or (ahead and numbers[1] <= numbers[0]):
                continue
            newest = min(numbers[0], numbers[1])
            cut = [
                _after(calls, group.members[group.ranks[one.index]][1].address, number - newest)
                for calls, one, number in ((mine, member, numbers[0]), (theirs, other, numbers[1]))
            ]
            if cut[0] is not None and cut[1] is not None:
                return cut[0], cut[1]
        return None

    def _called(self, group: Group, alignment: Alignment, member: Member) -> int | None:
        """How many collectives a process has called on a communicator, by the number its ranks have in common."""
        rank = group.ranks[member.index]
        row = self.ledger.rows.get(self._place(member, group.members[rank][1]))
        return alignment.sequence(rank, int(self.ledger.called[row])) if row is not None else None

    def _align(self, group: Group) -> Alignment:
        if group.id not in self._alignments:
            self._alignments[group.id] = align(self.ledger, *rows_of(group, self.ledger, self.totals))
        return self._alignments[group.id]

    def _calls(self, member: Member) -> _Calls | None:
        if member.index not in self._orders:
            order = self.orders.find(member.info.host, member.info.pid) if self.orders is not None else None
            calls = [(call.time_ns, call.comm, call.ways) for call in order.calls] if order is not None else None
            self._orders[member.index] = calls
        return self._orders[member.index]


_Way = tuple[int, tuple[bool, int]]
"""Address of the communicator in its process; whether it sends, and the peer."""
_Calls = list[tuple[int, int, list[tuple[bool, int] | None]]]
"""Time, address of the communicator and ways of each call, oldest first (:class:`slow.order.CallOrder`)."""


def _visible_peers(own: Communicator) -> set[int]:
    """Peers of which memory shows how far transfers have come."""
    return {peer for _, peer, _, transport in own.transports if transport in (Transport.NET, Transport.SHM)} - unseen_peers(own)


def _after(calls: _Calls, comm: int, newer: int) -> _Calls | None:
    """The calls after the collective on a communicator that has so many newer ones there; ``None`` where it is not kept."""
    for at in range(len(calls) - 1, -1, -1):
        _, where, ways = calls[at]
        if where == comm and ways == [None]:
            if newer == 0:
                return calls[at + 1 :]
            newer -= 1
    return None


def _number(calls: _Calls, way: _Way) -> int:
    return sum(ways.count(way[1]) for _, comm, ways in calls if comm == way[0])
