"""``ncclwatch compare``: how the processes of a job differ, live or from snapshots and recordings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import AllOption, JsonOption, PidOption
from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.collect.watched import Problem, nothing_read
from ncclwatch.errors import UsageError
from ncclwatch.knowledge.compare import Difference, differences, names
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProcessSample
from ncclwatch.text import clean, columns

HEADER = ("WHAT", "OF MOST", "OTHERWISE")
OTHERS_SHOWN = 6


def compare(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE | PID]...", help="Snapshots, recordings, or more pids.")
    ] = None,
    pid: PidOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show only what is not the same for all: NCCL and driver, settings, CPUs and limits, GPUs, NICs, PCIe.

    Of a job of several nodes give snapshots or recordings of each. A healthy job can be compared as well.
    """
    named, files = options.split_words(pid, words)
    options.require_files(files)
    if files and (named or every):
        raise UsageError("files and processes exclude each other", "give one or the other")
    samples, problems = _of_files(files) if files else _live(options.choose_pids(named, every))
    for problem in problems:
        note(problem.line)
    found = differences(samples)
    blind = sum(sample.process.traits is None for sample in samples)
    if as_json:
        emit_json({"processes": len(samples), "without_traits": blind, "differences": [_plain(one) for one in found]})
        return
    for line in lines(found, samples, blind):
        emit(line)


def _live(pids: Sequence[int]) -> tuple[list[ProcessSample], list[Problem]]:
    from ncclwatch.cli.sampling import Watch

    with Watch() as watch:
        watch.open(pids)
        found = watch.round()
        watch.require_one()
        return found, watch.problems


def _of_files(files: Sequence[Path]) -> tuple[list[ProcessSample], list[Problem]]:
    """The newest sample of every process of snapshots and recordings."""
    from ncclwatch.cli.sampling import load_files
    from ncclwatch.store.container import is_recording
    from ncclwatch.store.replay import Recordings

    recorded = [file for file in files if is_recording(file)]
    series, problems = load_files([file for file in files if file not in recorded])
    newest: dict[ProcessKey, ProcessSample] = {samples[-1].process.key: samples[-1] for samples in series}
    if recorded:
        with Recordings(recorded) as recordings:
            for _, _, batch in recordings.batches():
                newest |= {sample.process.key: sample for sample in batch.samples}
    if not newest:
        raise nothing_read(problems)
    return list(newest.values()), problems


def lines(found: Sequence[Difference], samples: Sequence[ProcessSample], blind: int) -> Iterator[str]:
    """The table, what each has of its own, and of whom nothing is known."""
    hosts = len({sample.process.host for sample in samples})
    yield f"{len(samples)} process{'es' if len(samples) != 1 else ''} on {hosts} host{'s' if hosts != 1 else ''}"
    own = [one.what for one in found if one.each_its_own]
    table = [_row(one) for one in found if not one.each_its_own]
    if table:
        yield from columns(HEADER, table)
    else:
        yield "all that is known of them is the same"
    if own:
        yield f"each has its own: {', '.join(clean(what, 60) for what in own)}"
    if blind:
        yield f"of {blind} only NCCL's release is known: they were recorded by an earlier release of ncclwatch"


def _row(one: Difference) -> tuple[str, str, str]:
    (most, whose), *others = one.values
    shown = [f"{names(who)}: {clean(value, 100)}" for value, who in others[:OTHERS_SHOWN]]
    shown += [f"… {len(others) - OTHERS_SHOWN} more values"] if len(others) > OTHERS_SHOWN else []
    shown += [f"not known of {names(one.unknown)}"] if one.unknown else []
    # Two halves are no majority: each side is named.
    first = f"{clean(most, 100)} ({len(whose)})" if len(whose) > len(others[0][1]) else f"{names(whose)}: {clean(most, 100)}"
    return clean(one.what, 60), first, "; ".join(shown)


def _plain(one: Difference) -> dict[str, object]:
    values = [
        {"value": value, "processes": [{"rank": who.rank, "host": who.host, "pid": who.pid} for who in whose]}
        for value, whose in one.values
    ]
    unknown = [{"rank": who.rank, "host": who.host, "pid": who.pid} for who in one.unknown]
    return {"what": one.what, "each_its_own": one.each_its_own, "values": values, "unknown": unknown}
