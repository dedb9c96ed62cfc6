"""All unfinished network transfers of a job in columns, and what each shows, compared with the other end of its connection.

Counters of a proxy operation are relative to its base; base + counter is the step of the connection and means the same at both
ends (NCCL ``src/transport/net.cc``: both ends round the same running step). Nothing else lines two ranks up without proof. A job
of 100,000 ranks has hundreds of thousands of ends, of which a handful is ever told: only that becomes an object (``End``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.connections import CONNECTION_SLOTS, acknowledges, was_before
from ncclwatch.engine.edges import NOBODY, ConnectionKey, End, Stall, Why
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.model.state import Direction, PendingOperation, ProxyOperation
from ncclwatch.model.steps import BEGUN, COLUMNS, NET, PHASES, PLACE_BITS, READY, UNKNOWN, bounded

Column = NDArray[np.int64]
Flags = NDArray[np.bool_]

WIDEST = 1 << 62
"""Bound: several columns are mixed into one integer below this."""


def column(values: Callable[[], Iterable[int]], count: int) -> Column:
    """``count`` integers; what would not fit is cut off. ``values`` may be asked twice."""
    try:
        return np.fromiter(values(), np.int64, count)
    except OverflowError:
        return np.fromiter(map(bounded, values()), np.int64, count)


def numbered(columns: Sequence[Column]) -> Column:
    """One number a row from 0 on, the same for rows in which all columns are equal. O(n log n)."""
    mixed = np.zeros(len(columns[0]), np.int64)
    if not len(mixed):
        return mixed
    size = 1
    for values in columns:
        own, low, span = values, int(values.min()), int(values.max()) - int(values.min()) + 1
        if size * span > WIDEST:
            mixed, own = _dense(mixed), _dense(values)
            size, low, span = int(mixed.max()) + 1, 0, int(own.max()) + 1
        mixed = mixed * span + (own - low)
        size *= span
    return _dense(mixed)


def _dense(values: Column) -> Column:
    dense: Column = np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return dense


def _has(numbers: Column, chosen: Flags) -> Flags:
    """For each row whether one with its number is among those chosen."""
    found: Flags = (np.bincount(numbers[chosen], minlength=int(numbers.max(initial=-1)) + 1) > 0)[numbers]
    return found


class Places:
    """Finds rows by a number from 0 on, of which several may be equal."""

    def __init__(self, numbers: Column, rows: Column, size: int) -> None:
        """``numbers``: one for each of ``rows``; all below ``size``."""
        order = np.argsort(numbers, kind="stable")
        self._rows = rows[order]
        self._count = np.bincount(numbers, minlength=size)
        self._first = np.cumsum(self._count) - self._count

    def rows(self, number: int) -> list[int]:
        """The rows with a number, in their order."""
        first = int(self._first[number])
        found: list[int] = self._rows[first : first + int(self._count[number])].tolist()
        return found

    def pairs(self, numbers: Column) -> Iterable[tuple[Column, Column]]:
        """For each of ``numbers`` every row that has it: pairs of (place in ``numbers``, row), one row of each at a time."""
        left = np.arange(len(numbers))
        for turn in range(int(self._count[numbers].max(initial=0))):
            left = left[self._count[numbers[left]] > turn]
            yield left, self._rows[self._first[numbers[left]] + turn]


# --- transfers --------------------------------------------------------------------------------------------------------

RANK_SHIFT = 32
"""Fact: ranks are 32 bits wide (``ncclComm.rank``): a group's number and a rank fit into one integer."""
MOST_RANKS = 1 << 31
"""Fact: they are signed."""

ROW_BYTES, STATE, PLACE = 8 * len(COLUMNS), COLUMNS.index("state"), COLUMNS.index("place")
_ROWS = attrgetter("last.operations.steps.rows")


def _operation_at(member: Member, place: int) -> ProxyOperation:
    return member.last.operations[place >> PLACE_BITS]


