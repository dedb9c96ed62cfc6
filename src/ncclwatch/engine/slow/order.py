"""In which order a process called what, and so which of its unfinished operations its GPU is at.

An operation that is queued is not one that has begun. A sender that may write and has written nothing has not begun; anything
written or consumed says it has. A receive alone shows nothing, but the order of calls says which operation comes first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.connections import CONNECTION_SLOTS
from ncclwatch.engine.edges import Wait
from ncclwatch.engine.job import Job, Member
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.state import Communicator, Direction, OpPhase, PendingOperation, ProxyOperation

T = TypeVar("T")

ALL_CALLS = 400_000
"""Bound: calls that are kept of all processes together."""
FEWEST_CALLS, MOST_CALLS = 96, 2048
"""Bound: calls that are kept of one: a habit shows where there are two iterations and more."""
UNMADE_RECORDS = 512
"""Bound: records a process that wait to be made into calls: of a job that goes on hardly anybody asks."""

Way = tuple[bool, int] | None
"""Of a send or receive: whether it sends, and the peer; ``None`` for a collective."""
Place = tuple[int, Way]
"""Address of the communicator in its process, and the way."""

OPERATIONS = np.array([f.value for f in Function if Function.ALL_REDUCE <= f <= Function.WAIT_SIGNAL], np.uint16)
MARKS = np.array([Function.GROUP_START.value, Function.GROUP_END.value], np.uint16)
_ORDERED = np.concatenate([OPERATIONS, MARKS])
POINT_TO_POINT = np.array([Function.SEND.value, Function.RECV.value], np.uint16)
_RECORD = np.dtype([(name, EVENT_DTYPE[name]) for name in ("time_ns", "comm", "count", "peer", "function", "datatype")])


@dataclass(slots=True)
class _Call:
    time_ns: int
    comm: int
    ways: list[Way]
    what: tuple[int, int, int] = (0, 0, 0)
    """Function, elements and type of a collective; zeros of sends and receives."""


@dataclass(slots=True)
class Room:
    """How many calls may be kept of each process."""

    calls: int = MOST_CALLS


@dataclass(slots=True)
class CallOrder:
    """The newest operations of one process; sends and receives of one group call are one operation."""

    _made: deque[_Call] = field(default_factory=deque)
    _room: Room = field(default_factory=Room)
    _unmade: list[NDArray[Any]] = field(default_factory=list)
    _waiting: int = 0
    _depth: int = 0
    """Groups that are open after the last call that was made."""
    _joinable: int | None = None
    """The communicator of that call, if it is a send or receive of a group that is still open."""

    _memo: dict[str, tuple[tuple[int, int], Any]] = field(default_factory=dict)

    def remember(self, name: str, make: Callable[[], T]) -> T:
        """What was worked out of the calls under a name, made anew only when there are newer calls."""
        state = len(self.calls), self.calls[-1].time_ns if self.calls else 0
        known = self._memo.get(name)
        if known is None or known[0] != state:
            known = self._memo[name] = state, make()
        made: T = known[1]
        return made

    @property
    def calls(self) -> deque[_Call]:
        """The newest calls, oldest first."""
        if self._unmade:
            self._make()
        return self._made

    def add(self, records: NDArray[Any]) -> None:
        """Take records of operations and of group starts and ends (``_RECORD``) in the order of their times."""
        self._unmade.append(records)
        self._waiting += len(records)
        if self._waiting > UNMADE_RECORDS:
            self._make()

    def _make(self) -> None:
        records = np.concatenate(self._unmade)
        self._unmade, self._waiting = [], 0
        function = records["function"]
        starts = function == Function.GROUP_START
        total = self._depth + np.cumsum(starts.astype(np.int64) - (function == Function.GROUP_END))
        # An end without a start (it was lost) leaves the depth at 0.
        depth = total - np.minimum(np.minimum.accumulate(total), 0)
        group = np.cumsum(starts & (depth == 1))
        self._depth = int(depth[-1])
        at = np.flatnonzero(~np.isin(function, MARKS))
        if not len(at):
            self._joinable = self._joinable if self._depth and group[-1] == 0 else None
            return
        kept, groups = records[at], group[at]
        paired = np.isin(kept["function"], POINT_TO_POINT)
        grouped = paired & (depth[at] > 0)
        joins = np.zeros(len(at), np.bool_)
        joins[1:] = grouped[1:] & grouped[:-1] & (groups[1:] == groups[:-1]) & (kept["comm"][1:] == kept["comm"][:-1])
        joins[0] = bool(self._made) and grouped[0] and groups[0] == 0 and int(kept["comm"][0]) == self._joinable
        open_still = bool(grouped[-1]) and self._depth > 0 and groups[-1] == group[-1]
        self._joinable = int(kept["comm"][-1]) if open_still else None
        number = np.cumsum(~joins)
        newest = number > number[-1] - self._room.calls
        kept, paired, joins = kept[newest], paired[newest], joins[newest]
        for (time, comm, count, peer, called, datatype), is_paired, joined in zip(
            kept.tolist(), paired.tolist(), joins.tolist(), strict=True
        ):
            way: Way = (called == Function.SEND, peer) if is_paired else None
            if joined:
                self._made[-1].ways.append(way)
            else:
                self._made.append(_Call(time, comm, [way], (0, 0, 0) if is_paired else (called, count, datatype)))
        while len(self._made) > self._room.calls:
            self._made.popleft()

    def locate(self, unfinished: Mapping[Place, int], until_ns: int) -> dict[Place, list[int]] | None:
        """Where in the order unfinished operations (their number by place) stand: positions, smallest first; ``None`` when calls
        that are needed are not kept.

        Operations of one communicator in one way end in the order of their calls, so the unfinished ones are the newest.
        """
        wanted = dict(unfinished)
        missing = sum(wanted.values())
        found: dict[Place, list[int]] = defaultdict(list)
        for back, call in enumerate(reversed(self.calls)):
            if not missing:
                break
            if call.time_ns > until_ns:
                continue
            for way in call.ways:
                place = (call.comm, way)
                if wanted.get(place, 0) > 0:
                    wanted[place] -= 1
                    missing -= 1
                    found[place].insert(0, -back)
        return None if missing else dict(found)


class CallOrders:
    """The order of calls of every process, by (host the records come from, pid)."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, int], CallOrder] = {}
        self._room = Room()

    def find(self, host: str, pid: int) -> CallOrder | None:
        """The order of a process's last calls; records without a source belong to the only host there is."""
        return self.of.get((host, pid)) or self.of.get(("", pid))

    def lose(self, source: str) -> None:
        """Records of a node were lost: what is open can no longer be told from its calls."""
        self.of = {key: order for key, order in self.of.items() if key[0] != source}

    def add_calls(self, events: NDArray[Any], source: str = "") -> None:
        """Take a batch of ``EVENT_DTYPE`` records of one node, in the order of their times."""
        calls, bounds = by_process(events)
        for start, end in pairwise(bounds):
            self.add((source, int(calls["pid"][start])), calls[start:end])

    def add(self, key: tuple[str, int], calls: NDArray[Any]) -> None:
        """Take what ``by_process`` found of one process."""
        order = self.of.get(key)
        if order is None:
            order = self.of[key] = CallOrder(_room=self._room)
            self._room.calls = min(MOST_CALLS, max(FEWEST_CALLS, ALL_CALLS // len(self.of)))
        # A copy: what is kept of one process must not keep the batch.
        records = np.empty(len(calls), _RECORD)
        for name in _RECORD.names or ():
            records[name] = calls[name]
        order.add(records)


def by_process(events: NDArray[Any]) -> tuple[NDArray[Any], list[int]]:
    """The beginnings of operations on known communicators, and of groups and their ends: sorted by process and time, and the
    bounds of each process among them.
    """
    function = events["function"]
    read = (events["flags"] & np.uint16(Flag.COMM_READ)) != 0
    calls = events[(events["kind"] == Kind.ENTER) & np.isin(function, _ORDERED) & (read | np.isin(function, MARKS))]
    calls = calls[np.lexsort((calls["time_ns"], calls["pid"]))]
    pids = calls["pid"]
    return calls, np.flatnonzero(np.r_[True, pids[1:] != pids[:-1], True]).tolist() if len(calls) else []


OrderOf = Callable[[str, int], CallOrder | None]
"""(host, pid) → the order of a process's calls, where the calls plane saw them."""


class Kernels:
    """For every process its unfinished operations, joined to the kernels they belong to, and whether those have begun."""

    def __init__(self, job: Job, order_of: OrderOf | None = None) -> None:
        self._kernel: dict[tuple[int, int], Hashable] = {}
        """(index of the member, address of the operation) → its kernel"""
        self._begun: dict[tuple[int, Hashable], bool] = {}
        """(index, kernel) → whether it has begun, where that is known"""
        self._first: dict[int, Hashable] = {}
        """Index of the member → the kernel that comes first, where the order is known"""
        self._place: dict[int, tuple[int, int]] = {}
        """Index → communicator of that kernel, if it is a collective, and how many calls were made on it since"""
        for member in job.members:
            if member.last.operations or member.last.pending:
                self._read(job, member, order_of(member.info.host, member.info.pid) if order_of is not None else None)

    def waits(self, wait: Wait) -> bool:
        """Whether the kernel of a wait may be under way: one that has not begun does not wait, the rank still computes."""
        if wait.end is None:
            return True
        index = wait.end.member.index
        kernel = self._kernel.get((index, wait.end.operation.address))
        first = self._first.get(index)
        if first is not None and kernel is not None and kernel != first:
            return False
        return self._begun.get((index, kernel), True)

    def current(self, member: Member) -> bool | None:
        """Whether a rank is inside an operation (True), before one (False); ``None`` where neither shows or nothing is open."""
        first = self._first.get(member.index)
        if first is not None:
            return self._begun.get((member.index, first))
        known = [begun for (index, _), begun in self._begun.items() if index == member.index] if self._begun else []
        if True in known:
            return True
        return False if known else None

    def place(self, member: Member) -> tuple[int, int] | None:
        """The operation a rank is in or before: address of its communicator, and how many calls were made on it since.

        (0, −1) where nothing is open: the call it has yet to make. ``None`` where that is not known.
        """
        if not member.last.operations and not member.last.pending:
            return (0, -1)
        return self._place.get(member.index)

    def _read(self, job: Job, member: Member, order: CallOrder | None) -> None:
        index = member.index
        everything: list[ProxyOperation | PendingOperation] = [*member.last.operations, *member.last.pending]
        operations = [(operation, _places(job, member, operation)) for operation in everything]
        positions = _positions(operations, order, member.last.time_ns)
        for number, (operation, _) in enumerate(operations):
            if not isinstance(operation, ProxyOperation):
                continue
            if positions is not None:
                kernel: Hashable = positions[number]
            else:
                way = operation.direction if operation.is_point_to_point else None
                kernel = (operation.comm_address, operation.comm_hash, operation.op_count, way)
            self._kernel[index, operation.address] = kernel
            begun = _has_begun(operation)
            if begun is None and operation.algorithm == "Ring" and _leaves_unread(job, member, operation):
                begun = False
            if begun is not None:
                self._begun[index, kernel] = self._begun.get((index, kernel), False) or begun
        if positions:
            self._first[index] = first = min(positions)
            places = next(found for (_, found), position in zip(operations, positions, strict=True) if position == first)
            # Of one communicator all that was called since is unfinished too.
            since = {o.op_count for o, found in operations if set(found) & set(places)}
            if len(places) == 1 and places[0][1] is None:
                self._place[index] = (places[0][0], len(since) - 1)


def _has_begun(operation: ProxyOperation) -> bool | None:
    """What an operation's own counters say; ``None`` where they say nothing."""
    if operation.phase is not OpPhase.PROGRESS:
        return None
    if operation.direction is Direction.RECV:
        return True if any(sub.done > 0 for sub in operation.subs) else None
    if any(sub.gpu_ready or sub.transmitted for sub in operation.subs):
        return True
    return False if any(sub.gpu_ready is not None and sub.posted > 0 for sub in operation.subs) else None


def _leaves_unread(job: Job, member: Member, operation: ProxyOperation) -> bool:
    """Whether a ring's data has been delivered to a rank which reads none of it, though there is room for what it writes first to
    the next in shared memory: then its kernel has not begun.
    """
    delivered = [sub for sub in operation.subs if sub.transmitted]
    if not delivered or operation.direction is not Direction.RECV or any(sub.done for sub in operation.subs):
        return False
    own = _communicator(job, member, operation)
    if own is None:
        return False
    rings = {ring.channel: (ring.prev, ring.next) for ring in own.rings}
    room = {
        (conn.channel, conn.peer): conn.tail - conn.head < CONNECTION_SLOTS // 2
        for conn in own.host_connections
        if conn.direction is Direction.SEND and conn.connection_index == 0 and conn.head is not None and conn.tail is not None
    }
    for sub in delivered:
        before, after = rings.get(sub.channel, (None, -1))
        if sub.peer == before and room.get((sub.channel, after), False):
            return True
    return False


def _communicator(job: Job, member: Member, operation: ProxyOperation | PendingOperation) -> Communicator | None:
    """The communicator of an operation, if it is known."""
    number = job.find_group(member, operation.comm_address, operation.comm_hash)
    return next((c for c in member.last.communicators if job.group_of[member.index, c.address] == number), None)


def _places(job: Job, member: Member, operation: ProxyOperation | PendingOperation) -> list[Place]:
    """The places in the order of calls that an operation fills; empty where its communicator is not known."""
    own = _communicator(job, member, operation)
    if own is None:
        return []
    if not operation.op_count & 1:
        return [(own.address, None)]
    peers = {sub.peer for sub in (operation.subs if isinstance(operation, ProxyOperation) else (operation,))}
    return [(own.address, (operation.direction is Direction.SEND, peer)) for peer in sorted(peers)]


def _positions(
    operations: list[tuple[ProxyOperation | PendingOperation, list[Place]]], order: CallOrder | None, until_ns: int
) -> list[int] | None:
    """The position of each operation in the order of calls; ``None`` where that cannot be told of all of them."""
    if order is None or not all(places for _, places in operations):
        return None
    counts: dict[Place, set[int]] = defaultdict(set)
    for operation, places in operations:
        for place in places:
            counts[place].add(operation.op_count)
    located = order.locate({place: len(found) for place, found in counts.items()}, until_ns)
    if located is None:
        return None
    at = {place: dict(zip(sorted(counts[place]), positions, strict=True)) for place, positions in located.items()}
    return [min(at[place][operation.op_count] for place in places) for operation, places in operations]
