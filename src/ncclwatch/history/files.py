"""Parquet files of a history: ``TABLE/day=2026-11-25/job=NAME/FILE.parquet``, written under another name and then renamed.

A file is named after the journal it was made of, or, where several were made into one, says in its metadata which. So what is in
two places after a kill is known by names alone, and no row has to be compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from ncclwatch.history.journal import Numbered, Read
from ncclwatch.history.tables import DOCUMENT, REAL, TABLES, TEXT, TIME, WHOLE, arrow_table, columns

if TYPE_CHECKING:
    import pyarrow as pa

LOCK, WORK = "lock", "tmp"
SUFFIX = ".parquet"
MERGED = "merged."
"""How the name of a file begins that was made of several."""
SOURCES = b"ncclwatch.sources"
"""Key of a file's metadata: names of the files that it was made of."""
MAX_NAME = 100
"""Bound: characters of a folder's name after ``job=``; longer ones are cut and told apart by a hash."""
ROW_GROUP = 1 << 17
"""Bound: rows of a group, the unit that is read and skipped."""
DAY = re.compile(r"day=(\d{4}-\d{2}-\d{2})")


class Place(NamedTuple):
    """Where rows belong: ``day`` is ``2026-11-25``, in UTC."""

    table: str
    day: str
    job: str

    @property
    def folder(self) -> str:
        """Its folder below that of the history."""
        return f"{self.table}/day={self.day}/job={folder_name(self.job)}"


def folder_name(job: str) -> str:
    """A job's name as that of a folder: letters, digits, ``-``, ``_`` and inner dots stay, all else is percent-encoded."""
    name = quote(job, safe="", errors="replace").replace("~", "%7E") or "_"
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 20]}~{hashlib.sha256(job.encode()).hexdigest()[:12]}"


def folders(root: Path) -> Iterator[tuple[str, str, Path]]:
    """(table, day, folder) of everything there is."""
    for table in TABLES:
        for path in sorted((root / table).glob("day=*/job=*")):
            day = DAY.fullmatch(path.parent.name)
            if day is not None and path.is_dir() and not path.is_symlink():
                yield table, day[1], path


def day_of(time_ns: int) -> str:
    """The day of a time, in UTC."""
    return f"{datetime.fromtimestamp(time_ns // 10**9, UTC):%Y-%m-%d}"


@contextlib.contextmanager
def locked(root: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether nobody else makes or removes files of this history now; held meanwhile. Without ``wait`` nobody is waited for."""
    fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)


def sorted_out(rows: Iterable[Numbered]) -> dict[Place, list[list[object]]]:
    """Rows by where they belong."""
    found: dict[Place, list[list[object]]] = defaultdict(list)
    for table, values in rows:
        found[Place(table, day_of(values[0] or 0), values[1] or "")].append(values)
    return found


def convert(root: Path, journal: Read) -> None:
    """Write what a journal holds into files, as far as they are not there yet. The caller holds the lock and then removes it.

    Raises ``OSError``; then some files are there, and doing it again makes the others.
    """
    for place, rows in sorted_out(journal.rows).items():
        name = f"{journal.life}.{journal.segment}{SUFFIX}"
        if not (root / place.folder / name).exists() and not _is_merged(root / place.folder, name):
            write(root, place.folder, name, [arrow_table(place.table, rows)])


def _is_merged(folder: Path, name: str) -> bool:
    """Whether a file of this name was made part of another."""
    merged = (schema_of(path) for path in parquets(folder) if path.name.startswith(MERGED))
    return any(name in sources_of(schema) for schema in merged if schema is not None)


def parquets(folder: Path) -> Iterator[Path]:
    """The files of a folder by their names: whole ones, no links, and no pipe that would keep its reader waiting."""
    for path in folder.glob(f"*{SUFFIX}"):
        if not path.name.startswith(".") and path.is_file() and not path.is_symlink():
            yield path


def schema_of(path: Path) -> pa.Schema | None:
    """What a file says it holds; ``None`` for one that is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path)
    except (OSError, pa.ArrowException):
        return None


def write(root: Path, folder: str, name: str, parts: Iterable[pa.Table], sources: Collection[str] = ()) -> int:
    """Write a file whole: under another name, to the disk, then renamed. ``parts`` are at least one. Returns its bytes."""
    import pyarrow.parquet as pq

    (root / WORK).mkdir(exist_ok=True)
    (root / folder).mkdir(parents=True, exist_ok=True)
    path, final = root / WORK / f"{uuid.uuid4().hex}{SUFFIX}", root / folder / name
    table = folder.partition("/")[0]
    try:
        writer = None
        for part in parts:
            told = part.replace_schema_metadata({SOURCES: json.dumps(sorted(sources)).encode()} if sources else None)
            writer = writer or pq.ParquetWriter(path, told.schema, compression="zstd", **_encodings(table))
            writer.write_table(told, row_group_size=ROW_GROUP)
        if writer is not None:
            writer.close()
        _sync(path)
        size = path.stat().st_size
        path.rename(final)
        _sync(final.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    return size


def _encodings(table: str) -> dict[str, object]:
    """How columns are packed: what rises steadily as differences, numbers by the planes of their bytes, words by a dictionary."""
    kinds = columns(table)
    packed = {name: "DELTA_BINARY_PACKED" for name, kind in kinds.items() if kind in (TIME, WHOLE)}
    packed |= {name: "BYTE_STREAM_SPLIT" for name, kind in kinds.items() if kind == REAL}
    return {
        "use_dictionary": [name for name, kind in kinds.items() if kind == TEXT],
        "column_encoding": packed | {name: "PLAIN" for name, kind in kinds.items() if kind == DOCUMENT},
    }


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_ours(schema: pa.Schema | None, wanted: pa.Schema) -> bool:
    """Whether a file has columns of this table and no others, each of its type."""
    if schema is None:
        return False
    return all(
        name in wanted.names and wanted.field(name).type == kind for name, kind in zip(schema.names, schema.types, strict=True)
    )


def sources_of(schema: pa.Schema) -> frozenset[str]:
    """Names of the files that one was made of; empty for one of a journal, or where it cannot be read."""
    try:
        named = json.loads((schema.metadata or {}).get(SOURCES, b"[]"))
    except (ValueError, RecursionError):
        return frozenset()
    return frozenset(name for name in named if isinstance(name, str)) if isinstance(named, list) else frozenset()
