"""Windows of work requests as a collector gives them, beside what the job itself says it moved."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.node import NodeCollector
from ncclwatch.model.work import FlowWindow, Scope
from ncclwatch.wire.governor import Mode
from ncclwatch.wire.orders import Order
from testbed.job import Job

ORDER = 5
"""Number of the order of :func:`watch`."""


def watch(
    job: Job, mode: Mode, windows: int, *, budget: float, seconds: float, order: bool = False
) -> tuple[list[FlowWindow], list[NodeBatch]]:
    """Collect until each rank has so many windows of its port, for at most so many seconds; with ``order`` until an order for a
    burst, given as soon as there are windows, is answered as well.
    """
    collector = NodeCollector(every=False, wire=(mode, budget))
    found: list[FlowWindow] = []
    batches = []
    ordered = not order
    try:
        batches.append(collector.start(job.pids, calls=False))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            batches.append(collector.step())
            found += batches[-1].work
            if not ordered and found:
                ordered = collector.order(Order(ORDER, tuple(job.pids), seconds=0.2, share=0.5))
            if enough(found, windows) and (not order or any(window.order == ORDER for window in found)):
                break
    finally:
        collector.close()
    return found, batches


def enough(found: Sequence[FlowWindow], windows: int) -> bool:
    """Whether each of two ranks has so many windows of its port."""
    ports = [window.pid for window in found if window.scope is Scope.PORT]
    return len(set(ports)) == 2 and all(ports.count(pid) >= windows for pid in set(ports))


def ports_of(found: Sequence[FlowWindow], pid: int) -> list[FlowWindow]:
    """The windows of a process's port that nobody ordered."""
    return [window for window in found if window.scope is Scope.PORT and window.pid == pid and not window.order]


def iterations_between(job: Job, rank: int, begin_ns: int, end_ns: int) -> float:
    """Iterations of a rank in a span of CLOCK_MONOTONIC, with the parts at its ends."""
    text = job.log_path(rank).read_text(errors="replace")
    times = [float(at) for at in re.findall(r"iteration \d+ took [\d.e-]+ at ([\d.]+)", text)]
    assert len(times) > 2 and times[0] * 1e9 < begin_ns and times[-1] * 1e9 > end_ns, (times[:2], times[-2:], begin_ns, end_ns)
    return _place_of(times, end_ns / 1e9) - _place_of(times, begin_ns / 1e9)


def _place_of(times: Sequence[float], at: float) -> float:
    after = next(i for i, time in enumerate(times) if time >= at)
    return after - (times[after] - at) / (times[after] - times[after - 1])
