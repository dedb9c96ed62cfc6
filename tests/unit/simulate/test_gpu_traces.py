"""SIMULATED traces of GPUs are taken by the formats' own readers and by whoever reads real ones, and show who is slow."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ncclwatch.cli.foreign import judge_found
from ncclwatch.ingest.folders import find
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.simulate.dcgm_text import write_dcgm
from ncclwatch.simulate.gpu_traces import write_kineto, write_nsight
from ncclwatch.simulate.inspector import write_inspector
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import load_all
from ncclwatch.simulate.straggler_traces import worker_of, write_straggler
from ncclwatch.simulate.timeline import Timeline

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def timeline(name: str, begins: int = 8) -> Timeline:
    """A short run, whose fault is there from an early iteration on."""
    [scenario] = [one for one in load_all(SCENARIOS, "") if one.name == name]
    faults = tuple(replace(fault, iteration=begins, start_s=None) for fault in scenario.faults)
    return simulate(replace(scenario, faults=faults, workload=replace(scenario.workload, iterations=48)))


@pytest.fixture(scope="module")
def slow() -> Timeline:
    return timeline("quick-slow-gpu")


def judged(folder: Path) -> Verdict:
    [job], problems = judge_found(find([folder]))
    assert not problems
    return job.verdicts[0]


def test_kinetos_traces_are_json_and_accepted(slow: Timeline, tmp_path: Path) -> None:
    paths = write_kineto(slow, tmp_path)
    assert len(paths) == slow.scenario.layout.world
    kernels = [one for one in json.loads(paths[0].read_text())["traceEvents"] if one["cat"] == "kernel"]
    assert kernels and all(one["dur"] >= 0 and one["name"].startswith("nccl") for one in kernels)


def test_nsights_exports_are_accepted_by_sqlite(slow: Timeline, tmp_path: Path) -> None:
    for path in write_nsight(slow, tmp_path):
        with sqlite3.connect(path) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            (orphans,) = database.execute(
                "SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_KERNEL k LEFT JOIN CUPTI_ACTIVITY_KIND_RUNTIME r "
                "ON k.correlationId = r.correlationId AND k.globalPid / 16777216 = r.globalTid / 16777216 WHERE r.start IS NULL"
            ).fetchone()
            assert orphans == 0
        database.close()


@pytest.mark.parametrize("write", [write_kineto, write_nsight])
def test_the_slow_gpu_is_told_and_a_clean_job_accuses_nobody(
    write: Callable[[Timeline, Path], list[Path]], slow: Timeline, tmp_path: Path
) -> None:
    (tmp_path / "slow").mkdir()
    write(slow, tmp_path / "slow")
    verdict = judged(tmp_path / "slow")
    assert verdict.verdict_class is VerdictClass.SLOW_COMPUTATION
    assert {culprit.rank for culprit in verdict.culprits} == set(slow.scenario.expect.ranks)
    (tmp_path / "clean").mkdir()
    write(timeline("quick-clean"), tmp_path / "clean")
    assert judged(tmp_path / "clean").verdict_class is VerdictClass.RUNNING


def test_the_inspectors_lines_are_json_and_show_who_comes_later(slow: Timeline, tmp_path: Path) -> None:
    paths = write_inspector(slow, tmp_path)
    assert all(json.loads(line)["coll_perf"]["coll_exec_time_us"] >= 0 for path in paths for line in path.open())
    verdict = judged(tmp_path)
    assert not verdict.verdict_class.accuses or verdict.verdict_class.slow
    assert any("came to them later" in line for line in verdict.evidence)


def test_straggler_traces_are_accepted_by_pyarrow_and_have_every_operation_of_every_step(slow: Timeline, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    trace, _ = write_straggler(slow, tmp_path)
    rows = parquet.read_table(trace).to_pylist()
    layout, work = slow.scenario.layout, slow.scenario.workload
    steps = {row["step"] for row in rows}
    for kind, a_step in (("forward-compute", work.micro_batches), ("optimizer", 1), ("grads-reduce-scatter", 1)):
        assert sum(row["optype"] == kind for row in rows) == len(steps) * layout.dp * layout.pp * a_step
    assert len(steps) == work.iterations - 1
    assert all(row["duration"] >= 0 and row["start_ts"] >= 0 for row in rows)


def test_the_slow_worker_is_told_by_the_what_if_and_a_clean_job_accuses_nobody(slow: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for name, job in (("slow", slow), ("clean", timeline("quick-clean"))):
        (tmp_path / name).mkdir()
        write_straggler(job, tmp_path / name)
    verdict = judged(tmp_path / "slow")
    assert verdict.verdict_class is VerdictClass.SLOW_COMPUTATION
    assert {one.rank for one in verdict.culprits} == {
        worker_of(slow.scenario.layout, rank) for rank in slow.scenario.expect.ranks
    }
    assert judged(tmp_path / "clean").verdict_class is VerdictClass.RUNNING


def test_stages_in_chunks_fit_the_model_of_the_analysis(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_straggler(timeline("clean-interleaved"), tmp_path)
    assert judged(tmp_path).verdict_class is VerdictClass.RUNNING


def test_a_slow_link_of_a_collective_names_no_worker(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    # What is usual is the median: with most steps slow none is.
    write_straggler(timeline("quick-slow-link", begins=32), tmp_path)
    verdict = judged(tmp_path)
    assert verdict.verdict_class is VerdictClass.SLOW_COMMUNICATION
    assert not verdict.culprits


def test_dcgms_text_is_accepted_by_promtool_and_tells_the_slow_gpu_without_an_accusation(slow: Timeline, tmp_path: Path) -> None:
    paths = write_dcgm(slow, tmp_path, slow.end)
    verdict = judged(tmp_path)
    assert not verdict.verdict_class.accuses
    [rank] = slow.scenario.expect.ranks
    node, gpu = divmod(rank, slow.scenario.layout.ranks_per_node)
    assert any(line.startswith(f"GPU {gpu} of sim-node-{node}: SM clock") for line in verdict.evidence)
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian package prometheus): the text is not checked")
    for path in paths:
        told = subprocess.run([program, "check", "metrics"], input=path.read_bytes(), capture_output=True, check=False)
        # 3: it is taken, and its style complained of, here of the labels that the exporter really has.
        assert told.returncode in (0, 3), told.stdout + told.stderr
        assert all(b"camelCase" in line for line in told.stderr.splitlines()), told.stderr


def test_where_no_step_is_whole_nothing_is_written(tmp_path: Path) -> None:
    """Workers on a node that nobody looks at have no trace."""
    pytest.importorskip("pyarrow")
    assert write_straggler(timeline("clean-missing-node"), tmp_path) == []