class Members:
    """Finds the process that is a rank of a communicator, for many at once. Groups are known by their place in ``job.groups``."""

    def __init__(self, job: Job) -> None:
        self.groups = list(job.groups.values())
        self.places = {group.id: place for place, group in enumerate(self.groups)}
        sizes = [len(group.members) for group in self.groups]
        ranks = column(lambda: chain.from_iterable(group.members for group in self.groups), sum(sizes))
        found = (member.index for group in self.groups for member, _ in group.members.values())
        keys = _mixed(np.repeat(np.arange(len(sizes)), sizes), ranks)
        indices = np.fromiter(found, np.int64, len(keys))
        order = np.argsort(keys, kind="stable")
        self._keys, self._indices = keys[order], indices[order]
        addresses = column(lambda: (own.address for group in self.groups for _, own in group.members.values()), len(keys))
        self._addresses, numbers = np.unique(addresses, return_inverse=True)
        held = _mixed(numbers.reshape(-1), indices)
        order = np.argsort(held, kind="stable")
        self._held, self._of_held = held[order], keys[order]

    def find(self, group: Column, rank: Column) -> Column:
        """Indices of the processes; -1 where none was observed."""
        if not len(self._keys):
            return np.full(len(group), -1, np.int64)
        keys = _mixed(group, rank)
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = (self._keys[place] == keys) & (rank >= 0) & (rank < MOST_RANKS)
        return np.where(known, self._indices[place], -1)

    def owning(self, holder: Column, address: Column) -> tuple[Column, Column]:
        """The group that lies at an address in a process, and the process's rank in it; ``NOBODY`` and ``UNKNOWN`` where none
        does.
        """
        if not len(self._held) or not len(holder):
            return np.full(len(holder), NOBODY), np.full(len(holder), UNKNOWN)
        number = np.minimum(np.searchsorted(self._addresses, address), len(self._addresses) - 1)
        keys = _mixed(number, holder)
        place = np.minimum(np.searchsorted(self._held, keys), len(self._held) - 1)
        known = (self._held[place] == keys) & (self._addresses[number] == address)
        found = self._of_held[place]
        return np.where(known, found >> RANK_SHIFT, NOBODY), np.where(known, found & ((1 << RANK_SHIFT) - 1), UNKNOWN)


def _mixed(group: Column, rank: Column) -> Column:
    mixed: Column = (group << RANK_SHIFT) + (rank & ((1 << RANK_SHIFT) - 1))
    return mixed


