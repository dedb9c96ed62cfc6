"""A ``NodeBatch`` as bytes and back: what agents send, and what recordings hold. One page on it: ``docs/messages.md``.

A *stream* is what one writer says, batch after batch. Names, processes and peer lists are sent once in an *epoch* and then named
by number; what a process's memory showed is sent again only when it has changed. An epoch begins with a key batch, which builds
on nothing before it: a reader that missed something says so and waits for the next.
"""

from __future__ import annotations

import dataclasses
import secrets
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.windows import CurrentOperation, LastCall, RankWindow
from ncclwatch.messaging import packing
from ncclwatch.messaging.limits import MAX_PROCESSES, MAX_RANKS, UNDECODABLE, FormatError, MissingBaseError
from ncclwatch.messaging.packing import Layout, Table
from ncclwatch.messaging.records import RecordType
from ncclwatch.messaging.values import Shared, ValueReader, ValueWriter
from ncclwatch.model.device import (
    ConnectionCounter,
    DeviceChannel,
    DeviceCommunicator,
    DeviceOperation,
    DeviceSample,
    StepWait,
    UnfinishedTransfer,
)
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import (
    Communicator,
    HostConnection,
    NetStep,
    PendingOperation,
    ProcessSample,
    ProxyOperation,
    ProxySub,
)

EPOCH_VALUES = 20_000
EPOCH_BYTES = 16 << 20
"""An epoch ends when it has this many distinct values, or bytes of them."""

_TABLES = frozenset(
    {
        *(Communicator, HostConnection, NetStep, ProxyOperation, ProxySub, PendingOperation, CurrentOperation, LastCall),
        *(DeviceSample, DeviceCommunicator, DeviceChannel, DeviceOperation, UnfinishedTransfer, StepWait, ConnectionCounter),
    }
)

Calls = Literal["all", "ledger", "none"]
"""Which call records are written: all, those from which the ledger is built (without fields it does not keep), none."""

_OPERATIONS = np.arange(Function.ALL_REDUCE, Function.WAIT_SIGNAL + 1, dtype=np.uint16)
_NOT_KEPT = ("enter_time_ns", "tid", "unique_id", "sendbuff", "recvbuff", "caller", "cpu", "binary")


_WINDOWS = RankWindow.__name__


class Body(msgspec.Struct, omit_defaults=True):
    """What is in a batch, before it is compressed."""

    stream: int
    epoch: int
    host: str
    boot_id: str
    sequence: int
    time_ns: int
    wall_ns: int
    interval_s: float = 1.0
    looked: bool = False
    complete: bool = False
    lost: int = 0
    finished: str = ""
    first_value: int = 1
    values: list[bytes] = []
    layouts: dict[str, Layout] = {}
    """With a key batch."""
    tables: list[Table] = []
    since: list[int] = []
    """For each sample, the sequence number of the batch that holds what it showed."""
    more: dict[str, msgspec.Raw] = {}
    """Every other field of ``NodeBatch`` that is not at its default, by name."""


_SCALARS = ("host", "boot_id", "sequence", "time_ns", "wall_ns", "interval_s", "looked", "complete", "lost", "finished")
_IN_TABLES = frozenset({"samples", "windows", "events"})


@cache
def _window_type() -> RecordType:
    return RecordType(RankWindow, _TABLES)


@cache
def _sample_types() -> tuple[RecordType, RecordType]:
    """What differs between any two looks, and what a process shows: the latter stays the same while nothing happens."""
    whole = RecordType(ProcessSample, _TABLES)
    head = {f.name for f in whole.fields if (f.kind != "value" and f.child is None) or f.name in ("process", "run_state")}
    content = {f.name for f in whole.fields} - head
    return (
        RecordType(ProcessSample, _TABLES, only=head, path="sample"),
        RecordType(ProcessSample, _TABLES, only=content, path="content"),
    )


@cache
def _layouts() -> dict[str, Layout]:
    types = [_window_type(), *_sample_types()]
    layouts = {part.name: part.layout for whole in types for part in whole.every()}
    return {**layouts, "calls": packing.layout_of(EVENT_DTYPE)}


@cache
def _more_fields() -> dict[str, msgspec.msgpack.Decoder[Any]]:
    """Decoders of the fields of ``NodeBatch`` that are written by their type alone: an added plane needs no change here."""
    hints = typing.get_type_hints(NodeBatch)
    rest = [f.name for f in dataclasses.fields(NodeBatch) if f.name not in _SCALARS and f.name not in _IN_TABLES]
    return {name: msgspec.msgpack.Decoder(hints[name]) for name in rest}


_body_encoder = msgspec.msgpack.Encoder()
_body_decoder = msgspec.msgpack.Decoder(Body)


