"""Batches on disk until the engine has them, so that an engine out of reach, or an agent that is killed, costs little.

Every batch is appended to a segment file before it is sent; whole segments go when the engine has acknowledged all that is in
them. When a limit is reached, ordinary batches (looks at a running job) go first, oldest first; those that verdicts are made of
(changes, losses, standstill, key batches) stay longest. What went is counted.

A segment is a file ``LIFE-NUMBER.seg``: records of a head and the encoded batch. A record cut off by a crash ends its segment.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ncclwatch.errors import NcclwatchError
from ncclwatch.messaging.limits import MAX_FRAME

_RECORD = struct.Struct("<4sIqdB3x")
"""Mark, length, number, time of writing (seconds since the epoch), whether it is relevant to a verdict."""
_MARK = b"nwSR"
SEGMENT_BYTES = 1 << 20
MEMORY_BYTES = 8 << 20
"""Without a folder batches are kept in memory, up to this."""


class SpoolError(NcclwatchError):
    """The spool's folder cannot be used."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One batch in the spool."""

    life: str
    n: int
    written: float
    relevant: bool
    data: bytes


@dataclass(slots=True)
class _Slot:
    """Where a batch lies: in memory, or in a file."""

    life: str
    n: int
    written: float
    relevant: bool
    size: int
    data: bytes | None
    segment: _Segment | None = None
    offset: int = 0


@dataclass(slots=True)
class _Segment:
    path: Path
    size: int = 0
    live: int = 0
    """Batches in it that are still wanted."""


@dataclass(slots=True)
class Dropped:
    """What the limits cost since this was last asked."""

    batches: int = 0
    first: float = 0.0
    last: float = 0.0

    def add(self, written: float) -> None:
        """One more."""
        self.first = written if not self.batches else min(self.first, written)
        self.last = max(self.last, written)
        self.batches += 1


