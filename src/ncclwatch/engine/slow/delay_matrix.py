"""C4D's matrix of delays, of one communicator or NIC: a row is a sender, a column a receiver, a cell a link.

Fed with what is seen of single transfers: steps of proxies at two looks, or times of work requests. Delays are compared after
each row's and column's own level is taken out (median polish), so that one slow link does not make its sender look slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.baselines import SIGMA

Matrix = NDArray[np.float64]

SLOW_TIMES = 2.0
SLOW_SIGMAS = 6.0
POLISHES = 8


class Where(StrEnum):
    """What is slow."""

    SENDER = "sender"
    RECEIVER = "receiver"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class SlowPart:
    """A slow row, column or cell: ``delay`` in the matrix's unit, ``times`` the usual one."""

    where: Where
    source: int
    destination: int
    delay: float
    times: float


def matrix_of(size: int, transfers: Iterable[tuple[int, int, float]]) -> Matrix:
    """The median delay of each pair, shape (size, size), nan where nothing was seen, of (source, destination, delay)."""
    found: dict[tuple[int, int], list[float]] = {}
    for source, destination, delay in transfers:
        if 0 <= source < size and 0 <= destination < size:
            found.setdefault((source, destination), []).append(delay)
    matrix = np.full((size, size), np.nan)
    for (source, destination), delays in found.items():
        matrix[source, destination] = float(np.median(delays))
    return matrix


def slow_parts(matrix: Matrix, times: float = SLOW_TIMES, sigmas: float = SLOW_SIGMAS) -> list[SlowPart]:
    """What stands out, worst first; a slow row explains its cells. Logarithms make "so many times" the same at every level.

    In a ring each row has one cell: then a cell cannot be told from its row, and the link is named.
    """
    known = np.isfinite(matrix) & (matrix > 0)
    if np.count_nonzero(known) < 3:
        return []
    logs = np.where(known, np.log(np.where(known, matrix, 1.0)), np.nan)
    level = float(np.nanmedian(logs))
    rows, columns, rest = _polish(logs - level, known)
    spread = SIGMA * float(np.nanmedian(np.abs((logs - level)[known])))
    least = max(float(np.log(times)), sigmas * spread)
    parts = []
    for effects, counts, where in ((rows, known.sum(axis=1), Where.SENDER), (columns, known.sum(axis=0), Where.RECEIVER)):
        for at in np.flatnonzero((effects > least) & (counts >= 2)).tolist():
            ends = (at, -1) if where is Where.SENDER else (-1, at)
            parts.append(SlowPart(where, *ends, float(np.exp(level + effects[at])), float(np.exp(effects[at]))))
    blamed_rows = {part.source for part in parts if part.where is Where.SENDER}
    blamed_columns = {part.destination for part in parts if part.where is Where.RECEIVER}
    single = (known.sum(axis=1)[:, None] < 2) | (known.sum(axis=0)[None, :] < 2)
    remaining = np.where(single, logs - level, rest)
    for source, destination in np.argwhere(known & (remaining > least)).tolist():
        if source in blamed_rows or destination in blamed_columns:
            continue
        excess = float(remaining[source, destination])
        parts.append(SlowPart(Where.LINK, source, destination, float(matrix[source, destination]), float(np.exp(excess))))
    return sorted(parts, key=lambda part: -part.times)


def _polish(table: Matrix, known: NDArray[np.bool_]) -> tuple[Matrix, Matrix, Matrix]:
    """Tukey's median polish of a table with holes: effects of rows and of columns, and what remains."""
    rest = np.where(known, table, np.nan)
    rows, columns = np.zeros(table.shape[0]), np.zeros(table.shape[1])
    for _ in range(POLISHES):
        moved = 0.0
        for axis, effects in ((1, rows), (0, columns)):
            seen = known.sum(axis=axis) >= 2
            middle = np.zeros(len(effects))
            if seen.any():
                middle[seen] = np.nanmedian(np.compress(seen, rest, axis=1 - axis), axis=axis)
            np.add(effects, middle, out=effects)
            rest = rest - (middle[:, None] if axis == 1 else middle[None, :])
            moved = max(moved, float(np.abs(middle).max(initial=0.0)))
        if moved < 1e-9:
            break
    return rows, columns, rest


def origin_in_ring(order: Sequence[int], waits: Matrix, least: float) -> int | None:
    """Walk a ring's receiver-driven chain back to where it begins (C4D): who waits for its predecessor got nothing from it; the
    first rank on the way back that does not wait itself is the origin.

    ``order`` is the ring, each rank receiving from the one before; ``waits`` the time each waits for its predecessor, by
    position. ``None`` when nobody waits, or everybody does.
    """
    waiting = np.asarray(waits) >= least
    if not waiting.any() or waiting.all():
        return None
    at = int(np.argmax(np.where(waiting, waits, -np.inf)))
    for _ in range(len(order)):
        at = (at - 1) % len(order)
        if not waiting[at]:
            return order[at]
    return None
