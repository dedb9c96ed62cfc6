"""Rates over a sliding window of time, in a bounded number of buckets."""

from __future__ import annotations

BUCKET_NS = 250_000_000
WINDOW_NS = 5_000_000_000


class RateWindow:
    """Sums of one or more quantities over the last ``window_ns``, kept in buckets of ``bucket_ns``.

    Times are CLOCK_MONOTONIC in nanoseconds and may arrive out of order; what is older than the window is dropped.
    """

    def __init__(self, quantities: int, begun_ns: int, *, window_ns: int = WINDOW_NS, bucket_ns: int = BUCKET_NS) -> None:
        self._quantities = quantities
        self._begun_ns = begun_ns
        self._window_ns = window_ns
        self._bucket_ns = bucket_ns
        self._buckets: dict[int, list[float]] = {}

    def add(self, time_ns: int, *amounts: float) -> None:
        """Count ``amounts``, one for each quantity, at ``time_ns``."""
        index = time_ns // self._bucket_ns
        sums = self._buckets.get(index)
        if sums is None:
            sums = self._buckets[index] = [0.0] * self._quantities
            self._forget(max(self._buckets) * self._bucket_ns)
        for i, amount in enumerate(amounts):
            sums[i] += amount

    def per_second(self, now_ns: int) -> tuple[float, ...]:
        """Mean rate of each quantity over the window, or over the time since the beginning while that is shorter."""
        self._forget(now_ns)
        # What the buckets cover begins where the oldest of them does, and is never shorter than one: an event is not a rate.
        covered_from = ((now_ns - self._window_ns) // self._bucket_ns + 1) * self._bucket_ns
        elapsed = max(now_ns - max(covered_from, self._begun_ns), self._bucket_ns) / 1e9
        return tuple(sum(sums[i] for sums in self._buckets.values()) / elapsed for i in range(self._quantities))

    def _forget(self, now_ns: int) -> None:
        oldest = (now_ns - self._window_ns) // self._bucket_ns
        for index in [index for index in self._buckets if index <= oldest]:
            del self._buckets[index]
