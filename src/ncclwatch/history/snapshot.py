"""What a history holds at one moment: the files of each table that count, and what is in journals only.

Writers go on meanwhile. Journals are read before files are listed: what moves from one to the other is then seen twice, never not
at all, and what is twice is known by the names of files.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclwatch.errors import TargetError
from ncclwatch.history import files, journal
from ncclwatch.history.remote import file_system, is_remote, shown
from ncclwatch.history.tables import TABLES, arrow_schema, arrow_table
from ncclwatch.text import clean

if TYPE_CHECKING:
    import pyarrow as pa

MAX_FILES = 20_000
"""Bound: files of a table that are read, the newest days first."""
MAX_UNPACKED = 32 << 30
"""Bound: bytes that a file's data may take when unpacked; one that claims more is left out."""
LISTINGS = 20
"""Bound: how often a folder is listed until it has been the same twice."""
READERS = 8
MAX_PROBLEMS = 20
_PATH = re.compile(r"day=(?P<day>\d{4}-\d{2}-\d{2})/job=[^/]+/(?P<name>[^/.][^/]*\.parquet)")


class Found(NamedTuple):
    """One file: its path on its file system, folder and name, its day, bytes and columns."""

    path: str
    folder: str
    name: str
    day: str
    size: int
    schema: Any = None


@dataclass(slots=True)
class Snapshot:
    """By table its files and what is in no file yet; ``problems`` says what is there and could not be read."""

    system: Any
    tables: dict[str, list[Found]] = field(default_factory=dict)
    fresh: dict[str, pa.Table] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(found.size for table in self.tables.values() for found in table)


def take(where: str, tables: Collection[str] = tuple(TABLES), since_day: str = "") -> Snapshot:
    """What there is of these tables, from ``since_day`` (``2026-11-25``) on. Raises ``TargetError`` where there is no history."""
    import pyarrow as pa

    system, base = file_system(where)
    taken = Snapshot(system)
    rows = [] if is_remote(where) else _journals(Path(where), taken.problems)
    try:
        listed = {table: _listed(system, base, table, since_day, taken.problems) for table in tables}
    except (OSError, pa.ArrowException) as error:
        raise TargetError(f"{shown(where)} cannot be read: {clean(str(error))}", "name the folder given to --history") from None
    if not any(listed.values()) and not rows:
        known = not is_remote(where) and journal.folder(Path(where)).is_dir()
        if not known and not any(_listed(system, base, table, "", []) for table in TABLES):
            hint = "name the folder that 'attach', 'engine' or 'history import' was given with --history"
            raise TargetError(f"there is no history in {shown(where)}", hint)
    for table, found in listed.items():
        _keep(taken, table, found)
    _add_fresh(taken, rows, tables, since_day)
    return taken


def _listed(system: Any, base: str, table: str, since_day: str, problems: list[str]) -> list[Found]:
    """The files of a table by their names, each with what it says it holds."""
    from pyarrow import fs

    before: list[tuple[str, int]] | None = None
    for _ in range(LISTINGS):
        infos = system.get_file_info(fs.FileSelector(f"{base}/{table}", recursive=True, allow_not_found=True))
        now = sorted((info.path, info.size) for info in infos if info.type == fs.FileType.File)
        if now == before:
            break
        # A listing is of no single moment: what was renamed meanwhile may be in it by neither name.
        before = now
    found = []
    for path, size in before or ():
        match = _PATH.fullmatch(path[len(base) :].lstrip("/")[len(table) + 1 :])
        if match is not None and match["day"] >= since_day:
            found.append(Found(path, path.rpartition("/")[0], match["name"], match["day"], size))
    found.sort(key=lambda one: one.day, reverse=True)
    if len(found) > MAX_FILES:
        problems.append(f"{table}: only the newest {MAX_FILES} of {len(found)} files are read: run 'ncclwatch history compact'")
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(lambda one: one._replace(schema=_schema(system, one.path)), found[:MAX_FILES]))


def _schema(system: Any, path: str) -> pa.Schema | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with system.open_input_file(path) as file:
            metadata = pq.read_metadata(file)
            unpacked = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
            return metadata.schema.to_arrow_schema() if 0 <= unpacked < MAX_UNPACKED else None
    except (OSError, pa.ArrowException, MemoryError):
        return None


def _keep(taken: Snapshot, table: str, listed: Sequence[Found]) -> None:
    """Keep the files that are whole, of this table, and not part of another."""
    wanted = arrow_schema(table)
    superseded = {(one.folder, name) for one in listed if one.schema is not None for name in files.sources_of(one.schema)}
    kept = taken.tables[table] = []
    for one in listed:
        if (one.folder, one.name) in superseded:
            continue
        if files.is_ours(one.schema, wanted):
            kept.append(one)
        elif len(taken.problems) < MAX_PROBLEMS:
            taken.problems.append(f"{clean(one.path)} is left out: it is damaged, or no file of a history")


def _journals(root: Path, problems: list[str]) -> list[tuple[str, list[journal.Numbered]]]:
    """(name of the file that it becomes, rows) of every journal."""
    found = []
    for path in journal.journals(root):
        try:
            read = journal.read(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{clean(path.name)} cannot be read: {error.strerror or error}")
            continue
        found.append((f"{read.life}.{read.segment}{files.SUFFIX}", read.rows))
    return found


def _add_fresh(
    taken: Snapshot, journals: Iterable[tuple[str, list[journal.Numbered]]], tables: Collection[str], since_day: str
) -> None:
    """What is in journals and in no file."""
    rows: dict[str, list[list[Any]]] = defaultdict(list)
    there = {(table, one.day, one.folder.rpartition("=")[2], name) for table, found in taken.tables.items() for one in found
             for name in (one.name, *files.sources_of(one.schema))}  # fmt: skip
    for name, numbered in journals:
        for place, held in files.sorted_out(row for row in numbered if row[0] in tables).items():
            if place.day >= since_day and (place.table, place.day, files.folder_name(place.job), name) not in there:
                rows[place.table] += held
    taken.fresh = {table: arrow_table(table, rows.get(table, [])) for table in tables}


def dataset(taken: Snapshot, table: str) -> Any:
    """The files of a table as one dataset, which is read as far as a question needs it."""
    from pyarrow import dataset as datasets

    paths = [found.path for found in taken.tables[table]]
    return datasets.dataset(paths, schema=arrow_schema(table), format="parquet", filesystem=taken.system)


def is_stale(taken: Snapshot) -> bool:
    """Whether a file of it was removed since (merged into another, or too old)."""
    from pyarrow import fs

    paths = [found.path for table in taken.tables.values() for found in table]
    return any(info.type == fs.FileType.NotFound for info in taken.system.get_file_info(paths))
