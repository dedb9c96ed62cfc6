"""Encodes batches: names, processes and peer lists once in an epoch, what a process's memory showed only when it has changed."""

from __future__ import annotations

import os
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.messaging import packing
from ncclwatch.messaging.body import HEAD, Body, flow_type, layouts, more_fields, sample_types, window_type, work_type
from ncclwatch.messaging.values import ValueWriter
from ncclwatch.model.events import Flag, Function, Kind
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.rows import by_value
from ncclwatch.model.state import ProcessSample

EPOCH_VALUES = 20_000
EPOCH_BYTES = 16 << 20
"""An epoch ends when it has this many distinct values, or bytes of them."""
STALE_VALUES = 256
STALE_BYTES = 1 << 18
"""It also ends with so many more values, or bytes, than twice those of its first batch: most are then of ended processes."""

Calls = Literal["all", "ledger", "none"]
"""Which call records are written: all, those from which the ledger is built (without fields it does not keep), none."""

_OPERATION, _MARK, _OTHER = 1, 2, 3
_WHAT = np.full(1 << 16, _OTHER, np.uint8)
"""What a call is to a ledger, by the number of its function, which has 16 bits."""
_WHAT[Function.ALL_REDUCE : Function.GROUP_SIMULATE_END + 1] = 0
_WHAT[Function.ALL_REDUCE : Function.WAIT_SIGNAL + 1] = _OPERATION
_WHAT[[Function.GROUP_START, Function.GROUP_END]] = _MARK
_NOT_KEPT = ("enter_time_ns", "unique_id", "sendbuff", "recvbuff", "caller", "cpu", "binary")

_encoder = msgspec.msgpack.Encoder()


class BatchWriter:
    """Encodes the batches of one stream in their order.

    ``grouped`` puts the calls of each process together, which halves them: rows are differences. What was called in two
    processes comes back in the order of the times, not of the ring.
    """

    def __init__(self, *, calls: Calls = "ledger", key_every: int = 0, grouped: bool = False) -> None:
        self._calls = calls
        self._grouped = grouped
        self._key_every = key_every
        self._since_key = 0
        self.stream = int.from_bytes(os.urandom(8), "little") >> 1
        self._epoch = 0
        self._values = ValueWriter()
        self._first_values = self._first_bytes = 0
        """What the first batch of this epoch needed."""
        self._content: dict[ProcessKey, tuple[int, ProcessSample]] = {}
        self._want_key = True
        self.changed = 0
        """Processes that showed something new in the batch that was encoded last."""
        self.was_key = False
        """Whether that batch builds on nothing."""

    def request_key(self) -> None:
        """Let the next batch be one that builds on nothing."""
        self._want_key = True

    def encode(self, batch: NodeBatch) -> bytes:
        """The batch as bytes."""
        key = self._want_key or self._epoch_is_full()
        self.was_key = key
        if key:
            self._begin_epoch()
        self._since_key += 1
        body = Body(stream=self.stream, epoch=self._epoch, **{name: getattr(batch, name) for name in HEAD})
        tables: dict[str, NDArray[Any]] = {}
        if batch.samples:
            self._write_samples(batch, tables, body)
        if len(batch.windows):
            window_type().write(batch.windows, self._values, tables)
        if len(batch.work):
            work_type().write(batch.work, self._values, tables)
        if len(batch.all_flows):
            flow_type().write(batch.all_flows, self._values, tables)
        events = self._chosen(batch.events)
        if events is not None and len(events):
            if self._grouped:
                body.grouped, events = True, events.take(by_value(events["pid"])[0])
            tables["calls"] = events
        body.tables = [packing.pack(name, records) for name, records in tables.items() if len(records)]
        body.more = {
            name: msgspec.Raw(_encoder.encode(value))
            for name in more_fields()
            if (value := getattr(batch, name)) not in (None, (), "", False)
        }
        new = self._values.take()
        body.first_value, body.values = len(self._values) - len(new) + 1, new
        if key:
            self._first_values, self._first_bytes = len(self._values), self._values.nbytes
            body.layouts = layouts()
        return packing.frame(_encoder.encode(body), key=key)

    def _epoch_is_full(self) -> bool:
        if self._key_every and self._since_key >= self._key_every:
            return True
        most = min(EPOCH_VALUES, 2 * self._first_values + STALE_VALUES)
        return len(self._values) > most or self._values.nbytes > min(EPOCH_BYTES, 2 * self._first_bytes + STALE_BYTES)

    def _begin_epoch(self) -> None:
        self._want_key = False
        self._since_key = 0
        self._epoch += 1
        self._values = ValueWriter()
        self._content.clear()

    def _write_samples(self, batch: NodeBatch, tables: dict[str, NDArray[Any]], body: Body) -> None:
        head, content = sample_types()
        changed, kept = [], {}
        for sample in batch.samples:
            key = sample.process.key
            known = self._content.get(key)
            if known is None or not _shows_the_same(known[1], sample):
                known = (batch.sequence, sample)
                changed.append(sample)
            kept[key] = known
            body.since.append(known[0])
        self._content = kept
        self.changed = len(changed)
        head.write(batch.samples, self._values, tables)
        content.write(changed, self._values, tables)

    def _chosen(self, events: NDArray[Any] | None) -> NDArray[Any] | None:
        if events is None or self._calls == "none" or not len(events):
            return None
        return events if self._calls == "all" else ledger_calls(events)


