"""All unfinished network transfers of a job in columns, and what each shows, compared with the other end of its connection.

Base + counter of a proxy operation is the step of the connection and means the same at both ends (``src/transport/net.cc``). A
job of 100,000 ranks has hundreds of thousands of ends: the handful that is told becomes an object (``End``).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter

import numpy as np

from ncclwatch.engine.edges import NOBODY, ConnectionKey, End, Stall, Why
from ncclwatch.model.columns import Column, Flags, Places, column, has_one, matching, numbered
from ncclwatch.model.job import Group, Job, Member
from ncclwatch.model.joined import has_arrived
from ncclwatch.model.rings import CONNECTION_SLOTS
from ncclwatch.model.state import Direction, PendingOperation, ProxyOperation
from ncclwatch.model.steps import BEGUN, COLUMNS, NET, PHASES, PLACE_BITS, READY, UNKNOWN

ROW_BYTES = 8 * len(COLUMNS)
_ROWS, _INDEX, _ADDRESS = map(attrgetter, ("last.operations.steps.rows", "index", "address"))


class Transfers:
    """One row a transfer, in the order in which the members' proxies hold them.

    ``group`` is the place of the communicator in ``groups``; ``rank`` the rank on whose behalf the transfer runs, ``owner`` the
    index of its process, ``peer_index`` that of the peer's (-1: not observed). Only where the proxy has ``begun`` do its
    counters mean anything; they are relative to ``base``. ``produced`` is ``UNKNOWN`` where the protocol does not show it.
    ``connection`` is one number for both ends, ``collective`` one for operations of the same name.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.groups = job, list(job.groups.values())
        self.place_of = {group.id: place for place, group in enumerate(self.groups)}
        self._ranks = self._observed()
        self._fill()
        self._join()

    def _observed(self) -> Column:
        """Of every observed rank place of its communicator, rank, index of its process, and address of the communicator there."""
        members = [group.members for group in self.groups]
        places = np.repeat(np.arange(len(members)), column(lambda: map(len, members)))
        ranks = column(lambda: chain.from_iterable(members))
        holders = column(lambda: (member.index for held in members for member, _ in held.values()))
        addresses = column(lambda: map(_ADDRESS, self.job.views))
        # What is not found is in the last place, -1.
        return np.append((places, ranks, holders, addresses), [[NOBODY], [UNKNOWN], [NOBODY], [UNKNOWN]], axis=1)

    def _fill(self) -> None:
        rows = [*map(_ROWS, self.job.members)]
        table = np.frombuffer(b"".join(rows), np.int64).reshape(-1, len(COLUMNS))
        held = np.fromiter(map(len, rows), np.int64) // ROW_BYTES
        holder = np.repeat(column(lambda: map(_INDEX, self.job.members)), held)
        of_network = table[:, COLUMNS.index("state")] & NET != 0
        if not of_network.all():
            table, holder = table[of_network], holder[of_network]
        own = dict(zip(COLUMNS, table.T.copy(), strict=True))
        group, holder_rank = self._ranks[:2, matching((holder, own["comm_address"]), self._ranks[2:, :-1])]
        for row in np.flatnonzero(group == NOBODY).tolist():
            member = self.job.member(int(holder[row]))
            group[row], holder_rank[row] = self._owner(member, _operation_at(member, int(own["place"][row])))
        if not (known := group != NOBODY).all():
            own, holder = {name: values[known] for name, values in own.items()}, holder[known]
            group, holder_rank = group[known], holder_rank[known]
        self.group, self._holder, self._place = group, holder, own["place"]
        self.op_count, self.collective = own["op_count"], own["name"]
        self.channel, self.peer, self.nsteps, self.base = own["channel"], own["peer"], own["nsteps"], own["base"]
        self.posted, self.received, self.transmitted = own["posted"], own["received"], own["transmitted"]
        self.done, self.produced = own["done"], own["gpu_ready"]
        self.sends, self.point_to_point = own["sends"] != 0, (own["op_count"] & 1) != 0
        # With PXN the proxy of one process moves another rank's data: the wait is that rank's, if it is observed.
        self.rank = np.where(own["rank"] == UNKNOWN, holder_rank, own["rank"])
        found, self.peer_index = self._processes(group, self.rank, self.peer)
        self.owner = np.where(found >= 0, found, holder)
        # Of whose transfers nobody knows, nothing is said.
        phase, of_somebody = own["state"] & PHASES, self.rank != UNKNOWN
        self.begun: Flags = (phase == BEGUN) & of_somebody
        self.ready: Flags = (phase == READY) & of_somebody

    def _owner(self, member: Member, operation: ProxyOperation | PendingOperation) -> tuple[int, int]:
        """Group of an operation, and the process's rank in it."""
        number = self.job.find_group(member, operation.comm_address, operation.comm_hash)
        if number not in self.job.groups:
            return NOBODY, UNKNOWN
        return self.place_of[number], self.job.groups[number].ranks.get(member.index, UNKNOWN)

    def _processes(self, group: Column, *ranks: Column) -> list[Column]:
        """Indices of the processes that are ranks of communicators; -1 where none was observed."""
        found = matching((np.tile(group, len(ranks)), np.concatenate(ranks)), self._ranks[:2, :-1])
        return np.split(self._ranks[2, found], len(ranks))

    def _pending(self) -> Iterator[tuple[int, int, int, int, int, bool]]:
        for member in self.job.members:
            for one in member.last.pending:
                group, rank = self._owner(member, one)
                rank = one.rank if one.rank is not None else rank
                if group != NOBODY and rank != UNKNOWN:
                    yield group, one.channel, rank, one.peer, one.op_count, one.direction is Direction.SEND

    def _join(self) -> None:
        """Number the connections, and find the rows of each side by them; of what is not begun only that it is there."""
        size, waiting = len(self.group), column(lambda: chain.from_iterable(self._pending())).reshape(-1, 6).T
        own = self.group, self.channel, self.rank, self.peer, self.op_count, self.sends
        group, channel, rank, peer, op_count, sends = map(np.concatenate, zip(own, waiting, strict=True))
        sends, point_to_point = sends != 0, op_count & 1
        idle = np.concatenate((~self.begun, np.ones(len(sends) - size, np.bool_)))
        connection = numbered((group, channel, np.where(sends, rank, peer), np.where(sends, peer, rank), point_to_point))
        self.connection, count = connection[:size], int(connection.max(initial=-1)) + 1
        self.queued: dict[Direction, Flags] = {}
        """Connections with an operation that is not begun."""
        self._begun: dict[Direction, Places] = {}
        for side, of_side in ((Direction.SEND, sends), (Direction.RECV, ~sends)):
            self.queued[side] = np.bincount(connection[of_side & idle], minlength=count) > 0
            rows = np.flatnonzero(self.begun & of_side[:size])
            self._begun[side] = Places(self.connection[rows], rows, count)
        ring, operation = numbered((group, channel, rank)), numbered((group, channel, rank, op_count))
        receives = ~sends & (point_to_point == 0)
        self.receiving: Flags = (has_one(ring, receives & idle) | has_one(operation, receives))[:size]
        """Whether the rank has the receive of the same operation open on the channel, or that of any collective queued."""

    def unfinished(self, side: Direction) -> Column:
        """Rows whose proxy has begun and not ended its work."""
        return np.flatnonzero(self.begun & (self.sends == (side is Direction.SEND)) & (self.done < self.nsteps))

    def covering(self, side: Direction, rows: Column, steps: Column) -> Column:
        """For each of ``rows`` the row on ``side`` of its connection that holds an absolute step, -1 where none is open."""
        found = np.full(len(rows), -1, np.int64)
        for place, row in self._begun[side].pairs(self.connection[rows]):
            base = self.base[row]
            holds = (found[place] < 0) & (base <= steps[place]) & (steps[place] < base + self.nsteps[row])
            found[place[holds]] = row[holds]
        return found

    def pairs(self) -> Iterator[tuple[Column, Column]]:
        """Rows of senders and receivers of the same connection, both begun."""
        senders = np.flatnonzero(self.begun & self.sends)
        for place, row in self._begun[Direction.RECV].pairs(self.connection[senders]):
            yield senders[place], row

    def beyond(self, side: Direction, row: int, step: int) -> bool:
        """Whether ``side`` of a row's connection works on a later transfer only: it has left ``step`` behind."""
        others = self._begun[side].rows(int(self.connection[row]))
        return len(others) > 0 and bool((self.base[others] > step).all())

    def is_parents(self, row: int) -> bool:
        """Whether the peer of a row is its rank's parent in a tree."""
        rank, channel = int(self.rank[row]), int(self.channel[row])
        own = self.group_of(row).members.get(rank)
        ring = own[1].ring(channel) if own is not None else None
        return ring is not None and ring.parent == int(self.peer[row])

    def key(self, row: int) -> ConnectionKey:
        """The connection of a row."""
        rank, peer = int(self.rank[row]), int(self.peer[row])
        source, destination = (rank, peer) if self.sends[row] else (peer, rank)
        return ConnectionKey(self.group_of(row).id, int(self.channel[row]), source, destination, bool(self.point_to_point[row]))

    def end(self, row: int) -> End:
        """A row as an object."""
        operation, part = self.operation_of(row), int(self._place[row]) & ((1 << PLACE_BITS) - 1)
        return End(self.key(row), self.job.member(int(self.owner[row])), operation, operation.subs[part])

    def operation_of(self, row: int) -> ProxyOperation:
        """The operation of a row."""
        return _operation_at(self.job.member(int(self._holder[row])), int(self._place[row]))

    def group_of(self, row: int) -> Group:
        """The communicator of a row."""
        return self.groups[int(self.group[row])]


