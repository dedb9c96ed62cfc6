"""SIMULATED answers of RAS say what the simulated job shows, and are read by whoever reads real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.ingest.ras import Ras
from ncclwatch.simulate.ras_answers import DEAD_AFTER_S, ras_answer
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import load_all
from ncclwatch.simulate.timeline import Timeline

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def timeline(name: str) -> Timeline:
    [scenario] = [one for one in load_all(SCENARIOS, "") if one.name == name]
    return simulate(scenario)


@pytest.fixture(scope="module")
def stopped() -> Timeline:
    """Rank 3 of 4 is stopped at 2 s."""
    return timeline("quick-stop")


def whole(data: dict[str, Any]) -> dict[str, Any]:
    """The communicator of all ranks, else the largest."""
    return max(data["communicators"], key=lambda one: one["size"])


def test_before_the_fault_all_answer(stopped: Timeline) -> None:
    data = json.loads(ras_answer(stopped, 1.9))
    assert all(not one["missing_ranks"] for one in data["communicators"])


def test_who_is_stopped_does_not_answer_and_is_dead_after_a_minute(stopped: Timeline) -> None:
    for at_s, dead in ((10.0, False), (10.0 + DEAD_AFTER_S, True)):
        missing = [rank for one in json.loads(ras_answer(stopped, at_s))["communicators"] for rank in one["missing_ranks"]]
        assert {rank["pid"] for rank in missing} == {10_003}
        assert {rank["status"]["considered_dead"] for rank in missing} == {dead}


def test_counts_rise_while_the_job_runs_and_stand_after(stopped: Timeline) -> None:
    said = [json.loads(ras_answer(stopped, at_s)) for at_s in (1.0, 1.5, 20.0, 30.0)]
    sums = [
        sum(sum(rank["collective_counts"].values()) for one in data["communicators"] for rank in one["ranks"]) for data in said
    ]
    assert sums[0] < sums[1] and sums[2] == sums[3]


def test_the_form_is_that_of_real_answers(stopped: Timeline) -> None:
    real = json.loads((SCENARIOS.parent / "fixtures" / "nccl" / "2.29.2-dead.json").read_bytes())
    made = json.loads(ras_answer(stopped, 10.0))
    assert made.keys() == real.keys()
    for part in ("ranks", "missing_ranks"):
        real_one, made_one = whole(real)[part][0], next(one[part][0] for one in made["communicators"] if one[part])
        assert {**real_one, **real_one["status"]}.keys() == {**made_one, **made_one["status"]}.keys()


def test_it_is_read_as_real_ones_are(stopped: Timeline, tmp_path: Path) -> None:
    file = tmp_path / "ras.json"
    file.write_text(ras_answer(stopped, 10.0))
    assert Ras().recognises(file.read_bytes()[:4096], file)
    [job] = Ras().read([file])
    assert {sample.process.pid for sample in job.batches[0].samples} == {10_000, 10_001, 10_002, 10_003}
