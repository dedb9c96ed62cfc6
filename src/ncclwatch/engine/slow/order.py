"""In which order a process called what, and so which of its unfinished operations it is at."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.model.events import Flag, Function, Kind

KEPT_CALLS = 96

Way = tuple[bool, int] | None
"""Of a send or receive: whether it sends, and the peer; ``None`` for a collective."""
Place = tuple[int, Way]
"""Address of the communicator in its process, and the way."""

OPERATIONS = np.array([f.value for f in Function if Function.ALL_REDUCE <= f <= Function.WAIT_SIGNAL], np.uint16)
_ORDERED = np.array([*OPERATIONS.tolist(), Function.GROUP_START.value, Function.GROUP_END.value], np.uint16)
_POINT_TO_POINT = np.array([Function.SEND.value, Function.RECV.value], np.uint16)


@dataclass(slots=True)
class _Call:
    time_ns: int
    comm: int
    ways: list[Way]
    what: tuple[int, int, int] = (0, 0, 0)
    """Function, elements and type of a collective; zeros of sends and receives."""


@dataclass(slots=True)
class CallOrder:
    """The newest operations of one process; sends and receives of one group call are one operation."""

    calls: deque[_Call] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))

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

    def find(self, host: str, pid: int) -> CallOrder | None:
        """The order of a process's last calls; records without a source belong to the only host there is."""
        return self.of.get((host, pid)) or self.of.get(("", pid))

    def lose(self, source: str) -> None:
        """Records of a node were lost: what is open can no longer be told from its calls."""
        self.of = {key: order for key, order in self.of.items() if key[0] != source}

    def add_calls(self, events: NDArray[Any], source: str = "") -> None:
        """Take a batch of ``EVENT_DTYPE`` records of one node, in the order of their times."""
        entered = events[(events["kind"] == Kind.ENTER) & np.isin(events["function"], _ORDERED)]
        if not len(entered):
            return
        entered = entered[np.lexsort((entered["time_ns"], entered["pid"]))]
        function, pids, comms = entered["function"], entered["pid"], entered["comm"]
        begins, ends = np.cumsum(function == Function.GROUP_START), np.cumsum(function == Function.GROUP_END)
        paired = np.isin(function, _POINT_TO_POINT)
        grouped = paired & (begins > ends)
        again = np.zeros(len(entered), np.bool_)
        again[1:] = grouped[1:] & grouped[:-1] & (begins[1:] == begins[:-1]) & (pids[1:] == pids[:-1]) & (comms[1:] == comms[:-1])
        read = (entered["flags"] & np.uint16(Flag.COMM_READ)) != 0
        keep = np.flatnonzero(np.isin(function, OPERATIONS) & read)
        columns = (
            pids[keep], entered["time_ns"][keep], comms[keep], paired[keep], again[keep], function[keep], entered["peer"][keep],
            entered["count"][keep], entered["datatype"][keep],
        )  # fmt: skip
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for pid, time, comm, is_paired, joins, called, peer, count, datatype in rows:
            order = self.of.get((source, pid))
            if order is None:
                order = self.of.setdefault((source, pid), CallOrder())
            way: Way = (called == Function.SEND, peer) if is_paired else None
            if joins and order.calls:
                order.calls[-1].ways.append(way)
            else:
                order.calls.append(_Call(time, comm, [way], (0, 0, 0) if is_paired else (called, count, datatype)))
