"""The journal: what is not yet in a Parquet file, appended frame by frame, so that a kill at any moment loses at most what had
not been handed to the kernel.

A frame is ``length u32, crc32 u32, payload``, little-endian; the payload is MessagePack: ``[wall_ns, first number, rows]``, a row
``[table, values]`` as of :func:`ncclwatch.history.tables.fitted`. A frame without rows is a sign of life. The file's owner holds
a lock on it (flock) while it lives: whoever gets the lock knows that the owner is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ncclwatch.history.tables import TABLES, columns, fit

FOLDER, SUFFIX, NEW = "journal", ".journal", ".new"
NAME = re.compile(r"(?P<life>[0-9a-z-]{1,64})\.(?P<segment>\d{1,9})\.journal")
_FRAME = struct.Struct("<II")
MAX_FRAME = 64 << 20
"""Bound: bytes of a frame; a longer one is damage."""
MAX_JOURNAL = 1 << 30
"""Bound: bytes of a journal that are read."""

Numbered = tuple[str, list[Any]]
"""(table, values in the order of its columns, life and number at their end)."""


def folder(root: Path) -> Path:
    """Where the journals of a history are."""
    return root / FOLDER


class Journal:
    """One segment, written by its owner. Raises ``OSError`` where it cannot be made or written; a frame is whole or absent."""

    def __init__(self, root: Path, life: str, segment: int) -> None:
        self.path = folder(root) / f"{life}.{segment}{SUFFIX}"
        self.segment = segment
        self.rows = 0
        self.size = 0
        self.began = time.monotonic()
        new = self.path.with_suffix(NEW)
        self._fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # By this name nobody ever sees it without its lock.
        new.rename(self.path)

    def append(self, wall_ns: int, first: int, rows: Sequence[Sequence[Any]]) -> None:
        """Write one frame. Raises ``OSError`` (the disk is full); then the file is as it was."""
        payload = msgspec.msgpack.encode((wall_ns, first, rows))
        data = _FRAME.pack(len(payload), zlib.crc32(payload)) + payload
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self.size + done)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)
        self.rows += len(rows)

    def sync(self) -> None:
        """Have it on the disk: until then a power failure, but no crash of ours, can lose it."""
        with contextlib.suppress(OSError):
            os.fdatasync(self._fd)

    def close(self, *, remove: bool = False) -> None:
        """Let go of it; ``remove`` once all of it is in files."""
        if remove:
            self.path.unlink(missing_ok=True)
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = -1


@dataclass(slots=True)
class Read:
    """What a journal holds: its rows, the time of its last whole frame (0: none), the highest number (-1: none), and how many
    bytes at its end are no whole frame.
    """

    life: str
    segment: int
    rows: list[Numbered] = field(default_factory=list)
    last_ns: int = 0
    last_number: int = -1
    damaged: int = 0
    ended: bool = False
    """Whether its writer said that it ended."""


def read(path: Path) -> Read:
    """Every whole frame of a journal, up to the first that is damaged. Raises ``OSError``; whatever is in it, nothing else."""
    named = NAME.fullmatch(path.name)
    found = Read(named["life"], int(named["segment"])) if named else Read("", 0)
    with path.open("rb") as file:
        data = file.read(MAX_JOURNAL)
    at = 0
    for end, wall_ns, first, rows in _frames(data):
        taken = [row for number, one in enumerate(rows, first) if (row := _row(one, found.life, number)) is not None]
        found.rows += taken
        found.last_ns, found.last_number = max(found.last_ns, wall_ns), max(found.last_number, first + len(rows) - 1)
        found.ended = found.ended or any(table == "lives" and values[3] == "end" for table, values in taken)
        at = end
    found.damaged = len(data) - at
    return found


def _frames(data: bytes) -> Iterator[tuple[int, int, int, list[Any]]]:
    """(where it ends, wall time, first number, rows) of every whole frame."""
    decoder = msgspec.msgpack.Decoder(tuple[int, int, list[Any]])
    at = 0
    while at + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, at)
        payload = data[at + _FRAME.size : at + _FRAME.size + length]
        if length > MAX_FRAME or len(payload) < length or zlib.crc32(payload) != crc:
            return
        try:
            wall_ns, first, rows = decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError):
            return
        if not (0 <= wall_ns < 1 << 62 and 0 <= first < 1 << 62):
            return
        at += _FRAME.size + length
        yield at, wall_ns, first, rows


def _row(given: Any, life: str, number: int) -> Numbered | None:
    """A row with its number, its values made to fit; ``None`` for what is none."""
    if not (isinstance(given, list) and len(given) == 2 and isinstance(given[1], list)):
        return None
    table, values = given
    if not isinstance(table, str) or table not in TABLES:
        return None
    kinds = list(columns(table).values())[:-2]
    padded = [*values, *[None] * len(kinds)]
    return table, [*(fit(kind, value) for kind, value in zip(kinds, padded, strict=False)), life, number]


def journals(root: Path) -> list[Path]:
    """The journals there are, those of one life in their order."""
    found = [path for path in folder(root).glob(f"*{SUFFIX}") if NAME.fullmatch(path.name)] if folder(root).is_dir() else []
    return sorted(found, key=lambda path: (path.name.split(".")[0], int(path.name.split(".")[1])))


@contextlib.contextmanager
def orphan(path: Path) -> Iterator[bool]:
    """Whether a journal's owner is dead; it is held meanwhile."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        # Its owner may have removed it between the listing and the lock.
        yield path.exists()
    finally:
        os.close(fd)
