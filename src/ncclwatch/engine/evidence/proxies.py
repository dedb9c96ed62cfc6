"""What the two ends of every network transfer say: who needs whom, and who could go on and does not.

All transfers are read at once, in columns; how the counters are read: Mycroft Table 4 (GPU not ready / not transmitted / not
delivered, local or remote), NCCL ``src/transport/net.cc``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ncclwatch.engine.connections import CONNECTION_SLOTS, End, acknowledges, was_before
from ncclwatch.engine.edges import NOBODY, PROXY_STALLS, Stall, StallMark, Wait, Why
from ncclwatch.engine.evidence.base import F, Fact, FactColumns, FactKind, Source
from ncclwatch.engine.nodes import AbsentNode, LinkNode, RankNode
from ncclwatch.engine.transfers import UNKNOWN, Column, Flags
from ncclwatch.model.state import Direction, OpPhase, Transport

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "proxies"

HIDDEN = {
    Transport.COLLNET: "CollNet: the switch adds up inside the network; its own counters are not compared between ranks",
    Transport.UNKNOWN: "connections of a transport that was not recognised",
}
WHYS, STALLS = tuple(Why), tuple(Stall)
OF_THE_LINK = frozenset({Why.IN_NETWORK, Why.UNCONFIRMED, Why.NO_CREDIT})
"""Both sides have done their part: it is the link that does not do its own."""
FINISHED_THERE = frozenset({Why.IN_NETWORK, Why.UNCONFIRMED, Stall.PROXY_NOT_TAKING})
"""Where no other end is open, that is because it is through."""
ROW, SHOWS, OTHER, TARGET = range(4)
"""Rows of a table of what was found: the transfer, an index into ``WHYS`` or ``STALLS``, the other end or ``NOBODY``, and for a
wait the number of the node it is for.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferColumns(FactColumns[F]):
    """Waits or stalls of the network's transfers: ``rows`` of these, and what each shows (index into ``WHYS`` or ``STALLS``)."""

    rows: Column
    shows: Column

    def showing(self, *what: Why | Stall) -> Flags:
        """For each of them whether it shows one of these."""
        shown: Flags = np.isin(self.shows, [(WHYS if isinstance(one, Why) else STALLS).index(one) for one in what])
        return shown


class Proxies(Source):
    """Transfers over the network, as the proxies at both ends hold them."""

    name = NAME
    plane = "state"
    kinds = frozenset({FactKind.WAITS_FOR, FactKind.STANDS})

    def facts(self, case: Case) -> Iterator[FactColumns[Fact]]:
        """Waits and stalls, in columns. O(transfers)."""
        reader = _Reader(case)
        yield reader.columns(FactKind.WAITS_FOR, reader.waits, reader.make_wait)
        yield reader.columns(FactKind.STANDS, reader.stalls, reader.make_stall)

    def coverage(self, case: Case) -> Iterator[str]:
        """Operations that no proxy shows, or that it shows alone."""
        yield from (text for transport, text in HIDDEN.items() if transport in case.job.joined.transports)
        if case.job.joined.captured:
            yield "operations captured in CUDA graphs: their replays make no calls; only proxy steps are seen"
        if case.job.joined.by_device:
            yield "operations that kernels start themselves (device API, GIN): neither calls nor proxy steps show them"


