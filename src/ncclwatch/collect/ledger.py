"""The ledger: for every rank of every communicator, the last operations it called, in numpy columns and bounded memory.

A row is one communicator of one process (one rank of it); its operations lie in a ring of ``depth`` columns. Ranks are attached
at different times, so rows must be lined up (``alignment``). Trace ID (CCL-D 5.1) = communicator and aligned sequence number.

Records come from *sources*, one a node: pids and clocks mean something only within one. After a source lost records its rows
start anew, as if just attached: what is absent from a history with holes proves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.functions import type_name
from ncclwatch.model.events import Flag, Function, Kind
from ncclwatch.model.job import Group
from ncclwatch.model.state import Communicator, ProcessInfo
from ncclwatch.model.topology import FUNCTION_NAMES

COLLECTIVES = range(Function.ALL_REDUCE, Function.SCATTER + 1)
"""Calls that every rank of a communicator makes in one order; point-to-point calls have their own."""
POINT_TO_POINT = (Function.SEND, Function.RECV)
MAKERS = (
    Function.COMM_INIT_RANK,
    Function.COMM_INIT_RANK_CONFIG,
    Function.COMM_INIT_RANK_SCALABLE,
    Function.COMM_SPLIT,
    Function.COMM_SHRINK,
    Function.COMM_GROW,
)
"""Calls that make a communicator."""

OPERATION_DTYPE = np.dtype(
    {
        "names": ["time_ns", "op_count", "signature", "count", "function", "datatype", "redop", "peer"],
        "formats": ["<u8", "<u8", "<u8", "<u8", "<u2", "i1", "i1", "<i4"],
    }
)
"""One called operation, 40 bytes. ``op_count`` is ``ncclComm.opCount`` at the call; ``signature`` a hash of a ``Signature``."""

SHALLOWEST, DEEPEST = 32, 1024
"""Bound: operations kept a row."""
HISTORY_BYTES = 40 << 20
"""Bound: rows of a small job keep more operations: the depth is halved as rows come, so that the rings stay within this."""

ALIKE = 3
"""Unit: calls that say something by being alike: operations in common that line two ranks up, operations on which ranks agree
again, calls before a call by which its place is known, calls of a collective that make it familiar. From: the tests, where one
to six tell the same; what is a call apart differs nearly everywhere, and one too many is the fault itself.
"""
UNLIKE = 0.1
"""Unit: share, of the calls that ranks in line may differ in, and of the ranks that may seem to have broken their pattern of
calls. From: the tests and the simulated jobs with conflicting calls: 0.02 to 0.3 tell the same. In more calls chance may differ;
where more ranks break their pattern the job does something new, or an iteration is longer than the calls that are kept.
"""
_WAY = ["pid", "comm", "function", "peer"]
UNCOUNTED = np.iinfo(np.int64).min
"""Of a row of which NCCL's own count was not read."""

Process = tuple[str, int]
"""(source of its records, pid)"""
Place = tuple[str, int, int]
"""(source of the records, pid, address of the communicator in the process)"""


@dataclass(frozen=True, slots=True)
class Signature:
    """What all ranks must agree on in one collective (root only where the operation has one)."""

    function: int
    count: int
    datatype: int
    redop: int
    peer: int

    @property
    def name(self) -> str:
        """``AllReduce``; empty where the function is not known."""
        return FUNCTION_NAMES.get(self.function, "")

    def text(self) -> str:
        """``AllReduce of 1048576 x float32``."""
        root = f", root {self.peer}" if self.peer >= 0 else ""
        return f"{self.name or f'function {self.function}'} of {self.count} x {type_name(self.datatype)}{root}"


