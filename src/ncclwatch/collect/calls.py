"""The calls of one process: operations counted when they are launched, groups, and calls that have not returned.

Between ``ncclGroupStart`` and the outermost ``ncclGroupEnd`` of a thread, operations are only enqueued; NCCL launches them all at
that end (``src/group.cc``). A call's time is host time: it says nothing about when the GPU ran the operation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclwatch.collect.functions import FUNCTIONS, algorithm_bytes, algorithm_sizes, function
from ncclwatch.collect.rates import BUCKET_NS, RateWindow
from ncclwatch.model.events import Flag, Function, Kind
from ncclwatch.model.groups import group_depth
from ncclwatch.model.rows import both, last_of
from ncclwatch.probes.functions import BLOCKING, MAKES_COMMUNICATORS

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENDS_COMMUNICATORS = (Function.COMM_FINALIZE, Function.COMM_DESTROY, Function.COMM_ABORT)

# Bounds on what one process can make us hold.
MAX_THREADS = 1024
MAX_COMMUNICATORS = 1024
MAX_BYTES = 1 << 44
"""Of one operation: 16 TiB, more than any GPU holds."""


def creating(events: NDArray[Any]) -> set[int]:
    """Processes that have begun to make a communicator, by records of the calls plane (``EVENT_DTYPE``)."""
    makes = _MAKES[events["function"]]
    if not makes.any():
        return set()
    known = events["flags"] & int(Flag.UNKNOWN_PROCESS) == 0
    made = events.take(np.flatnonzero(makes & (events["kind"] == int(Kind.ENTER)) & known))
    # A split without a colour makes none for this process.
    return set(made["pid"][(made["function"] != int(Function.COMM_SPLIT)) | (made["color"] >= 0)].tolist())


def communicators_named(events: NDArray[Any]) -> set[tuple[int, int]]:
    """(process, address of a communicator) that records of the calls plane name: what was made, and what was worked with."""
    comms = events["comm"]
    named = np.flatnonzero((comms != 0) & (events["flags"] & int(Flag.UNKNOWN_PROCESS) == 0) & ~_ENDS[events["function"]])
    pids, comms = events["pid"][named], comms[named]
    at = last_of(both(comms, pids))
    return set(zip(pids[at].tolist(), comms[at].tolist(), strict=True))


FIELDS = ("time_ns", "kind", "function", "tid", "comm_hash", "rank", "nranks", "count", "datatype", "peer")
"""Fields of ``struct nw_event`` that a tracker takes, in the order of a :data:`Row`."""

_HASH, _NUMBER = FIELDS.index("comm_hash"), FIELDS.index("function")

Row = tuple[int, ...]
"""One record, by :data:`FIELDS`: thousands come a second, of which a few become a :class:`Call`."""

_ENTER, _EXEC, _EXIT = int(Kind.ENTER), int(Kind.EXEC), int(Kind.EXIT)
_GROUP_START, _GROUP_END, _SIMULATE_END = int(Function.GROUP_START), int(Function.GROUP_END), int(Function.GROUP_SIMULATE_END)
_OPERATIONS = {known.name: int(number) for number, known in FUNCTIONS.items() if known.operation}


def _among(*functions: int) -> NDArray[np.bool_]:
    """Whether a function is one of these, by its number, which has 16 bits."""
    found = np.zeros(1 << 16, np.bool_)
    found[list(functions)] = True
    return found


_IS_OPERATION = _among(*_OPERATIONS.values())
_MATTERS = _among(*_OPERATIONS.values(), _GROUP_START, _GROUP_END, _SIMULATE_END)
_MAKES, _ENDS = _among(*MAKES_COMMUNICATORS), _among(*ENDS_COMMUNICATORS)


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
    """State of one process, fed with its records in the order of the ring.

    Thousands of records come a second: they are counted as columns, and a thread's groups by the running sum of their marks.
    """

    begun_ns: int
    leaves_seen: Collection[int] = BLOCKING
    """Functions whose return is seen: only of these can it be said that a thread is still inside."""
    totals: CallTotals = field(default_factory=CallTotals)
    newest_ns: int = 0
    _last: Row | None = None
    _inside: OrderedDict[int, Row] = field(default_factory=OrderedDict)
    _groups: OrderedDict[int, _Group] = field(default_factory=OrderedDict)
    _last_on: OrderedDict[tuple[int, int], Row] = field(default_factory=OrderedDict)
    """The newest operation by communicator's hash and function."""
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

    def feed(self, records: NDArray[Any]) -> None:
        """Take records (``EVENT_DTYPE``, or of it :data:`FIELDS`)."""
        if not len(records):
            return
        self.newest_ns = max(self.newest_ns, int(records["time_ns"].max()))
        ends = np.flatnonzero((records["kind"] == _EXEC) | (records["kind"] == _EXIT)).tolist()
        for begin, end in pairwise([-1, *ends, len(records)]):
            self._count(records[begin + 1 : end])
            if end < len(records):
                self.forget_threads()

    def _count(self, records: NDArray[Any]) -> None:
        """Take records of threads that all live on."""
        if not len(records):
            return
        self._follow_threads(records)
        number = records["function"]
        entered = records["kind"] == _ENTER
        self.totals.calls += int(np.count_nonzero(entered))
        # Places of records, not records: one has 136 bytes, of which few matter.
        matter = np.flatnonzero(entered & _MATTERS[number])
        if not len(matter):
            return
        operation = _IS_OPERATION[number[matter]]
        made = matter[operation]
        for at in made[last_of(both(records["comm_hash"][made], number[made]))].tolist():
            newest = _row(records[at])
            key = newest[_HASH], newest[_NUMBER]
            self._last_on[key] = newest
            self._last_on.move_to_end(key)
            if len(self._last_on) > MAX_COMMUNICATORS:
                self._last_on.popitem(last=False)
        nbytes = np.zeros(len(matter), np.int64)
        nbytes[operation], unsized = algorithm_sizes(
            number[made], records["count"][made], records["datatype"][made], records["nranks"][made], MAX_BYTES
        )
        self.totals.unsized += unsized
        threads = records["tid"][matter]
        for tid in threads[np.sort(np.unique(threads, return_index=True)[1])].tolist():
            mine = threads == tid
            self._count_thread(tid, records, matter[mine], operation[mine], nbytes[mine])

    def _follow_threads(self, records: NDArray[Any]) -> None:
        """What a thread has entered and not left: a thread that makes or leaves a call is inside no other."""
        for at in last_of(records["tid"]).tolist():
            newest = records[at]
            tid = int(newest["tid"])
            self._inside.pop(tid, None)
            if newest["kind"] == _ENTER and int(newest["function"]) in self.leaves_seen:
                self._inside[tid] = _row(newest)
                if len(self._inside) > MAX_THREADS:
                    self._inside.popitem(last=False)

    def _count_thread(
        self, tid: int, records: NDArray[Any], at: NDArray[np.intp], operation: NDArray[np.bool_], nbytes: NDArray[np.int64]
    ) -> None:  # fmt: skip
        """Count the operations of one thread, each where the outermost group around it ends. ``at``: where its records are."""
        group = self._groups.get(tid)
        number, times_ns = records["function"][at], records["time_ns"][at]
        step = np.where(operation, 0, np.where(number == _GROUP_START, 1, -1))
        depth = group_depth(step, group.depth if group is not None else 0)
        outside = np.flatnonzero(depth == 0)
        begun = np.flatnonzero(operation)
        ended = np.searchsorted(outside, begun)
        launched = ended < len(outside)
        where = outside[ended[launched]]
        real = number[where] != _SIMULATE_END
        chosen, where = begun[launched][real], where[real]
        if group is not None and len(outside):
            first = outside[0]
            if number[first] == _GROUP_END:
                self._launch(group, int(times_ns[first]))
            group = None
        self._add(times_ns[where], nbytes[chosen])
        if len(chosen):
            newest = _row(records[at[chosen[-1]]])
            self._last = newest if self._last is None or newest[0] >= self._last[0] else self._last
        if not depth[-1]:
            self._groups.pop(tid, None)
            return
        waiting = begun[~launched]
        group = group or _Group()
        group.depth = int(depth[-1])
        group.operations += len(waiting)
        group.nbytes += int(nbytes[waiting].sum())
        group.last = _row(records[at[waiting[-1]]]) if len(waiting) else group.last
        self._groups[tid] = group
        if len(self._groups) > MAX_THREADS:
            self._groups.popitem(last=False)

    def _add(self, times_ns: NDArray[Any], nbytes: NDArray[np.int64]) -> None:
        """Count launched operations at their times."""
        if not len(nbytes):
            return
        self.totals.operations += len(nbytes)
        self.totals.nbytes += int(nbytes.sum())
        bucket = times_ns // np.uint64(BUCKET_NS)
        begins = np.flatnonzero(np.diff(bucket, prepend=~bucket[:1]))
        numbers, sums = np.diff(begins, append=len(bucket)), np.add.reduceat(nbytes, begins)
        for one, number, total in zip(bucket[begins].tolist(), numbers.tolist(), sums.tolist(), strict=True):
            self._rates.add(one * BUCKET_NS, number, total)

    def per_second(self, now_ns: int) -> tuple[float, float]:
        """(operations, bytes) launched per second, over the last seconds."""
        operations, nbytes = self._rates.per_second(now_ns)
        return operations, nbytes

    def last_like(self, comm_hash: int, name: str) -> Call | None:
        """The newest launched or enqueued call of this kind on this communicator."""
        row = self._last_on.get((comm_hash, _OPERATIONS.get(name, -1)))
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

    def _launch(self, group: _Group, time_ns: int) -> None:
        if not group.operations:
            return
        self.totals.operations += group.operations
        self.totals.nbytes += group.nbytes
        self._rates.add(time_ns, group.operations, group.nbytes)
        self._last = group.last


def _row(record: Any) -> Row:
    return tuple(int(record[name]) for name in FIELDS)


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