class _Reader:
    """Compares both ends of the transfers of a job."""

    def __init__(self, case: Case) -> None:
        self.job, self.transfers, self.nodes = case.job, case.transfers, case.facts.nodes
        self._waits: list[Column] = []
        self._stalls: list[Column] = []
        self._look_at_senders(self.transfers.unfinished(Direction.SEND))
        self._look_at_receivers(self.transfers.unfinished(Direction.RECV))
        self._look_at_queued()
        self.waits, self.stalls = self._in_order(self._waits), self._in_order(self._stalls)
        self._blame_proxies_before_links()

    def _in_order(self, found: list[Column]) -> Column:
        """Senders first, each side by rows."""
        table = np.hstack([np.zeros((4, 0), np.int64), *found])
        return table[:, np.lexsort((table[ROW], ~self.transfers.sends[table[ROW]]))]

    # --- marking ---------------------------------------------------------------------------------------------------

    def _stall(self, rows: Column, stall: Stall, other: Column | None = None) -> None:
        self._stalls.append(_table(rows, STALLS.index(stall), other))

    def _wait(self, rows: Column, why: Why, other: Column | None = None) -> None:
        """A wait for the peer, or for the link to it; a peer that was not observed is waited for as such."""
        found = _table(rows, WHYS.index(why), other, self.transfers.peer_index[rows])
        link = why in OF_THE_LINK
        for place in range(len(rows)) if link else np.flatnonzero(found[TARGET] < 0).tolist():
            row = int(rows[place])
            found[TARGET, place] = self.nodes.number(self._link(row) if link else self._absent(row))
        self._waits.append(found)

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

    def _sent_not_completed(self, rows: Column) -> None:
        t = self.transfers
        steps = t.base[rows] + t.done[rows]
        other, seen = t.covering(Direction.RECV, rows, steps), t.peer_index[rows] >= 0
        finished = seen & (other < 0)
        missing = zip(rows[finished].tolist(), steps[finished].tolist(), strict=True)
        finished[finished] = [self._has_done(row, step) for row, step in missing]
        self._wait(rows[finished], Why.UNCONFIRMED)
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
        self._wait(rows[lost], Why.IN_NETWORK, other[lost])

    def _produced_not_sent(self, rows: Column) -> None:
        t = self.transfers
        steps = t.base[rows] + t.transmitted[rows]
        rows, other, steps = self._with_other_end(Direction.RECV, rows, steps)
        no_buffer = t.base[other] + t.posted[other] <= steps
        self._wait(rows[no_buffer], Why.NO_BUFFER, other[no_buffer])
        self._wait(rows[~no_buffer], Why.NO_CREDIT, other[~no_buffer])

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
        self._wait(rows[sent & ~completed], Why.IN_NETWORK, other[sent & ~completed])
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
        self._wait(rows[~there], Why.IN_NETWORK, ends[~there])

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

    def _look_at_queued(self) -> None:
        """An operation at the head of its connection that stays unbegun means that the proxy thread does not run."""
        rows = np.flatnonzero(self.transfers.ready)
        self._stall(rows[[self.transfers.operation_of(row).queued_behind == 0 for row in rows.tolist()]], Stall.PROXY_NOT_BEGUN)

    def _blame_proxies_before_links(self) -> None:
        """Data that does not arrive says nothing about a link when the proxy at one of its ends stands still anyway.

        A request counts as handed to the network before the proxy has pushed all of it into the socket.
        """
        stalled = self.stalls[ROW, np.isin(self.stalls[SHOWS], [STALLS.index(stall) for stall in PROXY_STALLS])]
        idle = {member.index for member in self.job.members if member.halted} | set(self.transfers.owner[stalled].tolist())
        of_links = np.isin(self.waits[SHOWS], [WHYS.index(why) for why in OF_THE_LINK])
        for place in np.flatnonzero(of_links).tolist() if idle else ():
            key = self.transfers.key(int(self.waits[ROW, place]))
            holders = [self.job.groups[key.group].holder(rank) for rank in (key.source, key.destination)]
            blamed = next((one.index for one in holders if one is not None and one.index in idle), None)
            if blamed is not None:
                self.waits[TARGET, place] = blamed

    # --- facts -----------------------------------------------------------------------------------------------------

    def columns(self, kind: FactKind, found: Column, make: Callable[[int], F]) -> TransferColumns[F]:
        """What was found, as facts."""
        t, rows = self.transfers, found[ROW]
        places = np.unique(t.group[rows[~t.point_to_point[rows]]]).tolist()
        return TransferColumns(
            kind, t.owner[rows], found[TARGET], np.zeros(len(rows), np.bool_), make,
            frozenset(t.members.groups[place].id for place in places), rows=rows, shows=found[SHOWS],
        )  # fmt: skip

    def make_wait(self, number: int) -> Wait:
        """One of the waits."""
        row, shows, other, target = self.waits[:, number].tolist()
        end, why = self.transfers.end(row), WHYS[shows]
        far = self.transfers.end(other) if other != NOBODY else None
        return Wait(
            subject=RankNode(end.member.index), source=NAME, object=self.nodes.node(target), why=why, key=end.key, end=end,
            other=far, describe=partial(self._wait_text, end, far, why),
        )  # fmt: skip

    def make_stall(self, number: int) -> StallMark:
        """One of the stalls."""
        row, shows, other, _ = self.stalls[:, number].tolist()
        end, stall = self.transfers.end(row), STALLS[shows]
        far = self.transfers.end(other) if other != NOBODY else None
        text = partial(stall_text, end, far, stall)
        return StallMark(
            subject=RankNode(end.member.index), source=NAME, member=end.member, stall=stall, key=end.key, end=end, describe=text
        )

    def _wait_text(self, end: End, other: End | None, why: Why) -> str:
        """Who waits for whom, or which link does not do its part; ``other`` is the far end of the transfer where it is open."""
        key = end.key
        source, destination = (self.job.rank_name(key.group, rank) for rank in (key.source, key.destination))
        if why in OF_THE_LINK:
            return f"{source} → {destination}: {why}: {transfer_text(end, other, why)}"
        peer = destination if end.operation.direction is Direction.SEND else source
        return f"{end.member.label} waits for {peer}, {why}: {transfer_text(end, other, why)}"


def _table(rows: Column, shows: int, other: Column | None = None, target: Column | None = None) -> Column:
    """Rows that all show the same."""
    nobody = np.full(len(rows), NOBODY, np.int64)
    return np.stack(
        [rows, np.full(len(rows), shows, np.int64), nobody if other is None else other, nobody if target is None else target]
    )


# --- words --------------------------------------------------------------------------------------------------------------


def operation_text(end: End) -> str:
    """``AllReduce #13 sending``."""
    one = end.operation
    name = one.collective or ("point-to-point" if one.is_point_to_point else "operation")
    return f"{name} #{one.sequence} {'sending' if one.direction is Direction.SEND else 'receiving'}"


def transfer_text(end: End, other: End | None, shows: Why | Stall) -> str:
    """Which transfer it is, and how far both ends have come."""
    if end.operation.phase is not OpPhase.PROGRESS:
        return f"{operation_text(end)}, channel {end.key.channel}, {end.sub.nsteps} steps queued"
    far = "; its other end has finished this transfer" if shows in FINISHED_THERE else ""
    far = f"; {_side(other)} {_counters(other)}" if other is not None else far
    return f"{operation_text(end)}, channel {end.key.channel}, {_counters(end)} of {end.sub.nsteps} steps{far}"


def _side(end: End) -> str:
    return "sender" if end.operation.direction is Direction.SEND else "receiver"


def _counters(end: End) -> str:
    sub = end.sub
    if end.operation.direction is Direction.SEND:
        produced = f"produced {sub.gpu_ready}, " if sub.gpu_ready is not None else ""
        return f"{produced}opened {sub.posted}, sent {sub.transmitted}, completed {sub.done}"
    return f"posted {sub.posted}, received {sub.received}, delivered {sub.transmitted}, consumed {sub.done}"


def stall_text(end: End, other: End | None, what: Stall) -> str:
    """What a rank could do and does not do."""
    return f"{end.member.label}: {what}: {transfer_text(end, other, what)}"
