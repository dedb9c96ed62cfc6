"""Attach and detach again and again while a real NCCL job works: is the job unharmed, and is nothing left?

    python tests/benchmarks/attach_detach.py [--times 1000] [--commands 30] [--ranks 4] [--minutes 15]

Root. Attaches in this process with the collector's own classes (a look, the probes of calls, a step, the end), then by the
command. Exits with 1 when a result of the job is wrong, a rank has ended, or a probe, BPF object, descriptor, thread or temporary
file stays.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.leftovers import Leftovers, breakpoints, own_library, own_temporary_folder
from ncclwatch.collect.node import NodeCollector
from testbed.job import Job, library

ELEMENTS = 1 << 14


@dataclass
class Outcome:
    """What came of it; ``wrong`` is empty when all is well."""

    attached: int = 0
    commands: int = 0
    took_s: list[float] = field(default_factory=list)
    iterations: int = 0
    records: int = 0
    objects: str = ""
    with_probes: int = 0
    wrong: list[str] = field(default_factory=list)


def once(pids: Sequence[int], left: Leftovers, outcome: Outcome) -> None:
    """Attach, see records of calls, detach."""
    begun = time.monotonic()
    collector = NodeCollector(every=False, interval_s=0.2)
    try:
        collector.start(pids)
        left.note()
        # While attached the breakpoints are there, or the check after detaching would prove nothing.
        outcome.with_probes += bool(breakpoints(pids[0]))
        batch = collector.step()
        outcome.records += 0 if batch.events is None else len(batch.events)
    finally:
        collector.close()
    outcome.took_s.append(time.monotonic() - begun)
    outcome.attached += 1


def by_command(pids: Sequence[int], left: Leftovers) -> str:
    """The same by the command; what went wrong."""
    words = ["attach", "--json", "--duration", "1", "--pid", ",".join(map(str, pids))]
    with subprocess.Popen([sys.executable, "-m", "ncclwatch", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        while child.poll() is None:
            left.note(child.pid)
            time.sleep(0.1)
        problem = child.stderr.read().decode("utf-8", "replace") if child.stderr is not None else ""
    return "" if child.returncode in (0, 10) else f"the command ended with {child.returncode}: {problem[-300:]}"


def check_job(job: Job) -> list[str]:
    """What is wrong with the job: every element of every result is compared by the ranks themselves."""
    wrong = [f"rank {rank} has ended" for rank in range(job.ranks) if not job.alive(rank)]
    return wrong + [f"rank {rank}: {line}" for rank in range(job.ranks) for line in job.lines(rank) if line.startswith("wrong")]


def run(times: int, commands: int, ranks: int = 4, minutes: float = 15.0, nccl: str = "2.27.5") -> Outcome:
    """Attach so often, or for so long."""
    outcome, until, extra = Outcome(), time.monotonic() + minutes * 60, ("--pause-us", "2000")
    with tempfile.TemporaryDirectory(prefix="library-") as libraries, own_temporary_folder():
        env = own_library(library(nccl), Path(libraries))
        job = Job(nccl, ranks, transport="mixed", count=ELEMENTS, verify=True, extra=extra, env=env)
        with job:
            _run(job, times, commands, until, outcome)
    return outcome


def _run(job: Job, times: int, commands: int, until: float, outcome: Outcome) -> None:
    once(job.pids, Leftovers(job.pids), Outcome())  # what is made once in a process (caches) is no leftover
    gc.collect()
    left, before = Leftovers(job.pids), job.progress(0)
    while outcome.attached < times and time.monotonic() < until and not outcome.wrong:
        once(job.pids, left, outcome)
        if outcome.attached % 50 == 0:
            outcome.wrong += check_job(job)
    gc.collect()
    outcome.wrong += left.found()
    while outcome.commands < commands and time.monotonic() < until + 60 and not outcome.wrong:
        problem = by_command(job.pids, left)
        outcome.wrong += [problem] if problem else []
        outcome.commands += 1
    outcome.wrong += left.found()
    job.wait_progress(3)
    outcome.wrong += check_job(job)
    outcome.iterations, outcome.objects = job.progress(0) - before, left.seen()


def main() -> int:
    """Print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--commands", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=15.0)
    options = parser.parse_args()
    outcome = run(options.times, options.commands, options.ranks, options.minutes)
    took = f"{statistics.median(outcome.took_s):.2f} s in the median, at most {max(outcome.took_s):.2f} s"
    print(f"attached and detached {outcome.attached} times in this process ({took}), {outcome.commands} times by the command")
    print(f"breakpoints seen {outcome.with_probes} times, {outcome.records} records of calls; BPF objects: {outcome.objects}")
    elements = outcome.iterations * options.ranks * ELEMENTS
    print(
        f"the job did {outcome.iterations} iterations meanwhile: {elements:,} elements compared, none wrong"
        if not outcome.wrong
        else ""
    )
    for line in outcome.wrong[:20]:
        print(f"LEFT OR HARMED: {line}")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
