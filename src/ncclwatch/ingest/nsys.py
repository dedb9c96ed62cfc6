"""SQLite exports of Nsight Systems (``nsys export --type sqlite``): NCCL kernels of the processes of a node.

Facts: NVIDIA, Nsight Systems user guide, "SQLite Schema Reference": names lie in ``StringIds``; ``CUPTI_ACTIVITY_KIND_KERNEL``
has ``start`` and ``end`` (ns since the session began), ``deviceId``, ``streamId``, ``globalPid``, ``shortName``;
``TARGET_INFO_SESSION_START_TIME.utcEpochNs`` is when it began. Tables are created only when there is something to put into
them, so ``sqlite_master`` is asked first; there is no index. Kernels carry no communicator. Where NVTX was traced, NCCL tells it
of each call (:mod:`.nsys_calls`); else which ranks share one follows from when collectives end (:mod:`.kernel_groups`).
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from ncclwatch.ingest.base import Format, Ingested, IngestError
from ncclwatch.ingest.kernel_groups import Seen, join
from ncclwatch.ingest.kernels import KernelRank, function_of, job_of
from ncclwatch.ingest.nsys_calls import ENTRIES, EVENTS, NcclCalls, Place, process_of, read_calls
from ncclwatch.text import clean

MAGIC = b"SQLite format 3\0"
KERNELS, STRINGS, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "StringIds", "CUPTI_ACTIVITY_KIND_RUNTIME"
START = "TARGET_INFO_SESSION_START_TIME"
MOST_KERNELS = 500_000
"""Bound: NCCL kernels of a file that are read."""
MOST_STEPS = 4000
"""Bound: times 100,000 steps of SQLite's machine that a query may take (a minute or so): a hostile file may hold a view without
end.
"""
MOST_FILES = 256
_DAMAGE = (sqlite3.Error, OSError, UnicodeDecodeError)
"""What a damaged file raises; the last for text, and for a message of SQLite's with text in it, that is no UTF-8."""
NEEDED = ("start", "end", "deviceId", "streamId", "shortName")


@dataclass(slots=True)
class _Process:
    """The NCCL kernels of one process on one GPU, by communicator where that is known, else by stream. ``place``: its rank."""

    source: str
    device: int
    place: Place | None = None
    communicators: dict[int, list[Seen]] = field(default_factory=lambda: defaultdict(list))
    streams: dict[int, list[Seen]] = field(default_factory=lambda: defaultdict(list))
    nameless: int = 0


class _Launch(NamedTuple):
    """When the host launched a kernel (ns since the session began), and of which communicator its operation is."""

    start: int
    communicator: int | None


class Nsys(Format):
    """Exports of a job, one file a node or a rank; files of one folder are one job."""

    name = "nsys"
    what = "Nsight Systems SQLite export"

    def recognises(self, head: bytes, path: Path) -> bool:
        """An SQLite file with Nsight's tables."""
        if not head.startswith(MAGIC):
            return False
        try:
            with closing(_open(path)) as database:
                names = _tables(database)
        except _DAMAGE:
            return False
        return STRINGS in names and any(name.startswith(("CUPTI_", "TARGET_INFO_", "NVTX_")) for name in names)

    def read(self, files: Sequence[Path]) -> Sequence[Ingested]:
        """A job a folder. Raises :class:`IngestError` where none of its files could be read."""
        folders: dict[Path, list[Path]] = defaultdict(list)
        for file in files:
            folders[file.parent].append(file)
        return [_job(folder, sorted(found)) for folder, found in folders.items()]


def _job(folder: Path, files: Sequence[Path]) -> Ingested:
    problems: list[str] = []
    processes: list[_Process] = []
    for file in files[:MOST_FILES]:
        try:
            processes += _read(file, problems)
        except _DAMAGE as error:
            problems.append(f"{clean(str(file), 200)}: {clean(getattr(error, 'strerror', None) or str(error), 160)}")
    if not processes:
        raise IngestError(problems[0] if problems else "no NCCL kernel", "export with `nsys export --type sqlite`, CUDA traced")
    ranks, told = _ranks(processes)
    return job_of(ranks, problems, told, clean(str(folder), 200))


def _open(path: Path) -> sqlite3.Connection:
    """A file, for reading alone, with bounds on what it can make us do."""
    database = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 24)
    database.execute("PRAGMA trusted_schema = OFF")
    steps = iter(range(MOST_STEPS))
    database.set_progress_handler(lambda: next(steps, -1) < 0, 100_000)
    return database


def _tables(database: sqlite3.Connection) -> set[str]:
    """Names of the tables that are there; views are none."""
    rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' LIMIT 10000")
    return {name for (name,) in rows if isinstance(name, str)}


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM pragma_table_info(?)", (table,))}


