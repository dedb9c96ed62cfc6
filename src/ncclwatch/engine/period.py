"""The period of a sequence of calls: which calls end an iteration, and how many calls that has.

Found by what marks the end of one: a call, or a short run of calls (where an iteration ends by nothing but a change of what is
called, as in GPipe without data parallelism), that comes back at a constant number of calls. What lies between may be anything:
sizes that depend on data, threads whose calls interleave in any order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint64]
Places = NDArray[np.int64]

RUNS = (1, 2, 4, 8, 16)
"""Bound: calls in a run that marks an end."""
GAPS = 2
"""Bound: equal gaps that make a period; a third occurrence is the first that could have contradicted the two before."""

_FACTOR = 0x9E3779B97F4A7C15
"""Fact: an odd number near 2^64 over the golden ratio (Fibonacci hashing): what differs in one call stays apart in the sum."""


class Period(NamedTuple):
    """An iteration of ``length`` calls ends with ``marker``, the fingerprint of a run of ``run`` calls; length 0: none."""

    length: int = 0
    run: int = 1
    marker: int = 0


NONE = Period()


def fingerprints(tokens: Tokens, run: int) -> Tokens:
    """For each call a number for the run of so many calls that ends with it; at the beginning for as many as there are."""
    found = tokens.copy()
    for back in range(1, min(run, len(tokens))):
        found[back:] += tokens[:-back] * np.uint64(pow(_FACTOR, back, 1 << 64))
    return found


def find(tokens: Tokens, times: NDArray[np.float64]) -> Period:
    """The period that has held for most of a sequence up to its end; of such the longest. O(n log n).

    An inner loop (layers, micro-batches) has a period too, but it breaks off where the loop ends. ``times`` decide where nothing
    else says which call is an iteration's last: the one after which the longest pause is.
    """
    best, held = NONE, 0
    for run in RUNS:
        # A longer run must show a period that has held for an iteration longer.
        if held + best.length >= len(tokens):
            break
        marks = fingerprints(tokens, run)
        _, kind, numbers = np.unique(marks, return_inverse=True, return_counts=True)
        places = np.argsort(kind, kind="stable")
        last = np.cumsum(numbers) - 1
        first = last - numbers + 1
        gaps = np.diff(places, prepend=0)
        gap = gaps[last]
        # Where the newest equal gaps of each kind begin; before the first of a kind there is no gap.
        odd = gaps != np.repeat(gap, numbers)
        odd[first] = True
        begin = np.maximum.reduceat(np.where(odd, np.arange(len(places)), 0), first)
        live = np.flatnonzero((last - begin >= GAPS) & (len(tokens) - places[last] <= 2 * gap))
        if not len(live):
            continue
        end, gap = places[last[live]], gap[live]
        reach = np.minimum(end + gap, len(tokens)) - np.maximum(places[begin[live]] - gap + 1, 0)
        if reach.max() <= held + best.length:
            continue
        # Nobody saw where between two calls of a kind its period began.
        length, held = int(gap[reach + gap > reach.max()].max()), int(reach.max())
        # Of what comes once an iteration the last of the cluster: the one with the most calls from it to the next.
        ends = end[(gap == length) & (reach + gap > held)]
        ends = ends[np.argsort(ends % length)]
        after = np.diff(ends % length, append=ends[0] % length + length)
        ends = ends[after == after.max()]
        pause = times[ends - length + 1] - times[ends - length]
        best = Period(length, run, int(marks[ends[np.argmax(pause)]]))
    return best
