"""What the two ends of every network transfer say: who needs whom, and who could go on and does not.

All transfers are read at once, in columns; how the counters are read: Mycroft Table 4 (GPU not ready / not transmitted / not
delivered, local or remote), NCCL ``src/transport/net.cc``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ncclwatch.engine.connections import CONNECTION_SLOTS, End, acknowledges, was_before
from ncclwatch.engine.edges import Columns, Nodes, Stall, StallMark, Wait, Why, wait_facts
from ncclwatch.engine.evidence.base import Coverage, Fact, FactKind, Source
from ncclwatch.engine.job import Job
from ncclwatch.engine.nodes import AbsentNode, LinkNode, RankNode
from ncclwatch.engine.transfers import UNKNOWN, Column, Flags, Transfers
from ncclwatch.model.state import Direction, Transport

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "proxies"

SHARED_SLOTS = 16
"""Fact: NCCL_SHARED_STEPS (``src/include/device.h``)."""

WHYS, STALLS = tuple(Why), tuple(Stall)


@dataclass(slots=True)
class _Found:
    """Waits or stalls: rows of the transfers, what they show (index into ``WHYS`` or ``STALLS``), the row of the other end or -1,
    for a wait whom it is for, and whether it is the link that does not do its part.
    """

    rows: Column
    what: Column
    other: Column
    target: Column
    link: Flags

    @classmethod
    def of(
        cls, rows: Column, what: int, other: Column | None = None, target: Column | None = None, *, link: bool = False
    ) -> _Found:
        """Rows that all show the same."""
        nobody = np.full(len(rows), -1, np.int64)
        shown = np.full(len(rows), what, np.int64)
        return cls(
            rows, shown, nobody if other is None else other, nobody if target is None else target, np.full(len(rows), link)
        )

    @classmethod
    def join(cls, parts: Sequence[_Found]) -> _Found:
        """One after the other."""
        names = ("rows", "what", "other", "target", "link")
        rows, what, other, target, link = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return cls(rows, what, other, target, link)

    @classmethod
    def by_row(cls, parts: Sequence[_Found]) -> _Found:
        """In the order of their rows."""
        one = cls.join([_NOTHING, *parts])
        order = np.argsort(one.rows, kind="stable")
        return cls(one.rows[order], one.what[order], one.other[order], one.target[order], one.link[order])


_NOTHING = _Found.of(np.zeros(0, np.int64), 0)


class Proxies(Source):
    """Transfers over the network, as the proxies at both ends hold them."""

    name = NAME
    plane = "state"
    kinds = frozenset({FactKind.WAITS_FOR, FactKind.STANDS})

    def facts(self, case: Case) -> Iterator[Fact]:
        """The waits and stalls of :class:`ProxyReader` one by one; the graph takes its columns. O(transfers)."""
        reader = ProxyReader(case.job, Transfers(case.job), Nodes())
        waits, stalls = reader.waits(), reader.stalls()
        yield from (replace(fact, source=NAME) for fact in wait_facts(map(waits.make, range(len(waits)))))
        yield from (replace(stalls.make(number).fact, source=NAME) for number in range(len(stalls)))

    def coverage(self, case: Case) -> Coverage:
        """Ranks of communicators with connections over the network whose process was sampled."""
        over = [
            group
            for group in case.job.groups.values()
            if any(kind is Transport.NET for _, own in group.members.values() for _, _, _, kind in own.transports)
        ]
        seen, wanted = sum(len(group.members) for group in over), sum(group.nranks for group in over)
        missing = () if seen == wanted else (f"{wanted - seen} of {wanted} ranks with network connections were not sampled",)
        return Coverage(NAME, seen, wanted, missing)


class ProxyReader:
    """Reads the transfers of a job. ``nodes`` numbers whom they wait for."""

    def __init__(self, job: Job, transfers: Transfers, nodes: Nodes) -> None:
        self.job = job
        self.transfers = transfers
        self.nodes = nodes
        self._waits: list[_Found] = []
        self._stalls: list[_Found] = []
        senders, receivers = transfers.unfinished(Direction.SEND), transfers.unfinished(Direction.RECV)
        self._look_at_senders(senders)
        sending = self._take()
        self._look_at_receivers(receivers)
        receiving = self._take()
        queued = self._look_at_queued()
        self.found_waits = _Found.join([sending[0], receiving[0]])
        self.found_stalls = _Found.join([sending[1], receiving[1], queued])

    def _take(self) -> tuple[_Found, _Found]:
        waits, stalls = _Found.by_row(self._waits), _Found.by_row(self._stalls)
        self._waits, self._stalls = [], []
        return waits, stalls

    # --- marking ---------------------------------------------------------------------------------------------------

    def _stall(self, rows: Column, stall: Stall, other: Column | None = None) -> None:
        self._stalls.append(_Found.of(rows, STALLS.index(stall), other))

    def _wait(self, rows: Column, why: Why, other: Column | None = None, *, link: bool = False) -> None:
        """A wait for the peer, or for the link to it; a peer that was not observed is waited for as such."""
        target = self.transfers.peer_index[rows]
        for place in range(len(rows)) if link else np.flatnonzero(target < 0).tolist():
            row = int(rows[place])
            target[place] = self.nodes.number(self._link(row) if link else self._absent(row))
        self._waits.append(_Found.of(rows, WHYS.index(why), other, target, link=link))

    def _link(self, row: int) -> LinkNode:
        key = self.transfers.key(row)
        return LinkNode(key.group, key.source, key.destination)

    def _absent(self, row: int) -> AbsentNode:
        return AbsentNode(self.transfers.group_of(row).id, int(self.transfers.peer[row]))

    def _without(self, rows: Column, steps: Column, other: Column, seen: Flags) -> None:
        """Rows of which no other end is open at a step: a peer that was not observed, or one that has nothing open for them."""
        self._wait(rows[~seen], Why.UNOBSERVED)
        missing = seen & (other < 0)
        rows = rows[missing]
        whys = [self._why_nothing_open(row, step) for row, step in zip(rows.tolist(), steps[missing].tolist(), strict=True)]
        for why in dict.fromkeys(whys):
            chosen = rows[[one is why for one in whys]]
            sends = self.transfers.sends[chosen]
            self._wait(chosen[sends], why)
            if why is Why.LEFT_BEHIND:
                self._not_received(chosen[~sends])
            else:
                self._wait(chosen[~sends], why)

    def _with_other_end(self, direction: Direction, rows: Column, steps: Column) -> tuple[Column, Column, Column]:
        """Rows whose other end is open at a step, that end, and the step; what the others wait for is said."""
        other, seen = self.transfers.covering(direction, rows, steps), self.transfers.peer_index[rows] >= 0
        self._without(rows, steps, other, seen)
        found = seen & (other >= 0)
        return rows[found], other[found], steps[found]

    # --- network, sending side -------------------------------------------------------------------------------------

    def _look_at_senders(self, rows: Column) -> None:
        t = self.transfers
        rows = rows[~self._proxy_holds_back(rows)]
        self._proxy_opens_nothing(rows)
        done, transmitted, produced = t.done[rows], t.transmitted[rows], t.produced[rows]
        under_way = done < transmitted
        self._sent_not_completed(rows[under_way])
        known = ~under_way & (produced != UNKNOWN)
        self._produced_not_sent(rows[known & (produced > transmitted)])
        self._stall(rows[known & (produced <= transmitted)], Stall.GPU_NOT_PRODUCING)
        self._sender_of_unknown_readiness(rows[~under_way & (produced == UNKNOWN) & (transmitted < t.nsteps[rows])])

    def _proxy_holds_back(self, senders: Column) -> Flags:
        """Whether data is ready, the receiver has buffers, requests are free, and the proxy sends nothing: then it does not run.

        Only over sockets: with InfiniBand a send is also refused while the receiver's clear-to-send has not arrived.
        """
        t = self.transfers
        ready = (t.produced[senders] != UNKNOWN) & (t.produced[senders] > t.transmitted[senders])
        ready &= t.transmitted[senders] - t.done[senders] < CONNECTION_SLOTS
        holds = np.zeros(len(senders), np.bool_)
        place = np.flatnonzero(ready)
        place = place[[t.operation_of(row).net_name == "Socket" for row in senders[place].tolist()]]
        rows = senders[place]
        steps = t.base[rows] + t.transmitted[rows]
        other = t.covering(Direction.RECV, rows, steps)
        open_there = (other >= 0) & (t.base[other] + t.posted[other] > steps)
        holds[place[open_there]] = True
        self._stall(rows[open_there], Stall.PROXY_NOT_SENDING, other[open_there])
        return holds

    def _proxy_opens_nothing(self, rows: Column) -> None:
        """Opening a send buffer needs nobody else: a running proxy has always opened as many as the depth allows.

        The depth is shared among the transfers of one operation (``sendProxyProgress`` in ``src/transport/net.cc``).
        """
        t = self.transfers
        depth = np.minimum(CONNECTION_SLOTS, SHARED_SLOTS // np.maximum(1, t.siblings[rows]))
        self._stall(rows[t.posted[rows] < np.minimum(t.nsteps[rows], t.done[rows] + depth)], Stall.PROXY_NOT_OPENING)

    def _sent_not_completed(self, rows: Column) -> None:
        t = self.transfers
        steps = t.base[rows] + t.done[rows]
        other, seen = t.covering(Direction.RECV, rows, steps), t.peer_index[rows] >= 0
        finished = seen & (other < 0)
        missing = zip(rows[finished].tolist(), steps[finished].tolist(), strict=True)
        finished[finished] = [self._has_done(row, step) for row, step in missing]
        self._wait(rows[finished], Why.UNCONFIRMED, link=True)
        self._without(rows[~finished], steps[~finished], other[~finished], seen[~finished])
        found = seen & (other >= 0)
        rows, other, steps = rows[found], other[found], steps[found]
        posted, received = t.base[other] + t.posted[other], t.base[other] + t.received[other]
        no_buffer, arrived = posted <= steps, received > steps
        self._wait(rows[no_buffer], Why.NO_BUFFER, other[no_buffer])
        # The bytes are there and only their acknowledgement is not: the receiver's side has to move.
        arrived &= ~no_buffer
        self._wait(rows[arrived], Why.NOT_TAKEN, other[arrived])
        lost = ~no_buffer & ~arrived
        self._wait(rows[lost], Why.IN_NETWORK, other[lost], link=True)

    def _produced_not_sent(self, rows: Column) -> None:
        t = self.transfers
        steps = t.base[rows] + t.transmitted[rows]
        rows, other, steps = self._with_other_end(Direction.RECV, rows, steps)
        no_buffer = t.base[other] + t.posted[other] <= steps
        self._wait(rows[no_buffer], Why.NO_BUFFER, other[no_buffer])
        self._wait(rows[~no_buffer], Why.NO_CREDIT, other[~no_buffer], link=True)

    def _sender_of_unknown_readiness(self, rows: Column) -> None:
        """Protocols LL and LL128 do not say by a counter what the GPU has produced; the receiver's credit decides."""
        t = self.transfers
        steps = t.base[rows] + t.transmitted[rows]
        other = t.covering(Direction.RECV, rows, steps)
        found = other >= 0
        rows, other, steps = rows[found], other[found], steps[found]
        free = t.base[other] + t.posted[other] > steps
        self._stall(rows[free], Stall.GPU_NOT_PRODUCING, other[free])
        self._wait(rows[~free], Why.NO_BUFFER, other[~free])

    # --- network, receiving side -----------------------------------------------------------------------------------

    def _look_at_receivers(self, rows: Column) -> None:
        t = self.transfers
        kinds = (
            (t.transmitted[rows] > t.done[rows], Stall.GPU_NOT_CONSUMING),
            (t.received[rows] > t.transmitted[rows], Stall.FLUSH),
            (t.posted[rows] <= t.received[rows], Stall.PROXY_NOT_POSTING),
        )
        left = np.full(len(rows), True)
        for shows, stall in kinds:
            self._stall(rows[left & shows], stall)
            left &= ~shows
        self._starving(rows[left])

    def _starving(self, rows: Column) -> None:
        t = self.transfers
        steps = t.base[rows] + t.received[rows]
        rows, other, steps = self._with_other_end(Direction.SEND, rows, steps)
        sent = t.base[other] + t.transmitted[other] > steps
        completed = t.base[other] + t.done[other] > steps
        self._wait(rows[sent & ~completed], Why.IN_NETWORK, other[sent & ~completed], link=True)
        self._not_received(rows[completed], other[completed])
        ready = ~sent & (t.produced[other] != UNKNOWN) & (t.base[other] + t.produced[other] > steps)
        self._wait(rows[ready], Why.NOT_TRANSMITTED, other[ready])
        idle = ~sent & ~ready
        self._wait(rows[idle], Why.GPU_NOT_READY, other[idle])

    def _not_received(self, rows: Column, other: Column | None = None) -> None:
        """What the sender has completed and the receiver has not got: it is under way, or there and its proxy does not look."""
        ends = np.full(len(rows), -1, np.int64) if other is None else other
        there = np.array([self._is_delivered(row) for row in rows.tolist()], np.bool_)
        self._stall(rows[there], Stall.PROXY_NOT_TAKING, ends[there])
        self._wait(rows[~there], Why.IN_NETWORK, ends[~there], link=True)

    def _is_delivered(self, row: int) -> bool:
        t, peer = self.transfers, int(self.transfers.peer_index[row])
        if peer < 0 or not acknowledges(t.operation_of(row)):
            return False
        return was_before(t.group_of(row), self.job.member(peer), self.job.member(int(t.owner[row])))

    # --- no other end ----------------------------------------------------------------------------------------------

    def _why_nothing_open(self, row: int, step: int) -> Why:
        t = self.transfers
        side = Direction.RECV if t.sends[row] else Direction.SEND
        if t.beyond(side, row, step) or self._has_done(row, step):
            return Why.LEFT_BEHIND
        return Why.NOT_BEGUN if t.queued[side][t.connection[row]] else Why.NO_OPERATION

    def _has_done(self, row: int, step: int) -> bool:
        """Whether the other side has finished the transfer with ``step``, of which the proxy's lists show nothing any more.

        Over sockets a send is done once the kernel has taken it: with the link down, its data may never arrive.
        """
        t = self.transfers
        side = Direction.RECV if t.sends[row] else Direction.SEND
        if t.queued[side][t.connection[row]]:
            return False
        rank, channel, point_to_point = int(t.rank[row]), int(t.channel[row]), bool(t.point_to_point[row])
        found = t.group_of(row).members.get(int(t.peer[row]))
        return found is not None and any(
            one.step > step
            for one in found[1].net_steps
            if (one.channel, one.peer, one.direction) == (channel, rank, side) and (one.connection_index > 0) == point_to_point
        )

    def _look_at_queued(self) -> _Found:
        """An operation at the head of its connection that stays unbegun means that the proxy thread does not run."""
        t = self.transfers
        rows = np.flatnonzero(t.ready)
        rows = rows[[t.operation_of(row).queued_behind == 0 for row in rows.tolist()]]
        self._stall(np.r_[rows[t.sends[rows]], rows[~t.sends[rows]]], Stall.PROXY_NOT_BEGUN)
        return self._stalls.pop()

    # --- asking ----------------------------------------------------------------------------------------------------

    def shows(self, stall: Stall) -> Flags:
        """For each stall found whether it is this one."""
        shown: Flags = self.found_stalls.what == STALLS.index(stall)
        return shown

    def waits_because(self, why: Why) -> Flags:
        """For each wait found whether it has this reason."""
        shown: Flags = self.found_waits.what == WHYS.index(why)
        return shown

    # --- objects ---------------------------------------------------------------------------------------------------

    def waits(self) -> Columns[Wait]:
        """The waits as the graph holds them."""
        found = self.found_waits
        return Columns(self.transfers.owner[found.rows], found.target, self._make_wait, self._collectives(found))

    def stalls(self) -> Columns[StallMark]:
        """The stalls as the graph holds them."""
        found = self.found_stalls
        return Columns(self.transfers.owner[found.rows], found.target, self._make_stall, self._collectives(found))

    def _collectives(self, found: _Found) -> set[int]:
        places = self.transfers.group[found.rows[~self.transfers.point_to_point[found.rows]]]
        return {self.transfers.members.groups[place].id for place in np.unique(places).tolist()}

    def _make_wait(self, number: int) -> Wait:
        found = self.found_waits
        end, other = self.transfers.end(int(found.rows[number])), self._other(found, number)
        why, target = WHYS[found.what[number]], self.nodes.node(int(found.target[number]))
        describe = partial(_wait_text, self.job, end, other, why, link=bool(found.link[number]))
        return Wait(RankNode(end.member.index), target, why, end.key, describe, end, other)

    def _make_stall(self, number: int) -> StallMark:
        found = self.found_stalls
        end, other = self.transfers.end(int(found.rows[number])), self._other(found, number)
        stall = STALLS[found.what[number]]
        return StallMark(end.member, stall, end.key, partial(_stall_text, end, other, stall), end)

    def _other(self, found: _Found, number: int) -> End | None:
        row = int(found.other[number])
        return self.transfers.end(row) if row >= 0 else None


