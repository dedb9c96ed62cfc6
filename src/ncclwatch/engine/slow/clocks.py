"""Offset and drift of every node's clock, from operations that nodes take part in together.

Nobody ends a collective before everybody has begun it, nobody receives what was not sent. So for two nodes a and b, whatever
their clocks say: end on a − begin on b bounds (clock of a − clock of b) from above, and begin on a − end on b from below. The
tightest bounds of a stretch give the offset and, as half the distance between them, the error that remains; offsets of several
stretches give the drift (compare NTP's clock filter). Nodes are joined over the most certain pairs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Indices = NDArray[np.int64]

STRETCH_S = 10.0
"""Unit: s. From: common quartzes (50 ppm each): in so long two clocks move apart by 1 ms, so bounds within it count together."""


class NodeClock(NamedTuple):
    """A node's clock minus the reference's: seconds at the model's origin, drift (seconds a second), and the error that remains.

    The error is infinite for a node that shares no operation with the others.
    """

    offset_s: float
    drift: float
    error_s: float


@dataclass(slots=True)
class ClockModel:
    """Clocks of all nodes; ``error`` bounds every comparison of times between two nodes."""

    clocks: dict[int, NodeClock] = field(default_factory=dict)
    origin: float = 0.0

    def correct(self, node: Indices, time: Times) -> Times:
        """Times of many nodes on the reference's clock."""
        result = time.copy()
        for number, clock in self.clocks.items():
            here = node == number
            result[here] -= clock.offset_s + clock.drift * (time[here] - self.origin)
        return result

    def error(self, one: int, other: int) -> float:
        """How wrong a difference between times of two nodes may be, seconds; 0 within a node."""
        return self.clocks[one].error_s + self.clocks[other].error_s if one != other else 0.0


def estimate(node: Indices, operation: Indices, begin: Times, end: Times) -> ClockModel:
    """Estimate clocks. Rows are sides of operations: their node, the operation's number, begin and end on the node's clock (s).

    Every side of one operation must need every other's beginning (all collectives but rooted ones; of a message pass begin of the
    send and end of the receive with the receive's begin and the send's end as nan). O(rows log rows).
    """
    if not len(node):
        return ClockModel()
    origin = float(np.nanmin(begin))
    nodes, node = np.unique(node, return_inverse=True)
    order = np.lexsort((node, operation))
    node, operation, begin, end = node[order], operation[order], begin[order], end[order]
    # The last to begin and the first to end of a node's sides bound tightest.
    sides = np.flatnonzero(np.r_[True, (operation[1:] != operation[:-1]) | (node[1:] != node[:-1])])
    node, operation = node[sides], operation[sides]
    begin, end = np.fmax.reduceat(begin, sides), np.fmin.reduceat(end, sides)
    # Each node of an operation with the operation's first: that joins all, and keeps it linear.
    starts = np.r_[True, operation[1:] != operation[:-1]]
    other = np.flatnonzero(~starts)
    first = np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))[other]
    upper, lower = end[first] - begin[other], begin[first] - end[other]
    stretch = (np.fmax(begin[first], end[first]) - origin) // STRETCH_S
    keys, number = np.unique(np.stack([node[first], node[other], stretch.astype(np.int64)]), axis=1, return_inverse=True)
    bounds = np.full((2, keys.shape[1]), np.inf)
    np.minimum.at(bounds[0], number, np.where(np.isnan(upper), np.inf, upper))
    np.minimum.at(bounds[1], number, np.where(np.isnan(lower), np.inf, -lower))
    known = np.isfinite(bounds).all(axis=0)
    fits: dict[tuple[int, int], list[tuple[int, float, float]]] = defaultdict(list)
    for (a, b, at), (high, low) in zip(keys.T[known].tolist(), bounds.T[known].tolist(), strict=True):
        fits[a, b].append((at, high, -low))
    return ClockModel(_joined(nodes.tolist(), {pair: _fit(found) for pair, found in fits.items()}), origin)


def _fit(found: list[tuple[int, float, float]]) -> NodeClock:
    """The line through the middles of bounds, weighted by certainty; with a slope from three stretches on."""
    at, high, low = np.array(found, np.float64).T
    times, middles, halves = (at + 0.5) * STRETCH_S, (high + low) / 2, np.abs(high - low) / 2
    # Drift within a stretch may bring bounds together, or past each other: none is taken for better than the middle one of all.
    halves = np.maximum(halves, max(float(np.quantile(halves, 0.5, method="lower")), 1e-9))
    line = np.polyfit(times, middles, 1 if len(found) >= 3 else 0, w=1 / halves)
    # A stretch in which somebody waited long has bounds far apart, and a middle that says as little.
    off_line = np.abs(middles - np.polyval(line, times)) * halves.min() / halves
    error = float(halves.min() + (off_line.max() if len(found) > 1 else 0.0))
    return NodeClock(float(line[-1]), float(line[0]) if len(line) > 1 else 0.0, error)


def _joined(nodes: list[int], fits: dict[tuple[int, int], NodeClock]) -> dict[int, NodeClock]:
    """Spread from the first node over the most certain pairs (Dijkstra over errors, which add up). A fit (a, b) is a minus b."""
    near: dict[int, list[tuple[int, NodeClock]]] = defaultdict(list)
    for (a, b), fit in fits.items():
        near[a].append((b, NodeClock(-fit.offset_s, -fit.drift, fit.error_s)))
        near[b].append((a, fit))
    clocks = dict.fromkeys(nodes, NodeClock(0.0, 0.0, float("inf")))
    heap = [(0.0, 0, 0.0, 0.0)]
    while heap:
        error, at, offset, drift = heapq.heappop(heap)
        if error < clocks[nodes[at]].error_s:
            clocks[nodes[at]] = NodeClock(offset, drift, error)
            for other, more in near[at]:
                heapq.heappush(heap, (error + more.error_s, other, offset + more.offset_s, drift + more.drift))
    return clocks
