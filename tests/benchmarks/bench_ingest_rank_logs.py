"""How long 64 rank logs of 40 MB in all take: read into records, and judged; beside reading their bytes and counting their
lines.

``PYTHONPATH=src:tests python tests/benchmarks/bench_ingest_rank_logs.py [--ranks 64] [--mb 40] [--folder LOGS]``. The goal is 2 s
for both together (the machine and its load make seconds differ, so the ratio to a bare pass over the same bytes is given, too).
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ncclwatch.cli.foreign import judge_ingested
from ncclwatch.gc_pause import collector_at_rest
from ncclwatch.ingest.rank_log import RankLogs
from unit.ingest.made_rank_logs import tensor_job, write

LINE_BYTES = 109


def main() -> None:
    """Print one line a measurement: seconds of CPU and of time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--mb", type=float, default=40.0)
    parser.add_argument("--folder", type=Path, help="logs that are there, instead of made-up ones")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        files = sorted(options.folder.glob("*.log")) if options.folder else made_up(Path(folder), options.ranks, options.mb)
        total = sum(file.stat().st_size for file in files)
        with timed("a bare pass over their bytes"):
            lines = sum(file.read_bytes().count(b"\n") for file in files)
        print(f"{len(files)} logs, {total / 1e6:.1f} MB, {lines} lines")
        with collector_at_rest():
            with timed("read into records"):
                [job] = RankLogs().read(files)
            with timed(f"judged, {len(job.batches)} batches"):
                verdicts = judge_ingested(job)
    print(f"said: {verdicts[0].verdict_class}, {verdicts[0].summary}")
    print(f"memory at most: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def made_up(folder: Path, ranks: int, megabytes: float, calls: int = 48) -> list[Path]:
    """Logs of a job of tensor groups, of so many bytes in all."""
    iterations = max(2, int(megabytes * 1e6 / LINE_BYTES / ranks / (calls + 1)))
    return write(folder, tensor_job(ranks, iterations, calls=calls))


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long the block took."""
    began, cpu = time.perf_counter(), time.process_time()
    yield
    print(f"{what}: {time.process_time() - cpu:.3f} s CPU, {time.perf_counter() - began:.3f} s")


if __name__ == "__main__":
    main()
