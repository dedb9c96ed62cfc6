"""Writes a history in a thread of its own: whoever judges hands over what there is and never waits for a disk.

What is handed over goes into the journal, at once; the journal becomes Parquet files when it is old or large enough. Rows are
numbered when they are in the journal. What could not be kept is counted, and told by a row of the table ``gaps``.
"""

from __future__ import annotations

import os
import platform
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclwatch import __version__
from ncclwatch.errors import UsageError
from ncclwatch.history import compact, files, journal
from ncclwatch.history.tables import Row, fitted
from ncclwatch.text import clean

QUEUE = 512
"""Bound: looks that wait to be written: some minutes of a disk that does not answer."""
MAX_PENDING = 200_000
"""Bound: rows that wait in memory for a full disk."""
TOGETHER = 64
"""Bound: looks that are written with one frame."""
SYNC_S = 1.0
"""Bound: seconds of rows that a power failure may take."""
ALIVE_S = 10.0
"""How often an idle writer says that it lives: a kill is told to have happened within so long."""
RETRY_S = 2.0
"""How often a full disk, or a history that somebody else has locked, is tried again."""
ROLL_S, ROLL_BYTES = 900.0, 8 << 20
"""A journal becomes files after so long, or at so many bytes."""
COMPACT_S = 3600.0
"""How often small files are made into large ones, and old ones removed."""

FRAME_BYTES, ROW_BYTES = 4 << 20, 256
"""Bound: what a frame holds, about, and what a row takes besides its texts."""
Waiting = tuple[str, list[Any]]
"""(table, fitted values)"""
Made = Callable[[], Iterable[Row]]
"""Makes rows, in the writer's thread."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often the writer does what; tests and benchmarks hurry it."""

    roll_s: float = ROLL_S
    roll_bytes: int = ROLL_BYTES
    compact_s: float = COMPACT_S


USUAL = Rhythm()


