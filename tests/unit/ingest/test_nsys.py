"""Exports of Nsight Systems: made by the schema that NVIDIA documents, tables lazily as it does."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ncclwatch.ingest.base import HEAD_BYTES, IngestError
from ncclwatch.ingest.kernel_groups import Stream, shared
from ncclwatch.ingest.nsys import Nsys
from ncclwatch.model.verdict import VerdictClass
from unit.ingest.made_rank_logs import judged

FORMAT = Nsys()
BEGUN = 1_755_590_100_000_000_000
NAMES = ("sgemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_SendRecv", "ncclKernel_AllGather_RING_LL_Sum_int8_t")


def export(
    path: Path, kernels: Sequence[tuple[int, int, int, int, int]], *, launches: bool = False, started: int = BEGUN
) -> Path:
    """A file with kernels (name's number, start, end, GPU, stream)."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(NAMES))
        database.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT)")
        database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?, '', '')", (started,))
        if kernels:
            database.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
                "contextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, "
                "shortName INTEGER NOT NULL)"
            )
            database.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, 1, ?, ?, 281479271677952, ?, ?)",
                [(start, end, gpu, stream, at, name, name) for at, (name, start, end, gpu, stream) in enumerate(kernels)],
            )
        if launches:
            database.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER)"
            )
            database.execute("CREATE INDEX runtime_correlation ON CUPTI_ACTIVITY_KIND_RUNTIME (correlationId)")
            database.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 281479271677953, ?)",
                [(start - 5_000, start, at) for at, (_, start, *_) in enumerate(kernels)],
            )
    database.close()
    return path


def rounds(rank: int, *, late: int | None = None, number: int = 30, stream: int = 20) -> list[tuple[int, int, int, int, int]]:
    """An AllReduce every 20 ms, and compute in between."""
    found = []
    for at in range(number):
        due = 1_000_000 + 20_000_000 * at
        end = due + (10_000_000 if late is not None else 900_000)
        begin = end - 900_000 if rank == late else due
        found += [(0, due - 500_000, due - 100, rank % 2, 7), (1, begin, end + 2_000 * rank, rank % 2, stream)]
    return found


@pytest.mark.parametrize("launches", [False, True])
def test_the_gpu_that_comes_last_is_named_though_nothing_names_communicators(tmp_path: Path, launches: bool) -> None:
    files = [
        export(tmp_path / f"job.rank{r}.sqlite", rounds(r, late=1), launches=launches, started=BEGUN + r * 3_000)
        for r in range(3)
    ]
    last = list(judged(FORMAT.read(files)[0], ask=False))[-1]
    assert last.verdict_class is VerdictClass.SLOW_COMPUTATION
    assert [culprit.rank for culprit in last.culprits] == [1]


def test_a_healthy_job_and_a_shorter_window_accuse_nobody(tmp_path: Path) -> None:
    files = [export(tmp_path / f"job.rank{r}.sqlite", rounds(r)) for r in range(3)]
    files.append(export(tmp_path / "job.rank3.sqlite", rounds(3, number=12)))
    job = FORMAT.read(files)[0]
    assert not any(verdict.verdict_class.accuses for verdict in judged(job))
    assert any("12 NCCL kernels were left out" in note for note in job.notes)


def test_ranks_that_do_the_same_at_other_times_share_nothing() -> None:
    rng = np.random.default_rng(3)
    base = np.cumsum(rng.integers(10_000_000, 30_000_000, 40))
    other = np.cumsum(rng.integers(10_000_000, 30_000_000, 40))
    function = (1,) * 40
    streams = [
        Stream(0, function, base),
        Stream(1, function, base + 7_000_000_000),
        Stream(2, function, other),
        Stream(3, function, other),
    ]
    assert shared(streams) == [[0, 1], [2, 3]]


def test_two_gpus_in_one_file_are_two_ranks(tmp_path: Path) -> None:
    path = export(tmp_path / "node.sqlite", [*rounds(0, late=1), *rounds(1, late=1)])
    job = FORMAT.read([path])[0]
    last = list(judged(job, ask=False))[-1]
    assert [(culprit.rank, culprit.host) for culprit in last.culprits] == [(1, "node.sqlite (GPU 1)")]
    assert any("numbered by file, process and GPU" in note for note in job.notes)


def test_tables_that_are_not_there_are_told(tmp_path: Path) -> None:
    path = export(tmp_path / "none.sqlite", [])
    assert FORMAT.recognises(path.read_bytes()[:HEAD_BYTES], path)
    with pytest.raises(IngestError, match=r"none\.sqlite: no table CUPTI_ACTIVITY_KIND_KERNEL"):
        FORMAT.read([path])


def test_damaged_and_hostile_files_end_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = export(tmp_path / "whole.sqlite", rounds(0)).read_bytes()
    (tmp_path / "cut.sqlite").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IngestError, match=r"cut\.sqlite: "):
        FORMAT.read([tmp_path / "cut.sqlite"])
    endless = tmp_path / "endless.sqlite"
    with sqlite3.connect(endless) as database:
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, shortName)")
        database.execute(
            "CREATE VIEW StringIds AS WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) SELECT id, 'nccl' value FROM c"
        )
    database.close()
    with pytest.raises(IngestError, match=r"endless\.sqlite: no table StringIds"):
        FORMAT.read([endless])
    monkeypatch.setattr("ncclwatch.ingest.nsys.MOST_STEPS", 0)
    with pytest.raises(IngestError, match=r"big\.sqlite: interrupted"):
        FORMAT.read([export(tmp_path / "big.sqlite", rounds(0, number=20_000))])


def test_values_of_another_kind_are_told_with_their_place(tmp_path: Path) -> None:
    path = export(tmp_path / "odd.sqlite", rounds(0))
    with sqlite3.connect(path) as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = 'x' WHERE rowid = 6")
    database.close()
    job = FORMAT.read([path])[0]
    assert any("NCCL kernel 3 has no times, or no stream" in problem for problem in job.problems)


def test_another_database_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE people (name)")
    database.close()
    assert not FORMAT.recognises(path.read_bytes()[:HEAD_BYTES], path)
