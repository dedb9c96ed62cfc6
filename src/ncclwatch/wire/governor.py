"""What probing the data path may cost, and what it did cost.

A probe costs its trap at every hit, gated or not: only detaching ends it (docs of uprobes; measured in
tests/benchmarks/bench_wire_overhead.py). NCCL's proxy thread polls without pause, so probes on the data path come in bursts,
each just long enough for a window of completions, and rest in between for so long that the cost stays within a share of each
traced thread's wall time. The cost of a hit is measured on this machine, on functions of our own process.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from enum import StrEnum

from ncclwatch.probes.sites import CostClass
from ncclwatch.wire.calibration import calibration_sites, own_functions
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.sites import Site

DEFAULT_BUDGET = 0.001
"""Share of the wall time of any traced thread."""

MIN_BURST_S = 0.005
MAX_BURST_S = 0.5
MAX_REST_S = 60.0
"""A burst is never longer away than this while it is wanted at all, unless the budget forbids even the shortest one."""

CALIBRATION_CALLS = 400


class Mode(StrEnum):
    """How the data path is watched.

    ``STATE``: not at all, rates come from the state plane. ``BURSTS``: in bursts within the budget. ``EXACT``: always, every
    request counted, at whatever it costs; the user is told first (see :meth:`Governor.forecast`).
    """

    STATE = "state"
    BURSTS = "bursts"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class HitCost:
    """Measured cost in ns of one hit: of an entry alone, and of an entry and the return of the same call together."""

    entry_ns: float
    entry_and_return_ns: float

    @property
    def return_ns(self) -> float:
        """What the return adds."""
        return max(self.entry_and_return_ns - self.entry_ns, 0.0)


@dataclass
class ThreadCost:
    """What one traced thread has paid: ``cost_ns`` of ``attached_ns`` with probes, out of the time since it was first traced."""

    pid: int
    tid: int
    first_ns: int
    hits: int = 0
    cost_ns: float = 0.0
    last_burst_ns: float = 0.0
    """What the last burst cost it."""

    def share(self, now_ns: int) -> float:
        """Cost as a share of wall time since the thread was first traced."""
        return self.cost_ns / max(now_ns - self.first_ns, 1)


class Governor:
    """Plans bursts so that no traced thread pays more than ``budget`` of its wall time, and keeps the bill.

    A pure function of what it is told: the caller attaches and detaches when ``due`` says so. ``costs`` are those of
    :func:`measure_costs`, by class of the probed instruction. Times are CLOCK_MONOTONIC ns.
    """

    def __init__(self, costs: dict[CostClass, HitCost], budget: float = DEFAULT_BUDGET, *, window: int = 64) -> None:
        self.costs = costs
        self.budget = budget
        self.window = window
        self.bursts = 0
        self.burst_ns = 0
        self.threads: dict[tuple[int, int], ThreadCost] = {}
        self.length_s = MIN_BURST_S
        self._hits: dict[tuple[int, int], int] = {}
        self._began_ns: int | None = None
        self._next_ns = 0

    @property
    def attached(self) -> bool:
        """Whether a burst is on."""
        return self._began_ns is not None

    def due(self, now_ns: int) -> bool:
        """Whether something is to be done now: begin a burst, or end the one that is on."""
        if self._began_ns is not None:
            return now_ns >= self._began_ns + int(self.length_s * 1e9)
        return now_ns >= self._next_ns

    def begin(self, now_ns: int, hits: dict[tuple[int, int], int]) -> None:
        """A burst begins: probes are being attached; ``hits`` is the running total by (pid, tid) before it."""
        self._began_ns = now_ns
        self._hits = dict(hits)
        self.bursts += 1

    def end(self, now_ns: int, hits: dict[tuple[int, int], int], hit_ns: float, completions: int) -> None:
        """A burst has ended: probes are detached.

        ``hits`` is the running total by (pid, tid), ``hit_ns`` the mean cost of one, ``completions`` how many the busiest queue
        pair saw during the burst: bursts grow until they hold a window of them.
        """
        assert self._began_ns is not None  # noqa: S101 - begin comes first
        length_ns = now_ns - self._began_ns
        self.burst_ns += length_ns
        self._bill(hits, hit_ns)
        if completions < self.window:
            self.length_s = min(self.length_s * 2, MAX_BURST_S)
        elif completions > 4 * self.window:
            self.length_s = max(self.length_s / 2, MIN_BURST_S)
        self._began_ns = None
        self._next_ns = now_ns + self._rest_ns(now_ns, self.length_s * 1e9 / max(length_ns, 1))

    def _bill(self, hits: dict[tuple[int, int], int], hit_ns: float) -> None:
        assert self._began_ns is not None  # noqa: S101 - called by end
        for thread in self.threads.values():
            thread.last_burst_ns = 0.0
        for key, total in hits.items():
            new = total - self._hits.get(key, 0)
            if new > 0:
                thread = self.threads.setdefault(key, ThreadCost(*key, first_ns=self._began_ns))
                thread.hits += new
                thread.last_burst_ns = new * hit_ns
                thread.cost_ns += thread.last_burst_ns

    def _rest_ns(self, now_ns: int, growth: float) -> int:
        """How long until every thread can pay another burst, ``growth`` times as long as the last, and stay within the budget."""
        due = (
            (thread.cost_ns + thread.last_burst_ns * max(growth, 1.0)) / self.budget - (now_ns - thread.first_ns)
            for thread in self.threads.values()
        )
        return int(max(self.length_s * 1e9, *due, 0.0))

    def worst(self, now_ns: int) -> ThreadCost | None:
        """The thread that has paid the largest share."""
        return max(self.threads.values(), key=lambda thread: thread.share(now_ns), default=None)

    def next_burst_s(self, now_ns: int) -> float:
        """Seconds until the next burst may begin; more than MAX_REST_S means that the budget hardly allows any."""
        return max(self._next_ns - now_ns, 0) / 1e9

    def forecast(self, calls_per_second: float, cost: CostClass = CostClass.EMULATED) -> float:
        """Share of a thread's time that exact counting costs at a rate of probed calls: what the user is told before it
        begins."""
        measured = self.costs[cost]
        return calls_per_second * measured.entry_and_return_ns / 1e9

    def report(self, now_ns: int) -> str:
        """One line about what was done and what it cost."""
        worst = self.worst(now_ns)
        if worst is None:
            return f"{self.bursts} bursts, no probe was hit"
        return (
            f"{self.bursts} bursts, {self.burst_ns / 1e6:.0f} ms attached; the thread hit most "
            f"(pid {worst.pid}, tid {worst.tid}) paid {worst.cost_ns / 1e6:.1f} ms for {worst.hits} hits, "
            f"{worst.share(now_ns):.3%} of its time (budget {self.budget:.3%})"
        )


def hits_by_thread(kernel: WireKernel, pids: Container[int]) -> dict[tuple[int, int], int]:
    """(pid, tid) → hits of data path probes so far, of the threads of these processes."""
    threads = kernel.threads().items()
    return {key: int(record["posts"]) + int(record["polls"]) for key, record in threads if key[0] in pids}


def mean_hit_ns(costs: dict[CostClass, HitCost], sites: Iterable[Site]) -> float:
    """The dearest hit among these sites: entry and return of a call are two hits, so half of what a call costs."""
    return max((costs[site.cost].entry_and_return_ns / 2 for site in sites), default=0.0)


# Two functions of glibc in our own process stand for all: one that begins with an instruction the kernel emulates, and one that
# does not.
def measure_costs(kernel: WireKernel, calls: int = CALIBRATION_CALLS) -> dict[CostClass, HitCost]:
    """What a hit costs here and now, by class of instruction: the median of a few hundred calls with probes less without.

    The programs measured are those of polling, on functions of our own; takes some 10 ms. Raises what attaching raises.
    """
    emulated, stepped = own_functions()
    first, second = _measure(kernel, emulated, calls), _measure(kernel, stepped, calls)
    return {CostClass.EMULATED: first, CostClass.OPTIMISED: first, CostClass.SINGLE_STEPPED: second}


def _measure(kernel: WireKernel, address: int, calls: int) -> HitCost:
    function = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long)(address)
    entry, leave = calibration_sites(address)
    bare = _median_call_ns(function, calls)
    results = []
    for sites in ([entry], [entry, leave]):
        attached = kernel.attach(sites)
        try:
            results.append(max(_median_call_ns(function, calls) - bare, 0.0))
        finally:
            kernel.detach(attached)
    return HitCost(results[0], max(results))


def _median_call_ns(call: Callable[[int], int], calls: int) -> float:
    """The median of batches: a neighbour on the CPU must not count."""
    batches = []
    for _ in range(max(calls // 20, 5)):
        begin = time.perf_counter_ns()
        for _ in range(20):
            call(0)
        batches.append((time.perf_counter_ns() - begin) / 20)
    return sorted(batches)[len(batches) // 2]
