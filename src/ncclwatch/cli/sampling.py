"""Read several processes at once, some of which may be gone, unreadable, or known only from a snapshot file.

One that cannot be read never fails the others: it becomes a ``Problem``, which commands print as a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from ncclwatch.collect.ranks import series_of
from ncclwatch.collect.watched import Problem, Readable, Watched, nothing_read
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.state import ProcessSample


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
            watched = Watched(target)
            self._stack.callback(watched.close)
            self.watched.append(watched)

    def round(self) -> list[ProcessSample]:
        """Read every process once; returns the newest sample of each that could be read."""
        for watched in list(self.watched):
            error = watched.look()
            if error is not None:
                self.problems.append(Problem(f"pid {watched.pid}", watched.pid, error))
                # Readable before and not now (a torn moment) is kept for the next round; never readable is given up.
                if watched.last is None:
                    self.watched.remove(watched)
        return [watched.last for watched in self.watched if watched.last is not None]

    def series(self) -> list[Sequence[ProcessSample]]:
        """Everything read: one sequence of samples, in time order, per rank."""
        return [series for watched in self.watched for series in series_of(watched.history)]

    def require_one(self) -> None:
        """Raise when nothing at all could be read."""
        if not any(watched.last for watched in self.watched):
            raise nothing_read(self.problems)


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
