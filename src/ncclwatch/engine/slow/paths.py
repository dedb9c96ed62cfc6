"""Iterations of one job against what they usually are: what lies on the critical paths of slow ones, and what each culprit costs.

Only where the shims tell when each operation ran on each GPU, and of iterations that were seen whole (``gpu_iterations``). It
stands beside a verdict of slowness and accuses nobody by itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ncclwatch.engine.job import Job
from ncclwatch.engine.slow import iteration_graph as graph
from ncclwatch.engine.slow.cadence import Cadence
from ncclwatch.engine.slow.clocks import ClockModel, estimate
from ncclwatch.engine.slow.gpu_iterations import GpuIterations, TimedIteration
from ncclwatch.engine.slow.iteration_graph import Anomaly, Indices, Operations, PathResult, Times
from ncclwatch.engine.topology.model import Role, Topology

MEGATRACE_GATE = 0.9
"""Fact: MegaTrace III-C, VenusTrace 3.3: at or above this share of the usual speed an iteration is healthy and not analysed."""
HEALTHY = 2
"""Unit: iterations. From: one says nothing of what is the rule: so many are learned before one may be called slow."""
LEARNED, KEPT = 8, 32
"""Bound: healthy iterations of which the medians are what is usual, and slow iterations that are kept (memory)."""
CLOCK_EVERY = 6
"""Bound: iterations by which clocks are set, and after which they are set anew, for they drift (cost: each is one estimate)."""
LEAST_SHARE = 0.1
"""Unit: share of what an iteration loses. From: chosen: a culprit that explains less is not told; ten parts are worth reading."""
TOLD = 3
"""Bound: culprits that are told."""


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
    worst: int
    host_s: float = 0.0


@dataclass(slots=True)
class IterationAnalysis:
    """Learns an iteration and judges each one; times are corrected by clocks that are estimated from the operations themselves.

    ``gate``: an iteration above this share of the usual speed is healthy and learned (MegaTrace).
    """

    gate: float = MEGATRACE_GATE
    beta: float = graph.BETA
    structure: graph.Structure | None = None
    clocks: ClockModel = field(default_factory=ClockModel)
    duration: float = 0.0
    """Of the last iteration, seconds."""
    _healthy: deque[tuple[float, graph.Weights]] = field(default_factory=lambda: deque(maxlen=LEARNED))
    _sample: deque[tuple[Indices, Indices, Times, Times]] = field(default_factory=lambda: deque(maxlen=CLOCK_EVERY))
    _taken: int = 0
    _weights: graph.Weights | None = None
    _idle: Times | None = None
    """For how long before each operation its host had not launched it, while its GPU had nothing else to do, seconds."""
    _start: float = 0.0
    _ended: float | None = None
    _shape: tuple[Indices, Indices, Indices] | None = None

    @property
    def learned(self) -> bool:
        """Whether enough healthy iterations were seen."""
        return len(self._healthy) >= HEALTHY

    @property
    def usual(self) -> float:
        """Duration of the healthy iterations, seconds."""
        return float(np.median([duration for duration, _ in self._healthy])) if self._healthy else self.duration

    def fits(self, observed: Operations) -> bool:
        """Whether an iteration is made of the same operations as those before."""
        now = (observed.rank, observed.joint, observed.needs)
        return self._shape is None or all(np.array_equal(a, b) for a, b in zip(self._shape, now, strict=True))

    def look(
        self, observed: Operations, before: Times | None = None, launched: Times | None = None, learn: bool = True
    ) -> PathResult | None:  # fmt: skip
        """Take an iteration, which must fit: a result if it is slow enough to be analysed.

        By operation: ``before`` is when its rank ended the iteration before (else the last one taken counts), ``launched`` when
        its host launched it. What is known to be slow is not to be learned (``learn``).
        """
        if self.structure is None:
            self._shape = (observed.rank, observed.joint, observed.needs)
            self.structure = graph.build(*self._shape)
        self._set_clocks(observed)
        nodes = np.unique(observed.node).tolist()
        error = max(self.clocks.error(nodes[0], node) for node in nodes)
        if not np.isfinite(error):
            return None
        correct = self.clocks.correct
        begin, end = correct(observed.node, observed.begin), correct(observed.node, observed.end)
        start = float(correct(observed.node, before).max()) if before is not None else self._ended
        self._start = start = float(begin.min()) if start is None else start
        self._ended = float(end.max())
        self.duration = self._ended - start
        if not self.duration > 0:
            return None
        weights = self._weights = graph.weigh(self.structure, begin, end, start)
        self._idle = None
        if launched is not None:
            self._idle = np.maximum(correct(observed.node, launched) - (weights.begin - weights.work), 0.0)
        if not self.learned or self.usual / self.duration >= self.gate:
            if learn:
                self._healthy.append((self.duration, weights))
            return None
        work = np.median([one.work for _, one in self._healthy], axis=0)
        transfer = np.median([one.transfer for _, one in self._healthy], axis=0)
        return graph.analyse(self.structure, weights, (work, transfer), beta=self.beta, clock_error_s=error)

    def without(self, anomalies: Iterable[Anomaly]) -> float:
        """What the last iteration would have taken without some anomalies, seconds."""
        if self.structure is None or self._weights is None:
            raise ValueError("no iteration was looked at")
        return graph.duration_without(self.structure, self._weights, anomalies, self._start)

    def blame(self, result: PathResult, observed: Operations, group_of: Sequence[int]) -> list[Blame]:
        """The culprits of the last iteration added up: work by rank, transfers by group; what explains little is left out."""
        parts: dict[tuple[int, bool], list[Anomaly]] = defaultdict(list)
        for anomaly in result.culprits:
            where = int(observed.rank[anomaly.operation]) if anomaly.work else group_of[anomaly.operation]
            parts[where, anomaly.work].append(anomaly)
        found = []
        for (where, work), anomalies in parts.items():
            excess = sum(anomaly.excess for anomaly in anomalies)
            if excess < LEAST_SHARE * max(self.duration - self.usual, 0.0):
                continue
            cost = max(0.0, self.duration - self.without(anomalies))
            worst = max(anomalies, key=lambda anomaly: anomaly.excess).operation
            idle = self._idle if work else None
            host = sum(min(a.excess, float(idle[a.operation])) for a in anomalies) if idle is not None else 0.0
            found.append(Blame(where, work, len(anomalies), excess, cost, worst, host))
        return sorted(found, key=lambda one: -one.cost)

    def _set_clocks(self, observed: Operations) -> None:
        """Estimate clocks by the newest iterations: by each of the first, then once in a while."""
        if self._taken < CLOCK_EVERY or self._taken % CLOCK_EVERY == 0:
            self._sample.append(_sides(observed))
            node, numbers, begin, end = (list(column) for column in zip(*self._sample, strict=True))
            size = 1 + max(int(number.max(initial=0)) for number in numbers)
            apart = [number + size * iteration for iteration, number in enumerate(numbers)]
            self.clocks = estimate(*(np.concatenate(column) for column in (node, apart, begin, end)))
        self._taken += 1


def _sides(observed: Operations) -> tuple[Indices, Indices, Times, Times]:
    """An iteration's operations as ``clocks.estimate`` takes them: of a message the send's begin and the receive's end."""
    joint = observed.joint >= 0
    receives, sends = observed.needs.T
    unknown = np.full(len(sends), np.nan)
    messages = 1 + int(observed.joint.max(initial=-1)) + np.arange(len(sends))
    return (
        np.concatenate([observed.node[joint], observed.node[sends], observed.node[receives]]),
        np.concatenate([observed.joint[joint], messages, messages]),
        np.concatenate([observed.begin[joint], observed.begin[sends], unknown]),
        np.concatenate([observed.end[joint], unknown, observed.end[receives]]),
    )


