"""Look at several processes at once, some of which may be gone, unreadable, or known only from a snapshot file.

One that cannot be read never fails the others: it becomes a ``Problem``, which commands print as a line of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ncclwatch.errors import ExitStatus, NcclwatchError, TargetError, TargetGoneError
from ncclwatch.model.state import ProcessInfo, ProcessSample


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that was asked for and could not be read: ``what`` names it (``pid 12``, a file name)."""

    what: str
    pid: int | None
    error: NcclwatchError

    @property
    def line(self) -> str:
        """One line that names the thing once: messages of the target package mostly do already."""
        text = str(self.error)
        return text if self.what in text else f"{self.what}: {text}"


def sees_every_process() -> bool:
    """Whether a process that is not found is not there: we are root in the initial pid namespace.

    Its inode number is fixed (``PROC_PID_INIT_INO``, include/linux/proc_ns.h).
    """
    try:
        return os.geteuid() == 0 and Path("/proc/self/ns/pid").stat().st_ino == 0xEFFFFFFC
    except OSError:
        return False


class Readable(Protocol):
    """What is needed of a target process: one look at a time."""

    @property
    def info(self) -> ProcessInfo:
        """Identity."""

    def sample(self) -> ProcessSample:
        """Read once; raises ``NcclwatchError``."""

    def close(self) -> None:
        """Let go of everything held for the process."""


class Watched:
    """One process and what was read of it. After it ended its last sample is repeated with run state ``X``."""

    def __init__(self, target: Readable) -> None:
        self.target = target
        self.pid = target.info.pid
        self.history: list[ProcessSample] = []
        self.gone: NcclwatchError | None = None

    @property
    def last(self) -> ProcessSample | None:
        """The newest sample."""
        return self.history[-1] if self.history else None

    def look(self, *, keep: int = 64) -> NcclwatchError | None:
        """Read once more. A process that ended yields a sample with run state ``X``; any other error is returned.

        At most ``keep`` samples are held: the first and the newest, so that progress since the beginning still shows.
        """
        if self.gone is None:
            try:
                self._add(self.target.sample(), keep)
                return None
            except TargetGoneError as error:
                self.gone = error
                self.target.close()
            except NcclwatchError as error:
                return error
            except Exception as error:
                # What lies in a target's memory can be anything: one process that breaks our reading must not end the others'.
                if os.environ.get("NCCLWATCH_DEBUG") == "1":
                    raise
                kind = type(error).__name__
                return TargetError(
                    f"process {self.pid} could not be read ({kind}: {error})", "run with NCCLWATCH_DEBUG=1 and report it"
                )
        if self.last is None:
            return self.gone
        self._add(as_gone(self.last), keep)
        return None

    def _add(self, sample: ProcessSample, keep: int) -> None:
        self.history.append(sample)
        if len(self.history) > keep:
            del self.history[1]


def as_gone(last: ProcessSample) -> ProcessSample:
    """What is known of a process that ended: its communicators as last seen, nothing under way, run state ``X``."""
    return replace(
        last, run_state="X", time_ns=time.monotonic_ns(), wall_ns=time.time_ns(), duration_ns=0, operations=(), pending=()
    )


class Watch:
    """Several processes, opened together and read in rounds; a context manager."""

    def __init__(self) -> None:
        self.watched: list[Watched] = []
        self.problems: list[Problem] = []
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def open(self, pids: Iterable[int]) -> None:
        """Open every process that can be opened; the others become problems."""
        from ncclwatch.target.session import TargetProcess

        for pid in pids:
            try:
                target: Readable = TargetProcess.open(pid)
            except NcclwatchError as error:
                self.problems.append(Problem(f"pid {pid}", pid, error))
                continue
            self._stack.callback(target.close)
            self.watched.append(Watched(target))

    def round(self) -> list[ProcessSample]:
        """Look at every process once; returns the newest sample of each that could be read."""
        for watched in list(self.watched):
            error = watched.look()
            if error is not None:
                self.problems.append(Problem(f"pid {watched.pid}", watched.pid, error))
                # Readable before and not now (a torn moment) is kept for the next round; never readable is given up.
                if watched.last is None:
                    self.watched.remove(watched)
        return [watched.last for watched in self.watched if watched.last is not None]

    def series(self) -> list[Sequence[ProcessSample]]:
        """Everything read: one sequence of samples, in time order, per process."""
        return [watched.history for watched in self.watched if watched.history]

    def require_one(self) -> None:
        """Raise when nothing at all could be read."""
        if not any(watched.last for watched in self.watched):
            raise nothing_read(self.problems)


def nothing_read(problems: Sequence[Problem]) -> NcclwatchError:
    """The error to end with when every target failed: the one error itself, or the first with the number of the others."""
    if not problems:
        return TargetError("nothing could be read", "see 'ncclwatch ps' for the processes that can be")
    # A missing privilege explains the rest and is what the user can mend.
    worst = next((p for p in problems if p.error.status is ExitStatus.PRIVILEGE), problems[0])
    if len(problems) == 1:
        return worst.error
    failure = type(worst.error)(f"none of {len(problems)} targets could be read; {worst.error.message}", worst.error.hint)
    failure.status = worst.error.status
    return failure


def load_files(files: Iterable[Path]) -> tuple[list[Sequence[ProcessSample]], list[Problem]]:
    """Samples of every process in the snapshot files, one sequence per process in time order, and the files that failed."""
    from ncclwatch.target.image import load_snapshot

    series: list[Sequence[ProcessSample]] = []
    problems: list[Problem] = []
    for file in files:
        try:
            series.extend(_remembering(part) for part in load_snapshot(file) if part)
        except NcclwatchError as error:
            problems.append(Problem(str(file), None, error))
    return series, problems


def _remembering(series: Sequence[ProcessSample]) -> list[ProcessSample]:
    """Samples of a process that ended meanwhile: the later ones keep the communicators that were last seen."""
    kept = list(series)
    for i in range(1, len(kept)):
        if kept[i].run_state == "X" and not kept[i].communicators:
            kept[i] = replace(kept[i], communicators=kept[i - 1].communicators)
    return kept
