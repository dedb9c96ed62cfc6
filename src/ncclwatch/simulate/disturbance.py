"""What faults do to the machine, as windows in time: pauses of a rank's host, GPU or proxy thread, factors on compute, effects
on links.

All times are seconds of true (simulated) time. A pause that never ends has an end of ``inf``. Windows are what both the
vectorised and the exact executor consult, so that a fault means the same thing in both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from ncclwatch.simulate.layout import node_of, ranks_of_node
from ncclwatch.simulate.scenario import Fault, FaultKind, Layout

Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class LinkEffect:
    """From ``start`` to ``end``: transfer time times ``factor``, plus ``delay`` seconds with probability ``probability``; or
    down.
    """

    start: float
    end: float
    factor: float = 1.0
    delay: float = 0.0
    probability: float = 1.0
    acknowledgement_delay: float = 0.0
    down: bool = False
    shared: bool = False
    """Of a NIC: where both ends of a transfer are slowed, the slower one counts, not their product."""


@dataclass(frozen=True, slots=True)
class Factor:
    """From ``start`` to ``end`` something takes ``factor`` times as long and ``extra`` seconds more."""

    start: float
    end: float
    factor: float = 1.0
    extra: float = 0.0


@dataclass(slots=True)
class Disturbance:
    """Everything that is out of order, by rank (global) or by link (source, destination)."""

    host: dict[int, list[Window]] = field(default_factory=lambda: defaultdict(list))
    gpu: dict[int, list[Window]] = field(default_factory=lambda: defaultdict(list))
    proxy: dict[int, list[Window]] = field(default_factory=lambda: defaultdict(list))
    stopped: dict[int, list[Window]] = field(default_factory=lambda: defaultdict(list))
    died: dict[int, float] = field(default_factory=dict)
    compute: dict[int, list[Factor]] = field(default_factory=lambda: defaultdict(list))
    loader: dict[int, list[Factor]] = field(default_factory=lambda: defaultdict(list))
    copies: dict[int, list[Factor]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[int, list[Factor]] = field(default_factory=lambda: defaultdict(list))
    links: dict[tuple[int, int], list[LinkEffect]] = field(default_factory=lambda: defaultdict(list))
    nics: dict[int, list[LinkEffect]] = field(default_factory=lambda: defaultdict(list))
    onsets: list[tuple[Fault, float]] = field(default_factory=list)
    """Faults that have begun, with the true time they did."""

    def apply(self, fault: Fault, start: float, layout: Layout, seed: int) -> None:  # noqa: PLR0912
        """Add a fault that begins at ``start``. Faults of the program itself (skip, swap, ...) leave no window."""
        end = start + fault.duration_s
        rank, kind = fault.rank, fault.kind
        self.onsets.append((fault, start))
        rng = np.random.default_rng([seed, rank, int(start * 1e6) & 0xFFFFFFFF])
        if kind in (FaultKind.STOP, FaultKind.KILL, FaultKind.CRASH):
            until = end if kind is FaultKind.STOP else math.inf
            for windows in (self.host, self.gpu, self.proxy):
                _add(windows[rank], (start, until))
            if kind is FaultKind.STOP:
                self.stopped[rank].append((start, until))
            else:
                self.died[rank] = start
            if kind is FaultKind.CRASH and math.isfinite(fault.duration_s):
                # The job's own watchdog aborts the survivors: they die later, all at about the same time.
                for other in range(layout.world):
                    if other != rank:
                        self.died[other] = end
        elif kind is FaultKind.NEVER_ENTERS:
            _add(self.host[rank], (start, end))
        elif kind is FaultKind.GPU_STALL:
            _add(self.gpu[rank], (start, end))
        elif kind is FaultKind.PROXY_STALL:
            _add(self.proxy[rank], (start, end))
        elif kind is FaultKind.PROXY_SLEEP:
            self._repeat(self.proxy[rank], start, end, fault, rng, regular=False)
        elif kind is FaultKind.GC_PAUSE:
            pauses: list[Window] = []
            self._repeat(pauses, start, end, fault, rng, regular=True)
            for pause in pauses:
                _add(self.host[rank], pause)
                self.compute[rank].append(Factor(*pause, math.inf))
        elif kind is FaultKind.SLOW_GPU:
            self.compute[rank].append(Factor(start, end, fault.strength))
        elif kind is FaultKind.HOST_LOAD:
            for r in ranks_of_node(layout, node_of(layout, rank)):
                self.compute[r].append(Factor(start, end, fault.strength))
        elif kind is FaultKind.SLOW_LOADER:
            self.loader[rank].append(Factor(start, end, 1.0, fault.strength))
        elif kind is FaultKind.SLOW_COPY:
            self.copies[rank].append(Factor(start, end, 1.0, fault.strength))
        elif kind is FaultKind.CPU_LIMIT:
            self.calls[rank].append(Factor(start, end, fault.strength))
        elif kind is FaultKind.FEW_CPUS:
            for r in ranks_of_node(layout, node_of(layout, rank)):
                self.calls[r].append(Factor(start, end, fault.strength))
        else:
            self._apply_link(fault, start, end, layout)

    def _apply_link(self, fault: Fault, start: float, end: float, layout: Layout) -> None:
        delay = fault.delay_ms / 1e3
        pair = (fault.rank, fault.rank if fault.peer is None else fault.peer)
        if fault.kind is FaultKind.LINK_DOWN:
            for way in (pair, pair[::-1]):
                self.links[way].append(LinkEffect(start, end, down=True))
        elif fault.kind is FaultKind.SLOW_LINK:
            self.links[pair].append(LinkEffect(start, end, fault.strength, delay))
        elif fault.kind is FaultKind.LOSSY_LINK:
            self.links[pair].append(LinkEffect(start, end, 1.0, delay, fault.strength))
        elif fault.kind is FaultKind.NIC_LIMIT:
            self.nics[fault.rank].append(LinkEffect(start, end, fault.strength, delay, shared=True))
        elif fault.kind is FaultKind.BACKGROUND_TRAFFIC:
            for r in ranks_of_node(layout, node_of(layout, fault.rank)):
                self.nics[r].append(LinkEffect(start, end, fault.strength, acknowledgement_delay=delay, shared=True))

    @staticmethod
    def _repeat(pauses: list[Window], start: float, end: float, fault: Fault, rng: np.random.Generator, *, regular: bool) -> None:
        """Pauses of ``strength`` seconds from ``start``, every ``period_s`` or at random with that mean; at most 100,000."""
        t = start
        for _ in range(100_000):
            if t >= end:
                break
            _add(pauses, (t, t + fault.strength))
            t += fault.strength + (fault.period_s if regular else float(rng.exponential(fault.period_s)))
            if t > start + 120:  # scenarios last tens of seconds
                break

    def link_effects(self, source: int, destination: int) -> list[LinkEffect]:
        """Effects on one link: its own and those of the NICs at both ends."""
        effects = list(self.links.get((source, destination), ()))
        effects += self.nics.get(source, [])
        if destination != source:
            effects += self.nics.get(destination, [])
        return effects

    def ranks_in_operations(self) -> set[int]:
        """Ranks whose part in an operation is not ordinary, whatever the time."""
        found = {r for table in (self.gpu, self.proxy) for r, windows in table.items() if windows}
        found |= {r for pair, effects in self.links.items() if effects for r in pair}
        return found | {r for r, effects in self.nics.items() if effects}

    def window_of_rank(self, rank: int) -> list[Window]:
        """Every window in which a transfer of this rank can be out of the ordinary."""
        windows = [*self.gpu.get(rank, ()), *self.proxy.get(rank, ())]
        windows += [(e.start, e.end) for e in self.nics.get(rank, ())]
        return windows + [(e.start, e.end) for pair, effects in self.links.items() if rank in pair for e in effects]


def _add(windows: list[Window], window: Window) -> None:
    windows.append(window)
    windows.sort()


def live(windows: list[Window] | None, time: float) -> float:
    """The earliest moment at or after ``time`` outside the windows (sorted by start)."""
    if windows:
        for start, end in windows:
            if start <= time < end:
                time = end
    return time


def advance(windows: list[Window] | None, time: float, duration: float) -> float:
    """When work of ``duration`` that begins at ``time`` ends if it rests in the windows (sorted by start)."""
    if windows:
        for start, end in windows:
            if time + duration <= start:
                break
            if time >= end:
                continue
            duration -= max(0.0, start - time)
            time = end
    return time + duration


def stretched(factors: list[Factor] | None, time: float, duration: float) -> float:
    """When work of ``duration`` at normal speed that begins at ``time`` ends under slow-downs; an infinite factor is a
    standstill.

    ``extra`` is added once for each slow-down in force at the beginning. Overlapping slow-downs multiply.
    """
    if not factors or not math.isfinite(time):
        return time + duration
    duration += sum(f.extra for f in factors if f.start <= time < f.end)
    marks = sorted({t for f in factors for t in (f.start, f.end) if t > time and math.isfinite(t)})
    for mark in [*marks, math.inf]:
        slow = math.prod(f.factor for f in factors if f.start <= time < f.end)
        if time + duration * slow <= mark if duration else True:
            return time + (duration * slow if duration else 0.0)
        if math.isfinite(slow):
            duration -= (mark - time) / slow
        time = mark
    return time
