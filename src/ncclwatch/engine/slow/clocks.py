"""Offset and drift of every node's clock, from operations that nodes take part in together.

Nobody ends a collective before everybody has begun it, nobody receives what was not sent. So for two nodes a and b, whatever
their clocks say: end on a − begin on b bounds (clock of a − clock of b) from above, and begin on a − end on b from below. The
tightest bounds of a stretch give the offset and, as half the distance between them, the error that remains; offsets of several
stretches give the drift (compare NTP's clock filter). Nodes are joined over the most certain pairs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Indices = NDArray[np.int64]

STRETCH_S = 10.0
PAIRS_AT_MOST = 64
"""Neighbours of a node that are compared; a ring of nodes is joined by two each."""


@dataclass(frozen=True, slots=True)
class NodeClock:
    """A node's clock against the reference's: ``offset_s`` at ``at`` (seconds), ``drift`` (relative), and the error that remains.

    ``error_s`` is infinite for a node that shares no operation with the others.
    """

    offset_s: float
    drift: float
    at: float
    error_s: float

    def correct(self, time: Times) -> Times:
        """Times of this node's clock as the reference's would show them."""
        corrected: Times = time - self.offset_s - self.drift * (time - self.at)
        return corrected

    def text(self) -> str:
        """``+1.24 ms ± 0.05 ms, drift 3.1 ppm``."""
        if not np.isfinite(self.error_s):
            return "unknown: no operation in common with the reference"
        return f"{self.offset_s * 1e3:+.3f} ms ± {self.error_s * 1e3:.3f} ms, drift {self.drift * 1e6:+.1f} ppm"


@dataclass(slots=True)
class _Bounds:
    """Of one pair of nodes in one stretch: clock of the first minus clock of the second lies between these."""

    lower: float = -np.inf
    upper: float = np.inf


@dataclass(slots=True)
class ClockModel:
    """Clocks of all nodes; ``error`` bounds every comparison of times between two nodes."""

    clocks: dict[int, NodeClock] = field(default_factory=dict)

    def correct(self, node: Indices, time: Times) -> Times:
        """Times of many nodes on the reference's clock."""
        result = time.copy()
        for number, clock in self.clocks.items():
            here = node == number
            result[here] = clock.correct(time[here])
        return result

    def error(self, one: int, other: int) -> float:
        """How wrong a difference between times of two nodes may be, seconds; 0 within a node."""
        if one == other:
            return 0.0
        pair = [self.clocks.get(one), self.clocks.get(other)]
        return sum(clock.error_s if clock is not None else float("inf") for clock in pair)


def estimate(node: Indices, operation: Indices, begin: Times, end: Times, *, stretch_s: float = STRETCH_S) -> ClockModel:
    """Estimate clocks. Rows are sides of operations: their node, the operation's number, begin and end on the node's clock (s).

    Every side of one operation must need every other's beginning (all collectives but rooted ones; of a message pass begin of the
    send and end of the receive with the receive's begin and the send's end as nan). O(rows log rows).
    """
    nodes = np.unique(node)
    if not len(nodes):
        return ClockModel()
    origin = float(np.nanmin(begin))
    stretches: dict[tuple[int, int], dict[int, _Bounds]] = defaultdict(lambda: defaultdict(_Bounds))
    for a, b, upper, lower, when in _pairs(node, operation, begin, end):
        bounds = stretches[a, b][int((when - origin) / stretch_s)]
        bounds.upper, bounds.lower = min(bounds.upper, upper), max(bounds.lower, lower)
    fits = {pair: fit for pair, found in stretches.items() if (fit := _fit(found, origin, stretch_s)) is not None}
    return ClockModel(_join(nodes.tolist(), fits, origin))


def _pairs(node: Indices, operation: Indices, begin: Times, end: Times) -> Iterable[tuple[int, int, float, float, float]]:
    """(a, b, upper, lower, time) of every operation that joins two nodes; a < b."""
    order = np.lexsort((node, operation))
    node, operation, begin, end = node[order], operation[order], begin[order], end[order]
    starts = np.flatnonzero(np.r_[True, (operation[1:] != operation[:-1]) | (node[1:] != node[:-1])])
    # The last to begin and the first to end of a node's sides bound tightest.
    with np.errstate(invalid="ignore"):
        last_begin = np.fmax.reduceat(begin, starts)
        first_end = np.fmin.reduceat(end, starts)
    nodes, operations = node[starts], operation[starts]
    edges = np.flatnonzero(np.r_[True, operations[1:] != operations[:-1], True])
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        for i in range(low, high):
            # Neighbours and the first: enough to join all, and linear for large groups.
            others = {i + 1, low} if high - low > PAIRS_AT_MOST else range(i + 1, high)
            for j in others:
                if i == j or j >= high or j < i:
                    continue
                upper = _difference(first_end[i], last_begin[j])
                lower = -_difference(first_end[j], last_begin[i])
                yield int(nodes[i]), int(nodes[j]), upper, lower, float(np.fmax(last_begin[i], first_end[i]))


def _difference(end: float, begin: float) -> float:
    difference = float(end - begin)
    return difference if np.isfinite(difference) else float("inf")


def _fit(found: dict[int, _Bounds], origin: float, stretch_s: float) -> tuple[float, float, float] | None:
    """(offset at the origin, drift, error) of a pair; drift from a line through the middles, weighted by certainty."""
    known = {n: b for n, b in found.items() if np.isfinite(b.lower) and np.isfinite(b.upper)}
    if not known:
        return None
    times = np.array([(n + 0.5) * stretch_s for n in known])
    middles = np.array([(b.lower + b.upper) / 2 for b in known.values()])
    halves = np.array([max((b.upper - b.lower) / 2, 1e-9) for b in known.values()])
    del origin
    drift = 0.0
    if len(known) >= 3:
        weights = 1.0 / halves**2
        mean_t, mean_m = np.average(times, weights=weights), np.average(middles, weights=weights)
        spread = float(np.sum(weights * (times - mean_t) ** 2))
        drift = float(np.sum(weights * (times - mean_t) * (middles - mean_m)) / spread) if spread > 0 else 0.0
    offsets = middles - drift * times
    best = int(np.argmin(halves))
    offset = float(np.average(offsets, weights=1.0 / halves**2))
    return offset, drift, float(halves[best] + np.abs(offsets - offset).max() * (len(known) > 1))


def _join(nodes: list[int], fits: dict[tuple[int, int], tuple[float, float, float]], origin: float) -> dict[int, NodeClock]:
    """Spread from the first node over the most certain pairs (Dijkstra over errors, which add up)."""
    near: dict[int, list[tuple[int, float, float, float]]] = defaultdict(list)
    for (a, b), (offset, drift, error) in fits.items():
        near[a].append((b, -offset, -drift, error))
        near[b].append((a, offset, drift, error))
    clocks: dict[int, NodeClock] = {}
    heap: list[tuple[float, int, float, float]] = [(0.0, nodes[0], 0.0, 0.0)]
    while heap:
        error, number, offset, drift = heapq.heappop(heap)
        if number in clocks:
            continue
        clocks[number] = NodeClock(offset, drift, origin, error)
        for other, more, faster, uncertain in near[number]:
            if other not in clocks:
                heapq.heappush(heap, (error + uncertain, other, offset + more, drift + faster))
    for number in nodes:
        clocks.setdefault(number, NodeClock(0.0, 0.0, origin, float("inf")))
    return clocks
