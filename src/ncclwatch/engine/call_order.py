"""What the order of each process's calls tells: who broke its own pattern of calls, and who waits for which message.

What calls were made before a call says what used to follow; the longest such context counts, since an iteration repeats small
patterns inside (layers, micro-batches). Numbers of messages are compared since the making of the communicator, or the newest
collective that both have called; else a rank is compared with peers in its place of other pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import islice

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ncclwatch.collect.alignment import Entries, line_up
from ncclwatch.collect.call_order import Call, CallOrder, PerProcess
from ncclwatch.collect.ledger import ALIKE, UNLIKE, Ledger
from ncclwatch.engine.edges import told
from ncclwatch.engine.evidence.base import Fact
from ncclwatch.model.events import Function
from ncclwatch.model.job import Group, Job, Member
from ncclwatch.model.joined import unseen_peers
from ncclwatch.model.state import Communicator, Transport

RECENT = 256
"""Unit: calls back from the newest. From: a host runs ahead of its GPU by fewer. Of six simulated jobs with a call left out or
swapped 48 miss one, and 1,024 name other ranks in three, or none.
"""
ASKED = 32
"""Bound: ranks beside the suspects that are asked whether patterns can be told at all, and processes of a job that all are."""

Orders = PerProcess[CallOrder]
"""The order of the last calls of each process of which they were recorded."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """A call that is not what used to follow: ``due`` was (address of its communicator), ``called`` was made ``ago`` calls back.

    ``left_out``: it and those after it are what used to come after the one that was due: neither made in its place nor swapped.
    """

    due: int
    called: int
    ago: int
    left_out: bool


def find_deviation(order: CallOrder) -> Deviation | None:
    """The last call that broke the pattern of a process. O(square of the kept calls), vectorised."""
    tokens = [(call.comm, call.what, tuple(sorted(call.ways, key=repr))) for call in order.calls]
    numbers: dict[object, int] = {}
    kinds = np.array([numbers.setdefault(token, len(numbers)) for token in tokens], np.int16)
    if (broken := _last_break(kinds, max(ALIKE + 2, len(tokens) // 2, len(tokens) - RECENT))) is None:
        return None
    at, earlier = broken
    return Deviation(tokens[earlier][0], tokens[at][0], len(tokens) - 1 - at, _is_left_out(kinds.tolist(), earlier, at))


def _last_break(kinds: NDArray[np.int16], begin: int) -> tuple[int, int] | None:
    """The last place from ``begin`` on where another call was made than every time before after the same calls, and the last such
    time: of the older half too little was seen before.

    The longest context counts that was met twice at least, and holds more than one kind of call: in a run of equal calls nothing
    tells how many are still to come. What follows a broken pattern was never seen before, so it breaks none.
    """
    if begin >= len(kinds):
        return None
    places: NDArray[np.int16] = np.arange(len(kinds), dtype=np.int16)
    columns = np.arange(len(kinds) - begin)
    # Row n: the call n + 1 before each place, -1 where there is none. Then how many calls before both are alike.
    former = sliding_window_view(np.r_[np.full_like(kinds, -1), kinds], len(kinds))[-2:0:-1]
    unlike = former != kinds
    older = begin - 1 - unlike[:, begin - 1 :: -1].argmax(axis=1).astype(np.int16)
    newest = np.maximum.accumulate(np.where(unlike[:, begin - 1 : -1], places[begin - 1 : -1], older[:, None]), axis=1)
    alike, former = places[begin - 1 : -1] - newest, former[:, begin:]
    others = alike.copy()
    others[alike.argmax(axis=0), columns] = 0
    met = alike >= (context := others.max(axis=0))
    back, equal = met.argmax(axis=0), alike[0] + 1
    due = former[back, columns]
    told = (context >= ALIKE) & (equal < context) & ~(met & (former != due)).any(axis=0) & (due != kinds[begin:])
    at = int(np.flatnonzero(told)[-1]) if told.any() else -1
    return (begin + at, begin + at - 1 - int(back[at])) if at >= 0 else None


def _is_left_out(kinds: Sequence[int], earlier: int, position: int) -> bool:
    """Whether what follows ``position`` goes on as after the call that was due, for longer than after a swap of two."""

    def agreeing(begin: int, as_from: int) -> int:
        pairs = zip(islice(kinds, begin, None), islice(kinds, as_from, position), strict=False)
        return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(kinds) - begin, position - as_from))

    left_out, due = agreeing(position, earlier + 1), kinds[earlier]
    swapped = kinds[position + 1 : position + 2] == [due] and kinds[position] == kinds[earlier + 1]
    return left_out > 0 and (not swapped or left_out > 2 + agreeing(position + 2, earlier + 2))


def find_deviations(job: Job, members: set[int], orders: Orders | None, *, proper: bool = True) -> dict[int, Deviation]:
    """Those who broke their pattern: none if others did too, or, with ``proper``, if all of the members did."""
    found = _deviations(job, sorted(members), orders)
    if not found or (proper and len(found) == len(members)):
        return {}
    others = [member.index for member in job.members if member.index not in members]
    asked = others[:: max(1, len(others) // ASKED)]
    return found if len(_deviations(job, asked, orders)) <= UNLIKE * len(asked) else {}


def find_alone_in_deviating(job: Job, orders: Orders | None) -> dict[int, Deviation]:
    """The few processes of a job that broke their pattern, where nobody else did; empty for large jobs (:data:`ASKED`)."""
    alive = [member.index for member in job.members if not member.gone]
    found = _deviations(job, alive, orders) if 1 < len(alive) <= ASKED else {}
    return found if len(found) <= max(1, UNLIKE * len(alive)) else {}


def _deviations(job: Job, indices: Sequence[int], orders: Orders | None) -> dict[int, Deviation]:
    if orders is None:
        return {}
    kept = ((index, orders.find(job.member(index).info.host, job.member(index).info.pid)) for index in indices)
    told = ((index, one.remember("deviation", partial(find_deviation, one))) for index, one in kept if one is not None)
    return {index: deviation for index, deviation in told if deviation is not None}


def deviation_facts(job: Job, deviations: Mapping[int, Deviation]) -> list[Fact]:
    """Broken patterns as evidence."""

    def name(index: int, address: int) -> str:
        own = next((own for own in job.member(index).last.communicators if own.address == address), None)
        return f"communicator {own.hash:016x}" if own is not None else "another communicator"

    def text(index: int, broken: Deviation) -> str:
        since, then = f", {broken.ago} calls ago" if broken.ago else "", ", which it has left out" if broken.left_out else ""
        called, due = f"an operation on {name(index, broken.called)}", f"another on {name(index, broken.due)}"
        return f"{job.member(index).label} called {called}{since}, where its calls always had {due}{then}"

    return [told(text(index, broken)) for index, broken in deviations.items()]


PEERS = 4
"""Bound: ranks in the same place of other pipelines that a process is compared with: the first may not be kept."""
MATCHING = {Function.SEND: Function.RECV, Function.RECV: Function.SEND}


class Owed(IntEnum):
    """Whether a peer has yet to match a call, which the calls may not tell; of several the highest counts."""

    NO = 0
    UNKNOWN = 1
    YES = 2


@dataclass(slots=True)
class Messages:
    """Who waits for whom in sends and receives that only the calls show."""

    job: Job
    ledger: Ledger
    orders: Orders | None
    _in_line: dict[int, Entries] = field(default_factory=dict)

    def of(self, member: Member) -> Iterator[tuple[Group, int, Owed]]:
        """What a process has called of sends and receives over connections nobody can look into: (communicator, peer, answer)."""
        for group, own in self.job.held_by(member):
            made = self.ledger.messages(member.info, own)
            seen = {peer for _, peer, _, transport in own.transports if transport in (Transport.NET, Transport.SHM)}
            for peer in sorted({peer for _, peer in made} - (seen - unseen_peers(own))):
                yield group, peer, max(self._owed(group, member, peer, Function(called)) for called, to in made if to == peer)

    def owed(self, member: Member) -> Iterator[tuple[Group, int]]:
        """Peers that have not matched what a process has called."""
        return ((group, peer) for group, peer, owed in self.of(member) if owed is Owed.YES)

    def doubtful(self, member: Member) -> Iterator[tuple[Group, int]]:
        """Peers a process may wait for; none of them where it is known to wait for one."""
        if not any(self.owed(member)):
            yield from ((group, peer) for group, peer, owed in self.of(member) if owed is not Owed.NO)

    def _owed(self, group: Group, member: Member, peer: int, called: Function) -> Owed:
        if peer not in group.members:
            return Owed.UNKNOWN
        other, view = group.members[peer]
        own = group.members[group.ranks[member.index]][1]
        if self.ledger.is_from_birth(member.info, own) and self.ledger.is_from_birth(other.info, view):
            made = self.ledger.messages(member.info, own).get((called, peer), 0)
            matched = self.ledger.messages(other.info, view).get((MATCHING[called], own.rank), 0)
            return Owed.YES if made > matched else Owed.NO
        makes, matches = (called is Function.SEND, peer), (called is Function.RECV, own.rank)
        since = self._since_common(member, other)
        if since is not None:
            return Owed.YES if _number(since[0], own, makes) > _number(since[1], view, matches) else Owed.NO
        # Messages that hold up one of two ranks with the same place in a pipeline would hold up both: who has no more to wait for
        # than one that has called what this one has not does not wait for them.
        for beside in islice(self._beside(group, member, called, peer), PEERS):
            (its_own, its_view), (its_peer, peers_view) = beside.members[own.rank], beside.members[peer]
            ours, theirs = self._since_common(member, its_own, ahead=True), self._since_common(other, its_peer)
            if ours is not None and theirs is not None:
                more_made = _number(ours[0], own, makes) - _number(ours[1], its_view, makes)
                if more_made <= _number(theirs[0], view, matches) - _number(theirs[1], peers_view, matches):
                    return Owed.NO
        return Owed.UNKNOWN

    def _beside(self, group: Group, member: Member, called: Function, peer: int) -> Iterator[Group]:
        """Communicators like ``group`` in which another process has this one's place, and calls the same."""
        for beside in self.job.groups.values():
            if beside.nranks == group.nranks and not beside.missing and member.index not in beside.ranks:
                its_own, its_view = beside.members[group.ranks[member.index]]
                if (called, peer) in self.ledger.messages(its_own.info, its_view) and not its_own.halted:
                    yield beside

    def _since_common(
        self, member: Member, other: Member, *, ahead: bool = False
    ) -> tuple[Sequence[Call], Sequence[Call]] | None:
        """Calls of two since the newest collective both called; ``ahead``: only where the other has called more."""
        for group, _ in self.job.held_by(member):
            if other.index not in group.ranks:
                continue
            if group.id not in self._in_line:
                self._in_line[group.id] = line_up(self.ledger, [self.ledger.rows_of(group)])
            # How many collectives each has called, by the number the ranks have in common.
            called, by_other = (self._in_line[group.id].end(group.ranks[one.index]) for one in (member, other))
            if called is None or by_other is None or (ahead and by_other <= called):
                continue
            newest = min(called, by_other)
            mine, theirs = self._after(group, member, called - newest), self._after(group, other, by_other - newest)
            if mine is not None and theirs is not None:
                return mine, theirs
        return None

    def _after(self, group: Group, member: Member, newer: int) -> Sequence[Call] | None:
        """The calls of a process after the collective that has so many newer ones; ``None`` where that is not kept."""
        order = self.orders.find(member.info.host, member.info.pid) if self.orders is not None else None
        address, calls = group.members[group.ranks[member.index]][1].address, order.calls if order is not None else []
        collectives = [at for at, call in enumerate(calls) if call.comm == address and call.ways == [None]]
        return calls[collectives[-1 - newer] + 1 :] if newer < len(collectives) else None


def _number(calls: Sequence[Call], own: Communicator, way: tuple[bool, int]) -> int:
    return sum(call.ways.count(way) for call in calls if call.comm == own.address)