class HistoryWriter:
    """Writes the history of a folder until ``close``. Raises ``UsageError`` when it cannot be written at all; later nothing is
    raised. ``problem`` is a line for people, empty while everything is written; ``dropped`` counts looks that were not kept.
    """

    def __init__(self, root: Path, *, command: str = "", rhythm: Rhythm = USUAL) -> None:
        self.root, self._rhythm, self._command = root, rhythm, command
        self.life = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:12]}"
        self.problem = ""
        self.dropped = 0
        self.rows = 0
        """Rows that are in the journal or in files; the number of the last one."""
        self._queue: queue.Queue[tuple[int, int, Made] | None] = queue.Queue(QUEUE)
        self._heard_ns = self._kept_ns = time.time_ns()
        """What was handed over up to then has been taken, and is in the journal."""
        self._lock = threading.Lock()
        self._untold = [0, 0, 0]
        """Looks that were dropped and not told yet, and the times of the first and last of them."""
        self._untold_why = ""
        self._pending: list[Waiting] = []
        self._sealed: list[journal.Journal] = []
        """Journals that are whole and not yet files."""
        self._retry_at = self._roll_at = 0.0
        self._said = self._synced = time.monotonic()
        self._compacted: float | None = None
        self._journal = self._open()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        self._thread.start()

    def put(self, time_ns: int, make: Made) -> None:
        """Hand over a look of ``time_ns``; ``make`` is called in the thread. Never waits: where the disk does not keep up the
        look is dropped, and that is told.
        """
        try:
            self._queue.put_nowait((time.time_ns(), time_ns, make))
        except queue.Full:
            self._drop(time_ns, 1, "the disk does not keep up")

    def close(self, timeout_s: float = 15.0) -> None:
        """Write what waits, say that it ended, and let go."""
        try:
            self._queue.put(None, timeout=timeout_s / 3)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    # --- in the thread -------------------------------------------------------------------------------------------------

    def _open(self) -> journal.Journal:
        try:
            for folder in (self.root, journal.folder(self.root)):
                folder.mkdir(parents=True, exist_ok=True)
            opened = journal.Journal(self.root, self.life, 0)
            opened.append(time.time_ns(), 1, [_life_row(self._command, "begin")])
        except OSError as error:
            hint = "name a folder that can be written, with room, on a file system that can lock files"
            raise UsageError(f"no history can be kept in {clean(str(self.root))}: {error.strerror or error}", hint) from error
        self.rows = 1
        return opened

    def _run(self) -> None:
        _lower_priority()
        ended = False
        while not ended:
            ended = self._hear()
            if ended:
                self._pending.append(_life_row(self._command, "end"))
            self._write(last=ended)
            self._settle(last=ended)
        self._journal.close()

    def _hear(self) -> bool:
        """Take what waits, or wait a moment for it; whether it was the last."""
        wait, until = SYNC_S, time.monotonic() + 2 * SYNC_S
        for _ in range(TOGETHER):
            if time.monotonic() > until:
                # Some looks take long (a driver is asked): what was taken so far is written first.
                break
            began = time.time_ns()
            try:
                item = self._queue.get(timeout=wait) if wait else self._queue.get_nowait()
            except queue.Empty:
                self._heard_ns = max(self._heard_ns, began)
                return False
            if item is None:
                self._heard_ns = time.time_ns()
                return True
            wait = 0.0
            self._heard_ns, time_ns, make = item
            try:
                made = [(row.table, fitted(row)) for row in make()]
            except Exception as error:
                # What agents say can be anything: one look that cannot be read must not end what is kept of the others.
                self._drop(time_ns, 1, f"a look could not be read ({type(error).__name__})")
                continue
            if len(self._pending) + len(made) > MAX_PENDING:
                self._drop(time_ns, 1, self.problem or "the disk does not keep up")
                continue
            self._pending += made
        return False

    def _write(self, *, last: bool) -> None:
        """Put what waits into the journal; while that fails it waits on."""
        now = time.monotonic()
        if now < self._retry_at and not last:
            return
        with self._lock:
            untold, why = self._untold, self._untold_why
            self._untold, self._untold_why = [0, 0, 0], ""
        told = [_gap_row("dropped", untold[1], untold[2], untold[0], why)] if untold[0] else []
        if not self._pending and not told and now - self._said < ALIVE_S:
            return
        waiting = [*told, *self._pending]
        try:
            for rows in list(_frames(waiting)) or [[]]:
                # Of what was handed over by then nothing may wait behind a frame that says so.
                self._kept_ns = self._heard_ns if len(rows) == len(waiting) else self._kept_ns
                self._journal.append(self._kept_ns, self.rows + 1, rows)
                self.rows += len(rows)
                del waiting[: len(rows)]
        except OSError as error:
            self.problem = (
                f"the history in {clean(str(self.root))} cannot be written ({error.strerror or error}): it goes on later"
            )
            self._retry_at = now + RETRY_S
            # A gap that could not be told is told with the rest.
            self._pending = waiting
            return
        self.problem, self._said, self._retry_at = "", now, 0.0
        self._pending = []
        if now - self._synced > SYNC_S or last:
            self._journal.sync()
            self._synced = now

    def _settle(self, *, last: bool) -> None:
        """Make files of journals that are old or large enough, and now and then large files of small ones."""
        now = time.monotonic()
        age, size = now - self._journal.began, self._journal.size
        due = last or (self._journal.rows and (age > self._rhythm.roll_s or size > self._rhythm.roll_bytes))
        if (due or self._sealed) and (now >= self._roll_at or last):
            try:
                self._roll(due=bool(due) and not last)
                if last:
                    self._sealed.append(self._journal)
                self._convert()
            except Exception as error:
                # A full disk, or a value that Parquet does not take: the journal is whole, and nothing of it is lost.
                self.problem = f"files of the history cannot be written ({clean(str(error), 200)}): its journal is kept"
            self._roll_at = now + RETRY_S if self._sealed else 0.0
        # Once in any case: who was killed before has left a journal.
        if self._compacted is None or (now - self._compacted > self._rhythm.compact_s and not last):
            self._compacted = now
            compact.look_after(self.root)

    def _roll(self, *, due: bool) -> None:
        if due:
            # The next is there before this one goes: whoever is killed leaves a journal behind, and so is missed.
            following = journal.Journal(self.root, self.life, self._journal.segment + 1)
            following.append(self._kept_ns, self.rows + 1, [])
            self._sealed.append(self._journal)
            self._journal = following

    def _convert(self) -> None:
        with files.locked(self.root) as mine:
            while mine and self._sealed:
                files.convert(self.root, journal.read(self._sealed[0].path))
                self._sealed.pop(0).close(remove=True)

    def _drop(self, time_ns: int, count: int, why: str) -> None:
        with self._lock:
            self.dropped += count
            self._untold = [self._untold[0] + count, self._untold[1] or time_ns, max(self._untold[2], time_ns)]
            self._untold_why = why


def _frames(rows: list[Waiting]) -> Iterator[list[Waiting]]:
    """Rows by the frame, none too large to be read again."""
    frame: list[Waiting] = []
    size = 0
    for row in list(rows):
        frame.append(row)
        size += ROW_BYTES + sum(len(value) for value in row[1] if isinstance(value, (str, list)))
        if size > FRAME_BYTES:
            yield frame
            frame, size = [], 0
    if frame:
        yield frame


def _life_row(command: str, kind: str) -> Waiting:
    said = {"kind": kind, "host": platform.node(), "command": command, "version": __version__}
    return "lives", fitted(Row("lives", time.time_ns(), "", "", said))


def _gap_row(kind: str, since_ns: int, until_ns: int, dropped: int, detail: str) -> Waiting:
    said = {"kind": kind, "since": since_ns, "until": until_ns, "rows": dropped, "detail": detail}
    return "gaps", fitted(Row("gaps", time.time_ns(), "", "", said))


def _lower_priority() -> None:
    """Files are made when nothing more urgent is to be done: Linux gives each thread a niceness of its own (setpriority(2))."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
