"""What an agent costs its node, and what it sends: eight ranks of real NCCL that train, an agent, an engine.

    python tests/benchmarks/bench_agent.py [--seconds 20] [--ranks 8]

Prints the agent's share of a core and its memory, bytes sent a second and an iteration (Mycroft, table 5: 46.8 KB an iteration
and machine, of about 3 s), and the engine's share. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from testbed.job import Job
from testbed.sidecar import Daemon, daemon, free_port

MYCROFT_BYTES = 46_800


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Its resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def iterations(job: Job) -> int:
    """How many rank 0 has done."""
    return sum(line.startswith("iteration ") for line in job.lines(0))


def received(engine: Daemon) -> int:
    """Bytes the engine took, from its own count."""
    found = engine.objects("traffic")
    return int(found[-1]["nbytes"]) if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    address = f"tcp://127.0.0.1:{free_port()}"
    extra = ("--pp", "2", "--micro-batches", "4", "--layers", "2", "--forward-us", "2000", "--gradients", "32768", "--time")
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon("engine", "--bind", address, "--json", "--traffic-every", "1") as engine,
        Job(ranks=args.ranks, shape="training", extra=extra) as job,
    ):
        pids = ",".join(map(str, job.pids))
        with daemon("agent", "--engine", address, "--pid", pids, "--spool", folder) as agent:
            engine.wait(lambda: engine.objects("summary"), "the job")
            time.sleep(3.0)

            def figures() -> tuple[float, float, int, int]:
                return cpu_s(agent.child.pid), cpu_s(engine.child.pid), iterations(job), received(engine)

            before, begun = figures(), time.monotonic()
            memory = []
            while time.monotonic() - begun < args.seconds:
                time.sleep(1.0)
                memory.append(rss_mib(agent.child.pid))
            after, wall = figures(), time.monotonic() - begun
            agent_s, engine_s, done, nbytes = (b - a for a, b in zip(before, after, strict=True))
            share = f"agent {agent_s / wall:.2%} of a core, {statistics.median(memory):.0f} MiB"
            print(f"{args.ranks} ranks, {done / wall:.1f} iterations/s: {share}")
            print(
                f"sent {nbytes / wall:.0f} B/s, {nbytes / max(done, 1):.0f} B an iteration and node (Mycroft: {MYCROFT_BYTES} B, "
                f"an iteration is about 3 s there, in which this would be {nbytes / wall * 3:.0f} B)"
            )
            print(f"engine: {engine_s / wall:.2%} of a core for this node")


if __name__ == "__main__":
    main()