def ledger_calls(events: NDArray[Any]) -> NDArray[Any]:
    """Of call records those from which the ledger is built, without the fields it does not keep.

    Groups are kept where they hold sends or receives, which are one operation then; around collectives they tell nothing.
    """
    what, flags, entered = _WHAT[events["function"]], events["flags"], events["kind"] == Kind.ENTER
    kept = (what == _OTHER) | (entered & (what == _OPERATION) & ((flags & np.uint8(Flag.COMM_READ)) != 0))
    marks = entered & (what == _MARK)
    if marks.any():
        kept[_of_point_to_point(events, np.flatnonzero(marks | (kept & (what == _OPERATION))))] = True
    foreign = (flags & np.uint8(Flag.UNKNOWN_PROCESS)) != 0
    if foreign.any():
        kept &= ~(foreign & (events["pid_namespace"] != 0))
    chosen: NDArray[Any] = events.take(np.flatnonzero(kept))
    for name in _NOT_KEPT:
        chosen[name] = 0
    return chosen


def _of_point_to_point(events: NDArray[Any], at: NDArray[np.intp]) -> NDArray[np.intp]:
    """Of the places of operations, group starts and ends those of marks next to a send or receive of their thread, or to the edge
    of a batch.
    """
    threads = (events["pid"][at].astype(np.uint64) << np.uint64(32)) | events["tid"][at].astype(np.uint64)
    order, _ = by_value(threads)
    function, threads = events["function"][at[order]], threads[order]
    is_mark = _WHAT[function] == _MARK
    marks, operations = np.flatnonzero(is_mark), np.flatnonzero(~is_mark)
    # A group's start looks at the operation after it, its end at the one before.
    place = np.searchsorted(operations, marks) - (function[marks] != Function.GROUP_START)
    inside = (place >= 0) & (place < len(operations))
    beside = operations[np.clip(place, 0, len(operations) - 1)] if len(operations) else np.zeros(len(marks), np.int64)
    inside &= threads[beside] == threads[marks]
    wanted = ~inside | (function[beside] == Function.SEND) | (function[beside] == Function.RECV)
    found: NDArray[np.intp] = at[order[marks[wanted]]]
    return found


def _shows_the_same(before: ProcessSample, after: ProcessSample) -> bool:
    _, content = sample_types()
    return all(getattr(before, field.name) == getattr(after, field.name) for field in content.fields)