# --- words --------------------------------------------------------------------------------------------------------------


def operation_text(end: End) -> str:
    """``AllReduce #13 sending``."""
    one = end.operation
    name = one.collective or ("point-to-point" if one.is_point_to_point else "operation")
    return f"{name} #{one.sequence} {'sending' if one.direction is Direction.SEND else 'receiving'}"


def _wait_text(job: Job, end: End, other: End | None, why: Why, *, link: bool) -> str:
    """Who waits for whom, or which link does not do its part; ``other`` is the far end of the transfer where it is open."""
    key, sends = end.key, end.operation.direction is Direction.SEND
    where = transfer_text(end, other, why)
    if link:
        return f"{job.rank_name(key.group, key.source)} → {job.rank_name(key.group, key.destination)}: {why}: {where}"
    return f"{end.member.label} waits for {job.rank_name(key.group, key.destination if sends else key.source)}, {why}: {where}"


def transfer_text(end: End, other: End | None, why: Why) -> str:
    """Which transfer it is, and how far it has come."""
    numbers = _sender(end, other, why) if end.operation.direction is Direction.SEND else _receiver(end, other, why)
    return f"{operation_text(end)}, channel {end.key.channel}, {numbers}"


def _sender(end: End, other: End | None, why: Why) -> str:
    sub = end.sub
    under_way = sub.done < sub.transmitted
    if under_way:
        text = f"{sub.transmitted - sub.done} steps sent and not completed (completed {sub.done} of {sub.nsteps})"
    elif sub.gpu_ready is not None:
        text = f"produced {sub.gpu_ready}, sent {sub.transmitted} of {sub.nsteps} steps"
    else:
        text = f"sent {sub.transmitted} of {sub.nsteps} steps"
    if why is Why.UNCONFIRMED:
        return f"{text}; the receiver has finished this transfer"
    if other is None:
        return text
    received = f", received {other.sub.received}" if under_way and why in (Why.NO_BUFFER, Why.NOT_TAKEN) else ""
    return f"{text}; receiver posted {other.sub.posted}{received}"


