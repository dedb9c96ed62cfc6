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
TRAINING = ("--pp", "2", "--micro-batches", "4", "--layers", "2", "--forward-us", "2000", "--gradients", "32768", "--time")
"""Options of the job of shape ``training``."""


def cpu_s(pid: int) -> float:
    """User and system time of a process so far; its ticks are 10 ms, so it wants some seconds to mean something."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def by_thread(pid: int) -> dict[str, float]:
    """The same by its threads, named by their numbers in the order in which they were made and by what they call themselves."""
    found = {}
    for number, task in enumerate(sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))):
        head, _, tail = (task / "stat").read_text().rpartition(")")
        fields = tail.split()
        found[f"{number} {head.partition('(')[2]}"] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def kinds_of_memory(pid: int) -> str:
    """What of its resident memory is its own, and what is of files and shared (the ring of records)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if name.startswith("Rss")}
    return ", ".join(f"{name} {kib / 1024:.1f} MiB" for name, kib in found.items())


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
    parser.add_argument("--after", type=float, default=3.0, help="seconds before it is measured; after 90 looks are far apart")
    args = parser.parse_args()
    address = f"tcp://127.0.0.1:{free_port()}"
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon("engine", "--bind", address, "--json", "--traffic-every", "1") as engine,
        Job(ranks=args.ranks, shape="training", extra=TRAINING) as job,
    ):
        pids = ",".join(map(str, job.pids))
        with daemon("agent", "--engine", address, "--pid", pids, "--spool", folder) as agent:
            engine.wait(lambda: engine.objects("summary"), "the job")
            time.sleep(args.after)

            def figures() -> tuple[float, float, int, int]:
                return cpu_s(agent.child.pid), cpu_s(engine.child.pid), iterations(job), received(engine)

            threads = by_thread(agent.child.pid)
            before, begun = figures(), time.monotonic()
            memory = []
            while time.monotonic() - begun < args.seconds:
                time.sleep(1.0)
                memory.append(rss_mib(agent.child.pid))
            after, wall = figures(), time.monotonic() - begun
            spent = {name: cpu - threads.get(name, 0.0) for name, cpu in by_thread(agent.child.pid).items()}
            agent_s, engine_s, done, nbytes = (b - a for a, b in zip(before, after, strict=True))
            share = f"agent {agent_s / wall:.2%} of a core, {statistics.median(memory):.0f} MiB"
            print(f"{args.ranks} ranks, {done / wall:.1f} iterations/s: {share}")
            print(kinds_of_memory(agent.child.pid))
            print("of it by thread: " + ", ".join(f"{name} {cpu / wall:.2%}" for name, cpu in spent.items()))
            print(
                f"sent {nbytes / wall:.0f} B/s, {nbytes / max(done, 1):.0f} B an iteration and node (Mycroft: {MYCROFT_BYTES} B, "
                f"an iteration is about 3 s there, in which this would be {nbytes / wall * 3:.0f} B)"
            )
            print(f"engine: {engine_s / wall:.2%} of a core for this node")


if __name__ == "__main__":
    main()
