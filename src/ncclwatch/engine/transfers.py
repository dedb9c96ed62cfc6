"""All unfinished network transfers of a job in columns, those of both ends of a connection under one number.

A job of 100,000 ranks has hundreds of thousands of them, of which a handful is ever told: only that becomes an object (``End``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.connections import ConnectionKey, End
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.model.state import Direction, OpPhase, PendingOperation, ProxyOperation, ProxySub, Transport

Column = NDArray[np.int64]
Flags = NDArray[np.bool_]

UNKNOWN = -(1 << 62)
"""Fact: stands in a column where there is no value."""
LIMIT = 1 << 60
"""Bound: values come out of the memory of other processes: sums and differences of two must still fit."""
WIDEST = 1 << 62
"""Bound: several columns are mixed into one integer below this."""


def column(values: Callable[[], Iterable[int]], count: int) -> Column:
    """``count`` integers; what would not fit is cut off. ``values`` may be asked twice."""
    try:
        return np.fromiter(values(), np.int64, count)
    except OverflowError:
        return np.fromiter((value if value == UNKNOWN else max(-LIMIT, min(LIMIT, value)) for value in values()), np.int64, count)


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
        """For each of ``numbers`` every row that has it: pairs of (place in ``numbers``, row), as many at a time as places have
        that many rows.
        """
        left = np.arange(len(numbers))
        for turn in range(int(self._count[numbers].max(initial=0))):
            left = left[self._count[numbers[left]] > turn]
            yield left, self._rows[self._first[numbers[left]] + turn]


# --- transfers --------------------------------------------------------------------------------------------------------

RANK_SHIFT = 32
"""Fact: ranks are 32 bits wide (``ncclComm.rank``): a group's number and a rank fit into one integer."""

FIELDS = 15
"""Fact: columns that are gathered of each transfer."""
BEGUN, READY = 1, 2
"""Fact: phases that matter (``OpPhase``)."""

_COUNTERS = attrgetter("channel", "peer", "nsteps", "base", "posted", "received", "transmitted", "done")


class Members:
    """Finds the process that is a rank of a communicator, for many at once. Groups are known by their place in ``job.groups``."""

    def __init__(self, job: Job) -> None:
        self.groups = list(job.groups.values())
        self.places = {group.id: place for place, group in enumerate(self.groups)}
        sizes = [len(group.members) for group in self.groups]
        ranks = column(lambda: chain.from_iterable(group.members for group in self.groups), sum(sizes))
        found = (member.index for group in self.groups for member, _ in group.members.values())
        keys = _mixed(np.repeat(np.arange(len(sizes)), sizes), ranks)
        order = np.argsort(keys, kind="stable")
        self._keys, self._indices = keys[order], np.fromiter(found, np.int64, len(keys))[order]

    def find(self, group: Column, rank: Column) -> Column:
        """Indices of the processes; -1 where none was observed."""
        if not len(self._keys):
            return np.full(len(group), -1, np.int64)
        keys = _mixed(group, rank)
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = (self._keys[place] == keys) & (rank >= 0) & (rank < 1 << (RANK_SHIFT - 1))
        return np.where(known, self._indices[place], -1)


def _mixed(group: Column, rank: Column) -> Column:
    mixed: Column = (group << RANK_SHIFT) + (rank & ((1 << RANK_SHIFT) - 1))
    return mixed


