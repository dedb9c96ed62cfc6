"""The writer: what is handed over is there at once, in numbers, and what could not be kept is told."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.errors import UsageError
from ncclwatch.history import journal, writer
from ncclwatch.history.query import History
from ncclwatch.history.tables import Row
from ncclwatch.history.writer import HistoryWriter, Rhythm

HURRY = Rhythm(roll_s=0.0)


def row(number: int, **values: Any) -> Row:
    return Row("rates", time.time_ns(), values.pop("job", "job"), "run", {"rank": number, **values})


def ask(root: Path, sql: str) -> list[tuple[Any, ...]]:
    with History(str(root)) as history:
        return history.ask(sql).rows


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def test_what_is_handed_over_can_be_read_at_once_and_after_the_end(tmp_path: Path) -> None:
    kept = HistoryWriter(tmp_path, command="test")
    kept.put(time.time_ns(), lambda: [row(1), row(2)])
    until(lambda: kept.rows == 3)
    assert not list(tmp_path.glob("rates/**/*.parquet"))
    assert ask(tmp_path, "SELECT rank, n FROM rates ORDER BY n") == [(1, 2), (2, 3)]
    kept.close()
    assert list(tmp_path.glob("rates/day=*/job=job/*.parquet"))
    assert not list(journal.folder(tmp_path).iterdir())
    assert ask(tmp_path, "SELECT rank, n FROM rates ORDER BY n") == [(1, 2), (2, 3)]
    assert ask(tmp_path, "SELECT kind FROM lives ORDER BY n") == [("begin",), ("end",)]
    assert ask(tmp_path, "SELECT * FROM gaps") == []


NAMES = [
    "",
    ".",
    "..",
    "../../etc",
    "a/b",
    "job=x",
    "day=2026-01-01",
    "ü 70b",
    "\ud800",
    "x" * 4000,
    "%2F",
    "a\nb\0c",
    "~",
    "*?[",
]


def test_names_of_jobs_and_nodes_may_be_anything(tmp_path: Path) -> None:
    root = tmp_path / "history"
    kept = HistoryWriter(root, rhythm=HURRY)
    for number, name in enumerate(NAMES):
        kept.put(time.time_ns(), lambda number=number, name=name: [row(number, job=name, node=name)])  # type: ignore[misc]
    kept.close()
    assert [path.name for path in tmp_path.iterdir()] == ["history"]
    assert all(path.parent.parent.parent == root / "rates" for path in root.glob("rates/**/*.parquet"))
    found = ask(root, "SELECT rank, job, node FROM rates ORDER BY rank")
    shown = [name[:1024].encode("utf-8", "replace").decode() for name in NAMES]
    assert found == [(number, name, name) for number, name in enumerate(shown)]


def test_whoever_judges_never_waits_and_what_was_dropped_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "QUEUE", 4)
    kept = HistoryWriter(tmp_path)
    stuck, go_on = threading.Event(), threading.Event()

    def hold() -> Iterator[Row]:
        stuck.set()
        assert go_on.wait(60)
        yield row(0)

    kept.put(1, hold)
    assert stuck.wait(60)
    for number in range(1, 11):
        kept.put(time.time_ns(), lambda number=number: [row(number)])  # type: ignore[misc]
    assert kept.dropped == 6
    go_on.set()
    kept.close()
    assert ask(tmp_path, "SELECT rank FROM rates ORDER BY rank") == [(0,), (1,), (2,), (3,), (4,)]
    assert ask(tmp_path, "SELECT kind, rows, detail FROM gaps") == [("dropped", 6, "the disk does not keep up")]


def test_a_look_that_cannot_be_read_is_told_and_the_others_are_kept(tmp_path: Path) -> None:
    def broken() -> list[Row]:
        raise ZeroDivisionError

    kept = HistoryWriter(tmp_path)
    kept.put(time.time_ns(), broken)
    kept.put(time.time_ns(), lambda: [row(1)])
    kept.close()
    assert ask(tmp_path, "SELECT rank FROM rates") == [(1,)]
    assert ask(tmp_path, "SELECT rows, detail FROM gaps") == [(1, "a look could not be read (ZeroDivisionError)")]


def test_a_folder_that_cannot_be_written_is_said_at_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="no history can be kept in"):
        HistoryWriter(tmp_path / "file" / "history")


def test_two_writers_share_a_folder(tmp_path: Path) -> None:
    both = [HistoryWriter(tmp_path, rhythm=HURRY) for _ in range(2)]
    for number in range(40):
        both[number % 2].put(time.time_ns(), lambda number=number: [row(number)])  # type: ignore[misc]
        time.sleep(0.005)
    for kept in both:
        kept.close()
    assert ask(tmp_path, "SELECT count(*), count(DISTINCT rank), count(DISTINCT life) FROM rates") == [(40, 40, 2)]
    assert ask(tmp_path, "SELECT * FROM gaps") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=False).returncode:
        pytest.skip("a file system can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Path:
    """Fill a file system to its last byte, with a file that can be removed."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    return ballast


def test_a_full_disk_loses_nothing_that_memory_holds_and_tells_what_it_does_not(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_PENDING", 500)
    monkeypatch.setattr(writer, "RETRY_S", 0.05)
    root = small_disk / "history"
    kept = HistoryWriter(root)
    ballast = fill(small_disk)
    offered = 0
    # More than the end of the journal's last page takes, and than may wait.
    while not (kept.problem and kept.dropped):
        kept.put(time.time_ns(), lambda offered=offered: [row(offered, node="x" * 100)])  # type: ignore[misc]
        offered += 1
        time.sleep(0.0005)
        assert offered < 100_000
    assert "cannot be written (No space left on device)" in kept.problem
    ballast.unlink()
    until(lambda: not kept.problem)
    kept.put(time.time_ns(), lambda: [row(-1)])
    kept.close()
    ((count, different),) = ask(root, "SELECT count(*), count(DISTINCT rank) FROM rates")
    ((told,),) = ask(root, "SELECT sum(rows) FROM gaps WHERE kind = 'dropped'")
    assert count == different
    assert count + told == offered + 1


def test_a_disk_that_is_full_when_files_are_made_keeps_the_journal(small_disk: Path) -> None:
    root = small_disk / "history"
    kept = HistoryWriter(root, rhythm=Rhythm(roll_s=3600))
    kept.put(time.time_ns(), lambda: [row(number) for number in range(20)])
    until(lambda: kept.rows == 21)
    ballast = fill(small_disk)
    kept.close()
    assert kept.problem
    assert list(journal.folder(root).iterdir())
    ballast.unlink()
    assert ask(root, "SELECT count(*) FROM rates") == [(20,)]
