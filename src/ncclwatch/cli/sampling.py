"""Read several processes at once, some of which may be gone, unreadable, or known only from a snapshot file.

One that cannot be read never fails the others: it becomes a ``Problem``, which commands print as a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from ncclwatch.collect.ranks import series_of
from ncclwatch.collect.watched import Problem, Readable, Watched, nothing_read
from ncclwatch.errors import NcclwatchError
from ncclwatch.gc_pause import collector_at_rest
from ncclwatch.model.state import ProcessSample
from ncclwatch.side_by_side import side_by_side


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
                self._note(Problem(f"pid {watched.pid}", watched.pid, error))
                # Readable before and not now (a torn moment) is kept for the next round; never readable is given up.
                if watched.last is None:
                    self.watched.remove(watched)
        return [watched.last for watched in self.watched if watched.last is not None]

    def _note(self, problem: Problem) -> None:
        """Keep a problem, of several rounds once."""
        if all(problem.line != known.line for known in self.problems):
            self.problems.append(problem)

    def series(self) -> list[Sequence[ProcessSample]]:
        """Everything read: one sequence of samples, in time order, per rank."""
        return [series for watched in self.watched for series in series_of(watched.history)]

    def require_one(self) -> None:
        """Raise when nothing at all could be read."""
        if not any(watched.last for watched in self.watched):
            raise nothing_read(self.problems)


MANY_FILES = 16
"""From so many on a snapshot file a CPU is decoded at a time: a process of its own costs as much as one or two files do."""
CHUNK = 4
"""Files that a process decodes before it hands them over."""


def load_files(files: Iterable[Path]) -> tuple[list[Sequence[ProcessSample]], list[Problem]]:
    """Samples of every process in the snapshot files, one sequence per process in time order, and the files that failed."""
    named = list(files)
    series: list[Sequence[ProcessSample]] = []
    problems: list[Problem] = []
    with collector_at_rest():  # 512 files are millions of objects, none of them garbage.
        for file, found in zip(named, _loaded(named), strict=True):
            if isinstance(found, NcclwatchError):
                problems.append(Problem(str(file), None, found))
            else:
                series += found
    return series, problems


def _loaded(files: Sequence[Path]) -> Iterator[list[list[ProcessSample]] | NcclwatchError]:
    """What each file holds, in order; of many, by as many processes as there are CPUs for them."""
    # Nothing runs beside it here: no thread was begun.
    yield from side_by_side(_load, files, chunk=CHUNK) if len(files) >= MANY_FILES else map(_load, files)


def _load(file: Path) -> list[list[ProcessSample]] | NcclwatchError:
    from ncclwatch.target.image import load_snapshot

    try:
        return [_remembering(part) for part in load_snapshot(file) if part]
    except NcclwatchError as error:
        return error


def _remembering(series: Sequence[ProcessSample]) -> list[ProcessSample]:
    """Samples of a process that ended meanwhile: the later ones keep the communicators that were last seen."""
    kept = list(series)
    for i in range(1, len(kept)):
        if kept[i].run_state == "X" and not kept[i].communicators:
            kept[i] = replace(kept[i], communicators=kept[i - 1].communicators)
    return kept
