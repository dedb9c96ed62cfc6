"""``ncclwatch replay``: a recording in the dashboard, or as the lines a live session would have written."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import PathsFilesOption
from ncclwatch.cli.output import emit, note
from ncclwatch.errors import ExitStatus, UsageError
from ncclwatch.text import Style, clean

if TYPE_CHECKING:
    from ncclwatch.model.paths import Probe
    from ncclwatch.store.replay import Recordings, Replay

_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")


def replay(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Recordings; of several nodes together.")],
    speed: Annotated[float, typer.Option("--speed", min=0.125, max=1024.0, help="How much faster than it happened.")] = 1.0,
    seek: Annotated[
        str,
        typer.Option("--seek", metavar="WHEN", help="Where to begin: 90 (seconds), -30 (before the end), 14:03:20."),
    ] = "0",
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the dashboard, as fast as they can be read.")] = False,
    screenshot: Annotated[
        Path | None, typer.Option("--screenshot", metavar="SVG", help="Write the dashboard at that moment as a picture, and end.")
    ] = None,
    columns: Annotated[int, typer.Option("--columns", min=40, max=400, help="Width of the picture.")] = 120,
    lines: Annotated[int, typer.Option("--lines", min=12, max=200, help="Height of the picture.")] = 36,
    paths: PathsFilesOption = None,
) -> int:
    """Show recordings as if it happened now: pause, move by < and >, change the speed by - and +, drill down.

    \b
    Examples:
      ncclwatch replay job.recording --seek -60             the last minute
      ncclwatch replay node*.recording --speed 10           several nodes as one job
      ncclwatch replay job.recording --plain                as lines: what happened when
      ncclwatch replay job.recording --screenshot now.svg   a picture of the dashboard
    """
    options.require_files(files)
    from ncclwatch.cli.paths_files import probes_of
    from ncclwatch.cli.showing import is_screen
    from ncclwatch.store.replay import Recordings, Replay

    with Recordings(files) as recordings:
        from_ns = moment(seek, recordings)
        probes = probes_of(paths or ())
        for problem in recordings.problems:
            note(problem)
        if screenshot is not None:
            _picture(Replay(recordings, probes=probes), from_ns, screenshot, (columns, lines))
        elif plain or not is_screen():
            _lines(Replay(recordings, probes=probes), from_ns)
        else:
            _dashboard(recordings, from_ns, speed, probes)
    return ExitStatus.OK


def moment(text: str, recordings: Recordings) -> int:
    """The time a person meant, in ns since the epoch, within the recording."""
    text = text.strip()
    clock = _CLOCK.fullmatch(text)
    if clock:
        day = datetime.fromtimestamp(recordings.begin_ns / 1e9)
        try:
            wanted = day.replace(hour=int(clock[1]), minute=int(clock[2]), second=int(clock[3] or 0), microsecond=0)
        except ValueError:
            raise UsageError(f"'{clean(text, 40)}' is no time of day", "write it like 14:03:20") from None
        time_ns = int(wanted.timestamp() * 1e9)
        # A recording that runs over midnight: the time that lies in it.
        if time_ns < recordings.begin_ns and time_ns + 86_400_000_000_000 <= recordings.end_ns:
            time_ns += 86_400_000_000_000
    else:
        try:
            seconds = float(text.removesuffix("s"))
        except ValueError:
            raise UsageError(f"'{clean(text, 40)}' is no time", "write seconds (90, -30) or a time of day (14:03:20)") from None
        if not abs(seconds) < 1e9:
            raise UsageError(f"'{clean(text, 40)}' is no time", "write seconds (90, -30) or a time of day (14:03:20)")
        base = recordings.end_ns if text.startswith("-") else recordings.begin_ns
        time_ns = base + int(seconds * 1e9)
    return min(max(time_ns, recordings.begin_ns), recordings.end_ns)


def _dashboard(recordings: Recordings, from_ns: int, speed: float, probes: Sequence[Probe]) -> None:
    from ncclwatch.dashboard.app import Dashboard
    from ncclwatch.dashboard.replay import ReplaySource

    source = ReplaySource(recordings, speed=speed, from_ns=from_ns, probes=probes)
    try:
        Dashboard(source, probes=probes).run()
    finally:
        source.join()
    if source.error is not None:
        raise source.error


def _lines(replayed: Replay, from_ns: int) -> None:
    """What a live session would have written, with the recorded times."""
    from ncclwatch.view.builder import ViewBuilder
    from ncclwatch.view.verdict_text import verdict_lines

    style = Style()
    builder = ViewBuilder()
    emit(f"{_clock(replayed.recordings.begin_ns)} recording of {replayed.about()}")
    shown = 0
    for time_ns, update in replayed.updates():
        builder.feed(replayed, update, time_ns / 1e9)
        entries = [entry for entry in builder.log if entry.time * 1e9 >= from_ns - 1]
        for entry in entries[shown:]:
            if entry.kind != "verdict":
                emit(f"{_clock(int(entry.time * 1e9))} {entry.kind}: {entry.text}")
        shown = len(entries)
        if time_ns < from_ns:
            continue
        for verdict in update.told:
            for i, line in enumerate(verdict_lines(verdict, style)):
                emit(f"{_clock(time_ns)} {line}" if i == 0 else f"         {line}")
    standing = [verdict for verdict in replayed.verdicts if verdict.verdict_class.accuses]
    ended = next((recording.ended for recording in replayed.recordings.files if recording.ended), "")
    last = "; ".join(clean(verdict.summary, 300) for verdict in standing)
    why = ended or "cut off: the recorder was killed, or still writes"
    emit(f"{_clock(replayed.recordings.end_ns)} end ({why}); " + (f"verdict stands: {last}" if last else "no verdict stands"))


def _clock(time_ns: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_ns / 1e9))


def _picture(replayed: Replay, from_ns: int, path: Path, size: tuple[int, int]) -> None:
    from ncclwatch.dashboard.picture import write_picture
    from ncclwatch.view.builder import ViewBuilder

    builder = ViewBuilder()
    view = None
    for time_ns, update in replayed.updates():
        view = builder.feed(replayed, update, time_ns / 1e9) or view
        if time_ns >= from_ns and view is not None:
            break
    if view is None:
        raise UsageError("there is nothing to draw at that moment", "choose another one with --seek")
    try:
        write_picture([view], path, size)
    except OSError as error:
        raise UsageError(f"cannot write {clean(str(path))}: {error.strerror or error}", "choose another place") from error
    emit(f"{clean(str(path))}: the dashboard at {_clock(int(view.frame.time * 1e9))}")
