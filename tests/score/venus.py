"""VenusTrace's experiment (5.1, 5.2, Fig. 13-14), SIMULATED: delays of 50 ms to 30 s at random places of a training job;
is the iteration found slow, and the rank and stage named? `python -m score.venus [--cases N] [--thresholds]`, with ``tests`` on
the path.

Truth is what the same run takes without the delay: a delay that costs the iteration nothing to speak of (less than VenusTrace's
gate) was absorbed by a bubble, and blaming it is a false positive. What is analysed is what a profiler of the GPU gives: begin
and end of each operation on each rank, on clocks that are wrong; stages are named by what was learned of the job's calls.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ncclwatch.engine.slow.critical_path import BETA, MEGATRACE_GATE, Anomaly, IterationAnalysis, PathResult
from ncclwatch.engine.topology.namer import StageNamer
from ncclwatch.model.topology import Learned, Phase
from ncclwatch.simulate.layout import groups
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.records import call_events
from ncclwatch.simulate.scenario import Expectation, Layout, Network, Scenario, ScoreClass, Workload
from ncclwatch.simulate.state_plane import StateReader
from score.delays import Delay, DelayedExecutor, Observed, Run, observe

SHORTEST_S, LONGEST_S = 0.05, 30.0
KINDS = ("forward", "backward", "transmission")
LEARNED = 6
"""Healthy iterations before the first delay."""
QUOTED = (("VenusTrace", 0.95), ("Holmes", 0.93), ("Minder", 0.89), ("MegaScale", 0.84))


@dataclass(slots=True)
class Outcome:
    """Counts over cases. A positive is a delay that slows the iteration; it is true if rank and stage are right."""

    true_positive: int = 0
    false_positive: int = 0
    false_negative: int = 0
    true_negative: int = 0
    stage_wrong: int = 0
    absorbed: int = 0
    clean_iterations: int = 0
    clean_alarms: int = 0
    whatif_errors: list[float] = field(default_factory=list)

    @property
    def precision(self) -> float:
        """Of what was said."""
        return self.true_positive / max(1, self.true_positive + self.false_positive)

    @property
    def recall(self) -> float:
        """Of what was wrong."""
        return self.true_positive / max(1, self.true_positive + self.false_negative)

    @property
    def f1(self) -> float:
        """Harmonic mean of both."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0


def scenario(seed: int, iterations: int) -> Scenario:
    """VenusTrace's job: TP 2, PP 4, DP 4; a forward pass of a stage takes 40 ms."""
    layout = Layout(tp=2, pp=4, dp=4, ranks_per_node=8)
    workload = Workload(iterations=iterations, micro_batches=8, layers=1, forward_ms=40.0, backward_ms=80.0, dp_bytes=32 << 20)
    return Scenario(
        name=f"venus-{seed}", title="", seed=seed, expect=Expectation(ScoreClass.CLEAN), layout=layout, workload=workload,
        network=Network(nic_rate=10.0, intra_node="p2p"),
    )  # fmt: skip


def draw(base: Scenario, rng: np.random.Generator, iterations: list[int]) -> list[Delay]:
    """One random delay for each of some iterations: place, rank and length."""
    layout, work = base.layout, base.workload
    result = []
    for iteration in iterations:
        kind = KINDS[int(rng.integers(3))]
        rank = int(rng.integers(layout.world))
        seconds = float(np.exp(rng.uniform(np.log(SHORTEST_S), np.log(LONGEST_S))))
        peer = -1
        occurrence = int(rng.integers(work.micro_batches * 2 * work.layers))
        if kind == "transmission":
            table = groups(layout, "pp")
            group = next(row for row in table.tolist() if rank in row)
            at = group.index(rank)
            choices = [s for s in (at - 1, at + 1) if 0 <= s < layout.pp]
            peer = group[choices[int(rng.integers(len(choices)))]]
            occurrence = int(rng.integers(work.micro_batches))
        result.append(Delay(iteration, rank, kind, occurrence, seconds, peer))
    return result


