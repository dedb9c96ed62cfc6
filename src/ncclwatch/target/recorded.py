"""Readers of recorded memory: one that remembers the pages it reads from a process, and one that gives them back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ncclwatch.target.maps import Mapping
from ncclwatch.target.memory import (
    MAX_READ,
    MemoryReader,
    Range,
    ReadCounters,
    ReaderOnTop,
    UnreadableError,
    is_allowed,
)

BLOCK = 4096
"""Bytes of a piece of memory that is kept: the smallest page there is, so that a recording means the same on every machine."""


class RecordingReader(ReaderOnTop):
    """Another reader, whole pages at a time, and the memory of which pages were read: what a snapshot file keeps.

    Within one sample (between calls of ``start_sample``) a page is fetched once, so that decoding the recorded pages gives
    what was decoded live; ``again`` fetches the range anew and updates the page.
    """

    def __init__(self, reader: MemoryReader) -> None:
        super().__init__(reader)
        self.pages: dict[int, bytes] = {}
        self._absent: set[int] = set()

    def start_sample(self) -> None:
        """Forget the pages of the sample before."""
        self.pages = {}
        self._absent = set()

    def read(self, address: int, size: int) -> bytes:
        """One range; raises :class:`UnreadableError`."""
        (data,) = self.read_many([(address, size)])
        if data is None:
            raise UnreadableError(f"{size} bytes at {address:#x}")
        return data

    def read_many(self, ranges: Sequence[Range], *, again: bool = False) -> list[bytes | None]:
        """Many ranges, from the pages kept and the missing ones fetched in one go."""
        asked = [pages_of(address, size) if is_allowed(address, size) else range(0) for address, size in ranges]
        wanted = sorted(
            {page for pages in asked for page in pages if again or (page not in self.pages and page not in self._absent)}
        )
        for page, data in zip(wanted, self._reader.read_many([(page, BLOCK) for page in wanted]), strict=True):
            if data is None:
                self._absent.add(page)
            else:
                self.pages[page] = data
        return [from_pages(self.pages, address, size) for address, size in ranges]


class ImageReader:
    """Pages recorded from a process at one moment, and its memory map."""

    def __init__(self, pages: dict[int, bytes], mappings: Sequence[Mapping]) -> None:
        self.counters = ReadCounters()
        self._pages = pages
        self._addresses = np.array(sorted(pages), dtype=np.uint64)
        self._mappings = tuple(mappings)

    def read(self, address: int, size: int) -> bytes:
        """One range; raises :class:`UnreadableError` where a page was not recorded."""
        data = from_pages(self._pages, address, size) if is_allowed(address, size) else None
        self.counters.calls += 1
        if data is None:
            self.counters.faults += 1
            raise UnreadableError(f"{size} bytes at {address:#x}")
        self.counters.bytes += size
        return data

    def read_many(self, ranges: Sequence[Range], *, again: bool = False) -> list[bytes | None]:
        """Many ranges; ``None`` where a page was not recorded."""
        return [from_pages(self._pages, address, size) if is_allowed(address, size) else None for address, size in ranges]

    def scan(self, address: int, size: int) -> NDArray[np.uint64]:
        """What was recorded from ``address`` on without a gap."""
        end = address & -BLOCK
        while end in self._pages and end < address + size:
            end += BLOCK
        size = min(size, end - address)
        data = from_pages(self._pages, address, size) if is_allowed(address, size) else None
        return np.frombuffer(data or b"", dtype=np.uint64, count=len(data or b"") // 8)

    def probe(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The recorded 8-byte words, 0 elsewhere."""
        found = (from_pages(self._pages, int(address), 8) for address in addresses)
        return np.array([int.from_bytes(data, "little") if data else 0 for data in found], dtype=np.uint64)

    def mappings(self) -> Sequence[Mapping]:
        """The map as recorded."""
        return self._mappings

    def refresh_mappings(self) -> bool:
        """A recording does not change."""
        return False

    def resident(self, start: int, end: int) -> list[Range]:
        """Runs of recorded pages."""
        first, last = np.searchsorted(self._addresses, [start & -BLOCK, end])
        pages = self._addresses[first:last].astype(np.int64)
        if not len(pages):
            return []
        runs = np.split(pages, np.flatnonzero(np.diff(pages) != BLOCK) + 1)
        return [(int(run[0]), len(run) * BLOCK) for run in runs]

    def check(self) -> None:
        """A recording does not go away."""


def pages_of(address: int, size: int) -> range:
    """Addresses of the pages that a range touches."""
    return range(address & -BLOCK, address + size, BLOCK)


def from_pages(pages: dict[int, bytes], address: int, size: int) -> bytes | None:
    """A range put together from pages, or ``None`` when one of them is missing."""
    first = address & -BLOCK
    page = pages.get(first)
    offset = address - first
    if page is not None and offset + size <= BLOCK:
        return page[offset : offset + size]
    if size <= 0 or size > MAX_READ:
        return None
    parts: list[bytes] = []
    for number in pages_of(address, size):
        part = pages.get(number)
        if part is None:
            return None
        parts.append(part)
    return b"".join(parts)[offset : offset + size]
