"""The container of a recording: frames with length and checksum, readable up to the last whole one whatever happened.

A file is a header and frames. There is no index: a reader walks from frame to frame, and past damage looks for the next marker
whose checksum holds. With a size cap the file is a ring of equal *slots*; each holds one *segment*, which begins with what a
reader needs to start there, and when the last slot is full the oldest segment is overwritten. Every frame carries the number of
its segment, so what is left of an overwritten one is recognised.

Layout (little endian), version 1:

- header, 64 bytes: magic ``ncclwREC``, version u16, reserved u16, slot bytes u32 (0: no ring), created u64 (ns since the epoch),
  slots u32, zeros, crc32 u32 of the 60 bytes before;
- frame, 28 bytes and its payload: marker ``nwF\\x9e``, kind u8, flags u8 (1: key), reserved u16, payload bytes u32,
  crc32 u32 of header (with this field zero) and payload, segment u32, time u64 (ns since the epoch).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from ncclwatch.errors import TargetError
from ncclwatch.text import clean

MAGIC = b"ncclwREC"
VERSION = 1
HEADER_BYTES = 64
_HEADER = struct.Struct("<8sHHIQI")
_CRC = struct.Struct("<I")

MARKER = b"nwF\x9e"
_FRAME = struct.Struct("<4sBBHIIIQ")
FRAME_BYTES = _FRAME.size
KEY = 1

MAX_PAYLOAD = 32 << 20
"""Bytes of one payload; a length field beyond it is damage."""
MAX_SLOTS = 4096
_SEARCH_BYTES = 1 << 20


class Kind(IntEnum):
    """What a frame holds."""

    META = 1
    """JSON: who recorded what, where. Begins every segment."""
    BATCH = 2
    """One batch in the encoding of ``messaging.writer``."""
    GAP = 3
    """JSON: batches that could not be written, and why."""
    END = 4
    """JSON: why the recording ended; there is none after a crash."""


@dataclass(frozen=True, slots=True)
class Header:
    """How the file is laid out. ``slot_bytes`` is 0 for a file that only grows; ``created_ns`` is since the epoch."""

    slot_bytes: int
    slots: int
    created_ns: int


@dataclass(frozen=True, slots=True)
class FrameRef:
    """Where a whole frame lies: ``offset`` is that of its payload."""

    kind: int
    key: bool
    segment: int
    time_ns: int
    offset: int
    length: int


def pack_header(header: Header) -> bytes:
    """The file's first 64 bytes."""
    raw = _HEADER.pack(MAGIC, VERSION, 0, header.slot_bytes, header.created_ns, header.slots).ljust(HEADER_BYTES - 4, b"\0")
    return raw + _CRC.pack(zlib.crc32(raw))


def unpack_header(raw: bytes, name: str) -> Header:
    """The header of a file; raises ``TargetError`` when it is no recording, or of a version that cannot be read."""
    if raw[: len(MAGIC)] != MAGIC:
        raise TargetError(f"{clean(name)} is no recording", "name a file written by 'ncclwatch record'")
    if len(raw) < HEADER_BYTES:
        raise TargetError(f"{clean(name)} holds nothing: it was cut off within its header")
    _, version, _, slot_bytes, created_ns, slots = _HEADER.unpack_from(raw)
    if version != VERSION:
        raise TargetError(
            f"{clean(name)} is a recording of version {version}, and this is a reader of version {VERSION}",
            "read it with the version of ncclwatch that wrote it",
        )
    if _CRC.unpack_from(raw, HEADER_BYTES - 4)[0] != zlib.crc32(raw[: HEADER_BYTES - 4]):
        raise TargetError(f"the header of {clean(name)} is damaged", "nothing in it can be relied upon")
    if slot_bytes and not (0 < slots <= MAX_SLOTS and slot_bytes >= FRAME_BYTES):
        raise TargetError(f"the header of {clean(name)} makes no sense")
    return Header(slot_bytes, slots, created_ns)