def learn_stages(base: Scenario) -> Learned | None:
    """What the topology learns from the calls of a few healthy iterations."""
    executor = DelayedExecutor(base, [])
    executor.run(range(6))
    cast = Cast(base)
    reader = StateReader(executor.timeline, cast)
    namer = StageNamer()
    namer.note_samples(reader.sample(base.network.init_s + 0.01))
    parts = [events for _, events in call_events(executor.timeline, cast)]
    events = np.concatenate(parts)
    for part in np.array_split(events[np.argsort(events["time_ns"], kind="stable")], 12):
        namer.observe(part)
    return namer.learned


def stages_of(learned: Learned | None, rank: int) -> list[tuple[Phase, int, bool]]:
    """For each operation of a rank's iteration its phase, micro-batch and whether it is a message, as the topology learned it."""
    if learned is None or rank not in learned.pattern_of:
        return []
    steps = learned.patterns[learned.pattern_of[rank]].steps
    calls = [list(part) for _, part in itertools.groupby(steps, key=lambda step: step.call)]
    return [(part[0].phase, part[0].micro_batch, part[0].towards != 0) for part in calls]


def matches(anomaly: Anomaly, delay: Delay, observed: Observed, stages: list[tuple[Phase, int, bool]]) -> tuple[bool, bool]:
    """(rank right, stage right) of what was blamed."""
    rank = int(observed.rank[anomaly.operation])
    position = anomaly.operation - int(np.searchsorted(observed.rank, rank))
    if delay.kind == "transmission":
        peers = observed.peers_of(anomaly.operation)
        return rank in (delay.rank, delay.peer) and bool(peers & {delay.rank, delay.peer}), not anomaly.work
    if position >= len(stages):
        return rank == delay.rank and anomaly.work, False
    # Work before a message belongs to the pass whose result is sent; before anything else to that operation's pass.
    phase = stages[position][0]
    if stages[position][2] and position > 0:
        phase = stages[position - 1][0]
    return rank == delay.rank, anomaly.work and str(phase) == delay.kind


