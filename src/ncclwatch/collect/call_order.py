"""In which order a process called what: its newest operations, and where its unfinished ones stand in that order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.ledger import POINT_TO_POINT, mix
from ncclwatch.collect.message_steps import PLACES, MessageSteps, Place, Way
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.groups import group_depth
from ncclwatch.model.state import ProcessSample

T = TypeVar("T")

MOST_CALLS = 2048
"""Bound: calls that are kept of a process, where there are few processes: a habit shows in two iterations and more."""
UNMADE_RECORDS = 512
"""Bound: records a process that wait to be made into calls: of a job that goes on hardly anybody asks."""

ALIKE = 128
"""Calls at a place of one size, after which they are taken for equal again. Unit: calls. From: chosen."""
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
    _called: Counter[Place] = field(default_factory=Counter)
    """How much was ever called, by place."""
    _size: dict[Place, int] = field(default_factory=dict)
    """Of the newest call at a place: a number for its elements and type."""
    _changed: dict[Place, int] = field(default_factory=dict)
    """How much had been called at a place when that size last changed."""
    _messages: MessageSteps = field(default_factory=MessageSteps)

    def add(self, calls: NDArray[Any]) -> None:
        """Take records of operations and of group starts and ends (fields as of ``RECORD``) in the order of their times."""
        records = np.zeros(len(calls), RECORD)
        for name in _FIELDS:
            records[name] = calls[name]
        self._unmade = np.concatenate([self._unmade, records]) if len(self._unmade) else records
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
        self._count(calls)
        kept = np.concatenate([self._made, calls])
        self._made = kept[kept["number"] > kept["number"][-1] - self.room]
        self._memo.clear()

    def _count(self, calls: NDArray[Any]) -> None:
        """Count calls by place, and note where their size changes."""
        if len(self._called) > PLACES:  # communicators come and go
            self._called, self._size, self._changed, self._messages = Counter(), {}, {}, MessageSteps()
        # An AllGather and a ReduceScatter of as many elements take equal steps.
        gathers = calls["function"] == Function.ALL_GATHER
        sizes = mix(np.where(gathers, Function.REDUCE_SCATTER, calls["function"]), calls["count"], calls["datatype"])
        for place, at in _by_place(calls).items():
            distinct = np.unique(sizes[at])
            if len(distinct) > 1 or self._size.get(place, distinct[0]) != distinct[0]:
                self._changed[place] = self._called[place] + len(at)
                self._messages.forget(place)
            self._size[place] = int(sizes[at[-1]])
            self._called[place] += len(at)

    def open_inside(self, sample: ProcessSample) -> dict[Place, float]:
        """Calls inside its node that are not over at the process's newest sample, by place, as of :class:`MessageSteps`. Places
        whose calls have different sizes are left out.
        """
        self._make()
        if not any(own.host_connections for own in sample.communicators):
            return {}
        self._messages.take(sample, self._called_by)
        alike = {place: self._called[place] - self._changed.get(place, -ALIKE) for place in self._called}
        return {place: left for place, left in self._messages.open().items() if alike.get(place, 0) >= ALIKE}

    def _called_by(self, until_ns: int) -> Counter[Place] | None:
        """How much was ever called by a moment, by place; ``None`` where calls since then are no longer kept."""
        kept, ever = self._made, self._called.total()
        if len(kept) < ever and kept["time_ns"][0] > until_ns:
            return None
        return self._called - Counter({at: len(rows) for at, rows in _by_place(kept[kept["time_ns"] > until_ns]).items()})

    def steps_at(self, place: Place) -> int:
        """Steps made at a place at the newest sample."""
        return self._messages.steps_at(place)

    def since(self, position: int, until_ns: int) -> list[tuple[int, Place]]:
        """Positions, as of :meth:`locate`, and places of the calls from one on, oldest first."""
        rows, positions = self._until(until_ns)
        at = np.flatnonzero(positions >= position)
        return [(int(n), place) for n, place in zip(positions[at].tolist(), _places(rows[at]), strict=True)]

    def _until(self, until_ns: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The calls up to a moment, and their positions: 0 is the newest call of all."""
        rows = self._made[self._made["time_ns"] <= until_ns]
        return rows, rows["number"] - (self._made["number"][-1] if len(rows) else 0)

    @property
    def exchanged(self) -> set[tuple[int, int]]:
        """Communicators and peers with whom whatever is sent goes in one operation with what is received."""
        return self.remember("exchanged", lambda: _exchanged(self.calls))

    def locate(self, unfinished: Mapping[Place, Collection[int]], until_ns: int) -> dict[tuple[Place, int], int] | None:
        """Where in the order unfinished operations stand, by place and number: 0 is the newest call; ``None`` when calls that are
        needed are not kept. Operations at one place end in the order of their calls: the unfinished ones are the newest.
        """
        self._make()
        rows, positions = self._until(until_ns)
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


def _places(rows: NDArray[Any]) -> list[Place]:
    named = zip(rows["comm"].tolist(), rows["function"].tolist(), rows["peer"].tolist(), strict=True)
    return [(comm, (what == Function.SEND, peer) if what in POINT_TO_POINT else None) for comm, what, peer in named]


def _by_place(rows: NDArray[Any]) -> dict[Place, NDArray[np.int64]]:
    """Which of these calls are at each place, oldest first."""
    messages = np.isin(rows["function"], POINT_TO_POINT)
    kind, peer = np.where(messages, (rows["function"], rows["peer"]), 0)
    keys = mix(rows["comm"], kind, peer)
    order = np.argsort(keys, kind="stable")
    runs = [at for at in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1) if len(at)]
    return dict(zip(_places(rows[[at[0] for at in runs]]), runs, strict=True))


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
    """Begins of operations and groups (and their ends), and launches of graphs whose operations are not known, sorted by process
    and time; and each process's bounds.
    """
    function = events["function"]
    read = (events["flags"] & np.uint16(Flag.COMM_READ)) != 0
    calls = np.isin(function, _ORDERED) & (read | np.isin(function, MARKS))
    unknown = (function == Function.GRAPH_LAUNCH) & ((events["flags"] & np.uint16(Flag.UNKNOWN_GRAPH)) != 0)
    at = np.flatnonzero((events["kind"] == Kind.ENTER) & (calls | unknown))
    # Not by an index of the records: these are wide, and would be copied field by field.
    calls = events.take(at[np.lexsort((events["time_ns"][at], events["pid"][at]))])
    return calls, bounds_of(calls["pid"])


def bounds_of(numbers: NDArray[Any]) -> list[int]:
    """Where runs of equal numbers begin, and the end of all."""
    return np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1], True]).tolist() if len(numbers) else []
