"""The memory map of a process, as ``/proc/PID/maps`` shows it.

Reading the file takes the target's mmap lock once per page of output: callers keep what :func:`read_maps` returns and read again
only when they have a reason to (an address that is in no mapping, an exec).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ncclwatch.errors import PrivilegeError, TargetGoneError
from ncclwatch.target import held
from ncclwatch.target.forbidden import hint

PROC = Path("/proc")
MAX_TEXT = 256 << 20
"""Bound in bytes: vm.max_map_count is 65,530 by default and lines are under 200 bytes, but CUDA hosts raise it."""

DELETED = " (deleted)"


@dataclass(frozen=True, slots=True)
class Mapping:
    """One mapping: addresses ``start`` to ``end`` (exclusive) show file ``inode`` of device ``dev`` from ``offset`` (bytes) on.

    ``perms`` is as in the file (``r-xp``), ``dev`` as :func:`os.makedev` makes it; ``inode`` is 0 for anonymous memory. ``path``
    is as the target sees it, with `` (deleted)`` when the file is gone, or a name such as ``[heap]``, or ``""``.
    """

    start: int
    end: int
    perms: str
    offset: int
    dev: int
    inode: int
    path: str

    @property
    def size(self) -> int:
        """In bytes."""
        return self.end - self.start

    @property
    def readable(self) -> bool:
        """Whether the target itself may read it."""
        return self.perms[0] == "r"

    @property
    def writable(self) -> bool:
        """Whether the target may write it."""
        return self.perms[1] == "w"

    @property
    def executable(self) -> bool:
        """Whether it holds code."""
        return self.perms[2] == "x"

    @property
    def shared(self) -> bool:
        """Whether writes are seen by others (``MAP_SHARED``)."""
        return self.perms[3] == "s"

    @property
    def is_file(self) -> bool:
        """Whether a file backs it."""
        return self.inode != 0

    @property
    def is_deleted(self) -> bool:
        """Whether that file has been unlinked or replaced."""
        return self.is_file and self.path.endswith(DELETED)

    @property
    def file_path(self) -> str:
        """The path without the mark of deletion."""
        return self.path.removesuffix(DELETED) if self.is_deleted else self.path

    @property
    def file_name(self) -> str:
        """The last part of it."""
        return self.file_path.rpartition("/")[2]

    @property
    def range_name(self) -> str:
        """Its name in ``/proc/PID/map_files``."""
        return f"{self.start:x}-{self.end:x}"


def read_maps(pid: int, proc: Path = PROC) -> tuple[Mapping, ...]:
    """All mappings, ascending; empty for a kernel thread or a process that is about to be reaped.

    Raises :class:`TargetGoneError` and :class:`PrivilegeError`.
    """
    return parse_maps(read_maps_text(pid, proc))


def read_maps_text(pid: int, proc: Path = PROC) -> bytes:
    """The file as it is, for a look that does not need it parsed; errors as :func:`read_maps`."""
    return read_bounded(proc / str(pid) / "maps", pid, MAX_TEXT)


def parse_maps(text: bytes) -> tuple[Mapping, ...]:
    """The mappings in the text of a maps file; lines that make no sense are left out."""
    result = []
    for line in text.splitlines():
        mapping = _parse_line(line)
        if mapping is not None:
            result.append(mapping)
    return tuple(result)


def _parse_line(line: bytes) -> Mapping | None:
    fields = line.split(None, 5)
    try:
        addresses, perms, offset, device, inode = fields[:5]
        start, _, end = addresses.partition(b"-")
        major, _, minor = device.partition(b":")
        path = os.fsdecode(fields[5]) if len(fields) > 5 else ""
        mapping = Mapping(
            int(start, 16),
            int(end, 16),
            perms.decode("ascii"),
            int(offset, 16),
            os.makedev(int(major, 16), int(minor, 16)),
            int(inode),
            path.replace("\\012", "\n"),  # the only character that the kernel escapes here
        )
    except (ValueError, OverflowError):
        return None
    return mapping if mapping.start < mapping.end and len(mapping.perms) == 4 else None


def mapping_at(mappings: Sequence[Mapping], address: int) -> Mapping | None:
    """The mapping that holds an address, or ``None``; the mappings ascend, as :func:`read_maps` gives them."""
    low, high = 0, len(mappings)
    while low < high:
        middle = (low + high) // 2
        if mappings[middle].end <= address:
            low = middle + 1
        else:
            high = middle
    return mappings[low] if low < len(mappings) and mappings[low].start <= address else None


def read_small(path: str, limit: int = 1 << 14) -> bytes:
    """A small file below ``/proc`` in one read, which the kernel answers whole; raises :class:`OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)


def read_bounded(path: Path, pid: int, limit: int) -> bytes:
    """At most ``limit`` bytes of a file below ``/proc/PID``; raises :class:`TargetGoneError`, :class:`PrivilegeError` and
    :class:`~ncclwatch.target.held.HeldError`.
    """
    with target_errors(pid, path.name):
        return held.within(pid, lambda: _read(path, limit)) if path.name in held.FILES else _read(path, limit)


def _read(path: Path, limit: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        parts = []
        while limit > 0 and (part := file.read(min(limit, 1 << 16))):
            parts.append(part)
            limit -= len(part)
    return b"".join(parts)


@contextmanager
def target_errors(pid: int, what: str) -> Iterator[None]:
    """Turn what the kernel says about a process into the errors that people see; ``what`` names what was asked for."""
    try:
        yield
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        raise TargetGoneError(f"process {pid} is gone", "list the NCCL processes with 'ncclwatch ps'") from None
    except PermissionError:
        raise PrivilegeError(f"not allowed to read {what} of process {pid}", hint(pid)) from None
    except OSError as error:
        raise TargetGoneError(f"{what} of process {pid} cannot be read ({error.strerror})", "is it exiting?") from None
