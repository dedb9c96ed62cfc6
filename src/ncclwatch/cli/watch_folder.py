"""``ncclwatch watch-folder``: judges other tools' records as they appear, one verdict a job.

A watchdog writes dumps when a collective has timed out, each rank its own within seconds. A folder is judged once nothing in it
has changed for a while; what comes later is judged again, and told where it changes what is said.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from ncclwatch.cli.foreign import Judged, judge_found
from ncclwatch.cli.options import ExitCodeOption, JsonOption
from ncclwatch.cli.output import emit, emit_json, flush, note
from ncclwatch.cli.verdicts import print_verdicts
from ncclwatch.errors import ExitStatus, NcclwatchError, UsageError
from ncclwatch.ingest.folders import files_in, find
from ncclwatch.stopping import stop_on_signals
from ncclwatch.text import clean

Mark = tuple[int, int]
"""(size, time of the last change) of a file."""


class FolderWatch:
    """What has come into a folder, and what was said of it. ``settle_s``: seconds without a change before it is judged."""

    def __init__(self, folder: Path, settle_s: float) -> None:
        self.folder, self.settle_s = folder, settle_s
        self.problems: list[str] = []
        """What could not be read at the last look."""
        self._gone = False
        self._marks: dict[Path, dict[Path, Mark]] = {}
        self._changed_s: dict[Path, float] = {}
        self._judged: dict[Path, dict[Path, Mark]] = {}
        self._told: dict[tuple[Path, str, tuple[str, ...]], str] = {}

    def look(self, now_s: float) -> Iterator[Judged]:
        """What is to be said now: of jobs that are new, and of those of which something else is to be said than before."""
        self.problems = []
        gone = not self.folder.is_dir()
        if gone and not self._gone:
            self.problems.append(f"{clean(str(self.folder), 160)} is gone: waiting for it to come back")
        self._gone = gone
        seen: dict[Path, dict[Path, Mark]] = defaultdict(dict)
        for file in files_in(self.folder):
            try:
                status = file.stat()
            except OSError:
                continue
            seen[file.parent][file] = (status.st_size, status.st_mtime_ns)
        for place, marks in seen.items():
            if marks != self._marks.get(place):
                self._changed_s[place] = now_s
            elif now_s - self._changed_s[place] >= self.settle_s and marks != self._judged.get(place):
                self._judged[place] = marks
                yield from self._judge(place, sorted(marks))
        self._marks = dict(seen)

    def _judge(self, place: Path, files: list[Path]) -> Iterator[Judged]:
        try:
            found = find(files)
            if not found.files:
                self.problems += found.problems
                return
            jobs, problems = judge_found(found)
        except NcclwatchError as error:
            self.problems.append(str(error))
            return
        self.problems += problems
        for job in jobs:
            key, said = (place, job.job, job.formats), " ".join(verdict.id for verdict in job.verdicts)
            if self._told.get(key) != said:
                self._told[key] = said
                yield job


def watch_folder(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where dumps appear, or folders of them.")],
    as_json: JsonOption = False,
    exit_code: ExitCodeOption = False,
    once: Annotated[bool, typer.Option("--once", help="End with the first verdict.")] = False,
    settle: Annotated[
        float, typer.Option("--settle", min=0.0, max=3600.0, help="Seconds without a change before a folder is judged.")
    ] = 10.0,
    interval: Annotated[float, typer.Option("--interval", min=0.05, max=600.0, help="Seconds between two looks.")] = 1.0,
) -> int:
    """Judge other tools' records as they appear in a folder: one verdict a job, until interrupted."""
    if not folder.is_dir():
        raise UsageError(f"no such folder: {clean(str(folder))}", "name the folder that dumps are written to")
    rest = stop_on_signals().wait
    return watch(FolderWatch(folder, settle), lambda: rest(interval), as_json=as_json, exit_code=exit_code, once=once)


def watch(
    watched: FolderWatch, rest: Callable[[], bool], *, as_json: bool, exit_code: bool, once: bool,
    clock: Callable[[], float] = time.monotonic,
) -> int:  # fmt: skip
    """Look again and again, until ``rest`` between two looks says that it is over; returns the exit status."""
    accused = False
    while True:
        told = False
        for job in watched.look(clock()):
            told = True
            accused |= any(verdict.verdict_class.accuses for verdict in job.verdicts)
            if as_json:
                emit_json({**job.verdicts[0].to_json(), "job": job.job, "formats": list(job.formats)}, indent=None)
            else:
                emit(f"{time.strftime('%H:%M:%S')}  {job.job or 'a job'} ({', '.join(job.formats)})")
                print_verdicts(job.verdicts)
                emit()
        for line in watched.problems:
            note(line)
        if told:
            flush()
        if (told and once) or rest():
            return ExitStatus.VERDICT if exit_code and accused else ExitStatus.OK
