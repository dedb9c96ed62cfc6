"""What NCCL told Nsight Systems of its calls: ranges of NVTX with the communicator, and who is which rank of it.

Facts: NCCL ``src/include/nvtx_payload_schemas.h`` (names of the fields; older releases tell no communicator); NVIDIA, Nsight
Systems user guide, "SQLite Schema Reference": ``NVTX_EVENTS.binaryData``, and where fields lie (``NVTX_PAYLOAD_SCHEMA_ENTRIES``).
A payload has a head of 32 bytes: domain, schema (32 bits each, with 32 bits between and behind), its size, and that of all (64
bits each), as github.com/GindaChen/nsys-ai reads exports of 2026.
"""

from __future__ import annotations

import sqlite3
import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

EVENTS, ENTRIES = "NVTX_EVENTS", "NVTX_PAYLOAD_SCHEMA_ENTRIES"
MOST_RANGES, MOST_ENTRIES = 2_000_000, 4096
"""Bound: ranges and fields of a file that are read."""
_HEAD = struct.Struct("<IIIIQQ")
_COMMUNICATOR, _BYTES, _RANK, _RANKS, _DEVICE = (
    "NCCL communicator ID", "Message size [bytes]", "Rank", "No. of ranks", "CUDA device",
)  # fmt: skip
_LONG, _SHORT = struct.Struct("<Q"), struct.Struct("<i")
_FIELDS = {_COMMUNICATOR: _LONG, _BYTES: _LONG, _RANK: _SHORT, _RANKS: _SHORT, _DEVICE: _SHORT}
Places = Mapping[tuple[int, int], Mapping[str, int]]
"""(domain, schema) → where each field that is wanted lies in a payload of it."""


class Place(NamedTuple):
    """Which of how many ranks of a communicator somebody is."""

    ranks: int
    rank: int


@dataclass(slots=True)
class NcclCalls:
    """Begins of operations by thread, with their communicators; and by process (its number as kernels have it) and GPU its place
    in the largest communicator of which the making or the end was seen.
    """

    begins: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    communicators: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    places: dict[tuple[int, int], Place] = field(default_factory=dict)

    def of_launches(self, thread: int, launches: list[int]) -> Iterator[int | None]:
        """The communicator of each launch of a thread, by their times in order: that of the operation which was called since the
        launch before. ``None`` where that was none, or several (a group).
        """
        begins, before = self.begins.get(thread, []), 0
        for launch in launches:
            upto = bisect_right(begins, launch)
            yield self.communicators[thread][before] if upto - before == 1 else None
            before = upto


def read_calls(database: sqlite3.Connection) -> NcclCalls:
    """What the ranges of a file say. Raises ``sqlite3.Error``."""
    calls, places = NcclCalls(), _places(database)
    rows = database.execute(
        f"SELECT start, globalTid, binaryData FROM {EVENTS} WHERE binaryData IS NOT NULL ORDER BY start LIMIT {MOST_RANGES}"  # noqa: S608
    )
    for start, thread, data in rows if places else ():
        told = _told(data, places)
        if not isinstance(start, int) or not isinstance(thread, int) or not told.get(_COMMUNICATOR):
            continue
        if _BYTES in told:
            calls.begins[thread].append(start)
            calls.communicators[thread].append(told[_COMMUNICATOR])
        elif told.keys() >= {_RANK, _RANKS, _DEVICE} and 0 <= told[_RANK] < told[_RANKS]:
            key = process_of(thread), told[_DEVICE]
            calls.places[key] = max(calls.places.get(key, Place(0, 0)), Place(told[_RANKS], told[_RANK]))
    return calls


def process_of(identifier: int) -> int:
    """What a ``globalTid`` and its process' ``globalPid`` have in common: all but the 24 bits of the thread."""
    return identifier >> 24


def _places(database: sqlite3.Connection) -> Places:
    rows = database.execute(f"SELECT domainId, schemaId, name, offset FROM {ENTRIES} LIMIT {MOST_ENTRIES}")  # noqa: S608 - ours
    found: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    for domain, schema, name, offset in rows:
        # The first field has no offset there.
        if name in _FIELDS and isinstance(offset, int | None):
            found[domain, schema][name] = offset or 0
    return {key: fields for key, fields in found.items() if _COMMUNICATOR in fields}


def _told(data: object, places: Places) -> dict[str, int]:
    """The fields of a payload; none where it is of something else, or cut."""
    if isinstance(data, str):  # as exports before 2025 write it
        try:
            data = bytes.fromhex(data)
        except ValueError:
            return {}
    if not isinstance(data, bytes) or len(data) < _HEAD.size:
        return {}
    domain, _, schema, *_ = _HEAD.unpack_from(data)
    told = {}
    for name, offset in places.get((domain, schema), {}).items():
        at = _HEAD.size + offset
        if not _HEAD.size <= at <= len(data) - _FIELDS[name].size:
            return {}
        (told[name],) = _FIELDS[name].unpack_from(data, at)
    return told
