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
        ends = (events["kind"] == int(Kind.EXEC)) | (events["kind"] == int(Kind.EXIT))
        marks = np.flatnonzero(np.isin(events["function"], _NUMBERS) | ends).tolist()
        if not marks and not self._capturing:
            return events
        parts, begin = [], 0
        for mark in marks:
            parts += [self._without_captured(events[begin:mark]), self._take(events[mark : mark + 1])]
            begin = mark + 1
        return np.concatenate([*parts, self._without_captured(events[begin:])])

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
            return self._launch(event, thread, self._executables.get((pid, handle)))
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

    def _launch(self, event: NDArray[Any], thread: Thread, calls: NDArray[Any] | None) -> NDArray[Any]:
        """A launch, and the calls it makes."""
        event = event.copy()
        if calls is None:
            event["flags"] |= np.uint16(Flag.UNKNOWN_GRAPH)
            return event
        calls = calls.copy()
        calls["time_ns"], calls["tid"] = event["time_ns"], event["tid"]
        calls["enter_time_ns"] = np.where(calls["kind"] == int(Kind.LEAVE), event["time_ns"], 0)
        if thread in self._capturing:
            # A graph inside a graph.
            self._capturing[thread].append(calls)
            return _NONE
        return np.concatenate([event, calls])

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
