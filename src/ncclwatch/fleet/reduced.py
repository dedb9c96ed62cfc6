"""What a hearing worker sends to the judge of a job: many nodes in one message, as columns, and of each only what is newest.

Nodes are put together in bundles. A bundle is a stream of its own: names, processes and lists of peers that its nodes have in
common are sent once (:mod:`ncclwatch.messaging.writer`), and what a process's memory showed only when it has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Annotated, Any, overload

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ncclwatch.collect.batch import BatchHead, NodeBatch
from ncclwatch.collect.windows import RankWindow
from ncclwatch.messaging.body import HEAD, more_fields
from ncclwatch.messaging.limits import UNDECODABLE, FormatError
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.values import Shared
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.network import FlowRecord, NetworkLook
from ncclwatch.model.rows import joined
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.work import FlowWindow

NODES_A_BUNDLE = 64
"""Nodes of a message: eight ranks each are 512, whose columns stay well below what a message may hold."""
KEY_EVERY = 30
"""Messages of a bundle after which one builds on none before it: a judge that begins anew needs no more of the past."""
MAX_INTERVAL_S = 60.0
"""Between two messages of a worker."""
LEAVES = 1
"""The number of a message without parts that says that its worker ends."""
MAX_NOTES = 200
"""Of a node between two messages."""
COUNTED = ("samples", "windows", "work", "all_flows", "events")
"""What travels in tables, of all nodes of a bundle together."""

_encoder = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class Heard:
    """What one life of a node's agent said since it was last sent on: batches ``first`` to ``last``, as one."""

    token: str
    node: str
    life: str
    first: int
    last: int
    batch: NodeBatch
    missed: int = 0
    """Batches between these that never came."""

    def add(self, n: int, batch: NodeBatch) -> None:
        """And one more batch."""
        self.missed += n - self.last - 1
        self.last, self.batch = n, merged(self.batch, batch)


def merged(older: NodeBatch, newer: NodeBatch) -> NodeBatch:
    """Two batches of a node that follow one another as one: of looks the newer, of what happened both."""
    look = newer if newer.looked else older
    shown = {sample.process.key for sample in look.samples}
    # Whoever ended between is in the look of that moment alone.
    ended = () if look is older else tuple(s for s in older.samples if s.run_state == "X" and s.process.key not in shown)
    events = [batch.events for batch in (older, newer) if batch.events is not None and len(batch.events)]
    return replace(
        newer,
        looked=older.looked or newer.looked,
        samples=look.samples + ended,
        windows=look.windows,
        problems=look.problems,
        events=joined(events) if events else None,
        changes=older.changes + newer.changes,
        ends=older.ends + newer.ends,
        looks=older.looks + newer.looks,
        gpus=newer.gpus or older.gpus,
        notes=(older.notes + newer.notes)[-MAX_NOTES:],
        planes=newer.planes or older.planes,
        overhead=newer.overhead or older.overhead,
        network=_both(older.network, newer.network),
        all_flows=newer.all_flows or older.all_flows,
        paths=newer.paths or older.paths,
        work=(*older.work, *newer.work),
    )


def _both(older: NetworkLook | None, newer: NetworkLook | None) -> NetworkLook | None:
    if older is None or newer is None:
        return newer or older
    return replaced(
        newer,
        nics=newer.nics or older.nics,
        changes=older.changes + newer.changes,
        kernel=older.kernel + newer.kernel,
        flows=newer.flows or older.flows,
        notes=older.notes + newer.notes,
    )


class Part(msgspec.Struct, array_like=True):
    """One node in a message: whose batches, which, its head, rows in each table, and the fields that travel by their types."""

    token: str
    node: str
    life: str
    first: int
    last: int
    missed: int
    head: BatchHead
    rows: list[int]
    more: dict[str, msgspec.Raw]


class Message(msgspec.Struct, array_like=True):
    """``number`` counts the messages of a bundle; ``body`` holds the tables as a batch does. Without parts it says that the
    worker is there, or (``LEAVES``) that it ends: others hear its nodes. ``interval_s``: how often it says something.
    """

    bundle: int
    number: int
    parts: list[Part]
    body: bytes
    interval_s: Annotated[float, msgspec.Meta(gt=0.0, le=MAX_INTERVAL_S)] = 1.0


_decoder = msgspec.msgpack.Decoder(Message)