class Transfers:
    """One row a transfer, in the order in which the members' proxies hold them.

    ``group`` is the place of the communicator in ``members.groups``; ``rank`` the rank on whose behalf the transfer runs,
    ``owner`` the index of its process, ``peer_index`` that of the peer's (-1: not observed). Only where the proxy has ``begun``
    do its counters mean anything; they are relative to ``base``. ``produced`` is ``UNKNOWN`` where the protocol does not show
    it. ``connection`` is one number for both ends, ``collective`` one for operations of the same name.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.members = Members(job)
        self._pending: list[tuple[int, int, PendingOperation]] = []
        self._fill(self._gather())
        self._join()

    # --- reading ---------------------------------------------------------------------------------------------------

    def _gather(self) -> tuple[Column, ...]:
        members = self.job.members
        rows = [*map(_ROWS, members)]
        held = np.fromiter(map(len, rows), np.int64, len(rows)) // ROW_BYTES
        table = np.frombuffer(b"".join(rows), np.int64).reshape(-1, len(COLUMNS))
        holder = np.repeat(column(lambda: (member.index for member in members), len(members)), held)
        group, rank = self.members.owning(holder, table[:, 0])
        for row in np.flatnonzero((group < 0) & (table[:, STATE] & NET != 0)).tolist():
            owner = self._owner(member := self.job.member(int(holder[row])), _operation_at(member, int(table[row, PLACE])))
            group[row], rank[row] = owner or (NOBODY, UNKNOWN)
        for member in members:
            for pending in member.last.pending:
                owner = self._owner(member, pending)
                own = pending.rank if pending.rank is not None else owner[1] if owner is not None else UNKNOWN
                if owner is not None and own != UNKNOWN:
                    self._pending.append((owner[0], own, pending))
        chosen = (group >= 0) & (table[:, STATE] & NET != 0)
        if not chosen.all():
            table, holder, group, rank = table[chosen], holder[chosen], group[chosen], rank[chosen]
        return holder, group, rank, *table.T.copy()[2:]

    def _owner(self, member: Member, operation: ProxyOperation | PendingOperation) -> tuple[int, int] | None:
        """(group, rank in it or UNKNOWN) of an operation of a process."""
        number = self.job.find_group(member, operation.comm_address, operation.comm_hash)
        group = self.job.groups.get(number) if number is not None else None
        return (self.members.places[group.id], group.ranks.get(member.index, UNKNOWN)) if group is not None else None

    def _fill(self, gathered: tuple[Column, ...]) -> None:
        (
            holder, self.group, holder_rank, self.op_count, sends, state, self.collective, self._place,
            self.channel, self.peer, self.nsteps, self.base, self.posted, self.received, self.transmitted, self.done,
            self.produced, rank, _,
        ) = gathered  # fmt: skip
        self._holder = holder
        self.rank = np.where(rank == UNKNOWN, holder_rank, rank)
        self.sends: Flags = sends != 0
        # Of whose transfers nobody knows, nothing is said.
        phase = state & PHASES
        self.begun: Flags = (phase == BEGUN) & (self.rank != UNKNOWN)
        self.ready: Flags = (phase == READY) & (self.rank != UNKNOWN)
        self.point_to_point: Flags = (self.op_count & 1) != 0
        # With PXN the proxy of one process moves another rank's data: the wait is that rank's, if it is observed.
        found = self.members.find(self.group, self.rank)
        self.owner = np.where(found >= 0, found, holder)
        self.peer_index = self.members.find(self.group, self.peer)

    def _join(self) -> None:
        """Number the connections, and find the rows of each side by them; of what is not begun only that it is there."""
        size = len(self.group)
        known = [(g, p.channel, rank, p.peer, p.op_count, p.direction is Direction.SEND) for g, rank, p in self._pending]
        waiting = column(lambda: chain.from_iterable(known), 6 * len(known)).reshape(-1, 6).T
        own = self.group, self.channel, self.rank, self.peer, self.op_count, self.sends
        group, channel, rank, peer, op_count, sends = map(np.concatenate, zip(own, waiting, strict=True))
        sends, point_to_point, idle = sends != 0, op_count & 1, np.concatenate((~self.begun, np.ones(len(known), np.bool_)))
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
        self.receiving: Flags = _has(ring, receives & idle)[:size] | _has(operation, receives)[:size]
        """Whether the rank has the receive of the same operation open on the channel, or that of any collective queued."""

    # --- asking ----------------------------------------------------------------------------------------------------

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
        return bool(others) and all(int(self.base[other]) > step for other in others)

    @cached_property
    def compared(self) -> Compared:
        """What each unfinished end shows. O(transfers), once."""
        return Compared(self)

    # --- objects ---------------------------------------------------------------------------------------------------

    def key(self, row: int) -> ConnectionKey:
        """The connection of a row."""
        rank, peer = int(self.rank[row]), int(self.peer[row])
        source, destination = (rank, peer) if self.sends[row] else (peer, rank)
        group = self.members.groups[int(self.group[row])]
        return ConnectionKey(group.id, int(self.channel[row]), source, destination, bool(self.point_to_point[row]))

    def end(self, row: int) -> End:
        """A row as an object."""
        operation, part = self.operation_of(row), int(self._place[row]) & ((1 << PLACE_BITS) - 1)
        return End(self.key(row), self.job.member(int(self.owner[row])), operation, operation.subs[part])

    def operation_of(self, row: int) -> ProxyOperation:
        """The operation of a row."""
        return _operation_at(self.job.member(int(self._holder[row])), int(self._place[row]))

    def group_of(self, row: int) -> Group:
        """The communicator of a row."""
        return self.members.groups[int(self.group[row])]


# --- both ends compared -------------------------------------------------------------------------------------------------

SHOWN: tuple[Why | Stall, ...] = (*Why, *Stall)
"""What an end can show: columns hold places in it."""
PLACE_OF = {one: place for place, one in enumerate(SHOWN)}
NOTHING, MISSING, COMPLETED = -1, -2, -3
"""Fact: places of what shows nothing, and of what has to be looked at more closely: no other end is open, or it is through."""


class Compared:
    """What every unfinished end shows (Mycroft, table 4; NCCL ``src/transport/net.cc``): senders first, each side by rows.

    ``rows`` of the transfers, ``shows``: place in :data:`SHOWN`, ``other``: the row of the far end, or ``NOBODY``.
    """

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = t = transfers
        # An operation at the head of its connection that stays unbegun means that the proxy thread does not run.
        ready = np.flatnonzero(t.ready)
        ready = ready[[t.operation_of(row).queued_behind == 0 for row in ready.tolist()]]
        queued = ready, np.full(len(ready), PLACE_OF[Stall.PROXY_NOT_BEGUN]), np.full(len(ready), NOBODY)
        parts = self._senders(t.unfinished(Direction.SEND)), self._receivers(t.unfinished(Direction.RECV)), queued
        rows, shows, other = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.lexsort((rows, ~t.sends[rows]))
        order = order[shows[order] != NOTHING]
        self.rows, self.shows, self.other = rows[order], shows[order], other[order]

    def showing(self, *what: Why | Stall) -> Flags:
        """For each of them whether it shows one of these."""
        wanted = np.zeros(len(SHOWN), np.bool_)
        wanted[[PLACE_OF[one] for one in what]] = True
        found: Flags = wanted[self.shows]
        return found

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
            (np.ones_like(ready), Stall.GPU_NOT_PRODUCING),
        )
        self._look_closer(rows, steps, shows)
        return rows, shows, np.where(idle, NOBODY, other)

    def _receivers(self, rows: Column) -> tuple[Column, Column, Column]:
        t = self.transfers
        base, received, delivered = t.base[rows], t.received[rows], t.transmitted[rows]
        steps = base + received
        stands = (delivered > t.done[rows]) | (received > delivered) | (t.posted[rows] <= received)
        other = np.full(len(rows), NOBODY)
        other[~stands] = t.covering(Direction.SEND, rows[~stands], steps[~stands])
        begins = t.base[other]
        shows = _first(
            (delivered > t.done[rows], Stall.GPU_NOT_CONSUMING),
            (received > delivered, Stall.FLUSH),
            (t.posted[rows] <= received, Stall.PROXY_NOT_POSTING),
            (other < 0, MISSING),
            (begins + t.done[other] > steps, COMPLETED),
            (begins + t.transmitted[other] > steps, Why.IN_NETWORK),
            ((t.produced[other] != UNKNOWN) & (begins + t.produced[other] > steps), Why.NOT_TRANSMITTED),
            (np.ones_like(stands), Why.GPU_NOT_READY),
        )
        self._look_closer(rows, steps, shows)
        return rows, shows, other

    def _look_closer(self, rows: Column, steps: Column, shows: Column) -> None:
        shows[(shows == MISSING) & (self.transfers.peer_index[rows] < 0)] = PLACE_OF[Why.UNOBSERVED]
        for place in np.flatnonzero(shows <= MISSING).tolist():
            row, step = int(rows[place]), int(steps[place])
            shows[place] = PLACE_OF[self._arrives(row) if shows[place] == COMPLETED else self._without(row, step)]

    def _without(self, row: int, step: int) -> Why | Stall:
        t = self.transfers
        side = Direction.RECV if t.sends[row] else Direction.SEND
        through = self._has_done(row, step)
        if t.sends[row] and through and t.done[row] < t.transmitted[row]:
            return Why.UNCONFIRMED
        if through or t.beyond(side, row, step):
            return Why.LEFT_BEHIND if t.sends[row] else self._arrives(row)
        return Why.NOT_BEGUN if t.queued[side][t.connection[row]] else Why.NO_OPERATION

    def _arrives(self, row: int) -> Why | Stall:
        """What the sender has completed and the receiver has not got: it is under way, or there and its proxy does not look."""
        t, peer = self.transfers, int(self.transfers.peer_index[row])
        there = peer >= 0 and acknowledges(t.operation_of(row))
        there = there and was_before(t.group_of(row), t.job.member(peer), t.job.member(int(t.owner[row])))
        return Stall.PROXY_NOT_TAKING if there else Why.IN_NETWORK

    def _has_done(self, row: int, step: int) -> bool:
        """Whether the other side has finished the transfer with ``step``, of which the proxy's lists show nothing any more.
        (Over sockets a send is done once the kernel has taken it: with the link down, its data may never arrive.)
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


def _first(*cases: tuple[Flags, Why | Stall | int]) -> Column:
    """For each row what the first case that holds shows."""
    found = np.full(len(cases[0][0]), NOTHING, np.int64)
    for holds, shows in reversed(cases):
        found[holds] = shows if isinstance(shows, int) else PLACE_OF[shows]
    return found
