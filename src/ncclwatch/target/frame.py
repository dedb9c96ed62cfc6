"""The probing frame of a process, as bytes: finding it, reading it consistently, and writing requests to its sampler.

The frame lies in memory that the process shares (``kernel_counters/frame.h``). It is found among the process's open files, read
by ``pread`` (a file cut short is then an error, not a fault of ours), and believed as little as all else that a target holds:
type, owner, mode and size are checked before it is opened, and nobody waits for anybody: a record that is being written is read
again a few times, then left out and counted as torn.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ncclwatch.errors import NcclwatchError, TargetError, TargetGoneError
from ncclwatch.model import frame_layout as layout
from ncclwatch.target.maps import PROC
from ncclwatch.target.process import read_stat, read_status

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_FILES = 8192
"""Open files of a process that are looked at."""

MAX_REREADS = 3
"""Further attempts at a record that was being written."""

LONGEST_LEASE_S = 60.0
SHORTEST_PERIOD_S = 0.001
LONGEST_PERIOD_S = 1.0

_SIZE = layout.FRAME_DTYPE.itemsize
_LINK = re.compile(r"/memfd:ncclwatch-frame \(deleted\)|.*/ncclwatch-\d+-\d+\.frame( \(deleted\))?")
_REQUEST_AT = layout.FRAME_DTYPE.fields["request"][1] if layout.FRAME_DTYPE.fields else 0


@dataclass(frozen=True, slots=True)
class WantedWord:
    """A word of GPU memory to read: its address, where in host memory NCCL keeps this address, and its size (4 or 8 bytes)."""

    address: int
    held_at: int
    size: int = 8


@dataclass(frozen=True, slots=True)
class FrameImage:
    """One consistent copy of a frame: a record of ``FRAME_DTYPE``, with the records that could not be read in peace zeroed."""

    frame: NDArray[Any]
    torn: int
    time_ns: int


class FrameFile:
    """The frame of one process, held open: it can still be read after the process died. A context manager."""

    def __init__(self, fd: int, path: str, writable: bool) -> None:
        self._fd = fd
        self.path = path
        self.writable = writable
        """Whether words can be asked for."""

    @classmethod
    def find(cls, pid: int, proc: Path = PROC) -> FrameFile | None:
        """The frame of a live process, ``None`` where it has none (or none that may be believed).

        Raises :class:`TargetError` for a frame of another version, :class:`ncclwatch.errors.PrivilegeError` where the kernel
        refuses, :class:`TargetGoneError`.
        """
        start_time, status = read_stat(pid, proc).start_time, read_status(pid, proc)
        pids = {pid, *status.pids}
        for path in _candidates(pid, status.uid, proc):
            frame = cls._open(path)
            if frame is None:
                continue
            header = frame.header()
            # A child that was forked inherits the descriptor, but the frame is its parent's.
            same_time = int(header["start_time"]) == start_time or not _shares_time(pid, proc)
            if int(header["pid"]) in pids and same_time:
                return frame
            frame.close()
        return None

    @classmethod
    def open_path(cls, path: Path) -> FrameFile:
        """A frame that was left as a file (``NCCLWATCH_FRAME_DIR``); raises :class:`TargetError` where it is none."""
        try:
            about = path.lstat()
        except OSError as error:
            raise TargetError(f"cannot read {path}: {error.strerror}", "give the path of a .frame file") from None
        if not stat.S_ISREG(about.st_mode) or about.st_size != _SIZE:
            raise TargetError(f"{path} is no probing frame", "give a file that the counter shim has written")
        frame = cls._open(str(path), flags=os.O_RDONLY | os.O_NOFOLLOW)
        if frame is None:
            raise TargetError(f"{path} is no probing frame", "give a file that the counter shim has written")
        return frame

    @classmethod
    def _open(cls, path: str, flags: int = os.O_RDWR) -> FrameFile | None:
        flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        for access in (flags, (flags & ~os.O_ACCMODE) | os.O_RDONLY):
            try:
                fd = os.open(path, access)
            except OSError:
                continue
            frame = cls(fd, path, access & os.O_ACCMODE == os.O_RDWR)
            try:
                about = os.fstat(fd)
                if stat.S_ISREG(about.st_mode) and about.st_size == _SIZE and int(frame.header()["magic"]) == layout.FRAME_MAGIC:
                    frame._check_version()
                    return frame
            except NcclwatchError:
                frame.close()
                raise
            frame.close()
            return None
        return None

    def _check_version(self) -> None:
        header = self.header()
        if int(header["version"]) != layout.FRAME_VERSION or int(header["size"]) != _SIZE:
            raise TargetError(
                f"the counter shim in this process writes frames of version {int(header['version'])}, this ncclwatch reads "
                f"{layout.FRAME_VERSION}",
                "use the shim that came with this ncclwatch ('ncclwatch shim --print-env') and restart the job",
            )

    def header(self) -> NDArray[Any]:
        """The header alone, not checked for consistency: its members are written one by one."""
        return np.frombuffer(self._read(0, layout.FRAME_HEADER_DTYPE.itemsize), layout.FRAME_HEADER_DTYPE)[0]  # type: ignore[no-any-return]

    def read(self) -> FrameImage:
        """A consistent copy; takes about 0.3 ms. Raises :class:`TargetError` when the file was cut short."""
        first, second = bytearray(self._read(0, _SIZE)), self._read(0, _SIZE)
        before = np.frombuffer(first, "<u4")[_SEQ_WORDS]
        after = np.frombuffer(second, "<u4")[_SEQ_WORDS]
        torn = 0
        for index in np.flatnonzero((before != after) | (before & 1 == 1)).tolist():
            start, size = int(_SEQ_WORDS[index]) * 4, int(_SIZES[index])
            whole = self._reread(start, size)
            torn += whole is None
            first[start : start + size] = whole or bytes(size)
        return FrameImage(np.frombuffer(first, layout.FRAME_DTYPE)[0], torn, time.monotonic_ns())

    def _reread(self, start: int, size: int) -> bytes | None:
        for _ in range(MAX_REREADS):
            one, other = self._read(start, size), self._read(start, 4)
            if one[:4] == other and not one[0] & 1:
                return one
        return None

    def _read(self, start: int, size: int) -> bytes:
        try:
            data = os.pread(self._fd, size, start)
        except OSError as error:
            raise TargetError(f"the probing frame cannot be read: {error.strerror}", "is the process still there?") from None
        if len(data) != size:
            raise TargetError("the probing frame was cut short", "restart the job, or leave the shim out")
        return data

    # --- asking ----------------------------------------------------------------------------------------------------

    def ask(self, words: Sequence[WantedWord], period_s: float, lease_s: float = 10.0) -> int:
        """Ask the sampler to read these words every ``period_s`` seconds for ``lease_s`` seconds; returns the request's number.

        At most ``FRAME_WORDS`` words are taken. The shim checks each address itself and copies nothing outside GPU memory that
        NCCL points to. Raises :class:`TargetError` where the frame cannot be written.
        """
        if not self.writable:
            raise TargetError("the probing frame cannot be written", "run as root or as the user of the job")
        words = words[: layout.FRAME_WORDS]
        request = np.zeros((), layout.REQUEST_DTYPE)
        request["count"] = len(words)
        request["period_us"] = round(min(max(period_s, SHORTEST_PERIOD_S), LONGEST_PERIOD_S) * 1e6)
        request["reader_pid"] = os.getpid()
        request["expires_ns"] = time.monotonic_ns() + int(min(lease_s, LONGEST_LEASE_S - 1) * 1e9) if words else 0
        for index, word in enumerate(words):
            request["words"][index] = (word.address, word.held_at, word.size, 0)
        number = int.from_bytes(self._read(_REQUEST_AT, 4), "little") | 1
        body = request.tobytes()
        try:
            os.pwrite(self._fd, number.to_bytes(4, "little"), _REQUEST_AT)
            os.pwrite(self._fd, body[4:], _REQUEST_AT + 4)
            number = (number + 1) & 0xFFFFFFFF
            os.pwrite(self._fd, number.to_bytes(4, "little"), _REQUEST_AT)
        except OSError as error:
            raise TargetError(f"the probing frame cannot be written: {error.strerror}", "is the process still there?") from None
        return number

    def close(self) -> None:
        """Let go of the frame; harmless twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _candidates(pid: int, uid: int, proc: Path) -> Iterator[str]:
    """Open files of a process that look like its frame: a regular file of the right size, its owner's alone."""
    folder = proc / str(pid) / "fd"
    try:
        names = list(islice(os.scandir(folder), MAX_FILES))
    except FileNotFoundError:
        raise TargetGoneError(f"process {pid} exited", "list the NCCL processes with 'ncclwatch ps'") from None
    except OSError:
        return
    for entry in names:
        try:
            if not _LINK.fullmatch(str(Path(entry.path).readlink())):
                continue
            about = entry.stat()  # through the link, without opening
        except OSError:
            continue
        owned = about.st_uid in (uid, 0) and not stat.S_IMODE(about.st_mode) & 0o077
        if stat.S_ISREG(about.st_mode) and about.st_size == _SIZE and owned:
            yield entry.path


