"""Asking a loop to end, from a signal handler too."""

from __future__ import annotations

import signal
from queue import Empty, SimpleQueue


class Stop:
    """Set once; whoever waits wakes up. Any thread may set it, and a signal handler may.

    Not ``threading.Event``: its ``set`` takes a lock that the main thread holds for a moment in every ``wait``, and a handler
    runs in the main thread: a signal in that moment would wait for itself for ever. ``SimpleQueue.put`` may be called again
    within a ``get`` (Python's documentation says so for destructors and signal handlers).
    """

    def __init__(self) -> None:
        self._set = False
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Ask for the end."""
        self._set = True
        self._wakes.put(None)

    def wake(self) -> None:
        """Wake who waits, without asking for the end: there is something to do."""
        self._wakes.put(None)

    def is_set(self) -> bool:
        """Whether somebody has."""
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for so many seconds at most, without a number for ever, or until woken; returns whether it is set."""
        if self._set:
            return True
        try:
            self._wakes.get(timeout=None if timeout is None else max(timeout, 0.0))
        except Empty:
            return self._set
        if self._set:
            # One put wakes one: the next who waits.
            self._wakes.put(None)
        return self._set


def stop_on_signals() -> Stop:
    """A ``Stop`` that Ctrl-C and SIGTERM set."""
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: stop.set())
    return stop
