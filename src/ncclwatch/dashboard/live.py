"""A live session under the dashboard: watching goes on in a thread of its own, drawing only ever takes what is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ncclwatch.dashboard.source import Mailbox, read_stack
from ncclwatch.dashboard.stack_page import StackText
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.identity import ProcessKey
from ncclwatch.stopping import Stop
from ncclwatch.view.builder import Told, ViewBuilder
from ncclwatch.view.frame import View

if TYPE_CHECKING:
    from ncclwatch.engine.session import Update

END_S = 5.0
"""How long the end of a session may take before the dashboard leaves without it."""


class LiveSource:
    """Feeds a dashboard from a session that calls ``attached``, ``update`` and ``end`` (a surface of ``attach``)."""

    label = "LIVE"

    def __init__(
        self,
        stop: Stop,
        *,
        save: Callable[[], str] | None = None,
        toggle_recording: Callable[[], str] | None = None,
        recording_state: Callable[[], str] | None = None,
    ) -> None:
        self._stop = stop
        self._save = save
        self._toggle = toggle_recording
        self._recording_state = recording_state
        self._mailbox = Mailbox()
        self._builder = ViewBuilder()
        self._finished = ""
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        """What ended the session's thread, to be raised where the dashboard was started."""

    # --- surface: called in the session's thread -----------------------------------------------------------------------

    def attached(self, session: Told) -> None:
        """Every process was read once."""
        for problem in getattr(session, "problems", ()):
            self._builder.tell(time.time(), "note", f"not watched: {problem.line}")
        self._mailbox.put(self._builder.begin(session, time.time()))

    def update(self, session: Told, update: Update) -> None:
        """One step of the session."""
        view = self._builder.feed(session, update, time.time())
        if view is not None:
            self._mailbox.put(view)

    def end(self, session: Told, reason: str) -> None:
        """The session is over."""
        self._finished = reason or "ended"

    # --- the thread ----------------------------------------------------------------------------------------------------

    def run(self, session: Callable[[], None]) -> None:
        """Run the session in a thread; what it raises is kept in ``error``."""

        def body() -> None:
            try:
                session()
            except BaseException as error:
                self.error = error
            finally:
                self._finished = self._finished or "ended"

        self._thread = threading.Thread(target=body, name="session", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the session's end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(END_S)

    # --- source: called by the dashboard -------------------------------------------------------------------------------

    def take(self) -> list[View]:
        """Views since the last time."""
        return self._mailbox.take()

    @property
    def finished(self) -> str:
        """Why the session is over."""
        return self._finished

    def stop(self) -> None:
        """Ask the session to end."""
        self._stop.set()

    @property
    def recording(self) -> str:
        """How the session is being recorded."""
        return self._recording_state() if self._recording_state is not None else ""

    def save(self) -> str:
        """Write a snapshot."""
        if self._save is None:
            raise NcclwatchError("a snapshot can be saved only on the node of the job", "run 'ncclwatch snapshot' there")
        return self._save()

    def toggle_recording(self) -> str:
        """Begin or end a recording."""
        if self._toggle is None:
            raise NcclwatchError("nothing can be recorded here", "run 'ncclwatch record' on the node of the job")
        return self._toggle()

    def stack(self, process: ProcessKey) -> StackText | str:
        """Threads of a process of this node."""
        return read_stack(process, _start_time)

    def seek(self, seconds: float) -> bool:
        """The past of a live job is what the dashboard remembers."""
        return False

    def faster(self, factor: float) -> bool:
        """Time cannot be hurried."""
        return False

    def hold(self) -> bool:
        """Nor stopped."""
        return False


def _start_time(pid: int) -> int | None:
    from ncclwatch.target.process import read_stat

    try:
        return read_stat(pid).start_time
    except NcclwatchError:
        return None