class Ledger:
    """Operations by communicator and rank: ``depth`` a row, within ``HISTORY_BYTES``; rows double up to ``max_rows``."""

    def __init__(self, *, depth: int = DEEPEST, max_rows: int = 1_000_000) -> None:
        self.depth = depth
        self.max_rows = max_rows
        self.records: Counter[Process] = Counter()
        """How many records of any kind came of each process."""
        self.replays: dict[Process, bool] = {}
        """Processes that launched CUDA graphs, and whether all calls that these replay are known."""
        self.lossy: set[str] = set()
        """Sources of which records were lost."""
        self.rows: dict[Place, int] = {}
        """Communicator of a process → row; hashes of communicators are not unique (see ``model.job``)."""
        self.point_to_point: dict[Place, Counter[tuple[int, int]]] = {}
        """Communicator of a process → {(function, peer): calls}: a Send to a peer pairs with its Recv"""
        self.from_birth: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.called: NDArray[np.int64] = np.zeros(0, np.int64)
        """Collectives seen in each row since it was attached."""
        self.before: NDArray[np.int64] = np.zeros(0, np.int64)
        """Collectives called before those, by NCCL's own count; ``UNCOUNTED`` where that is not known."""
        self.operations: NDArray[Any] = np.zeros((0, self.depth), OPERATION_DTYPE)
        self._free: list[int] = []

    # --- places ----------------------------------------------------------------------------------------------------

    def process(self, host: str, pid: int) -> Process:
        """What the ledger knows a process by; records that came without a source belong to every host."""
        return (host if (host, pid) in self.records else "", pid)

    def place(self, host: str, pid: int, address: int) -> Place:
        """Where the ledger keeps a communicator of a process."""
        return (*self.process(host, pid), address)

    def row(self, info: ProcessInfo, own: Communicator) -> int | None:
        """The row of a communicator of a process; ``None`` where it has none."""
        return self.rows.get(self.place(info.host, info.pid, own.address))

    def rows_of(self, group: Group) -> dict[int, int]:
        """Rank in a communicator → its row, of those ranks that have one."""
        rows = ((rank, self.row(member.info, own)) for rank, (member, own) in group.members.items())
        return {rank: row for rank, row in rows if row is not None}

    def is_from_birth(self, info: ProcessInfo, own: Communicator) -> bool:
        """Whether the making of a communicator was seen, so that its counts are complete."""
        return (row := self.row(info, own)) is not None and bool(self.from_birth[row])

    def messages(self, info: ProcessInfo, own: Communicator) -> Mapping[tuple[int, int], int]:
        """Calls of sends and receives on a communicator of a process, by function and peer."""
        return self.point_to_point.get(self.place(info.host, info.pid, own.address), {})

    @property
    def places(self) -> list[Place]:
        """Every place of which something is kept."""
        return [*self.rows, *self.point_to_point]

    def forget(self, gone: Set[Process | Place]) -> None:
        """Free what is kept of processes that ended, and of communicators that are gone. O(places)."""
        for place in [place for place in self.places if place in gone or place[:2] in gone] if gone else ():
            self.point_to_point.pop(place, None)
            if place in self.rows:
                self._free.append(self.rows.pop(place))
        for process in self.records.keys() & gone:
            del self.records[process]
            self.replays.pop(process, None)

    def lose(self, source: str) -> None:
        """Records of a source were lost, who knows when: what it holds so far cannot be continued. O(rows)."""
        self.lossy.add(source)
        for place, row in self.rows.items():
            if place[0] == source:
                self._begin_anew(row)
        self.point_to_point = {place: made for place, made in self.point_to_point.items() if place[0] != source}

    def _begin_anew(self, row: int) -> None:
        self.called[row], self.from_birth[row], self.before[row] = 0, False, UNCOUNTED

    # --- writing ---------------------------------------------------------------------------------------------------

    def add_calls(self, events: NDArray[Any], lost: int = 0, source: str = "") -> int:
        """Take ``EVENT_DTYPE`` records by time, ``lost`` of this source before; how many collectives. O(n log n)."""
        pids, numbers = np.unique(events["pid"], return_counts=True)
        self.records.update(dict(zip(((source, pid) for pid in pids.tolist()), numbers.tolist(), strict=True)))
        enters, read = events["kind"] == Kind.ENTER, (events["flags"] & np.uint16(Flag.COMM_READ)) != 0
        made = (events["kind"] == Kind.LEAVE) & np.isin(events["function"], MAKERS) & read
        for pid, address in events[["pid", "comm"]][made].tolist():
            place = source, pid, address
            if (row := self._row(place)) >= 0:
                # An address can be used again after a communicator was destroyed: what came before was another one.
                self._begin_anew(row)
                self.from_birth[row] = True
                self.point_to_point.pop(place, None)
        for pid, flags in events[["pid", "flags"]][enters & (events["function"] == Function.GRAPH_LAUNCH)].tolist():
            self.replays[source, pid] = self.replays.get((source, pid), True) and not flags & Flag.UNKNOWN_GRAPH
        messages = events[enters & np.isin(events["function"], POINT_TO_POINT)]
        _, first, numbers = np.unique(mix(*(messages[name] for name in _WAY)), return_index=True, return_counts=True)
        ways = messages[_WAY][first]
        order = np.argsort(ways)
        for (pid, address, function, peer), number in zip(ways[order].tolist(), numbers[order].tolist(), strict=True):
            place = source, pid, address
            if place in self.point_to_point or len(self.point_to_point) < self.max_rows:
                self.point_to_point.setdefault(place, Counter())[function, peer] += number
        collective = np.flatnonzero(enters & read & np.isin(events["function"], COLLECTIVES))
        number = self._add_collectives(events, collective, source)
        if lost:
            self.lose(source)
        return number

    def _add_collectives(self, events: NDArray[Any], at: NDArray[np.int64], source: str) -> int:
        """Of the records those at some places. (Records are wide: those that are asked for are copied once, in their order.)"""
        pids, addresses = events["pid"][at], events["comm"][at]
        _, first, inverse = np.unique(mix(pids, addresses), return_index=True, return_inverse=True)
        places = zip(pids[first].tolist(), addresses[first].tolist(), strict=True)
        row = np.array([self._row((source, pid, address)) for pid, address in places], np.int64)[inverse]
        order = np.argsort(row, kind="stable")[np.count_nonzero(row < 0) :]
        row = row[order]
        touched, starts, sizes = np.unique(row, return_index=True, return_counts=True)
        within = np.arange(len(row)) - np.repeat(starts, sizes)
        # Of a batch longer than the ring only the newest survive; numpy keeps the last write of equal indices.
        self.operations[row, (self.called[row] + within) % self.depth] = _operations(events, at[order])
        self.called[touched] += sizes
        return len(order)

    def note_count(self, row: int, counted: int, until_ns: int) -> None:
        """Remember by how much NCCL's count, raised after a call is recorded, exceeds the calls seen by then: the most ever."""
        # The ring is filled from its beginning. (Rows of all columns, as of a history, are copied column by column.)
        kept = self.operations["time_ns"][row, : min(int(self.called[row]), self.depth)]
        newer = int(np.count_nonzero(kept > until_ns))
        if newer < len(kept):
            self.before[row] = max(int(self.before[row]), counted - int(self.called[row]) + newer)

    def _row(self, place: Place) -> int:
        """The row of a place, a new one where it has none; −1 where there is no room."""
        if place in self.rows:
            return self.rows[place]
        if not self._free and len(self.rows) >= self.max_rows:
            return -1
        row = self._free.pop() if self._free else len(self.rows)
        if row >= len(self.called):
            self._grow(max(64, len(self.called)))
        self.rows[place] = row
        self._begin_anew(row)
        return row

    def _grow(self, more: int) -> None:
        while self.depth > SHALLOWEST and (len(self.called) + more) * self.depth * OPERATION_DTYPE.itemsize > HISTORY_BYTES:
            self._halve_depth()
        self.from_birth, self.called, self.before, self.operations = (
            _grown(array, more) for array in (self.from_birth, self.called, self.before, self.operations)
        )

    def _halve_depth(self) -> None:
        """Keep the newer half of each ring."""
        depth = self.depth // 2
        ordinals = np.maximum(self.called[:, None] - depth, 0) + np.arange(depth)
        kept = np.zeros((len(self.called), depth), OPERATION_DTYPE)
        rows = np.arange(len(self.called))[:, None]
        kept[rows, ordinals % depth] = self.operations[rows, ordinals % self.depth]
        self.operations, self.depth = kept, depth

    # --- reading ---------------------------------------------------------------------------------------------------

    def history(self, row: int) -> tuple[int, NDArray[Any]]:
        """The kept operations of a row, oldest first, and the ordinal (since attach) of the first of them."""
        called = int(self.called[row])
        ordinals = np.arange(max(0, called - self.depth), called)
        return called - len(ordinals), self.operations[row, ordinals % self.depth]

    def signature(self, row: int, ordinal: int) -> Signature | None:
        """What a rank called as its ``ordinal``-th collective since attach; ``None`` when not called or no longer kept."""
        called = int(self.called[row])
        if not max(0, called - self.depth) <= ordinal < called:
            return None
        return Signature(*self.operations[list(_AGREED)][row, ordinal % self.depth].tolist())


def _grown(array: NDArray[Any], more: int) -> NDArray[Any]:
    """With room for more rows. (Joining arrays of several columns would copy them column by column.)"""
    grown = np.zeros((len(array) + more, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


_AGREED = ("function", "count", "datatype", "redop", "peer")


def _operations(events: NDArray[Any], at: NDArray[np.int64]) -> NDArray[Any]:
    operations = np.empty(len(at), OPERATION_DTYPE)
    for name in ("time_ns", "op_count", "count", "function", "peer"):
        operations[name] = events[name][at]
    operations["datatype"] = events["datatype"][at].astype(np.int8)
    operations["redop"] = np.clip(events["redop"][at], -1, 127).astype(np.int8)
    operations["signature"] = mix(*(operations[name] for name in _AGREED)) | np.uint64(1)
    return operations


def mix(*columns: NDArray[Any]) -> NDArray[np.uint64]:
    """A hash over columns of integers, of equal length (multiply and shift, as in splitmix64)."""
    result = np.full(len(columns[0]), 0x9E3779B97F4A7C15, np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            result = (result ^ column.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            result ^= result >> np.uint64(29)
    return result
