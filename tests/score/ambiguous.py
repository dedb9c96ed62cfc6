"""Drawn jobs in which the cause is not plain: two faults of one rank at once, a fault too small to matter, and healthy ones.

``python -m score.ambiguous --seed 3101 --number 40 --play FOLDER`` plays them with real NCCL (root; judges nothing), ``--judge
FOLDER`` judges the recordings. What is right was written down before anything was judged: ``score.causes.right_answer``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ncclwatch.simulate.scenario import Expectation, Fault, FaultKind, Scenario, ScoreClass
from score import drawn
from score.causes import right_answer, told
from score.kept_causes import Judged, last_accusing, table
from score.matrix import choose, run_all, tell_progress
from score.real import Attach

LARGEST = 8
"""Ranks of a job at most: two cores play it."""
RELEASES = ("2.27.5", "2.29.2")
HEALTHY_S = 30.0
LITTLE = 0.01
"""Of its drawn strength a fault has so much that is too small to matter: it then costs 1 to 4 % of an iteration's computing."""
ONE_RANK = ("slow-gpu", "slow-loader", "gc-pause", "cpu-limit", "slow-copy", "proxy-sleeps")
"""Faults of one rank, by the names that ``score.drawn`` has for them."""
WEAKENED = tuple(name for name in ONE_RANK if name != "cpu-limit")
"""The testbed has one CPU limit, and that is tight."""


class Doubt(StrEnum):
    """Why the cause is not plain."""

    TWO = "two-causes"
    SMALL = "too-small"
    HEALTHY = "healthy"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A job with what makes it doubtful."""

    doubt: Doubt
    scenario: Scenario


def draw(seed: int, number: int) -> Drawn:
    """The job of that number; the same for the same seed."""
    chance = random.Random(f"ambiguous/{seed}/{number}")
    doubt = chance.choice(list(Doubt))
    made = {Doubt.TWO: _two, Doubt.SMALL: _small, Doubt.HEALTHY: _healthy}[doubt](chance)
    return Drawn(doubt, replace(made, name=f"ambiguous-{seed}-{number}-{doubt}", title=f"drawn: {doubt}"))


def _healthy(chance: random.Random) -> Scenario:
    while not _playable(scenario := drawn.draw_healthy(chance.randrange(1 << 30), 0, HEALTHY_S)):
        pass
    return scenario


def _two(chance: random.Random) -> Scenario:
    """Two faults of one rank that begin at one moment: each by itself would explain what is seen."""
    scenario, fault = _with_one(chance, ONE_RANK)
    while True:
        _, other = _with_one(chance, ONE_RANK, scenario)
        if other.kind is not fault.kind:
            break
    second = replace(other, rank=fault.rank, start_s=fault.start_s)
    return replace(scenario, faults=(fault, second))


def _small(chance: random.Random) -> Scenario:
    scenario, fault = _with_one(chance, WEAKENED)
    above = 1.0 if fault.kind is FaultKind.SLOW_GPU else 0.0
    weak = replace(fault, strength=above + LITTLE * (fault.strength - above))
    return replace(scenario, faults=(weak,), expect=Expectation(ScoreClass.CLEAN))


def _with_one(chance: random.Random, names: Sequence[str], like: Scenario | None = None) -> tuple[Scenario, Fault]:
    """A drawn slow job that two cores can play, with one fault of these kinds; ``like``: of a job that computes as long."""
    wanted = chance.choice(names)
    while True:
        scenario = drawn.draw(chance.randrange(1 << 30), 0, slow=True)
        fits = like is None or _computing(scenario) == _computing(like)
        if scenario.name.endswith(f"-{wanted}") and scenario.layout.world <= LARGEST and _playable(scenario) and fits:
            return scenario, scenario.faults[0]


def _computing(scenario: Scenario) -> tuple[float, int]:
    """What the strength of a fault was drawn for: the longest pass, and passes in an iteration."""
    work = scenario.workload
    return work.forward_ms, work.micro_batches * work.virtual_stages


def _playable(scenario: Scenario) -> bool:
    seen = scenario.observe
    return scenario.network.algorithm == "Ring" and scenario.network.intra_node != "p2p" and not (seen.loss or seen.late_fraction)


def judge(path: Path) -> Judged:
    """What the last verdict that accuses says of a recording of one of these jobs."""
    name = json.loads(path.with_suffix(".json").read_text("utf-8"))["scenario"]
    _, seed, number, _ = name.split("-", 3)
    one = draw(int(seed), int(number))
    last = last_accusing(path)
    kinds = [fault.kind for fault in one.scenario.faults]
    right = right_answer(kinds, last, must_accuse=one.doubt is Doubt.TWO)
    what = str(one.doubt) + (f": {' and '.join(sorted(kinds))}" if kinds else "")
    return Judged(name, what, str(last.verdict_class) if last else "", told(last) if last else "", right)


def play(seed: int, numbers: Sequence[int], folder: Path, jobs: int) -> None:
    """Record those of the drawn jobs that the testbed can play and that are not in the folder yet."""
    folder.mkdir(parents=True, exist_ok=True)
    runs, _ = choose(
        [draw(seed, number).scenario for number in numbers], versions=RELEASES, transports=(), attaches=(Attach.LIVE,), tries=1,
        seed=seed, after_s=16.0, save_to=str(folder.resolve()), in_turn=True, judged=False,
    )  # fmt: skip
    run_all([run for run in runs if not run.recorded], jobs=jobs, with_baselines=False, tell=tell_progress)


def main() -> None:
    """Play, or judge and print the table with a line for each that was not right."""
    parser = argparse.ArgumentParser(prog="score.ambiguous", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--play", type=Path)
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if options.play:
        play(options.seed, range(options.number), options.play, options.jobs)
    if options.judge:
        found = [judge(path) for path in sorted(options.judge.glob("*.ncclwatch"))]
        print("\n".join(table(found, markdown=options.markdown)))
        print("\n".join(f"{one.name} ({one.fault}): {one.said or 'silent'} {one.row}" for one in found if not one.right))


if __name__ == "__main__":
    main()
