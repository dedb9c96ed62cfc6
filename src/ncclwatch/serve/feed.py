"""Where moments come from: one job of an engine that is followed, or recordings that are read once; a thread each."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ncclwatch.engine.session import Update
from ncclwatch.errors import NcclwatchError
from ncclwatch.remote.job_view import JobView
from ncclwatch.serve.moment import worst_letter
from ncclwatch.serve.past import EVERY_S, MAX_MOMENTS, Past
from ncclwatch.serve.snapshot import Composer, Snapshot
from ncclwatch.stopping import Stop
from ncclwatch.store.replay import Recordings, Replay
from ncclwatch.text import clean
from ncclwatch.view.builder import Told, ViewBuilder
from ncclwatch.view.frame import View, is_calm

TICK_S = 0.5
"""Between two moments of a job that somebody looks at; of others one a second is kept."""
RETRY_S = 3.0
"""Between two attempts to reach an engine."""
BUSY_SHARE = 0.25
"""Making moments takes at most this share of the time of a job's thread: those of many ranks are made less often."""

CONNECTING, WAITING, LIVE, SILENT, UNREACHABLE = "connecting", "waiting", "live", "silent", "unreachable"
READING, RECORDED, UNREADABLE = "reading", "recorded", "unreadable"


class Followed(Told, Protocol):
    """A session on a job that is judged elsewhere, whatever carries it."""

    @property
    def view(self) -> JobView | None:
        """The newest of what the engine sent."""

    @property
    def is_silent(self) -> bool:
        """Whether what is shown is old."""

    def start(self, duration: float | None = None) -> None:
        """Begin; raises ``NcclwatchError``."""

    def step(self, *, until: float | None = None) -> Update:
        """Wait a moment for what comes."""

    def close(self) -> None:
        """Leave."""


@dataclass(frozen=True, slots=True)
class Status:
    """How it stands with where moments come from; ``text`` says what is wrong, in one line."""

    state: str
    text: str = ""


Tell = Callable[["Feed", Snapshot | None], None]
"""Is told of every moment, and with ``None`` that only the status is another; called in the feed's thread."""


class Feed(ABC):
    """One job on the page."""

    kind = ""

    def __init__(self, job: str, about: str) -> None:
        self.job = job
        self.about = about
        self.past = Past()
        self.newest: Snapshot | None = None
        self.view: View | None = None
        self.status = Status(CONNECTING)
        self.watched = False
        """Whether somebody looks at it: set by whoever hands moments on."""
        self.tell: Tell = lambda _feed, _snapshot: None
        self._stop = Stop()
        self._thread = threading.Thread(target=self._run_safely, name=f"job {job}", daemon=True)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Ask for the end."""
        self._stop.set()

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(10.0)

    def _run_safely(self) -> None:
        while not self._stop.is_set():
            try:
                self._run()
                return
            except NcclwatchError as error:
                self._say(self._failed, str(error))
            except Exception as error:
                # What an engine or a file says can be anything: it must not end the page of the other jobs.
                if os.environ.get("NCCLWATCH_DEBUG") == "1":
                    raise
                self._say(
                    self._failed, f"it could not be shown ({type(error).__name__}): run with NCCLWATCH_DEBUG=1 and report it"
                )
            if not self._again:
                return
            self._stop.wait(RETRY_S)

    _failed = UNREACHABLE
    _again = True

    @abstractmethod
    def _run(self) -> None: ...

    def _say(self, state: str, text: str = "") -> None:
        status = Status(state, clean(text, 300))
        if status != self.status:
            self.status = status
            self.tell(self, None)

    def _show(self, snapshot: Snapshot, view: View) -> None:
        self.view, self.newest = view, snapshot
        self.past.add(snapshot)
        self.tell(self, snapshot)

    def summary(self) -> dict[str, Any]:
        """The job's line in the list of all jobs."""
        status, view, newest = self.status, self.view, self.newest
        found: dict[str, Any] = {
            "job": self.job, "about": clean(self.about, 160), "kind": self.kind, "state": status.state, "text": status.text,
            "time": newest.time if newest is not None else None,
        }  # fmt: skip
        if view is None:
            return found
        verdict = view.verdict
        return found | {
            "ranks": len(view.grid), "hosts": len(view.hosts), "letter": worst_letter(view),
            "class": str(verdict.verdict_class) if verdict else "", "calm": is_calm(verdict),
            "accuses": bool(verdict and verdict.verdict_class.accuses), "slow": bool(verdict and verdict.verdict_class.slow),
            "summary": clean(verdict.summary, 300) if verdict else "", "since": verdict.since if verdict else None,
            "cost": msgspec.Raw(newest.parts["cost"]) if newest is not None else None,
        }  # fmt: skip


