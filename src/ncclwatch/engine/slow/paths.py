"""What the critical paths of a running job's iterations say beside a verdict of slowness; it accuses nobody by itself.

Only where the shims tell when each operation ran on each GPU, and of iterations that were seen whole (``gpu_iterations``).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ncclwatch.engine.job import Job
from ncclwatch.engine.slow.cadence import Cadence
from ncclwatch.engine.slow.critical_path import LEAST_SHARE, Anomaly
from ncclwatch.engine.slow.gpu_iterations import GpuIterations, TimedIteration
from ncclwatch.engine.slow.iteration_path import Blame, IterationAnalysis
from ncclwatch.engine.topology.model import Role, Topology

KEPT = 32
TOLD = 3
HEALTHY = 2
"""Iterations that must have been seen whole while the job ran as usual (by the calls)."""
LEAST_S = 0.002
"""Begins and ends are seen by polling threads."""
OTHER_PATTERN = 8
"""Iterations of another making in a row after which everything is learned anew."""


@dataclass(frozen=True, slots=True)
class SlowIteration:
    """One slow iteration: what is to blame on its critical path, and what took long and cost nothing."""

    time: float
    duration: float
    usual: float
    operations: int
    blames: list[Blame]
    harmless: list[Anomaly]
    names: dict[int, tuple[int, str, int]]
    """Group, function, and how many were before it, of the operations that are named."""
    rank: dict[int, int]
    """Of those operations, the place among the job's members."""


@dataclass(slots=True)
class Paths:
    """The slow iterations of one job."""

    iterations: GpuIterations = field(default_factory=GpuIterations)
    analysis: IterationAnalysis = field(default_factory=lambda: IterationAnalysis(healthy=HEALTHY, follow=True))
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
            if self._others >= OTHER_PATTERN:
                self.analysis, self._others = IterationAnalysis(healthy=HEALTHY, follow=True), 0
            return
        self._others = 0
        error = self._clock_error(iteration)
        if not np.isfinite(error):
            return
        result = self.analysis.look(
            iteration, (iteration.nodes, iteration.before), least_share=0.0, least_s=LEAST_S, clock_error_s=error,
            with_slack=True,
            launched=iteration.launched, learn=iteration.called_s <= limit_s,
        )  # fmt: skip
        if result is None:
            return
        groups = [group for group, _, _ in iteration.names]
        blames, harmless = self.analysis.blame(result, groups), result.harmless[:TOLD]
        named = {blame.worst for blame in blames} | {anomaly.operation for anomaly in harmless}
        self.kept.append(
            SlowIteration(
                float(iteration.end.max()), self.analysis.duration, self.analysis.usual, len(groups), blames,
                harmless, {at: iteration.names[at] for at in named}, {at: int(iteration.rank[at]) for at in named},
            )
        )  # fmt: skip

    def _clock_error(self, iteration: TimedIteration) -> float:
        """How wrong a difference between times of two nodes may be, seconds."""
        clocks = self.analysis.clocks
        nodes = np.unique(iteration.nodes).tolist()
        if clocks is None or len(nodes) < 2:
            return 0.0
        return max(clocks.error(nodes[0], node) for node in nodes[1:])

    def lines(self, job: Job, since: float, topology: Topology | None = None) -> list[str]:
        """What the slow iterations since a moment (wall time) have in common, costliest first; ``topology`` names groups."""
        slow = [one for one in self.kept if one.time >= since]
        if not slow:
            return []
        parts: dict[tuple[int, bool], list[tuple[SlowIteration, Blame]]] = defaultdict(list)
        for one in slow:
            for blame in one.blames:
                parts[blame.where, blame.work].append((one, blame))
        lost = sum(one.duration - one.usual for one in slow) / len(slow)
        average = sum(one.duration for one in slow) / len(slow)
        cost = {key: sum(blame.cost for _, blame in found) / len(slow) for key, found in parts.items()}
        seen = f"{slow[-1].operations} operations on {len(job.members)} GPUs, timed by the shim"
        lines = []
        for key in sorted(cost, key=lambda key: -cost[key])[:TOLD]:
            if cost[key] < LEAST_SHARE * lost:
                continue
            one, blame = parts[key][-1]
            without = f"without it: {max(0.0, average - cost[key]):.2f} s instead of {average:.2f} s"
            often = f"in {len(parts[key])} of {len(slow)} slow iterations"
            lines.append(f"critical path of an iteration ({seen}): {self._what(job, one, blame, topology)}, {often}; {without}")
        for anomaly in slow[-1].harmless[:1]:
            place = _operation(job, slow[-1].names[anomaly.operation], topology)
            label = job.members[slow[-1].rank[anomaly.operation]].label
            took = f"took {anomaly.excess:.2f} s longer and cost nothing: {anomaly.slack:.2f} s of slack"
            lines.append(f"off the critical path: {label}'s work before {place} {took}")
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

    @staticmethod
    def _what(job: Job, one: SlowIteration, blame: Blame, topology: Topology | None) -> str:
        place = _operation(job, one.names[blame.worst], topology)
        longer = f"{blame.excess:.2f} s longer than usual" + (f" in {blame.segments} places" if blame.segments > 1 else "")
        most = ", most" if blame.segments > 1 else ""
        if not blame.work:
            return f"transfers take {longer}{most} in {place}"
        label = job.members[blame.where].label
        host = f", {blame.host_s:.2f} s of it because its host had not called" if blame.host_s >= 0.1 * blame.excess else ""
        return f"{label} takes {longer}{most} before {place}{host}"


def _operation(job: Job, name: tuple[int, str, int], topology: Topology | None) -> str:
    number, function, before = name
    group, known = job.groups.get(number), topology.by_id.get(number) if topology is not None else None
    if group is None:
        return f"{function} {before + 1}"
    role = f"{known.role} " if known is not None and known.role is not Role.UNSURE else ""
    return f"{function} {before + 1} of the iteration on the {role}communicator {group.hash:016x} ({group.nranks} ranks)"
