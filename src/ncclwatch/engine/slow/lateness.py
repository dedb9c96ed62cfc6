"""Hosts that begin iterations later than the others: pauses of a garbage collector, a slow data loader.

Between two iterations nothing is queued on the GPUs, so a host that makes the first call of an iteration late holds everybody
up by as much. That is only so where hosts wait for their GPUs once an iteration, so it is believed only if the iterations a rank
was late in were longer by it. A collective that ends late for a rank makes it begin late as well: lateness alone accuses nobody
(``blame``). Times of different nodes are compared with what they usually differ by; clock offsets cancel.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.cadence import Cadence

LEAST_S = 0.01
LEAST_SHARE = 0.05
"""Of the normal iteration: less is no lateness."""
CLOSE = 0.5
"""Of the normal iteration: so far apart at most do processes begin the same one while nothing is wrong."""
ENOUGH = 3
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
    usual: NDArray[np.float64] | None = None
    """By how much each usually begins after one of them, in seconds; ``None`` where no healthy past was at hand."""


def measure(
    cadences: Sequence[Cadence | None],
    since: Sequence[float],
    normal_s: float,
    equal: NDArray[np.int64],
    known_usual: NDArray[np.float64] | None = None,
) -> Lateness:
    """Lateness since a moment (seconds on each process's own clock); zeros where it cannot be told.

    Ranks are compared with their equals (``equal`` numbers sets of them, −1: none): stages of a pipeline end iterations at times
    of their own. ``known_usual`` is what was usual when the healthy past was still at hand. O(processes × iterations).
    """
    size = len(cadences)
    nothing = Lateness(np.zeros(size), np.zeros(size, np.int64), 0, np.zeros(size))
    ends = [np.array([i.end for i in c.iterations]) if c is not None else np.zeros(0) for c in cadences]
    known = [at for at in range(size) if len(ends[at]) >= 3]
    if len(known) < 2:
        return nothing
    reference = max(known, key=lambda at: len(ends[at]))
    shifts = np.array(since) - since[reference]
    numbered = [{n: b - shifts[at] for n, b in c.begins.items()} if c is not None else {} for at, c in enumerate(cadences)]
    iterations = list(cadences[reference].iterations)  # type: ignore[union-attr]  # it is known
    begins = np.array([i.begin for i in iterations])
    table = np.full((size, len(begins)), np.nan)
    for at in known:
        ahead = _ahead(numbered[reference], numbered[at], since[reference], normal_s)
        if ahead is not None:
            table[at] = [numbered[at].get(i.number + ahead, np.nan) - i.begin for i in iterations]
    now = begins >= since[reference] - 1e-9
    complete = np.isfinite(table[known]).mean(axis=0) >= 0.75
    now &= complete
    if np.count_nonzero(now) < 3:
        return nothing
    usual = known_usual
    if np.count_nonzero(~now & complete) >= ENOUGH:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            usual = np.nanmedian(table[:, ~now & complete], axis=1)
    relative = table if usual is None else table - np.where(np.isnan(usual), 0.0, usual)[:, None]
    for number in np.unique(equal):
        members = equal == number
        fellows = np.count_nonzero(members)
        if number < 0 or fellows < 2 or (fellows == 2 and (usual is None or np.isnan(usual[members]).any())):
            relative[members] = 0.0  # of two that differ nobody knows which is late, without a past of theirs
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            common = np.nanmedian(relative[members], axis=0) if fellows > 2 else np.nanmin(relative[members], axis=0)
        relative[members] -= common
    late = np.where(np.isnan(relative), 0.0, relative)[:, now]
    durations = (ends[reference] - begins)[now]
    counts = late > max(LEAST_S, LEAST_SHARE * normal_s)
    result = Lateness(np.zeros(size), counts.sum(axis=1), int(np.count_nonzero(now)), np.zeros(size), usual)
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


def _ahead(reference: Mapping[int, float], own: Mapping[int, float], since: float, normal_s: float) -> int | None:
    """By how much a process numbers its iterations higher than the reference does; ``None`` where that is not plain.

    Nobody can begin an iteration before all have ended the one before but for a moment, so the beginnings of one iteration lay
    close together while the job was healthy; since it is slow they may lie more than half an iteration apart.
    """
    before = {number: begin for number, begin in reference.items() if begin < since}
    compared = before if len(before) >= ENOUGH else reference
    if not own or not compared:
        return None
    numbers, begins = np.array(list(own)), np.array(list(own.values()))
    candidates = {int(numbers[np.argmin(np.abs(begins - begin))]) - number for number, begin in compared.items()}
    best: tuple[float, int] | None = None
    for ahead in sorted(candidates):
        gaps = [abs(own[number + ahead] - begin) for number, begin in compared.items() if number + ahead in own]
        if len(gaps) >= min(ENOUGH, len(compared)):
            best = min(best or (np.inf, 0), (float(np.median(gaps)), ahead))
    return best[1] if best is not None and best[0] < CLOSE * normal_s else None
