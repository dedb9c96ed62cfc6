"""The calls of one process: operations counted when they are launched, groups, and calls that have not returned.

Between ``ncclGroupStart`` and the outermost ``ncclGroupEnd`` of a thread, operations are only enqueued; NCCL launches them all at
that end (``src/group.cc``). A call's time is host time: it says nothing about when the GPU ran the operation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclwatch.collect.functions import FUNCTIONS, algorithm_bytes, function
from ncclwatch.collect.rates import RateWindow
from ncclwatch.model.events import Flag, Function, Kind
from ncclwatch.probes.functions import BLOCKING, MAKES_COMMUNICATORS

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENDS_COMMUNICATORS = (Function.COMM_FINALIZE, Function.COMM_DESTROY, Function.COMM_ABORT)

# Bounds on what one process can make us hold.
MAX_THREADS = 1024
MAX_COMMUNICATORS = 1024


def creating(events: NDArray[Any]) -> set[int]:
    """Processes that have begun to make a communicator, by records of the calls plane (``EVENT_DTYPE``)."""
    entered = events[(events["kind"] == int(Kind.ENTER)) & (events["flags"] & int(Flag.UNKNOWN_PROCESS) == 0)]
    # A split without a colour makes none for this process.
    none = (entered["function"] == int(Function.COMM_SPLIT)) & (entered["color"] < 0)
    return set(entered["pid"][np.isin(entered["function"], MAKES_COMMUNICATORS) & ~none].tolist())


def communicators_named(events: NDArray[Any]) -> set[tuple[int, int]]:
    """(process, address of a communicator) that records of the calls plane name: what was made, and what was worked with."""
    named = events[(events["comm"] != 0) & (events["flags"] & int(Flag.UNKNOWN_PROCESS) == 0)]
    alive = ~np.isin(named["function"], ENDS_COMMUNICATORS)
    return set(zip(named["pid"][alive].tolist(), named["comm"][alive].tolist(), strict=True))


_OPERATIONS = {int(number): known.name for number, known in FUNCTIONS.items() if known.operation}

FIELDS = ("time_ns", "kind", "function", "tid", "comm_hash", "rank", "nranks", "count", "datatype", "peer")
"""Fields of ``struct nw_event`` that a tracker takes, in the order of a :data:`Row`."""

Row = tuple[int, ...]
"""One record, by :data:`FIELDS`: thousands come a second, of which a few become a :class:`Call`."""

_ENTER, _EXEC, _EXIT = int(Kind.ENTER), int(Kind.EXEC), int(Kind.EXIT)
_GROUP_START, _GROUP_END, _SIMULATE_END = int(Function.GROUP_START), int(Function.GROUP_END), int(Function.GROUP_SIMULATE_END)


@dataclass(frozen=True, slots=True)
class Call:
    """One call to NCCL as the calls plane saw it. ``nbytes`` as nccl-tests counts them, ``None`` when not known."""

    name: str
    time_ns: int
    comm_hash: int = 0
    comm_rank: int = -1
    nranks: int = -1
    count: int = 0
    nbytes: int | None = None
    peer: int = -1
    tid: int = 0


@dataclass(slots=True)
class _Group:
    """What a thread has enqueued since its outermost GroupStart; only sums are kept, so a group may hold any number of calls."""

    depth: int = 0
    operations: int = 0
    nbytes: int = 0
    last: Row | None = None


@dataclass(slots=True)
class CallTotals:
    """Counted since the process was first watched."""

    calls: int = 0
    operations: int = 0
    nbytes: int = 0
    unsized: int = 0
    """Operations whose bytes are not known: an unknown data type, or a communicator that could not be read."""


@dataclass(slots=True)
class CallTracker:
    """State of one process, fed with its records in the order of the ring."""

    begun_ns: int
    leaves_seen: Collection[int] = BLOCKING
    """Functions whose return is seen: only of these can it be said that a thread is still inside."""
    totals: CallTotals = field(default_factory=CallTotals)
    newest_ns: int = 0
    _last: Row | None = None
    _inside: OrderedDict[int, Row] = field(default_factory=OrderedDict)
    _groups: OrderedDict[int, _Group] = field(default_factory=OrderedDict)
    _last_on: OrderedDict[tuple[int, str], Row] = field(default_factory=OrderedDict)
    _rates: RateWindow = field(init=False)

    def __post_init__(self) -> None:
        self._rates = RateWindow(2, self.begun_ns)

    @property
    def last(self) -> Call | None:
        """The newest operation that was launched."""
        return None if self._last is None else _call(self._last)

    @property
    def blocked(self) -> dict[int, Call]:
        """Calls that may block, entered and not yet left, by thread, oldest first."""
        return {tid: _call(row) for tid, row in self._inside.items()}

    def feed(self, rows: Iterable[Row]) -> None:
        """Take records."""
        totals, inside, newest = self.totals, self._inside, self.newest_ns
        for row in rows:
            time_ns, kind, number, tid = row[:4]
            newest = max(newest, time_ns)
            if kind in (_EXEC, _EXIT):
                self.forget_threads()
                continue
            # A thread that makes or leaves a call is no longer inside the one it entered before.
            if inside:
                inside.pop(tid, None)
            if kind != _ENTER:
                continue
            totals.calls += 1
            if number == _GROUP_START:
                self._open_group(tid)
            elif number in (_GROUP_END, _SIMULATE_END):
                self._close_group(tid, time_ns, launch=number == _GROUP_END)
            elif number in _OPERATIONS:
                self._enqueue(row, _OPERATIONS[number])
            if number in self.leaves_seen:
                inside[tid] = row
                if len(inside) > MAX_THREADS:
                    inside.popitem(last=False)
        self.newest_ns = newest

    def per_second(self, now_ns: int) -> tuple[float, float]:
        """(operations, bytes) launched per second, over the last seconds."""
        operations, nbytes = self._rates.per_second(now_ns)
        return operations, nbytes

    def last_like(self, comm_hash: int, name: str) -> Call | None:
        """The newest launched or enqueued call of this kind on this communicator."""
        row = self._last_on.get((comm_hash, name))
        return None if row is None else _call(row)

    def records_lost(self) -> None:
        """Records were lost: a GroupEnd may be among them, so what is enqueued counts as launched, and nothing as blocked."""
        for group in self._groups.values():
            self._launch(group, self.newest_ns)
        self.forget_threads()

    def forget_threads(self) -> None:
        """The threads are gone (exec, exit), or what they do is no longer known."""
        self._groups.clear()
        self._inside.clear()

    def _open_group(self, tid: int) -> None:
        group = self._groups.setdefault(tid, _Group())
        group.depth += 1
        if len(self._groups) > MAX_THREADS:
            self._groups.popitem(last=False)

    def _close_group(self, tid: int, time_ns: int, *, launch: bool) -> None:
        group = self._groups.get(tid)
        if group is None:
            # The group was opened before we watched: what it holds was never seen.
            return
        group.depth -= 1
        if group.depth > 0:
            return
        del self._groups[tid]
        if launch:
            self._launch(group, time_ns)

    def _enqueue(self, row: Row, name: str) -> None:
        _, _, number, tid, comm_hash, _, nranks, count, datatype, _ = row
        key = comm_hash, name
        self._last_on[key] = row
        self._last_on.move_to_end(key)
        if len(self._last_on) > MAX_COMMUNICATORS:
            self._last_on.popitem(last=False)
        nbytes = algorithm_bytes(number, count, datatype, nranks)
        if nbytes is None:
            self.totals.unsized += 1
        group = self._groups.get(tid)
        single = group if group is not None else _Group()
        single.operations += 1
        single.nbytes += nbytes or 0
        single.last = row
        if group is None:
            self._launch(single, row[0])

    def _launch(self, group: _Group, time_ns: int) -> None:
        if not group.operations:
            return
        self.totals.operations += group.operations
        self.totals.nbytes += group.nbytes
        self._rates.add(time_ns, group.operations, group.nbytes)
        self._last = group.last


def _call(row: Row) -> Call:
    time_ns, _, number, tid, comm_hash, rank, nranks, count, datatype, peer = row
    return Call(
        name=function(number).name,
        time_ns=time_ns,
        comm_hash=comm_hash,
        comm_rank=rank,
        nranks=nranks,
        count=count,
        nbytes=algorithm_bytes(number, count, datatype, nranks),
        peer=peer,
        tid=tid,
    )
