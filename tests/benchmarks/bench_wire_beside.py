"""What the wire plane costs samples and the job, in pairs: with bursts within the default budget, and with the plane off.

Real NCCL runs AllReduces over its InfiniBand transport, on stand-ins for adapters (tests/testbed/adapters.py); the collector is
``attach``'s, in another process than the plane's. Prints how late samples are, what an iteration takes beside either (the median
of the pairs' ratios, lowest to highest), and the governor's bill. Run as root:

    python tests/benchmarks/bench_wire_beside.py [--seconds S] [--pairs N] [--ranks N]
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pairs import spread
from ncclwatch.collect.node import NodeCollector
from ncclwatch.wire.governor import DEFAULT_BUDGET, Mode
from testbed.adapters import AdapterNetwork, stand_there
from testbed.job import Job


@dataclass(slots=True)
class Span:
    """Some seconds of a collector: how late each round of samples began, what iterations took (seconds), and what was billed."""

    late: list[float] = field(default_factory=list)
    iteration_s: float = 0.0
    bill: float = 0.0
    bursts: int = 0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=14.0, help="of each run")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    spans: dict[Mode, list[Span]] = {Mode.BURSTS: [], Mode.STATE: []}
    stand_there()
    with (
        AdapterNetwork(hosts=options.ranks) as network,
        network.job("2.27.5", options.ranks, extra=("--pause-us", "5000", "--time")) as job,
    ):
        for pair in range(options.pairs):
            for mode in (Mode.BURSTS, Mode.STATE) if pair % 2 else (Mode.STATE, Mode.BURSTS):
                spans[mode].append(watched(job, mode, options.seconds))
    for mode, name in ((Mode.BURSTS, "with bursts"), (Mode.STATE, "without")):
        ms = sorted(1000 * late for span in spans[mode] for late in span.late)
        tail = f"90 % within {ms[int(0.9 * len(ms))]:.1f} ms, all within {ms[-1]:.1f} ms"
        print(f"{name}: {len(ms)} samples, late by {statistics.median(ms):.1f} ms in the median, {tail}")
    ratios = [a.iteration_s / b.iteration_s for a, b in zip(spans[Mode.BURSTS], spans[Mode.STATE], strict=True)]
    print("an iteration with bursts / without: {} ({}), pairs: {}".format(*spread(ratios), len(ratios)))
    worst = max(spans[Mode.BURSTS], key=lambda span: span.bill)
    print(
        f"billed to the thread hit most: {worst.bill:.3%} at most, in {worst.bursts} bursts; the budget is {DEFAULT_BUDGET:.1%}"
    )


def watched(job: Job, mode: Mode, seconds: float) -> Span:
    """A collector for some seconds."""
    collector = NodeCollector(every=False, wire=(mode, DEFAULT_BUDGET))
    span = Span()
    try:
        collector.start(job.pids, calls=False)
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            due = collector._next_look
            batch = collector.step()
            if batch.looked:
                span.late.append(min(sample.time_ns for sample in batch.samples) / 1e9 - due)
            if batch.overhead is not None and batch.overhead.wire_share is not None:
                span.bill, span.bursts = batch.overhead.wire_share, batch.overhead.wire_bursts
        end = time.monotonic()
    finally:
        collector.close()
    lines = re.findall(r"iteration \d+ took ([\d.e-]+) at ([\d.]+)", job.log(0))
    span.iteration_s = statistics.median(float(took) for took, at in lines if begin < float(at) < end)
    return span


if __name__ == "__main__":
    main()
