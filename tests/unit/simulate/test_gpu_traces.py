"""SIMULATED traces of GPUs are taken by the formats' own readers and by whoever reads real ones, and show who is slow."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ncclwatch.cli.foreign import judge_found
from ncclwatch.ingest.folders import find
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.simulate.gpu_traces import write_kineto, write_nsight
from ncclwatch.simulate.inspector import write_inspector
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import load_all
from ncclwatch.simulate.timeline import Timeline

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def timeline(name: str) -> Timeline:
    """A short run, whose fault is there from early on."""
    [scenario] = [one for one in load_all(SCENARIOS, "") if one.name == name]
    faults = tuple(replace(fault, iteration=8) for fault in scenario.faults)
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
