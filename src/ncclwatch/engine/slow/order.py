"""In which order a process called what, and so which of its unfinished operations its GPU is at.

A sender that may write and has written nothing has not begun its operation; anything written or consumed says it has. A receive
alone shows nothing, but the order of calls says which comes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.ledger import POINT_TO_POINT
from ncclwatch.engine.connections import CHUNK_STEPS, CONNECTION_SLOTS, RING_ENDS_RECEIVING, steps_unread
from ncclwatch.engine.edges import Wait, Why, waits_for
from ncclwatch.engine.job import Job, Member
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.groups import group_depth
from ncclwatch.model.state import Communicator, Direction, OpPhase, PendingOperation, ProxyOperation

T = TypeVar("T")

MOST_CALLS = 2048
"""Bound: calls that are kept of a process, where there are few processes: a habit shows in two iterations and more."""
UNMADE_RECORDS = 512
"""Bound: records a process that wait to be made into calls: of a job that goes on hardly anybody asks."""

Way = tuple[bool, int] | None
"""Of a send or receive: whether it sends, and the peer; ``None`` for a collective."""
Place = tuple[int, Way]
"""Address of the communicator in its process, and the way."""

MARKS = (Function.GROUP_START, Function.GROUP_END)
_ORDERED = (*range(Function.ALL_REDUCE, Function.WAIT_SIGNAL + 1), *MARKS)
_FIELDS = ("time_ns", "comm", "count", "peer", "function", "datatype")
RECORD = np.dtype([*((name, EVENT_DTYPE[name]) for name in _FIELDS), ("number", "<i8")])
"""A record of a call; ``number`` counts operations: sends and receives of one group call have the same."""


class Call(NamedTuple):
    """One operation as it was called: all its ways, or function, elements and type of a collective (else zeros)."""

    time_ns: int
    comm: int
    ways: list[Way]
    what: tuple[int, int, int] = (0, 0, 0)


@dataclass(slots=True)
class CallOrder:
    """The newest operations of one process; sends and receives of one group call are one operation, known once the group ends."""

    room: int = MOST_CALLS
    """So many calls are kept."""
    _made: NDArray[Any] = field(default_factory=lambda: np.zeros(0, RECORD))
    _unmade: NDArray[Any] = field(default_factory=lambda: np.zeros(0, RECORD))
    _memo: dict[str, Any] = field(default_factory=dict)

    def add(self, calls: NDArray[Any]) -> None:
        """Take records of operations and of group starts and ends (fields as of ``RECORD``) in the order of their times."""
        records = np.zeros(len(calls), RECORD)
        for name in _FIELDS:
            records[name] = calls[name]
        self._unmade = np.concatenate([self._unmade, records])
        if len(self._unmade) > UNMADE_RECORDS:
            self._make()

    def remember(self, name: str, make: Callable[[], T]) -> T:
        """What was worked out of the calls under a name, made anew only when there are newer calls."""
        self._make()
        if name not in self._memo:
            self._memo[name] = make()
        made: T = self._memo[name]
        return made

    @property
    def calls(self) -> list[Call]:
        """The newest calls, oldest first."""
        return self.remember("calls", self._calls)

    def _calls(self) -> list[Call]:
        made: list[Call] = []
        last = None
        for time, comm, count, peer, function, datatype, number in self._made.tolist():
            paired = function in POINT_TO_POINT
            way = (function == Function.SEND, peer) if paired else None
            if number == last:
                made[-1].ways.append(way)
            else:
                made.append(Call(time, comm, [way], (0, 0, 0) if paired else (function, count, datatype)))
            last = number
        return made

    def _make(self) -> None:
        """Make operations of what waits, up to a group that is still open: what is called in it is launched when it ends."""
        records, function = self._unmade, self._unmade["function"]
        starts = function == Function.GROUP_START
        depth = group_depth(starts.astype(np.int64) - (function == Function.GROUP_END), 0)
        closed = len(records) if len(records) > MOST_CALLS else int(np.append(np.flatnonzero(depth == 0), -1).max()) + 1
        self._unmade = records[closed:]
        at = np.flatnonzero(~np.isin(function[:closed], MARKS))
        if not len(at):
            return
        calls, group = records[at], np.cumsum(starts & (depth == 1))[at]
        grouped = np.isin(calls["function"], POINT_TO_POINT) & (depth[at] > 0)
        same = (group[1:] == group[:-1]) & (calls["comm"][1:] == calls["comm"][:-1])
        joins = np.r_[False, grouped[1:] & grouped[:-1] & same]
        calls["number"] = np.cumsum(~joins) + (self._made["number"][-1] if len(self._made) else 0)
        kept = np.concatenate([self._made, calls])
        self._made = kept[kept["number"] > kept["number"][-1] - self.room]
        self._memo.clear()

    @property
    def exchanged(self) -> set[tuple[int, int]]:
        """Communicators and peers with whom whatever is sent goes in one operation with what is received."""
        return self.remember("exchanged", lambda: _exchanged(self.calls))

    def locate(self, unfinished: Mapping[Place, Collection[int]], until_ns: int) -> dict[tuple[Place, int], int] | None:
        """Where in the order unfinished operations stand, by place and number: 0 is the newest call; ``None`` when calls that are
        needed are not kept. Operations at one place end in the order of their calls: the unfinished ones are the newest.
        """
        self._make()
        rows = self._made[self._made["time_ns"] <= until_ns]
        positions = rows["number"] - (self._made["number"][-1] if len(rows) else 0)
        paired = np.isin(rows["function"], POINT_TO_POINT)
        found: dict[tuple[Place, int], int] = {}
        for (comm, way), numbers in unfinished.items():
            own = (rows["comm"] == comm) & (paired == (way is not None))
            if way is not None:
                own &= ((rows["function"] == Function.SEND) == way[0]) & (rows["peer"] == way[1])
            newest = positions[own][-len(numbers) :].tolist()
            if len(newest) < len(numbers):
                return None
            found |= {((comm, way), number): position for number, position in zip(sorted(numbers), newest, strict=True)}
        return found


def _exchanged(calls: Sequence[Call]) -> set[tuple[int, int]]:
    every = [(call, way) for call in calls for way in call.ways if way is not None]
    alone = {(call.comm, way[1]) for call, way in every if (not way[0], way[1]) not in call.ways}
    return {(call.comm, way[1]) for call, way in every} - alone


class PerProcess(dict[tuple[str, int], T]):
    """Something of every process, by (host the records come from, pid); without a host records belong to the only one."""

    def find(self, host: str, pid: int) -> T | None:
        """Of a process."""
        return self.get((host, pid)) or self.get(("", pid))


def by_process(events: NDArray[Any]) -> tuple[NDArray[Any], list[int]]:
    """Begins of operations and groups (and their ends), sorted by process and time, and each process's bounds."""
    function = events["function"]
    read = (events["flags"] & np.uint16(Flag.COMM_READ)) != 0
    at = np.flatnonzero((events["kind"] == Kind.ENTER) & np.isin(function, _ORDERED) & (read | np.isin(function, MARKS)))
    calls = events[at[np.lexsort((events["time_ns"][at], events["pid"][at]))]]
    return calls, bounds_of(calls["pid"])


