"""How far apart the samples of one look are: with all processes fetched first and decoded then, and with one after the other.

    python tests/benchmarks/bench_skew.py [--ranks 8] [--looks 60] [--busy 0] [--nccl 2.27.5]

A job of real NCCL runs on two hosts (namespaces); looks take turns. ``--busy`` so many endless loops run beside. Printed are the
time from the first to the last process of a look, and how many samples are of what was fetched: one that needs a place nobody
asked for before is taken of the present.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.spinners import spinners
from ncclwatch.collect.node import NodeCollector
from ncclwatch.collect.watched import Watched
from ncclwatch.target.read_ahead import ReadAhead
from testbed.netns import Network


def main() -> None:
    """Print one line for each way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--looks", type=int, default=60)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--nccl", default="2.27.5")
    options = parser.parse_args()
    fetch, begin, anew = Watched.fetch, ReadAhead.begin, [0]

    def counted(reader: ReadAhead) -> None:
        anew[0] += 1
        begin(reader)

    setattr(ReadAhead, "begin", counted)  # noqa: B010 - a type checker minds the other way
    apart: dict[bool, list[float]] = {True: [], False: []}
    present = 0
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts=2))
        job = stack.enter_context(network.job(options.nccl, options.ranks, shape="allreduce", count=1 << 16))
        collector = NodeCollector(every=False, interval_s=0.3)
        stack.callback(collector.close)
        collector.start(job.pids, calls=False, network=False)
        stack.enter_context(spinners(options.busy))
        for number in range(2 * options.looks):
            together = number % 2 == 0
            setattr(Watched, "fetch", fetch if together else lambda _: None)  # noqa: B010
            before = anew[0]
            while not (batch := collector.step()).looked:
                pass
            present += together * (anew[0] - before)
            begun = [sample.wall_ns for sample in batch.samples if sample.run_state != "X"]
            apart[together].append((max(begun) - min(begun)) / 1e6)
    for together, name in ((False, "one after the other"), (True, "fetched first")):
        times = apart[together]
        print(f"{name}: first to last process {statistics.median(times):.1f} ms (median), {max(times):.0f} ms at most")
    print(f"fetched first, {present} of {options.looks * options.ranks} samples were of the present all the same")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
