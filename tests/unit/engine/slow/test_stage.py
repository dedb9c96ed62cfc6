"""In which pass of the iteration a slow rank holds the others up: named where it is one, and not where it is slow throughout."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.simulate.records import Observer
from ncclwatch.simulate.scenario import Scenario, load
from score.delays import Delay, DelayedExecutor
from score.diagnosers import rounds

SCENARIOS = Path(__file__).resolve().parent.parent.parent.parent / "scenarios"
RANK, FIRST, ITERATIONS = 5, 14, 36
BACKWARD_PARTS = 4
"""Pieces of compute of a backward pass in the scenario: two layers, attention and feed-forward."""


def last_accusation(scenario: Scenario, delays: list[Delay]) -> Verdict:
    executor = DelayedExecutor(scenario, delays)
    for iteration in range(ITERATIONS):
        executor.run_iteration(iteration)
    end = executor.timeline.end - 0.1
    records = Observer(executor.timeline, [float(t) for t in np.arange(0.7, end, 1.0)]).until(end)
    live = LiveDiagnosis()
    done: defaultdict[str, int] = defaultdict(int)
    last: Verdict | None = None
    for look in rounds(records):
        latest = max(sample.time_ns for sample in look)
        for host, events in records.calls.items():
            upto = int(np.searchsorted(events["time_ns"], latest, "right"))
            live.add_calls(events[done[host] : upto])
            done[host] = upto
        verdict = live.update(look)
        last = verdict if verdict.verdict_class.accuses else last
    assert last is not None, "nobody was accused"
    return last


def test_a_rank_that_is_slow_in_one_pass_is_named_with_it() -> None:
    scenario = replace(load(SCENARIOS / "s1-slow-gpu.toml"), faults=())
    delays = [Delay(i, RANK, "backward", 2 * BACKWARD_PARTS + 1, 0.9) for i in range(FIRST, ITERATIONS)]
    verdict = last_accusation(scenario, delays)
    assert verdict.verdict_class is VerdictClass.SLOW_COMPUTATION and [c.rank for c in verdict.culprits] == [RANK]
    assert verdict.stage.startswith("compute in backward of micro-batch 2, pipeline stage 0, TP rank 1"), verdict.stage


def test_a_rank_that_is_slow_throughout_is_not_pinned_to_a_pass() -> None:
    scenario = replace(load(SCENARIOS / "s1-slow-gpu.toml"), faults=())
    parts = BACKWARD_PARTS * scenario.workload.micro_batches
    delays = [
        Delay(i, RANK, way, part, 0.06)
        for i in range(FIRST, ITERATIONS)
        for part in range(parts)
        for way in ("forward", "backward")
    ]
    verdict = last_accusation(scenario, delays)
    assert [c.rank for c in verdict.culprits] == [RANK]
    assert "micro-batch" not in verdict.stage and verdict.stage.startswith("compute"), verdict.stage
