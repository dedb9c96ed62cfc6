"""What the wire plane costs a busy-polling thread: without us, attached but resting, in bursts within the budget, counting
exactly.

Runs the stand-in provider (tests/wire) natively, in pairs: each measurement stands between two of the same load without us.
Prints the cost of one hit by site; polls a second of CPU time lost by each way of watching, with every pair; the governor's bill
beside the time that the lost polls would have taken, where probes are in place all the time; and the largest share of its time
that the polling thread had paid at any moment of a first minute, per budget. Run as root:

    python tests/benchmarks/bench_wire_overhead.py [--seconds S] [--pairs N] [--first-minute S]
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

from ncclwatch.probes.instructions import CostClass
from ncclwatch.wire.bursts import Bursts
from ncclwatch.wire.governor import DEFAULT_BUDGET, Governor
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.plane import WirePlane
from ncclwatch.wire.prices import measure_costs, price_of, tallies
from wire.standin import Load, build, load

RATES = (2_000, 60_000)
"""Posts a second: a socket-like trickle, and what a 400 Gb/s NIC does with chunks of 1 MiB and less."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--first-minute", type=float, default=30.0, help="seconds of the runs that look at every moment")
    options = parser.parse_args()
    with WireKernel() as kernel, tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        costs = measure_costs(kernel)
        for kind, cost in costs.items():
            print(
                f"hit at an {kind} instruction: entry {cost.entry_ns:.0f} ns, entry and return {cost.entry_and_return_ns:.0f} ns"
            )
        work = costs[CostClass.EMULATED]
        print(f"a request adds {work.request_ns:.0f} ns, a completion {work.completion_ns:.0f} ns")
        for rate in RATES:
            for name, run in modes(kernel).items():
                compare(program, name, rate, run, options.seconds, options.pairs)
        for budget in (DEFAULT_BUDGET, 0.01):
            first_minute(kernel, program, budget, options.first_minute)


def compare(program: Path, name: str, rate: int, run: Callable[[Load], Callable[[], str]], seconds: float, pairs: int) -> None:
    """One way of watching against the same load without us."""
    ratios, reports, bills = [], [], []
    for _ in range(pairs):
        before = measure(program, rate, seconds, lambda job: lambda: "")
        during = measure(program, rate, seconds, run)
        after = measure(program, rate, seconds, lambda job: lambda: "")
        bare = statistics.mean(x["polls"] / x["cpu_ns"] for x in (before, after))
        if "bill_ns" in during:
            bills.append(during["bill_ns"] / (during["cpu_ns"] - during["polls"] / bare))
        ratios.append(during["polls"] / during["cpu_ns"] / bare)
        reports.append(during)
    lost = 1 - statistics.median(ratios)
    print(f"{rate:>7} posts/s, {name:<28} polls lost {lost:8.3%}  (pairs: {', '.join(f'{1 - r:.3%}' for r in ratios)})")
    if reports[-1]["report"]:
        print(f"          {reports[-1]['report']}")
    if bills:
        print(
            f"          billed {statistics.median(bills):.2f} times what was lost (pairs: {', '.join(f'{x:.2f}' for x in bills)})"
        )


def first_minute(kernel: WireKernel, program: Path, budget: float, seconds: float) -> None:
    """The governor's account at every moment, from the first on, with a thread that polls without pause."""
    with load(program, posts=int(60_000 * seconds), rate=60_000, busy=1, latency_ns=8000) as job, WirePlane(kernel) as plane:
        plane.watch(job.pid, files=job.files)
        governor = Governor(measure_costs(kernel), budget)
        bursts = Bursts(plane, governor)
        job.begin()
        began, worst, first, seen = time.monotonic(), 0.0, None, 0
        while time.monotonic() - began < seconds:
            accounts = bursts.step()
            if accounts is not None:
                first = first or time.monotonic() - began
                seen += sum(account.samples for account in accounts)
                paid = governor.worst(time.clock_gettime_ns(time.CLOCK_MONOTONIC))
                worst = max(worst, paid.share(time.clock_gettime_ns(time.CLOCK_MONOTONIC)) if paid else 0.0)
            time.sleep(0.005)
        job.result()
    when = f"the first after {first:.1f} s" if first else "none"
    print(
        f"budget {budget:.2%}: {governor.bursts} bursts in {seconds:.0f} s ({when}), {governor.cut_short} cut short, "
        f"{seen} completions seen; largest share of the thread's time at any moment {worst:.4%}"
    )


def measure(program: Path, rate: int, seconds: float, prepare: Callable[[Load], Callable[[], str]]) -> dict[str, Any]:
    """One run of the load; ``prepare`` gets the process before it begins and returns what to call after it is done."""
    with load(program, posts=int(rate * seconds), rate=rate, busy=1, latency_ns=8000) as job:
        finish = prepare(job)
        job.begin()
        if isinstance(finish, Driver):
            finish.drive(seconds)
        result = job.result()
        if isinstance(finish, Always):
            result["bill_ns"] = finish.bill_ns()
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

    def __call__(self) -> str:
        report = self.bursts.governor.report(time.clock_gettime_ns(time.CLOCK_MONOTONIC))
        self.plane.close()
        return report


class Always:
    """Probes in place all the time, and the governor's bill for them."""

    def __init__(self, kernel: WireKernel, job: Load, *, exact: bool) -> None:
        self._plane = WirePlane(kernel, exact=exact, always=True)
        self._pid = job.pid
        self._costs = measure_costs(kernel)
        self._plane.watch(job.pid, files=job.files)

    def bill_ns(self) -> float:
        price = price_of(self._costs, self._plane.processes[self._pid].sites.values())
        return tallies(self._plane.kernel, {self._pid: price})[self._pid, self._pid].cost_ns

    def __call__(self) -> str:
        self._plane.close()
        return ""


def modes(kernel: WireKernel) -> dict[str, Callable[[Load], Callable[[], str]]]:
    """The ways to watch."""

    def resolved(job: Load) -> Callable[[], str]:
        plane = WirePlane(kernel)
        plane.watch(job.pid, files=job.files)

        def finish() -> str:
            plane.close()
            return ""

        return finish

    return {
        "resolved, not attached": resolved,
        f"bursts, budget {DEFAULT_BUDGET:.1%}": lambda job: Driver(kernel, job, DEFAULT_BUDGET),
        "bursts, budget 1.0%": lambda job: Driver(kernel, job, 0.01),
        "always, as in a burst": lambda job: Always(kernel, job, exact=False),
        "exact": lambda job: Always(kernel, job, exact=True),
    }


if __name__ == "__main__":
    main()
