"""A recording under the dashboard: played at any speed, moved in, while the same views are drawn as live."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import datetime

from ncclwatch.dashboard.source import Mailbox
from ncclwatch.dashboard.stack_page import StackText
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.paths import Probe
from ncclwatch.store.replay import Recordings, Replay
from ncclwatch.view.builder import ViewBuilder
from ncclwatch.view.frame import View

WARM_UP_NS = 120_000_000_000
"""The judge sees this much before the moment sought, so that it says there what it would have said live."""
SLOWEST, FASTEST = 0.125, 1024.0
MAX_GAP_S = 5.0
"""A gap in a recording is not sat through."""


class ReplaySource:
    """Plays recordings in a thread of its own."""

    def __init__(self, recordings: Recordings, *, speed: float = 1.0, from_ns: int = 0, probes: Sequence[Probe] = ()) -> None:
        self._recordings = recordings
        self._replay = Replay(recordings, probes=probes)
        self._speed = speed
        self._mailbox = Mailbox()
        self._wake = threading.Event()
        self._stopped = False
        self._held = False
        self._sought: int | None = max(from_ns, recordings.begin_ns)
        self._now_ns = recordings.begin_ns
        self._at_end = ""
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="replay", daemon=True)
        self._thread.start()

    @property
    def label(self) -> str:
        """``REPLAY 2x``."""
        done = (self._now_ns - self._recordings.begin_ns) / max(self._recordings.end_ns - self._recordings.begin_ns, 1)
        return f"REPLAY {'held' if self._held else f'{self._speed:g}x'} {min(max(done, 0.0), 1.0):.0%}"

    def _run(self) -> None:
        try:
            while not self._stopped:
                sought, self._sought = self._sought, None
                if sought is not None:
                    self._play(sought)
                elif not self._wake.wait(1.0):
                    continue
                self._wake.clear()
        except BaseException as error:
            self.error = error
            self._at_end = f"ended by an error ({type(error).__name__})"

    def _play(self, from_ns: int) -> None:
        builder = ViewBuilder()
        for problem in self._recordings.problems:
            builder.tell(from_ns / 1e9, "note", problem)
        self._at_end = ""
        before: int | None = None
        held: View | None = None
        for time_ns, update in self._replay.updates(from_ns - WARM_UP_NS):
            view = builder.feed(self._replay, update, time_ns / 1e9)
            if time_ns < from_ns:
                # Only judged; the last of them is shown at once, so that the screen is not empty.
                held = view or held
                continue
            if held is not None:
                self._mailbox.put(held)
                held = None
            self._now_ns = time_ns
            if before is not None:
                self._sleep((time_ns - before) / 1e9)
            before = time_ns
            if self._stopped or self._sought is not None:
                return
            if view is not None:
                self._mailbox.put(view)
        if held is not None:
            self._mailbox.put(held)
        end = datetime.fromtimestamp(self._recordings.end_ns / 1e9)
        self._at_end = f"the recording ends here, at {end:%H:%M:%S}: < goes back, q leaves"

    def _sleep(self, seconds: float) -> None:
        while self._held and not self._stopped and self._sought is None:
            self._wake.wait(1.0)
            self._wake.clear()
        until = time.monotonic() + min(max(seconds, 0.0), MAX_GAP_S) / self._speed
        while not self._stopped and self._sought is None and (left := until - time.monotonic()) > 0:
            speed = self._speed
            self._wake.wait(min(left, 0.25))
            self._wake.clear()
            if self._speed != speed:
                until = time.monotonic() + (until - time.monotonic()) * speed / self._speed

    recording = ""

    # --- source --------------------------------------------------------------------------------------------------------

    def take(self) -> list[View]:
        """Views since the last time."""
        return self._mailbox.take()

    @property
    def finished(self) -> str:
        """Said at the end of the recording; one can still go back."""
        return self._at_end

    def stop(self) -> None:
        """End."""
        self._stopped = True
        self._wake.set()

    def join(self) -> None:
        """Wait for the thread."""
        self.stop()
        self._thread.join(5.0)

    def save(self) -> str:
        """There is no process to save."""
        raise NcclwatchError("this is a recording", "'ncclwatch report FILE -o report.html' makes a page of it")

    def toggle_recording(self) -> str:
        """It is recorded already."""
        raise NcclwatchError("this is a recording already")

    def stack(self, process: ProcessKey) -> StackText | str:
        """Threads are not recorded."""
        return "threads are not recorded: they can be looked at only live"

    def seek(self, seconds: float) -> bool:
        """Go on from another moment."""
        target = self._now_ns + int(seconds * 1e9)
        self._sought = min(max(target, self._recordings.begin_ns), self._recordings.end_ns)
        self._mailbox.clear()
        self._wake.set()
        return True

    def hold(self) -> bool:
        """Stop where it is, or go on."""
        self._held = not self._held
        self._wake.set()
        return True

    def faster(self, factor: float) -> bool:
        """Change the speed."""
        self._speed = min(max(self._speed * factor, SLOWEST), FASTEST)
        self._wake.set()
        return True
