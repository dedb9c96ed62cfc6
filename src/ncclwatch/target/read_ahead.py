"""Reading ahead: what one sample asked for is fetched for the next in one system call, before it is asked for.

Structures of NCCL lie where they lie: of two hundred reads of a sample nearly all go to the same places as a second ago.
Fetched together they cost a tenth, and show one moment. Nothing else changes: what is asked for at a new place is read there and
then, and what is read *again*, to see whether it stood still meanwhile, is a second fetch after the first.

Decoding takes ten times as long as fetching, and on full cores much longer. So all processes of a node can be fetched first
(:meth:`ReadAhead.fetch`) and decoded afterwards: then they show one moment, too. Such a sample must do with what was fetched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from ncclwatch.target.memory import MemoryReader, Range, ReaderOnTop, UnreadableError

LONGEST = 4096
"""Bytes of a range that is fetched ahead at most: larger ones are searches, not structures."""

MOST = 4096
"""Ranges that are fetched ahead at most."""

MOST_FETCHES = 3
"""Times that ranges to be read again are fetched together in one sample."""

SOON = 3
"""Samples within which a range has to be asked for twice, or it is not fetched ahead: what is read every five seconds is not."""

UNUSED_SAMPLES = 4
"""Samples after which a range that nobody asked for is no longer fetched: operations use the places of a pool by turns."""


class Fetched(NamedTuple):
    """When memory was fetched: CLOCK_MONOTONIC and CLOCK_REALTIME of the beginning, and how long it took, nanoseconds."""

    time_ns: int
    wall_ns: int
    duration_ns: int


class NotFetchedError(Exception):
    """A sample of fetched memory asked for what was not fetched: it has to be taken of the present."""


class _Source(Enum):
    """What a sample is of: memory as it is read, or as it was fetched, to which it may still add or has added."""

    PRESENT = "present"
    FETCHED = "fetched"
    MIXED = "mixed"
    ONLY_FETCHED = "only fetched"


class ReadAhead(ReaderOnTop):
    """From ``begin`` to ``end`` of a sample it answers from what it fetched of the reader below."""

    def __init__(self, reader: MemoryReader) -> None:
        super().__init__(reader)
        self._number = self._fetches = 0
        self._first: dict[Range, int] = {}
        self._again: dict[Range, int] = {}
        """Ranges with the number of the sample that asked for them last: to be read, and to be read again."""
        self._seen: dict[tuple[Range, bool], int] = {}
        """The same of those that were asked for once, with whether it was again."""
        self._ahead: dict[Range, bytes | None] | None = None
        self._repeats: dict[Range, bytes | None] | None = None
        self._fetched: tuple[Fetched, dict[Range, bytes | None], dict[Range, bytes | None]] | None = None
        self._source = _Source.PRESENT

    def fetch(self) -> None:
        """Fetch now what the next sample is likely to ask for, where samples before tell it."""
        self._fetched = None
        if not self._first:
            return
        begin, wall = time.monotonic_ns(), time.time_ns()
        first, again = self._fetch(self._first), self._fetch(self._again)
        self._fetched = Fetched(begin, wall, time.monotonic_ns() - begin), first, again

    def begin_fetched(self) -> Fetched | None:
        """Start a sample of what :meth:`fetch` brought, once; ``None`` where it brought nothing."""
        fetched, self._fetched = self._fetched, None
        if fetched is None:
            return None
        self._count()
        when, self._ahead, self._repeats = fetched
        self._source = _Source.FETCHED
        return when

    def only_fetched(self) -> None:
        """From here on a sample of what was fetched must not ask for more; raises :class:`NotFetchedError` if it has."""
        if self._source is _Source.MIXED:
            raise NotFetchedError
        if self._source is _Source.FETCHED:
            self._source = _Source.ONLY_FETCHED

    def _ask_more(self) -> None:
        """Somebody asks for what was not fetched ahead."""
        if self._source is _Source.ONLY_FETCHED:
            raise NotFetchedError
        if self._source is _Source.FETCHED:
            self._source = _Source.MIXED

    def begin(self) -> None:
        """Start a sample: fetch what the samples before asked for."""
        self._count()
        self._fetched, self._source = None, _Source.PRESENT
        self._ahead = self._fetch(self._first)
        self._repeats = None

    def _count(self) -> None:
        """One sample more; what nobody asked for of late is not fetched any longer."""
        self._number += 1
        self._fetches = 0
        for wanted in (self._first, self._again):
            for key in [key for key, number in wanted.items() if number < self._number - UNUSED_SAMPLES]:
                del wanted[key]
        if len(self._seen) > MOST:
            self._seen.clear()

    def end(self) -> None:
        """The sample is over: who reads now wants to see the present."""
        self._ahead = self._repeats = None
        self._source = _Source.PRESENT

    def _fetch(self, wanted: dict[Range, int]) -> dict[Range, bytes | None]:
        ranges = list(wanted)
        return dict(zip(ranges, self._reader.read_many(ranges), strict=True)) if ranges else {}

    def read(self, address: int, size: int) -> bytes:
        """One range; raises :class:`UnreadableError`."""
        ahead = self._ahead
        if ahead is None:
            return self._reader.read(address, size)
        key = (address, size)
        if key in ahead:
            self._first[key] = self._number
            data = ahead[key]
        else:
            data = self._read_new([key])[0]
        if data is None:
            raise UnreadableError(f"{size} bytes at {address:#x}")
        return data

    def read_many(self, ranges: Sequence[Range], *, again: bool = False) -> list[bytes | None]:
        """Each range's bytes or ``None``; with ``again`` as they are after everything that was read before."""
        ahead = self._ahead
        if ahead is None:
            return self._reader.read_many(ranges)
        if again:
            return self._read_again(ranges)
        number, first = self._number, self._first
        found: list[bytes | None] = []
        for key in ranges:
            if key not in ahead:
                return self._read_mixed(ahead, ranges)
            first[key] = number
            found.append(ahead[key])
        return found

    def _read_mixed(self, ahead: dict[Range, bytes | None], ranges: Sequence[Range]) -> list[bytes | None]:
        for key in ranges:
            if key in ahead:
                self._first[key] = self._number
        self._read_new([key for key in dict.fromkeys(ranges) if key not in ahead])
        return [ahead[key] for key in ranges]

    def _read_new(self, ranges: Sequence[Range]) -> list[bytes | None]:
        """Read at places that were not fetched. What was fetched again before is older than this, and proves nothing of it."""
        self._ask_more()
        self._repeats = None
        found = self._reader.read_many(ranges)
        for key, data in zip(ranges, found, strict=True):
            if self._ahead is not None:
                self._ahead[key] = data
            if self._is_wanted(key, again=False):
                self._first[key] = self._number
        return found

    def _is_wanted(self, key: Range, *, again: bool) -> bool:
        """Whether a range that was not fetched ahead is to be from now on."""
        before = self._seen.get((key, again))
        self._seen[key, again] = self._number
        known = len(self._again if again else self._first)
        return before is not None and 0 < self._number - before <= SOON and key[1] <= LONGEST and known < MOST

    def _read_again(self, ranges: Sequence[Range]) -> list[bytes | None]:
        if any(key not in (self._repeats or ()) for key in ranges):
            self._ask_more()
        if self._repeats is None:
            self._fetches += 1
            # Where every operation is at a new place, reading each by itself is cheaper than all of them anew.
            self._repeats = self._fetch(self._again) if self._fetches <= MOST_FETCHES else {}
        found: list[bytes | None] = []
        for key in ranges:
            if key in self._again or self._is_wanted(key, again=True):
                self._again[key] = self._number
            if key in self._repeats:
                # Given once: who asks for a third look must not see the second.
                found.append(self._repeats.pop(key))
        return found if len(found) == len(ranges) else self._reader.read_many(ranges)