class BatchWriter:
    """Encodes the batches of one stream in their order."""

    def __init__(self, *, calls: Calls = "ledger", key_every: int = 0) -> None:
        self._calls = calls
        self._key_every = key_every
        self._since_key = 0
        self.stream = secrets.randbits(63)
        self._epoch = 0
        self._values = ValueWriter()
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
        body = Body(self.stream, self._epoch, **{name: getattr(batch, name) for name in _SCALARS})
        tables: dict[str, NDArray[Any]] = {}
        if batch.samples:
            self._write_samples(batch, tables, body)
        if len(batch.windows):
            _window_type().write(batch.windows, self._values, tables)
        events = self._chosen(batch.events)
        if events is not None and len(events):
            tables["calls"] = events
        body.tables = [packing.pack(name, records) for name, records in tables.items() if len(records)]
        body.more = {
            name: msgspec.Raw(_body_encoder.encode(value))
            for name in _more_fields()
            if (value := getattr(batch, name)) not in (None, (), "", False)
        }
        new = self._values.take()
        body.first_value, body.values = len(self._values) - len(new) + 1, new
        if key:
            body.layouts = _layouts()
        return packing.frame(_body_encoder.encode(body), key=key)

    def _epoch_is_full(self) -> bool:
        if self._key_every and self._since_key >= self._key_every:
            return True
        return len(self._values) > EPOCH_VALUES or self._values.nbytes > EPOCH_BYTES

    def _begin_epoch(self) -> None:
        self._want_key = False
        self._since_key = 0
        self._epoch += 1
        self._values = ValueWriter()
        self._content.clear()

    def _write_samples(self, batch: NodeBatch, tables: dict[str, NDArray[Any]], body: Body) -> None:
        head, content = _sample_types()
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
    """Of call records those from which the ledger is built, without the fields it does not keep."""
    read = (events["flags"] & np.uint8(Flag.COMM_READ)) != 0
    foreign = ((events["flags"] & np.uint8(Flag.UNKNOWN_PROCESS)) != 0) & (events["pid_namespace"] != 0)
    launched = (events["kind"] == Kind.ENTER) & np.isin(events["function"], _OPERATIONS) & read
    others = (events["function"] > Function.GROUP_SIMULATE_END) | (events["function"] == Function.NONE)
    chosen: NDArray[Any] = events[(launched | others) & ~foreign]
    for name in _NOT_KEPT:
        chosen[name] = 0
    return chosen


def _shows_the_same(before: ProcessSample, after: ProcessSample) -> bool:
    _, content = _sample_types()
    return all(getattr(before, field.name) == getattr(after, field.name) for field in content.fields)


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
                self._made = _window_type().read(tables, self._epoch.values)
            except FormatError as error:
                self.error = error
                self._made = []
        return self._made

    @property
    def rows(self) -> int:
        """How many records there are, without making windows of them."""
        found = self._tables.get(_WINDOWS)
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

    def decode(self, data: bytes | memoryview) -> Decoded:
        """The next batch; raises ``FormatError`` for bytes that are none."""
        raw, key = packing.unframe(data)
        try:
            body = _body_decoder.decode(raw)
        except UNDECODABLE as error:
            raise FormatError(f"a batch is damaged: {error}") from error
        if body.stream != self._stream or (self._epoch is not None and body.epoch != self._epoch.number):
            self._stream, self._epoch = body.stream, None
        batch = NodeBatch(**{name: getattr(body, name) for name in _SCALARS})
        self._read_more(batch, body)
        if key:
            dtypes = {name: packing.dtype_of(layout) for name, layout in body.layouts.items()}
            self._epoch = _Epoch(body.epoch, ValueReader(self._shared), dtypes, {})
        epoch = self._epoch
        if epoch is None:
            batch.looked = False
            batch.events = _own_calls(body, data)
            return Decoded(batch, body.stream, needs_key=True)
        tables = {table.layout: table for table in body.tables if table.layout in epoch.dtypes}
        if "calls" in tables:
            batch.events = _calls_of(tables.pop("calls"), epoch)
        try:
            epoch.values.add(body.first_value, body.values)
            if body.since or "sample" in tables:
                batch.samples = self._read_samples(body, epoch, tables)
        except MissingBaseError:
            self._epoch = None
            batch.looked = False
            return Decoded(batch, body.stream, needs_key=True)
        windows = {name: table for name, table in tables.items() if name.startswith(_WINDOWS)}
        _check_sizes(windows, epoch)
        batch.windows = LazyWindows(windows, epoch)
        return Decoded(batch, body.stream)

    @staticmethod
    def _read_more(batch: NodeBatch, body: Body) -> None:
        decoders = _more_fields()
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
        head, content = _sample_types()
        tables = {n: packing.unpack(table, epoch.dtypes[n]) for n, table in packed.items() if not n.startswith(_WINDOWS)}
        heads = head.read_fields(tables, epoch.values)
        if len(heads) > MAX_PROCESSES or len(heads) != len(body.since):
            raise FormatError("the samples of a batch do not fit together")
        fresh = iter(content.read_fields(tables, epoch.values))
        kept: dict[ProcessKey, tuple[int, dict[str, Any]]] = {}
        samples = []
        for fields, since in zip(heads, body.since, strict=True):
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
