"""The critical path of an iteration, slack, and what on the path took longer than it should.

MegaTrace III-C and VenusTrace 3.3 with Appendix A: only what lies on the path costs time; what waits for something later anyway
is absorbed and harmless. Thresholds alpha and beta as there (see ``baselines``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.graph import Indices, Structure, Times, Weights, ranges

BETA = 0.5
"""A segment is anomalous that takes this much longer than it should (MegaTrace's m)."""
LEAST_SHARE = 0.1
"""And that costs this share of what the iteration lost."""


@dataclass(frozen=True, slots=True)
class Element:
    """One element of the path: the work before an operation, or the operation's transfer."""

    operation: int
    work: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A segment that took longer than it should: ``slack`` seconds could have been absorbed, 0 on the path."""

    operation: int
    work: bool
    seconds: float
    expected: float
    slack: float = 0.0

    @property
    def excess(self) -> float:
        """Seconds more than it should take."""
        return self.seconds - self.expected


@dataclass(slots=True)
class PathResult:
    """What an iteration's analysis found, costliest first; ``harmless`` are anomalies that bubbles absorbed."""

    duration: float
    normal: float
    path: list[Element]
    culprits: list[Anomaly] = field(default_factory=list)
    harmless: list[Anomaly] = field(default_factory=list)


def critical_path(structure: Structure, weights: Weights) -> list[Element]:
    """Walk back from the last end: through each operation to whoever began last, and through its work to what it did before.

    O(path × group).
    """
    path: list[Element] = []
    at = int(np.argmax(weights.end))
    for _ in range(len(structure)):
        path.append(Element(at, False, float(weights.transfer[at])))
        needed = structure.depends_on(at)
        at = int(needed[np.argmax(weights.begin[needed])])
        path.append(Element(at, True, float(weights.work[at])))
        at = int(structure.previous[at])
        if at < 0:
            break
    path.reverse()
    return path


def slack(structure: Structure, weights: Weights) -> Times:
    """How much later each operation's work could end without delaying the end of the iteration, seconds; shape (operations,).

    The latest-start pass of VenusTrace's Algorithm 3 over the levels in reverse.
    """
    finish = float(weights.end.max())
    latest_end = np.where(structure.following < 0, finish, np.inf)
    latest_begin = np.full(len(structure), np.inf)
    by_set = np.argsort(structure.set_of, kind="stable")
    users = np.searchsorted(structure.set_of[by_set], np.arange(structure.sets + 1))
    for members, begins, sets in reversed(structure.levels()):
        done = by_set[ranges(users[sets], users[sets + 1])]
        following = structure.following[done]
        more = following >= 0
        latest_end[done[more]] = latest_begin[following[more]] - weights.work[following[more]]
        counts = users[sets + 1] - users[sets]
        used = counts > 0
        room = np.full(len(sets), np.inf)
        if used.any():
            starts = np.concatenate([[0], np.cumsum(counts[used])[:-1]])
            room[used] = np.minimum.reduceat((latest_end - weights.transfer)[done], starts)
        sizes = np.diff(np.append(begins, len(members)))
        np.minimum.at(latest_begin, members, np.repeat(room, sizes))
    return latest_begin - weights.begin


def analyse(
    structure: Structure,
    weights: Weights,
    expected_work: Times,
    expected_transfer: Times,
    normal: float,
    start: float,
    *,
    beta: float = BETA,
    least_share: float = LEAST_SHARE,
    least_s: float = 0.0,
    clock_error_s: float = 0.0,
    with_slack: bool = False,
) -> PathResult:
    """Blame what on the critical path took longer than expected; ``normal`` is the iteration's usual duration, seconds.

    A culprit costs ``least_share`` of what is lost; 0 where the caller adds many small ones up. Work is a difference of times of
    one rank; a transfer's may be wrong by ``clock_error_s``.
    """
    duration = float(weights.end.max()) - start
    path = critical_path(structure, weights)
    lost = max(duration - normal, 0.0)
    result = PathResult(duration, normal, path)
    on_path: set[tuple[int, bool]] = set()
    for element in path:
        on_path.add((element.operation, element.work))
        expected = float((expected_work if element.work else expected_transfer)[element.operation])
        excess = element.seconds - expected
        least = least_s if element.work else max(least_s, clock_error_s)
        if excess > max(beta * max(expected, 0.0), least) and excess >= least_share * lost:
            result.culprits.append(Anomaly(element.operation, element.work, element.seconds, expected))
    result.culprits.sort(key=lambda anomaly: -anomaly.excess)
    if with_slack:
        result.harmless = _harmless(structure, weights, (expected_work, expected_transfer), on_path, (beta, least_s))
    return result


def _harmless(
    structure: Structure,
    weights: Weights,
    expected: tuple[Times, Times],
    on_path: set[tuple[int, bool]],
    thresholds: tuple[float, float],
) -> list[Anomaly]:
    beta, least_s = thresholds
    excess = weights.work - expected[0]
    odd: Indices = np.flatnonzero(excess > np.maximum(beta * np.maximum(expected[0], 0.0), max(least_s, 1e-3)))
    if not len(odd):
        return []
    room = slack(structure, weights)
    found = [
        Anomaly(at, True, float(weights.work[at]), float(expected[0][at]), float(room[at]))
        for at in odd.tolist()
        if (at, True) not in on_path
    ]
    return sorted(found, key=lambda anomaly: -anomaly.excess)


def straggling(weights: Weights, replica: NDArray[np.integer], operations: Indices, near: float = 0.02) -> NDArray[np.bool_]:
    """Replicas of the model (pipeline groups) that come last to the operations that join them, within ``near`` of the way.

    ``operations`` are those joining ones (the gradients' first); ``replica`` is of every operation. Graph work on the others is
    left out: whoever does not come last cannot have delayed the rest. Shape (replicas,).
    """
    number = int(replica.max()) + 1
    arrival = np.full(number, -np.inf)
    np.maximum.at(arrival, replica[operations], weights.begin[operations])
    last = arrival.max()
    first = float(weights.begin.min())
    result: NDArray[np.bool_] = arrival >= last - near * (last - first)
    return result
