"""Moments of a job that have passed, for scrubbing: compressed, bounded, thinned where they are long ago rather than cut off."""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from ncclwatch.serve.snapshot import Snapshot

MAX_MOMENTS = 1800
"""Moments kept of a job."""
MAX_BYTES = 32 << 20
"""Bytes of them, compressed."""
EVERY_S = 1.0
"""Between two moments that are kept, unless a verdict begins or ends."""


@dataclass(frozen=True, slots=True)
class _Kept:
    time: float
    point: list[Any]
    verdict: str
    data: bytes


class Past:
    """What was, oldest first; any thread may ask."""

    def __init__(self, *, max_moments: int = MAX_MOMENTS, max_bytes: int = MAX_BYTES) -> None:
        self._kept: list[_Kept] = []
        self._bytes = 0
        self._max_moments, self._max_bytes = max_moments, max_bytes
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._bytes

    def add(self, snapshot: Snapshot) -> None:
        """Keep a moment if it is worth it: time has passed, or another verdict stands."""
        last = self._kept[-1] if self._kept else None
        if last is not None and snapshot.time - last.time < EVERY_S and last.verdict == snapshot.verdict:
            return
        data = zlib.compress(snapshot.whole, 1)
        with self._lock:
            self._kept.append(_Kept(snapshot.time, snapshot.point, snapshot.verdict, data))
            self._bytes += len(data)
            while len(self._kept) > 2 and (len(self._kept) > self._max_moments or self._bytes > self._max_bytes):
                self._thin()

    def _thin(self) -> None:
        """Leave out every second moment of the older half; where the verdict changed they stay as long as others can go."""
        older = max(len(self._kept) // 2, 2)
        old, new = self._kept[:older], self._kept[older:]
        left = [one for at, one in enumerate(old) if at % 2 == 0 or one.verdict != old[at - 1].verdict]
        self._kept = [*(left if len(left) < len(old) else old[1:]), *new]
        self._bytes = sum(len(one.data) for one in self._kept)

    def points(self) -> list[list[Any]]:
        """What the timeline shows of every moment."""
        with self._lock:
            return [one.point for one in self._kept]

    def at(self, time: float) -> bytes | None:
        """The last moment at or before a time, as JSON; the oldest where there is none before."""
        with self._lock:
            place = bisect_right(self._kept, time + 1e-3, key=lambda one: one.time)
            found = self._kept[max(place - 1, 0)] if self._kept else None
        return None if found is None else zlib.decompress(found.data)
