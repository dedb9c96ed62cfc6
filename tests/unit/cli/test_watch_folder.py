"""Dumps that appear one after the other: one verdict a job, once they are all there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclwatch.cli.main import run
from ncclwatch.cli.watch_folder import FolderWatch, watch
from unit.ingest.dumps import Dumps


def hung(victim: int) -> Dumps:
    job = Dumps(4)
    job.all_call(times=6)
    for rank in set(range(4)) - {victim}:
        job.call(rank, state="started")
    return job


def named(watched: FolderWatch, now_s: float) -> list[list[int | None]]:
    return [[culprit.rank for culprit in job.verdicts[0].culprits] for job in watched.look(now_s)]


def test_a_job_is_judged_once_its_dumps_have_settled(tmp_path: Path) -> None:
    watched, folder = FolderWatch(tmp_path, 5.0), tmp_path / "a"
    assert named(watched, 0.0) == []
    hung(2).write(folder, without=[1, 3])
    assert named(watched, 1.0) == []
    hung(2).write(folder)
    assert [named(watched, at) for at in (2.0, 6.0)] == [[], []]
    assert named(watched, 7.0) == [[2]]
    assert [named(watched, at) for at in (8.0, 100.0)] == [[], []]


def test_what_comes_later_is_told_where_it_changes_what_is_said(tmp_path: Path) -> None:
    watched = FolderWatch(tmp_path, 1.0)
    hung(2).write(tmp_path, without=[2])
    assert [named(watched, at) for at in (0.0, 1.0)] == [[], [[2]]]
    hung(2).write(tmp_path)
    assert [named(watched, at) for at in (2.0, 3.0)] == [[], [[2]]]
    (tmp_path / "notes.txt").write_text("nothing")
    assert [named(watched, at) for at in (4.0, 5.0)] == [[], []]


def test_each_job_is_told_by_itself(tmp_path: Path) -> None:
    watched = FolderWatch(tmp_path, 1.0)
    hung(1).write(tmp_path / "one")
    hung(3).write(tmp_path / "two")
    assert named(watched, 0.0) == []
    assert sorted(named(watched, 1.0)) == [[1], [3]]


def test_what_cannot_be_read_is_told_and_the_watch_goes_on(tmp_path: Path) -> None:
    watched = FolderWatch(tmp_path, 0.0)
    hung(1).write(tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:200])
    assert named(watched, 0.0) == []
    assert named(watched, 1.0) == []
    assert any("damaged" in line for line in watched.problems)


def test_lines_of_json_and_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hung(1).write(tmp_path)
    clock: Iterator[float] = iter(range(100))
    rests = iter([False, False, True])
    status = watch(
        FolderWatch(tmp_path, 1.0), lambda: next(rests), as_json=True, exit_code=True, once=False, clock=lambda: next(clock)
    )
    [line] = capsys.readouterr().out.splitlines()
    assert (json.loads(line)["culprits"][0]["rank"], status) == (1, 10)


def test_the_command_ends_with_the_first_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hung(3).write(tmp_path)
    assert run(["watch-folder", str(tmp_path), "--once", "--settle", "0", "--interval", "0.05"]) == 0
    assert "rank 3" in capsys.readouterr().out
    assert run(["watch-folder", str(tmp_path / "none")]) == 2


def test_a_folder_that_goes_is_told_once_and_seen_when_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    watched, told = FolderWatch(folder, 0.0), []
    folder.rmdir()
    for at in (0.0, 1.0):
        assert named(watched, at) == []
        told += watched.problems
    assert len(told) == 1
    assert "is gone" in told[0]
    hung(1).write(folder)
    assert [named(watched, at) for at in (2.0, 3.0)] == [[], [[1]]]