class Transfers:
    """One row a transfer, in the order in which the members' proxies hold them.

    ``group`` is the place of the communicator in ``members.groups``; ``rank`` the rank on whose behalf the transfer runs,
    ``owner`` the index of its process; ``peer_index`` that of the peer's, -1 where it was not observed. ``sends`` tells the side,
    ``begun`` whether the proxy works on it: only then do its counters mean anything. Counters are relative to ``base``;
    ``produced`` is ``UNKNOWN`` where the protocol does not show it. ``connection`` is one number for both ends,
    ``collective`` one for operations of the same name.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.members = Members(job)
        self.operations: list[ProxyOperation] = []
        self.subs: list[ProxySub] = []
        self._pending: list[tuple[int, int, PendingOperation]] = []
        values: list[int] = []
        names: dict[str, int] = defaultdict(count().__next__)
        for member in job.members:
            if member.last.operations or member.last.pending:
                self._gather(member, values, names)
        self._fill(column(lambda: values, len(values)).reshape(-1, FIELDS))
        self._join()

    # --- reading ---------------------------------------------------------------------------------------------------

    def _gather(self, member: Member, values: list[int], names: dict[str, int]) -> None:
        """Append ``FIELDS`` values for each transfer of a process: what location of a large job spends most of its time on."""
        owners: dict[int, tuple[int, int]] = {}
        index, operations, subs = member.index, self.operations, self.subs
        net, send, in_progress, ready_phase = Transport.NET, Direction.SEND, OpPhase.PROGRESS, OpPhase.READY
        for operation in member.last.operations:
            if operation.transport is not net:
                continue
            owner = owners.get(operation.comm_address) or self._owner(member, operation, owners)
            if owner is None:
                continue
            place, own = owner
            phase, op_count = operation.phase, operation.op_count
            state = BEGUN if phase is in_progress else READY if phase is ready_phase else 0
            head = (place, own, index, operation.direction is send, op_count, names[operation.collective], state)
            for sub in operation.subs:
                if own == UNKNOWN and sub.rank is None:
                    continue
                values += head
                values += _COUNTERS(sub)
                operations.append(operation)
                subs.append(sub)
        for pending in member.last.pending:
            owner = self._owner(member, pending, owners)
            rank = pending.rank if pending.rank is not None else owner[1] if owner is not None else UNKNOWN
            if owner is not None and rank != UNKNOWN:
                self._pending.append((owner[0], rank, pending))

    def _owner(
        self, member: Member, operation: ProxyOperation | PendingOperation, owners: dict[int, tuple[int, int]]
    ) -> tuple[int, int] | None:
        """(group, rank in it or UNKNOWN) of an operation of a process; ``owners`` keeps those of its communicators by address."""
        number = self.job.find_group(member, operation.comm_address, operation.comm_hash)
        group = self.job.groups.get(number) if number is not None else None
        if group is None:
            return None
        owner = self.members.places[group.id], group.ranks.get(member.index, UNKNOWN)
        if (member.index, operation.comm_address) in self.job.group_of:
            owners[operation.comm_address] = owner
        return owner

    def _fill(self, table: NDArray[np.int64]) -> None:
        """Turn what was gathered into columns."""
        own = [UNKNOWN if sub.rank is None else sub.rank for sub in self.subs]
        produced = [UNKNOWN if sub.gpu_ready is None else sub.gpu_ready for sub in self.subs]
        self.produced = column(lambda: produced, len(produced))
        self.group, rank, holder, sends, self.op_count, self.collective, state = table.T[:7].copy()
        self.channel, self.peer, self.nsteps, self.base = table.T[7:11].copy()
        self.posted, self.received, self.transmitted, self.done = table.T[11:].copy()
        self.rank = column(lambda: own, len(own))
        self.rank = np.where(self.rank == UNKNOWN, rank, self.rank)
        self.sends: Flags = sends != 0
        self.begun: Flags = state == BEGUN
        self.ready: Flags = state == READY
        self.point_to_point: Flags = (self.op_count & 1) != 0
        # With PXN the proxy of one process moves another rank's data: the wait is that rank's, if it is observed.
        found = self.members.find(self.group, self.rank)
        self.owner = np.where(found >= 0, found, holder)
        self.peer_index = self.members.find(self.group, self.peer)

    def _join(self) -> None:
        """Number the connections, and find the rows of each side by them."""
        known = [(g, p.channel, rank, p.peer, p.direction is Direction.SEND, p.op_count) for g, rank, p in self._pending]
        waiting = column(lambda: chain.from_iterable(known), 6 * len(known)).reshape(-1, 6).T
        group, channel, rank, peer = (
            np.r_[own, more] for own, more in zip((self.group, self.channel, self.rank, self.peer), waiting[:4], strict=True)
        )
        sends = np.r_[self.sends, waiting[4] != 0]
        point_to_point = np.r_[self.point_to_point, (waiting[5] & 1) != 0].astype(np.int64)
        source, destination = np.where(sends, rank, peer), np.where(sends, peer, rank)
        everything = numbered((group, channel, source, destination, point_to_point))
        self.connection = everything[: len(self.subs)]
        self.count = int(everything.max(initial=-1)) + 1
        self._receiving: dict[tuple[int, int, int, int], set[int]] | None = None
        self.queued: dict[Direction, Flags] = {}
        """Connections with an operation that its proxy thread has not begun or not yet taken from the pool."""
        self._begun: dict[Direction, Places] = {}
        idle = np.r_[~self.begun, np.ones(len(known), np.bool_)]
        for side, own in ((Direction.SEND, sends), (Direction.RECV, ~sends)):
            self.queued[side] = np.bincount(everything[own & idle], minlength=self.count) > 0
            rows = np.flatnonzero(self.begun & own[: len(self.subs)])
            self._begun[side] = Places(self.connection[rows], rows, self.count)

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

    def has_receive(self, rows: Column) -> Flags:
        """For each of ``rows`` whether its rank also has the operation open as a receiver, on the same channel."""
        places = numbered((self.group, self.channel, self.rank, self.op_count))
        with_receive = np.bincount(places[~self.sends], minlength=len(places)) > 0
        found: Flags = with_receive[places[rows]]
        return found

    def is_receiving(self, group_id: int, channel: int, source: int, rank: int, op_count: int) -> bool:
        """Whether a rank has the receive of a collective from ``source`` open or queued."""
        if self._receiving is None:
            self._receiving = self._index_receives()
        found = self._receiving.get((self.members.places[group_id], channel, source, rank), ())
        return op_count in found or UNKNOWN in found

    def _index_receives(self) -> dict[tuple[int, int, int, int], set[int]]:
        """(group, channel, source, rank) → ``op_count`` of the collectives being received; ``UNKNOWN`` for any that is queued."""
        receives: dict[tuple[int, int, int, int], set[int]] = defaultdict(set)
        rows = np.flatnonzero(~self.sends & ~self.point_to_point)
        columns = (self.group, self.channel, self.peer, self.rank, self.op_count, self.begun)
        for *place, op_count, begun in zip(*(one[rows].tolist() for one in columns), strict=True):
            receives[place[0], place[1], place[2], place[3]] |= {op_count} if begun else {op_count, UNKNOWN}
        for group, rank, pending in self._pending:
            if pending.direction is Direction.RECV and not pending.op_count & 1:
                receives[group, pending.channel, pending.peer, rank].add(UNKNOWN)
        return dict(receives)

    # --- objects ---------------------------------------------------------------------------------------------------

    def key(self, row: int) -> ConnectionKey:
        """The connection of a row."""
        rank, peer = int(self.rank[row]), int(self.peer[row])
        source, destination = (rank, peer) if self.sends[row] else (peer, rank)
        group = self.members.groups[int(self.group[row])]
        return ConnectionKey(group.id, int(self.channel[row]), source, destination, bool(self.point_to_point[row]))

    def end(self, row: int) -> End:
        """A row as an object."""
        return End(self.key(row), self.job.member(int(self.owner[row])), self.operation_of(row), self.subs[row])

    def operation_of(self, row: int) -> ProxyOperation:
        """The operation of a row."""
        return self.operations[row]

    def group_of(self, row: int) -> Group:
        """The communicator of a row."""
        return self.members.groups[int(self.group[row])]