@dataclass(frozen=True, slots=True)
class SlowIteration:
    """One slow iteration: what is to blame on its critical path, and what took long and cost nothing."""

    time: float
    duration: float
    usual: float
    operations: int
    blames: list[Blame]
    harmless: list[Anomaly]
    named: dict[int, tuple[int, tuple[int, str, int]]]
    """Of the operations that are named the rank (place among the job's members), and group, function and how many were before."""


@dataclass(slots=True)
class Paths:
    """The slow iterations of one job."""

    iterations: GpuIterations = field(default_factory=GpuIterations)
    analysis: IterationAnalysis = field(default_factory=IterationAnalysis)
    kept: deque[SlowIteration] = field(default_factory=lambda: deque(maxlen=KEPT))
    problem: str = ""
    _others: int = 0

    def take(self, job: Job, cadences: Sequence[Cadence | None], limit_s: float) -> None:
        """Take what the newest samples show; iterations that last longer than ``limit_s`` by the calls are known to be slow."""
        for iteration in self.iterations.take(job, cadences):
            self._look(iteration, limit_s)
        self.problem = self.iterations.problem
        if not self.problem and not self.analysis.learned:
            self.problem = f"fewer than {HEALTHY} healthy iterations were seen whole"

    def _look(self, iteration: TimedIteration, limit_s: float) -> None:
        if not self.analysis.fits(iteration):
            self._others += 1
            if self._others >= LEARNED:
                self.analysis, self._others = IterationAnalysis(), 0
            return
        self._others = 0
        result = self.analysis.look(iteration, iteration.before, iteration.launched, learn=iteration.called_s <= limit_s)
        if result is None:
            return
        blames = self.analysis.blame(result, iteration, [group for group, _, _ in iteration.names])
        harmless = result.harmless[:1]
        chosen = {blame.worst for blame in blames} | {anomaly.operation for anomaly in harmless}
        named = {at: (int(iteration.rank[at]), iteration.names[at]) for at in chosen}
        time, size = float(iteration.end.max()), len(iteration.names)
        self.kept.append(SlowIteration(time, self.analysis.duration, self.analysis.usual, size, blames, harmless, named))

    def lines(self, job: Job, since: float, topology: Topology | None = None) -> list[str]:
        """What the slow iterations since a moment (wall time) have in common, costliest first; ``topology`` names groups."""
        slow = [one for one in self.kept if one.time >= since]
        if not slow:
            return []
        parts: dict[tuple[int, bool], list[tuple[SlowIteration, Blame]]] = defaultdict(list)
        for one in slow:
            for blame in one.blames:
                parts[blame.where, blame.work].append((one, blame))
        average = sum(one.duration for one in slow) / len(slow)
        lost = average - sum(one.usual for one in slow) / len(slow)
        cost = {key: sum(blame.cost for _, blame in found) / len(slow) for key, found in parts.items()}
        seen = f"{slow[-1].operations} operations on {len(job.members)} GPUs, timed by the shim"
        lines = []
        for key in sorted(cost, key=lambda key: -cost[key])[:TOLD]:
            if cost[key] < LEAST_SHARE * lost:
                continue
            what = _what(job, *parts[key][-1], topology)
            without = f"without it: {max(0.0, average - cost[key]):.2f} s instead of {average:.2f} s"
            often = f"in {len(parts[key])} of {len(slow)} slow iterations"
            lines.append(f"critical path of an iteration ({seen}): {what}, {often}; {without}")
        for anomaly in slow[-1].harmless:
            rank, name = slow[-1].named[anomaly.operation]
            took = f"took {anomaly.excess:.2f} s longer and cost nothing: {anomaly.slack:.2f} s of slack"
            place = _operation(job, name, topology)
            lines.append(f"off the critical path: {job.members[rank].label}'s work before {place} {took}")
        return lines

    def costs(self, since: float) -> dict[int, float]:
        """By place among the job's members: what their work costs a slow iteration on average since a moment, seconds."""
        slow = [one for one in self.kept if one.time >= since]
        total: dict[int, float] = defaultdict(float)
        for one in slow:
            for blame in one.blames:
                if blame.work:
                    total[blame.where] += blame.cost / len(slow)
        return dict(total)


def _what(job: Job, one: SlowIteration, blame: Blame, topology: Topology | None) -> str:
    place = _operation(job, one.named[blame.worst][1], topology)
    longer = f"{blame.excess:.2f} s longer than usual" + (f" in {blame.segments} places" if blame.segments > 1 else "")
    most = ", most" if blame.segments > 1 else ""
    if not blame.work:
        return f"transfers take {longer}{most} in {place}"
    label = job.members[blame.where].label
    host = f", {blame.host_s:.2f} s of it because its host had not called" if blame.host_s >= LEAST_SHARE * blame.excess else ""
    return f"{label} takes {longer}{most} before {place}{host}"


def _operation(job: Job, name: tuple[int, str, int], topology: Topology | None) -> str:
    number, function, before = name
    group, known = job.groups.get(number), topology.by_id.get(number) if topology is not None else None
    if group is None:
        return f"{function} {before + 1}"
    role = f"{known.role} " if known is not None and known.role is not Role.UNSURE else ""
    return f"{function} {before + 1} of the iteration on the {role}communicator {group.hash:016x} ({group.nranks} ranks)"
