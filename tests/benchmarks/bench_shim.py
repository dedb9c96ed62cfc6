"""What the counter shim costs: nanoseconds an event beside a plugin that does nothing, and AllReduce with and without it.

    python tests/benchmarks/bench_shim.py [--nccl VERSION] [--pairs N] [--seconds S]

The second part runs real NCCL on the CPU testbed, whose "GPU" is the same two cores: figures of a GPU are to be had with
tests/gpu. Runs stand in pairs, each with the shim beside one without it right before or after, their order drawn anew; what is
printed is the median of the pairs' ratios and their spread, so that the machine's other work falls out; and the CPU time an
AllReduce takes on one rank, which other work disturbs least.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from testbed.job import Job
from unit.shim_harness import ROOT, build_shim

HERE = Path(__file__).resolve().parent
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
"""Elements of 4 bytes: 4 KiB to 16 MiB."""


def compile_all(folder: Path) -> tuple[Path, Path]:
    """The caller and the empty plugin."""
    include = ["-I", str(ROOT / "kernel_counters")]
    caller, empty = folder / "shim_events", folder / "empty.so"
    subprocess.run(["gcc", "-O2", *include, HERE / "shim_events.c", "-o", caller, "-ldl"], check=True, timeout=60)
    subprocess.run(["gcc", "-O2", "-fPIC", "-shared", *include, HERE / "shim_empty.c", "-o", empty], check=True, timeout=60)
    return caller, empty


def events(caller: Path, plugin: Path, rounds: int = 400) -> dict[str, float]:
    """Nanoseconds a call by kind: of five runs the best, which the machine's other work disturbed least."""
    best: dict[str, float] = {}
    for _ in range(5):
        done = subprocess.run([caller, plugin, str(rounds)], check=True, capture_output=True, text=True, timeout=120)
        for name, value in (line.split() for line in done.stdout.splitlines()):
            best[name] = min(best.get(name, float("inf")), float(value))
    return best


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far, to the nanosecond."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1e9


def measure(version: str, count: int, seconds: float, plugin: Path | None) -> tuple[float, float]:
    """AllReduces a second of two ranks over sockets, after their start, and the CPU time of rank 0 for each in microseconds."""
    env: dict[str, str | None] = {"NCCL_PROFILER_PLUGIN": str(plugin)} if plugin else {}
    with Job(version, 2, "allreduce", "socket", count=count, env=env) as job:
        job.wait_progress(5)
        begun, before, spent = time.monotonic(), job.progress(0), cpu_seconds(job.pid(0))
        time.sleep(seconds)
        done, spent = job.progress(0) - before, cpu_seconds(job.pid(0)) - spent
        return done / (time.monotonic() - begun), 1e6 * spent / max(1, done)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nccl", default="2.27.5")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--events-only", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="elements")
    options = parser.parse_args()
    shim = build_shim()
    with tempfile.TemporaryDirectory() as folder:
        caller, empty = compile_all(Path(folder))
        ours, none = events(caller, shim), events(caller, empty)
        for name, value in ours.items():
            print(f"{name:<8} {value:7.1f} ns a call, {none[name]:5.1f} ns in an empty plugin")
        if options.events_only:
            return
        order = random.Random(1)
        for count in options.sizes:
            ratios: dict[str, list[float]] = {"shim": [], "empty plugin": []}
            cpu: dict[str, list[float]] = {"shim": [], "empty plugin": [], "none": []}
            rates: list[float] = []
            for _ in range(options.pairs):
                for name, plugin in (("shim", shim), ("empty plugin", empty)):
                    both = [None, plugin]
                    order.shuffle(both)
                    found = {one: measure(options.nccl, count, options.seconds, one) for one in both}
                    ratios[name].append(found[plugin][0] / found[None][0])
                    rates.append(found[None][0])
                    cpu[name].append(found[plugin][1])
                    cpu["none"].append(found[None][1])
            text = "; ".join(
                f"{name} {statistics.median(r) * 100 - 100:+.1f} % ({min(r) * 100 - 100:+.1f} to {max(r) * 100 - 100:+.1f})"
                for name, r in ratios.items()
            )
            print(f"AllReduce of {count * 4 >> 10} KiB: {statistics.median(rates):.0f} a second without; {text}")
            times = ", ".join(f"{name} {statistics.median(values):.1f}" for name, values in cpu.items())
            print(f"  CPU time of a rank, µs each (median): {times}", flush=True)


if __name__ == "__main__":
    main()
