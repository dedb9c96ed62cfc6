"""The ledger: for every rank of every communicator, the last operations it called, in numpy columns and bounded memory.

A row is one communicator of one process (that is: one rank of it); its operations lie in a ring of ``depth`` columns, written by
batches of call records. Ranks are attached at different times, so the position of an operation within a row says nothing by
itself; ``alignment`` lines rows up. Trace ID (CCL-D 5.1) = communicator and aligned sequence number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        ("count", "<u8"),
        ("stream", "<u8"),
        ("function", "<u2"),
        ("datatype", "i1"),
        ("redop", "i1"),
        ("peer", "<i4"),
    ]
)
"""One called operation, 40 bytes. ``op_count`` is ``ncclComm.opCount`` at the time of the call."""

DEFAULT_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Signature:
    """What all ranks must agree on in one collective (root only where the operation has one)."""

    function: int
    count: int
    datatype: int
    redop: int
    peer: int

    def text(self) -> str:
        """``AllReduce of 1048576 x datatype 7``."""
        known = self.function in Function._value2member_map_
        name = Function(self.function).name.title().replace("_", "") if known else f"function {self.function}"
        root = f", root {self.peer}" if self.peer >= 0 else ""
        return f"{name} of {self.count} elements of type {self.datatype}{root}"


class Ledger:
    """Operations by communicator and rank.

    ``depth`` operations are kept a row (collectives and point-to-point in separate rings); a row costs about ``depth`` x 40 bytes
    each, and rows grow by doubling up to ``max_rows``; what does not fit is counted in ``refused``.
    """

    def __init__(self, *, depth: int = DEFAULT_DEPTH, max_rows: int = 1_000_000) -> None:
        self.depth = depth
        self.max_rows = max_rows
        self.refused = 0
        self.lost = 0
        """Records the kernel could not write: while this rises, absence of a record proves nothing."""
        self.rows: dict[tuple[int, int], int] = {}
        """(pid, address of the communicator) → row; hashes of communicators are not unique (see ``job``)"""
        self.point_to_point: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
        """(pid, address of the communicator) → {(function, peer): calls}: a Send to a peer pairs with its Recv"""
        self.from_birth: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.called: NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Collectives seen in each row since it was attached."""
        self.nranks: NDArray[np.int32] = np.zeros(0, np.int32)
        self.last_time_ns: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.operations: NDArray[Any] = np.zeros((0, depth), OPERATION_DTYPE)

    # --- writing ---------------------------------------------------------------------------------------------------

    def add_calls(self, events: NDArray[Any], lost: int = 0) -> int:
        """Take a batch of ``EVENT_DTYPE`` records in the order of their times; returns how many operations it held.

        O(n log n) in the batch, vectorised; about one microsecond a record.
        """
        self.lost += lost
        self._note_births(events)
        self._count_point_to_point(events)
        kind = events["kind"] == Kind.ENTER
        known = (events["flags"] & np.uint16(Flag.COMM_READ)) != 0
        chosen = events[kind & known & np.isin(events["function"], COLLECTIVES)]
        if not len(chosen):
            return 0
        row = self._rows_of(chosen)
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
        operations = np.empty(len(chosen), OPERATION_DTYPE)
        for name in ("time_ns", "op_count", "count", "stream", "function", "peer"):
            operations[name] = chosen[name]
        operations["datatype"] = chosen["datatype"].astype(np.int8)
        operations["redop"] = np.clip(chosen["redop"], -1, 127).astype(np.int8)
        self.operations[row, position.astype(np.int64)] = operations
        distinct = row[starts]
        self.called[distinct] += sizes.astype(np.uint64)
        self.last_time_ns[distinct] = chosen["time_ns"][starts + sizes - 1]
        self.nranks[distinct] = chosen["nranks"][starts]
        return len(chosen)

    def _note_births(self, events: NDArray[Any]) -> None:
        """A communicator whose making was seen is known from its first operation on."""
        makers = (
            Function.COMM_INIT_RANK,
            Function.COMM_INIT_RANK_CONFIG,
            Function.COMM_INIT_RANK_SCALABLE,
            Function.COMM_SPLIT,
            Function.COMM_SHRINK,
            Function.COMM_GROW,
        )
        left = events[(events["kind"] == Kind.LEAVE) & np.isin(events["function"], makers)]
        for event in left[(left["flags"] & np.uint16(Flag.COMM_READ)) != 0]:
            row = self._row(int(event["pid"]), int(event["comm"]))
            if row >= 0:
                # An address can be used again after a communicator was destroyed: what came before was another one.
                self.called[row] = 0
                self.from_birth[row] = True
                self.point_to_point.pop((int(event["pid"]), int(event["comm"])), None)

    def _count_point_to_point(self, events: NDArray[Any]) -> None:
        chosen = events[(events["kind"] == Kind.ENTER) & np.isin(events["function"], POINT_TO_POINT)]
        if not len(chosen):
            return
        keys = chosen[["pid", "comm", "function", "peer"]]
        distinct, numbers = np.unique(np.ascontiguousarray(keys), return_counts=True)
        for key, number in zip(distinct.tolist(), numbers.tolist(), strict=True):
            pid, comm, function, peer = key
            if (pid, comm) not in self.point_to_point and len(self.point_to_point) >= self.max_rows:
                continue
            counts = self.point_to_point.setdefault((pid, comm), {})
            counts[function, peer] = counts.get((function, peer), 0) + number

    def seen_from_birth(self, place: tuple[int, int]) -> bool:
        """Whether the making of a communicator was seen, so that its counts are complete."""
        row = self.rows.get(place)
        return row is not None and bool(self.from_birth[row])

    def _rows_of(self, events: NDArray[Any]) -> NDArray[np.int64]:
        pids, addresses = events["pid"].astype(np.uint64), events["comm"]
        # One integer a record sorts far faster than a pair; an odd multiplier keeps different pairs apart.
        mixed = addresses ^ (pids * np.uint64(0x9E3779B97F4A7C15))
        _, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
        rows = np.array([self._row(int(pids[i]), int(addresses[i])) for i in first], np.int64)
        return rows[inverse]

    def _row(self, pid: int, address: int) -> int:
        row = self.rows.get((pid, address))
        if row is not None:
            return row
        if len(self.rows) >= self.max_rows:
            return -1
        row = len(self.rows)
        self.rows[pid, address] = row
        if row >= len(self.called):
            self._grow(max(64, 2 * len(self.called)))
        return row

    def _grow(self, size: int) -> None:
        def longer(array: NDArray[Any]) -> NDArray[Any]:
            grown = np.zeros((size, *array.shape[1:]), array.dtype)
            grown[: len(array)] = array
            return grown

        self.from_birth, self.called, self.nranks = longer(self.from_birth), longer(self.called), longer(self.nranks)
        self.last_time_ns, self.operations = longer(self.last_time_ns), longer(self.operations)

    # --- reading ---------------------------------------------------------------------------------------------------

    def history(self, row: int) -> tuple[int, NDArray[Any]]:
        """The kept operations of a row, oldest first, and the ordinal (since attach) of the first of them."""
        called = int(self.called[row])
        kept = min(called, self.depth)
        ordinals = np.arange(called - kept, called)
        return called - kept, self.operations[row, ordinals % self.depth]

    def signature(self, row: int, ordinal: int) -> Signature | None:
        """What a rank called as its ``ordinal``-th collective since attach; ``None`` when not called or no longer kept."""
        called = int(self.called[row])
        if not max(0, called - self.depth) <= ordinal < called:
            return None
        operation = self.operations[row, ordinal % self.depth]
        return Signature(*(int(operation[name]) for name in ("function", "count", "datatype", "redop", "peer")))
