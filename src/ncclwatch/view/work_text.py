"""Windows of work requests in words."""

from __future__ import annotations

from ncclwatch.model.work import Counting, WorkWindow
from ncclwatch.text import duration, share, size, time_text

COUNTED = {
    Counting.BURSTS: "in bursts of probes",
    Counting.EXACT: "every request counted",
    Counting.TCP: "by the kernel",
    Counting.ORDER: "in a burst that was ordered",
}


def work_line(work: WorkWindow) -> str:
    """``sent 1.2 GiB/s ±3%, received …, 4 in flight, latency 24 µs (p99 95 µs); seen 0.14% of 7.2 s, in bursts of probes``."""
    sent, received = work.bytes_per_s, work.received_per_s
    exactness = f" ±{share(work.uncertainty)}" if work.uncertainty else ""
    parts = [] if sent is None else [f"sent {size(sent)}/s{exactness}"]
    parts += [f"received {size(received)}/s"] if received else []
    if work.throughput is not None:
        over = "while there was something to send" if work.counting is Counting.TCP else "over the last 64 completions"
        parts.append(f"{size(work.throughput)}/s {over}")
    parts += [f"{work.in_flight} in flight"] if work.in_flight is not None else []
    if work.latency_p50_ns is not None:
        tail = f" (p99 {time_text(work.latency_p99_ns)})" if work.latency_p99_ns is not None else ""
        parts.append(f"latency {time_text(work.latency_p50_ns)}{tail}")
    parts += [f"{work.errors} failed"] if work.errors else []
    span = duration((work.end_ns - work.begin_ns) / 1e9)
    return f"{', '.join(parts)}; seen {share(work.coverage)} of {span}, {COUNTED[work.counting]}"