def bounds_of(numbers: NDArray[Any]) -> list[int]:
    """Where runs of equal numbers begin, and the end of all."""
    return np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1], True]).tolist() if len(numbers) else []


OrderOf = Callable[[str, int], CallOrder | None]
"""(host, pid) → the order of a process's calls, where the calls plane saw them."""
_Operation = ProxyOperation | PendingOperation


@dataclass(slots=True)
class Kernels:
    """A rank's unfinished operations (by address) with their kernels: which have begun, and which is first, if known."""

    of: dict[int, Hashable] = field(default_factory=dict)
    begun: dict[Hashable, bool] = field(default_factory=dict)
    first: Hashable | None = None
    place: tuple[int, int] | None = None
    """The collective the rank is in or before: address of its communicator, and how many calls were made on it since; (0, −1)
    where nothing is open: the call it has yet to make.
    """

    def waits(self, address: int) -> bool:
        """Whether the kernel of an operation may be under way: one that has not begun does not wait, the rank still computes."""
        kernel = self.of.get(address)
        comes_later = self.first is not None and kernel is not None and kernel != self.first
        return not comes_later and self.begun.get(kernel, True)

    @property
    def current(self) -> bool | None:
        """Whether the rank is inside an operation (True), before one (False); ``None`` where neither shows or nothing is open."""
        if self.first is not None:
            return self.begun.get(self.first)
        return any(self.begun.values()) if self.begun else None


def awaited_inside(job: Job, order_of: OrderOf) -> Iterator[Wait]:
    """Waits for ranks not in an exchange yet: their peer has written, unread, and finds nothing to read. O(connections)."""
    for group in job.groups.values():
        for member, own in group.members.values():
            unread: dict[tuple[int, Direction], int] = {}
            for conn in own.host_connections:
                if conn.connection_index and (left := steps_unread(conn)) is not None:
                    unread[conn.peer, conn.direction] = unread.get((conn.peer, conn.direction), 0) + left
            order = order_of(member.info.host, member.info.pid) if unread else None
            if order is None:
                continue
            for peer in [peer for (peer, way), left in unread.items() if way is Direction.SEND and left]:
                nothing_to_read = unread.get((peer, Direction.RECV)) == 0
                if nothing_to_read and peer in group.members and (own.address, peer) in order.exchanged:
                    detail = "what was written into shared memory is not read"
                    yield waits_for(job, group, member, peer, Why.EMPTY, detail, point_to_point=True)


