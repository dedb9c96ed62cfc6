"""Sends and receives that the peer has not matched, told from the calls where nobody can look at the connection (NVLink).

A rank that has not called a collective may wait for a message instead. How many messages two processes have called since
somebody watches differs by what was under way when watching began, so numbers are compared only where they mean the same:
since the making of the communicator, or since the newest collective that both have called on a communicator they share (what
a program sends before it is received before it). Else a rank is compared with peers in its place of other pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice

from ncclwatch.engine.alignment import Alignment, align, rows_of
from ncclwatch.engine.call_patterns import Orders
from ncclwatch.engine.connections import unseen_peers
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.engine.slow.order import Call
from ncclwatch.model.events import Function
from ncclwatch.model.state import Communicator, Transport

PEERS = 4
"""Bound: ranks in the same place of other pipelines that a process is compared with: one is enough, and the first may not be
kept.
"""
MATCHING = {Function.SEND: Function.RECV, Function.RECV: Function.SEND}


class Owed(IntEnum):
    """Whether a peer has yet to match a call; of several the highest counts."""

    NO = 0
    """All that was called is matched."""
    UNKNOWN = 1
    """The calls do not tell."""
    YES = 2
    """More was called than the peer has matched."""


@dataclass(slots=True)
class Messages:
    """Who waits for whom in sends and receives that only the calls show. ``totals`` as of :class:`case.Known`."""

    job: Job
    ledger: Ledger
    totals: Mapping[Place, tuple[int, int]]
    orders: Orders | None
    _alignments: dict[int, Alignment] = field(default_factory=dict)

    def of(self, member: Member) -> Iterator[tuple[Group, int, Owed]]:
        """What a process has called of sends and receives over connections nobody can look into: (communicator, peer, answer)."""
        for group, own in self.job.held_by(member):
            made = self.ledger.point_to_point.get(self._place(member, own), {})
            seen = {peer for _, peer, _, transport in own.transports if transport in (Transport.NET, Transport.SHM)}
            for peer in sorted({peer for _, peer in made} - (seen - unseen_peers(own))):
                yield group, peer, max(self._owed(group, member, peer, Function(called)) for called, to in made if to == peer)

    def owed(self, member: Member) -> Iterator[tuple[Group, int]]:
        """Peers that have not matched what a process has called."""
        yield from ((group, peer) for group, peer, owed in self.of(member) if owed is Owed.YES and peer in group.members)

    def doubtful(self, member: Member) -> Iterator[tuple[Group, int]]:
        """Peers a process may wait for; none of them where it is known to wait for one."""
        if not any(self.owed(member)):
            yield from ((group, peer) for group, peer, owed in self.of(member) if owed is not Owed.NO)

    def may_wait(self, member: Member) -> bool:
        """Whether a process waits for a message, or may."""
        return any(owed is not Owed.NO for _, _, owed in self.of(member))

    def _place(self, member: Member, own: Communicator) -> Place:
        return self.ledger.place(member.info.host, member.info.pid, own.address)

    def _owed(self, group: Group, member: Member, peer: int, called: Function) -> Owed:
        if peer not in group.members:
            return Owed.UNKNOWN
        other, view = group.members[peer]
        own = group.members[group.ranks[member.index]][1]
        mine, theirs = self._place(member, own), self._place(other, view)
        if self.ledger.seen_from_birth(mine) and self.ledger.seen_from_birth(theirs):
            made = self.ledger.point_to_point.get(mine, {}).get((called, peer), 0)
            matched = self.ledger.point_to_point.get(theirs, {}).get((MATCHING[called], own.rank), 0)
            return Owed.YES if made > matched else Owed.NO
        makes, matches = (called is Function.SEND, peer), (called is Function.RECV, own.rank)
        since = self._since_common(member, other)
        if since is not None:
            more = _number(since[0], own, makes) > _number(since[1], view, matches)
            return Owed.YES if more else Owed.NO
        # Messages that hold up one of two ranks with the same place in a pipeline would hold up both: who has no more to wait for
        # than one that has called what this one has not does not wait for them.
        for beside in islice(self._beside(group, member, called, peer), PEERS):
            (its_own, its_view), (its_peer, peers_view) = beside.members[own.rank], beside.members[peer]
            ours, theirs_since = self._since_common(member, its_own, ahead=True), self._since_common(other, its_peer)
            if ours is not None and theirs_since is not None:
                more_made = _number(ours[0], own, makes) - _number(ours[1], its_view, makes)
                if more_made <= _number(theirs_since[0], view, matches) - _number(theirs_since[1], peers_view, matches):
                    return Owed.NO
        return Owed.UNKNOWN

    def _beside(self, group: Group, member: Member, called: Function, peer: int) -> Iterator[Group]:
        """Communicators like ``group`` in which another process has this one's place, and calls the same."""
        place = group.ranks[member.index]
        for beside in self.job.groups.values():
            if beside.nranks != group.nranks or beside.missing or member.index in beside.ranks:
                continue
            made = self.ledger.point_to_point.get(self._place(*beside.members[place]), {})
            if (called, peer) in made and not beside.members[place][0].halted:
                yield beside

    def _since_common(
        self, member: Member, other: Member, *, ahead: bool = False
    ) -> tuple[Sequence[Call], Sequence[Call]] | None:
        """The calls of two processes since the newest collective both have called; ``None`` where there is none that is kept.

        ``ahead``: only on a communicator on which the other has called more.
        """
        for group, _ in self.job.held_by(member):
            if other.index not in group.ranks:
                continue
            called, by_other = self._called(group, member), self._called(group, other)
            if called is None or by_other is None or (ahead and by_other <= called):
                continue
            newest = min(called, by_other)
            mine, theirs = self._after(group, member, called - newest), self._after(group, other, by_other - newest)
            if mine is not None and theirs is not None:
                return mine, theirs
        return None

    def _called(self, group: Group, member: Member) -> int | None:
        """How many collectives a process has called on a communicator, by the number its ranks have in common."""
        if group.id not in self._alignments:
            self._alignments[group.id] = align(self.ledger, *rows_of(group, self.ledger, self.totals))
        rank = group.ranks[member.index]
        row = self.ledger.rows.get(self._place(member, group.members[rank][1]))
        return self._alignments[group.id].sequence(rank, int(self.ledger.called[row])) if row is not None else None

    def _after(self, group: Group, member: Member, newer: int) -> Sequence[Call] | None:
        """The calls of a process after the collective that has so many newer ones; ``None`` where that is not kept."""
        order = self.orders.find(member.info.host, member.info.pid) if self.orders is not None else None
        address, calls = group.members[group.ranks[member.index]][1].address, order.calls if order is not None else []
        collectives = [at for at, call in enumerate(calls) if call.comm == address and call.ways == [None]]
        return calls[collectives[-1 - newer] + 1 :] if newer < len(collectives) else None


def _number(calls: Sequence[Call], own: Communicator, way: tuple[bool, int]) -> int:
    return sum(call.ways.count(way) for call in calls if call.comm == own.address)