def experiment(cases: int, *, gate: float = MEGATRACE_GATE, beta: float = BETA, seed: int = 1, per_run: int = 20) -> Outcome:
    """Run the experiment with ``cases`` delays; every other iteration is left healthy."""
    outcome = Outcome()
    stages: dict[int, list[tuple[Phase, int, bool]]] = {}
    learned = None
    for number in range(-(-cases // per_run)):
        count = min(per_run, cases - number * per_run)
        iterations = LEARNED + 2 * count
        base = scenario(seed * 1000 + number, iterations)
        if learned is None:
            learned = learn_stages(base)
            stages = {rank: stages_of(learned, rank) for rank in range(base.layout.world)}
        rng = np.random.default_rng([seed, number])
        delays = draw(base, rng, [LEARNED + 2 * i for i in range(count)])
        for delay, said, effect, duration in _runs(base, delays, gate, beta):
            _count(outcome, delay, said, (effect, duration, gate), stages)
    return outcome


Said = tuple[PathResult | None, Observed, IterationAnalysis]


def _runs(base: Scenario, delays: list[Delay], gate: float, beta: float) -> Iterator[tuple[Delay | None, Said, float, float]]:
    """Each iteration with what was said, its true effect in seconds, and its duration without the delay."""
    cast = Cast(base)
    with_delays, without = Run(DelayedExecutor(base, delays), cast), Run(DelayedExecutor(base, []), cast)
    analyser = IterationAnalysis(gate=gate, beta=beta)
    by_iteration = {delay.iteration: delay for delay in delays}
    for iteration in range(base.workload.iterations):
        observed = observe(with_delays.next(iteration), cast)
        without.next(iteration)
        effect = with_delays.duration() - without.duration()
        result = analyser.look(observed)
        if iteration >= LEARNED:
            yield by_iteration.get(iteration), (result, observed, analyser), effect, without.duration()


def _count(
    outcome: Outcome, delay: Delay | None, said: Said, truth: tuple[float, float, float],
    stages: dict[int, list[tuple[Phase, int, bool]]],
) -> None:  # fmt: skip
    result, observed, analyser = said
    effect, normal, _ = truth
    blamed = result.culprits if result is not None else []
    if delay is None:
        outcome.clean_iterations += 1
        outcome.clean_alarms += bool(blamed)
        outcome.false_positive += bool(blamed)
        outcome.true_negative += not blamed
        return
    positive = normal / (normal + effect) < MEGATRACE_GATE
    outcome.absorbed += not positive
    if not positive:
        outcome.false_positive += bool(blamed)
        outcome.true_negative += not blamed
        return
    if not blamed:
        outcome.false_negative += 1
        return
    judged = [matches(anomaly, delay, observed, stages.get(int(observed.rank[anomaly.operation]), [])) for anomaly in blamed]
    right = judged[0] == (True, True)
    outcome.stage_wrong += judged[0] == (True, False)
    outcome.true_positive += right
    outcome.false_negative += not right
    outcome.false_positive += not right
    if right and analyser.last is not None:
        outcome.whatif_errors.append(abs(analyser.last.without(blamed[:1]) - normal) / normal)


def clean(iterations: int, seed: int = 7) -> tuple[int, int]:
    """(iterations judged, alarms) of a healthy run."""
    base = scenario(seed, iterations)
    alarms = judged = 0
    for _, said, _, _ in _runs(base, [], MEGATRACE_GATE, BETA):
        judged += 1
        alarms += said[0] is not None and bool(said[0].culprits)
    return judged, alarms


def table(outcome: Outcome, cases: int) -> str:
    """The result as Markdown, theirs quoted beside it."""
    o = outcome
    errors = o.whatif_errors or [0.0]
    middle, high = float(np.median(errors)), float(np.quantile(errors, 0.95))
    lines = [
        f"### Delays of 50 ms to 30 s at random places, {cases} cases; records: SIMULATED",
        "",
        "| method | precision | recall | F1 |",
        "| --- | --- | --- | --- |",
        f"| ncclwatch (simulated, rank and stage) | {o.precision:.3f} | {o.recall:.3f} | {o.f1:.3f} |",
        *(f"| {name} (quoted from VenusTrace, 5.2: real GPUs) | - | - | {f1:.2f} |" for name, f1 in QUOTED),
        "",
        f"True positives {o.true_positive}, false positives {o.false_positive}, false negatives {o.false_negative} "
        f"(right rank in a wrong stage: {o.stage_wrong}); {o.absorbed} delays were absorbed by bubbles or too short to "
        f"count; {o.clean_alarms} alarms in {o.clean_iterations} healthy iterations between them.",
        "",
        "What if: the duration computed without the culprit differs from that of the same run without the delay by "
        f"{middle:.2%} in the median, by {high:.2%} at the 95th percentile.",
    ]
    return "\n".join(lines) + "\n"


def thresholds(cases: int) -> str:
    """Sensitivity (their Fig. 14): precision and recall by the threshold of a segment and by the gate of an iteration."""
    lines = ["### Thresholds (SIMULATED)", "", "| gate | beta | precision | recall | F1 |", "| --- | --- | --- | --- | --- |"]
    for gate, beta in [(0.9, b) for b in (0.05, 0.25, 0.5, 1.0, 2.0, 4.0)] + [(g, 0.5) for g in (0.7, 0.8, 0.95, 0.99)]:
        outcome = experiment(cases, gate=gate, beta=beta, seed=2)
        lines.append(f"| {gate} | {beta} | {outcome.precision:.3f} | {outcome.recall:.3f} | {outcome.f1:.3f} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; exit status 0 when F1 is at least 0.99 and healthy iterations are silent."""
    parser = argparse.ArgumentParser(prog="score.venus", description=(__doc__ or "").split("`", maxsplit=1)[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--clean", type=int, default=0, help="healthy iterations to judge besides")
    parser.add_argument("--thresholds", type=int, default=0, metavar="CASES", help="cases for each pair of thresholds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    outcome = experiment(options.cases)
    print(table(outcome, options.cases))
    alarms = 0
    if options.clean:
        judged, alarms = clean(options.clean)
        print(f"healthy run (SIMULATED): {alarms} alarms in {judged} iterations\n")
    if options.thresholds:
        print(thresholds(options.thresholds))
    if options.json:
        figures = {"precision": outcome.precision, "recall": outcome.recall, "f1": outcome.f1, "cases": options.cases}
        options.json.write_text(json.dumps(figures) + "\n", "utf-8")
    return 0 if outcome.f1 >= 0.99 and not alarms and not outcome.clean_alarms else 1


if __name__ == "__main__":
    sys.exit(main())
