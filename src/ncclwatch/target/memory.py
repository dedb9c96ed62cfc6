"""Reading a process's memory from outside: the interface that all readers share, and the reader of a live process.

``process_vm_readv`` neither stops nor signals the target, and works while it is stopped. Everything that comes through here is
untrusted: callers bound what they ask for, and a range that cannot be read is ``None``, never an exception that ends a sample.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ncclwatch.errors import PrivilegeError, TargetGoneError
from ncclwatch.target import held
from ncclwatch.target.forbidden import hint as forbidden_hint
from ncclwatch.target.maps import Mapping, read_maps

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
"""Bytes in a page of this machine, and so of the target: 4 KiB on x86-64, 4, 16 or 64 KiB on aarch64."""

IOV_MAX = 1024
"""Ranges the kernel takes in one process_vm_readv (UIO_MAXIOV)."""

MAX_READ = 64 << 20
"""Bytes one call may ask for: a larger request is a corrupt length, not a structure of NCCL."""

ADDRESS_LIMIT = 1 << 48
"""First address that no process uses unless it asks for it: user space ends at 1 << 47 on x86-64 (4-level paging), at 1 << 48 on
aarch64. Between the two nothing is mapped on x86-64, and reading there fails as anywhere else.
"""

LOWEST_ADDRESS = 0x10000
"""vm.mmap_min_addr: a smaller "pointer" is a tag such as ``(ncclComm*)0x1``."""

_MAPS_MIN_AGE_S = 1.0

Range = tuple[int, int]
"""(address, size in bytes)."""


class UnreadableError(Exception):
    """A range of the target could not be read (unmapped, or device memory). Internal: readers turn it into an unavailable
    signal.
    """


@dataclass(slots=True)
class ReadCounters:
    """What reading has cost so far: system calls, bytes that arrived, ranges that were refused or faulted."""

    calls: int = 0
    bytes: int = 0
    faults: int = 0


class MemoryReader(Protocol):
    """The memory of one process, live or recorded.

    ``read`` raises :class:`UnreadableError`; ``read_many`` gives ``None`` for each range that could not be read whole. All raise
    :class:`ncclwatch.errors.TargetGoneError` once the process has exited or replaced itself by exec (see ``check``).
    """

    counters: ReadCounters

    def read(self, address: int, size: int) -> bytes:
        """``size`` bytes at ``address``."""
        ...

    def read_many(self, ranges: Sequence[Range], *, again: bool = False) -> list[bytes | None]:
        """Each range's bytes or ``None``; ``again`` asks for the present content where a recorder would repeat what it has."""
        ...

    def scan(self, address: int, size: int) -> NDArray[np.uint64]:
        """The 8-byte words from ``address`` on, up to the first that is unreadable; valid until the next call, not kept by a
        recorder.
        """
        ...

    def probe(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The 8-byte words at many addresses, 0 where unreadable; for searching, not kept by a recorder."""
        ...

    def mappings(self) -> Sequence[Mapping]:
        """The memory map as last read, sorted by address."""
        ...

    def refresh_mappings(self) -> bool:
        """Read the map again unless that was done moments ago; whether it was read."""
        ...

    def resident(self, start: int, end: int) -> list[Range]:
        """The (address, size) runs between ``start`` and ``end`` that hold data: searching never faults pages in."""
        ...

    def check(self) -> None:
        """Raise :class:`ncclwatch.errors.TargetGoneError` unless this is still the process that was opened."""
        ...


class ReaderOnTop:
    """A :class:`MemoryReader` on top of another that reads ranges its own way; searching and the memory map are those below."""

    def __init__(self, reader: MemoryReader) -> None:
        self._reader = reader
        self.counters: ReadCounters = reader.counters

    def scan(self, address: int, size: int) -> NDArray[np.uint64]:
        """As the reader below; nothing is kept."""
        return self._reader.scan(address, size)

    def probe(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """As the reader below; nothing is kept."""
        return self._reader.probe(addresses)

    def mappings(self) -> Sequence[Mapping]:
        """As the reader below."""
        return self._reader.mappings()

    def refresh_mappings(self) -> bool:
        """As the reader below."""
        return self._reader.refresh_mappings()

    def resident(self, start: int, end: int) -> list[Range]:
        """As the reader below."""
        return self._reader.resident(start, end)

    def check(self) -> None:
        """As the reader below."""
        self._reader.check()


def plausible_pointer(address: int, alignment: int = 8) -> bool:
    """Whether a value can be a pointer into user space at all; a test before any system call."""
    return LOWEST_ADDRESS <= address < ADDRESS_LIMIT and address % alignment == 0


class AddressSpace:
    """Answers whether a range lies in readable mappings, by binary search over one reading of the map."""

    def __init__(self, mappings: Iterable[Mapping]) -> None:
        readable = sorted((m.start, m.end) for m in mappings if m.readable)
        self._starts = [start for start, _ in readable]
        self._ends = [end for _, end in readable]

    def contains(self, address: int, size: int = 1) -> bool:
        """Whether all ``size`` bytes at ``address`` are mapped readable (adjacent mappings count as one)."""
        end = address + size
        index = bisect_right(self._starts, address) - 1
        while index >= 0 and index < len(self._ends) and self._starts[index] <= address < self._ends[index]:
            if end <= self._ends[index]:
                return True
            address = self._ends[index]
            index += 1
        return False


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_process_vm_readv = _libc.process_vm_readv
_process_vm_readv.restype = ctypes.c_ssize_t
_process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class LiveReader:
    """A running (or stopped) process.

    ``/proc/PID/mem`` is held open only to tell whether the process is still the one that was opened: the descriptor belongs to
    the address space, so after exit or exec a read through it returns nothing, whatever process the pid then names. Holding it
    keeps the small ``mm_struct`` alive, none of the target's memory.

    Raises :class:`PrivilegeError` when the kernel forbids looking (ptrace access mode), :class:`TargetGoneError` when there is
    no such process any more.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.counters = ReadCounters()
        try:
            self._mem = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            raise gone(pid) from None
        except PermissionError:
            raise forbidden(pid) from None
        self._pagemap: int | None = None
        self._words: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._local = _IoVec()
        self._remote = _IoVec()
        self._reserve(1 << 16)
        self._maps: tuple[Mapping, ...] = ()
        self._maps_time = 0.0
        self._anchor = 0
        try:
            self._load_maps()
            self.check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the descriptors; the reader is unusable afterwards."""
        for descriptor in (self._mem, self._pagemap):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._mem, self._pagemap = -1, None

    def check(self) -> None:
        """Raise :class:`TargetGoneError` when the process exited or replaced itself by exec since it was opened."""
        held.check(self.pid)
        try:
            alive = os.pread(self._mem, 1, self._anchor)
        except OSError as error:
            if error.errno != errno.EIO:
                raise gone(self.pid) from None
            # The library may have been unloaded: the address space is another matter. Look for an anchor that is still mapped.
            self._load_maps()
            try:
                alive = os.pread(self._mem, 1, self._anchor)
            except OSError:
                raise gone(self.pid) from None
        if not alive:
            raise gone(self.pid)

    def mappings(self) -> Sequence[Mapping]:
        """The memory map as last read."""
        return self._maps

    def refresh_mappings(self) -> bool:
        """Read the map again, at most once a second: it takes the target's mmap lock."""
        if time.monotonic() - self._maps_time < _MAPS_MIN_AGE_S:
            return False
        self._load_maps()
        return True

    def read(self, address: int, size: int) -> bytes:
        """One range; raises :class:`UnreadableError`."""
        if not is_allowed(address, size):
            self.counters.faults += 1
            raise UnreadableError(f"{size} bytes at {address:#x}")
        if self._transfer_one(address, size) != size:
            self.counters.faults += 1
            raise UnreadableError(f"{size} bytes at {address:#x}")
        return bytes(self._bytes[:size])

    def read_many(self, ranges: Sequence[Range], *, again: bool = False) -> list[bytes | None]:
        """Many ranges in as few system calls as the kernel takes; one that faults does not fail the others."""
        if len(ranges) == 1:
            address, size = ranges[0]
            try:
                return [self.read(address, size)]
            except UnreadableError:
                return [None]
        result: list[bytes | None] = [None] * len(ranges)
        wanted: list[int] = []
        total = 0
        for index, (address, size) in enumerate(ranges):
            if not is_allowed(address, size):
                self.counters.faults += 1
                continue
            if len(wanted) == IOV_MAX or total + size > MAX_READ:
                self._read_batch(ranges, wanted, result)
                wanted, total = [], 0
            wanted.append(index)
            total += size
        self._read_batch(ranges, wanted, result)
        return result

    def scan(self, address: int, size: int) -> NDArray[np.uint64]:
        """The words from ``address`` on; what follows an unreadable page is left off. Valid until the next call."""
        got = self._transfer_one(address, size) if is_allowed(address, size) else 0
        return self._words[: max(got, 0) // 8]

    def probe(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The 8-byte words at ``addresses``, 0 where unreadable."""
        words = np.zeros(len(addresses), dtype=np.uint64)
        position = 0
        while position < len(addresses):
            batch = addresses[position : position + IOV_MAX]
            remote = np.empty((len(batch), 2), dtype=np.uint64)
            remote[:, 0] = batch
            remote[:, 1] = 8
            target = words[position : position + len(batch)]
            self._local.base, self._local.length = target.ctypes.data, target.nbytes
            got = self._call(ctypes.addressof(self._local), remote.ctypes.data, len(batch))
            # The word at which the kernel stopped stays 0; go on behind it.
            position += max(got, 0) // 8 + (0 if got == target.nbytes else 1)
        return words

    def resident(self, start: int, end: int) -> list[Range]:
        """Runs of pages that are in memory now, by ``/proc/PID/pagemap``; everything when that cannot be read."""
        start, end = start & -PAGE_SIZE, (end + PAGE_SIZE - 1) & -PAGE_SIZE
        entries = self._pagemap_entries(start, end)
        if entries is None:
            return [(start, end - start)]
        present = np.concatenate(([0], (entries >> np.uint64(63)).astype(np.int8), [0]))
        edges = np.diff(present)
        firsts, lasts = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        return [
            (start + first * PAGE_SIZE, (last - first) * PAGE_SIZE)
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
        ]

    def _pagemap_entries(self, start: int, end: int) -> NDArray[np.uint64] | None:
        try:
            if self._pagemap is None:
                self._pagemap = os.open(f"/proc/{self.pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._pagemap, (end - start) // PAGE_SIZE * 8, start // PAGE_SIZE * 8)
        except OSError:
            return None
        self.counters.calls += 1
        if len(data) != (end - start) // PAGE_SIZE * 8:
            return None
        return np.frombuffer(data, dtype=np.uint64)

    def _load_maps(self) -> None:
        self._maps = tuple(read_maps(self.pid))
        self._maps_time = time.monotonic()
        if not self._maps:
            raise gone(self.pid)
        file_backed = (m for m in self._maps if m.readable and m.inode)
        self._anchor = next(file_backed, next((m for m in self._maps if m.readable), self._maps[0])).start

    def _reserve(self, size: int) -> None:
        if size > self._words.nbytes:
            self._words = np.empty(-(-size // 8), dtype=np.uint64)
            self._bytes = memoryview(self._words.view(np.uint8).data)
            self._buffer_address = self._words.ctypes.data

    def _transfer_one(self, address: int, size: int) -> int:
        self._reserve(size)
        self._local.base, self._local.length = self._buffer_address, size
        self._remote.base, self._remote.length = address, size
        return self._call(ctypes.addressof(self._local), ctypes.addressof(self._remote), 1)

    def _read_batch(self, ranges: Sequence[Range], wanted: list[int], result: list[bytes | None]) -> None:
        """Fill ``result`` at the indices ``wanted``; after a fault the call is repeated behind the range that faulted."""
        while wanted:
            flat = array("Q")
            total = 0
            for index in wanted:
                flat.extend(ranges[index])
                total += ranges[index][1]
            self._reserve(total)
            self._local.base, self._local.length = self._buffer_address, total
            got = self._call(ctypes.addressof(self._local), flat.buffer_info()[0], len(wanted))
            position = 0
            for number, index in enumerate(wanted):
                size = ranges[index][1]
                if position + size > got:
                    self.counters.faults += 1
                    wanted = wanted[number + 1 :]
                    break
                result[index] = bytes(self._bytes[position : position + size])
                position += size
            else:
                wanted = []

    def _call(self, local: int, remote: int, count: int) -> int:
        """One process_vm_readv into one local range: bytes that arrived, 0 for a fault in the first; raises when forbidden or
        gone.
        """
        held.check(self.pid)
        got = int(_process_vm_readv(self.pid, local, 1, remote, count, 0))
        self.counters.calls += 1
        if got >= 0:
            self.counters.bytes += got
            return got
        error = ctypes.get_errno()
        if error == errno.ESRCH:
            raise gone(self.pid)
        if error == errno.EPERM:
            raise forbidden(self.pid)
        if error not in (errno.EFAULT, errno.ENOMEM):
            raise OSError(error, os.strerror(error))
        return 0


def gone(pid: int) -> TargetGoneError:
    """The error for a process that exited or replaced itself."""
    return TargetGoneError(f"process {pid} exited or replaced itself while it was read", "look again with 'ncclwatch ps'")


def forbidden(pid: int) -> PrivilegeError:
    """The error for a process the kernel does not let this user read."""
    return PrivilegeError(f"not allowed to read the memory of process {pid}", forbidden_hint(pid))


def is_allowed(address: int, size: int) -> bool:
    """Whether a range is worth a system call: bounded, and in user space."""
    return 0 < size <= MAX_READ and address >= LOWEST_ADDRESS and address + size <= ADDRESS_LIMIT
