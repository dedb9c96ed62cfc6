"""StragglerAnalysis: the same figures as theirs on their own trace, and whom made-up traces accuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.ingest.base import HEAD_BYTES, IngestError
from ncclwatch.ingest.straggler_analysis import StragglerAnalysis, _columns, _measured, _shards
from ncclwatch.ingest.straggler_model import build
from ncclwatch.ingest.straggler_what_if import WhatIf
from ncclwatch.model.verdict import VerdictClass
from unit.ingest.made_rank_logs import judged

pyarrow = pytest.importorskip("pyarrow")
FORMAT = StragglerAnalysis()
FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "straggler-analysis"
MESSAGES = {"forward-pp-comm", "backward-pp-comm"}


def made(path: Path, *, slow: tuple[int, int] | None = None, steps: int = 6, replicas: int = 4, **changed: Any) -> Path:
    """A trace of jobs of one stage: two forward and backward passes, gradients, optimizer. ``slow``: (replica, times as long)."""
    from pyarrow import parquet

    rows: list[dict[str, Any]] = []
    for step in range(steps):
        for replica in range(replicas):
            time, longest = 0.0, 1.0 if slow is None else float(slow[1])
            factor = float(slow[1]) if slow is not None and slow[0] == replica else 1.0
            for kind, number in (
                ("forward-compute", 0),
                ("backward-compute", 0),
                ("forward-compute", 1),
                ("backward-compute", 1),
            ):
                rows.append(_row(step, replica, kind, number, time, 0.1 * factor))
                time += 0.1 * factor
            all_there = 0.4 * longest
            shorts = ("gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce")
            rows += [_row(step, replica, kind, 0, time, 0.0) for kind in shorts]
            for kind in ("grads-reduce-scatter", "optimizer-clip-main-grad"):
                rows.append(_row(step, replica, kind, 0, time, max(time, all_there) + 0.05 - time))
                time = max(time, all_there) + 0.05
            rows.append(_row(step, replica, "optimizer", 0, time, 0.01))
    columns = {name: [row[name] for row in rows] for name in rows[0]} | changed
    parquet.write_table(pyarrow.table(columns), path)
    return path


def _row(step: int, replica: int, kind: str, number: int, begin: float, duration: float) -> dict[str, Any]:
    return {
        "dp_rank": replica, "stage": 0, "rank": replica, "step": step, "optype": kind, "start_ts": begin, "duration": duration,
        "seq_id": number, "mc": 0, "gmc": 0, "mb_id": number,
    }  # fmt: skip


def test_slowdowns_are_those_of_their_own_analysis() -> None:
    path = FIXTURE / "trace-ST.parquet"
    wanted = json.loads((FIXTURE / "result-ST.json").read_text())
    trace = _columns(path)
    measured, step = _measured(trace, "x")
    said = WhatIf(build(step, trace.stages, trace.chunks, trace.replicas * _shards(path)), measured).slowdowns(trace.steps)
    assert said.total == pytest.approx(wanted["blocking_slowdown"], abs=1e-4)
    assert said.by_few_workers == pytest.approx(wanted["M_W"], abs=1e-3)
    assert said.by_last_stage == pytest.approx(wanted["M_S"], abs=1e-3)
    for ours, theirs in ((said.by_replica, "dp_rank"), (said.by_stage, "stage")):
        expected = {int(key): value for key, value in wanted[f"blocking_decompose_by_{theirs}"].items()}
        assert dict(ours) == pytest.approx(expected, abs=1e-3)
    assert dict(said.by_kind) == pytest.approx(wanted["blocking_decompose_by_optype"], abs=1e-3)
    assert set(said.by_kind) >= MESSAGES


def test_their_trace_is_judged_as_uneven_stages() -> None:
    last = list(judged(FORMAT.read([FIXTURE / "trace-ST.parquet"])[0], ask=False))[-1]
    assert last.verdict_class is VerdictClass.SLOW_COMPUTATION
    assert [culprit.rank for culprit in last.culprits] == [6, 7]
    assert last.stage == "pipeline stage 3"
    assert any("what-if slowdown S 1.179" in line for line in last.evidence)


def test_one_slow_worker_is_named(tmp_path: Path) -> None:
    last = list(judged(FORMAT.read([made(tmp_path / "trace-x.parquet", slow=(2, 3))])[0], ask=False))[-1]
    assert [culprit.rank for culprit in last.culprits] == [2]
    assert last.time is None
    # Computation: three replicas of four take 0.4 s, one 1.2 s; the mean is 0.6 s.
    assert any("S 1.845: steps take 1.31 s, without stragglers 0.71 s" in line for line in last.evidence)


def test_a_job_without_stragglers_accuses_nobody(tmp_path: Path) -> None:
    found = list(judged(FORMAT.read([made(tmp_path / "trace-x.parquet")])[0], ask=False))
    assert not any(verdict.verdict_class.accuses for verdict in found)
    assert "1.00 times as long" in found[-1].summary


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"optype": ["dance"] * 240}, r"row 1: optype dance is not known"),
        ({"stage": [-1] * 240}, r"row 1: stage is -1"),
        ({"start_ts": ["soon"] * 240}, r"column start_ts holds no numbers"),
        ({"duration": [float("nan")] * 240}, r"row 1: duration is nan"),
        ({"seq_id": [0] * 239 + [7]}, r"optimizer 0 of stage 0 is missing|optimizer 7 of stage 0 is missing"),
        ({"dp_rank": [10**9] * 240}, r"that is more than is judged"),
    ],
)
def test_what_makes_no_sense_is_told_with_its_place(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    path = made(tmp_path / "trace-x.parquet", **changed)
    with pytest.raises(IngestError, match=rf"trace-x\.parquet: .*{why}|trace-x\.parquet: {why}|{why}"):
        FORMAT.read([path])


def test_damage_and_other_tables_are_one_line(tmp_path: Path) -> None:
    from pyarrow import parquet

    whole = made(tmp_path / "trace-x.parquet").read_bytes()
    for number, data in enumerate((whole[:-200], whole[:50], b"PAR1" + bytes(500) + whole[-300:], b"PAR1PAR1")):
        path = tmp_path / f"cut{number}.parquet"
        path.write_bytes(data)
        with pytest.raises(IngestError, match=rf"cut{number}\.parquet: "):
            FORMAT.read([path])
    other = tmp_path / "other.parquet"
    parquet.write_table(pyarrow.table({"a": [1]}), other)
    assert not FORMAT.recognises(other.read_bytes()[:HEAD_BYTES], other)
    with pytest.raises(IngestError, match=r"other\.parquet: no column dp_rank"):
        FORMAT.read([other])
    assert FORMAT.recognises(whole[:HEAD_BYTES], tmp_path / "trace-x.parquet")
