"""Events that wait to be sent: a bounded queue that never makes its caller wait, and counts what it drops."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from ncclwatch.export.events import Event

MAX_EVENTS, MAX_BYTES = 1024, 16 << 20
"""Bound: events that wait, and characters of their bodies. The oldest go first."""
BATCH_EVENTS, BATCH_BYTES = 64, 2 << 20
"""Bound: what one request carries, unless a single event is larger."""


class Outbox:
    """First in, first out. Used by any threads."""

    def __init__(self, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES, *, at_once: int = BATCH_EVENTS) -> None:
        self._most, self._at_once = (max_events, max_bytes), at_once
        self._waiting: deque[Event] = deque()
        self._bytes = 0
        self._lock = threading.Lock()
        self.dropped = 0
        """Events that were given up so far."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, event: Event) -> None:
        """Add an event."""
        with self._lock:
            self._waiting.append(event)
            self._bytes += len(event.body)
            self._trim()

    def take(self) -> list[Event]:
        """The oldest events, as many as one request carries; they are the caller's until :meth:`back`."""
        taken: list[Event] = []
        with self._lock:
            room = BATCH_BYTES
            while self._waiting and len(taken) < self._at_once and (not taken or room >= len(self._waiting[0].body)):
                event = self._waiting.popleft()
                self._bytes -= len(event.body)
                room -= len(event.body)
                taken.append(event)
        return taken

    def back(self, events: Sequence[Event]) -> None:
        """Events that could not be sent wait again, before all others."""
        with self._lock:
            self._waiting.extendleft(reversed(events))
            self._bytes += sum(len(event.body) for event in events)
            self._trim()

    def give_up(self, events: Sequence[Event]) -> None:
        """Count events that nobody will take."""
        with self._lock:
            self.dropped += len(events)

    def _trim(self) -> None:
        most, most_bytes = self._most
        while self._waiting and (len(self._waiting) > most or self._bytes > most_bytes):
            self._bytes -= len(self._waiting.popleft().body)
            self.dropped += 1
