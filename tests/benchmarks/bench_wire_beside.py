"""How late samples are while the wire plane's process runs bursts beside them, and while it does not, in pairs.

Samples are of a job of real NCCL over sockets (the testbed); bursts are on the stand-in provider's polling thread (tests/wire),
by the plane's own service in a process of its own, within the default budget. Prints how late the samples are, with and
without, and the governor's bill. Run as root:

    python tests/benchmarks/bench_wire_beside.py [--seconds S] [--pairs N]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ncclwatch.collect.node import NodeCollector
from ncclwatch.wire.child import Service
from ncclwatch.wire.governor import DEFAULT_BUDGET, Mode
from ncclwatch.wire.session import VerbsUser, WireSession
from testbed.job import Job
from wire.standin import build, load


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=14.0, help="of each run")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--beside", nargs=2, metavar=("PROGRAM", "BURSTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.beside:
        beside(Path(options.beside[0]), bursts=options.beside[1] == "with")
        return
    late: dict[str, list[float]] = {"with": [], "without": []}
    bill = ""
    with tempfile.TemporaryDirectory() as folder, Job("2.27.5", 4, extra=("--pause-us", "5000")) as job:
        program = build(Path(folder))
        for pair in range(options.pairs):
            for kind in ("without", "with") if pair % 2 else ("with", "without"):
                command = [sys.executable, __file__, "--beside", str(program), kind]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                assert process.stdout is not None
                process.stdout.readline()
                late[kind] += lateness(job, options.seconds)
                said, _ = process.communicate()
                bill = said.strip() or bill
    for kind, found in late.items():
        ms = sorted(1000 * seconds for seconds in found)
        tail = f"90 % within {ms[int(0.9 * len(ms))]:.1f} ms, all within {ms[-1]:.1f} ms"
        print(f"{kind} bursts: {len(ms)} samples, late by {statistics.median(ms):.1f} ms in the median, {tail}")
    print(bill)


def lateness(job: Job, seconds: float) -> list[float]:
    """How much later than planned each round of samples began."""
    collector = NodeCollector(every=False)
    found = []
    try:
        collector.start(job.pids, calls=False)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            due = collector._next_look
            batch = collector.step()
            if batch.looked:
                found.append(min(sample.time_ns for sample in batch.samples) / 1e9 - due)
    finally:
        collector.close()
    return found


def beside(program: Path, *, bursts: bool) -> None:
    """A polling thread, and bursts on it, until the input ends; then the bill."""
    import threading

    over = threading.Event()

    def until_the_input_ends() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=until_the_input_ends, daemon=True).start()
    with load(program, posts=100_000_000, rate=2_000) as job:
        service = Service(WireSession(Mode.BURSTS, DEFAULT_BUDGET))
        service.session.start([VerbsUser(job.pid, None, 0, files=tuple(job.files))])
        job.begin()
        print("ready", flush=True)
        while not over.wait(0.25):
            if bursts:
                service.step()
        print(service.session.report() if bursts else "", flush=True)
        service.session.close()


if __name__ == "__main__":
    main()