def read_kernels(job: Job, member: Member, order: CallOrder | None) -> Kernels:
    """The kernels of a rank, with the order of its calls where that is known. O(operations)."""
    operations: list[_Operation] = [*member.last.operations, *member.last.pending]
    if not operations:
        return Kernels(place=(0, -1))
    found, at_address = Kernels(), {own.address: own for own in member.last.communicators}
    known = [at_address.get(one.comm_address) or _by_hash(job, member, one) for one in operations]
    located, places, unfinished = None, list[list[Place]](), defaultdict[Place, set[int]](set)
    if order is not None:
        places = [_places(communicator, one) for communicator, one in zip(known, operations, strict=True)]
        for operation, filled in zip(operations, places, strict=True):
            for place in filled:
                unfinished[place].add(operation.op_count)
        located = order.locate(unfinished, member.last.time_ns) if all(places) else None
    kernels: list[Hashable] = [
        (o.comm_address, o.comm_hash, o.op_count, o.direction if o.op_count & 1 else None) for o in operations
    ]
    if located is not None:
        positions = [min(located[at, one.op_count] for at in filled) for one, filled in zip(operations, places, strict=True)]
        kernels, found.first = [*positions], min(positions)
        filled = places[positions.index(found.first)]
        if len(filled) == 1 and filled[0][1] is None:
            # Of one communicator all that was called since is unfinished too.
            found.place = filled[0][0], len(unfinished[filled[0]]) - 1
    for communicator, operation, kernel in zip(known, operations, kernels, strict=True):
        if isinstance(operation, ProxyOperation):
            found.of[operation.address] = kernel
            begun = _has_begun(communicator, operation)
            if begun is not None:
                found.begun[kernel] = found.begun.get(kernel, False) or begun
    return found


def _by_hash(job: Job, member: Member, operation: _Operation) -> Communicator | None:
    number = job.find_group(member, operation.comm_address, operation.comm_hash)
    return next((own for own in member.last.communicators if job.number(member.index, own) == number), None)


def _has_begun(own: Communicator | None, operation: ProxyOperation) -> bool | None:
    """What an operation's own counters say; ``None`` where they say nothing."""
    if operation.phase is not OpPhase.PROGRESS:
        return None
    receives = operation.direction is Direction.RECV
    for sub in operation.subs:
        if sub.done > 0 if receives else sub.gpu_ready or sub.transmitted:
            return True
    if receives:
        return _has_written(own, operation) if own is not None and operation.algorithm == "Ring" else None
    return False if any(sub.gpu_ready is not None and sub.posted > 0 for sub in operation.subs) else None


def _has_written(own: Communicator, operation: ProxyOperation) -> bool | None:
    """Whether a rank that receives a ring's data from the network has written to the next in shared memory, which its kernel does
    first, or could have and has not; ``None`` where that does not show.

    A connection of the ring that stands at the step where the operation begins was not written to. Where other algorithms used
    it too its count means nothing: then who reads nothing of what was delivered tells.
    """
    after = {ring.channel: ring.next for ring in own.rings}
    sinks = {(c.channel, c.peer): c for c in own.host_connections if c.direction is Direction.SEND and c.connection_index == 0}
    counts = operation.protocol == "Simple" and operation.collective in RING_ENDS_RECEIVING
    known: list[bool] = []
    for sub in operation.subs:
        sink = sinks.get((sub.channel, after.get(sub.channel, -1)))
        if sink is None or sink.tail is None or (unread := steps_unread(sink)) is None or unread > CONNECTION_SLOTS:
            continue
        written = sink.tail - sub.base
        if counts and 0 < written <= sub.nsteps:
            known.append(True)
        elif unread < CHUNK_STEPS and (sub.transmitted or (counts and written == 0)):
            known.append(False)
    return any(known) if known else None


def _places(own: Communicator | None, operation: _Operation) -> list[Place]:
    """The places in the order of calls that an operation fills; empty where its communicator is not known."""
    if own is None:
        return []
    if not operation.op_count & 1:
        return [(own.address, None)]
    peers = {sub.peer for sub in (operation.subs if isinstance(operation, ProxyOperation) else (operation,))}
    return [(own.address, (operation.direction is Direction.SEND, peer)) for peer in sorted(peers)]
