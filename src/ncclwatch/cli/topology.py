"""``ncclwatch topology``: groups, roles, layout and the pattern of an iteration, inferred from what a job calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import AllOption, JsonOption, PidOption
from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.errors import UsageError
from ncclwatch.stopping import Stop
from ncclwatch.text import Style

if TYPE_CHECKING:
    from ncclwatch.cli.stated_layout import Stated
    from ncclwatch.engine.topology.namer import StageNamer
    from ncclwatch.model.state import ProcessSample

LEAST_S = 3.0
"""A layout that is clear is shown after this long, whatever the duration; one that is not is given all of it."""

BY_COUNTS = "roles are those that NCCL's own counts tell"


def topology(
    words: Annotated[list[str] | None, typer.Argument(metavar="[PID|FILE]...", help="More pids, or recordings.")] = None,
    pid: PidOption = None,
    every: AllOption = False,
    duration: Annotated[float, typer.Option("--duration", "-d", min=0.5, max=3600.0, help="Seconds to watch at most.")] = 30.0,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="JSON with sizes (tp, pp, …), which confirms and names.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Infer which ranks form tensor, pipeline, data, context and expert groups; nothing needs to be configured."""
    from ncclwatch.cli.stated_layout import from_file

    named, files = options.split_words(pid, words)
    options.require_files(files)
    if files and (named or every):
        raise UsageError("recordings and processes exclude each other", "give one or the other")
    if config is not None:
        options.require_files([config])
    stated = from_file(config) if config is not None else None
    from ncclwatch.engine.topology.namer import StageNamer

    namer = StageNamer()
    samples, remarks = (
        _from_files(namer, files) if files else _from_processes(namer, options.choose_pids(named, every), duration, every=every)
    )
    _show(namer, samples, remarks, stated, as_json=as_json)


def _from_files(namer: StageNamer, files: Sequence[Path]) -> tuple[list[ProcessSample], list[str]]:
    from ncclwatch.cli.recorded import as_recordings
    from ncclwatch.store.replay import Recordings

    latest: dict[object, ProcessSample] = {}
    calls = False
    with as_recordings(files) as paths, Recordings(paths) as recordings:
        for _, _, batch in recordings.batches():
            for sample in batch.samples:
                latest[sample.process.key] = sample
            if batch.samples:
                namer.note_samples(list(latest.values()))
            if batch.events is not None and len(batch.events):
                calls = True
                namer.observe(batch.events, host=batch.host)
        for problem in recordings.problems:
            note(problem)
    return list(latest.values()), [] if calls else [f"no calls are recorded: {BY_COUNTS}"]


def _from_processes(
    namer: StageNamer, pids: Sequence[int], duration: float, *, every: bool
) -> tuple[list[ProcessSample], list[str]]:
    from ncclwatch.collect.node import NodeCollector

    collector = NodeCollector(every=every, stop=Stop())
    latest: dict[object, ProcessSample] = {}
    began = time.monotonic()
    try:
        first = collector.start(pids, network=False)
        latest.update({sample.process.key: sample for sample in first.samples})
        namer.note_samples(list(latest.values()))
        reason = next((plane.reason for plane in first.planes if plane.name == "calls" and not plane.running), "")
        while not reason:
            batch = collector.step(until=began + duration)
            latest.update({sample.process.key: sample for sample in batch.samples})
            if batch.samples:
                namer.note_samples(list(latest.values()))
            if batch.events is not None and len(batch.events):
                namer.observe(batch.events, host=batch.host)
            learned = namer.learned
            clear = learned is not None and learned.confirmed and learned.topology.layout.known
            if batch.finished or (clear and time.monotonic() - began >= LEAST_S):
                break
        for problem in collector.problems:
            note(problem.line)
    except KeyboardInterrupt:
        reason = ""
    finally:
        collector.close()
    if reason:
        return list(latest.values()), [f"calls are not seen: {reason}; {BY_COUNTS}"]
    quiet = namer.learned is None
    remark = f"no call was seen in {time.monotonic() - began:.0f} s: the job stands, or computes; {BY_COUNTS}"
    return list(latest.values()), [remark] if quiet else []


def _show(
    namer: StageNamer, samples: Sequence[ProcessSample], remarks: Sequence[str], given: Stated | None, *, as_json: bool
) -> None:
    from ncclwatch.cli import topology_text
    from ncclwatch.cli.stated_layout import compare, from_command, name_unsure

    jobs = []
    for learned, members in namer.everything(samples):
        stated = given or next((s for m in members if not (s := from_command(m.process.command)).empty), None)
        notes = list(remarks)
        if stated is not None:
            notes += compare(stated, learned.topology)
            learned.topology = name_unsure(stated, learned.topology)
        jobs.append((learned, len(members), notes))
    if as_json:
        emit_json({"schema": topology_text.SCHEMA_NAME, "jobs": [topology_text.to_json(*job) for job in jobs]})
        return
    style = Style(sys.stdout)
    for number, job in enumerate(jobs):
        if number:
            emit()
        for line in topology_text.lines(*job, style):
            emit(line)
    if not jobs:
        emit("no communicator was found in the processes looked at")
