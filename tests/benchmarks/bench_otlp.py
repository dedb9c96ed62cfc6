"""What a round of metrics by OTLP costs: CPU time of the exporter's thread, and bytes of its requests.

`python tests/benchmarks/bench_otlp.py`. Views are made up; requests go to a server of this process that takes them and reads
nothing of them. CPU time is that of the thread that makes, encodes and sends.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ncclwatch.export.base import JobMetrics
from ncclwatch.export.receiver import Receiver
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.report.metrics import Counts, families
from unit.export.collector import Collector
from unit.views import view

ROUNDS = 5


def main() -> None:
    """Print the table."""
    print("| ranks | data points | CPU time a round | sent a round |\n| --- | --- | --- | --- |")
    with Collector() as collector:
        collector.answer = lambda path: (200, {}, b"")
        receiver = Receiver(collector.url)
        for ranks in (8, 512, 4096):
            shown, times = view(ranks, VerdictClass.STOPPED), []
            collector.headers.clear()
            for _ in range(ROUNDS):
                began = time.thread_time()
                told = list(families(shown, Counts()))
                assert receiver.send_metrics([JobMetrics("", time.time_ns(), told)]).ok
                times.append(time.thread_time() - began)
            points = sum(len(metric.samples) for metric in told)
            sent = sum(int(headers["content-length"]) for headers in collector.headers) / ROUNDS
            print(f"| {ranks} | {points} | {sorted(times)[ROUNDS // 2] * 1e3:.0f} ms | {sent / 1e3:.0f} KB |")


if __name__ == "__main__":
    main()
