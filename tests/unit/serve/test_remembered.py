"""What the page shows of a history: nodes that were blamed, one in full, and a clear line where there is none."""

from __future__ import annotations

import time
from pathlib import Path

from ncclwatch.history.rows import Run
from ncclwatch.serve.remembered import Remembered
from unit.histories import incident, keep
from unit.serve.served import served

HOSTILE = "<b>\x1b[31m\x00node"


def filled(root: Path) -> Remembered:
    now, run = time.time_ns(), Run("llama", "r1")
    hour = 3600 * 10**9
    rows = [*incident(run, "node7", now - 3 * hour, stood_s=60.0, cause="link-down"), *incident(run, HOSTILE, now - 2 * hour)]
    keep(root, [*rows, *incident(run, "node7", now - hour, number="v2")])
    return Remembered(str(root))


def test_nodes_and_one_of_them(tmp_path: Path) -> None:
    past = filled(tmp_path)
    nodes = past.nodes()["nodes"]
    assert next((one["node"], one["times"], one["jobs"]) for one in nodes) == ("node7", 2, 1)
    assert not any(ch in str(nodes) for ch in "\x1b\x00")
    node = past.node("node7")
    assert [one["ended"] for one in node["incidents"]] == ["no", "recovered after 1m00s"]
    assert past.node("node7") is node, "an answer is kept for a moment"
    assert past.node("ode7") != node and past.node("ode7")["others"] == ["node7"]


def test_it_is_asked_over_the_page(tmp_path: Path) -> None:
    with served([], past=filled(tmp_path / "kept")) as at:
        assert at.ask("/api/about").json == {"history": True}
        assert at.ask("/api/nodes").json["nodes"][0]["node"] == "node7"
        assert at.ask("/api/node?node=node7").json["reasons"]
        assert at.ask("/api/node").status == 400


def test_where_there_is_none_that_is_said(tmp_path: Path) -> None:
    with served([], past=Remembered(str(tmp_path / "none"))) as at:
        answer = at.ask("/api/nodes")
        assert answer.status == 503 and "no history" in answer.json["error"]
    with served([]) as at:
        assert at.ask("/api/about").json == {"history": False}
        assert at.ask("/api/nodes").status == 404
