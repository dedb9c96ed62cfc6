"""In which order a process called what, and so which of its unfinished operations it is at."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind

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
