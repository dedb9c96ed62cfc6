"""How long the iterations of a job take while something is done to its network: read from the job's own lines (``--time``)."""

from __future__ import annotations

import statistics
import time

from testbed.job import Job


def iteration_times(job: Job, since: float, until: float) -> list[float]:
    """Seconds of the iterations of rank 0 that began and ended within a span of CLOCK_MONOTONIC."""
    words = [line.split() for line in job.lines(0)]
    finished = [(float(w[5]), float(w[3])) for w in words if w[0] == "iteration" and w[2:3] == ["took"] and len(w) == 6]
    return [took for ended, took in finished if since + took <= ended <= until]


def measure(job: Job, iterations: int, timeout: float = 90) -> list[float]:
    """Seconds of that many iterations, or more, that begin now. (Over a lossy link a single one may take 15 s.)"""
    began = time.monotonic()
    while time.monotonic() < began + timeout:
        times = iteration_times(job, began, time.monotonic())
        if len(times) >= iterations:
            return times
        time.sleep(0.1)
    raise AssertionError(f"not {iterations} iterations in {timeout:g} s\n{job.logs()}")


def spread(times: list[float]) -> float:
    """The width of the middle 80 % of the clean iterations."""
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return deciles[-1] - deciles[0]