def _shares_time(pid: int, proc: Path) -> bool:
    """Whether the process counts time since boot as we do."""
    try:
        return (proc / str(pid) / "ns" / "time").readlink() == (proc / "self" / "ns" / "time").readlink()
    except OSError:
        return True


def _places() -> tuple[NDArray[Any], NDArray[Any]]:
    """Where each record with a ``seq`` begins (in words of 4 bytes) and how many bytes it covers."""
    places: list[tuple[int, int]] = []
    fields = layout.FRAME_DTYPE.fields
    comm, operation = layout.COMMUNICATOR_DTYPE.fields, layout.OPERATION_DTYPE.fields
    assert fields is not None and comm is not None and operation is not None  # noqa: S101 - they are structures
    half = operation["device_seq"][1]
    for index in range(layout.FRAME_COMMUNICATORS):
        start = fields["communicators"][1] + index * layout.COMMUNICATOR_DTYPE.itemsize
        places.append((start, comm["channels"][1]))
        channels, recent = start + comm["channels"][1], start + comm["recent"][1]
        places += [
            (channels + n * layout.CHANNEL_DTYPE.itemsize, layout.CHANNEL_DTYPE.itemsize) for n in range(layout.FRAME_CHANNELS)
        ]
        for number in range(layout.FRAME_OPERATIONS):
            at = recent + number * layout.OPERATION_DTYPE.itemsize
            places += [(at, half), (at + half, layout.OPERATION_DTYPE.itemsize - half)]
    for name, dtype, count in (
        ("proxy", layout.PROXY_OPERATION_DTYPE, layout.FRAME_PROXY_OPERATIONS),
        ("words", layout.WORD_DTYPE, layout.FRAME_WORDS),
    ):
        places += [(fields[name][1] + n * dtype.itemsize, dtype.itemsize) for n in range(count)]
    table = np.array(places, dtype=np.int64)
    return table[:, 0] // 4, table[:, 1]


_SEQ_WORDS, _SIZES = _places()
