"""How long 64 rank logs of 40 MB in all take: read into records, and judged; beside reading their bytes and counting their
lines.

``PYTHONPATH=src:tests python tests/benchmarks/bench_ingest_rank_logs.py [--ranks 64] [--mb 40]``. The goal is 2 s for reading
(the machine and its load make seconds differ, so the ratio to a bare pass over the same bytes is given, too).
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from ncclwatch.ingest.rank_log import RankLogs
from unit.ingest.made_rank_logs import judged, tensor_job, write

LINE_BYTES = 109


def main() -> None:
    """Print one line a measurement: seconds of CPU and of time, and times a bare pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--mb", type=float, default=40.0)
    parser.add_argument("--judge", action="store_true", help="also judge what was read")
    options = parser.parse_args()
    calls = 48
    iterations = max(2, int(options.mb * 1e6 / LINE_BYTES / options.ranks / (calls + 1)))
    with TemporaryDirectory() as folder:
        files = write(Path(folder), tensor_job(options.ranks, iterations, calls=calls))
        total = sum(file.stat().st_size for file in files)
        began, cpu = time.perf_counter(), time.process_time()
        lines = sum(file.read_bytes().count(b"\n") for file in files)
        bare = time.process_time() - cpu
        print(f"{len(files)} logs, {total / 1e6:.1f} MB, {lines} lines")
        print(f"a bare pass over their bytes: {bare:.3f} s CPU, {time.perf_counter() - began:.3f} s")
        began, cpu = time.perf_counter(), time.process_time()
        job = RankLogs().read(files)[0]
        took = time.process_time() - cpu
        print(
            f"read into records:            {took:.3f} s CPU, {time.perf_counter() - began:.3f} s ({took / bare:.0f} times that)"
        )
        if options.judge:
            began, cpu = time.perf_counter(), time.process_time()
            looks = sum(1 for _ in judged(job))
            print(f"judged, {looks} looks:           {time.process_time() - cpu:.3f} s CPU, {time.perf_counter() - began:.3f} s")
        print(f"memory at most: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