class LiveFeed(Feed):
    """Follows a job of an engine; when the engine goes away it is waited for."""

    kind = "live"

    def __init__(self, job: str, about: str, connect: Callable[[Stop], Followed]) -> None:
        super().__init__(job, about)
        self._connect = connect
        self._composer = Composer(job)
        self._builder = ViewBuilder()

    def _run(self) -> None:
        while not self._stop.is_set():
            session = self._connect(self._stop)
            try:
                session.start()
                self._follow(session)
            finally:
                session.close()

    def _follow(self, session: Followed) -> None:
        shown: View | None = None
        due = 0.0
        if session.view is None:
            self._say(WAITING, "the engine has heard no agent of this job yet")
        else:
            shown = self._builder.begin(session, time.time())
            self._composer.take(shown)
        while not self._stop.is_set():
            now = time.monotonic()
            if shown is not None and now >= due:
                due = now + self._compose(session, shown)
                shown = None
            # What has come is shown when its time has come, though nothing more comes.
            view = self._builder.feed(session, session.step(until=None if shown is None else due), time.time())
            if view is not None:
                self._composer.take(view)
                shown = view
            if session.view is not None:
                self._say(*((SILENT, "the engine says nothing: what is shown is old") if session.is_silent else (LIVE, "")))

    def _compose(self, session: Followed, view: View) -> float:
        """Make a moment; returns how many seconds to wait for the next."""
        began = time.monotonic()
        told = session.view
        self._show(self._composer.compose(view, *((told.nodes, told.behind_s) if told is not None else ())), view)
        return max(TICK_S if self.watched else EVERY_S, (time.monotonic() - began) / BUSY_SHARE)


class RecordedFeed(Feed):
    """Recordings of one job, played to their end as fast as they can be read; every moment can then be looked at."""

    kind = "recording"
    _failed = UNREADABLE
    _again = False

    def __init__(self, job: str, about: str, paths: Sequence[Path]) -> None:
        super().__init__(job, about)
        self._paths = paths

    def _run(self) -> None:
        composer, builder = Composer(self.job), ViewBuilder()
        with Recordings(self._paths) as recordings:
            replay = Replay(recordings)
            begin, span = recordings.begin_ns / 1e9, max((recordings.end_ns - recordings.begin_ns) / 1e9, 1e-3)
            for problem in recordings.problems:
                builder.tell(begin, "note", problem)
            last: tuple[float, str] = (0.0, "")
            shown: View | None = None
            for time_ns, update in replay.updates():
                if self._stop.is_set():
                    return
                view = builder.feed(replay, update, time_ns / 1e9)
                if view is None:
                    continue
                composer.take(view)
                verdict = view.verdict.id if view.verdict is not None else ""
                if view.frame.time - last[0] < span / MAX_MOMENTS and verdict == last[1]:
                    shown = view
                    continue
                last, shown = (view.frame.time, verdict), None
                self._show(composer.compose(view), view)
                self._say(READING, f"{min((view.frame.time - begin) / span, 1.0):.0%} read")
            if shown is not None:
                self._show(composer.compose(shown), shown)
            if self.newest is None:
                raise NcclwatchError("nothing was looked at in it", "the recorder was stopped before its first look")
        self._say(RECORDED)
