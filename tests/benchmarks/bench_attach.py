"""What attaching takes and costs: time to the first record, memory and CPU of the attached agent, time of a dump.

    python tests/benchmarks/bench_attach.py [RANKS]

Runs a real job on the CPU testbed. Prints figures; nothing is asserted. Goals: under 100 MB with --json, 0.3 % of a core a rank
while the job idles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_agent import cpu_s
from testbed.job import Job
from testbed.watcher import pids

NCCLWATCH = [sys.executable, "-m", "ncclwatch"]
IDLE_S = 30.0


def command_time(what: str, *arguments: str, repeat: int = 5) -> None:
    """Wall and CPU time of a whole command, interpreter included."""
    walls, cpus = [], []
    for _ in range(repeat):
        before, begun = os.times(), time.perf_counter()
        subprocess.run([*NCCLWATCH, *arguments], capture_output=True, check=True)
        walls.append(time.perf_counter() - begun)
        after = os.times()
        cpus.append(after.children_user + after.children_system - before.children_user - before.children_system)
    print(f"{what}: wall {min(walls):.2f} s, CPU {min(cpus):.2f} s (best of {repeat})")


def attach(job: Job, *arguments: str) -> tuple[subprocess.Popen[str], float]:
    begun = time.perf_counter()
    command = [*NCCLWATCH, "attach", "--json", *arguments, *pids(job)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True), begun


def first_records(job: Job, repeat: int = 3) -> None:
    """From the start of the command to its first lines."""
    for number in range(repeat):
        child, begun = attach(job, "--calls", "--interval", "0.5")
        seen: dict[str, float] = {}
        for line in child.stdout or ():
            seen.setdefault(json.loads(line)["type"], time.perf_counter() - begun)
            if {"attached", "call", "rank"} <= seen.keys():
                break
        child.terminate()
        child.communicate()
        print(
            f"attach, run {number + 1}: " + ", ".join(f"first '{kind}' after {seconds:.2f} s" for kind, seconds in seen.items())
        )


def resident_cost(job: Job, what: str) -> None:
    """Memory and CPU of the agent over ``IDLE_S``, its start left out."""
    child, _ = attach(job)
    for line in child.stdout or ():
        if json.loads(line)["type"] == "rank":
            break
    before, begun = cpu_s(child.pid), time.perf_counter()
    deadline = begun + IDLE_S
    for _line in child.stdout or ():
        if time.perf_counter() > deadline:
            break
    share = (cpu_s(child.pid) - before) / (time.perf_counter() - begun)
    status = Path(f"/proc/{child.pid}/status").read_text("ascii")
    memory = {line.split()[0]: int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(("VmRSS", "VmHWM"))}
    child.terminate()
    child.communicate()
    print(
        f"agent on {what}: {share:.2%} of a core, {share / job.ranks:.3%} a rank; "
        f"{memory['VmRSS:']:.0f} MiB resident, {memory['VmHWM:']:.0f} MiB at most"
    )


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    command_time("ncclwatch --help", "--help")
    with Job(ranks=ranks, count=1 << 14, extra=("--pause-us", "20000")) as job:
        listed = ",".join(map(str, job.pids))
        command_time(f"ncclwatch dump of {ranks} ranks", "dump", "--json", "--pid", listed)
        first_records(job)
        resident_cost(job, f"{ranks} ranks that compute")
    with Job(ranks=ranks, shape="idle", wait_for="ready") as job:
        resident_cost(job, f"{ranks} idle ranks")


if __name__ == "__main__":
    main()