def _operation_at(member: Member, place: int) -> ProxyOperation:
    return member.last.operations[place >> PLACE_BITS]


# --- both ends compared -------------------------------------------------------------------------------------------------

SHOWN: tuple[Why | Stall, ...] = (*Why, *Stall)
"""What an end can show: columns hold places in it."""
PLACE_OF = {one: place for place, one in enumerate(SHOWN)}
NOTHING, MISSING, COMPLETED = -1, -2, -3
"""Fact: places of what shows nothing, and of what has to be looked at more closely: no other end is open, or it is through."""


class Compared:
    """What every unfinished end shows (Mycroft, table 4), senders first: places in :data:`SHOWN`, and far ends' rows."""

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = t = transfers
        # An operation at the head of its connection that stays unbegun means that the proxy thread does not run.
        ready = np.flatnonzero(t.ready)
        ready = ready[[t.operation_of(row).queued_behind == 0 for row in ready.tolist()]]
        queued = ready, np.full(len(ready), PLACE_OF[Stall.PROXY_NOT_BEGUN]), np.full(len(ready), NOBODY)
        parts = self._senders(t.unfinished(Direction.SEND)), self._receivers(t.unfinished(Direction.RECV)), queued
        rows, shows, other = map(np.concatenate, zip(*parts, strict=True))
        shows[self._own_doing(rows, shows)] = NOTHING
        order = np.lexsort((rows, ~t.sends[rows]))
        order = order[shows[order] != NOTHING]
        self.rows, self.shows, self.other = rows[order], shows[order], other[order]

    def showing(self, *what: Why | Stall) -> Flags:
        """For each of them whether it shows one of these."""
        return np.asarray(np.array([one in what for one in SHOWN])[self.shows])

    def ends(self, place: int) -> tuple[End, End | None]:
        """The end that one of the rows is about, and its far end where that is open."""
        other = int(self.other[place])
        return self.transfers.end(int(self.rows[place])), self.transfers.end(other) if other != NOBODY else None

    def _senders(self, rows: Column) -> tuple[Column, Column, Column]:
        t = self.transfers
        base, done, sent, produced = t.base[rows], t.done[rows], t.transmitted[rows], t.produced[rows]
        # Protocols LL and LL128 do not say by a counter what the GPU has produced: the receiver's credit decides.
        known, under_way = produced != UNKNOWN, done < sent
        ready = known & (produced > sent)
        # Over InfiniBand a send is also refused while the receiver's clear-to-send has not arrived.
        may_send = np.flatnonzero(ready & (sent - done < CONNECTION_SLOTS))
        may_send = may_send[[t.operation_of(row).net_name == "Socket" for row in rows[may_send].tolist()]]
        held_back = np.zeros(len(rows), np.bool_)
        taking = t.covering(Direction.RECV, rows, base + sent)
        has_room = (taking >= 0) & (t.base[taking] + t.posted[taking] > base + sent)
        held_back[may_send] = has_room[may_send]
        steps = base + np.where(under_way, done, sent)
        other = np.where(under_way & ~held_back, t.covering(Direction.RECV, rows, steps), taking)
        missing = other < 0
        idle = ~under_way & known & ~ready
        shows = _first(
            (held_back, Stall.PROXY_NOT_SENDING),
            (idle, Stall.GPU_NOT_PRODUCING),
            (~under_way & ~known & (missing | (sent >= t.nsteps[rows])), NOTHING),
            (missing, MISSING),
            (t.base[other] + t.posted[other] <= steps, Why.NO_BUFFER),
            # The bytes are there and only their acknowledgement is not: the receiver's side has to move.
            (under_way & (t.base[other] + t.received[other] > steps), Why.NOT_TAKEN),
            (under_way, Why.IN_NETWORK),
            (ready, Why.NO_CREDIT),
            otherwise=Stall.GPU_NOT_PRODUCING,
        )
        self._look_closer(rows, steps, shows)
        return rows, shows, np.where(idle, NOBODY, other)

    def _receivers(self, rows: Column) -> tuple[Column, Column, Column]:
        t = self.transfers
        base, received, delivered = t.base[rows], t.received[rows], t.transmitted[rows]
        steps = base + received
        not_consuming, in_flush, not_posting = delivered > t.done[rows], received > delivered, t.posted[rows] <= received
        other = t.covering(Direction.SEND, rows, steps)
        other[not_consuming | in_flush | not_posting] = NOBODY
        begins = t.base[other]
        shows = _first(
            (not_consuming, Stall.GPU_NOT_CONSUMING),
            (in_flush, Stall.FLUSH),
            (not_posting, Stall.PROXY_NOT_POSTING),
            (other < 0, MISSING),
            (begins + t.done[other] > steps, COMPLETED),
            (begins + t.transmitted[other] > steps, Why.IN_NETWORK),
            ((t.produced[other] != UNKNOWN) & (begins + t.produced[other] > steps), Why.NOT_TRANSMITTED),
            otherwise=Why.GPU_NOT_READY,
        )
        self._look_closer(rows, steps, shows)
        return rows, shows, other

    def _own_doing(self, rows: Column, shows: Column) -> Flags:
        """Waits in a tree for what the parent has to send down, of ranks that have not sent up their own part of it: a tree adds
        up towards its root before it sends the sum down (``runTreeUpDown`` and ``runTreeSplit``, src/device/all_reduce.h).
        """
        t, found = self.transfers, np.zeros(len(rows), np.bool_)
        waiting, sends = np.flatnonzero(shows == PLACE_OF[Why.GPU_NOT_READY]), np.flatnonzero(t.begun & t.sends)
        # All ranks run an operation by one algorithm.
        numbers = numbered((t.group[rows[waiting]], t.op_count[rows[waiting]]))
        _, first, kind = np.unique(numbers, return_index=True, return_inverse=True)
        in_tree = [t.operation_of(row).algorithm == "Tree" for row in rows[waiting[first]].tolist()]
        waiting = waiting[np.array(in_tree, np.bool_)[kind]]
        if not len(waiting):
            return found
        columns: tuple[Column, ...] = (t.group, t.channel, t.rank, t.peer, t.op_count)
        own = matching([one[rows[waiting]] for one in columns], np.stack([one[sends] for one in columns]))
        for place, send in zip(waiting[own >= 0].tolist(), sends[own[own >= 0]].tolist(), strict=True):
            row, produced = int(rows[place]), int(t.produced[send])
            found[place] = t.is_parents(row) and UNKNOWN < produced <= int(t.received[row])
        return found

    def _look_closer(self, rows: Column, steps: Column, shows: Column) -> None:
        shows[(shows == MISSING) & (self.transfers.peer_index[rows] < 0)] = PLACE_OF[Why.UNOBSERVED]
        for place in np.flatnonzero(shows <= MISSING).tolist():
            row, step = int(rows[place]), int(steps[place])
            shows[place] = PLACE_OF[self._arrives(row) if shows[place] == COMPLETED else self._without(row, step)]

    def _without(self, row: int, step: int) -> Why | Stall:
        """What an end shows whose observed peer has no transfer with ``step`` open."""
        t, sends = self.transfers, bool(self.transfers.sends[row])
        side = Direction.RECV if sends else Direction.SEND
        queued = bool(t.queued[side][t.connection[row]])
        through = not queued and self._has_done(side, row, step)
        if sends and through and t.done[row] < t.transmitted[row]:
            return Why.UNCONFIRMED
        if through or t.beyond(side, row, step):
            return Why.LEFT_BEHIND if sends else self._arrives(row)
        return Why.NOT_BEGUN if queued else Why.NO_OPERATION

    def _arrives(self, row: int) -> Why | Stall:
        """What the sender has completed and the receiver has not got: it is under way, or there and its proxy does not look."""
        t, peer = self.transfers, int(self.transfers.peer_index[row])
        member, operation, group = t.job.member, t.operation_of(row), t.group_of(row)
        there = peer >= 0 and has_arrived(operation, group, member(peer), member(int(t.owner[row])))
        return Stall.PROXY_NOT_TAKING if there else Why.IN_NETWORK

    def _has_done(self, side: Direction, row: int, step: int) -> bool:
        """Whether the other side has finished the transfer with ``step``, of which the proxy's lists show nothing any more.
        (Over sockets a send is done once the kernel has taken it: with the link down, its data may never arrive.)
        """
        t = self.transfers
        _, other = t.group_of(row).members[int(t.peer[row])]
        connection = int(t.channel[row]), int(t.rank[row]), side, bool(t.point_to_point[row])
        return any(
            one.step > step and (one.channel, one.peer, one.direction, one.connection_index > 0) == connection
            for one in other.net_steps
        )


def _first(*cases: tuple[Flags, Why | Stall | int], otherwise: Why | Stall) -> Column:
    """For each row what the first case that holds shows."""
    shown = np.full(len(cases[0][0]), PLACE_OF[otherwise])
    for holds, shows in reversed(cases):
        shown[holds] = shows if isinstance(shows, int) else PLACE_OF[shows]
    return shown
