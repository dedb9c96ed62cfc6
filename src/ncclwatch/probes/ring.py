"""Read a BPF ring buffer in bulk: its pages are mapped and fixed-size records are decoded with numpy.

Layout (``kernel/bpf/ringbuf.c``, Linux 5.8 to 6.18): the first page holds the consumer's position, the second the producer's,
then come the data pages, twice in a row, so that a record that wraps around is contiguous. A record is a header of 8 bytes
(length with the bits busy and discarded, page offset) and its data, rounded up to 8. Positions are bytes since the beginning.
"""

from __future__ import annotations

import mmap
import select
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclwatch.errors import NcclwatchError
from ncclwatch.model.rows import joined, raw
from ncclwatch.target.machine import Machine, this_machine

BUSY = np.uint32(1 << 31)
DISCARDED = np.uint32(1 << 30)
HEADER = 8
PAGE = mmap.PAGESIZE

_turn = threading.Lock()
_turn.acquire()


def _fence() -> None:
    """Keep loads and stores before it from being mixed with those behind it.

    x86-64 keeps them in order by itself. aarch64 does not: there a lock is given back (a store-release, or stronger) and taken
    again (a load-acquire), and these two stay in order (Arm ARM B2.3, "barrier-ordered-before"), with all that lies around them.
    """
    if _WEAKLY_ORDERED:
        _turn.release()
        _turn.acquire()


_WEAKLY_ORDERED = this_machine() is not Machine.X86_64


class RingError(NcclwatchError):
    """The ring holds something other than the records it was made for."""


class RingReader:
    """The consumer of a ring of records of one dtype; there must be only one.

    ``fd`` is the map's descriptor, which stays the caller's; ``size`` the ring's size in bytes. What the kernel wrote
    before it moved its position on is seen after that: see :func:`_fence`.
    """

    def __init__(self, fd: int, size: int, dtype: np.dtype[Any]) -> None:
        self._consumer_page = mmap.mmap(fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0)
        # Of the second copy of the data a page is enough for the record that wraps around; what is mapped counts as our memory.
        self._producer_pages = mmap.mmap(fd, PAGE + size + PAGE, mmap.MAP_SHARED, mmap.PROT_READ, offset=PAGE)
        self._size = size
        self._poll = select.epoll()
        self._poll.register(fd, select.EPOLLIN)
        self._decoder = RingDecoder(
            np.frombuffer(self._consumer_page, np.uint64, 1),
            np.frombuffer(self._producer_pages, np.uint64, 1),
            np.frombuffer(self._producer_pages, np.uint8, size + PAGE, PAGE),
            dtype,
            size,
        )

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a record, at most ``timeout_s`` seconds; whether there is one."""
        if self._decoder.pending():
            return True
        self._poll.poll(max(timeout_s, 0.0))
        return self._decoder.pending() > 0

    def pending(self) -> int:
        """Bytes that wait to be read."""
        return self._decoder.pending()

    @property
    def filled(self) -> float:
        """How full it is, from 0 to 1."""
        return self._decoder.pending() / self._size

    def read(self) -> npt.NDArray[Any]:
        """All finished records, and free their room; raises :class:`RingError`."""
        return self._decoder.read()

    def close(self) -> None:
        """Unmap the ring; safe to do twice."""
        if self._decoder is not None:
            del self._decoder
            self._decoder = None  # type: ignore[assignment]
            self._poll.close()
            self._consumer_page.close()
            self._producer_pages.close()


class RingDecoder:
    """Decoding proper, on any memory: positions are arrays of one ``uint64``, ``data`` holds the ``size`` bytes of the data pages
    and their beginning once more.
    """

    def __init__(
        self,
        consumer: npt.NDArray[np.uint64],
        producer: npt.NDArray[np.uint64],
        data: npt.NDArray[np.uint8],
        dtype: np.dtype[Any],
        size: int,
    ) -> None:
        self._size = size
        self._consumer = consumer
        self._producer = producer
        self._data = data
        self._dtype = dtype
        self._length = dtype.itemsize
        self._slot = np.dtype(
            {
                "names": ["header", "record"],
                "formats": ["<u4", raw(dtype)],
                "offsets": [0, HEADER],
                "itemsize": HEADER + (dtype.itemsize + 7 & ~7),
            }
        )
        if size & (size - 1) or size < self._slot.itemsize or len(data) < size + self._slot.itemsize:
            raise ValueError("the ring's size must be a power of two with room for a record")

    def pending(self) -> int:
        """Bytes between the consumer and the producer."""
        return int(self._producer[0]) - int(self._consumer[0])

    def read(self) -> npt.NDArray[Any]:
        """Copy all records up to the first one that is still being written."""
        position, pending = int(self._consumer[0]), self.pending()
        _fence()
        if not 0 <= pending <= self._size or position % 8:
            raise RingError(f"the ring cannot hold {pending} bytes from {position} on")
        left = pending // self._slot.itemsize
        found: list[npt.NDArray[Any]] = []
        while left:
            start = position & (self._size - 1)
            # Up to the record that wraps around; what follows it begins at the front.
            count = min(left, -(-(self._size - start) // self._slot.itemsize))
            records, finished = self._stretch(start, count)
            found.append(records)
            position += finished * self._slot.itemsize
            left = left - count if finished == count else 0
        # The copies are made: the kernel may use the room again.
        _fence()
        self._consumer[0] = position
        return (joined(found) if found else np.zeros(0, self._slot["record"])).view(self._dtype)

    def _stretch(self, start: int, count: int) -> tuple[npt.NDArray[Any], int]:
        """The records of ``count`` slots in a row, and how many slots there are before one that is still being written."""
        slots = np.frombuffer(self._data, self._slot, count, start)
        headers = slots["header"].copy()
        _fence()
        if (headers == self._length).all():
            # All of them are finished: one copy, as bytes.
            return slots["record"].copy(), count
        busy = np.flatnonzero(headers & BUSY)
        if busy.size:
            count = int(busy[0])
            headers = headers[:count]
        lengths = headers & ~(BUSY | DISCARDED)
        if (lengths != self._length).any():
            raise RingError(f"the ring holds a record of {int(lengths[lengths != self._length][0])} bytes, not {self._length}")
        records: npt.NDArray[Any] = slots["record"][:count][(headers & DISCARDED) == 0]
        return records, count
