"""``ncclwatch history``: from recordings and verdicts to answers, in words and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ncclwatch.cli.history_keeper import keeping
from ncclwatch.cli.history_options import parse_since
from ncclwatch.cli.history_runs import parse_duration
from ncclwatch.cli.main import run
from ncclwatch.errors import UsageError
from ncclwatch.history import query
from ncclwatch.history.query import History
from ncclwatch.history.rows import Run
from ncclwatch.store.replay import Recordings, Replay
from unit.histories import NOON_NS, SECOND_NS, document, incident, keep, run_of

RECORDING = Path(__file__).parents[2] / "fixtures" / "stopped-8-ranks.recording"
Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def ask(*words: object) -> tuple[int, str, str]:
        status = run(["history", *map(str, words)])
        told = capsys.readouterr()
        return status, told.out, told.err

    return ask


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder, of, later = tmp_path / "history", Run("llama 70b", "aaaa1111"), Run("llama 70b", "bbbb2222")
    begin = NOON_NS + 1020 * SECOND_NS
    keep(folder, [
        *run_of(of, NOON_NS, 900), *incident(of, "node7", NOON_NS + 600 * SECOND_NS),
        *run_of(later, begin, 600, ended=False, iteration_s=1.5),
        *incident(later, "node8", begin + 60 * SECOND_NS, stood_s=30, kind="stopped", number="v2"),
    ])  # fmt: skip
    return folder


def test_a_recording_is_taken_in_once(said: Said, tmp_path: Path) -> None:
    root = tmp_path / "history"
    assert said("import", RECORDING, "--history", root, "--job", "a/b") == (0, "stopped-8-ranks.recording: 22 rows\n", "")
    before = sorted(root.glob("**/*.parquet"))
    assert said("import", RECORDING, "--history", root, "--job", "a/b")[1] == "stopped-8-ranks.recording: it is there already\n"
    assert sorted(root.glob("**/*.parquet")) == before
    status, out, err = said("verdicts", "--history", root, "--since", "2026-11-01")
    assert (status, err) == (0, "")
    assert "a/b  stopped   99%  node1  2      recovered after 10s  rank 2 (node1, pid 18300, GPU 0) holds up" in out


def test_lines_of_attach_engine_hooks_and_bare_verdicts_are_taken_in(said: Said, tmp_path: Path) -> None:
    told = document("node7", NOON_NS)
    lines: list[Any] = [
        {"type": "attached", "time": 1.0}, {"type": "verdict", "time": NOON_NS / 1e9 + 5, "verdict": told},
        {"type": "recovery", "time": NOON_NS / 1e9 + 50, "duration_s": 50.0, "id": "v1", "verdict": told},
        {"time": NOON_NS / 1e9 + 6, "job": "mine", "command": ["x"], "verdict": document("node8", NOON_NS)},
        {**document("node9", NOON_NS, number="v9"), "time": NOON_NS / 1e9}, {"type": "answer", "verdict": told},
        [1], {"verdict": 3}, None,
    ]  # fmt: skip
    file = tmp_path / "lines.json"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n{torn", "utf-8")
    assert said("import", file, "--history", tmp_path / "history")[:2] == (0, "lines.json: 6 rows\n")
    status, out, _ = said("verdicts", "--history", tmp_path / "history", "--json")
    found = {tuple(one["nodes"]): (one["job"], one["ended_by"], one["stood_s"]) for one in json.loads(out)}
    assert status == 0
    assert found == {("node7",): ("", "recovery", 50.0), ("node8",): ("mine", None, None), ("node9",): ("", None, None)}


def test_a_node_that_was_blamed(said: Said, root: Path) -> None:
    status, out, err = said("node", "node7", "--history", root)
    assert (status, err) == (0, "")
    assert out.startswith("node7 was blamed 1 time since ")
    assert "in 1 job: hardware (1)" in out
    assert "node7" in said("node", "NODE7.local", "--history", root)[1].splitlines()[0]
    told = json.loads(said("node", "node7", "--history", root, "--json")[1])
    assert (told["times"], told["incidents"][0]["time"][-1]) == (1, "Z")


def test_jobs_trend_compare_downtime_and_gaps(said: Said, root: Path) -> None:
    lines = said("jobs", "--history", root)[1].splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["llama", "70b", "bbbb2222"], ["llama", "70b", "aaaa1111"]]
    out = said("trend", "llama 70b", "--history", root, "--steps", "4")[1]
    assert "from 1 s to 1.5 s: 50% longer" in out
    out = said("compare", "aaaa", "bbbb", "--history", root)[1]
    assert "iteration, median" in out
    assert "+50.0%" in out
    out = said("downtime", "--history", root, "--checkpoint-every", "30m")[1]
    rows = {line.rsplit("  ", 4)[0].strip(): line.split("  ") for line in out.splitlines()}
    assert any(name.startswith("restart (re-initialization)") for name in rows)
    assert "~15m00s of it inferred" in out
    assert "half of what lies between two checkpoints" in out
    told = json.loads(said("downtime", "--history", root, "--json")[1])
    assert told["phases"]["restart"] == {"seconds": 120.0, "measured": 120.0, "inferred": 0.0}
    assert said("gaps", "--history", root)[1] == "nothing is missing in that time\n"


def test_sql(said: Said, root: Path) -> None:
    sql = "SELECT class, count(*) AS times FROM incidents GROUP BY class ORDER BY class"
    assert said("--history", root, "--sql", sql)[1].split() == ["class", "times", "hardware", "1", "stopped", "1"]
    assert json.loads(said("--history", root, "--sql", sql, "--json")[1])[0] == {"class": "hardware", "times": 1}
    assert said("--history", root, "--sql", "COPY runs TO '/tmp/x'")[0] == 2
    assert said("--history", root, "--sql", "SELECT * FROM runs WHERE false")[1] == "no rows\n"


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["jobs", "--history", "/nowhere"], 3, "there is no history in /nowhere"),
        (["jobs"], 2, "Missing option '--history'"), ([], 2, "nothing is asked"),
        (["--sql", "SELECT 1"], 2, "no history is named"), (["import", "/nowhere", "--history", "/tmp"], 2, "no such file"),
        (["compact", "--history", "/nowhere"], 3, "there is no history"),
        (["keep", "--history", "/nowhere", "--days", "3"], 3, "there is no history"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(said: Said, monkeypatch: pytest.MonkeyPatch, words: list[str], status: int, line: str) -> None:
    monkeypatch.delenv("NCCLWATCH_HISTORY", raising=False)
    ended, out, err = said(*words)
    assert (ended, out) == (status, "")
    assert err.startswith(f"ncclwatch: error: {line}")
    assert err.count("\n") == 1


def test_more_that_is_wrong(said: Said, root: Path, tmp_path: Path) -> None:
    for words, line in (
        (["jobs", "--since", "yesterday"], "--since yesterday is no time"), (["trend", "x"], "'x' is no run of this history"),
        (["compare", "llama 70b", "zz"], "'zz' is no run"),
        (["downtime", "--checkpoint-every", "soon"], "'soon' is no length of time"),
        (["keep", "--store", "/local"], "/local is no address"), (["keep", "--size", "many"], "'many' is not a size"),
        (["--sql", "SELECT 1", "jobs"], "--sql stands alone"),
    ):  # fmt: skip
        given = ["--history", root, *words] if words[0] == "--sql" else [*words, "--history", root]
        status, out, err = said(*given[: None if words[-1] != "jobs" else len(given)])
        assert (status, out) == (2, "")
        assert err.startswith(f"ncclwatch: error: {line}"), err
    text = tmp_path / "text"
    text.write_text("no verdict\n")
    status, _, err = said("import", text, "--history", root)
    assert (status, "is no recording and holds no verdict" in err) == (3, True)


def test_what_is_kept_can_be_said(said: Said, root: Path) -> None:
    assert said("keep", "--history", root)[1] == "kept: 180 days, at most 20 GiB\n"
    assert said("keep", "--history", root, "--days", "7", "--size", "2G")[1] == "kept: 7 days, at most 2 GiB\n"
    assert json.loads(said("keep", "--history", root, "--json")[1]) == {"days": 7, "nbytes": 2 << 30, "store": ""}
    assert said("compact", "--history", root)[1].startswith("0 files became 0; 0 removed")


def test_a_package_that_is_missing_is_said(said: Said, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "find_spec", lambda name: None)
    status, out, err = said("jobs", "--history", root)
    assert (status, out) == (3, "")
    assert (
        err
        == "ncclwatch: error: a history needs the packages duckdb and pyarrow: install it with: pip install 'ncclwatch[fleet]'\n"
    )


def test_since() -> None:
    assert str(parse_since("2026-11-20")) == "2026-11-20 00:00:00"
    assert str(parse_since("2026-11-20T08:00+02:00")) == "2026-11-20 06:00:00"
    assert parse_since("7d") < parse_since("12h")
    for wrong in ("", "7", "-7d", "9999999d", "x" * 100, "2026-13-01"):
        with pytest.raises(UsageError):
            parse_since(wrong)
    assert parse_duration("30m") == 1800
    for wrong in ("", "m", "0m", "-1m", "²m", "30", "99999999h"):
        with pytest.raises(UsageError):
            parse_duration(wrong)


def test_what_is_judged_is_kept_beside_the_judging(tmp_path: Path) -> None:
    root = tmp_path / "history"
    keep(root, incident(Run("older", "run"), "node1", NOON_NS), "older")
    judging = SimpleNamespace(before=None)
    with Recordings([RECORDING]) as recordings, keeping(root, "engine", judging) as (keeper,):
        replay = Replay(recordings)
        for _, update in replay.updates():
            keeper.take(replay, update, "llama")
            for verdict in update.told:
                assert judging.before is not None
                judging.before(verdict)
    with History(str(root)) as history:
        assert history.ask("SELECT DISTINCT job FROM rates").rows == [("llama",)]
        assert history.ask("SELECT kind FROM verdicts WHERE job = 'llama' ORDER BY n").rows == [("verdict",), ("recovery",)]
        assert history.ask("SELECT kind, command FROM lives ORDER BY n").rows == [("begin", "engine"), ("end", "engine")]
    with keeping(None, "engine", judging) as nobody:
        assert nobody == []
