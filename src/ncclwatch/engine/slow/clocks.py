"""How far the clocks of nodes are apart, from operations that nodes take part in together.

Nobody ends a collective before everybody has begun it, nobody receives what was not sent. So for two nodes a and b, whatever
their clocks say, end on a − begin on b bounds (clock of a − clock of b) from above.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Indices = NDArray[np.int64]

DRIFT = 1e-4
"""Fact: two common quartzes, each wrong by 50 ppm: what bounds an offset now bounds it less closely the older it is."""


@dataclass(slots=True)
class ClockModel:
    """Clocks of nodes (sorted): by how much each is ahead of the first's, seconds, and the largest ``error`` that remains.

    ``error`` bounds every comparison of times between the first node and another; infinite where a node shares no operation.
    """

    nodes: Indices = field(default_factory=lambda: np.zeros(0, np.int64))
    offsets: Times = field(default_factory=lambda: np.zeros(0))
    error: float = 0.0

    def correct(self, node: Indices, time: Times) -> Times:
        """Times of many nodes on the first's clock."""
        corrected: Times = time - self.offsets[np.searchsorted(self.nodes, node)]
        return corrected

    def text(self) -> str:
        """How well they can be compared, in words; empty of one node."""
        if len(self.nodes) < 2:
            return ""
        if not np.isfinite(self.error):
            return "clocks of hosts cannot be compared: they have no operation in common"
        apart, known = float(np.abs(self.offsets).max()) * 1e3, f"known to ±{self.error * 1e3:.1f} ms by operations in common"
        return f"clocks of {len(self.nodes)} hosts differ by up to {apart:.1f} ms, {known}"


def estimate(node: Indices, operation: Indices, begin: Times, end: Times) -> ClockModel:
    """Estimate clocks. Rows are sides of operations: their node, the operation's number, begin and end on the node's clock (s).

    Every side of one operation must need every other's beginning (all collectives but rooted ones; of a message pass begin of the
    send and end of the receive with the receive's begin and the send's end as nan). The offset is in the middle of the tightest
    bounds over any way between two nodes, half their distance is the error. O(rows + operations × nodes² + nodes³).
    """
    if not len(node):
        return ClockModel()
    nodes, node = np.unique(node, return_inverse=True)
    numbers, operation = np.unique(operation, return_inverse=True)
    # The last to begin and the first to end of a node's sides bound tightest.
    begins, ends = np.full((len(numbers), len(nodes)), -np.inf), np.full((len(numbers), len(nodes)), np.inf)
    np.fmax.at(begins, (operation, node), begin)
    np.fmin.at(ends, (operation, node), end)
    time = begins.max(axis=1, keepdims=True)
    ends += DRIFT * (time.max() - time)
    ahead = np.stack([(own[:, None] - begins).min(axis=0) for own in ends.T])
    """How far the row's clock is ahead of the column's at most."""
    np.fill_diagonal(ahead, 0.0)
    for via in range(len(nodes)):
        ahead = np.minimum(ahead, ahead[:, via, None] + ahead[via])
    error = max(0.0, float((ahead[:, 0] + ahead[0]).max()) / 2)
    return ClockModel(nodes, (ahead[:, 0] - ahead[0]) / 2 if np.isfinite(error) else np.zeros(len(nodes)), error)
