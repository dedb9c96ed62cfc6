"""Small files become one, what is too old or too much goes, and a kill in between leaves nothing twice."""

from __future__ import annotations

import os
import shutil
import time
from datetime import timedelta
from pathlib import Path

import pytest

from ncclwatch.history import compact, files, journal, remote, snapshot
from ncclwatch.history.compact import Done, Keep
from ncclwatch.history.query import History
from ncclwatch.history.tables import Row
from unit.histories import DAY_NS, NOON_NS, TODAY, keep, numbered


def rates(root: Path, life: str, count: int = 10, day: int = 0, job: str = "job") -> None:
    keep(root, [Row("rates", NOON_NS + day * DAY_NS + number, job, "run", {"rank": number}) for number in range(count)], life)


def count(root: Path | str) -> tuple[int, int]:
    with History(str(root), tables=("rates",)) as history:
        assert not history.problems
        ((rows, different),) = history.ask("SELECT count(*), count(DISTINCT (life, n)) FROM rates").rows
    return rows, different


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("rates/*/*/*.parquet"))


def test_a_day_that_is_over_becomes_one_file(tmp_path: Path) -> None:
    for number in range(3):
        rates(tmp_path, f"life{number}")
    done = compact.look_after(tmp_path)
    assert done is not None
    assert (done.merged, done.made, done.problem) == (3, 1, "")
    (name,) = names(tmp_path)
    assert name.startswith(files.MERGED)
    assert count(tmp_path) == (30, 30)
    # What comes later is taken in too.
    rates(tmp_path, "late")
    compact.look_after(tmp_path)
    assert len(names(tmp_path)) == 1
    assert count(tmp_path) == (40, 40)


def test_a_kill_between_making_one_and_removing_the_others_leaves_nothing_twice(tmp_path: Path) -> None:
    for number in range(3):
        rates(tmp_path, f"life{number}")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "rates", copy)
    compact.look_after(tmp_path)
    # As if none had been removed.
    shutil.copytree(copy, tmp_path / "rates", dirs_exist_ok=True)
    assert len(names(tmp_path)) == 4
    assert count(tmp_path) == (30, 30)
    rates(tmp_path, "late")
    compact.look_after(tmp_path)
    assert len(names(tmp_path)) == 1
    assert count(tmp_path) == (40, 40)


def test_a_journal_whose_file_is_part_of_another_is_not_taken_in_again(tmp_path: Path) -> None:
    rates(tmp_path, "life1")
    rates(tmp_path, "life2")
    compact.look_after(tmp_path)
    # Killed before its journal was removed.
    rows = [Row("rates", NOON_NS + number, "job", "run", {"rank": number}) for number in range(10)]
    left = journal.Journal(tmp_path, "life1", 0)
    left.append(1, 1, [[table, values[:-2]] for table, values in numbered(rows)])
    left.close()
    assert count(tmp_path) == (20, 20)
    compact.look_after(tmp_path)
    assert count(tmp_path) == (20, 20)
    assert not journal.journals(tmp_path)


def test_the_journal_of_a_writer_that_lives_is_left_alone(tmp_path: Path) -> None:
    journal.folder(tmp_path).mkdir()
    alive = journal.Journal(tmp_path, "alive", 0)
    done = compact.look_after(tmp_path)
    assert done is not None
    assert done.recovered == 0
    assert journal.journals(tmp_path) == [alive.path]
    alive.close()
    done = compact.look_after(tmp_path)
    assert done is not None
    assert done.recovered == 1


def test_what_is_damaged_stays_and_is_told(tmp_path: Path) -> None:
    journal.folder(tmp_path).mkdir()
    cut = journal.Journal(tmp_path, "cut", 0)
    cut.append(NOON_NS, 1, [["rates", [NOON_NS, "job", "run", 1]]])
    cut.close()
    with cut.path.open("ab") as file:
        file.write(b"\x10\0\0\0 torn")
    compact.look_after(tmp_path)
    assert count(tmp_path) == (1, 1)
    assert [path.suffix for path in journal.folder(tmp_path).iterdir()] == [".damaged"]
    with History(str(tmp_path)) as history:
        told = [("killed", "9 bytes at the end of cut.0.journal are no whole record")]
        assert history.ask("SELECT kind, detail FROM gaps").rows == told


