"""What a history takes: bytes a day, CPU of who judges and of the writer, and how long questions take.

    python tests/benchmarks/bench_history.py [--ranks 8 4096] [--hours 24 1] [--keep FOLDER]

A simulated job: every rank with a window of rates and work requests a minute whose figures scatter by a few percent (latencies
log-normally), an iteration a second, its NICs every ten minutes, a flow in trouble now and then, a verdict every two hours. The
writer is the real one; time passes as fast as it takes it. Bytes are those of all files after they were merged as a day that is
over, scaled to 24 hours where ``--hours`` is less.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from ncclwatch.collect.windows import RankWindow
from ncclwatch.history import compact, questions, rows
from ncclwatch.history.files import folders
from ncclwatch.history.query import History
from ncclwatch.history.rows import Paced, Run
from ncclwatch.history.tables import Row
from ncclwatch.history.writer import QUEUE, HistoryWriter
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProcessInfo, VersionSource
from ncclwatch.model.work import Counting, WorkWindow
from ncclwatch.text import size
from unit.histories import incident

EACH = 8
OF = Run("llama-70b", "0123456789")
NS = 10**9


def infos(ranks: int) -> list[ProcessInfo]:
    return [
        ProcessInfo(ProcessKey("boot", 1000 + rank, rank, "id"), f"node{rank // EACH:04d}", "python3", ("python3", "t.py"), "",
                    (2, 27, 5), VersionSource.DEBUG_INFO, rank, rank % EACH, ranks)
        for rank in range(ranks)
    ]  # fmt: skip


def windows(processes: list[ProcessInfo], dice: np.random.Generator, now: int) -> list[RankWindow]:
    """A minute's windows: everything that is measured scatters."""
    count = len(processes)
    operations, nbytes, steps = dice.normal(25.0, 0.5, count), dice.normal(4e9, 1e8, count), dice.normal(9e4, 2e3, count)
    p50, posted = dice.lognormal(4.6, 0.2, count) * 1e3, dice.normal(6e8, 2e7, count)
    flight = dice.integers(0, 32, count)
    made = []
    for at, process in enumerate(processes):
        work = WorkWindow(
            Counting.BURSTS, now - NS, now, 0.002, posted_bytes=int(posted[at] * 0.002), received_bytes=int(posted[at] * 0.002),
            in_flight=int(flight[at]), latency_p50_ns=float(p50[at]), latency_p99_ns=float(p50[at] * 3.1),
            throughput=float(posted[at] * 8),
        )  # fmt: skip
        made.append(
            RankWindow(now, process, process.rank, at % EACH, "S", None, None, 0, 0, float(operations[at]), "calls",
                       float(nbytes[at]), float(steps[at]), 0.01, work=work)
        )  # fmt: skip
    return made


