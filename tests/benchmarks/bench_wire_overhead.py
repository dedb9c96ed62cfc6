"""What the wire plane costs a busy-polling thread: without us, attached but resting, in bursts within the budget, counting
exactly.

Runs the stand-in provider (tests/wire) natively, in pairs: each measurement stands between two of the same load without us.
Prints polls and posts a second, and the ratio to the neighbours; then the cost of one hit by site. Run as root: python
tests/benchmarks/bench_wire_overhead.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ncclwatch.wire.bursts import Bursts
from ncclwatch.wire.governor import DEFAULT_BUDGET, Governor, measure_costs
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.plane import WirePlane
from wire.standin import Load, build, load

RATES = (2_000, 60_000)
"""Posts a second: a socket-like trickle, and what a 400 Gb/s NIC does with chunks of 1 MiB and less."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    with WireKernel() as kernel, tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        costs = measure_costs(kernel)
        for kind, cost in costs.items():
            print(
                f"hit at an {kind} instruction: entry {cost.entry_ns:.0f} ns, entry and return {cost.entry_and_return_ns:.0f} ns"
            )
        for rate in RATES:
            for name, run in modes(kernel).items():
                ratios, reports = [], []
                for _ in range(options.pairs):
                    before = measure(program, rate, options.seconds, lambda job: lambda: "")
                    during = measure(program, rate, options.seconds, run)
                    after = measure(program, rate, options.seconds, lambda job: lambda: "")
                    bare = statistics.mean(x["polls"] / x["cpu_ns"] for x in (before, after))
                    ratios.append(during["polls"] / during["cpu_ns"] / bare)
                    reports.append(during["report"])
                lost = 1 - statistics.median(ratios)
                print(
                    f"{rate:>7} posts/s, {name:<28} polls lost {lost:8.3%}  (pairs: {', '.join(f'{1 - r:.3%}' for r in ratios)})"
                )
                if reports[-1]:
                    print(f"          {reports[-1]}")


def measure(program: Path, rate: int, seconds: float, prepare: Callable[[Load], Callable[[], str]]) -> dict[str, Any]:
    """One run of the load; ``prepare`` gets the process before it begins and returns what to call after it is done."""
    with load(program, posts=int(rate * seconds), rate=rate, busy=1, latency_ns=8000) as job:
        finish = prepare(job)
        job.begin()
        if isinstance(finish, Driver):
            finish.drive(seconds)
        result = job.result()
        result["report"] = finish()
        return result


class Driver:
    """Steps bursts while the load works."""

    def __init__(self, kernel: WireKernel, job: Load, budget: float) -> None:
        self.plane = WirePlane(kernel)
        self.plane.watch(job.pid, files=job.files)
        self.bursts = Bursts(self.plane, Governor(measure_costs(kernel), budget))

    def drive(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.bursts.step()
            time.sleep(0.005)
        if self.bursts.governor.attached:
            self.bursts.stop()

    def __call__(self) -> str:
        report = self.bursts.governor.report(time.clock_gettime_ns(time.CLOCK_MONOTONIC))
        self.plane.close()
        return report


def modes(kernel: WireKernel) -> dict[str, Callable[[Load], Callable[[], str]]]:
    """The ways to watch."""

    def resolved(job: Load) -> Callable[[], str]:
        plane = WirePlane(kernel)
        plane.watch(job.pid, files=job.files)

        def finish() -> str:
            plane.close()
            return ""

        return finish

    def exact(job: Load) -> Callable[[], str]:
        plane = WirePlane(kernel, exact=True, always=True)
        plane.watch(job.pid, files=job.files)

        def finish() -> str:
            plane.close()
            return ""

        return finish

    return {
        "resolved, not attached": resolved,
        f"bursts, budget {DEFAULT_BUDGET:.1%}": lambda job: Driver(kernel, job, DEFAULT_BUDGET),
        "bursts, budget 1.0%": lambda job: Driver(kernel, job, 0.01),
        "exact": exact,
    }


if __name__ == "__main__":
    main()
