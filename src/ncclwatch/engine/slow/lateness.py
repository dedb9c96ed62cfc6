"""Hosts that begin iterations later than the others: pauses of a garbage collector, a slow data loader.

Between two iterations nothing is queued on the GPUs, so a host that makes the first call of an iteration late holds everybody
up by as much. That is only so where hosts wait for their GPUs once an iteration, so it is believed only if the iterations a rank
was late in were longer by it. A collective that ends late for a rank makes it begin late as well: lateness alone accuses nobody
(``blame``). Times of different nodes are compared with what they usually differ by; clock offsets cancel.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.cadence import Cadence

LEAST_S = 0.01
LEAST_SHARE = 0.05
"""Of the normal iteration: less is no lateness."""
BELIEVED = 0.5
"""Part of a rank's lateness by which its iterations must be longer than the others."""


@dataclass(slots=True)
class Lateness:
    """By process: ``share`` of the time that the others wait for its first call, ``late`` iterations of ``seen``, and the mean
    ``seconds`` of a late one.
    """

    share: NDArray[np.float64]
    late: NDArray[np.int64]
    seen: int
    seconds: NDArray[np.float64]


def measure(cadences: Sequence[Cadence | None], since: Sequence[float], normal_s: float, equal: NDArray[np.int64]) -> Lateness:
    """Lateness since a moment (seconds on each process's own clock); zeros where it cannot be told.

    Ranks are compared with their equals (``equal`` numbers sets of them, −1: none): stages of a pipeline end iterations at times
    of their own. O(processes × iterations).
    """
    size = len(cadences)
    nothing = Lateness(np.zeros(size), np.zeros(size, np.int64), 0, np.zeros(size))
    begins = [np.array([i.begin for i in c.iterations]) if c is not None else np.zeros(0) for c in cadences]
    ends = [np.array([i.end for i in c.iterations]) if c is not None else np.zeros(0) for c in cadences]
    known = [at for at in range(size) if len(begins[at]) >= 3]
    if len(known) < 2:
        return nothing
    reference = max(known, key=lambda at: len(begins[at]))
    shifts = np.array(since) - since[reference]
    table = np.full((size, len(begins[reference])), np.nan)
    for at in known:
        own = begins[at] - shifts[at]
        nearest = np.searchsorted(own, begins[reference])
        for side in (nearest - 1, nearest):
            inside = (side >= 0) & (side < len(own))
            gap = np.where(inside, own[np.clip(side, 0, len(own) - 1)] - begins[reference], np.inf)
            better = np.abs(gap) < np.where(np.isnan(table[at]), normal_s * 0.75, np.abs(table[at]))
            table[at] = np.where(better, gap, table[at])
    now = begins[reference] >= since[reference] - 1e-9
    complete = np.isfinite(table[known]).mean(axis=0) >= 0.75
    now &= complete
    if np.count_nonzero(now) < 3:
        return nothing
    usual = np.nanmedian(table[:, ~now & complete], axis=1) if np.count_nonzero(~now & complete) >= 3 else np.zeros(size)
    relative = table - np.where(np.isnan(usual), 0.0, usual)[:, None]
    for number in np.unique(equal):
        members = equal == number
        if number < 0 or np.count_nonzero(members) < 3:
            relative[members] = 0.0  # of two that differ nobody knows which is late
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                relative[members] -= np.nanmedian(relative[members], axis=0)
    late = np.where(np.isnan(relative), 0.0, relative)[:, now]
    durations = (ends[reference] - begins[reference])[now]
    counts = late > max(LEAST_S, LEAST_SHARE * normal_s)
    result = Lateness(np.zeros(size), counts.sum(axis=1), int(np.count_nonzero(now)), np.zeros(size))
    for at in known:
        if result.late[at] < 3:
            continue
        own = counts[at]
        result.seconds[at] = float(late[at][own].mean())
        rest = float(np.median(durations[~own])) if np.count_nonzero(~own) >= 3 else normal_s
        # An iteration's duration counts from the reference's first call: lateness of others lies in it, its own before it.
        length = durations if at != reference else durations + late[at]
        if float(length[own].mean()) - rest >= BELIEVED * result.seconds[at]:
            result.share[at] = float(late[at][own].sum() / length.sum())
    return result