def pack_frame(kind: int, payload: bytes, *, segment: int, time_ns: int, key: bool = False) -> bytes:
    """A whole frame."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError("payload too long")
    flags = KEY if key else 0
    blank = _FRAME.pack(MARKER, kind, flags, 0, len(payload), 0, segment, time_ns)
    crc = zlib.crc32(payload, zlib.crc32(blank))
    return _FRAME.pack(MARKER, kind, flags, 0, len(payload), crc, segment, time_ns) + payload


def is_recording(path: Path) -> bool:
    """Whether a file begins like a recording."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class Container:
    """Reads a recording, also one that is still written. ``damaged`` counts bytes that belonged to no whole frame."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
            self._size = path.stat().st_size
        except OSError as error:
            raise TargetError(f"cannot read {clean(str(path))}: {error.strerror or error}") from error
        self.header = unpack_header(self._file.read(HEADER_BYTES), str(path))
        self.damaged = 0
        self.cut_off = False
        """Whether the last frame is not whole: the writer was killed, or is writing it."""

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def payload(self, frame: FrameRef) -> bytes:
        """The payload of a frame that ``frames`` gave."""
        self._file.seek(frame.offset)
        return self._file.read(frame.length)

    def frames(self) -> Iterator[FrameRef]:
        """Every whole frame, in the order in which they were written. ``damaged`` and ``cut_off`` are set on the way."""
        self.damaged, self.cut_off = 0, False
        self._size = self.path.stat().st_size
        if self.header.slot_bytes:
            yield from self._ring()
        else:
            yield from self._walk(HEADER_BYTES, self._size)

    def _ring(self) -> Iterator[FrameRef]:
        slot_bytes = self.header.slot_bytes
        found = []
        for slot in range(self.header.slots):
            begin = HEADER_BYTES + slot * slot_bytes
            first = self._frame_at(begin, min(begin + slot_bytes, self._size))
            if first is not None:
                found.append((first.segment, begin))
        for segment, begin in sorted(found):
            at, end = begin, min(begin + slot_bytes, self._size)
            while (frame := self._frame_at(at, end)) is not None and frame.segment == segment:
                yield frame
                at = frame.offset + frame.length

    def _walk(self, at: int, end: int) -> Iterator[FrameRef]:
        while at < end:
            frame = self._frame_at(at, end)
            if frame is None:
                further = self._search(at + 1, end)
                if further is None:
                    self.cut_off = True
                    self.damaged += end - at
                    return
                self.damaged += further - at
                at = further
                continue
            yield frame
            at = frame.offset + frame.length

    def _frame_at(self, at: int, end: int) -> FrameRef | None:
        """The frame that begins there, if it is whole and its checksum holds."""
        if end - at < FRAME_BYTES:
            return None
        self._file.seek(at)
        raw = self._file.read(FRAME_BYTES)
        if len(raw) < FRAME_BYTES or raw[:4] != MARKER:
            return None
        _, kind, flags, reserved, length, crc, segment, time_ns = _FRAME.unpack(raw)
        if length > MAX_PAYLOAD or at + FRAME_BYTES + length > end:
            return None
        blank = _FRAME.pack(MARKER, kind, flags, reserved, length, 0, segment, time_ns)
        payload = self._file.read(length)
        if len(payload) < length or zlib.crc32(payload, zlib.crc32(blank)) != crc:
            return None
        return FrameRef(kind, bool(flags & KEY), segment, time_ns, at + FRAME_BYTES, length)

    def _search(self, at: int, end: int) -> int | None:
        """Where the next whole frame begins at or after ``at``."""
        while at < end:
            self._file.seek(at)
            block = self._file.read(min(_SEARCH_BYTES + len(MARKER) - 1, end - at))
            place = block.find(MARKER)
            while place >= 0:
                if self._frame_at(at + place, end) is not None:
                    return at + place
                place = block.find(MARKER, place + 1)
            if len(block) < len(MARKER):
                return None
            at += max(len(block) - len(MARKER) + 1, 1)
        return None
