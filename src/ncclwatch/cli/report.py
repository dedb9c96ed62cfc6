"""``ncclwatch report``: a page for a ticket, a trace for Perfetto, or everything as JSON, of a recording or of a job now."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import AllOption, PidOption
from ncclwatch.cli.output import emit, note, plain
from ncclwatch.errors import ExitStatus, TargetError, UsageError
from ncclwatch.stopping import Stop
from ncclwatch.text import clean, size

if TYPE_CHECKING:
    from ncclwatch.model.paths import Probe
    from ncclwatch.report.gather import Report
    from ncclwatch.store.replay import Replay

SCHEMA_NAME = "ncclwatch.report/1"


def report(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE | PID]...", help="Recordings or snapshots, or pids.")
    ] = None,
    pid: PidOption = None,
    every: AllOption = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write; without, the page goes to standard output."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of a page.")] = False,
    perfetto: Annotated[bool, typer.Option("--perfetto", help="Write a trace for ui.perfetto.dev instead of a page.")] = False,
    duration: Annotated[
        float, typer.Option("--duration", "-d", min=2.0, max=3600.0, help="Of a live job: seconds to watch it.")
    ] = 12.0,
    probes: Annotated[bool, typer.Option("--probes/--no-probes", help="Of a live job: trace calls with uprobes too.")] = True,
    paths: Annotated[
        list[Path] | None,
        typer.Option("--paths", metavar="FILE", help="Draw flows on what 'ncclwatch paths probe -o FILE' told."),
    ] = None,
) -> int:
    """Write one self-contained HTML page to attach to a ticket: verdict, evidence, ranks around the event, steps, waits.

    The page holds no script and makes no request. With several recordings (one a node) it is of the whole job.

    \b
    Examples:
      ncclwatch report job.recording -o hang.html               of a recording
      ncclwatch report --all -o hang.html                       of the job as it is now
      ncclwatch report FOLDER -o hang.html                      of a folder with a snapshot of each node
      ncclwatch report job.recording --perfetto -o job.pftrace  open it at ui.perfetto.dev
    """
    if as_json and perfetto:
        raise UsageError("--json and --perfetto exclude each other", "give one of them")
    if perfetto and output is None:
        raise UsageError("a trace is binary", "name the file to write, for example -o job.pftrace")
    from ncclwatch.cli.paths_files import probes_of

    named, files = options.split_words(pid, words)
    if any(file.is_dir() for file in files):
        from ncclwatch.cli.recorded import with_folders

        files = with_folders(files)
    options.require_files(files)
    if files and (named or every):
        raise UsageError("a report is of files or of processes, not of both", "leave out one of them")
    known = probes_of(paths or ())
    make = _perfetto if perfetto else _json if as_json else _page_with(known)
    if files:
        from ncclwatch.cli.recorded import as_recordings

        with as_recordings(files) as recordings:
            _report(recordings, make, output, known)
        return ExitStatus.OK
    chosen = options.choose_pids(named, every)
    with tempfile.TemporaryDirectory(prefix="ncclwatch-") as folder:
        watch_into(live := Path(folder) / "live", chosen, every=every, duration=duration, probes=probes)
        _report([live], make, output, known)
    return ExitStatus.OK


def watch_into(path: Path, pids: Sequence[int], *, every: bool, duration: float, probes: bool) -> None:
    """Record a live job for a while."""
    from ncclwatch.cli.live import LiveSession, until_of
    from ncclwatch.store.recorder import Recorder

    session = LiveSession(every=every, stop=Stop())
    recorder = Recorder(path, about={"command": "report"})
    reason = "ended by an error"
    try:
        session.taps.append(recorder.put)
        session.start(pids, calls=probes)
        until = until_of(duration)
        while not (reason := session.step(until=until).finished):
            pass
    finally:
        session.close()
        recorder.close(reason)


Make = Callable[["Replay"], bytes]


def _report(paths: Sequence[Path], make: Make, output: Path | None, probes: Sequence[Probe]) -> None:
    from ncclwatch.store.replay import Recordings, Replay

    with Recordings(paths) as recordings:
        made = make(Replay(recordings, probes=probes))
        for problem in recordings.problems:
            note(problem)
    if output is None:
        emit(made.decode().rstrip("\n"))
        return
    try:
        output.write_bytes(made)
    except OSError as error:
        raise UsageError(
            f"cannot write {clean(str(output))}: {error.strerror or error}", "choose another place with -o"
        ) from error
    emit(f"{clean(str(output))}: {size(len(made))}")


def _gather(replay: Replay) -> Report:
    from ncclwatch.report.gather import gather

    found = gather(replay)
    if found is None:
        raise TargetError("this recording holds no sample", "record for two samples at least")
    return found


def _page_with(probes: Sequence[Probe]) -> Make:
    """A page that draws flows on these probes."""

    def make(replay: Replay) -> bytes:
        from ncclwatch.report.html import page

        found = _gather(replay)
        found.probes = probes
        return page(found).encode()

    return make


def _json(replay: Replay) -> bytes:
    return (json.dumps(as_json_data(_gather(replay)), indent=2, allow_nan=False) + "\n").encode()


def as_json_data(found: Report) -> dict[str, Any]:
    """A report as plain data; times are seconds since the epoch."""
    from ncclwatch.cli.live_json import window_json, work_json
    from ncclwatch.cli.recorded import incident_json

    view = found.view
    return {
        "schema": SCHEMA_NAME,
        "begin": found.begin,
        "end": found.end,
        "verdicts": [verdict.to_json() for verdict in found.verdicts],
        "incidents": [incident_json(incident) for incident in found.incidents],
        "focus": found.focus.id if found.focus else None,
        "event": found.event,
        "look": view.frame.time,
        "work": [work_json(window) for window in view.frame.work or ()],
        "ranks": [
            {**window_json(window), "state": letter} for window, letter in zip(view.frame.windows, view.letters, strict=True)
        ],
        "not_observed": [cell.rank for cell in view.grid if cell.window is None],
        "waits": [{"rank": a, "waits_for": b, "share": round(s, 4)} for (a, b), s in sorted(found.waits.share.items())],
        "planes": plain(list(found.planes)),
        "lost": found.lost,
        "problems": list(found.problems),
        "environment": plain(dict(found.environment)),
        "log": plain(found.log),
    }


def _perfetto(replay: Replay) -> bytes:
    from ncclwatch.report.history import incidents
    from ncclwatch.report.perfetto import TraceBuilder
    from ncclwatch.view.builder import ViewBuilder

    recordings = replay.recordings
    trace = TraceBuilder(recordings.begin_ns / 1e9)
    builder = ViewBuilder()

    def each(time_ns: int, update: Any) -> None:
        view = builder.feed(replay, update, time_ns / 1e9)
        if view is not None:
            trace.add(view)

    found = incidents(replay, each)
    return trace.finish(found, recordings.end_ns / 1e9)
