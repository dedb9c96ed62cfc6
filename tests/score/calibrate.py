"""The simulation beside the real testbed: ``python -m score.calibrate [--ranks 8 16]`` with ``tests`` on the path, as root or
not.

What the model needs of this machine (what a piece of compute costs beyond its length, what a step of the network costs, how
much iterations scatter) is measured in short runs of other sizes; then one job is run for real and simulated, and the two are
shown side by side: order of operations of every rank (must be equal), median and 95th percentile of the iteration time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ncclwatch.simulate.layout import groups, stage_of
from ncclwatch.simulate.program import Collective, PointToPoint, iteration_program
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import Expectation, Layout, Network, Scenario, ScoreClass, Workload
from ncclwatch.simulate.testbed import as_testbed_runs, plan
from testbed.job import Job

MEDIAN_LIMIT, P95_LIMIT = 0.25, 0.50
START_S = 240
"""Longest time until a job has made its communicators, on a machine that others load."""
WARM_UP = 3
"""First iterations that are left out: connections are made, buffers touched."""

Line = tuple[str, str, int, int]
"""One operation as the job's trace has it: role, operation, elements, peer (−1 for none)."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Iteration times of a real run, seconds, slowest rank of each iteration; and each rank's operations of one iteration."""

    durations: NDArray[np.float64]
    operations: list[list[Line]]


@dataclass(frozen=True, slots=True)
class Parameters:
    """What was measured of the machine. ``compute_ms`` is added to every piece of compute."""

    compute_ms: float
    latency_us: float
    rate: float
    scatter: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row of the table."""

    ranks: int
    same_order: bool
    operations: int
    real_median_ms: float
    simulated_median_ms: float
    real_p95_ms: float
    simulated_p95_ms: float
    parameters: Parameters

    @property
    def median_error(self) -> float:
        """Relative error of the simulated median."""
        return self.simulated_median_ms / self.real_median_ms - 1

    @property
    def p95_error(self) -> float:
        """Relative error of the simulated 95th percentile."""
        return self.simulated_p95_ms / self.real_p95_ms - 1

    @property
    def good(self) -> bool:
        """Whether all three limits hold."""
        return self.same_order and abs(self.median_error) <= MEDIAN_LIMIT and abs(self.p95_error) <= P95_LIMIT


def scenario(layout: Layout, *, iterations: int, name: str = "calibration", **workload: float) -> Scenario:
    """A clean job of the testbed's habits with small messages."""
    defaults: dict[str, float] = {
        "forward_ms": 10.0, "optimizer_ms": 5.0, "loader_ms": 1.0, "jitter": 0.0, "layers": 1, "micro_batches": 4,
        "tp_bytes": 1 << 16, "pp_bytes": 1 << 16, "dp_bytes": 1 << 18,
    }  # fmt: skip
    work = Workload(iterations=iterations, **(defaults | workload))  # type: ignore[arg-type]
    network = Network(intra_node="net", net="socket", channels=1)
    clean = Expectation(ScoreClass.CLEAN)
    return as_testbed_runs(Scenario(name, "calibration", 1, clean, layout, work, network))


def measure(wanted: Scenario) -> Measured:
    """Run a scenario on the testbed. Raises ``testbed.job.JobError`` when it does not run."""
    made = plan(wanted)
    extra = [*made.options, "--time", "--trace"]
    job = Job(
        made.nccl,
        made.ranks,
        "training",
        hosts=made.hosts,
        count=made.count,
        iterations=made.iterations,
        hold=True,
        extra=extra,
        wait_for="nothing",
    )
    with job:
        for rank in range(made.ranks):
            job.wait_line(rank, "holding", timeout=START_S + 5 * made.iterations)
        took = [[float(t.split()[3]) for t in job.lines(rank) if t.startswith("iteration")] for rank in range(made.ranks)]
        folder = job.log_path(0).parent
        operations = [_trace(folder / f"trace.{rank}", made.iterations - 1) for rank in range(made.ranks)]
    return Measured(np.array(took).max(axis=0)[WARM_UP:], operations)


def _trace(path: Path, iteration: int) -> list[Line]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(_role(group), what, int(count), int(peer)) for i, group, what, count, peer in lines if int(i) == iteration]


def _role(group: str) -> str:
    return "gather" if group.endswith("-gather") else group.split("-", maxsplit=1)[0]


