"""Exports of Nsight Systems: made by the schema that NVIDIA documents, tables lazily as it does."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from ncclwatch.ingest.base import HEAD_BYTES, IngestError
from ncclwatch.ingest.kernel_groups import Stream, shared
from ncclwatch.ingest.nsys import Nsys
from ncclwatch.ingest.nsys_calls import NcclCalls, read_calls
from ncclwatch.model.verdict import VerdictClass
from unit.ingest.made_nsys import BEGUN, add_calls, export, payload, rounds
from unit.ingest.made_rank_logs import judged

FORMAT = Nsys()


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
    assert shared(streams) == [[(0, 0), (1, 0)], [(2, 0), (3, 0)]]


def test_a_window_that_begins_later_is_lined_up() -> None:
    rng = np.random.default_rng(5)
    ends = np.cumsum(rng.integers(10_000_000, 30_000_000, 40))
    whole, later = Stream(0, (1,) * 40, ends), Stream(1, (1,) * 37, ends[2:39] + 5_000_000_000)
    assert shared([whole, later]) == [[(0, 0), (1, 2)]]
    long_after = Stream(1, (1,) * 30, ends[9:39] + 2_000_000)
    assert shared([whole, long_after]) == []
    assert shared([whole, long_after], known=True) == [[(0, 0), (1, 9)]]


def test_two_gpus_in_one_file_are_two_ranks(tmp_path: Path) -> None:
    path = export(tmp_path / "node.sqlite", [*rounds(0, late=1), *rounds(1, late=1)])
    job = FORMAT.read([path])[0]
    last = list(judged(job, ask=False))[-1]
    assert [(culprit.rank, culprit.host) for culprit in last.culprits] == [(1, "node.sqlite (GPU 1)")]
    assert any("numbered by file, process and GPU" in note for note in job.notes)


@pytest.mark.parametrize("as_text", [False, True])
def test_what_nccl_says_of_its_calls_tells_communicators_and_ranks(tmp_path: Path, as_text: bool) -> None:
    """Two communicators in turn on one stream, which by streams alone would be one; files whose names tell no rank."""
    for rank in range(3):
        path = export(tmp_path / f"node{2 - rank}.sqlite", rounds(rank, late=1, number=40), launches=True)
        add_calls(path, (rank, 3), [0xAAAA, 0xBBBB], as_text=as_text)
    job = FORMAT.read(sorted(tmp_path.iterdir()))[0]
    last = list(judged(job, ask=False))[-1]
    assert [(culprit.rank, culprit.host) for culprit in last.culprits] == [(1, "node1.sqlite")]
    told = "\n".join(job.notes)
    assert "came last to 20 of 20 collectives of communicator 000000000000aaaa" in told
    made = {own.hash for batch in job.batches for sample in batch.samples for own in sample.communicators}
    assert len(made) == 2
    assert "numbered by" not in told


def test_a_launch_is_of_the_one_call_since_the_launch_before() -> None:
    calls = NcclCalls()
    calls.begins[1], calls.communicators[1] = [10, 20, 30, 40], [7, 8, 9, 7]
    assert list(calls.of_launches(1, [12, 35, 45, 50])) == [7, None, 7, None]
    assert list(calls.of_launches(2, [12])) == [None]


def test_payloads_that_are_cut_or_of_something_else_say_nothing(tmp_path: Path) -> None:
    path = export(tmp_path / "job.rank0.sqlite", rounds(0), launches=True)
    add_calls(path, (0, 2), [0xAAAA])
    odd = (b"", payload(7, 1, 2)[:-1], b"\xff" * 64, "no hex", 7)
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM NVTX_EVENTS")
        database.executemany("INSERT INTO NVTX_EVENTS VALUES (1, 2, 59, NULL, 281479271677953, 3, ?)", [(one,) for one in odd])
        database.execute("UPDATE NVTX_PAYLOAD_SCHEMA_ENTRIES SET offset = 1 << 40 WHERE schemaId = 9 AND idx > 0")
        database.execute("INSERT INTO NVTX_EVENTS VALUES (1, 2, 59, NULL, 281479271677953, 3, ?)", (payload(9, 1, 2, 0, 0),))
        calls = read_calls(database)
    database.close()
    assert not calls.begins
    assert not calls.places


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
            "CREATE VIEW StringIds AS WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) "
            "SELECT id, 'nccl' value FROM c"
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
