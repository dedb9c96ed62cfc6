"""The memory of a target, as its owner may have made it: communicators, proxies, connectors, networks, and the shim's frame.

An input is a list of changes to what is read of a real process: a change names the n-th word that is read in a look at the
unchanged memory, so that none is wasted on bytes nobody reads.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.harness import Target, scratch_file
from fuzz.mutate import WORDS, of_bytes
from ncclwatch.collect.aggregate import Aggregator
from ncclwatch.collect.device import decode as decode_frame
from ncclwatch.model import frame_layout
from ncclwatch.model.state import Transport
from ncclwatch.target import image
from ncclwatch.target.decode import Decoder
from ncclwatch.target.frame import FrameFile
from ncclwatch.target.image import RecordedProcess
from ncclwatch.target.maps import Mapping
from ncclwatch.target.memory import PAGE_SIZE, Range
from ncclwatch.target.recorded import ImageReader
from ncclwatch.target.sampler import Sampler
from ncclwatch.wire.contexts import VerbsFile, find_contexts, find_queues
from ncclwatch.wire.nccl_connections import net_connections
from ncclwatch.wire.nccl_queues import pairs_of, queue_owners, remote_address
from ncclwatch.wire.nccl_sockets import connection_sockets

FIXTURES = Path(__file__).parents[2] / "fixtures"
CHANGE = struct.Struct("<HBBQ")
"""The number of the word, what is done (see ``_value``), an offset in bytes into it, a value."""
MOST_CHANGES = 24


def targets() -> list[Target]:
    """All of this module."""
    return [
        Target("memory", "what NCCL keeps in a target's memory", _seeds, _memory, _of_changes, 1 + 12 * MOST_CHANGES, quick=60),
        Target(
            "memory-search",
            "the same, searched for communicators first",
            _seeds,
            _search,
            _of_changes,
            1 + 12 * MOST_CHANGES,
            quick=30,
        ),
        Target(
            "memory-wire",
            "the same, and its network's objects and queue pairs",
            _seeds,
            _wire,
            _of_changes,
            1 + 12 * MOST_CHANGES,
            quick=40,
        ),
        Target("shim-frame", "the frame of the counter shim", _frame_seeds, _frame, of_bytes, 1 << 12, quick=40),
    ]


class _Noting(ImageReader):
    """Notes which ranges are read."""

    def __init__(self, pages: dict[int, bytes], mappings: Sequence[Mapping]) -> None:
        super().__init__(pages, mappings)
        self.asked: dict[Range, None] = {}

    def read(self, address: int, size: int) -> bytes:
        self.asked[address, size] = None
        return super().read(address, size)

    def read_many(self, ranges: Sequence[Range], *, again: bool = False) -> list[bytes | None]:
        self.asked |= dict.fromkeys(ranges)
        return super().read_many(ranges, again=again)


@dataclass(frozen=True)
class _Image:
    """A recorded process and the addresses of the words that a look at it reads."""

    process: RecordedProcess
    pages: dict[int, bytes]
    words: list[int]
    found: dict[int, str]


@cache
def _images() -> tuple[_Image, ...]:
    files = sorted(FIXTURES.glob("hung-*.ncclwatch"))
    chosen = [file for file in files if "socket" in file.name] + [
        file for file in files if "2.27.5" in file.name and "socket" not in file.name
    ]
    found = []
    for file in chosen:
        process = image.read_image(file)[0]
        sample = process.samples[-1]
        reader = _Noting(sample.pages, process.mappings)
        _look(process, reader, sample.found, search=False)
        words: dict[int, None] = {}
        for address, size in reader.asked:
            words |= dict.fromkeys(range(address, address + min(size, 512), 8))
        found.append(_Image(process, sample.pages, [word for word in words if word & -PAGE_SIZE in sample.pages], sample.found))
    return tuple(found)


def _look(process: RecordedProcess, reader: ImageReader, found: dict[int, str], *, search: bool) -> tuple[Sampler, Any]:
    sampler = Sampler(reader, process.layout, process.load_bias, keep=search)
    if search:
        sampler.search(0.2)
    sampler.expect(found)
    sample = sampler.sample(process.info, process.samples[-1].facts)
    if search:  # a second look, in which what lasts is taken from the first
        sample = sampler.sample(process.info, process.samples[-1].facts)
    return sampler, sample


def _seeds() -> list[bytes]:
    source = random.Random("memory")
    return [bytes([number]) for number in range(len(_images()))] + [
        bytes([number % 5]) + b"".join(_change(source) for _ in range(1 + number % 4)) for number in range(60)
    ]


def _change(source: random.Random) -> bytes:
    value = source.choice((source.choice(WORDS), source.randrange(1 << 16), source.getrandbits(64)))
    return CHANGE.pack(source.randrange(1 << 16), source.randrange(8), source.randrange(8), value & (1 << 64) - 1)


def _of_changes(data: bytes, source: random.Random) -> bytes:
    """Changes are put in, left out, doubled and changed."""
    head, changes = data[:1], [data[at : at + CHANGE.size] for at in range(1, len(data), CHANGE.size)]
    kind = source.randrange(6)
    if kind == 0 or not changes:
        changes.insert(source.randrange(len(changes) + 1), _change(source))
    elif kind == 1:
        del changes[source.randrange(len(changes))]
    elif kind == 2:
        head = bytes([source.randrange(256)])
    elif kind == 3:
        changes[source.randrange(len(changes))] = _change(source)
    else:
        at = source.randrange(len(changes))
        changes[at] = of_bytes(changes[at], source)[: CHANGE.size].ljust(CHANGE.size, b"\0")
    return head + b"".join(changes)


def _changed(data: bytes) -> tuple[_Image, dict[int, bytes]]:
    """The recorded process, and its pages with the changes in them."""
    known = _images()[(data[0] if data else 0) % len(_images())]
    pages = dict(known.pages)
    for number in range(min((len(data) - 1) // CHANGE.size, MOST_CHANGES)):
        word, kind, offset, value = CHANGE.unpack_from(data, 1 + number * CHANGE.size)
        address = known.words[word % len(known.words)]
        page, at = address & -PAGE_SIZE, address % PAGE_SIZE
        if page not in pages:
            continue
        if kind == 7:
            del pages[page]
            continue
        new = _value(known, kind, offset, value, int.from_bytes(pages[page][at : at + 8], "little"))
        content = pages[page]
        pages[page] = (content[:at] + new + content[at + len(new) :])[:PAGE_SIZE]
    return known, pages


def _value(known: _Image, kind: int, offset: int, value: int, old: int) -> bytes:
    """A literal of 8 or 4 bytes, a pointer to something that is read, the old with something added, or one of the well-known."""
    if kind == 0:
        return value.to_bytes(8, "little")
    if kind == 1:
        return (value & 0xFFFFFFFF).to_bytes(4, "little")
    if kind in (2, 3):
        return (known.words[value % len(known.words)] + (offset * 8 if kind == 3 else 0)).to_bytes(8, "little")
    if kind == 4:
        return ((old + value) & (1 << 64) - 1).to_bytes(8, "little")
    if kind == 5:
        return WORDS[value % len(WORDS)].to_bytes(8, "little")
    return (WORDS[value % len(WORDS)] & 0xFFFFFFFF).to_bytes(4, "little")


def _memory(data: bytes) -> None:
    known, pages = _changed(data)
    _, sample = _look(known.process, ImageReader(pages, known.process.mappings), known.found, search=False)
    _said(sample)


def _search(data: bytes) -> None:
    known, pages = _changed(data)
    _, sample = _look(known.process, ImageReader(pages, known.process.mappings), known.found, search=True)
    _said(sample)


def _said(sample: Any) -> None:
    """What becomes of it on the node: windows of its ranks, and a batch."""
    aggregator = Aggregator(calls_plane=False)
    aggregator.add_process(sample.process, sample.time_ns)
    aggregator.feed_sample(sample)
    aggregator.feed_sample(replace(sample, time_ns=sample.time_ns + 10**9))
    windows = aggregator.windows(sample.time_ns + 10**9)
    assert len(windows) <= 1024
    _encoded(sample, windows)


def _encoded(sample: Any, windows: Any) -> None:
    from ncclwatch.collect.batch import NodeBatch
    from ncclwatch.messaging.reader import BatchReader
    from ncclwatch.messaging.writer import BatchWriter

    batch = NodeBatch(
        host="a",
        boot_id="b",
        sequence=0,
        time_ns=sample.time_ns,
        wall_ns=sample.wall_ns,
        looked=True,
        samples=(sample,),
        windows=windows,
    )
    decoded = BatchReader().decode(BatchWriter().encode(batch))
    list(decoded.batch.windows)


def _wire(data: bytes) -> None:
    known, pages = _changed(data)
    process = known.process
    reader = ImageReader(pages, process.mappings)
    sampler, _ = _look(process, reader, known.found, search=False)
    decoder = Decoder(reader, process.layout)
    connections = net_connections(decoder, process.load_bias, sampler.states)
    for connection in connections:
        pairs_of(decoder, connection)
        remote_address(decoder, connection)
        connection_sockets(decoder, connection.communicator, _everything())
    for state in sampler.states:
        wanted = [connector for connector in state.connectors if connector.transport is Transport.NET]
        queue_owners(decoder, state.record.hash, state.record.rank, wanted)
    files = [VerbsFile(number, "uverbs0", "mlx5_0") for number in range(3)]
    contexts = find_contexts(reader, files, process.layout, process.load_bias or 0)
    find_queues(reader, contexts)


@cache
def _everything() -> dict[int, Any]:
    """Every small descriptor is a socket: what is read is believed as far as it can be."""
    return dict.fromkeys(range(3, 64))


# --- the shim's frame --------------------------------------------------------------------------------------------------


def _empty_frame() -> bytearray:
    frame = np.zeros((), frame_layout.FRAME_DTYPE)
    header = frame["header"]
    header["magic"], header["version"], header["size"] = (
        frame_layout.FRAME_MAGIC,
        frame_layout.FRAME_VERSION,
        frame_layout.FRAME_DTYPE.itemsize,
    )
    header["entry"], header["sampler"] = 1, 1
    return bytearray(frame.tobytes())


@cache
def _frame_base() -> bytes:
    return bytes(_empty_frame())


def _frame_seeds() -> list[bytes]:
    """Lists of (place, value): the records of a frame with small numbers in them."""
    source = random.Random("frame")
    size = len(_frame_base())
    found = []
    for _ in range(40):
        places = [source.choice((source.randrange(256), source.randrange(size), source.randrange(0, size, 8))) for _ in range(20)]
        found.append(b"".join(struct.pack("<IQ", place, source.choice((1, 2, source.choice(WORDS)))) for place in places))
    return found


def _frame(data: bytes) -> None:
    content = bytearray(_frame_base())
    for at in range(0, len(data) - 11, 12):
        place, value = struct.unpack_from("<IQ", data, at)
        place %= len(content) - 8
        content[place : place + 8] = value.to_bytes(8, "little")
    with scratch_file(bytes(content)) as path:
        frame = FrameFile._open(str(path))
        if frame is None:
            return
        with frame:
            repr(decode_frame(frame.read(), answered=True))