@dataclass(slots=True)
class Spool:
    """Batches in order, of earlier lives first. Not for several threads at once.

    ``folder``: where segments lie, ``None`` for memory only. ``max_bytes`` and ``max_age_s`` are the limits.
    """

    life: str
    folder: Path | None = None
    max_bytes: int = 64 << 20
    max_age_s: float = 3600.0
    dropped: Dropped = field(default_factory=Dropped)
    nbytes: int = 0
    last_alive: float | None = None
    """When an earlier life last wrote here, seconds since the epoch."""
    _slots: deque[_Slot] = field(default_factory=deque)
    _current: _Segment | None = None
    _file: IO[bytes] | None = None
    _next_segment: int = 0
    _broken: str = ""

    def __post_init__(self) -> None:
        if self.folder is None:
            self.max_bytes = min(self.max_bytes, MEMORY_BYTES)
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._load()
            # From now on this life has left a trace, though earlier ones are sent and forgotten before its first batch.
            self._open_segment()
        except OSError as error:
            raise SpoolError(
                f"the spool {self.folder} cannot be used: {error.strerror}", "choose another with --spool"
            ) from error

    # --- what is there -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def problem(self) -> str:
        """Why batches are kept in memory only although a folder was given; empty when they are not."""
        return self._broken

    @property
    def lives(self) -> list[str]:
        """Lives with batches here, oldest first, our own last."""
        found = dict.fromkeys(slot.life for slot in self._slots)
        found.pop(self.life, None)
        return [*found, self.life]

    def after(self, sent: int) -> Iterator[Entry]:
        """The batches from position ``sent`` on (0 is the oldest), in order."""
        for i in range(sent, len(self._slots)):
            slot = self._slots[i]
            data = slot.data if slot.data is not None else self._read(slot)
            yield Entry(slot.life, slot.n, slot.written, slot.relevant, data)

    # --- in and out ----------------------------------------------------------------------------------------------------

    def append(self, n: int, data: bytes, *, relevant: bool) -> None:
        """Keep a batch of our own life."""
        now = time.time()
        slot = _Slot(self.life, n, now, relevant, len(data), None)
        if (self.folder is not None and not self._write(slot, data)) or self.folder is None:
            slot.data = data
        self._slots.append(slot)
        self.nbytes += slot.size

    def acknowledge(self, life: str, upto: int) -> int:
        """The engine has everything of a life up to a number; returns how many batches went from the front."""
        gone = 0
        while self._slots and self._slots[0].life == life and self._slots[0].n <= upto:
            self._forget(self._slots.popleft())
            gone += 1
        return gone

    def enforce(self) -> int:
        """Keep to the limits: drop what is too old, then ordinary batches, then relevant ones, oldest first.

        Returns how many went; positions of the others have changed then.
        """
        oldest = time.time() - self.max_age_s
        limit = min(self.max_bytes, MEMORY_BYTES) if self._broken else self.max_bytes
        before = len(self._slots)
        while self._slots and self._slots[0].written < oldest:
            self._drop(self._slots.popleft())
        if self.nbytes > limit:
            # To nine tenths, so that this need not be done again at once.
            self._thin(int(limit * 0.9))
        return before - len(self._slots)

    def _thin(self, limit: int) -> None:
        kept: deque[_Slot] = deque()
        for slot in self._slots:
            if self.nbytes > limit and not slot.relevant:
                self._drop(slot)
            else:
                kept.append(slot)
        while kept and self.nbytes > limit:
            self._drop(kept.popleft())
        self._slots = kept
        self._compact()

    def _drop(self, slot: _Slot) -> None:
        self.dropped.add(slot.written)
        self._forget(slot)

    def take_dropped(self) -> Dropped:
        """What the limits cost since the last time."""
        found, self.dropped = self.dropped, Dropped()
        return found

    def close(self) -> None:
        """Let go of files; what is not acknowledged stays on disk for the next life."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self.folder is not None and not self._slots and self._current is not None:
            self._current.path.unlink(missing_ok=True)

    # --- files ---------------------------------------------------------------------------------------------------------

    def _write(self, slot: _Slot, data: bytes) -> bool:
        """Whether the batch is on disk; a disk that is full or gone is noted, and memory takes over."""
        try:
            if self._file is None or self._current is None or self._current.size >= SEGMENT_BYTES:
                self._open_segment()
            assert self._file is not None and self._current is not None  # noqa: S101
            head = _RECORD.pack(_MARK, len(data), slot.n, slot.written, slot.relevant)
            self._file.write(head + data)
            # Into the kernel's hands, not onto the platter: it outlives this process, which is what a spool is for.
            self._file.flush()
        except OSError as error:
            self._broken = f"the spool cannot be written: {error.strerror}"
            self._file = None
            return False
        slot.segment, slot.offset = self._current, self._current.size + _RECORD.size
        self._current.size += _RECORD.size + len(data)
        self._current.live += 1
        self._broken = ""
        return True

    def _open_segment(self) -> None:
        assert self.folder is not None  # noqa: S101
        if self._file is not None:
            self._file.close()
        former = self._current
        path = self.folder / f"{self.life}-{self._next_segment:08d}.seg"
        self._next_segment += 1
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
        self._current = _Segment(path)
        if former is not None and not former.live:
            former.path.unlink(missing_ok=True)

    def _read(self, slot: _Slot) -> bytes:
        if slot.segment is None:
            return b""
        try:
            with slot.segment.path.open("rb") as file:
                file.seek(slot.offset)
                return file.read(slot.size)
        except OSError:
            return b""

    def _forget(self, slot: _Slot) -> None:
        self.nbytes -= slot.size
        segment = slot.segment
        if segment is None:
            return
        segment.live -= 1
        if not segment.live and segment is not self._current:
            segment.path.unlink(missing_ok=True)

    def _compact(self) -> None:
        """Rewrite segments of which little is still wanted, or dropping batches would give no room back."""
        by_segment: dict[int, tuple[_Segment, list[_Slot]]] = {}
        for slot in self._slots:
            if slot.segment is not None and slot.segment is not self._current:
                by_segment.setdefault(id(slot.segment), (slot.segment, []))[1].append(slot)
        for segment, slots in by_segment.values():
            if sum(slot.size for slot in slots) * 2 > segment.size:
                continue
            life = slots[0].life
            path = segment.path.with_name(f"{life}-{segment.path.stem.rpartition('-')[2]}.new")
            try:
                placed, size = [], 0
                with path.open("wb") as file:
                    for slot in slots:
                        data = self._read(slot)
                        file.write(_RECORD.pack(_MARK, len(data), slot.n, slot.written, slot.relevant) + data)
                        placed.append(size + _RECORD.size)
                        size += _RECORD.size + len(data)
                path.replace(segment.path)
            except OSError:
                path.unlink(missing_ok=True)
                continue
            segment.size = size
            for slot, offset in zip(slots, placed, strict=True):
                slot.offset = offset

    def _load(self) -> None:
        """What earlier lives left behind, in the order it was written."""
        assert self.folder is not None  # noqa: S101
        found: list[tuple[float, str, Path]] = []
        for path in self.folder.glob("*.seg"):
            try:
                found.append((path.stat().st_mtime, path.name, path))
            except OSError:
                continue
        if found:
            self.last_alive = max(mtime for mtime, _, _ in found)
        slots: list[_Slot] = []
        for _, _, path in sorted(found):
            segment = _Segment(path)
            own = list(_scan(path, segment))
            if not own:
                path.unlink(missing_ok=True)
            slots += own
        lives = dict.fromkeys(slot.life for slot in sorted(slots, key=lambda slot: slot.written))
        order = {life: place for place, life in enumerate(lives)}
        self._slots = deque(sorted(slots, key=lambda slot: (order[slot.life], slot.n)))
        self.nbytes = sum(slot.size for slot in self._slots)
        self.enforce()


def _scan(path: Path, segment: _Segment) -> Iterator[_Slot]:
    """The whole records of a segment; what follows a damaged one is not believed."""
    life = path.stem.rpartition("-")[0]
    if not life or len(life) > 64:
        return
    try:
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            while len(head := file.read(_RECORD.size)) == _RECORD.size:
                mark, size, n, written, relevant = _RECORD.unpack(head)
                offset = file.tell()
                if mark != _MARK or size > MAX_FRAME or offset + size > end:
                    return
                file.seek(size, os.SEEK_CUR)
                segment.live += 1
                segment.size = offset + size
                yield _Slot(life, n, written, bool(relevant), size, None, segment, offset)
    except OSError:
        return
