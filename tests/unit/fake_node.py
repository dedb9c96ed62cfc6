"""Batches of a node made by hand, as a collector would say them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ncclwatch.collect.aggregate import Aggregator
from ncclwatch.collect.batch import NodeBatch, Overhead, PlaneState
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.state import ProcessSample
from unit.synthetic import Rank


class FakeNode:
    """Says batch after batch about prepared ranks; ``looks`` are taken one by one, the last one again and again."""

    def __init__(self, ranks: Sequence[Rank], *, looks: int = 8, host: str = "node0", begin: int = 0) -> None:
        self.host = host
        self.series = [rank.looks(looks) for rank in ranks]
        self.aggregator = Aggregator()
        self.sequence = begin
        self.taken = 0
        for series in self.series:
            self.aggregator.add_process(series[0].process, series[0].time_ns)

    def batch(self, *, looked: bool = True, **more: object) -> NodeBatch:
        place = min(self.taken, len(self.series[0]) - 1)
        samples = tuple(series[place] for series in self.series)
        time_ns = samples[0].time_ns + 1_000_000
        batch = NodeBatch(
            host=self.host, boot_id="boot-" + self.host, sequence=self.sequence, time_ns=time_ns, wall_ns=time.time_ns(),
            looked=looked, planes=(PlaneState("state", True), PlaneState("calls", False, "switched off")),
        )  # fmt: skip
        if looked:
            for sample in samples:
                self.aggregator.feed_sample(sample)
            batch.samples, batch.windows = samples, self.aggregator.windows(time_ns)
            batch.overhead = Overhead(None, None, 0.01, 50 << 20)
            self.taken += 1
        for name, value in more.items():
            setattr(batch, name, value)
        self.sequence += 1
        return batch


def calls(samples: Sequence[ProcessSample], count: int, *, begin_ns: int = 1) -> np.ndarray:
    """``count`` AllReduce calls of each process, in turns."""
    events = np.zeros(count * len(samples), EVENT_DTYPE)
    for i in range(len(events)):
        sample = samples[i % len(samples)]
        own = sample.communicators[0]
        events[i]["time_ns"] = begin_ns + i * 1000
        events[i]["pid"], events[i]["tid"] = sample.process.pid, sample.process.pid
        events[i]["function"], events[i]["kind"], events[i]["flags"] = Function.ALL_REDUCE, Kind.ENTER, Flag.COMM_READ
        events[i]["comm"], events[i]["comm_hash"], events[i]["rank"] = own.address, own.hash, own.rank
        events[i]["nranks"], events[i]["count"], events[i]["datatype"] = own.nranks, 1 << 20, 7
        events[i]["op_count"] = i // len(samples)
        events[i]["peer"] = -1
    return events
