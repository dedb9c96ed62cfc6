"""What a session shows becomes rows: of a real recording, and of jobs that are told apart."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from ncclwatch.collect.batch import Change, ProcessChange
from ncclwatch.engine.session import Update
from ncclwatch.history.feed import Feed, job_name
from ncclwatch.history.tables import Row, fitted
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProcessInfo, VersionSource
from ncclwatch.model.traits import Traits
from ncclwatch.store.replay import Recordings, Replay

RECORDING = Path(__file__).parents[2] / "fixtures" / "stopped-8-ranks.recording"


def played(name: str = "") -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def put(_: int, make: Any) -> None:
        for row in make():
            assert isinstance(row, Row)
            assert len(fitted(row)) > 3
            found[row.table].append({"time": row.time_ns, "job": row.job, "run": row.run, **row.values})

    with Recordings([RECORDING]) as recordings:
        replay, feed = Replay(recordings), Feed(put, name)
        for time_ns, update in replay.updates():
            feed.take(replay, update, time_ns)
        feed.close()
    return found


def test_a_recording_becomes_rows() -> None:
    found = played()
    assert [(one["kind"], one["class"], one["nodes"], one["ranks"]) for one in found["verdicts"]] == [
        ("verdict", "stopped", ["node1"], [2]), ("recovery", "stopped", ["node1"], [2]),
    ]  # fmt: skip
    told, recovered = found["verdicts"]
    assert told["id"] != recovered["id"]
    assert told["verdict_id"] == recovered["verdict_id"]
    assert recovered["duration_s"] > 5
    assert {row["run"] for table in ("verdicts", "rates", "runs") for row in found[table]} == {found["runs"][0]["run"]}
    assert [row["kind"] for row in found["runs"]] == ["begin", "seen"]
    # Once at the beginning, once when the verdict was told.
    assert Counter(row["rank"] for row in found["rates"]) == dict.fromkeys(range(8), 2)
    assert {row["state"] for row in found["rates"] if row["rank"] == 2} >= {"T"}
    assert played()["verdicts"][0]["id"] == told["id"]


def test_a_job_has_the_name_that_it_was_given() -> None:
    assert {row["job"] for row in played("llama")["rates"]} == {"llama"}
    assert len({row["job"] for row in played()["rates"]}) == 1


def info(*command: str, traits: Traits | None = None, name: str = "python3") -> ProcessInfo:
    return ProcessInfo(ProcessKey("boot", 1, 2, "id"), "node1", name, command, "", None, VersionSource.UNKNOWN, traits=traits)


def test_a_job_that_nobody_named_is_called_by_what_runs_it() -> None:
    assert job_name(info("/usr/bin/python3", "-u", "/home/a/train.py", "--x", "y.py")) == "train.py"
    assert job_name(info("python3", "-m", "megatron.train", "--lr", "1")) == "megatron.train"
    assert job_name(info("/opt/nccl-tests/all_reduce_perf", "-b", "8")) == "all_reduce_perf"
    assert job_name(info(name="ncclwatch-testj")) == "ncclwatch-testj"
    assert job_name(info("python3", "train.py", traits=Traits(job="4711"))) == "slurm-4711"


def ended(**change: Any) -> list[str]:
    """The rows of a run that is no longer there, with what was told of its processes."""
    kinds: list[str] = []
    with Recordings([RECORDING]) as recordings:
        replay = Replay(recordings)
        feed = Feed(lambda _, make: kinds.extend(row.values["kind"] for row in make() if row.table == "runs"))
        for time_ns, update in replay.updates():
            feed.take(replay, update, time_ns)
        windows = list(update.windows or ())
        gone = Update(update.now_ns, windows=[])
        if change:
            gone.changes = [ProcessChange(info=windows[0].process, pid=windows[0].process.pid, **change)]
        for later in (0, 3, 9):
            feed.take(replay, gone, time_ns + later * 10**9)
            gone = Update(update.now_ns, windows=[])
    return kinds


def test_a_run_has_ended_where_a_process_has_and_not_where_its_node_is_heard_no_longer() -> None:
    assert ended() == ["begin", "seen"]
    assert ended(change=Change.EXITED) == ["begin", "end"]
    assert ended(change=Change.UNREADABLE) == ["begin", "seen"]
