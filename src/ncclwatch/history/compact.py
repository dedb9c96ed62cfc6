"""Keeps a history small and whole: journals whose writers died become files, small files become one a day, old days go."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ncclwatch.history import files, journal, remote
from ncclwatch.history.tables import Row, arrow_schema, fitted

if TYPE_CHECKING:
    import pyarrow as pa

KEEP = "keep.json"
MANY = 8
"""Bound: so many small files of one day and job are made into one at once; those of a day that is over in any case."""
UNBORN_S = 60.0
"""A journal without its name for so long will never have one."""
BULKY = ("rates", "flows", "iterations", "nics", "gpus")
"""What goes first where room is short: verdicts, runs and gaps are small, and asked for longest."""


class Keep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much is kept: days, and bytes of all files together; ``store`` is an object store that whole days are copied to."""

    days: int = 180
    nbytes: int = 20 << 30
    store: str = ""


@dataclass(slots=True)
class Done:
    """What was done: journals recovered, files merged and made of them, files and bytes removed, days copied; what failed."""

    recovered: int = 0
    merged: int = 0
    made: int = 0
    removed: int = 0
    freed: int = 0
    copied: int = 0
    problem: str = ""


def keep_of(root: Path) -> Keep:
    """What the folder says, else the usual."""
    try:
        return msgspec.json.decode((root / KEEP).read_bytes()[: 1 << 16], type=Keep)
    except (OSError, msgspec.MsgspecError):
        return Keep()


def look_after(root: Path, *, wait: bool = False) -> Done | None:
    """Recover, merge and remove what is due; ``None`` when somebody else does it now. Never raises for a disk that fails."""
    done = Done()
    try:
        with files.locked(root, wait=wait) as mine:
            if not mine:
                return None
            for left in (*(root / files.WORK).glob("*"), *_unborn(root)):
                # Who holds the lock is the only one who writes there: what is there is of somebody who was killed.
                left.unlink(missing_ok=True)
            recover(root, done)
            keep = keep_of(root)
            merge(root, done)
            if keep.store:
                done.copied, done.problem = remote.copy_days(root, keep.store)
            retain(root, keep, done)
    except OSError as error:
        done.problem = error.strerror or str(error)
    return done


def _unborn(root: Path) -> Iterator[Path]:
    """Journals whose writers were killed before they had a name."""
    for path in journal.folder(root).glob(f"*{journal.NEW}"):
        with journal.orphan(path) as mine:
            if mine and path.stat().st_mtime < time.time() - UNBORN_S:
                yield path


# --- journals of the dead ------------------------------------------------------------------------------------------------


def recover(root: Path, done: Done) -> None:
    """Make files of every journal whose writer is dead, and tell that it was killed, where it was. The caller holds the lock."""
    paths = journal.journals(root)
    for place, path in enumerate(paths):
        with journal.orphan(path) as mine:
            if not mine:
                continue
            # Of a writer's journals the last says whether it ended.
            newest = place + 1 == len(paths) or paths[place + 1].name.split(".")[0] != path.name.split(".")[0]
            found = journal.read(path)
            if found.damaged or (newest and not found.ended):
                found.rows.append(_told(found, path))
            files.convert(root, found)
            if found.damaged:
                path.rename(path.with_suffix(".damaged"))
            else:
                path.unlink(missing_ok=True)
            done.recovered += 1


def _told(found: journal.Read, path: Path) -> journal.Numbered:
    """The gap that a death left. Its number is that which the next row would have had: told twice it is one row."""
    since = found.last_ns or int(path.stat().st_mtime * 1e9)
    kind = "damaged" if found.damaged and found.ended else "killed"
    detail = f"{found.damaged} bytes at the end of {path.name} are no whole record" if found.damaged else ""
    said = {"kind": kind, "since": since, "until": max(since, time.time_ns()), "detail": detail}
    return "gaps", [*fitted(Row("gaps", since, "", "", said)), found.life, found.last_number + 1]


# --- many files to one ---------------------------------------------------------------------------------------------------


def merge(root: Path, done: Done) -> None:
    """Make one file of many small ones, one a day when that is over; remove what a merge before has left."""
    import pyarrow as pa

    today = files.day_of(time.time_ns())
    for table, day, folder in files.folders(root):
        try:
            _merge_folder(root, folder, arrow_schema(table), over=day < today, done=done)
        except pa.ArrowException as error:
            # The data of a file is damaged, which its end did not show: it stays as it is, and the others too.
            done.problem = f"{folder.relative_to(root)}: {error}"


def _merge_folder(root: Path, folder: Path, wanted: pa.Schema, *, over: bool, done: Done) -> None:
    there = {path.name: path for path in files.parquets(folder)}
    if len(there) < 2:
        return
    known = {name: files.schema_of(path) for name, path in there.items()}
    made_of = {name: files.sources_of(schema) for name, schema in known.items() if files.is_ours(schema, wanted)}
    for name in {name for sources in made_of.values() for name in sources} & there.keys():
        there[name].unlink(missing_ok=True)
        made_of.pop(name, None)
    merged = [name for name in made_of if name.startswith(files.MERGED)]
    chosen = sorted(made_of if over or len(merged) >= MANY else made_of.keys() - set(merged))
    if len(chosen) < (2 if over else MANY):
        return
    name = f"{files.MERGED}{hashlib.sha256(' '.join(chosen).encode()).hexdigest()[:20]}{files.SUFFIX}"
    parts = (part for one in chosen for part in _parts(there[one], wanted))
    # What those were made of is kept in mind too: a journal that made one of them may still be there.
    sources = {*chosen, *(source for one in chosen for source in made_of[one])}
    files.write(root, folder.relative_to(root).as_posix(), name, parts, sources)
    for one in chosen:
        there[one].unlink(missing_ok=True)
    done.merged += len(chosen)
    done.made += 1


def _parts(path: Path, wanted: pa.Schema) -> Iterator[pa.Table]:
    """A file's rows, a group at a time, with every column of the table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for number in range(max(1, file.num_row_groups)):
            part = file.read_row_group(number) if file.num_row_groups else file.read()
            arrays = [
                part.column(field.name) if field.name in part.schema.names else pa.nulls(len(part), field.type)
                for field in wanted
            ]
            yield pa.Table.from_arrays(arrays, schema=wanted)


# --- what is too old or too much -----------------------------------------------------------------------------------------


def retain(root: Path, keep: Keep, done: Done, today: date | None = None) -> None:
    """Remove days that are older than is kept, then the oldest of what is most, until the rest is small enough."""
    oldest = ((today or datetime.now(UTC).date()) - timedelta(days=keep.days)).isoformat()
    found = [(table, day, folder, _size(folder)) for table, day, folder in files.folders(root)]
    total = sum(size for *_, size in found)
    for _, day, folder, size in sorted(found, key=lambda one: (one[1] >= oldest, one[0] not in BULKY, one[1])):
        if day >= oldest and total <= keep.nbytes:
            break
        total -= size
        done.freed += size
        _remove(folder, done)


def _remove(folder: Path, done: Done) -> None:
    """Remove the files of a folder, and it; somebody else's file in it keeps it."""
    for path in files.parquets(folder):
        path.unlink(missing_ok=True)
        done.removed += 1
    for empty in (folder, folder.parent):
        with contextlib.suppress(OSError):
            empty.rmdir()


def _size(folder: Path) -> int:
    sizes = 0
    for path in files.parquets(folder):
        with contextlib.suppress(OSError):
            sizes += path.stat().st_size
    return sizes
