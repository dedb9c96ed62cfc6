"""Measurements on a GPU machine: AllReduce with and without the shim, with its sampler at full rate, and watched by ``attach``
without it; paired by size.

    python -m gpu.measure [--out FOLDER] [--pairs N] [--seconds S]     (PYTHONPATH=tests; `make gpu` runs it after the tests)

Writes results.json and results.md into FOLDER; the latter is what docs/gpu-results.md is to hold.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpu.gpujob import STANDIN, VERSION, GpuJob, missing
from ncclwatch.target.devconn import counter_places
from ncclwatch.target.frame import FrameFile, WantedWord
from ncclwatch.target.session import TargetProcess
from testbed.watcher import live, pids

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
"""Elements of 4 bytes: 4 KiB to 64 MiB."""

WAYS = ("shim", "shim, sampler at 1 kHz", "attach")


def per_second(count: int, seconds: float, way: str | None) -> float:
    """AllReduces a second of two ranks that share the GPU."""
    burst = 20 if count <= 1 << 20 else 4
    arguments = ["--count", str(count), "--burst", str(burst)]
    with GpuJob(2, arguments, shim=way in WAYS[:2]) as job, ExitStack() as stack:
        job.wait_iterations(3)
        if way == WAYS[2]:
            watcher = stack.enter_context(live(*pids(job)))
            watcher.wait_for("rank", count=4)
        if way == WAYS[1]:
            for pid in job.pids:
                target = stack.enter_context(TargetProcess.open(pid))
                target.sample()
                frame = FrameFile.find(pid)
                if frame is None:
                    raise SystemExit("the shim was not loaded")
                stack.enter_context(frame)
                places = counter_places(target.decoder, target.communicator_states, frozenset(_transports()))[:32]
                frame.ask([WantedWord(p.address, p.held_at) for p in places], 0.001, 59)
        begun, before = time.monotonic(), job.iterations(0)
        time.sleep(seconds)
        return burst * (job.iterations(0) - before) / (time.monotonic() - begun)


def _transports() -> set[Any]:
    from ncclwatch.model.state import Transport

    return {Transport.NET, Transport.P2P}


def machine() -> str:
    """GPU and driver in words."""
    if STANDIN:
        return "no GPU: the CPU testbed"
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "an NVIDIA GPU"


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    options = parser.parse_args()
    if reason := missing():
        print(f"gpu: {reason}", file=sys.stderr)
        return 1
    order = random.Random(1)
    rows: list[dict[str, Any]] = []
    for count in options.sizes:
        bare: list[float] = []
        ratios: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.pairs):
            for way in WAYS:
                both = [None, way]
                order.shuffle(both)
                rate = {one: per_second(count, options.seconds, one) for one in both}
                bare.append(rate[None])
                ratios[way].append(rate[way] / rate[None])
        rows.append({"bytes": 4 * count, "bare_per_s": statistics.median(bare), "ratios": ratios})
        print(json.dumps(rows[-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(), "nccl": VERSION, "python": platform.python_version(), "rows": rows}
    (options.out / "results.json").write_text(json.dumps(about, indent=1))
    lines = [f"{machine()}, NCCL {VERSION}, two ranks on one GPU, {options.pairs} pairs of {options.seconds:g} s.", ""]
    lines += ["| AllReduce | a second without | " + " | ".join(WAYS) + " |", "| --- | --- |" + " --- |" * len(WAYS)]
    for row in rows:
        cells = [
            f"{statistics.median(r) * 100 - 100:+.2f} % ({min(r) * 100 - 100:+.2f} to {max(r) * 100 - 100:+.2f})"
            for r in row["ratios"].values()
        ]
        lines.append(f"| {row['bytes'] >> 10} KiB | {row['bare_per_s']:.0f} | " + " | ".join(cells) + " |")
    (options.out / "results.md").write_text("\n".join(lines) + "\n")
    print((options.out / "results.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