def _receiver(end: End, other: End | None, why: Why) -> str:
    text = f"received {end.sub.received} of {end.sub.nsteps} steps"
    if other is None:
        return f"{text}; the sender has finished this transfer" if why is Why.IN_NETWORK else text
    sub = other.sub
    if why is Why.IN_NETWORK:
        return f"{text}; sender sent {sub.transmitted}, completed {sub.done}"
    if why is Why.NOT_TRANSMITTED:
        return f"{text}; sender produced {sub.gpu_ready}, sent {sub.transmitted}"
    return f"{text}; sender has sent {sub.transmitted}"


def _stall_text(end: End, other: End | None, what: Stall) -> str:
    """What a rank could do and does not do."""
    return f"{end.member.label}: {what}: {operation_text(end)}, channel {end.key.channel}, {_standing(end, other, what)}"


def _standing(end: End, other: End | None, what: Stall) -> str:
    sub = end.sub
    if what is Stall.PROXY_NOT_SENDING:
        there = f"; receiver posted {other.sub.posted}" if other is not None else ""
        return f"produced {sub.gpu_ready}, sent {sub.transmitted}, completed {sub.done} of {sub.nsteps} steps{there}"
    if what is Stall.PROXY_NOT_TAKING:
        there = f"the network has confirmed {other.sub.done} to the sender" if other is not None else "the sender has finished"
        return f"received {sub.received} of {sub.nsteps} steps; {there}"
    if what is Stall.PROXY_NOT_OPENING:
        return f"opened {sub.posted}, completed {sub.done} of {sub.nsteps} steps"
    if what is Stall.GPU_NOT_PRODUCING and other is not None:
        return f"sent {sub.transmitted} of {sub.nsteps} steps, receiver posted {other.sub.posted}"
    if what is Stall.GPU_NOT_PRODUCING:
        return f"produced {sub.gpu_ready} of {sub.nsteps} steps"
    if what is Stall.GPU_NOT_CONSUMING:
        return f"delivered {sub.transmitted}, consumed {sub.done} of {sub.nsteps} steps"
    if what is Stall.FLUSH:
        return f"received {sub.received}, flushed {sub.transmitted} of {sub.nsteps} steps"
    if what is Stall.PROXY_NOT_POSTING:
        return f"posted {sub.posted} of {sub.nsteps} steps, all of them consumed"
    return f"{sub.nsteps} steps queued"
