"""Splits flows so that every NIC and every leaf has the same number of each colour: ports of a bond, then spines.

Flows are edges between sources and destinations. A bipartite graph can be coloured with K colours so that the edges at each
vertex are spread over them evenly (de Werra 1971); this is why a Clos network can be rearranged to carry any permutation. For
K = 2: pair the edges at each vertex; edges and pairs form paths and even cycles; colour along these in turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ncclwatch.paths.fabric import Floats, Ints


def mates(levels: Sequence[Ints], weight: Floats) -> list[int]:
    """The edge that each edge is paired with, -1 for none.

    ``levels``: keys of groups that hold one another, the smallest first: each is split evenly. Edges of like weight are paired.
    """
    mate = np.full(len(weight), -1, np.int64)
    open_ = np.arange(len(weight))
    for keys in levels:
        order = open_[np.lexsort((weight[open_], keys[open_]))]
        key = keys[order]
        starts = np.flatnonzero(np.r_[True, key[1:] != key[:-1]]) if len(order) else np.zeros(0, np.int64)
        place = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
        first = np.flatnonzero((place[:-1] % 2 == 0) & (key[1:] == key[:-1]))
        a, b = order[first], order[first + 1]
        mate[a], mate[b] = b, a
        open_ = order[mate[order] < 0]
    return mate.tolist()


def halves(left: Sequence[Ints], right: Sequence[Ints], weight: Floats) -> NDArray[np.bool_]:
    """(E): a colour of two for each edge; in each group of either side the colours differ by one edge at most."""
    sides = (mates(left, weight), mates(right, weight))
    colour = [-1] * len(weight)
    for start in range(len(weight)):
        if colour[start] >= 0:
            continue
        colour[start] = 0
        for first in (0, 1):
            edge, side, value = start, first, 0
            while True:
                edge, side, value = sides[side][edge], 1 - side, 1 - value
                if edge < 0 or colour[edge] >= 0:
                    break
                colour[edge] = value
    return np.array(colour, bool)


def spread(left: Ints, right: Ints, finer: Ints, weight: Floats, colours: int) -> Ints:
    """(E): one of ``colours`` for each edge, even at every vertex of both sides; exactly so where ``colours`` is a power of two.

    ``finer`` (a job, say) is spread evenly at each vertex too, as far as that goes.
    """
    chosen = np.zeros(len(left), np.int64)
    fine = (left * (int(finer.max(initial=0)) + 1) + finer, right * (int(finer.max(initial=0)) + 1) + finer)
    todo = [(np.arange(len(left)), 0, colours)]
    while todo:
        edges, first, many = todo.pop()
        if many == 1 or not len(edges):
            chosen[edges] = first
        elif many % 2:
            chosen[edges] = first + _in_turns(left[edges], right[edges], weight[edges], many)
        else:
            levels = [(fine[side][edges], (left, right)[side][edges]) for side in (0, 1)]
            second = halves(levels[0], levels[1], weight[edges])
            todo += [(edges[~second], first, many // 2), (edges[second], first + many // 2, many // 2)]
    return chosen


def _in_turns(left: Ints, right: Ints, weight: Floats, colours: int) -> Ints:
    """For an odd number: heaviest first, each where both its ends have least."""
    loads = (np.zeros((int(left.max()) + 1, colours)), np.zeros((int(right.max()) + 1, colours)))
    chosen = np.zeros(len(left), np.int64)
    for edge in np.argsort(-weight, kind="stable").tolist():
        a, b = loads[0][left[edge]], loads[1][right[edge]]
        best = int((np.maximum(a, b) + 1e-3 * (a + b)).argmin())
        a[best] += weight[edge]
        b[best] += weight[edge]
        chosen[edge] = best
    return chosen
