"""What commands that take files do with recordings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.cli.verdicts import print_verdicts
from ncclwatch.errors import ExitStatus, TargetError, UsageError
from ncclwatch.ingest.folders import files_in
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict
from ncclwatch.report.history import Incident, incidents
from ncclwatch.slow_modes import SlowRule
from ncclwatch.store.container import is_recording
from ncclwatch.store.replay import Recordings, Replay
from ncclwatch.target.image import is_snapshot
from ncclwatch.text import clean, duration

OTHERS_SHOWN = 4
"""Files of a folder that are named when they are left out."""


def recordings_among(files: Sequence[Path], *, alone: bool) -> list[Path]:
    """The recordings among files; they are judged by themselves, not together with snapshots or live processes."""
    found = [file for file in files if is_recording(file)]
    if found and (not alone or len(found) != len(files)):
        raise UsageError("recordings are judged by themselves", "leave out the pids and the snapshot files")
    return found


def with_folders(paths: Sequence[Path]) -> list[Path]:
    """Paths in which a folder of snapshots or recordings (one a node, say) is those files; what lies beside them is told."""
    found: list[Path] = []
    for path in paths:
        files = list(files_in(path)) if path.is_dir() else []
        own = [file for file in files if is_recording(file) or is_snapshot(file)]
        found += own or [path]
        others = [file.name for file in files if file not in set(own)] if own else []
        if others:
            more = f" and {len(others) - OTHERS_SHOWN} more" if len(others) > OTHERS_SHOWN else ""
            names = clean(", ".join(others[:OTHERS_SHOWN]), 200)
            note(f"{clean(str(path), 160)}: neither snapshots nor recordings, left out: {names}{more}")
    return found


@contextmanager
def as_recordings(files: Sequence[Path]) -> Iterator[list[Path]]:
    """Files as recordings: snapshots are turned into ones that last while the context does."""
    from ncclwatch.cli.sampling import load_files
    from ncclwatch.collect.watched import nothing_read

    with TemporaryDirectory(prefix="ncclwatch-") as folder:
        paths = [file for file in files if is_recording(file)]
        snapshots = [file for file in files if file not in paths]
        if snapshots:
            series, problems = load_files(snapshots)
            if not series:
                raise nothing_read(problems)
            for problem in problems:
                note(problem.line)
            paths += write_series(series, Path(folder))
        yield paths


def write_series(series: Sequence[Sequence[ProcessSample]], folder: Path) -> list[Path]:
    """Samples of processes as recordings, one a host."""
    from ncclwatch.collect.series import batches_of
    from ncclwatch.store.recorder import Recorder

    paths = []
    for number, (host, batches) in enumerate(batches_of(series)):
        paths.append(folder / str(number))
        recorder = Recorder(paths[-1], about={"host": host, "command": "snapshot"})
        for batch in batches:
            recorder.put(batch)
        recorder.close("that was the snapshot")
    return paths


def judge_recordings(
    paths: Sequence[Path], *, as_json: bool, exit_code: bool, slow: SlowRule | None = None, why: bool = False
) -> int:
    """Print what stands at the end of the recordings, and what stood before; returns the exit status."""
    with Recordings(paths) as recordings:
        replay = Replay(recordings, slow)
        found = incidents(replay)
        for problem in recordings.problems:
            note(problem)
    verdicts: Sequence[Verdict] = replay.verdicts
    if not verdicts:
        raise TargetError("no sample of the recording could be judged", "record for two samples at least")
    if as_json:
        emit_json({**verdicts[0].to_json(), "incidents": [incident_json(incident) for incident in found]})
    else:
        print_verdicts(verdicts, why=why)
        over = [incident for incident in found if incident.ended is not None]
        if over:
            emit()
            emit("earlier in this recording")
        for incident in over:
            emit(f"  {incident_line(incident)}")
    return ExitStatus.VERDICT if exit_code and verdicts[0].verdict_class.accuses else ExitStatus.OK


def incident_line(incident: Incident) -> str:
    """``14:03:20 for 12s  STOPPED  rank 2 …``."""
    verdict = incident.verdict
    lasted = f"for {duration(incident.ended - incident.began)}" if incident.ended is not None else "until the end"
    word = verdict.verdict_class.value.upper()
    return f"{time.strftime('%H:%M:%S', time.localtime(incident.began))} {lasted}  {word}  {clean(verdict.summary, 300)}"


def incident_json(incident: Incident) -> dict[str, object]:
    """An incident as plain data; times in seconds since the epoch."""
    return {"began": incident.began, "ended": incident.ended, "verdict": incident.verdict.to_json()}
