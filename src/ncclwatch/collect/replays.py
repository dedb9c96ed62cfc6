"""Calls that were captured in CUDA graphs: not made when they are captured, and made at each launch of the graph.

Records between the begin and the end of a capture are kept by the graph they went into, and repeated with its executable
graph's launches (``Flag.REPLAYED``). So whatever reads calls reads replays as it reads eager calls. Of a graph that was captured
before watching began, or while records were lost, nothing is repeated: its launch is marked (``Flag.UNKNOWN_GRAPH``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.probes.functions import GRAPHS

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_REPEATED = 64
"""Records of one graph that a launch repeats: of a graph with more only the first so many collectives, on all ranks the same."""
MAX_GRAPHS = 16384
"""Graphs, and executable graphs, that are held of all processes of a node together."""
MAX_CAPTURED = 65536
"""Records of a capture; one that is longer is not known."""

_COLLECTIVES = range(int(Function.ALL_REDUCE), int(Function.SCATTER) + 1)
_NUMBERS = [int(function) for function in GRAPHS]
_NONE: NDArray[Any] = np.zeros(0, EVENT_DTYPE)

Thread = tuple[int, int]
"""(process, thread)"""
Handle = tuple[int, int]
"""(process, handle of CUDA)"""


class Replays:
    """What the graphs of the processes of a node hold, from their records in the order of the ring."""

    def __init__(self) -> None:
        self._capturing: dict[Thread, list[NDArray[Any]]] = {}
        self._ended: OrderedDict[Thread, NDArray[Any] | None] = OrderedDict()
        self._instantiating: OrderedDict[Thread, int] = OrderedDict()
        self._graphs: OrderedDict[Handle, NDArray[Any] | None] = OrderedDict()
        self._executables: OrderedDict[Handle, NDArray[Any] | None] = OrderedDict()

    def expand(self, events: NDArray[Any]) -> NDArray[Any]:
        """Records with captured calls where they are replayed, in place of where they were captured. O(records)."""
        number = events["function"]
        ends = (events["kind"] == int(Kind.EXEC)) | (events["kind"] == int(Kind.EXIT))
        captures = bool(self._capturing) or bool((number == int(Function.STREAM_BEGIN_CAPTURE)).any())
        # Thousands of launches a second are taken together, unless some may be captured themselves.
        alone = np.isin(number, _NUMBERS) & (captures | (number != int(Function.GRAPH_LAUNCH)))
        marks = np.flatnonzero(alone | ends).tolist()
        if not marks:
            return self._replayed(self._without_captured(events))
        parts, begin = [], 0
        for mark in marks:
            parts += [self._replayed(self._without_captured(events[begin:mark])), self._take(events[mark : mark + 1])]
            begin = mark + 1
        return np.concatenate([*parts, self._replayed(self._without_captured(events[begin:]))])

    def forget(self) -> None:
        """Records were lost: what was captured is no longer known."""
        for held in (self._capturing, self._ended, self._instantiating, self._graphs, self._executables):
            held.clear()

    def _without_captured(self, events: NDArray[Any]) -> NDArray[Any]:
        """Records of calls that are made now; those of threads that capture are kept."""
        for (pid, tid), captured in self._capturing.items():
            mine = (events["pid"] == pid) & (events["tid"] == tid)
            if mine.any():
                captured.append(events[mine])
                events = events[~mine]
        return events

    def _take(self, event: NDArray[Any]) -> NDArray[Any]:
        """One record of CUDA, or of the end of a process; what comes in its place."""
        pid, function, handle, made = (int(event[name][0]) for name in ("pid", "function", "sendbuff", "comm"))
        thread, enters = (pid, int(event["tid"][0])), event["kind"][0] == int(Kind.ENTER)
        if function == Function.NONE:
            self._forget_process(pid)
            return event
        if function == Function.GRAPH_LAUNCH and enters:
            made_of = self._replayed(event)
            if thread not in self._capturing:
                return made_of
            # A graph inside a graph.
            self._capturing[thread].append(made_of[1:])
            return _NONE
        if function == Function.STREAM_BEGIN_CAPTURE and enters:
            self._capturing[thread] = []
        elif function == Function.STREAM_END_CAPTURE and enters:
            _put(self._ended, thread, _repeatable(self._capturing.pop(thread, None)))
        elif function == Function.STREAM_END_CAPTURE:
            _put(self._graphs, (pid, made), self._ended.pop(thread, None))
        elif function == Function.GRAPH_INSTANTIATE and enters:
            _put(self._instantiating, thread, handle)
        elif function == Function.GRAPH_INSTANTIATE:
            _put(self._executables, (pid, made), self._graphs.get((pid, self._instantiating.pop(thread, 0))))
        elif function == Function.GRAPH_EXEC_UPDATE and enters:
            _put(self._executables, (pid, handle), self._graphs.get((pid, int(event["recvbuff"][0]))))
        return _NONE

    def _replayed(self, events: NDArray[Any]) -> NDArray[Any]:
        """Records with the calls of each launch behind it."""
        at = np.flatnonzero((events["function"] == int(Function.GRAPH_LAUNCH)) & (events["kind"] == int(Kind.ENTER)))
        if not len(at):
            return events
        events = events.copy()
        handles, which = np.unique(events[["pid", "sendbuff"]][at], return_inverse=True)
        held = [self._executables.get(handle) for handle in handles.tolist()]
        unknown = np.array([calls is None for calls in held])[which]
        events["flags"][at[unknown]] |= np.uint16(Flag.UNKNOWN_GRAPH)
        # Each graph of a process is another call (``collect.cadence``), and ``sendbuff`` is not kept.
        events["comm"][at[unknown]] = events["sendbuff"][at[unknown]]
        more = np.array([0 if calls is None else len(calls) for calls in held])[which]
        if not more.any():
            return events
        room = np.ones(len(events), np.int64)
        room[at] += more
        places = np.cumsum(room) - room
        expanded = np.empty(int(room.sum()), EVENT_DTYPE)
        expanded[places] = events
        for number, calls in enumerate(held):
            if calls is None or not len(calls):
                continue
            mine = at[which == number]
            repeated = np.tile(calls, len(mine)).reshape(len(mine), len(calls))
            for name in ("time_ns", "tid"):
                repeated[name] = events[name][mine][:, None]
            repeated["enter_time_ns"] = np.where(repeated["kind"] == int(Kind.LEAVE), repeated["time_ns"], 0)
            expanded[places[mine][:, None] + 1 + np.arange(len(calls))] = repeated
        return expanded

    def _forget_process(self, pid: int) -> None:
        for held in (self._capturing, self._ended, self._instantiating, self._graphs, self._executables):
            for key in [key for key in held if key[0] == pid]:
                del held[key]


def _put(held: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    held[key] = value
    held.move_to_end(key)
    if len(held) > MAX_GRAPHS:
        held.popitem(last=False)


def _repeatable(captured: list[NDArray[Any]] | None) -> NDArray[Any] | None:
    """What launches repeat of a capture; ``None`` where that is not known."""
    if captured is None or sum(map(len, captured)) > MAX_CAPTURED:
        return None
    calls = np.concatenate([_NONE, *captured])
    if len(calls) > MAX_REPEATED:
        # Sends without their receives would seem to be waited for.
        first = np.flatnonzero((calls["kind"] == int(Kind.ENTER)) & np.isin(calls["function"], _COLLECTIVES))
        calls = calls[first[:MAX_REPEATED]]
    calls["flags"] |= np.uint16(Flag.REPLAYED)
    return calls
