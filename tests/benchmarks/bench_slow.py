"""How long the analysis of one iteration takes, by number of ranks: everything, and pruned to the pipeline group that straggles
(MegaTrace Fig. 8, VenusTrace Fig. 9). `python tests/benchmarks/bench_slow.py [--markdown] [--most RANKS]`; records: SIMULATED.

One copy of a model (TP 8, PP 8) is simulated and laid out as many times as there are replicas, each with its own scatter; one
segment of one replica is delayed. What is timed is the engine's: splitting observed times into work and transfers with the
critical path and blame, and one replay (what it would take without a culprit, or how much of a delay is absorbed). The structure
is made once for a pattern and shown apart.

First what a slow judgement takes that needs no times of GPUs: one look at a ring that waits for one rank, and to add up
``LOOKS`` of them before and since and weigh all candidates.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_engine import LATE, hung_ring
from ncclwatch.engine.slow.attribute import find
from ncclwatch.engine.slow.critical_path import Structure, Weights
from ncclwatch.engine.slow.findings import Context
from ncclwatch.engine.slow.profile import add_up
from ncclwatch.engine.slow.snapshot import Activity, take_look
from ncclwatch.model.job import assemble
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.scenario import Expectation, Layout, Network, Observation, Scenario, ScoreClass, Workload
from score.delays import DelayedExecutor, Observed, Run, observe

LOOKS = 120
JUDGED = (64, 512, 4096)
RANKS = (64, 128, 256, 512, 1024, 2048, 4096, 16384, 65536, 100_032)
MODEL = 64
REPEATS = 3


def one_model() -> tuple[Observed, NDArray[np.bool_]]:
    """An iteration of two replicas, cut to the first; and which of its operations join replicas."""
    layout = Layout(tp=8, pp=8, dp=2, ranks_per_node=8)
    workload = Workload(iterations=2, micro_batches=8, layers=1, forward_ms=10.0, backward_ms=20.0)
    observation = Observation(clock_offset_ms=0.0, clock_drift_ppm=0.0)
    scenario = Scenario(
        "bench", "", 5, Expectation(ScoreClass.CLEAN), layout, workload, Network(intra_node="p2p"), observation
    )  # fmt: skip
    cast = Cast(scenario)
    run = Run(DelayedExecutor(scenario, []), cast)
    run.next(0)
    seen = observe(run.next(1), cast)
    kept = (seen.rank % 16) < 8
    new_row = np.cumsum(kept) - 1
    inside = kept[seen.needs].all(axis=1) if len(seen.needs) else np.zeros(0, np.bool_)
    joins = np.isin(seen.joint, np.intersect1d(seen.joint[kept & (seen.joint >= 0)], seen.joint[~kept])) & (seen.joint >= 0)
    cut = Observed(
        seen.rank[kept], seen.node[kept], seen.joint[kept], new_row[seen.needs[inside]], seen.begin[kept], seen.end[kept],
        seen.peers, seen.size,
    )  # fmt: skip
    return cut, joins[kept]


def laid_out(
    model: Observed, joins: NDArray[np.bool_], replicas: int
) -> tuple[Structure, Weights, NDArray[np.int64], NDArray[np.float64], float]:
    """Structure, weights of an iteration with one delay, replica of each operation, usual work, seconds to make the structure."""
    size = len(model.rank)
    replica = np.repeat(np.arange(replicas), size)
    dense = np.unique(model.rank, return_inverse=True)[1]
    rank = replica * (int(dense.max()) + 1) + np.tile(dense, replicas)
    joint = np.tile(model.joint, replicas)
    apart = (joint >= 0) & ~np.tile(joins, replicas)
    joint = np.where(apart, joint * (replicas + 1) + 1 + replica, np.where(joint >= 0, joint * (replicas + 1), -1))
    needs = (model.needs[None, :, :] + (np.arange(replicas) * size)[:, None, None]).reshape(-1, 2)
    began = time.perf_counter()
    structure = Structure(rank, joint, needs)
    made = time.perf_counter() - began
    one = Structure(model.rank, model.joint, model.needs)
    base = Weights(one, model.begin, model.end, float(model.begin.min()))
    rng = np.random.default_rng(3)
    work = np.tile(base.work, replicas) * np.maximum(0.5, 1 + 0.02 * rng.standard_normal(len(rank)))
    work[(replicas // 2) * size + size // 3] += 0.5
    transfer = np.tile(np.maximum(base.transfer, 0.0), replicas)
    begin, end = structure.replay(work, transfer)
    return structure, Weights(structure, begin, end, 0.0), replica, base.work, made


def quickest(work: object, repeats: int) -> float:
    """Least seconds of some repeats."""
    least = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()  # type: ignore[operator]
        least = min(least, time.perf_counter() - began)
    return least


def last_to_come(weights: Weights, replica: NDArray[np.int64], joining: NDArray[np.int64]) -> NDArray[np.int64]:
    """Replicas of the model that come last to what joins them (the gradients' first): only they can have delayed the rest."""
    arrival = np.full(int(replica.max()) + 1, -np.inf)
    np.maximum.at(arrival, replica[joining], weights.begin[joining])
    return np.flatnonzero(arrival >= arrival.max())


def measure(model: Observed, joins: NDArray[np.bool_], ranks: int) -> dict[str, float]:
    """Seconds for one number of ranks."""
    replicas = max(1, ranks // MODEL)
    structure, weights, replica, usual, made = laid_out(model, joins, replicas)
    size = len(model.rank)
    expected = np.stack([weights.transfer, np.tile(usual, replicas)])
    # What joins replicas first in each rank's program: after it they are together.
    firsts = np.flatnonzero(joins)[np.unique(model.rank[joins], return_index=True)[1]]
    joining = (firsts[None, :] + (np.arange(replicas) * size)[:, None]).ravel()
    found: list[int] = []

    def full() -> None:
        result = Weights(structure, weights.begin, weights.end, 0.0).analyse(expected)
        found.append(result.culprits[0].operation)

    one = Structure(model.rank, np.where(joins, -1, model.joint), model.needs)

    def pruned() -> None:
        for number in last_to_come(weights, replica, joining)[:4].tolist() if len(joining) else [0]:
            part = slice(number * size, (number + 1) * size)
            own = Weights(one, weights.begin[part], weights.end[part], 0.0)
            result = own.analyse(expected[:, part])
            found.append(number * size + result.culprits[0].operation)

    repeats = REPEATS if ranks <= 16384 else 1
    seconds = {
        "operations": float(len(structure.previous)),
        "structure": made,
        "full": quickest(full, repeats),
        "replay": quickest(lambda: weights.slack(0), repeats),
        "pruned": quickest(pruned, repeats),
    }
    wanted = (replicas // 2) * size + size // 3
    assert set(found) == {wanted}, f"blamed {set(found)} instead of {wanted}"
    return seconds


def judge(ranks: int) -> tuple[float, float]:
    """Seconds of one look, and of what follows from two times ``LOOKS``."""
    (job,) = assemble(hung_ring(ranks))
    look, processes = take_look(job), [member.info.key for member in job.members]
    looks = [replace(look, time=look.time + at) for at in range(2 * LOOKS)]
    none = np.zeros(ranks, np.int64)
    before = [replace(one, holds=(), activities=dict.fromkeys(processes, Activity.COMPUTES)) for one in looks[:LOOKS]]
    named: list[tuple[int, ...]] = []

    def weigh() -> None:
        past = add_up(before, processes)
        context = Context(none, np.arange(ranks) // 8, lost=0.3, before=past, alike=none)
        named.extend(finding.members for finding in find(add_up(looks[LOOKS:], processes), context))

    weigh()  # What is known of each look is put into columns once, when it is taken.
    seconds = quickest(lambda: take_look(job), REPEATS), quickest(weigh, REPEATS)
    assert set(named) == {(LATE,)}, f"named {set(named)}"
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time of one iteration's analysis by ranks (SIMULATED records).")
    parser.add_argument("--most", type=int, default=RANKS[-1])
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    print("A slow judgement (made-up records): ranks, one look (ms), all looks added up and weighed (ms)")
    for ranks in JUDGED:
        print(f"{ranks}  " + "  ".join(f"{1e3 * seconds:.1f}" for seconds in judge(ranks)), flush=True)
    model, joins = one_model()
    head = ("ranks", "operations", "structure, once (ms)", "path and blame (ms)", "replay (ms)", "pruned (ms)")
    print("Analysis of one iteration; records: SIMULATED")
    print("| " + " | ".join(head) + " |" if options.markdown else "  ".join(head))
    if options.markdown:
        print("|" + " --- |" * len(head))
    for ranks in (r for r in RANKS if r <= options.most):
        seconds = measure(model, joins, ranks)
        cells = [f"{ranks}", f"{seconds['operations']:.0f}"]
        cells += [f"{seconds[name] * 1e3:.1f}" for name in ("structure", "full", "replay", "pruned")]
        print("| " + " | ".join(cells) + " |" if options.markdown else "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