class BundleWriter:
    """Encodes the messages of one bundle, one each ``interval_s``."""

    def __init__(self, bundle: int, interval_s: float = 1.0) -> None:
        self.bundle, self._interval_s = bundle, interval_s
        self._number = 0
        self._writer = BatchWriter(calls="all", key_every=KEY_EVERY)

    def request_key(self) -> None:
        """Let the next message build on none before it."""
        self._writer.request_key()

    def encode(self, heard: Sequence[Heard]) -> bytes:
        """A message of what some nodes said."""
        parts, together = [], NodeBatch(host="", boot_id="", sequence=self._number, time_ns=0, wall_ns=0, looked=True)
        samples: list[ProcessSample] = []
        windows: list[RankWindow] = []
        work: list[FlowWindow] = []
        flows: list[FlowRecord] = []
        events: list[NDArray[Any]] = []
        for one in heard:
            batch = one.batch
            calls = batch.events if batch.events is not None else ()
            rows = [len(batch.samples), len(batch.windows), len(batch.work), len(batch.all_flows), len(calls)]
            head = BatchHead(**{name: getattr(batch, name) for name in HEAD})
            parts.append(Part(one.token, one.node, one.life, one.first, one.last, one.missed, head, rows, _more(batch)))
            samples += batch.samples
            windows += batch.windows
            work += batch.work
            flows += batch.all_flows
            if batch.events is not None and len(batch.events):
                events.append(batch.events)
        together.samples, together.windows = tuple(samples), windows
        together.work, together.all_flows = work, flows
        together.events = joined(events) if events else None
        body = self._writer.encode(together)
        message = Message(self.bundle, self._number, parts, body, self._interval_s)
        self._number += 1
        return _encoder.encode(message)


def _more(batch: NodeBatch) -> dict[str, msgspec.Raw]:
    return {
        name: msgspec.Raw(_encoder.encode(value))
        for name in more_fields()
        if (value := getattr(batch, name)) not in (None, (), "", False)
    }


def present(interval_s: float, *, leaves: bool = False) -> bytes:
    """The message of a worker that has nothing to say, or that ends."""
    return _encoder.encode(Message(-1, LEAVES if leaves else 0, [], b"", interval_s))


class _Slice(Sequence[RankWindow]):
    """Windows of one node out of those of a message, which are made when somebody looks at them."""

    __slots__ = ("_start", "_stop", "_whole")

    def __init__(self, whole: Sequence[RankWindow], start: int, stop: int) -> None:
        self._whole, self._start, self._stop = whole, start, stop

    def _made(self) -> Sequence[RankWindow]:
        return self._whole[self._start : self._stop]

    def __len__(self) -> int:
        return len(self._made())

    @overload
    def __getitem__(self, index: int) -> RankWindow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RankWindow]: ...
    def __getitem__(self, index: int | slice) -> RankWindow | Sequence[RankWindow]:
        return self._made()[index]

    def __iter__(self) -> Iterator[RankWindow]:
        return iter(self._made())


class BundleReader:
    """Decodes the messages of one bundle. ``needs_key``: the last one built on what was not received."""

    def __init__(self, shared: Shared) -> None:
        self._reader = BatchReader(shared)
        self.needs_key = False

    def decode(self, message: Message) -> list[Heard]:
        """What the nodes of a message said; raises ``FormatError``. Without a key, what stands by itself."""
        decoded = self._reader.decode(message.body)
        self.needs_key = decoded.needs_key
        whole = decoded.batch
        counts = np.array([part.rows for part in message.parts], np.int64)
        if counts.shape != (len(message.parts), len(COUNTED)) or (counts < 0).any():
            raise FormatError("the parts of a message do not fit together")
        ends = np.cumsum(counts, axis=0)
        have = [len(whole.samples), int(ends[-1, 1]), len(whole.work), len(whole.all_flows), _rows(whole.events)]
        if self.needs_key:
            have[:4] = [0, 0, 0, 0]
            ends[:, :4] = counts[:, :4] = 0
        if have[0] != ends[-1, 0] or have[2:] != ends[-1, 2:].tolist():
            raise FormatError("the parts of a message do not fit its tables")
        return [self._heard(part, whole, ends[at] - counts[at], ends[at]) for at, part in enumerate(message.parts)]

    def _heard(self, part: Part, whole: NodeBatch, begin: NDArray[np.int64], end: NDArray[np.int64]) -> Heard:
        (s0, w0, k0, f0, e0), (s1, w1, k1, f1, e1) = begin.tolist(), end.tolist()
        batch = NodeBatch(**{name: getattr(part.head, name) for name in HEAD})
        batch.samples, batch.windows = whole.samples[s0:s1], _Slice(whole.windows, w0, w1) if w1 > w0 else ()
        batch.work, batch.all_flows = whole.work[k0:k1], whole.all_flows[f0:f1]
        batch.events = whole.events[e0:e1] if whole.events is not None and e1 > e0 else None
        if self.needs_key:
            batch.looked = False
        decoders = more_fields()
        for name, raw in part.more.items():
            decoder = decoders.get(name)
            if decoder is not None:
                try:
                    setattr(batch, name, decoder.decode(raw))
                except UNDECODABLE as error:
                    raise FormatError(f"{name} of a node is not what it should be: {error}") from error
        return Heard(part.token, part.node, part.life, part.first, part.last, batch, part.missed)


def _rows(events: NDArray[Any] | None) -> int:
    return 0 if events is None else len(events)


def decode(data: bytes) -> Message:
    """A message; raises ``FormatError``."""
    try:
        found: Message = _decoder.decode(data)
    except UNDECODABLE as error:
        raise FormatError(f"this is nothing a hearing worker says: {error}") from error
    return found
