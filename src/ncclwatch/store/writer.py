"""Writes the container: whole frames, one write each, into a file that grows or into a ring of slots."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from ncclwatch.errors import UsageError
from ncclwatch.store.container import FRAME_BYTES, HEADER_BYTES, Header, pack_frame, pack_header
from ncclwatch.text import clean, size

SLOTS = 8
MIN_CAP = 512 << 10
"""A ring smaller than this would hold only seconds."""


class Full(Exception):  # noqa: N818 - a state the recorder waits out, not an error that ends anything
    """The frame was not written: the disk is full, or it fails. Nothing of the frame is left in the file."""


class TooLarge(Exception):  # noqa: N818 - see above
    """The frame does not fit into a slot of the ring."""


class ContainerWriter:
    """One recording being written. ``cap_bytes`` bounds the file: the oldest eighth is overwritten when it is full.

    Raises ``UsageError`` when the file cannot be made.
    """

    def __init__(self, path: Path, *, cap_bytes: int | None = None) -> None:
        if cap_bytes is not None and cap_bytes < MIN_CAP:
            raise UsageError(f"{size(cap_bytes)} would hold only seconds", f"allow {size(MIN_CAP)} or more")
        slot_bytes = min((cap_bytes - HEADER_BYTES) // SLOTS, (1 << 32) - 1) if cap_bytes else 0
        self.path = path
        self.header = Header(slot_bytes, SLOTS if cap_bytes else 0, time.time_ns())
        self.segment = 0
        self.written = 0
        """Bytes handed to the kernel, overwritten ones included."""
        self._at = HEADER_BYTES
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        except FileExistsError as error:
            raise UsageError(f"{clean(str(path))} exists", "choose another name, or remove it first") from error
        except OSError as error:
            raise UsageError(
                f"cannot write {clean(str(path))}: {error.strerror or error}", "choose another place with -o"
            ) from error
        try:
            self._put(pack_header(self.header), 0)
        except Full as error:
            self.close()
            with contextlib.suppress(OSError):
                path.unlink()
            raise UsageError(f"cannot write {clean(str(path))}: {error}", "make room, or choose another place with -o") from error

    def begin_segment(self) -> None:
        """The frames that follow can be read without those before. A ring goes on to its next slot."""
        self.segment += 1
        if self.header.slot_bytes:
            self._at = HEADER_BYTES + (self.segment - 1) % self.header.slots * self.header.slot_bytes

    def room(self, payload_bytes: int) -> bool:
        """Whether a payload fits into what is left of the slot."""
        if not self.header.slot_bytes:
            return True
        end = HEADER_BYTES + ((self.segment - 1) % self.header.slots + 1) * self.header.slot_bytes
        return self._at + FRAME_BYTES + payload_bytes <= end

    def append(self, kind: int, payload: bytes, *, time_ns: int, key: bool = False) -> None:
        """Write one frame. Raises ``Full`` or ``TooLarge``; then the file is as it was."""
        if not self.room(len(payload)):
            raise TooLarge
        frame = pack_frame(kind, payload, segment=self.segment, time_ns=time_ns, key=key)
        self._put(frame, self._at)
        self._at += len(frame)

    def sync(self) -> None:
        """Have the kernel put everything on the disk; until then a power failure, but no crash of ours, can lose it."""
        with contextlib.suppress(OSError):
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _put(self, data: bytes, at: int) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], at + done)
        except OSError as error:
            # What was begun is taken back where it is the end of the file; in a ring its checksum does not hold.
            with contextlib.suppress(OSError):
                if not self.header.slot_bytes:
                    os.ftruncate(self._fd, at)
            raise Full(error.strerror or str(error)) from error
        self.written += len(data)
