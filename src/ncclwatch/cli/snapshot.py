"""``ncclwatch snapshot``: record the pages that a diagnosis reads into a file, to be looked at elsewhere and later."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import AllOption, PidOption
from ncclwatch.cli.output import emit, note
from ncclwatch.collect.watched import Problem, nothing_read
from ncclwatch.errors import NcclwatchError, UsageError
from ncclwatch.text import clean, size


def snapshot(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[PID]...", help="More pids.")] = None,
    pid: PidOption = None,
    every: AllOption = False,
    samples: Annotated[int, typer.Option("--samples", min=2, max=60, help="Samples of each process.")] = 2,
    interval: Annotated[float, typer.Option("--interval", min=0.05, max=60.0, help="Seconds between two samples.")] = 1.0,
) -> None:
    """Write a snapshot file that 'dump' and 'diagnose' accept on any machine, without privileges."""
    named = options.only_pids(pid, words, "name the file to write with -o FILE")
    chosen = _usable(options.choose_pids(named, every))
    if output.is_dir() or not output.parent.is_dir():
        raise UsageError(f"cannot write {clean(str(output))}", "name a file in a folder that exists")
    from ncclwatch.target.image import record_snapshot

    try:
        record_snapshot(chosen, output, samples=samples, interval=interval)
        written = output.stat().st_size
    except OSError as error:
        raise UsageError(
            f"cannot write {clean(str(output))}: {error.strerror or error}", "choose another place with -o"
        ) from error
    count = f"{len(chosen)} process{'es' if len(chosen) > 1 else ''}"
    emit(
        f"{clean(str(output))}: {count}, {samples} samples each, {size(written)}: "
        f"read it with 'ncclwatch diagnose {clean(str(output))}'"
    )


def _usable(pids: list[int]) -> list[int]:
    """The processes that can be looked at; the others get a line each. Raises when there is none."""
    from ncclwatch.target.discover import inspect_process

    usable, problems = [], []
    for pid in pids:
        try:
            inspect_process(pid)
            usable.append(pid)
        except NcclwatchError as error:
            problems.append(Problem(f"pid {pid}", pid, error))
    if not usable:
        raise nothing_read(problems)
    for problem in problems:
        note(problem.line)
    return usable