def minute(processes: list[ProcessInfo], dice: np.random.Generator, now: int, number: int) -> Iterator[Row]:
    """Rows of a minute besides those of the rates."""
    ranks = len(processes)
    times = dice.lognormal(0.0, 0.02, 60)
    yield from rows.iteration_rows(OF, [
        Paced(now + second * NS, float(times[second]), number * 60 + second, 0, "node0000", ranks, float(times[second]),
              float(times[second] * 1.04), int(dice.integers(ranks)))
        for second in range(60)
    ])  # fmt: skip
    if number % 10 == 0:
        for node in range(max(1, ranks // EACH)):
            for nic in range(EACH):
                yield Row("nics", now, OF.job, OF.run, {
                    "node": f"node{node:04d}", "nic": f"mlx5_{nic}:1", "kind": "rdma", "event": "seen", "up": True, "state": "up",
                    "rate_gbps": 400.0, "receive_per_s": float(f"{dice.normal(5e9, 1e8):.5g}"),
                    "send_per_s": float(f"{dice.normal(5e9, 1e8):.5g}"), "congestion": int(dice.integers(1000)), "ranks": [nic],
                })  # fmt: skip
    if dice.random() < 0.2:
        rank = int(dice.integers(ranks))
        yield Row("flows", now, OF.job, OF.run, {
            "rank": rank, "node": f"node{rank // EACH:04d}", "pid": 1000 + rank, "peer": (rank + 1) % ranks, "channel": 1,
            "direction": "send", "device": "mlx5_0", "kind": "rdma", "state": "slow", "reason": "222.9 MB/s where 305.0 is usual",
            "bandwidth": 222.9e6, "expected": 305e6, "delay_us": 577.0,
        })  # fmt: skip
    if number % 120 == 60:
        yield from incident(OF, f"node{int(dice.integers(max(1, ranks // EACH))):04d}", now, stood_s=90, number=f"v{number}")


def write(root: Path, ranks: int, hours: float) -> tuple[float, float]:
    """Write a day's part; seconds of CPU: handing over, and everything."""
    dice, processes = np.random.default_rng(1), infos(ranks)
    run_of = {process.key: OF for process in processes}
    begin = int((datetime.now(UTC).replace(hour=0, minute=0, second=0) - timedelta(days=2)).timestamp()) * NS
    writer = HistoryWriter(root, command="bench")
    handed, made = 0.0, 0.0
    before = time.process_time()
    for number in range(int(hours * 60)):
        now = begin + number * 60 * NS
        making = time.thread_time()
        seen, rest = windows(processes, dice, now), list(minute(processes, dice, now, number))
        made += time.thread_time() - making
        putting = time.thread_time()
        writer.put(now, lambda seen=seen, now=now: rows.rate_rows(now, seen, run_of))  # type: ignore[misc]
        writer.put(now, lambda rest=rest: rest)  # type: ignore[misc]
        handed += time.thread_time() - putting
        while writer._queue.qsize() > QUEUE // 4 or writer.rows < (number - 20) * ranks:
            time.sleep(0.002)
    writer.close(600)
    assert writer.dropped == 0, writer.problem
    spent = time.process_time() - before - made
    compact.look_after(root, wait=True)
    return handed, spent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4096])
    parser.add_argument("--hours", type=float, nargs="+", default=[24.0, 1.0])
    parser.add_argument("--keep", type=Path)
    chosen = parser.parse_args()
    for ranks, hours in zip(chosen.ranks, chosen.hours, strict=True):
        root = chosen.keep / str(ranks) if chosen.keep else Path(tempfile.mkdtemp()) / "history"
        handed, spent = write(root, ranks, hours)
        tables: dict[str, int] = {}
        for table, _, folder in folders(root):
            tables[table] = tables.get(table, 0) + sum(path.stat().st_size for path in folder.glob("*.parquet"))
        scale = 24 / hours
        parts = [f"{table} {size(nbytes * scale)}" for table, nbytes in sorted(tables.items(), key=lambda item: -item[1])]
        print(f"{ranks} ranks, {hours:g} h: {size(sum(tables.values()) * scale)} a day ({', '.join(parts)})")
        with History(str(root)) as history:
            (count,) = history.ask("SELECT count(*) FROM rates").rows[0]
        print(f"  {count} rows of rates, {tables['rates'] / count:.1f} bytes each; CPU a minute: handing over "
              f"{handed / hours / 60 * 1e3:.3f} ms, writer {spent / hours / 60 * 1e3:.1f} ms "
              f"({spent / hours / 36:.3f} % of a core)")  # fmt: skip
        questions_asked: dict[str, Callable[[History], object]] = {
            "jobs": lambda history: questions.jobs(history, datetime(2000, 1, 1)),
            "node": lambda history: questions.blamed(history, "node0000", datetime(2000, 1, 1)),
            "trend": lambda history: questions.trend(history, OF.job, "", datetime(2000, 1, 1), 20),
        }
        for name, question in questions_asked.items():
            began = time.perf_counter()
            with History(str(root)) as history:
                question(history)
            print(f"  {name}: {time.perf_counter() - began:.2f} s")
        print(f"  peak memory of all this: {size(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}")
        if not chosen.keep:
            shutil.rmtree(root.parent)


if __name__ == "__main__":
    main()