def expected_operations(wanted: Scenario, rank: int) -> list[Line]:
    """What the model says a rank enters in an iteration, in the words of the job's trace."""
    lines: list[Line] = []
    for action in iteration_program(wanted, stage_of(wanted.layout, rank), wanted.workload.iterations - 1):
        if isinstance(action, Collective):
            n = groups(wanted.layout, action.role).shape[1]
            share = 1 if action.function == "AllReduce" else n
            lines.append((action.role, action.function, action.nbytes // 4 // share, -1))
        elif isinstance(action, PointToPoint):
            transfers = action.exchange.transfers
            lines += [("pp", "Send" if t.send else "Recv", action.nbytes // 4, t.peer) for t in transfers]
    return lines


def simulated_durations(wanted: Scenario, parameters: Parameters) -> NDArray[np.float64]:
    """Iteration times of the simulation with the machine's parameters, seconds, without the first ones."""
    work = wanted.workload
    extra = parameters.compute_ms
    changed = replace(
        work,
        forward_ms=work.forward_ms + 2 * work.layers * extra,
        backward_ms=work.backward_ms + 2 * work.layers * extra,
        optimizer_ms=work.optimizer_ms + extra,
        jitter=parameters.scatter,
    )
    network = replace(wanted.network, nic_latency_us=parameters.latency_us, nic_rate=parameters.rate)
    return simulate(replace(wanted, workload=changed, network=network)).durations()[WARM_UP:]


def _solve(model: Callable[[float], float], goal: float, low: float, high: float) -> float:
    """Where a rising function reaches ``goal``, on a logarithmic scale; an end of the range when it does not."""
    for _ in range(30):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if model(middle) < goal else (low, middle)
    return float(np.sqrt(low * high))


def fit(layout: Layout, say: Callable[[str], None]) -> Parameters:
    """Measure the machine in three short runs: one rank alone, small messages, large messages."""
    alone = scenario(Layout(), iterations=12, name="alone")
    pieces = alone.workload.micro_batches * 4 * alone.workload.layers + 1
    plain = Parameters(0.0, 1.0, 100.0, 0.0)
    spent = float(np.median(measure(alone).durations) - np.median(simulated_durations(alone, plain)))
    compute_ms = max(0.0, spent / pieces * 1e3)
    say(f"one rank alone: {compute_ms:.3f} ms more for each of {pieces} pieces of compute")
    small = scenario(layout, iterations=14, name="small", micro_batches=2, forward_ms=6.0)
    real = measure(small).durations
    goal = float(np.median(real))
    scatter = float(np.std(real) / np.mean(real))

    def with_latency(value: float) -> float:
        return float(np.median(simulated_durations(small, Parameters(compute_ms, value, 100.0, 0.0))))

    latency = _solve(with_latency, goal, 1.0, 1e5)
    say(f"small messages: iteration {goal * 1e3:.1f} ms, so {latency:.0f} us a step of the network; scatter {scatter:.1%}")
    large = scenario(layout, iterations=10, name="large", micro_batches=2, forward_ms=6.0, dp_bytes=32 << 20)
    goal = float(np.median(measure(large).durations))

    def with_slowness(value: float) -> float:
        return float(np.median(simulated_durations(large, Parameters(compute_ms, latency, 1 / value, 0.0))))

    rate = 1 / _solve(with_slowness, goal, 1e-3, 1e3)
    say(f"large messages: iteration {goal * 1e3:.1f} ms, so {rate:.3f} GB/s a rank")
    return Parameters(compute_ms, latency, rate, scatter)


def compare(ranks: int, say: Callable[[str], None]) -> Comparison:
    """Fit at this number of ranks, then run another job for real and simulated."""
    layout = Layout(tp=2, pp=2, dp=ranks // 4, ranks_per_node=1)
    parameters = fit(layout, say)
    wanted = scenario(layout, iterations=24, micro_batches=6, forward_ms=12.0, dp_bytes=4 << 20)
    real, model = measure(wanted), simulated_durations(wanted, parameters)
    expected = [expected_operations(wanted, rank) for rank in range(ranks)]
    for rank, (mine, his) in enumerate(zip(expected, real.operations, strict=True)):
        if mine != his:
            at = next((i for i, (a, b) in enumerate(zip(mine, his, strict=False)) if a != b), min(len(mine), len(his)))
            say(f"rank {rank} differs at operation {at}: simulated {mine[at : at + 2]}, real {his[at : at + 2]}")
            break
    return Comparison(
        ranks=ranks,
        same_order=expected == real.operations,
        operations=sum(len(e) for e in expected),
        real_median_ms=float(np.median(real.durations)) * 1e3,
        simulated_median_ms=float(np.median(model)) * 1e3,
        real_p95_ms=float(np.percentile(real.durations, 95)) * 1e3,
        simulated_p95_ms=float(np.percentile(model, 95)) * 1e3,
        parameters=parameters,
    )


def table(rows: list[Comparison]) -> str:
    """Real and simulated side by side, as Markdown."""
    head = "| ranks | order of operations | median real | median simulated | error | p95 real | p95 simulated | error | limits |"
    lines = [head, "|" + " --- |" * 9]
    for row in rows:
        order = f"{'equal' if row.same_order else 'DIFFERENT'} ({row.operations})"
        median = f"{row.real_median_ms:.1f} ms | {row.simulated_median_ms:.1f} ms (simulated) | {row.median_error:+.0%}"
        p95 = f"{row.real_p95_ms:.1f} ms | {row.simulated_p95_ms:.1f} ms (simulated) | {row.p95_error:+.0%}"
        lines.append(f"| {row.ranks} | {order} | {median} | {p95} | {'held' if row.good else 'MISSED'} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when all limits hold, 1 when one is missed."""
    parser = argparse.ArgumentParser(prog="score.calibrate", description="Compare the simulation with the real testbed.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = [compare(ranks, lambda text: print("  " + text, file=sys.stderr)) for ranks in options.ranks]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", "utf-8")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
