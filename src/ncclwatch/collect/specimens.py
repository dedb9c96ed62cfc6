"""What a few processes of each job called, in full, and how often everybody called what: what the topology is learned from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.call_order import bounds_of
from ncclwatch.model.events import Function
from ncclwatch.model.groups import group_depth
from ncclwatch.model.rows import distinct

BUDGET = 2_000_000
"""Bound: operations kept over all specimens: 64 MB."""
LONGEST = 32_768
"""Bound: operations kept of one specimen: ten iterations of 64 micro-batches of 12 layers with four calls each."""
THREADS = 1024
"""Bound: threads of one process that are told apart: thread ids that keep changing do not fill memory."""
STUCK_GROUP = 4096
"""Bound: operations: a group call with so many has lost its GroupEnd; an exchange with 1,024 peers, both ways, makes 2,048."""

FUNCTIONS = 16
"""Fact: functions below this number are operations (``model.events.Function``)."""

OPERATION = np.dtype(
    {
        "names": ["time_ns", "count", "row", "peer", "call", "function", "datatype", "thread", "spare"],
        "formats": ["<u8", "<u8", "<i4", "<i4", "<u4", "u1", "i1", "u1", "u1"],
    }
)
"""One operation, 32 bytes. ``call`` numbers calls: what lies between a GroupStart and its GroupEnd is one call."""


@dataclass(slots=True)
class _Latest:
    """The latest operations of one process, and the group calls its threads have open."""

    parts: deque[NDArray[Any]] = field(default_factory=deque)
    kept: int = 0
    calls: int = 0
    depth: dict[int, int] = field(default_factory=dict)
    """thread → how many groups it is in; the first is number 0"""

    def extend(self, part: NDArray[Any], most: int) -> None:
        self.parts.append(part)
        self.kept += len(part)
        while self.kept - len(self.parts[0]) >= most:
            self.kept -= len(self.parts.popleft())


class Recorder:
    """Counts and rings. Processes and rows (a row is one communicator of one process) are numbered by who feeds it."""

    def __init__(self, specimens: Sequence[int], rows: int) -> None:
        self._most = min(LONGEST, BUDGET // max(1, len(specimens)))
        self.specimens = specimens
        """Processes that are kept in full."""
        self._latest = {process: _Latest() for process in specimens}
        self.calls: NDArray[np.int64] = np.zeros((rows, FUNCTIONS), np.int64)
        """Operations by row and function. Shape (rows, FUNCTIONS)."""
        self.taken = 0

    def add(self, calls: NDArray[Any], process: NDArray[np.int64], row: NDArray[np.int64]) -> None:
        """Take calls (operations, group starts and ends), process by process in order of time, with their row (−1: a group's)."""
        operation = row >= 0
        np.add.at(self.calls, (row[operation], calls["function"][operation]), 1)
        self.taken += int(np.count_nonzero(operation))
        for start, end in pairwise(bounds_of(process)):
            if (latest := self._latest.get(int(process[start]))) is not None:
                self._extend(latest, calls[start:end], row[start:end])

    def _extend(self, latest: _Latest, calls: NDArray[Any], row: NDArray[np.int64]) -> None:
        starts_call = np.zeros(len(calls), np.bool_)
        threads = np.zeros(len(calls), np.uint8)
        change = (calls["function"] == Function.GROUP_START).astype(np.int64) - (calls["function"] == Function.GROUP_END)
        if len(latest.depth) > THREADS:
            latest.depth.clear()
        for tid in distinct(calls["tid"]).tolist():
            own = np.flatnonzero(calls["tid"] == tid)
            depth = group_depth(change[own], latest.depth.setdefault(tid, 0))
            starts_call[own] = (depth - change[own] <= 0) & (change[own] >= 0)
            threads[own] = min(255, list(latest.depth).index(tid))
            latest.depth[tid] = int(depth[-1])
        call = latest.calls + np.cumsum(starts_call)
        latest.calls = int(call[-1])
        at = np.flatnonzero(row >= 0)
        part = np.zeros(len(at), OPERATION)
        for name in ("time_ns", "count", "peer", "function"):
            part[name] = calls[name][at]
        part["datatype"] = np.clip(calls["datatype"][at], -1, 127)
        part["row"], part["call"], part["thread"] = row[at], call[at], threads[at]
        latest.extend(part, self._most)
        if len(part) and int(np.count_nonzero(part["call"] == part["call"][-1])) >= STUCK_GROUP:
            latest.depth = dict.fromkeys(latest.depth, 0)

    def history(self, process: int) -> NDArray[Any]:
        """The kept operations of a specimen, oldest first."""
        return np.concatenate([np.zeros(0, OPERATION), *self._latest[process].parts])[-self._most :]

    def inherit(self, older: Recorder, processes: dict[int, int], rows: NDArray[np.int64]) -> None:
        """Take over what an older recorder kept, under new numbers: ``processes`` old → new, ``rows`` old → new or −1."""
        known = np.flatnonzero(rows >= 0)
        self.calls[rows[known]] += older.calls[known]
        self.taken = int(self.calls.sum())
        for old, new in processes.items():
            if old in older._latest and new in self._latest:
                before, after = older._latest[old], self._latest[new]
                kept = older.history(old)
                kept["row"] = rows[kept["row"]]
                after.calls, after.depth = before.calls, before.depth
                after.extend(kept[kept["row"] >= 0], self._most)
