"""``--history``: what is judged is kept in a folder beside the judging, and what the folder knows enters verdicts."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, cast

import typer

if TYPE_CHECKING:
    from ncclwatch.cli.live import Session
    from ncclwatch.engine.session import DiagnosisSession, Update
    from ncclwatch.history.feed import Feed
    from ncclwatch.history.tables import Row
    from ncclwatch.knowledge.match import Before
    from ncclwatch.model.verdict import Verdict

HistoryOption = Annotated[
    Path | None,
    typer.Option(
        "--history", metavar="FOLDER", help="Keep verdicts, iterations, rates and health there, for 'ncclwatch history'."
    ),
]
GPUS_EVERY_S, GPUS_TIMEOUT_S = 600.0, 5.0
"""How often the driver of the GPUs is asked, and how long it may take."""
MAX_FEEDS = 2048
"""Bound: jobs of which is remembered what was told."""
DEFAULT_JOB = "default"
"""What an engine calls the job of agents that name none."""


class Judging(Protocol):
    """Who judges, and may ask what is known of the past."""

    before: Before | None


class HistoryKeeper:
    """A surface that hands everything to a history's writer. Raises an error of ncclwatch's when the folder cannot be used."""

    def __init__(self, folder: Path, command: str) -> None:
        from ncclwatch.history.query import need_packages
        from ncclwatch.history.recurrence import Recurrence
        from ncclwatch.history.writer import HistoryWriter

        need_packages()
        self._past = Recurrence(str(folder))
        self._writer = HistoryWriter(folder, command=command)
        # An engine's own GPUs are not those of the jobs it judges.
        self._gpus = command == "attach"
        self._feeds: dict[str, Feed] = {}
        self._next_gpus = 0.0
        self._problem = ""
        self._dropped = 0

    def before(self, verdict: Verdict) -> Sequence[str]:
        """What is known of the past of a verdict's culprits."""
        return self._past.lines(verdict)

    def attached(self, session: Session) -> None:
        """Nothing is to be done."""

    def update(self, session: Session, update: Update) -> None:
        """Keep what one step brought."""
        self.take(cast("DiagnosisSession", session), update)

    def take(self, session: DiagnosisSession, update: Update, job: str = "") -> None:
        """The same of one job of several; what went wrong is told as a note."""
        from ncclwatch.history.feed import Feed

        feed = self._feeds.pop(job, None)
        if feed is None:
            feed = Feed(self._writer.put, "" if job == DEFAULT_JOB else job, self._past.note)
        self._feeds[job] = feed
        if len(self._feeds) > MAX_FEEDS:
            # The one that has said nothing for longest: an engine has forgotten its job.
            self._feeds.pop(next(iter(self._feeds))).close()
        feed.take(session, update)
        if self._past.is_due:
            self._writer.put(time.time_ns(), self._past.refresh)
        if self._gpus and time.monotonic() >= self._next_gpus:
            self._next_gpus = time.monotonic() + GPUS_EVERY_S
            self._writer.put(time.time_ns(), self._look_at_gpus)
        problem, dropped = self._writer.problem, self._writer.dropped
        if problem != self._problem:
            update.notes.append(f"history: {problem or 'it is written again'}")
            self._problem = problem
        if dropped > self._dropped:
            update.notes.append(f"history: {dropped - self._dropped} looks were not kept; the gap is told in it")
            self._dropped = dropped

    def end(self, session: Session, reason: str) -> None:
        """Nothing is to be done: :func:`keeping` closes it."""

    def close(self) -> None:
        """Write what waits."""
        for feed in self._feeds.values():
            feed.close()
        self._writer.close()

    def _look_at_gpus(self) -> list[Row]:
        from ncclwatch.gpu.health import look_at_gpus
        from ncclwatch.history.rows import gpu_rows

        look = look_at_gpus(GPUS_TIMEOUT_S)
        # A node without NVIDIA's driver is asked once.
        self._gpus = bool(look.gpus)
        return list(gpu_rows(platform.node(), look))


@contextmanager
def keeping(folder: Path | None, command: str, judging: Judging) -> Iterator[list[HistoryKeeper]]:
    """The surface that keeps a history, if any, and that tells ``judging`` what it knows; closed at the end."""
    if folder is None:
        yield []
        return
    keeper = HistoryKeeper(folder, command)
    judging.before = keeper.before
    try:
        yield [keeper]
    finally:
        keeper.close()
