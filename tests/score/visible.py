"""Whether a slow fault shows at all: told by the job's own iteration times, by a rule that was fixed beforehand.

The rule (docs/scoreboard.md, "What is visible") uses what rank 0 itself prints of each iteration and the moment at which the
fault began, never records or verdicts. A fault shows if the mean iteration since it began is at least a tenth longer than the
mean before, and iterations that had been dealt out at random would differ so much in less than one case of a hundred (permutation
test, one-sided). Of a job that is slow from its start there is no before: there the model of the program says what the fault adds
to an iteration, and that must be a tenth of what is left without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import Scenario, ScoreClass

SLOW_CLASSES = frozenset({ScoreClass.S1, ScoreClass.S2, ScoreClass.S3})
LEAST_EXCESS = 0.10
"""Share of an iteration. Chosen, before anything was judged by it: who runs a job seldom acts on less."""
LEVEL = 0.01
"""Of the permutation test: one healthy job of a hundred would be called slower."""
LEAST_BEFORE = 5
"""Iterations before the fault. How many there must be since, the test itself asks: two can be enough after 13, three after 8."""
EXTREME = 5.0
"""Times the longest iteration before. Where the fault leaves too few iterations for the test, one of these tells: were the times
as heavy-tailed as 1/x^2, the next would be so long in 1 / (5^2 * 6) of the cases after five, which is below ``LEVEL``.
"""
DEALS = 20_000
"""Random deals where there are more ways than that to choose the iterations since."""
START_UP = 1
"""The first iteration makes connections and does not count."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """Whether a fault shows, and by which numbers. ``p`` is None where no test was made."""

    visible: bool
    before_s: float | None
    since_s: float | None
    before: int
    since: int
    p: float | None

    @property
    def text(self) -> str:
        """In a line."""
        means = f"{_seconds(self.before_s)} before ({self.before}), {_seconds(self.since_s)} since ({self.since})"
        return f"{'shows' if self.visible else 'does not show'}: {means}" + ("" if self.p is None else f", p {self.p:.4f}")


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f} s"


def visibility(
    scenario: Scenario, iterations: Sequence[tuple[float, float]], since: float, until: float | None = None
) -> Visibility:
    """By the rule that fits the job: there are iterations before the fault, or it was there from the start."""
    if scenario.faults and all(fault.start_s == 0.0 or fault.iteration == 0 for fault in scenario.faults):
        return shows_from_the_start(scenario, iterations)
    return shows(iterations, since, until)


def shows(iterations: Sequence[tuple[float, float]], since: float, until: float | None = None) -> Visibility:
    """Whether the fault that began at ``since`` shows in iterations given as (seconds, when it ended), watched until ``until``.

    An iteration in which the fault began, and one that had not ended, have no length of their own; what was seen of them since
    counts where that alone is longer than every iteration before.
    """
    counted = list(iterations)[START_UP:]
    before = [took for took, ended in counted if ended <= since]
    after = [took for took, ended in counted if ended - took >= since]
    if len(before) < LEAST_BEFORE:
        return Visibility(False, _mean(before), _mean(after), len(before), len(after), None)
    pieces = [ended - since for took, ended in counted if ended - took < since < ended]
    if until is not None and counted:
        pieces.append(until - max(since, counted[-1][1]))
    after += [piece for piece in pieces if piece > max(before)]
    if not after:
        return Visibility(False, _mean(before), None, len(before), 0, None)
    normal, now = float(np.mean(before)), float(np.mean(after))
    p = chance(np.array(before), np.array(after))
    clear = p < LEVEL or max(after) >= EXTREME * max(before)
    return Visibility(now >= (1 + LEAST_EXCESS) * normal and clear, normal, now, len(before), len(after), p)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def chance(before: NDArray[np.float64], after: NDArray[np.float64]) -> float:
    """Share of all ways to deal the iterations out in which those "since" are as long in the mean or longer. The mean and not
    the ranks of a Mann-Whitney test: pauses strike few iterations, and those hard.
    """
    both = np.concatenate([before, after])
    few = min(len(before), len(after))
    take_after = len(after) <= len(before)
    total = float(after.sum()) if take_after else float(before.sum())
    slack = 1e-9 * float(np.abs(both).sum())
    if math.comb(len(both), few) <= DEALS:
        sums = both[_choices(len(both), few)].sum(axis=1)
        dealt = 0
    else:
        random = np.random.default_rng(0)
        order = random.permuted(np.broadcast_to(both, (DEALS, len(both))).copy(), axis=1)
        sums = order[:, :few].sum(axis=1)
        dealt = 1  # the deal that was seen is one of them
    as_long = (sums >= total - slack) if take_after else (sums <= total + slack)
    return float((as_long.sum() + dealt) / (len(sums) + dealt))


def _choices(of: int, few: int) -> NDArray[np.int64]:
    from itertools import combinations

    return np.array(list(combinations(range(of), few)), dtype=np.int64)


def shows_from_the_start(scenario: Scenario, iterations: Sequence[tuple[float, float]]) -> Visibility:
    """Whether a fault shows that was there before the first iteration.

    What it adds to an iteration follows from its strength and from the program, and the model of the program tells it (SIMULATED,
    with and without the fault); what the machine adds to every iteration, the model does not know. So the seconds that the
    fault adds are set against what is left of the measured median without them.
    """
    counted = [took for took, _ in list(iterations)[START_UP:]]
    added = _iteration_s(scenario) - _iteration_s(replace(scenario, faults=()))
    if not counted:
        return Visibility(False, None, None, 0, 0, None)
    now = float(np.median(counted))
    rest = max(now - added, 1e-9)
    return Visibility(added >= LEAST_EXCESS * rest, rest, now, 0, len(counted), None)


def _iteration_s(scenario: Scenario) -> float:
    """The median iteration of the model."""
    durations = simulate(scenario).durations()[START_UP:]
    return float(np.median(durations[np.isfinite(durations)])) if np.isfinite(durations).any() else math.inf