def test_days_that_are_too_old_go_and_then_what_is_too_much(tmp_path: Path) -> None:
    for day in range(6):
        rates(tmp_path, f"life{day}", day=day)
        keep(tmp_path, [Row("verdicts", NOON_NS + day * DAY_NS, "job", "run", {"id": str(day), "kind": "verdict"})], f"v{day}")
    done = Done()
    compact.retain(tmp_path, Keep(days=3), done, TODAY)
    days = [f"day={TODAY - timedelta(days=ago)}" for ago in (3, 2, 1, 0)]
    assert sorted(path.name for path in (tmp_path / "rates").iterdir()) == days
    assert done.removed == 4
    sizes = sum(path.stat().st_size for path in tmp_path.glob("*/*/*/*.parquet"))
    one = next(tmp_path.glob("rates/*/*/*.parquet")).stat().st_size
    compact.retain(tmp_path, Keep(days=3, nbytes=sizes - one), done, TODAY)
    # The oldest of what is most: verdicts are asked for longest.
    assert sorted(path.name for path in (tmp_path / "rates").iterdir()) == days[1:]
    assert len(list((tmp_path / "verdicts").iterdir())) == 4


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"days": "x"}', b'{"days": 1, "rm": "/"}', b"\xff" * 100])
def test_what_says_how_much_is_kept_may_be_anything(tmp_path: Path, text: bytes) -> None:
    (tmp_path / compact.KEEP).write_bytes(text)
    assert compact.keep_of(tmp_path) == Keep()


def test_somebody_elses_files_are_left_alone(tmp_path: Path) -> None:
    rates(tmp_path, "life1")
    folder = next(tmp_path.glob("rates/*/*"))
    (folder / "notes.txt").write_text("mine")
    outside = tmp_path.parent / "outside"
    outside.mkdir()
    (outside / "precious.parquet").write_text("mine")
    (folder.parent / "job=link").symlink_to(outside)
    compact.retain(tmp_path, Keep(days=1), Done())
    assert (folder / "notes.txt").exists()
    assert (outside / "precious.parquet").exists()


def test_a_history_can_be_asked_while_files_are_merged(tmp_path: Path) -> None:
    for number in range(3):
        rates(tmp_path, f"life{number}")
    with History(str(tmp_path)) as history:
        compact.look_after(tmp_path)
        assert snapshot.is_stale(history.taken)
        assert history.ask("SELECT count(*) FROM rates").rows == [(30,)]


def test_today_is_merged_once_there_is_much(tmp_path: Path) -> None:
    for number in range(compact.MANY):
        rows = [Row("rates", time.time_ns(), "job", "run", {"rank": number})]
        keep(tmp_path, rows, f"life{number}")
        if number == compact.MANY - 2:
            compact.look_after(tmp_path)
            assert len(names(tmp_path)) == compact.MANY - 1
    compact.look_after(tmp_path)
    assert len(names(tmp_path)) == 1
    assert count(tmp_path) == (compact.MANY, compact.MANY)


def test_whole_days_are_copied_to_a_store_and_read_there(tmp_path: Path) -> None:
    # pyarrow's own file system stands for the store: what is said to S3 is not seen by this.
    root, store = tmp_path / "history", tmp_path / "store"
    root.mkdir()
    for number in range(3):
        rates(root, f"life{number}", job="a/b")
    keep(root, [Row("rates", time.time_ns(), "job", "run", {"rank": 1})], "today")
    (root / compact.KEEP).write_text(f'{{"store": "file://{store}", "days": 36500}}')
    done = compact.look_after(root)
    assert done is not None
    assert (done.copied, done.problem) == (1, "")
    assert count(f"file://{store}") == (30, 30)
    rates(root, "late", job="a/b")
    done = compact.look_after(root)
    assert done is not None
    assert done.copied == 1
    # The store still has what was copied first, which is part of what was copied later.
    assert len(list(store.glob("rates/*/*/*.parquet"))) == 2
    assert count(f"file://{store}") == (40, 40)
    assert remote.copy_days(root, "file:///proc/nowhere")[1]


def test_of_two_who_look_after_it_one_does(tmp_path: Path) -> None:
    with files.locked(tmp_path) as mine:
        assert mine
        assert compact.look_after(tmp_path) is None
    assert compact.look_after(tmp_path) is not None


def test_what_a_killed_writer_of_files_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / files.WORK).mkdir()
    (tmp_path / files.WORK / "half.parquet").write_text("half")
    journal.folder(tmp_path).mkdir()
    unborn = journal.folder(tmp_path) / "x.0.new"
    unborn.write_text("")
    os.utime(unborn, (0, 0))
    compact.look_after(tmp_path)
    assert not list((tmp_path / files.WORK).iterdir())
    assert not unborn.exists()


def test_a_file_whose_data_is_damaged_is_left_and_said(tmp_path: Path) -> None:
    for number in range(3):
        rates(tmp_path, f"life{number}", count=1000)
    damaged = next(tmp_path.glob("rates/*/*/life1*.parquet"))
    data = bytearray(damaged.read_bytes())
    data[4:200] = b"\xa5" * 196
    damaged.write_bytes(data)
    done = compact.look_after(tmp_path)
    assert done is not None
    assert done.problem
    assert len(names(tmp_path)) == 3
