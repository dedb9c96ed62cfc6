"""What probing the data path may cost, and what it did cost.

A probe costs its trap at every hit, gated or not: only detaching ends it (docs of uprobes; measured in
tests/benchmarks/bench_wire_overhead.py). NCCL's proxy thread polls without pause, and a thread that polls under a probe does
little else than trap: so probes on the data path come in short bursts, and every burst is paid for beforehand. The cost of a hit
is measured on this machine, on functions of our own process.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ncclwatch.probes.instructions import CostClass
from ncclwatch.wire.prices import NOTHING, HitCost, Tallies, Tally

DEFAULT_BUDGET = 0.001
"""Share of the wall time of any traced thread."""

MIN_BURST_S = 0.002
MAX_BURST_S = 0.25
PATIENCE_S = 10.0
"""Bursts do not grow so long that saving up for one takes longer than this."""
MIN_REST_S = 0.5
"""Rest between two bursts at least: attaching and detaching is work for the machine too."""
FIRST_OVERSHOOT_S = 0.005
"""What a burst is assumed to cost beyond its length, for the time in which probes come and go, before one was seen."""


class Mode(StrEnum):
    """How the data path is watched.

    ``STATE``: not at all, rates come from the state plane. ``BURSTS``: in bursts within the budget. ``EXACT``: always, every
    request counted, at whatever it costs; the user is told first (see :meth:`Governor.forecast`).
    """

    STATE = "state"
    BURSTS = "bursts"
    EXACT = "exact"


@dataclass
class ThreadCost:
    """What one traced thread has paid: ``cost_ns`` in ``hits``, since ``first_ns``, when its process was enrolled."""

    pid: int
    tid: int
    first_ns: int
    hits: int = 0
    cost_ns: float = 0.0
    ordered_ns: float = 0.0
    """What it paid in bursts that somebody ordered, on another account."""
    last_share: float = 0.0
    """The share of the last burst that it spent in traps."""

    def share(self, now_ns: int) -> float:
        """Cost as a share of wall time since its process was enrolled."""
        return self.cost_ns / max(now_ns - self.first_ns, 1)


class Governor:
    """Plans bursts so that no traced thread has at any moment paid more than ``budget`` of its wall time, and keeps the bill.

    Each process has an account into which ``budget`` of the time since it was enrolled is paid. A burst begins only when every
    account holds what it can cost: of the shortest one its whole length (a thread that does nothing but trap), of a longer one
    what threads spent in bursts so far, for habits change doubled; and it is cut short when an account runs out
    (:meth:`exhausted`). So the first burst, too, is paid for beforehand: with 0.1 % it comes after seven seconds. It lasts as
    long as the account allows: of threads that are seldom hit, a whole one at once.

    A pure function of what it is told: the caller attaches and detaches. ``costs`` are those of :func:`measure_costs`, by class
    of the probed instruction. Times are CLOCK_MONOTONIC ns.
    """

    def __init__(self, costs: dict[CostClass, HitCost], budget: float = DEFAULT_BUDGET, *, window: int = 64) -> None:
        if not 0 < budget <= 1:
            raise ValueError(f"a budget is a share above 0 and up to 1, not {budget}")
        self.costs = costs
        self.budget = budget
        self.window = window
        self.bursts = 0
        self.cut_short = 0
        self.burst_ns = 0
        self.ordered = 0
        """Bursts that somebody ordered; they are no part of ``bursts``."""
        self.threads: dict[tuple[int, int], ThreadCost] = {}
        self.length_s = MAX_BURST_S
        self._enrolled: dict[int, int] = {}
        self._overshoot_ns = FIRST_OVERSHOOT_S * 1e9
        self._before: dict[tuple[int, int], Tally] = {}
        self._began_ns: int | None = None
        self._rested_ns = 0
        self._ordered: tuple[float, float] | None = None
        """Length in seconds and largest share of the burst that is on, where it was ordered."""

    # --- accounts --------------------------------------------------------------------------------------------------------

    def enrol(self, pid: int, now_ns: int) -> None:
        """Open the account of a process that may be traced from now on; it starts with nothing."""
        self._enrolled.setdefault(pid, now_ns)

    def release(self, pid: int) -> None:
        """Close the account of a process that is gone."""
        self._enrolled.pop(pid, None)
        self.threads = {key: thread for key, thread in self.threads.items() if key[0] != pid}

    def credit_ns(self, now_ns: int) -> float:
        """What the poorest account holds."""
        if not self._enrolled:
            return 0.0
        paid: dict[int, float] = {}
        for thread in self.threads.values():
            paid[thread.pid] = max(paid.get(thread.pid, 0.0), thread.cost_ns)
        return min(self.budget * (now_ns - since) - paid.get(pid, 0.0) for pid, since in self._enrolled.items())

    def price_ns(self, length_s: float) -> float:
        """What is saved up for a burst of this length: what the shortest can cost a thread at worst, and by experience what a
        longer one costs beyond it. Without experience nothing: a burst is cut short when an account runs out."""
        worst = min(max((2 * thread.last_share for thread in self.threads.values()), default=0.0), 1.0)
        return MIN_BURST_S * 1e9 + self._overshoot_ns + worst * max(length_s - MIN_BURST_S, 0.0) * 1e9

    # --- bursts ----------------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether a burst is on."""
        return self._began_ns is not None

    def due(self, now_ns: int) -> bool:
        """Whether something is to be done now: begin a burst, or end the one that is on."""
        if self._began_ns is not None:
            return now_ns >= self._began_ns + int((self._ordered[0] if self._ordered else self.length_s) * 1e9)
        return bool(self._enrolled) and now_ns >= self._rested_ns and self.credit_ns(now_ns) >= self.price_ns(self.length_s)

    def begin(self, now_ns: int, tallies: Tallies, *, ordered: tuple[float, float] | None = None) -> None:
        """A burst begins: probes are being attached; ``tallies`` are those before it.

        ``ordered`` is one that somebody asked for: its length in seconds, and the share of its time since it was enrolled that a
        thread may pay for orders. Such a burst is billed apart.
        """
        for pid, _ in tallies:
            self.enrol(pid, now_ns)
        self._began_ns = now_ns
        self._before = dict(tallies)
        self._ordered = ordered
        self.bursts += not ordered
        self.ordered += bool(ordered)

    def exhausted(self, now_ns: int, tallies: Tallies) -> bool:
        """Whether a thread has spent, in the burst that is on, all that its account holds but for what detaching may cost."""
        for key, total in tallies.items():
            thread = self.threads.get(key)
            since = self._enrolled.get(key[0], self._began_ns or now_ns)
            budget = self._ordered[1] if self._ordered else self.budget
            paid = 0.0 if thread is None else thread.ordered_ns if self._ordered else thread.cost_ns
            left = budget * (now_ns - since) - paid - self._overshoot_ns
            if total.cost_ns - self._before.get(key, NOTHING).cost_ns > max(left, 0.0):
                return True
        return False

    def end(self, now_ns: int, tallies: Tallies, completions: int, *, cut_short: bool = False) -> None:
        """A burst has ended at ``now_ns``, when its probes began to be taken away; ``tallies`` are those after they were.

        ``completions`` is how many the busiest queue pair saw during the burst: bursts grow until they hold a window of them.
        """
        assert self._began_ns is not None  # noqa: S101 - begin comes first
        length_ns = max(now_ns - self._began_ns, 1)
        if self._ordered is not None:
            self._bill(tallies, length_ns)
            self._began_ns = self._ordered = None
            return
        self.burst_ns += length_ns
        self.cut_short += cut_short
        worst = self._bill(tallies, length_ns)
        # Learned quickly, unlearned slowly: the machine may be busy now and then.
        self._overshoot_ns = max(worst - length_ns, self._overshoot_ns * 0.95, FIRST_OVERSHOOT_S * 1e9 / 3)
        if completions < self.window and not cut_short:
            self.length_s = min(self.length_s * 2, MAX_BURST_S)
        elif completions > 4 * self.window or cut_short:
            self.length_s = max(self.length_s / 2, MIN_BURST_S)
        while self.length_s > MIN_BURST_S and self.price_ns(self.length_s) > self.budget * PATIENCE_S * 1e9:
            self.length_s = max(self.length_s / 2, MIN_BURST_S)
        self._began_ns = None
        self._rested_ns = now_ns + int(MIN_REST_S * 1e9)

    def renew(self, now_ns: int, tallies: Tallies) -> None:
        """The burst that is on goes on: what it has cost so far is charged, and it counts anew from now."""
        assert self._began_ns is not None  # noqa: S101 - begin comes first
        length_ns = max(now_ns - self._began_ns, 1)
        self.burst_ns += length_ns
        self._bill(tallies, length_ns)
        self._began_ns, self._before = now_ns, dict(tallies)

    def affords_all(self, now_ns: int, tallies: Tallies) -> bool:
        """Whether no thread pays more than half of the budget in the burst that is on: then it may go on without an end."""
        assert self._began_ns is not None  # noqa: S101 - begin comes first
        most = self.budget * (now_ns - self._began_ns) / 2
        return all(total.cost_ns - self._before.get(key, NOTHING).cost_ns <= most for key, total in tallies.items())

    def _bill(self, tallies: Tallies, length_ns: int) -> float:
        """Charge every thread for its hits; returns what the one that was hit most has to pay."""
        assert self._began_ns is not None  # noqa: S101 - called by end
        worst = 0.0
        if self._ordered is None:
            for thread in self.threads.values():
                thread.last_share = 0.0
        for key, total in tallies.items():
            before = self._before.get(key, NOTHING)
            if total.hits <= before.hits:
                continue
            since = self._enrolled.setdefault(key[0], self._began_ns)
            thread = self.threads.setdefault(key, ThreadCost(*key, first_ns=since))
            cost = total.cost_ns - before.cost_ns
            thread.hits += total.hits - before.hits
            if self._ordered is not None:
                thread.ordered_ns += cost
                continue
            thread.cost_ns += cost
            thread.last_share = min(cost / length_ns, 1.0)
            worst = max(worst, cost)
        return worst

    # --- what is told to people ------------------------------------------------------------------------------------------

    def worst(self, now_ns: int) -> ThreadCost | None:
        """The thread that has paid the largest share."""
        return max(self.threads.values(), key=lambda thread: thread.share(now_ns), default=None)

    def next_burst_s(self, now_ns: int) -> float:
        """Seconds until the next burst may begin."""
        missing = self.price_ns(self.length_s) - self.credit_ns(now_ns)
        return max(missing / self.budget, self._rested_ns - now_ns, 0.0) / 1e9

    def forecast(self, calls_per_second: float, cost: CostClass = CostClass.EMULATED) -> float:
        """Share of a thread's time that exact counting costs at a rate of probed calls: what the user is told before it
        begins.

        A thread that polls without pause slows down under its probes, so that the share approaches but never reaches 1.
        """
        measured = self.costs[cost]
        paid = calls_per_second * measured.entry_and_return_ns / 1e9
        return min(paid, 1.0)

    def report(self, now_ns: int) -> str:
        """One line about what was done and what it cost."""
        worst = self.worst(now_ns)
        done = f"{self.bursts} burst{'s' if self.bursts != 1 else ''}"
        if worst is None:
            return (
                f"{done}, no probe was hit"
                if self.bursts
                else f"no burst yet: the first is paid for in {self.next_burst_s(now_ns):.1f} s"
            )
        cut = f" ({self.cut_short} cut short)" if self.cut_short else ""
        return (
            f"{done}{cut}, {self.burst_ns / 1e6:.0f} ms attached; the thread hit most "
            f"(pid {worst.pid}, tid {worst.tid}) paid {worst.cost_ns / 1e6:.1f} ms for {worst.hits} hits, "
            f"{worst.share(now_ns):.3%} of its time (budget {self.budget:.3%})"
        )
