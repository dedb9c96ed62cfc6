"""Iterations of one job against what they usually are: dependency graph, critical path, and what each culprit on it costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ncclwatch.engine.slow.baselines import MEGATRACE_GATE
from ncclwatch.engine.slow.clocks import ClockModel, estimate
from ncclwatch.engine.slow.critical_path import BETA, LEAST_SHARE, Anomaly, PathResult, analyse
from ncclwatch.engine.slow.graph import Indices, Structure, Times, Weights, build, weigh
from ncclwatch.engine.slow.whatif import duration_without

LEARNED = 6
"""Iterations by which clocks are set."""
HEALTHY = 3
"""Iterations that are learned before one may be called slow, where nothing else says which are healthy."""
KEPT = 8


class Observed(Protocol):
    """What is asked of an iteration (``gpu_iterations.TimedIteration``)."""

    rank: Indices
    node: Indices
    joint: Indices
    needs: Indices
    begin: Times
    end: Times


@dataclass(frozen=True, slots=True)
class Blame:
    """All that one rank's work (or one group's transfers) added to the critical path of an iteration.

    ``excess`` is by how much these took longer than usual, ``cost`` how much shorter the iteration would have been with them as
    usual, seconds; ``worst`` the operation that they were worst before (or in); for ``host_s`` of it the host had called nothing.
    """

    where: int
    work: bool
    segments: int
    excess: float
    cost: float
    without: float
    worst: int
    host_s: float = 0.0


@dataclass(slots=True)
class IterationAnalysis:
    """Learns an iteration and judges each one; times are corrected by clocks that are estimated from the operations themselves.

    ``gate``: an iteration above this share of the usual speed is healthy and learned (MegaTrace).
    """

    gate: float = MEGATRACE_GATE
    beta: float = BETA
    healthy: int = HEALTHY
    follow: bool = False
    """Whether clocks are estimated anew as iterations come, as drift wants it; else by the first."""
    structure: Structure | None = None
    clocks: ClockModel | None = None
    duration: float = 0.0
    """Of the last iteration, seconds."""
    usual: float = 0.0
    previous_end: float | None = None
    _works: deque[Times] = field(default_factory=lambda: deque(maxlen=KEPT))
    _transfers: deque[Times] = field(default_factory=lambda: deque(maxlen=KEPT))
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=31))
    _sample: deque[tuple[Indices, Indices, Times, Times]] = field(default_factory=lambda: deque(maxlen=LEARNED))
    _taken: int = 0
    _weights: Weights | None = None
    _idle: Times | None = None
    """For how long before each operation its host had not launched it, while its GPU had nothing else to do, seconds."""
    _start: float = 0.0
    _shape: tuple[Indices, Indices, Indices] | None = None

    @property
    def learned(self) -> bool:
        """Whether enough healthy iterations were seen."""
        return len(self._durations) >= self.healthy

    def fits(self, observed: Observed) -> bool:
        """Whether an iteration is made of the same operations as those before."""
        if self._shape is None:
            return True
        now = (observed.rank, observed.joint, observed.needs)
        return all(np.array_equal(a, b) for a, b in zip(self._shape, now, strict=True))

    def look(
        self,
        observed: Observed,
        before: tuple[Indices, Times] | None = None,
        *,
        least_share: float = LEAST_SHARE,
        least_s: float = 0.0,
        clock_error_s: float = 0.0,
        with_slack: bool = False,
        launched: Times | None = None,
        learn: bool = True,
    ) -> PathResult | None:
        """Take an iteration, which must fit: a result if it is slow enough to be analysed.

        ``before`` says of some ranks (by node) when their iteration before ended; else the last one that was taken was before.
        ``launched`` is when hosts launched the operations. What is known to be slow is not to be learned (``learn``).
        """
        if self.structure is None:
            self.structure = build(observed.rank, observed.joint, observed.needs)
            self._shape = (observed.rank, observed.joint, observed.needs)
        clocks = self.clocks = self._set_clocks(observed)
        begin, end = clocks.correct(observed.node, observed.begin), clocks.correct(observed.node, observed.end)
        if before is not None:
            start = float(clocks.correct(*before).max())
        else:
            start = self.previous_end if self.previous_end is not None else float(begin.min())
        self.previous_end = float(end.max())
        weights = self._weights = weigh(self.structure, begin, end, start)
        self._start, self.duration = start, float(end.max()) - start
        if not self.duration > 0:
            return None
        self.usual = float(np.median(self._durations)) if self._durations else self.duration
        self._idle = None
        if launched is not None:
            self._idle = np.maximum(clocks.correct(observed.node, launched) - (weights.begin - weights.work), 0.0)
        if len(self._durations) < self.healthy or self.usual / self.duration >= self.gate:
            if not learn:
                return None
            self._works.append(weights.work)
            self._transfers.append(weights.transfer)
            self._durations.append(self.duration)
            return None
        work, transfer = np.median(self._works, axis=0), np.median(self._transfers, axis=0)
        return analyse(
            self.structure, weights, work, transfer, self.usual, start,
            beta=self.beta, least_share=least_share, least_s=least_s, clock_error_s=clock_error_s,
            with_slack=with_slack,
        )  # fmt: skip

    def without(self, anomalies: Sequence[Anomaly]) -> float:
        """What the last iteration would have taken without some anomalies, seconds."""
        if self.structure is None or self._weights is None:
            raise ValueError("no iteration was looked at")
        return duration_without(self.structure, self._weights, anomalies, self._start)

    def blame(self, result: PathResult, group_of: Sequence[int]) -> list[Blame]:
        """The culprits of the last iteration added up: work by rank, transfers by group; what costs little is left out."""
        if self.structure is None:
            return []
        parts: dict[tuple[int, bool], list[Anomaly]] = {}
        for anomaly in result.culprits:
            where = int(self.structure.rank[anomaly.operation]) if anomaly.work else group_of[anomaly.operation]
            parts.setdefault((where, anomaly.work), []).append(anomaly)
        lost = max(result.duration - result.normal, 0.0)
        found = []
        for (where, work), anomalies in parts.items():
            excess = sum(anomaly.excess for anomaly in anomalies)
            if excess < LEAST_SHARE * lost:
                continue
            without = self.without(anomalies)
            worst = max(anomalies, key=lambda anomaly: anomaly.excess).operation
            host = (
                sum(min(a.excess, float(self._idle[a.operation])) for a in anomalies) if work and self._idle is not None else 0.0
            )
            found.append(Blame(where, work, len(anomalies), excess, max(0.0, self.duration - without), without, worst, host))
        return sorted(found, key=lambda one: -one.cost)

    def _set_clocks(self, observed: Observed) -> ClockModel:
        if self.clocks is None or self._taken < LEARNED or (self.follow and self._taken % LEARNED == 0):
            joint = observed.joint >= 0
            self._sample.append((observed.node[joint], observed.joint[joint], observed.begin[joint], observed.end[joint]))
            node, numbers, began, ended = (list(column) for column in zip(*self._sample, strict=True))
            size = 1 + max((int(number.max(initial=0)) for number in numbers), default=0)
            apart = [number + size * iteration for iteration, number in enumerate(numbers)]
            self.clocks = estimate(*(np.concatenate(column) for column in (node, apart, began, ended)))
        self._taken += 1
        return self.clocks
