"""``ncclwatch dump``: what NCCL itself believes in each process, read once, without BPF and without stopping anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ncclwatch.cli import options
from ncclwatch.cli.dump_text import process_lines
from ncclwatch.cli.labels import by_rank
from ncclwatch.cli.options import AllOption, JsonOption, PidOption
from ncclwatch.cli.output import emit, emit_json, note, plain
from ncclwatch.cli.sampling import Watch, load_files
from ncclwatch.collect.watched import Problem, nothing_read
from ncclwatch.model.state import ProcessSample
from ncclwatch.text import Style

SCHEMA_NAME = "ncclwatch.dump/1"


def dump(
    words: Annotated[list[str] | None, typer.Argument(metavar="[FILE | PID]...", help="Snapshot files, or more pids.")] = None,
    pid: PidOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show communicators, unfinished operations and their steps; works on a hung or stopped process."""
    samples, problems = read(pid, words, every=every)
    if as_json:
        emit_json({"schema": SCHEMA_NAME, "processes": plain(by_rank(samples)), "errors": [problem_json(p) for p in problems]})
    else:
        style = Style()
        for i, sample in enumerate(by_rank(samples)):
            if i:
                emit()
            for line in process_lines(sample, style):
                emit(line)
    if samples or len(problems) > 1:
        for problem in problems:
            note(problem.line)
    if not samples:
        raise nothing_read(problems)


def read(pid: Sequence[str] | None, words: Sequence[str] | None, *, every: bool) -> tuple[list[ProcessSample], list[Problem]]:
    """The newest sample of every process and file that was asked for, and what could not be read."""
    named, files = options.split_words(pid, words)
    options.require_files(files)
    series, problems = load_files(files)
    samples = [part[-1] for part in series]
    if named or every or not files:
        with Watch() as watch:
            watch.open(options.choose_pids(named, every))
            samples += watch.round()
            problems += watch.problems
    return samples, problems


def problem_json(problem: Problem) -> dict[str, object]:
    """A problem as it stands in JSON output."""
    what = Path(problem.what).name if problem.pid is None else problem.what
    return {"target": what, "pid": problem.pid, "error": problem.error.message, "hint": problem.error.hint}
