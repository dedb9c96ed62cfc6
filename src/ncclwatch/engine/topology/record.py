"""The operations of a few processes in full, and of all of them in numbers: what roles and patterns are learned from.

Ranks of a stage run the same program, so a sample of at most ``SPECIMENS`` processes is kept in full, each in a ring; counts by
communicator and function are kept of everybody. Memory is bounded whatever the size of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.functions import TYPES
from ncclwatch.model.events import Function

SPECIMENS = 128
BUDGET = 2_000_000
"""Operations kept over all specimens: 64 MB."""
LONGEST = 32_768

FUNCTIONS = 16
"""Functions below this number are operations (``model.events.Function``)."""

OPERATION = np.dtype(
    [
        ("time_ns", "<u8"),
        ("count", "<u8"),
        ("row", "<i4"),
        ("peer", "<i4"),
        ("call", "<u4"),
        ("function", "u1"),
        ("datatype", "i1"),
        ("thread", "u1"),
        ("spare", "u1"),
    ]
)
"""One operation, 32 bytes. ``call`` numbers calls: what lies between a GroupStart and its GroupEnd is one call."""

THREADS = 1024
"""More threads than that never call NCCL in one process; thread ids that keep changing do not fill memory."""

STUCK_GROUP = 4096
"""A group call with that many operations has lost its GroupEnd."""

ELEMENT_BYTES = np.array([size for _, size in TYPES], np.int64)
"""By ``ncclDataType_t``."""


def chosen_specimens(ranks: Sequence[int]) -> list[int]:
    """Indices of the processes to keep in full: all, or ranks spread irregularly, so that no dimension of a layout is missed."""
    if len(ranks) <= SPECIMENS:
        return list(range(len(ranks)))
    order = sorted(range(len(ranks)), key=lambda i: ranks[i])
    # Multiples of the golden ratio fall everywhere and never in step with a power of two.
    picks = np.floor(np.mod(np.arange(4 * SPECIMENS) * 0.6180339887498949, 1.0) * len(order)).astype(int)
    return [order[i] for i in dict.fromkeys(picks.tolist())][:SPECIMENS]


@dataclass(slots=True)
class _Ring:
    operations: NDArray[Any]
    written: int = 0
    calls: int = 0
    depth: dict[int, int] = field(default_factory=dict)
    threads: dict[int, int] = field(default_factory=dict)
    since_start: int = 0

    def extend(self, part: NDArray[Any]) -> None:
        size = len(self.operations)
        kept = part[-size:]
        at = (self.written + len(part) - len(kept) + np.arange(len(kept))) % size
        self.operations[at] = kept
        self.written += len(part)

    def history(self) -> NDArray[Any]:
        size = len(self.operations)
        if self.written <= size:
            return self.operations[: self.written].copy()
        cut = self.written % size
        return np.concatenate([self.operations[cut:], self.operations[:cut]])


class Recorder:
    """Counts and rings. Rows and processes are those of a ``JobMap``."""

    def __init__(self, specimens: Sequence[int], rows: int) -> None:
        depth = max(1024, min(LONGEST, BUDGET // max(1, len(specimens))))
        self._rings = {process: _Ring(np.zeros(depth, OPERATION)) for process in specimens}
        self.calls: NDArray[np.int64] = np.zeros((rows, FUNCTIONS), np.int64)
        """Operations by row and function. Shape (rows, FUNCTIONS)."""
        self.elements: NDArray[np.float64] = np.zeros((rows, FUNCTIONS))
        """Sum of the elements named in the calls, likewise."""
        self.taken = 0

    def add(self, events: NDArray[Any], process: NDArray[np.int64], row: NDArray[np.int64]) -> None:
        """Take calls (operations and group starts and ends, in order of time) with their process and row (−1: a group's)."""
        operation = row >= 0
        function = events["function"].astype(np.int64)
        # Of all the rows a batch of one node touches a few.
        touched, which = np.unique(row[operation] * FUNCTIONS + function[operation], return_inverse=True)
        weights = np.minimum(events["count"][operation], np.uint64(1 << 50)).astype(np.float64)
        self.calls.reshape(-1)[touched] += np.bincount(which, minlength=len(touched))
        self.elements.reshape(-1)[touched] += np.bincount(which, weights=weights, minlength=len(touched))
        self.taken += int(np.count_nonzero(operation))
        kept = np.zeros(int(process.max(initial=-1)) + 2, np.bool_)
        wanted = [p for p in self._rings if p < len(kept)]
        kept[wanted] = True
        at = np.flatnonzero(kept[process])
        if not len(at):
            return
        order = at[np.argsort(process[at], kind="stable")]
        bounds = np.flatnonzero(np.diff(process[order])) + 1
        for part in np.split(order, bounds):
            self._extend(self._rings[int(process[part[0]])], events[part], row[part])

    def _extend(self, ring: _Ring, events: NDArray[Any], row: NDArray[np.int64]) -> None:
        starts_call = np.zeros(len(events), np.bool_)
        threads = np.zeros(len(events), np.uint8)
        opens, closes = events["function"] == Function.GROUP_START, events["function"] == Function.GROUP_END
        if len(ring.depth) > THREADS:
            ring.depth.clear()
            ring.threads.clear()
        for tid in np.unique(events["tid"]).tolist():
            own = np.flatnonzero(events["tid"] == tid)
            threads[own] = ring.threads.setdefault(tid, min(255, len(ring.threads)))
            change = opens[own].astype(np.int64) - closes[own].astype(np.int64)
            total = ring.depth.get(tid, 0) + np.cumsum(change)
            # An end without a start (it was lost) leaves the depth at 0.
            depth = total - np.minimum(np.minimum.accumulate(total), 0)
            starts_call[own] = (depth - change <= 0) & ~closes[own]
            ring.depth[tid] = int(depth[-1])
        call = ring.calls + np.cumsum(starts_call)
        ring.calls = int(call[-1])
        operation = row >= 0
        part = np.zeros(int(np.count_nonzero(operation)), OPERATION)
        for name in ("time_ns", "count", "peer", "function"):
            part[name] = events[name][operation]
        part["datatype"] = np.clip(events["datatype"][operation], -1, 127)
        part["row"], part["call"], part["thread"] = row[operation], call[operation], threads[operation]
        ring.extend(part)
        if len(part) and int(np.count_nonzero(part["call"] == part["call"][-1])) >= STUCK_GROUP:
            ring.depth.clear()

    def history(self, process: int) -> NDArray[Any]:
        """The kept operations of a specimen, oldest first."""
        return self._rings[process].history()

    def inherit(self, older: Recorder, processes: dict[int, int], rows: NDArray[np.int64]) -> None:
        """Take over what an older recorder kept, under new numbers: ``processes`` old → new, ``rows`` old → new or −1."""
        known = np.flatnonzero(rows >= 0)
        self.calls[rows[known]] += older.calls[known]
        self.elements[rows[known]] += older.elements[known]
        self.taken = int(self.calls.sum())
        for old, new in processes.items():
            before, after = older._rings.get(old), self._rings.get(new)
            if before is None or after is None:
                continue
            kept = before.history()
            kept["row"] = rows[kept["row"]]
            after.calls, after.depth, after.threads = before.calls, before.depth, before.threads
            after.extend(kept[kept["row"] >= 0])

    @property
    def specimens(self) -> list[int]:
        """Processes that are kept in full."""
        return list(self._rings)


def element_bytes(datatype: NDArray[Any]) -> NDArray[np.int64]:
    """Bytes of an element by ``ncclDataType_t``; 4 where unknown."""
    known = (datatype >= 0) & (datatype < len(ELEMENT_BYTES))
    result: NDArray[np.int64] = np.where(known, ELEMENT_BYTES[np.where(known, datatype, 0)], 4)
    return result
