"""What one look of an agent costs, by part, and what an agent holds: CPU time and memory, so that other work matters little.

    python tests/benchmarks/bench_look.py [--looks 10] [--ranks 8]

A job of real NCCL is started and every rank stopped in the middle of its operations: it takes no CPU, and every look sees the
same. Looks are a second apart, as an agent's are, so that caches are as cold as they are then. CPU time of this thread a look,
over all ranks; parts that lie in another are indented.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ncclwatch.collect.flows import FlowCollector
from ncclwatch.collect.node import NodeCollector
from ncclwatch.collect.work import WorkWatch
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.nic.sockets import SocketTable
from ncclwatch.target.sampler import Sampler
from ncclwatch.target.session import TargetProcess
from testbed.job import Job
from testbed.sidecar import daemon, free_port

PARTS: tuple[tuple[str, type[Any], str], ...] = (
    ("fetching memory", TargetProcess, "fetch"),
    ("samples", TargetProcess, "sample"),
    ("  what /proc says", TargetProcess, "_facts"),
    ("  memory", Sampler, "sample"),
    ("flows", FlowCollector, "observe"),
    ("  sockets", FlowCollector, "_look_at_sockets"),
    ("    asking the kernel", SocketTable, "by_descriptor"),
    ("windows of work", WorkWatch, "take"),
    ("encoding", BatchWriter, "encode"),
)


def timed(spent: defaultdict[str, float], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, its CPU time counted."""

    def call(*arguments: Any, **named: Any) -> Any:
        begun = time.thread_time()
        try:
            return method(*arguments, **named)
        finally:
            spent[name] += time.thread_time() - begun

    return call


def looks(pids: list[int], count: int) -> None:
    """Print the parts of a look."""
    spent: defaultdict[str, float] = defaultdict(float)
    for name, owner, method in PARTS:
        setattr(owner, method, timed(spent, name, getattr(owner, method)))
    collector, writer, begun = NodeCollector(every=False), BatchWriter(), 0.0
    collector.start(pids, calls=False)
    try:
        for number in range(count + 3):
            if number == 3:
                spent.clear()
                begun = time.process_time()
            time.sleep(1.0)
            collector.look_now()
            writer.encode(collector.step())
        whole = time.process_time() - begun
    finally:
        collector.close()
    print(f"a look at {len(pids)} ranks: {whole / count * 1e3:.1f} ms of CPU time")
    for name, _, _ in PARTS:
        print(f"  {name:24} {spent[name] / count * 1e3:6.1f} ms")


def holds(pids: list[int]) -> None:
    """Print what an agent takes to start, and its memory."""
    with daemon("agent", "--engine", f"tcp://127.0.0.1:{free_port()}", "--pid", ",".join(map(str, pids))) as agent:
        agent.wait_line("watching")
        fields = Path(f"/proc/{agent.child.pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        time.sleep(5.0)
        rollup = Path(f"/proc/{agent.child.pid}/smaps_rollup").read_text()
        sizes = {name: int(kib) / 1024 for name, kib in re.findall(r"^(Rss|Pss|Anonymous):\s+(\d+) kB", rollup, re.MULTILINE)}
    print(f"an agent: {cpu_s:.2f} s of CPU time to start; " + ", ".join(f"{k} {v:.0f} MiB" for k, v in sizes.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--looks", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    extra = ("--pp", "2", "--micro-batches", "4", "--layers", "2", "--forward-us", "2000", "--gradients", "32768")
    with Job(ranks=args.ranks, shape="training", extra=extra) as job:
        pids = list(job.pids)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            holds(pids)
            looks(pids, args.looks)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    main()
