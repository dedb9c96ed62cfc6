"""What others may have put into the folder: it is left out and told, and never stops an answer."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ncclwatch.errors import TargetError, UsageError
from ncclwatch.history import compact, files, journal, query
from ncclwatch.history.query import History
from ncclwatch.history.tables import Row, arrow_schema, arrow_table
from unit.histories import NOON_NS, keep


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "history"
    keep(folder, [Row("rates", NOON_NS, "job", "run", {"rank": 1})])
    return folder


def ranks(root: Path) -> tuple[list[int], int]:
    with History(str(root), tables=("rates",)) as history:
        return [rank for (rank,) in history.ask("SELECT rank FROM rates ORDER BY rank").rows], len(history.problems)


def place(root: Path, name: str) -> Path:
    return next(root.glob("rates/day=*/job=job")) / name


def test_files_that_are_none_are_left_out_and_told(root: Path) -> None:
    good = next(root.glob("rates/*/*/*.parquet")).read_bytes()
    place(root, "empty.parquet").write_bytes(b"")
    place(root, "noise.parquet").write_bytes(os.urandom(5000))
    place(root, "cut.parquet").write_bytes(good[:-20])
    # A footer that claims to be longer than the file.
    place(root, "long.parquet").write_bytes(good[:-8] + struct.pack("<I", 1 << 30) + b"PAR1")
    pq.write_table(pa.table({"rank": ["text"]}), place(root, "types.parquet"))
    pq.write_table(pa.table({"rank": [1], "password": ["x"]}), place(root, "columns.parquet"))
    assert ranks(root) == ([1], 6)
    compact.look_after(root)
    assert ranks(root) == ([1], 6)


def test_what_is_no_file_or_not_in_its_place_is_not_looked_at(root: Path) -> None:
    good = next(root.glob("rates/*/*/*.parquet"))
    os.mkfifo(place(root, "pipe.parquet"))
    place(root, "folder.parquet").mkdir()
    place(root, "dangling.parquet").symlink_to("/nowhere")
    place(root, ".hidden.parquet").write_bytes(good.read_bytes())
    (root / "rates" / "stray.parquet").write_bytes(good.read_bytes())
    (root / "rates" / "day=today").mkdir()
    (root / "rates" / "day=today" / "stray.parquet").write_bytes(good.read_bytes())
    assert ranks(root) == ([1], 0)
    compact.look_after(root)
    assert ranks(root) == ([1], 0)


@pytest.mark.parametrize("sources", [b"{", b"[1, null]", b"[" * 5000, b'"x"', b"\xff\xfe", b'["../../../../etc/passwd"]'])
def test_what_a_file_says_it_was_made_of_may_be_anything(root: Path, sources: bytes) -> None:
    table = arrow_table("rates", [[NOON_NS, "job", "run", 2, *[None] * 18, "life", 1]])
    pq.write_table(table.replace_schema_metadata({files.SOURCES: sources}), place(root, "merged.x.parquet"))
    assert ranks(root) == ([1, 2], 0)


def test_a_file_may_lack_columns_that_came_later(root: Path) -> None:
    pq.write_table(pa.table({"rank": [2], "life": ["old"], "n": [1]}), place(root, "old.parquet"))
    pq.write_table(pa.table({"rank": [3], "life": ["old"], "n": [2]}), place(root, "older.parquet"))
    assert ranks(root) == ([1, 2, 3], 0)
    compact.look_after(root)
    assert ranks(root) == ([1, 2, 3], 0)
    assert len(list(root.glob("rates/*/*/*.parquet"))) == 1


def frame(payload: bytes) -> bytes:
    return struct.pack("<II", len(payload), zlib.crc32(payload)) + payload


WHOLE = frame(msgspec.msgpack.encode((NOON_NS, 1, [["rates", [NOON_NS, "job", "run", 5]]])))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0" * 100, os.urandom(1000), frame(b""), frame(b"\x93\xc0\xc0\xc0"), frame(msgspec.msgpack.encode([1, 2])),
        struct.pack("<II", 1 << 31, 0), frame(b"\x91" * 100_000),
        frame(msgspec.msgpack.encode((1 << 63, 1, []))), frame(msgspec.msgpack.encode((-1, -1, []))), WHOLE[:-1],
    ],
)  # fmt: skip
def test_a_journal_may_be_anything(root: Path, data: bytes) -> None:
    (journal.folder(root) / "evil.0.journal").write_bytes(WHOLE + data)
    assert ranks(root)[0] == [1, 5]
    compact.look_after(root)
    assert ranks(root)[0] == [1, 5]
    assert not journal.journals(root)


def test_rows_of_a_journal_may_be_anything(root: Path) -> None:
    rows = [None, 1, "x", [], ["rates"], ["rates", 1], ["nope", []], [["rates"], []], ["rates", []], ["rates", [None] * 99],
            ["rates", ["x", 1, {}, "y", [[]], -1]], ["rates", [1 << 62, "../x", "run", 6]],
            ["verdicts", [NOON_NS, "job", "run", 7]]]  # fmt: skip
    (journal.folder(root) / "evil.0.journal").write_bytes(frame(msgspec.msgpack.encode((NOON_NS, 1, rows))))
    found = ranks(root)[0]
    assert [rank for rank in found if rank is not None] == [1, 6]
    compact.look_after(root)
    assert [rank for rank in ranks(root)[0] if rank is not None] == [1, 6]


def test_where_there_is_no_history_one_line_says_so(tmp_path: Path) -> None:
    for where in (str(tmp_path), str(tmp_path / "nowhere"), f"file://{tmp_path}/nowhere"):
        with pytest.raises(TargetError, match="there is no history in"):
            History(where)
    with pytest.raises(UsageError, match="cannot be used"):
        History("gopher://x/y")


def test_an_empty_history_answers(tmp_path: Path) -> None:
    journal.folder(tmp_path).mkdir()
    with History(str(tmp_path)) as history:
        assert history.ask("SELECT count(*) FROM incidents").rows == [(0,)]


WRONG = [
    "COPY rates TO '{0}'", "CREATE TABLE x (a int)", "INSERT INTO rates VALUES (1)", "DROP VIEW rates", "SELECT 1; SELECT 2",
    "ATTACH '{0}'", "INSTALL httpfs", "LOAD httpfs", "SET memory_limit = '100GB'", "PRAGMA database_list", "", ";", "nonsense",
    "EXPORT DATABASE '{0}'", "SELECT * FROM read_csv('/etc/passwd')", "SELECT * FROM '/etc/passwd'", "SELECT * FROM glob('/*')",
    "SELECT * FROM read_blob('/etc/passwd')", "SELECT * FROM nowhere", "CALL pragma_version()",
    "SELECT * FROM read_parquet('http://127.0.0.1:1/x')", "WITH x AS (DELETE FROM rates RETURNING *) SELECT * FROM x",
]  # fmt: skip


def test_sql_can_only_read_and_only_the_history(root: Path, tmp_path: Path) -> None:
    with History(str(root)) as history:
        for sql in WRONG:
            with pytest.raises(UsageError):
                history.ask(sql.format(tmp_path / "written"))
        assert history.ask("SELECT rank FROM rates").rows == [(1,)]
    assert not (tmp_path / "written").exists()


def test_a_question_is_bounded_in_time_and_in_memory(root: Path) -> None:
    slow = "SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000000) c WHERE (a.range * b.range) % 7 = c.range"
    with History(str(root), timeout_s=0.3) as history, pytest.raises(TargetError, match="no answer within 0 s"):
        history.ask(slow)
    with History(str(root), memory=64 << 20) as history, pytest.raises(TargetError, match="too much memory"):
        history.ask("SELECT list(x.range) FROM range(100000000) x")


def test_an_answer_is_cut(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "MAX_ROWS", 10)
    with History(str(root)) as history:
        answer = history.ask("SELECT * FROM range(11)")
    assert (len(answer.rows), answer.cut) == (10, True)


def test_a_verdict_that_two_have_told_is_one(tmp_path: Path) -> None:
    for life in ("live", "imported"):
        keep(tmp_path, [Row("verdicts", NOON_NS, "job", "run", {"id": "same", "kind": "verdict"})], life)
    with History(str(tmp_path)) as history:
        assert history.ask("SELECT count(*) FROM verdicts").rows == [(1,)]
        assert history.ask("SELECT id, ended FROM incidents").rows == [("same", None)]


def test_the_schema_is_that_of_parquet(root: Path) -> None:
    assert pq.read_schema(next(root.glob("rates/*/*/*.parquet"))).names == arrow_schema("rates").names
