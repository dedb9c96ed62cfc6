"""The ledger: for every rank of every communicator, the last operations it called, in numpy columns and bounded memory.

A row is one communicator of one process (that is: one rank of it); its operations lie in a ring of ``depth`` columns, written by
batches of call records. Ranks are attached at different times, so the position of an operation within a row says nothing by
itself; ``alignment`` lines rows up. Trace ID (CCL-D 5.1) = communicator and aligned sequence number.

Records come from *sources*, one a node: pids and clocks mean something only within one. After a source lost records its rows
start anew, as if its processes had been attached just then: what is absent from a history with holes proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.functions import type_name
from ncclwatch.model.events import Flag, Function, Kind

COLLECTIVES = (
    Function.ALL_REDUCE,
    Function.BROADCAST,
    Function.BCAST,
    Function.REDUCE,
    Function.ALL_GATHER,
    Function.REDUCE_SCATTER,
    Function.ALL_TO_ALL,
    Function.GATHER,
    Function.SCATTER,
)
"""Calls that every rank of a communicator makes in one order; point-to-point calls have their own."""

POINT_TO_POINT = (Function.SEND, Function.RECV)

OPERATION_DTYPE = np.dtype(
    [
        ("time_ns", "<u8"),
        ("op_count", "<u8"),
        ("signature", "<u8"),
        ("count", "<u8"),
        ("stream", "<u8"),
        ("function", "<u2"),
        ("datatype", "i1"),
        ("redop", "i1"),
        ("peer", "<i4"),
    ]
)
"""One called operation, 48 bytes. ``op_count`` is ``ncclComm.opCount`` at the time of the call; ``signature`` a hash of all that
the ranks must agree on."""

SHALLOWEST, DEEPEST = 32, 1024
"""Bound: operations kept a row."""
HISTORY_BYTES = 48 << 20
"""Bound: rows of a small job keep more operations: the depth is halved as rows come, so that the rings stay within this."""

NEWEST = 64
"""Bound: so many operations are looked at first by those who ask for the newest."""

NO_SOURCE = 0xFFFFFFF
"""Fact: no process of the ledger has this number."""

Place = tuple[int, int]
"""(number of the process in the ledger, address of the communicator in it)"""


@dataclass(frozen=True, slots=True)
class Signature:
    """What all ranks must agree on in one collective (root only where the operation has one)."""

    function: int
    count: int
    datatype: int
    redop: int
    peer: int

    def text(self) -> str:
        """``AllReduce of 1048576 x float32``."""
        known = self.function in Function._value2member_map_
        name = Function(self.function).name.title().replace("_", "") if known else f"function {self.function}"
        root = f", root {self.peer}" if self.peer >= 0 else ""
        return f"{name} of {self.count} x {type_name(self.datatype)}{root}"


class Ledger:
    """Operations by communicator and rank.

    ``depth`` collectives are kept a row, 48 bytes each (default: as many as fit into ``HISTORY_BYTES``); rows grow by doubling up
    to ``max_rows``; what does not fit is counted in ``refused``.
    """

    def __init__(self, *, depth: int | None = None, max_rows: int = 1_000_000) -> None:
        self.depth = depth or DEEPEST
        self.max_rows = max_rows
        self.refused = 0
        self.lost = 0
        """Records the kernel could not write, of all sources, since the beginning."""
        self.rows: dict[Place, int] = {}
        """Communicator of a process → row; hashes of communicators are not unique (see ``job``)."""
        self.point_to_point: dict[Place, dict[tuple[int, int], int]] = {}
        """Communicator of a process → {(function, peer): calls}: a Send to a peer pairs with its Recv"""
        self.from_birth: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.called: NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Collectives seen in each row since it was attached."""
        self.nranks: NDArray[np.int32] = np.zeros(0, np.int32)
        self.last_time_ns: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.operations: NDArray[Any] = np.zeros((0, self.depth), OPERATION_DTYPE)
        self._fixed_depth = depth is not None
        self._sources: dict[str, int] = {}
        self._by_process: dict[int, set[int]] = {}
        """Process → addresses of its communicators that have a row or point-to-point counts."""
        self._free: list[int] = []

    # --- places ----------------------------------------------------------------------------------------------------

    def place(self, source: str, pid: int, address: int) -> Place:
        """Where the ledger keeps a communicator of a process; records that came without a source belong to every host."""
        number = self._sources.get(source, self._sources.get("", NO_SOURCE))
        return (number << 32) | pid, address

    def is_from(self, place: Place, source: str) -> bool:
        """Whether a place is of a source."""
        return place[0] >> 32 == self._sources.get(source)

    def forget_process(self, source: str, pid: int) -> None:
        """Free what is kept of a process that ended."""
        process = self.place(source, pid, 0)[0]
        for address in self._by_process.pop(process, ()):
            self.point_to_point.pop((process, address), None)
            row = self.rows.pop((process, address), None)
            if row is not None:
                self._begin_anew(row)
                self._free.append(row)

    def lose(self, source: str, number: int = 1) -> None:
        """Records of a source were lost: what it holds so far cannot be continued. O(rows of the source)."""
        self.lost += number
        own = self._sources.get(source)
        for (process, address), row in self.rows.items():
            if process >> 32 == own:
                self._begin_anew(row)
                self.point_to_point.pop((process, address), None)

    def _begin_anew(self, row: int) -> None:
        self.called[row] = 0
        self.from_birth[row] = False
        self.last_time_ns[row] = 0

    # --- writing ---------------------------------------------------------------------------------------------------

    def add_calls(self, events: NDArray[Any], lost: int = 0, source: str = "") -> int:
        """Take a batch of ``EVENT_DTYPE`` records in the order of their times; returns how many operations it held.

        ``lost`` records of this source were lost since the batch before. O(n log n) in the batch, vectorised; about one
        microsecond a record.
        """
        processes = events["pid"].astype(np.uint64) | np.uint64(self._sources.setdefault(source, len(self._sources)) << 32)
        self._note_births(events, processes)
        self._count_point_to_point(events, processes)
        number = self._add_collectives(events, processes)
        if lost:
            # They may have been lost before, between or after those of the batch.
            self.lose(source, lost)
        return number

    def _add_collectives(self, events: NDArray[Any], processes: NDArray[np.uint64]) -> int:
        kind = events["kind"] == Kind.ENTER
        known = (events["flags"] & np.uint16(Flag.COMM_READ)) != 0
        wanted = kind & known & np.isin(events["function"], COLLECTIVES)
        chosen = events[wanted]
        if not len(chosen):
            return 0
        row = self._rows_of(chosen, processes[wanted])
        keep = row >= 0
        self.refused += int(np.count_nonzero(~keep))
        chosen, row = chosen[keep], row[keep]
        if not len(chosen):
            return 0
        order = np.argsort(row, kind="stable")
        chosen, row = chosen[order], row[order]
        starts = np.flatnonzero(np.r_[True, row[1:] != row[:-1]])
        sizes = np.diff(np.r_[starts, len(row)])
        within = np.arange(len(row)) - np.repeat(starts, sizes)
        position = (self.called[row] + within.astype(np.uint64)) % np.uint64(self.depth)
        # Of a batch longer than the ring only the newest survive; numpy keeps the last write of equal indices.
        self.operations[row, position.astype(np.int64)] = _operations(chosen)
        distinct = row[starts]
        self.called[distinct] += sizes.astype(np.uint64)
        self.last_time_ns[distinct] = chosen["time_ns"][starts + sizes - 1]
        self.nranks[distinct] = chosen["nranks"][starts]
        return len(chosen)

    def _note_births(self, events: NDArray[Any], processes: NDArray[np.uint64]) -> None:
        """A communicator whose making was seen is known from its first operation on."""
        makers = (
            Function.COMM_INIT_RANK,
            Function.COMM_INIT_RANK_CONFIG,
            Function.COMM_INIT_RANK_SCALABLE,
            Function.COMM_SPLIT,
            Function.COMM_SHRINK,
            Function.COMM_GROW,
        )
        made = (events["kind"] == Kind.LEAVE) & np.isin(events["function"], makers)
        made &= (events["flags"] & np.uint16(Flag.COMM_READ)) != 0
        for process, address in zip(processes[made].tolist(), events["comm"][made].tolist(), strict=True):
            row = self._row(process, address)
            if row >= 0:
                # An address can be used again after a communicator was destroyed: what came before was another one.
                self._begin_anew(row)
                self.from_birth[row] = True
                self.point_to_point.pop((process, address), None)

    def _count_point_to_point(self, events: NDArray[Any], processes: NDArray[np.uint64]) -> None:
        wanted = (events["kind"] == Kind.ENTER) & np.isin(events["function"], POINT_TO_POINT)
        if not wanted.any():
            return
        keys = np.empty(int(wanted.sum()), [("process", "<u8"), ("comm", "<u8"), ("function", "<u2"), ("peer", "<i4")])
        keys["process"] = processes[wanted]
        for name in ("comm", "function", "peer"):
            keys[name] = events[name][wanted]
        distinct, numbers = np.unique(keys, return_counts=True)
        for key, number in zip(distinct.tolist(), numbers.tolist(), strict=True):
            process, comm, function, peer = key
            if (process, comm) not in self.point_to_point and len(self.point_to_point) >= self.max_rows:
                continue
            self._by_process.setdefault(process, set()).add(comm)
            counts = self.point_to_point.setdefault((process, comm), {})
            counts[function, peer] = counts.get((function, peer), 0) + number

    def seen_from_birth(self, place: Place) -> bool:
        """Whether the making of a communicator was seen, so that its counts are complete."""
        row = self.rows.get(place)
        return row is not None and bool(self.from_birth[row])

    def _rows_of(self, events: NDArray[Any], processes: NDArray[np.uint64]) -> NDArray[np.int64]:
        addresses = events["comm"]
        # One integer a record sorts far faster than a pair; an odd multiplier keeps different pairs apart.
        mixed = addresses ^ (processes * np.uint64(0x9E3779B97F4A7C15))
        _, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
        rows = np.array([self._row(int(processes[i]), int(addresses[i])) for i in first], np.int64)
        return rows[inverse]

    def _row(self, process: int, address: int) -> int:
        row = self.rows.get((process, address))
        if row is not None:
            return row
        if self._free:
            row = self._free.pop()
        elif len(self.rows) >= self.max_rows:
            return -1
        else:
            row = len(self.rows)
            if row >= len(self.called):
                self._grow(max(64, 2 * len(self.called)))
        self.rows[process, address] = row
        self._by_process.setdefault(process, set()).add(address)
        return row

    def _grow(self, size: int) -> None:
        def longer(array: NDArray[Any]) -> NDArray[Any]:
            grown = np.zeros((size, *array.shape[1:]), array.dtype)
            grown[: len(array)] = array
            return grown

        while not self._fixed_depth and self.depth > SHALLOWEST and size * self.depth * OPERATION_DTYPE.itemsize > HISTORY_BYTES:
            self._halve_depth()
        self.from_birth, self.called, self.nranks = longer(self.from_birth), longer(self.called), longer(self.nranks)
        self.last_time_ns, self.operations = longer(self.last_time_ns), longer(self.operations)

    def _halve_depth(self) -> None:
        """Keep the newer half of each ring."""
        depth = self.depth // 2
        newest = self.called.astype(np.int64)[:, None] - depth + np.arange(depth)
        kept = np.zeros((len(self.called), depth), OPERATION_DTYPE)
        row, column = np.nonzero(newest >= 0)
        ordinal = newest[row, column]
        kept[row, ordinal % depth] = self.operations[row, ordinal % self.depth]
        self.operations, self.depth = kept, depth

    # --- reading ---------------------------------------------------------------------------------------------------

    def history(self, row: int) -> tuple[int, NDArray[Any]]:
        """The kept operations of a row, oldest first, and the ordinal (since attach) of the first of them."""
        called = int(self.called[row])
        kept = min(called, self.depth)
        ordinals = np.arange(called - kept, called)
        return called - kept, self.operations[row, ordinals % self.depth]

    def oldest_kept(self, called: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ordinal of the oldest operation that rows with so many calls still keep."""
        oldest: NDArray[np.int64] = np.maximum(called - self.depth, 0)
        return oldest

    def newer_than(self, row: int, time_ns: int) -> int | None:
        """How many of a row's operations were called after a time; ``None`` when all that are kept were. O(that many)."""
        called, times = int(self.called[row]), self.operations["time_ns"][row]
        kept = min(called, self.depth)
        for back in range(0, kept, NEWEST):
            ordinals = np.arange(called - back - min(NEWEST, kept - back), called - back)
            older = int(np.count_nonzero(times[ordinals % self.depth] <= time_ns))
            if older:
                return back + len(ordinals) - older
        return None

    def signature(self, row: int, ordinal: int) -> Signature | None:
        """What a rank called as its ``ordinal``-th collective since attach; ``None`` when not called or no longer kept."""
        called = int(self.called[row])
        if not max(0, called - self.depth) <= ordinal < called:
            return None
        operation = self.operations[row, ordinal % self.depth]
        return Signature(*(int(operation[name]) for name in ("function", "count", "datatype", "redop", "peer")))


def _operations(events: NDArray[Any]) -> NDArray[Any]:
    """Call records as the operations that are kept."""
    operations = np.empty(len(events), OPERATION_DTYPE)
    for name in ("time_ns", "op_count", "count", "stream", "function", "peer"):
        operations[name] = events[name]
    operations["datatype"] = events["datatype"].astype(np.int8)
    operations["redop"] = np.clip(events["redop"], -1, 127).astype(np.int8)
    mixed = operations["count"] * np.uint64(0x9E3779B97F4A7C15)
    for number, name in enumerate(("function", "datatype", "redop", "peer")):
        mixed ^= (operations[name].astype(np.int64).astype(np.uint64) + np.uint64(number + 1)) * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    operations["signature"] = mixed | np.uint64(1)
    return operations
