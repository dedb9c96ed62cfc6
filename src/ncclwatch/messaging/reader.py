"""Decodes the batches of one stream, whatever bytes come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.windows import RankWindow
from ncclwatch.messaging import packing
from ncclwatch.messaging.body import (
    FLOWS,
    HEAD,
    WINDOWS,
    WORK,
    Body,
    flow_type,
    more_fields,
    sample_types,
    window_type,
    work_type,
)
from ncclwatch.messaging.limits import (
    MAX_COUNT,
    MAX_INTERVAL_S,
    MAX_PROCESSES,
    MAX_RANKS,
    UNDECODABLE,
    FormatError,
    MissingBaseError,
)
from ncclwatch.messaging.packing import Table
from ncclwatch.messaging.values import Shared, ValueReader
from ncclwatch.model.events import EVENT_DTYPE
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator, ProcessSample

_decoder = msgspec.msgpack.Decoder(Body)

_TIMES = ("time_ns", "wall_ns", "duration_ns")


@dataclass(slots=True)
class _Epoch:
    number: int
    values: ValueReader
    dtypes: dict[str, np.dtype[Any]]
    content: dict[ProcessKey, tuple[int, dict[str, Any]]]


class LazyWindows(Sequence[RankWindow]):
    """Windows that are made from their records when somebody looks at them; what does not fit together shows as none."""

    def __init__(self, tables: dict[str, Table], epoch: _Epoch) -> None:
        # Of ten windows a second a judgement looks at one: the others are never taken apart.
        self._tables, self._epoch = tables, epoch
        self._made: list[RankWindow] | None = None
        self.error: FormatError | None = None

    def _windows(self) -> list[RankWindow]:
        if self._made is None:
            try:
                tables = {name: packing.unpack(table, self._epoch.dtypes[name]) for name, table in self._tables.items()}
                self._made = window_type().read(tables, self._epoch.values)
            except FormatError as error:
                self.error = error
                self._made = []
        return self._made

    @property
    def rows(self) -> int:
        """How many records there are, without making windows of them."""
        found = self._tables.get(WINDOWS)
        return found.rows if found is not None else 0

    def __len__(self) -> int:
        return len(self._windows())

    @overload
    def __getitem__(self, index: int) -> RankWindow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RankWindow]: ...
    def __getitem__(self, index: int | slice) -> RankWindow | Sequence[RankWindow]:
        return self._windows()[index]

    def __iter__(self) -> Iterator[RankWindow]:
        return iter(self._windows())


@dataclass(slots=True)
class Decoded:
    """A batch, and whether the writer has to send a key batch because this one builds on something that was not received.

    Such a batch comes without samples and windows; what stands by itself is there.
    """

    batch: NodeBatch
    stream: int
    needs_key: bool = False


class BatchReader:
    """Decodes the batches of one stream; a batch of another stream begins a new one. Bounded, whatever it is given."""

    def __init__(self, shared: Shared | None = None) -> None:
        self._shared = shared or Shared()
        self._stream: int | None = None
        self._epoch: _Epoch | None = None

    def forget(self) -> None:
        """Let go of what the next batch may build on: if one comes, it needs a key batch."""
        self._epoch = None

    def decode(self, data: bytes | memoryview) -> Decoded:
        """The next batch; raises ``FormatError`` for bytes that are none."""
        raw, key = packing.unframe(data)
        try:
            body = _decoder.decode(raw)
        except UNDECODABLE as error:
            raise FormatError(f"a batch is damaged: {error}") from error
        _check_head(body)
        before = self._epoch
        decoded = self._take(body, data, key=key)
        # Held until now: what a new epoch has in common with the one before is not decoded again.
        del before
        return decoded

    def _take(self, body: Body, data: bytes | memoryview, *, key: bool) -> Decoded:
        if body.stream != self._stream or (self._epoch is not None and body.epoch != self._epoch.number):
            self._stream, self._epoch = body.stream, None
        batch = NodeBatch(**{name: getattr(body, name) for name in HEAD})
        self._read_more(batch, body)
        if key:
            dtypes = {name: packing.dtype_of(layout) for name, layout in body.layouts.items()}
            self._epoch = _Epoch(body.epoch, ValueReader(self._shared), dtypes, {})
        epoch = self._epoch
        if epoch is None:
            batch.looked = False
            batch.events = _in_time(_own_calls(body, data), body)
            return Decoded(batch, body.stream, needs_key=True)
        tables = {table.layout: table for table in body.tables if table.layout in epoch.dtypes}
        if "calls" in tables:
            batch.events = _in_time(_calls_of(tables.pop("calls"), epoch), body)
        work = {name: tables.pop(name) for name in list(tables) if name.startswith(WORK)}
        flows = {name: tables.pop(name) for name in list(tables) if name.startswith(FLOWS)}
        try:
            epoch.values.add(body.first_value, body.values)
            if work:
                batch.work = tuple(work_type().read(_unpacked(work, epoch), epoch.values))
            if flows:
                batch.all_flows = tuple(flow_type().read(_unpacked(flows, epoch), epoch.values))
            if body.since or "sample" in tables:
                batch.samples = self._read_samples(body, epoch, tables)
        except MissingBaseError:
            self._epoch = None
            batch.looked = False
            return Decoded(batch, body.stream, needs_key=True)
        windows = {name: table for name, table in tables.items() if name.startswith(WINDOWS)}
        _check_sizes(windows, epoch)
        batch.windows = LazyWindows(windows, epoch)
        return Decoded(batch, body.stream)

    @staticmethod
    def _read_more(batch: NodeBatch, body: Body) -> None:
        decoders = more_fields()
        for name, raw in body.more.items():
            decoder = decoders.get(name)
            if decoder is None:
                continue
            try:
                setattr(batch, name, decoder.decode(raw))
            except UNDECODABLE as error:
                raise FormatError(f"{name} of a batch is not what it should be: {error}") from error

    @staticmethod
    def _read_samples(body: Body, epoch: _Epoch, packed: dict[str, Table]) -> tuple[ProcessSample, ...]:
        head, content = sample_types()
        tables = {n: packing.unpack(table, epoch.dtypes[n]) for n, table in packed.items() if not n.startswith(WINDOWS)}
        heads = head.read_fields(tables, epoch.values)
        if len(heads) > MAX_PROCESSES or len(heads) != len(body.since):
            raise FormatError("the samples of a batch do not fit together")
        fresh = iter(content.read_fields(tables, epoch.values))
        kept: dict[ProcessKey, tuple[int, dict[str, Any]]] = {}
        samples = []
        for fields, since in zip(heads, body.since, strict=True):
            if any(abs(fields[name]) > MAX_COUNT for name in _TIMES):
                raise FormatError("the times of a sample make no sense")
            key = fields["process"].key
            if since == body.sequence:
                shown = next(fresh, None)
                if shown is None:
                    raise FormatError("a sample of a batch lacks what it shows")
                _check(shown["communicators"])
                known = (since, shown)
            else:
                found = epoch.content.get(key)
                if found is None or found[0] != since:
                    raise MissingBaseError("a sample builds on one that was not received", "a key batch brings it")
                known = found
            kept[key] = known
            samples.append(ProcessSample(**fields, **known[1]))
        if heads:
            epoch.content = kept
        return tuple(samples)


def _check_head(body: Body) -> None:
    """What is counted with before anybody looks at what a batch says."""
    whole = (body.sequence, body.time_ns, body.wall_ns, body.lost)
    if not 0 < body.interval_s <= MAX_INTERVAL_S or any(abs(number) > MAX_COUNT for number in whole):
        raise FormatError("the head of a batch makes no sense")


def _check(communicators: Sequence[Communicator]) -> None:
    """What the engine counts on: loops run over the ranks of a communicator."""
    for communicator in communicators:
        if not 0 <= communicator.rank < communicator.nranks <= MAX_RANKS:
            raise FormatError(f"a communicator of {communicator.nranks} ranks with rank {communicator.rank} cannot be")


def _own_calls(body: Body, data: bytes | memoryview) -> NDArray[Any] | None:
    """Calls without the layouts that a key batch would have brought, from a writer of our own version."""
    if packing.version_of(data) != packing.VERSION:
        return None
    return next((packing.unpack(table, EVENT_DTYPE) for table in body.tables if table.layout == "calls"), None)


def _in_time(calls: NDArray[Any] | None, body: Body) -> NDArray[Any] | None:
    """Calls that came grouped by process, merged by their times; those of a process stay in their order, whatever these say."""
    if calls is None or not body.grouped or not len(calls):
        return calls
    borders = np.flatnonzero(np.diff(calls["pid"])) + 1
    times = np.concatenate([np.maximum.accumulate(part) for part in np.split(calls["time_ns"], borders)])
    merged: NDArray[Any] = calls[np.argsort(times, kind="stable")]
    return merged


def _unpacked(tables: dict[str, Table], epoch: _Epoch) -> dict[str, NDArray[Any]]:
    return {name: packing.unpack(table, epoch.dtypes[name]) for name, table in tables.items()}


def _check_sizes(tables: dict[str, Table], epoch: _Epoch) -> None:
    for name, table in tables.items():
        packing.check(table, epoch.dtypes[name])


def _calls_of(table: Table, epoch: _Epoch) -> NDArray[Any]:
    """Call records; those of another version keep the fields that we know, and the others are 0."""
    records = packing.unpack(table, epoch.dtypes[table.layout])
    if records.dtype == EVENT_DTYPE:
        return records
    ours = np.zeros(len(records), EVENT_DTYPE)
    for name in set(ours.dtype.names or ()) & set(records.dtype.names or ()):
        ours[name] = records[name]
    return ours
