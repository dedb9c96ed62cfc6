"""C4D's matrix of delays of a communicator: a row is a sender, a column a receiver, a cell a link.

Made of what the wire says of a job's connections: completion times of work requests (RDMA), round trips (TCP). Each row's and
column's own level is taken out first (median polish), so that one slow link does not make its sender look slow.
Evidence beside a verdict of slowness; it accuses nobody by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.model.network import FlowKind, FlowRecord
from ncclwatch.model.verdict import Verdict

Matrix = NDArray[np.float64]

SLOW_TIMES = 3.0
"""Unit: ratio. From: chosen: a delay so many times the usual is told."""
SLOW_SIGMAS = 6.0
"""Unit: robust standard deviations. From: the normal distribution: of a million healthy cells none is so far above by chance."""
OF_MAD = 1.4826
"""Fact: standard deviation of a normal distribution over its median absolute deviation."""
POLISHES = 3
"""Bound: rounds of the median polish; more change nothing."""
MAX_RANKS = 1024
"""Bound: ranks of a communicator, for the matrix is dense."""
MAX_LINES = 3
"""Bound: lines that are told."""

_CALLED = {FlowKind.RDMA: "completion of work requests", FlowKind.SOCKET: "TCP round trip"}


class SlowPart(NamedTuple):
    """A slow cell, row (no destination: −1) or column (no source); ``delay`` in the matrix's unit, ``times`` the usual one."""

    source: int
    destination: int
    delay: float
    times: float


def matrix_of(size: int, transfers: Iterable[tuple[int, int, float]]) -> Matrix:
    """The median delay of each pair, shape (size, size), nan where nothing was seen, of (source, destination, delay)."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for source, destination, delay in transfers:
        found[source, destination].append(delay)
    matrix = np.full((size, size), np.nan)
    for pair, delays in found.items():
        matrix[pair] = float(np.median(delays))
    return matrix


def slow_parts(matrix: Matrix) -> list[SlowPart]:
    """What stands out, worst first; a slow row explains its cells. Logarithms make "so many times" the same at every level.

    In a ring each row has one cell: then a cell cannot be told from its row, and the link is named.
    """
    known = np.isfinite(matrix) & (matrix > 0)
    if np.count_nonzero(known) <= 2:
        return []
    logs = np.log(np.where(known, matrix, 1.0))
    level = float(np.median(logs[known]))
    spread = OF_MAD * float(np.median(np.abs(logs[known] - level)))
    least = max(float(np.log(SLOW_TIMES)), SLOW_SIGMAS * spread)
    # Tukey's median polish: the level of each row and column is taken out, where they have more than one cell.
    several = [known.sum(axis=axis) > 1 for axis in (0, 1)]
    levels = [np.zeros(len(matrix)), np.zeros(len(matrix))]
    rest = np.ma.masked_array(logs - level, ~known)
    for axis in (1, 0) * POLISHES:
        middle = np.where(several[axis], np.ma.median(rest, axis=axis).filled(0.0), 0.0)  # type: ignore[no-untyped-call]
        levels[axis] += middle
        rest = rest - np.expand_dims(middle, axis)
    columns, rows = levels
    alone = ~(several[1][:, None] & several[0][None, :])
    excess = np.where(alone, logs - level, rest.filled(0.0))
    cells = known & (excess > least) & (rows[:, None] <= least) & (columns[None, :] <= least)
    slow = [(at, -1, float(rows[at])) for at in np.flatnonzero(rows > least).tolist()]
    slow += [(-1, at, float(columns[at])) for at in np.flatnonzero(columns > least).tolist()]
    slow += [(a, b, float(excess[a, b])) for a, b in np.argwhere(cells).tolist()]
    parts = [
        SlowPart(a, b, float(np.exp(level + more) if min(a, b) < 0 else matrix[a, b]), float(np.exp(more))) for a, b, more in slow
    ]
    return sorted(parts, key=lambda part: -part.times)


def delay_lines(flows: Iterable[FlowRecord], verdict: Verdict) -> list[str]:
    """What stands out in the matrices of the communicators that culprits belong to, worst first."""
    culprits = {culprit.rank for culprit in verdict.culprits if culprit.rank is not None}
    transfers: dict[tuple[int, FlowKind], list[tuple[int, int, float]]] = defaultdict(list)
    names: dict[int, dict[int, int | None]] = defaultdict(dict)
    for flow in flows:
        if flow.comm_hash is None or flow.rank is None or flow.peer is None:
            continue
        names[flow.comm_hash][flow.rank] = flow.global_rank
        delay = flow.delay_us if flow.sends_data else None
        if delay is not None:
            transfers[flow.comm_hash, flow.kind].append((flow.rank, flow.peer, delay))
    found: list[tuple[float, str]] = []
    for (comm, kind), seen in transfers.items():
        size = 1 + max(max(source, destination) for source, destination, _ in seen)
        matrix = matrix_of(size, seen) if size <= MAX_RANKS else np.zeros((0, 0))
        cells = int(np.isfinite(matrix).sum())
        found += [
            (part.times, _line(comm, kind, part, names[comm], cells))
            for part in slow_parts(matrix)
            if culprits & {names[comm].get(part.source), names[comm].get(part.destination)}
        ]
    return [line for _, line in sorted(found, reverse=True)[:MAX_LINES]]


def _line(comm: int, kind: FlowKind, part: SlowPart, names: Mapping[int, int | None], cells: int) -> str:
    source, destination = (
        f"rank {names[rank]}" if names.get(rank) is not None else f"rank {rank} of the communicator"
        for rank in (part.source, part.destination)
    )
    what = f"from {source} to {destination}"
    if min(part.source, part.destination) < 0:
        what = f"all that {source} sends" if part.destination < 0 else f"all that {destination} receives"
    called = _CALLED.get(kind, "delay")
    return (
        f"delay matrix of communicator {comm:016x} ({called}, {cells} pairs): {what} takes {part.delay:.0f} µs, "
        f"{part.times:.1f} times the usual"
    )
