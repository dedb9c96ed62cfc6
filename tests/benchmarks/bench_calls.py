"""What a call record costs an agent on its way from the ring to the engine: eight ranks that train, made up, no NCCL.

    python tests/benchmarks/bench_calls.py [--ranks 8] [--seconds 40]

Each second of records is read from a ring, counted for the windows of ranks, chosen, encoded and kept for an engine that begins
anew. Prints CPU time by part.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ncclwatch.collect.aggregate import Aggregator
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.calls import communicators_named, creating
from ncclwatch.messaging.agent import History
from ncclwatch.messaging.writer import BatchWriter, ledger_calls
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.state import ProcessInfo
from ncclwatch.probes.ring import HEADER, RingDecoder
from unit.synthetic import process

RING_BYTES = 4 << 20
ITERATIONS = 13
"""A second."""
WARM_UP = 15
"""Seconds that are not counted."""
SENDS = [
    (Function.GROUP_START, Kind.ENTER),
    (Function.SEND, Kind.ENTER),
    (Function.GROUP_END, Kind.ENTER),
    (Function.GROUP_END, Kind.LEAVE),
]
CALLS = [
    *SENDS * 4,
    *[(Function.ALL_REDUCE, Kind.ENTER)] * 6,
    *[(Function.REDUCE_SCATTER, Kind.ENTER), (Function.ALL_GATHER, Kind.ENTER)] * 2,
]
"""Of one rank in one iteration."""


def second(number: int, ranks: int, source: np.random.Generator) -> NDArray[Any]:
    """The records of one second, in the order of their times."""
    events = np.zeros(ITERATIONS * ranks * len(CALLS), EVENT_DTYPE)
    iteration, rank, call = np.unravel_index(np.arange(len(events)), (ITERATIONS, ranks, len(CALLS)))
    function = np.array([function for function, _ in CALLS])[call]
    named = function < Function.GROUP_START
    events["time_ns"] = number * 10**9 + iteration * 76_000_000 + call * 2_500_000 + source.integers(0, 300_000, len(events))
    events["pid"] = events["tid"] = 1000 + rank
    events["function"], events["kind"] = function, np.array([kind for _, kind in CALLS])[call]
    events["flags"] = np.where(named, Flag.COMM_READ, 0)
    events["comm"] = np.where(named, 0x7F00_0000_0000 + function * 0x10000, 0)
    events["comm_hash"] = events["comm"] * np.uint64(0x9E3779B97F4A7C15)
    events["rank"], events["nranks"], events["peer"] = rank % 4, 4, rank % 2
    events["count"], events["datatype"], events["color"] = 32_768, 7, -1
    for name in ("sendbuff", "recvbuff", "caller"):
        events[name] = source.integers(1 << 40, 1 << 47, len(events))
    events["op_count"] = np.arange(len(events)) + number * len(events)
    return events.take(np.argsort(events["time_ns"], kind="stable"))


class Ring:
    """Memory laid out as the kernel lays it out."""

    def __init__(self) -> None:
        slot = HEADER + EVENT_DTYPE.itemsize
        self._memory = np.zeros(RING_BYTES + slot, np.uint8)
        self._producer = np.zeros(1, np.uint64)
        self.decoder = RingDecoder(np.zeros(1, np.uint64), self._producer, self._memory, EVENT_DTYPE, RING_BYTES)

    def put(self, events: NDArray[Any]) -> None:
        """Write records."""
        slots = np.zeros((len(events), HEADER + EVENT_DTYPE.itemsize), np.uint8)
        slots[:, :4] = np.frombuffer(EVENT_DTYPE.itemsize.to_bytes(4, "little"), np.uint8)
        slots[:, HEADER:] = events.view(np.uint8).reshape(len(events), -1)
        at = (int(self._producer[0]) + np.arange(slots.size)) % RING_BYTES
        self._memory[at] = slots.reshape(-1)
        self._memory[RING_BYTES:] = self._memory[: len(self._memory) - RING_BYTES]
        self._producer[0] += slots.size


class Route:
    """What an agent does with the records of some processes from the ring to the engine."""

    def __init__(self, processes: Iterable[ProcessInfo]) -> None:
        self._writer, self._history, self._aggregator = (
            BatchWriter(calls="all", key_every=600, grouped=True),
            History(),
            Aggregator(),
        )
        self._sequence = 0
        for info in processes:
            self._aggregator.add_process(info, 0)
        self.spent: Counter[str] = Counter()
        """CPU time by part, ns."""
        self.records = 0
        self.nbytes = 0
        """Records taken, and bytes to send."""

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begun = time.thread_time_ns()
        yield
        self.spent[part] += time.thread_time_ns() - begun

    def forget(self) -> None:
        """Count from here on."""
        self.spent.clear()
        self.records = self.nbytes = 0

    def take(self, read: Callable[[], NDArray[Any]], lost: int = 0, windows_ns: int | None = None) -> NDArray[Any]:
        """Take what ``read`` finds in the ring; ``lost`` is counted since the beginning; at ``windows_ns`` windows are made."""
        with self._timed("out of the ring"):
            events = read()
        with self._timed("who makes and who names communicators"):
            creating(events)
            communicators_named(events)
        with self._timed("counted"):
            self._aggregator.feed_events(events)
            self._aggregator.feed_losses(lost)
            if windows_ns is not None:
                self._aggregator.windows(windows_ns)
        with self._timed("chosen"):
            kept = ledger_calls(events)
        batch = NodeBatch(host="h", boot_id="b", sequence=self._sequence, time_ns=0, wall_ns=0, events=kept, lost=lost)
        with self._timed("encoded"):
            data = self._writer.encode(batch)
        with self._timed("kept for a new engine"):
            self._history.add(self._sequence, batch, data)
        self._sequence += 1
        self.records += len(events)
        self.nbytes += len(data)
        return events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=40)
    args = parser.parse_args()
    source = np.random.default_rng(1)
    ring, route = Ring(), Route(process(rank, args.ranks, host="node") for rank in range(args.ranks))
    for number in range(WARM_UP + args.seconds):
        if number == WARM_UP:
            route.forget()
        ring.put(second(number, args.ranks, source))
        route.take(ring.decoder.read, windows_ns=number * 10**9 if number % 15 == 14 else None)
    for part, taken in route.spent.items():
        print(f"{part:40s} {taken / args.seconds / 1e6:6.3f} ms a second")
    whole = sum(route.spent.values())
    print(f"{'all':40s} {whole / args.seconds / 1e6:6.3f} ms a second, {whole / route.records / 1e3:.2f} us a record")
    print(f"{route.records / args.seconds:.0f} records and {route.nbytes / args.seconds:.0f} bytes a second")


if __name__ == "__main__":
    main()