def _read(path: Path, problems: list[str]) -> list[_Process]:
    """The processes of one file. Raises ``sqlite3.Error``."""
    name = clean(str(path), 200)
    with closing(_open(path)) as database:
        tables = _tables(database)
        missing = [table for table in (KERNELS, STRINGS) if table not in tables]
        if missing:
            problems.append(f"{name}: no table {missing[0]}: no CUDA kernel was traced")
            return []
        columns = _columns(database, KERNELS)
        if lacking := [column for column in NEEDED if column not in columns]:
            problems.append(f"{name}: table {KERNELS} has no column {lacking[0]}")
            return []
        begun = _begun(database, tables)
        calls = read_calls(database) if {EVENTS, ENTRIES} <= tables else NcclCalls()
        launches = _launches(database, calls) if RUNTIME in tables and "correlationId" in columns else {}
        found: dict[tuple[int, int], _Process] = {}
        number = 0
        for text, begin, end, device, stream, pid, correlation in _rows(database, columns):
            number += 1
            if not all(isinstance(value, int) and 0 <= value < 1 << 62 for value in (begin, end, device, stream)) or end < begin:
                problems.append(f"{name}: {KERNELS}: NCCL kernel {number} has no times, or no stream")
                break
            own = process_of(pid) if isinstance(pid, int) else 0
            process = found.setdefault((own, device), _Process(clean(path.name, 80), device, calls.places.get((own, device))))
            function = function_of(text) if isinstance(text, str) else None
            if function is None:
                process.nameless += 1
                continue
            start, communicator = launches.get((own, correlation), (begin, None))
            seen = Seen(int(function), begun + begin, begun + end, begun + (start if start <= begin else begin))
            (process.streams[stream] if communicator is None else process.communicators[communicator]).append(seen)
        if number >= MOST_KERNELS:
            problems.append(f"{name}: more than {MOST_KERNELS} NCCL kernels: the others were left out")
    return [found[key] for key in sorted(found)]


def _begun(database: sqlite3.Connection, tables: set[str]) -> int:
    """When the session began (ns since the epoch); 1 where that is not told."""
    if START in tables and "utcEpochNs" in _columns(database, START):
        row = database.execute(f"SELECT utcEpochNs FROM {START} LIMIT 1").fetchone()  # noqa: S608 - a name of ours
        if row is not None and isinstance(row[0], int) and 0 < row[0] < 1 << 62:
            return row[0]
    return 1


_NCCL = f"FROM {KERNELS} k JOIN {STRINGS} s ON s.id = k.shortName WHERE s.value LIKE 'nccl%'"


def _rows(database: sqlite3.Connection, columns: set[str]) -> Iterator[tuple[Any, ...]]:
    """NCCL kernels by their begin: name, start, end, device, stream, process, number of their launch."""
    process = "k.globalPid" if "globalPid" in columns else "0"
    launch = "k.correlationId" if "correlationId" in columns else "NULL"
    yield from database.execute(
        f"SELECT s.value, k.start, k.end, k.deviceId, k.streamId, {process}, {launch} {_NCCL} "
        f"ORDER BY k.start LIMIT {MOST_KERNELS}"
    )


def _launches(database: sqlite3.Connection, calls: NcclCalls) -> dict[tuple[int, int], _Launch]:
    """Launches of NCCL kernels by process and number, which is unique within a process."""
    if not {"start", "globalTid", "correlationId"} <= _columns(database, RUNTIME):
        return {}
    rows = database.execute(
        f"SELECT globalTid, start, correlationId FROM {RUNTIME} WHERE correlationId IN (SELECT k.correlationId {_NCCL}) "  # noqa: S608
        f"ORDER BY start LIMIT {MOST_KERNELS}"
    )
    threads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for thread, start, number in rows:
        if isinstance(thread, int) and isinstance(start, int) and isinstance(number, int) and start >= 0:
            threads[thread].append((start, number))
    found: dict[tuple[int, int], _Launch] = {}
    for thread, own in threads.items():
        told = calls.of_launches(thread, [start for start, _ in own])
        for (start, number), communicator in zip(own, told, strict=True):
            found.setdefault((process_of(thread), number), _Launch(start, communicator))
    return found


def _numbers(processes: Sequence[_Process]) -> list[int]:
    """Which rank each is, where every one has another: as NCCL said when communicators were made, else by the number in a file's
    name. Empty where neither tells.
    """
    places = [process.place for process in processes]
    said = [place.rank for place in places if place is not None and place.ranks == max(p.ranks for p in places if p)]
    names = [re.findall(r"rank[_-]?(\d{1,6})", process.source) for process in processes]
    named = [int(found[-1]) for found in names if found]
    return next((ranks for ranks in (said, named) if len(ranks) == len(processes) == len(set(ranks))), [])


def _ranks(processes: Sequence[_Process]) -> tuple[list[KernelRank], list[str]]:
    """Processes as ranks, with their kernels; and what was taken for what."""
    ranks = _numbers(processes)
    told = [] if ranks else ["which rank a process is the export does not say: they are numbered by file, process and GPU"]
    made = [
        KernelRank(rank, process.source, None, nameless=process.nameless)
        for rank, process in zip(ranks or range(len(processes)), processes, strict=True)
    ]
    lists: dict[str, list[tuple[KernelRank, list[Seen]]]] = defaultdict(list)
    for one, process in zip(made, processes, strict=True):
        lists[""] += ((one, own) for own in process.streams.values())
        for communicator, own in process.communicators.items():
            lists[f"communicator {communicator:016x}"].append((one, own))
    left = sum(join(own, known) for known, own in lists.items())
    if left:
        told.append(f"{left} NCCL kernels were left out: no other rank's collectives end with them")
    # Two processes of one file must not be one source.
    for one, process in zip(made, processes, strict=True):
        if sum(other.source == process.source for other in processes) > 1:
            one.source = f"{process.source} (GPU {process.device})"
    return made, told
