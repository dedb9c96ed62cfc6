"""``attach --history`` on a real job: killed and started again, it has the verdicts, the run is one, and the gap is told."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclwatch.history.query import History
from testbed.job import Job
from testbed.watcher import live, pids

pytestmark = pytest.mark.attach

PAUSE = ("--pause-us", "20000")


def ask(root: Path, sql: str) -> list[tuple[object, ...]]:
    with History(str(root)) as history:
        return history.ask(sql).rows


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.1)


def test_what_is_judged_is_kept_through_a_kill(tmp_path: Path) -> None:
    root = tmp_path / "history"
    kept = ("--history", str(root))
    with Job(nccl="2.27.5", ranks=2, count=1 << 14, extra=PAUSE) as job:
        with live(*kept, *pids(job)) as watcher:
            watcher.wait_for("rank", count=4)
            job.freeze(1)
            verdict = watcher.wait_for("verdict")["verdict"]
            until(lambda: ask(root, "SELECT verdict_id, ranks FROM verdicts") == [(verdict["id"], [1])])
            watcher.child.send_signal(signal.SIGKILL)
            watcher.child.wait(60)
        with live(*kept, *pids(job)) as watcher:
            again = watcher.wait_for("verdict")["verdict"]
            assert again["id"] == verdict["id"]
            job.thaw(1)
            watcher.wait_for("recovery", id=verdict["id"])
            assert watcher.end() == 0
    assert ask(root, "SELECT kind FROM gaps") == [("killed",)]
    assert ask(root, "SELECT kind FROM lives ORDER BY time") == [("begin",), ("begin",), ("end",)]
    # Both have watched the same run.
    assert ask(root, "SELECT count(DISTINCT run), count(DISTINCT life) FROM rates WHERE rank = 1") == [(1, 2)]
    assert ask(root, "SELECT DISTINCT ended_by FROM incidents WHERE ended IS NOT NULL") == [("recovery",)]
