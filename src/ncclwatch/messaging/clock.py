"""By how much another machine's clock differs from ours, from messages that went there and back (Cristian's method)."""

from __future__ import annotations

from collections import deque

KEEP = 16


class ClockOffset:
    """Keeps the round trips of late; the quickest of them says most, for its way there and its way back differ least.

    Times are CLOCK_REALTIME in nanoseconds. The offset is what has to be added to our clock to give the other's; it is off by
    ``error_ns`` at most (half of the round trip).
    """

    def __init__(self) -> None:
        self._trips: deque[tuple[int, int]] = deque(maxlen=KEEP)
        self.offset_ns: int | None = None
        self.error_ns: int | None = None

    @property
    def samples(self) -> int:
        """Round trips that are kept."""
        return len(self._trips)

    def add(self, sent_ns: int, received_ns: int, answered_ns: int, returned_ns: int) -> None:
        """Take one round trip: sent here, received and answered there, returned here. One that makes no sense is dropped."""
        trip = (returned_ns - sent_ns) - (answered_ns - received_ns)
        if trip < 0 or answered_ns < received_ns or trip > 60_000_000_000:
            return
        self._trips.append((trip, ((received_ns - sent_ns) + (answered_ns - returned_ns)) // 2))
        best = min(self._trips)
        self.offset_ns, self.error_ns = best[1], best[0] // 2
