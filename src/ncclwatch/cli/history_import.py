"""Recordings and lines of verdicts, taken into a history under a name that their content gives: twice it is once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ncclwatch.errors import TargetError
from ncclwatch.history import files, journal
from ncclwatch.history.feed import Feed
from ncclwatch.history.rows import Run, nanoseconds, verdict_row
from ncclwatch.history.snapshot import dataset, take
from ncclwatch.history.tables import Row, fitted
from ncclwatch.text import clean

PART = 100_000
"""Rows that are written together."""
MAX_LINE = 4 << 20
"""Bound: bytes of a line."""
MAX_PROBLEMS = 20
KINDS = {"verdict": "verdict", "recovery": "recovery"}
"""By the type of a line (``attach --json``, ``engine --json``) what it is in a history."""


class Importer:
    """Writes rows of one source into files, in parts; the row of ``lives`` that ends it says that all of it is there."""

    def __init__(self, root: Path, life: str) -> None:
        self._root, self._life = root, life
        self._rows: list[journal.Numbered] = []
        self._segment = 0
        self.count = 0

    def put(self, time_ns: int, make: Callable[[], Iterable[Row]]) -> None:
        """Take rows, as :meth:`~ncclwatch.history.writer.HistoryWriter.put` does."""
        for row in make():
            self.count += 1
            self._rows.append((row.table, [*fitted(row), self._life, self.count]))
        if len(self._rows) >= PART:
            self._write()

    def close(self, time_ns: int, command: str) -> None:
        """Write the rest."""
        for kind in ("begin", "end"):
            self.put(time_ns, lambda kind=kind: [Row("lives", time_ns, "", "", {"kind": kind, "command": command})])  # type: ignore[misc]
        self._write()

    def _write(self) -> None:
        try:
            with files.locked(self._root, wait=True):
                files.convert(self._root, journal.Read(self._life, self._segment, self._rows))
        except OSError as error:
            hint = "make room, or name another folder, and import it again: what is there is not taken in twice"
            raise TargetError(f"{clean(str(self._root))} cannot be written: {error.strerror or error}", hint) from error
        self._rows = []
        self._segment += 1


def take_in(paths: Sequence[Path], root: Path, job: str) -> Iterator[str]:
    """Take files in; a line for each says what came of it. Raises ``TargetError`` for what is neither."""
    from ncclwatch.store.container import MAGIC

    try:
        for folder in (root, journal.folder(root)):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TargetError(f"{clean(str(root))} cannot be written: {error.strerror or error}", "name another folder") from error
    recordings = [path for path in paths if _begins(path, MAGIC)]
    known = _known(root)
    if recordings:
        with _source(root, recordings, job, known) as importer:
            if importer is not None:
                _recordings(recordings, importer, job)
        yield _said(recordings, importer)
    for path in paths:
        if path not in recordings:
            with _source(root, [path], job, known) as importer:
                if importer is not None:
                    _lines(path, importer, job)
            yield _said([path], importer)


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _known(root: Path) -> set[str]:
    """What was taken in before, whole."""
    taken = take(str(root), ("lives",))
    found = (*dataset(taken, "lives").to_table(columns=["life", "kind"]).to_pylist(), *taken.fresh["lives"].to_pylist())
    return {row["life"] for row in found if row["kind"] == "end"}


@contextmanager
def _source(root: Path, paths: Sequence[Path], job: str, known: set[str]) -> Iterator[Importer | None]:
    digest = hashlib.sha256(job.encode("utf-8", "replace"))
    for path in sorted(paths):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    life = f"import-{digest.hexdigest()[:20]}"
    yield None if life in known else Importer(root, life)


def _said(paths: Sequence[Path], importer: Importer | None) -> str:
    names = ", ".join(clean(path.name, 80) for path in paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
    return f"{names}: it is there already" if importer is None else f"{names}: {importer.count} rows"


def _recordings(paths: Sequence[Path], importer: Importer, job: str) -> None:
    from ncclwatch.store.replay import Recordings, Replay

    with Recordings(paths) as recordings:
        replay, feed, time_ns = Replay(recordings), Feed(importer.put, job), recordings.begin_ns
        for time_ns, update in replay.updates():
            feed.take(replay, update, time_ns)
        feed.close()
        importer.close(time_ns, "import")


def _lines(path: Path, importer: Importer, job: str) -> None:
    """Every line that is a verdict: an object of ``attach --json`` or ``engine --json``, of a hook's log, or a verdict itself."""
    newest, found = 0, 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE):
            told = _told(line)
            if told is None:
                continue
            kind, time_ns, named, lasted, verdict = told
            row = verdict_row(Run(job or named, ""), time_ns, kind, verdict, lasted)
            importer.put(time_ns, lambda row=row: [row])  # type: ignore[misc]
            newest, found = max(newest, time_ns), found + 1
    if not found:
        hint = "files of 'attach --json', 'engine --json', 'record' and --hook-log can be taken in"
        raise TargetError(f"{clean(path.name, 80)} is no recording and holds no verdict", hint)
    importer.close(newest, "import")


def _told(line: bytes) -> tuple[str, int, str, float | None, dict[str, Any]] | None:
    """(kind, time, job, how long it stood, verdict) of one line."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    inner = data.get("verdict")
    verdict = inner if isinstance(inner, dict) else data
    kind = KINDS.get(str(data.get("type", "verdict")))
    if kind is None or verdict.get("schema") != "ncclwatch.verdict/1":
        return None
    # A hook's log is in seconds too; a verdict alone says when it was judged.
    time_ns = nanoseconds(data.get("time")) or nanoseconds(verdict.get("time")) or nanoseconds(verdict.get("since"))
    named, lasted = data.get("job"), data.get("duration_s")
    if time_ns is None:
        return None
    seconds = float(lasted) if isinstance(lasted, (int, float)) else None
    return kind, time_ns, named if isinstance(named, str) else "", seconds, verdict
