"""Measure the inference of layouts: ``python -m score.topology`` with ``tests`` on the path prints the table.

Layouts and schedules are generated, jobs simulated, and only their records handed to the inference. Right means: every group of
every dimension with the exact ranks, and the sizes of the layout; unsure: nothing wrong was said, but not everything; else wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ncclwatch.engine.topology.namer import StageNamer
from ncclwatch.model.events import Function, Kind
from ncclwatch.model.topology import Phase, Role, Stage, Topology
from ncclwatch.simulate.layout import groups, stage_of
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.records import Observer, call_events
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import (
    Expectation,
    Layout,
    Lookalike,
    LookalikeKind,
    Observation,
    Scenario,
    Schedule,
    ScoreClass,
    Workload,
)
from ncclwatch.simulate.timeline import Timeline
from ncclwatch.simulate.wire import RecordSet

NAMES = {Role.TENSOR: "tp", Role.PIPELINE: "pp", Role.DATA: "dp", Role.CONTEXT: "cp", Role.EXPERT: "ep"}
BATCHES = 120
LARGEST_WORLD = 32


@dataclass(frozen=True, slots=True)
class Trial:
    """One generated job, with the imperfection of its records."""

    scenario: Scenario
    condition: str


@dataclass(slots=True)
class Outcome:
    """What was said of one trial. ``stages`` counts calls whose place was right, wrong, and not told."""

    trial: Trial
    said: str
    why: str
    seconds: float
    stages: list[int] = field(default_factory=lambda: [0, 0, 0])


def layouts() -> Iterator[tuple[Layout, Workload]]:
    """Layouts with their workloads: every combination of small sizes, with the schedules that fit."""
    number = 0
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            for dp in (1, 2, 4):
                for cp in (1, 2):
                    for ep in (1, 2, 4):
                        world = tp * pp * dp * cp
                        if not 2 <= world <= LARGEST_WORLD or dp * cp % ep or (ep > 1 and dp * cp == 1):
                            continue
                        for work in _workloads(pp, number):
                            number += 1
                            yield Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, ranks_per_node=4 if world % 4 == 0 else 2), work


def _workloads(pp: int, number: int) -> Iterator[Workload]:
    """One or two workloads; habits of frameworks alternate with the number of the layout, so that all combinations occur."""
    habits = {
        "sequence_parallel": number % 2 == 1,
        "grad_norm": number % 3 == 0,
        "gather_communicator": number % 5 == 0,
        "layers": 2 + number % 2,
        "iterations": 6,
    }
    base = Workload(micro_batches=4 + 4 * (number % 2), **habits)  # type: ignore[arg-type]
    if pp == 1:
        yield base
    elif number % 3 == 0:
        yield replace(base, schedule=Schedule.GPIPE)
    elif number % 3 == 1:
        yield base
    else:
        yield replace(base, schedule=Schedule.INTERLEAVED, virtual_stages=2)


def trials(step: int = 1) -> list[Trial]:
    """Every ``step``-th layout, clean, and in turns with lost records, a missing node, or other kinds of iterations between."""
    result = []
    for number, (layout, work) in enumerate(layouts()):
        if number % step:
            continue
        for condition, scenario in _conditions(layout, work, number):
            result.append(Trial(scenario, condition))
    return result


def _conditions(layout: Layout, work: Workload, number: int) -> Iterator[tuple[str, Scenario]]:
    base = Scenario(f"layout-{number}", "generated", number, Expectation(ScoreClass.CLEAN), layout=layout, workload=work)
    yield "clean", base
    which = number * 7 // 3 % 3
    if which == 0:
        yield "0.1 % of the records lost", replace(base, observe=Observation(loss=0.001))
    elif which == 1 and layout.world > layout.ranks_per_node:
        yield (
            "a node without agent",
            replace(base, observe=Observation(missing_nodes=(layout.world // layout.ranks_per_node - 1,))),
        )
    else:
        odd = (
            Lookalike(LookalikeKind.EVALUATION, iteration=2, count=1),
            Lookalike(LookalikeKind.BARRIER, iteration=4, duration_s=0.2),
        )
        yield "evaluation and checkpoint between", replace(base, lookalikes=odd)


def play(scenario: Scenario) -> tuple[Timeline, RecordSet]:
    """Simulate, and collect everything that was recorded."""
    timeline = simulate(scenario)
    return timeline, Observer(timeline, [timeline.end]).until(timeline.end + 60)


Told = tuple[Any, Stage | None]
"""A call, and where it was said to be while it was the latest of its process."""


def feed(records: RecordSet, batches: int = BATCHES) -> tuple[StageNamer, list[Told]]:
    """Hand the records over as a live session does, and ask after each batch where every process is."""
    namer = StageNamer()
    namer.note_samples([series[-1] for series in records.samples if series])
    events = np.concatenate([*records.calls.values()])
    events = events[np.argsort(events["time_ns"], kind="stable")]
    told: list[Told] = []
    for part in np.array_split(events, batches):
        namer.observe(part)
        calls = part[(part["kind"] == Kind.ENTER) & (part["function"] < Function.GROUP_START)][::-1]
        pids, latest = np.unique(calls["pid"], return_index=True)
        told += [(calls[i], namer.stage_of("", pid)) for pid, i in zip(pids.tolist(), latest.tolist(), strict=True)]
    return namer, told


def run(trial: Trial, *, calls: bool = True) -> Outcome:
    """One trial: infer, and compare with the truth. Without calls, what NCCL has counted in memory is all there is."""
    timeline, records = play(trial.scenario)
    began = time.perf_counter()
    namer, told = feed(records) if calls else (StageNamer(), [])
    namer.everything([series[-1] for series in records.samples if series])
    seconds = time.perf_counter() - began
    if namer.learned is None:
        return Outcome(trial, "unsure", "nothing was learned", seconds)
    said, why = compare(namer.learned.topology, trial.scenario.layout)
    outcome = Outcome(trial, said, why, seconds)
    _count_stages(told, timeline, outcome)
    return outcome


def compare(topology: Topology, layout: Layout) -> tuple[str, str]:
    """``right``, ``unsure`` or ``wrong``, and the first reason."""
    unsure = ""
    for role, name in NAMES.items():
        wanted = {tuple(sorted(g)) for g in groups(layout, name).tolist() if len(g) > 1}
        said = {tuple(sorted(g.ranks)) for g in topology.by_role.get(role, ())}
        if said - wanted:
            return "wrong", f"{role} groups {sorted(said - wanted)[:2]} are none"
        size = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "ep": layout.ep}[name]
        own = {"tp": topology.layout.tp, "pp": topology.layout.pp, "dp": topology.layout.dp, "cp": topology.layout.cp}.get(
            name, topology.layout.ep
        )
        if own is not None and own != size:
            return "wrong", f"{name} {own} instead of {size}"
        if wanted - said:
            unsure = unsure or f"{len(wanted - said)} {role} groups are not named"
        elif own is None:
            unsure = unsure or f"the size of {name} is not named"
    for rank, stage in enumerate(topology.stage.tolist()):
        if stage >= 0 and stage != stage_of(layout, rank):
            return "wrong", f"rank {rank} is said to be in stage {stage}"
    return ("unsure", unsure or "; ".join(topology.unsure)) if unsure else ("right", "")


def _count_stages(told: Sequence[Told], timeline: Timeline, outcome: Outcome) -> None:
    """Compare the place of every call that was given one with what the program did there."""
    labels: dict[tuple[int, ...], str] = {}
    for block, events in call_events(timeline, Cast(timeline.scenario)):
        mixed = len({t.forward for t in block.transfers}) > 1
        calls = zip(*(events[name].tolist() for name in ("pid", "time_ns", "comm")), strict=True)
        labels.update(dict.fromkeys(calls, "" if mixed else block.label))
    for event, stage in told:
        label = labels.get((int(event["pid"]), int(event["time_ns"]), int(event["comm"])))
        if label and stage is not None:
            outcome.stages[_agreement(stage.phase, stage.micro_batch, label)] += 1


def _agreement(phase: Phase, micro_batch: int, label: str) -> int:
    """0 right, 1 wrong, 2 not told."""
    if phase is Phase.EITHER:
        return 2
    true = Phase.FORWARD if "forward" in label else Phase.BACKWARD if "backward" in label else Phase.OPTIMIZER
    if phase is not true:
        return 1
    said = f"micro-batch {micro_batch}"
    return int(micro_batch >= 0 and "micro-batch" in label and said not in label.split(", "))


def table(outcomes: Sequence[Outcome]) -> str:
    """Counts by condition."""
    heads = f"{'layouts':>7} {'exact':>6} {'unsure':>6} {'wrong':>6}   {'places right':>12} {'wrong':>7} {'not told':>8}"
    lines = [f"{'records':36} {heads}"]
    conditions = list(dict.fromkeys(o.trial.condition for o in outcomes))
    for condition in [*conditions, "all"]:
        part = [o for o in outcomes if condition in (o.trial.condition, "all")]
        said = [sum(o.said == what for o in part) for what in ("right", "unsure", "wrong")]
        right, wrong, silent = (sum(o.stages[i] for o in part) for i in range(3))
        total = max(1, right + wrong + silent)
        lines.append(
            f"{condition:36} {len(part):7} {said[0]:6} {said[1]:6} {said[2]:6}   "
            f"{100 * right / total:10.1f} % {100 * wrong / total:5.2f} % {100 * silent / total:6.1f} %"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 when any layout was said wrong."""
    parser = argparse.ArgumentParser(prog="score.topology", description="Score the inference of layouts on generated jobs.")
    parser.add_argument("--step", type=int, default=1, help="only every so many layouts")
    parser.add_argument("--verbose", action="store_true", help="print what was not exact")
    parser.add_argument("--by-counts", action="store_true", help="without calls: from NCCL's counts in memory alone")
    options = parser.parse_args(arguments)
    outcomes = []
    for trial in trials(max(1, options.step)):
        outcome = run(trial, calls=not options.by_counts)
        outcomes.append(outcome)
        if options.verbose and (outcome.said != "right" or outcome.stages[1]):
            layout, work = trial.scenario.layout, trial.scenario.workload
            sizes = f"tp {layout.tp} pp {layout.pp} dp {layout.dp} ep {layout.ep} cp {layout.cp}, {work.schedule}"
            print(
                f"{outcome.said:7} {trial.scenario.name} {sizes}, {trial.condition}: {outcome.why} {outcome.stages}", flush=True
            )
    print(table(outcomes))
    return int(any(outcome.said == "wrong" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
