"""Where a dashboard gets its views from: a live session in a thread of its own, or a recording."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from ncclwatch.dashboard.stack_page import StackText
from ncclwatch.model.identity import ProcessKey
from ncclwatch.target.stacks import python_lines
from ncclwatch.target.threads import threads
from ncclwatch.view.frame import View

MAX_WAITING = 16
"""Views kept while nobody takes them: a dashboard that is stopped for long must not make the collector hold its past."""


class Source(Protocol):
    """What the dashboard needs of whatever feeds it."""

    @property
    def label(self) -> str:
        """``LIVE``, ``REPLAY 2x``, …."""

    def take(self) -> list[View]:
        """Views since the last time, oldest first."""

    @property
    def finished(self) -> str:
        """Why no more views will come; empty while they may."""

    @property
    def recording(self) -> str:
        """``REC`` while what comes is recorded, with what is wrong; else empty."""

    def stop(self) -> None:
        """End it; returns soon."""

    def save(self) -> str:
        """Write a snapshot and say where; raises ``NcclwatchError``. Called in a thread of its own."""

    def toggle_recording(self) -> str:
        """Begin or end a recording and say so; raises ``NcclwatchError``."""

    def stack(self, process: ProcessKey) -> StackText | str:
        """Threads of a process, or why they cannot be read. Called in a thread of its own."""

    def seek(self, seconds: float) -> bool:
        """Move a recording by that many seconds; false where that means nothing."""

    def faster(self, factor: float) -> bool:
        """Change the speed of a recording; false where that means nothing."""

    def hold(self) -> bool:
        """Stop a recording, or let it go on; false where that means nothing."""


class Mailbox:
    """Views handed from the thread that makes them to the one that draws them; neither ever waits for the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: list[View] = []
        self.dropped = 0

    def put(self, view: View) -> None:
        """Hand over a view; the oldest that nobody took is dropped when there are too many."""
        with self._lock:
            self._views.append(view)
            if len(self._views) > MAX_WAITING:
                del self._views[0]
                self.dropped += 1

    def take(self) -> list[View]:
        """Everything that came since the last time."""
        with self._lock:
            views, self._views = self._views, []
        return views

    def clear(self) -> None:
        """Throw away what has not been taken."""
        self.take()


class StillSource:
    """Views that are there already, for pictures and tests; what needs a live job says that there is none."""

    def __init__(self, views: list[View], *, label: str = "LIVE", finished: str = "") -> None:
        self.label = label
        self.recording = ""
        self._views = views
        self._finished = finished

    def take(self) -> list[View]:
        """All of them, once."""
        views, self._views = self._views, []
        return views

    @property
    def finished(self) -> str:
        """As given."""
        return self._finished

    def stop(self) -> None:
        """Nothing runs."""

    def save(self) -> str:
        """There is no job to save."""
        return "nothing to save here"

    def toggle_recording(self) -> str:
        """There is no job to record."""
        return "nothing to record here"

    def stack(self, process: ProcessKey) -> StackText | str:
        """There is no process."""
        return "threads can be read only on the node of the process, while it lives"

    def seek(self, seconds: float) -> bool:
        """Not a recording."""
        return False

    def faster(self, factor: float) -> bool:
        """Not a recording."""
        return False

    def hold(self) -> bool:
        """Not a recording."""
        return False


def read_stack(process: ProcessKey, start_time: Callable[[int], int | None]) -> StackText | str:
    """Threads and Python frames of a process on this node; it must still be the one that was watched."""
    if start_time(process.pid) != process.start_time:
        return f"process {process.pid} has ended, or is on another node"
    return StackText(tuple(threads(process.pid)), tuple(python_lines(process.pid)))
