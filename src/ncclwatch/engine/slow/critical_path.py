"""The dependency graph of an iteration, its critical path against what is usual, and what each culprit costs.

An operation begins when its rank's work before ends, and ends a time after the last of those it needs has begun. Only what is on
the critical path costs time (MegaTrace III-C; VenusTrace 3.3, Appendix A). Arrays are sorted by rank, in program order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ncclwatch.collect.cadence import Cadence, Times
from ncclwatch.engine.slow import gpu_operations
from ncclwatch.engine.slow.detect import ENOUGH
from ncclwatch.engine.slow.gpu_operations import ClockModel, GpuOperations, Indices, Name, Operations, TimedIteration
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.job import Job
from ncclwatch.model.topology import Role, Topology

BETA = 0.5
"""Fact: MegaTrace III-C, parameter m: the share of its expected time by which an anomalous segment is longer."""
MEGATRACE_GATE = 0.9
"""Fact: MegaTrace III-C, VenusTrace 3.3: at or above this share of the usual speed an iteration is healthy, and learned."""
LEARNED, KEPT = 8, 32
"""Bound: healthy iterations of which the medians are what is usual, and slow iterations that are kept (memory)."""
CLOCKED = 6
"""Bound: iterations by which clocks are set (cost)."""
LEAST_SHARE = 0.1
"""Unit: share of what an iteration loses. From: chosen: a culprit that explains less is not told; ten parts are worth reading."""
TOLD = 3
"""Bound: culprits that are told."""


class Structure:
    """Who needs whom, of columns as of :class:`Operations`; the same in every iteration of a pattern.

    ``previous`` and ``following`` operation of the same rank, −1 and the number of operations at the ends. ``set_of``: the set of
    operations whose beginnings an operation needs, itself among them: ``members`` from ``offsets[s]`` to ``offsets[s + 1]``. Each
    set comes after all it needs; those from ``levels[k]`` to ``levels[k + 1]`` need none of each other. Sets that need each other
    in a cycle (which no real iteration has) come first, in no level.
    """

    def __init__(self, rank: Indices, joint: Indices, needs: Indices) -> None:
        self.made_of = rank, joint, needs
        index, first = np.arange(len(rank)), np.r_[True, rank[1:] != rank[:-1]]
        self.previous = np.where(first, -1, index - 1)
        self.following = np.where(np.r_[first[1:], True], len(rank), index + 1)
        self._number(np.where(joint >= 0, joint, -1 - index), needs)
        before: Any = np.zeros(0)
        level = np.zeros(len(rank), np.int64)
        while not np.array_equal(level, before) and level.max() < len(rank):
            before, level = level, self.latest(np.where(self.previous >= 0, level[self.previous] + 1, 0))
        level[level != before] = -1
        self._number(level * len(rank) + self.set_of, needs)
        of_set = level[self.operations[self.users[:-1]]]
        self.levels: list[int] = np.searchsorted(of_set, np.arange(of_set.max() + 2)).tolist()

    def _number(self, key: Indices, needs: Indices) -> None:
        """Number the sets in the order of a key of their operations; ``operations`` are by set, from ``users[s]`` on."""
        self.set_of = np.unique(key, return_inverse=True)[1]
        sets = np.concatenate([self.set_of, self.set_of[needs[:, 0]]])
        self.members = np.concatenate([np.arange(len(key)), needs[:, 1]])[np.argsort(sets, kind="stable")]
        self.operations = np.argsort(self.set_of, kind="stable")
        self.offsets, self.users = (np.r_[0, np.cumsum(np.bincount(numbers))] for numbers in (sets, self.set_of))

    def latest(self, begin: Any) -> Any:
        """For each operation when the last of those it needs begins."""
        return np.maximum.reduceat(begin[self.members], self.offsets[:-1])[self.set_of]

    def replay(self, work: Times, transfer: Times) -> tuple[Times, Times]:
        """Begin and end of every operation if the segments lasted as given, since the iteration began. O(memberships)."""
        begin, end = np.append(np.where(self.previous < 0, work, np.nan), np.nan), np.full(len(self.previous), np.nan)
        work = np.append(work, 0.0)
        for first, last in pairwise(self.levels):
            rows, operations = self.offsets[first : last + 1], self.operations[self.users[first] : self.users[last]]
            latest = np.maximum.reduceat(begin[self.members[rows[0] : rows[-1]]], rows[:-1] - rows[0])
            end[operations] = latest[self.set_of[operations] - first] + transfer[operations]
            begin[self.following[operations]] = end[operations] + work[self.following[operations]]
        return begin[:-1], end


class Anomaly(NamedTuple):
    """A segment (work before an operation, or its transfer) that took ``excess`` seconds more than ``expected``."""

    operation: int
    work: bool
    excess: float
    expected: float


class PathResult(NamedTuple):
    """What is odd in an iteration, the most first: on the critical path, and off it (``harmless``: bubbles absorbed it)."""

    culprits: list[Anomaly]
    harmless: list[Anomaly]


class Weights:
    """Durations of one iteration in seconds, by operation: ``work`` before it begins, ``transfer`` from when the last it needs
    has begun to its end; ``segments`` has shape (2, operations): transfers, work. ``begin`` and ``end`` are as observed, since
    ``start``, when the iteration began; ``duration`` is to the last end.
    """

    def __init__(self, structure: Structure, begin: Times, end: Times, start: float) -> None:
        self.structure, self.begin, self.end, self.start = structure, begin - start, end - start, start
        self.duration = float(self.end.max())
        work = self.begin - np.where(structure.previous >= 0, self.end[structure.previous], 0.0)
        self.segments: Times = np.stack([self.end - structure.latest(self.begin), work])
        self.transfer, self.work = self.segments

    def critical_path(self) -> Iterator[tuple[int, bool]]:
        """From the last end back through each transfer (False) and work (True). O(path × group)."""
        structure, at = self.structure, int(np.argmax(self.end))
        while at >= 0:
            yield at, False
            number = int(structure.set_of[at])
            needed = structure.members[structure.offsets[number] : structure.offsets[number + 1]]
            at = int(needed[np.argmax(self.begin[needed])])
            yield at, True
            at = int(structure.previous[at])

    def analyse(self, usual: Times, *, beta: float = BETA, clock_error_s: float = 0.0) -> PathResult:
        """Blame what took longer than the ``usual`` segments; a transfer may be wrong by ``clock_error_s``."""
        excess = self.segments - usual
        odd = excess > np.maximum(beta * usual, gpu_operations.LEAST_S)
        odd[0] &= excess[0] > clock_error_s
        on_path = [(at, work) for at, work in self.critical_path() if odd[int(work), at]]
        odd[1, [at for at, work in on_path if work]] = False
        off_path = [(at, True) for at in np.flatnonzero(odd[1]).tolist()]

        def worst_first(segments: Iterable[tuple[int, bool]]) -> list[Anomaly]:
            found = [Anomaly(at, work, float(excess[int(work), at]), float(usual[int(work), at])) for at, work in segments]
            return sorted(found, key=lambda one: -one.excess)

        return PathResult(worst_first(on_path), worst_first(off_path))

    def slack(self, operation: int) -> float:
        """How much later an operation's work could end and cost nothing, seconds."""
        delayed = Anomaly(operation, True, 0.0, float(self.work[operation]) + self.duration)
        return 2 * self.duration - self.without([delayed])

    def without(self, anomalies: Iterable[Anomaly]) -> float:
        """Duration of the iteration if the anomalies had taken what is expected of them, everything else unchanged."""
        work, transfer, set_of = self.work.copy(), self.transfer.copy(), self.structure.set_of
        for anomaly in anomalies:
            if anomaly.work:
                work[anomaly.operation] = anomaly.expected
                continue
            # A collective ends for all its ranks: what delayed it delayed every member.
            same = (set_of == set_of[anomaly.operation]) & (transfer > anomaly.expected)
            transfer[same] -= max(0.0, anomaly.excess)
            transfer[anomaly.operation] = anomaly.expected
        return float(self.structure.replay(work, transfer)[1].max())


# --- iterations of one pattern, and what is usual of them -------------------------------------------------------------------


@dataclass(slots=True)
class IterationAnalysis:
    """Learns an iteration and judges each one, in times corrected by clocks that are estimated from its operations."""

    gate: float = MEGATRACE_GATE
    beta: float = BETA
    clocks: ClockModel = field(default_factory=lambda: ClockModel(np.zeros(1)))
    last: Weights | None = None
    """The last iteration."""
    _healthy: deque[Weights] = field(default_factory=lambda: deque(maxlen=LEARNED))
    _clocked: deque[tuple[Indices, Indices, Times, Times]] = field(default_factory=lambda: deque(maxlen=CLOCKED))
    _structure: Structure | None = None

    @property
    def learned(self) -> bool:
        """Whether enough healthy iterations were seen."""
        return len(self._healthy) >= ENOUGH

    @property
    def usual(self) -> float:
        """Duration of the healthy iterations, seconds; nan before there are any."""
        return float(np.median([one.duration for one in self._healthy] or [np.nan]))

    def fits(self, observed: Operations) -> bool:
        """Whether an iteration is made of the same operations as those before."""
        now = (observed.rank, observed.joint, observed.needs)
        return self._structure is None or all(np.array_equal(*pair) for pair in zip(self._structure.made_of, now, strict=True))

    def look(self, observed: Operations, learn: bool = True) -> PathResult | None:
        """Take an iteration, which must fit: a result if it is slow. What is known to be slow is not learned (``learn``)."""
        if self._structure is None:
            self._structure = Structure(observed.rank, observed.joint, observed.needs)
        self._clocked.append(_sides(observed, len(self._clocked) and int(self._clocked[-1][1].max()) + 1))
        self.clocks = gpu_operations.estimate(*(np.concatenate(column) for column in zip(*self._clocked, strict=True)))
        if not np.isfinite(self.clocks.error):
            return None
        begin, end = (self.clocks.correct(observed.node, times) for times in (observed.begin, observed.end))
        start = float(self.last.start + self.last.duration if self.last is not None else begin.min())
        if observed.before is not None:
            start = float(self.clocks.correct(observed.node, observed.before).max())
        self.last = Weights(self._structure, begin, end, start)
        if not self.last.duration > 0:
            return None
        if not self.learned or self.usual / self.last.duration >= self.gate:
            if learn:
                self._healthy.append(self.last)
            return None
        usual = np.median([one.segments for one in self._healthy], axis=0)
        return self.last.analyse(usual, beta=self.beta, clock_error_s=self.clocks.error)

    def idle(self, observed: Operations, operation: int) -> float:
        """For how long before an operation of the last iteration its host had not launched it, while its GPU had no work."""
        if observed.launched is None or self.last is None:
            return 0.0
        launched = self.clocks.correct(observed.node, observed.launched)[operation]
        return max(0.0, float(launched - self.last.start - self.last.begin[operation] + self.last.work[operation]))


def _sides(observed: Operations, first: int) -> tuple[Indices, Indices, Times, Times]:
    """An iteration's operations for ``estimate``, numbered from ``first``: of a message the send's begin, receive's end."""
    joint = observed.joint >= 0
    receives, sends = observed.needs.T
    unknown = np.full(len(sends), np.nan)
    messages = 1 + int(observed.joint.max(initial=-1)) + np.arange(len(sends))
    return (
        np.concatenate([observed.node[joint], observed.node[sends], observed.node[receives]]),
        first + np.concatenate([observed.joint[joint], messages, messages]),
        np.concatenate([observed.begin[joint], observed.begin[sends], unknown]),
        np.concatenate([observed.end[joint], unknown, observed.end[receives]]),
    )


# --- the slow iterations of a running job ------------------------------------------------------------------------------------


class Blame(NamedTuple):
    """What work (or transfers) added to a slow iteration, seconds; without it ``cost`` shorter; ``host_s``: not called yet."""

    where: int
    work: bool
    segments: int
    excess: float
    cost: float
    worst: Name
    host_s: float


class SlowIteration(NamedTuple):
    """One slow iteration; ``harmless`` is what took longest and cost nothing: rank, name, seconds longer, seconds to spare."""

    time: float
    duration: float
    usual: float
    operations: int
    blames: list[Blame]
    harmless: tuple[int, Name, float, float] | None


class Timed(NamedTuple):
    """What the GPUs' own times say of a slow job, where they tell them: whose GPU comes to collectives late; what the critical
    paths of slow iterations have in common, a line each, costliest first; by place among the job's members what their work costs
    such an iteration on average, seconds; why there are no paths, and how well the hosts' clocks can be compared.
    """

    told: bool = False
    starts: Mapping[ProcessKey, gpu_operations.Start] = MappingProxyType({})
    paths: Sequence[str] = ()
    costs: Mapping[int, float] = MappingProxyType({})
    unobserved: Sequence[str] = ()


@dataclass(slots=True)
class Paths:
    """The slow iterations of one job; ``problem``: why there are none, where GPUs tell their times."""

    gpus: GpuOperations = field(default_factory=GpuOperations)
    analysis: IterationAnalysis = field(default_factory=IterationAnalysis)
    kept: deque[SlowIteration] = field(default_factory=lambda: deque(maxlen=KEPT))
    problem: str = ""
    _others: int = 0

    def take(self, job: Job, cadences: Sequence[Cadence | None], limit_s: float) -> None:
        """Take what the newest samples show; iterations that last longer than ``limit_s`` by the calls are known to be slow."""
        if not self.gpus.take(job):
            self.analysis, self._others = IterationAnalysis(), 0
            self.kept.clear()
        for iteration in self.gpus.iterations(job, cadences):
            if not self.analysis.fits(iteration):
                self._others += 1
                if self._others >= LEARNED:
                    self.analysis, self._others = IterationAnalysis(), 0
                continue
            self._others = 0
            result = self.analysis.look(iteration, learn=iteration.called_s <= limit_s)
            if result is not None and self.analysis.last is not None:
                self.kept.append(self._slow(result, iteration, self.analysis.last))
        few = "" if self.analysis.learned else f"fewer than {ENOUGH} healthy iterations were seen whole"
        self.problem = self.gpus.problem or few

    def _slow(self, result: PathResult, iteration: TimedIteration, weights: Weights) -> SlowIteration:
        """The culprits of the last iteration added up: work by rank, transfers by group; what explains little is left out."""
        parts: dict[tuple[int, bool], list[Anomaly]] = defaultdict(list)
        for anomaly in result.culprits:
            where = iteration.rank if anomaly.work else iteration.group
            parts[int(where[anomaly.operation]), anomaly.work].append(anomaly)
        duration, usual = weights.duration, self.analysis.usual
        blames = []
        for (place, work), anomalies in parts.items():
            excess = sum(anomaly.excess for anomaly in anomalies)
            if excess >= LEAST_SHARE * max(duration - usual, 0.0):
                cost = max(0.0, duration - weights.without(anomalies))
                host = sum(min(a.excess, self.analysis.idle(iteration, a.operation)) for a in anomalies) if work else 0.0
                blames.append(Blame(place, work, len(anomalies), excess, cost, iteration.name(anomalies[0].operation), host))
        harmless = None
        for anomaly in result.harmless[:1]:
            at = anomaly.operation
            harmless = int(iteration.rank[at]), iteration.name(at), anomaly.excess, weights.slack(at)
        return SlowIteration(float(iteration.end.max()), duration, usual, len(iteration.rank), blames, harmless)

    def told(self, job: Job, since: float, topology: Topology | None = None) -> Timed:
        """What is known since a moment (wall time). ``topology`` names groups."""
        if not len(self.gpus.rows):
            return Timed()
        starts = {job.members[at].info.key: start for at, start in self.gpus.starts(job, since).items()}
        problem = f"the critical path of an iteration: {self.problem}" if self.problem else ""
        unobserved = [text for text in (problem, self.analysis.clocks.text()) if text]
        slow = [one for one in self.kept if one.time >= since]
        paths, costs = _in_common(job, slow, topology) if slow else ([], {})
        return Timed(True, starts, paths, costs, unobserved)


def _in_common(job: Job, slow: Sequence[SlowIteration], topology: Topology | None) -> tuple[list[str], dict[int, float]]:
    """``paths`` and ``costs`` of :class:`Timed`."""
    parts: dict[tuple[int, bool], list[Blame]] = defaultdict(list)
    for blame in chain.from_iterable(one.blames for one in slow):
        parts[blame.where, blame.work].append(blame)
    costs = {part: sum(blame.cost for blame in found) / len(slow) for part, found in parts.items()}
    average = sum(one.duration for one in slow) / len(slow)
    lost = average - sum(one.usual for one in slow) / len(slow)
    seen = f"{slow[-1].operations} operations on {len(job.members)} GPUs, timed by the shim"
    lines = []
    for part in sorted(costs, key=lambda part: -costs[part])[:TOLD]:
        if costs[part] >= LEAST_SHARE * lost:
            what = f"{_blamed(job, parts[part][-1], topology)}, in {len(parts[part])} of {len(slow)} slow iterations"
            without = f"without it: {max(0.0, average - costs[part]):.2f} s instead of {average:.2f} s"
            lines.append(f"critical path of an iteration ({seen}): {what}; {without}")
    if slow[-1].harmless is not None:
        rank, name, excess, spare = slow[-1].harmless
        work = f"{job.members[rank].label}'s work before {_operation(job, name, topology)}"
        lines.append(f"off the critical path: {work} took {excess:.2f} s longer and cost nothing: {spare:.2f} s of slack")
    return lines, {where: cost for (where, work), cost in costs.items() if work}


def _blamed(job: Job, blame: Blame, topology: Topology | None) -> str:
    place = _operation(job, blame.worst, topology)
    longer = f"{blame.excess:.2f} s longer than usual" + (f" in {blame.segments} places, most" if blame.segments > 1 else "")
    if not blame.work:
        return f"transfers take {longer} in {place}"
    host = f", {blame.host_s:.2f} s of it because its host had not called" if blame.host_s >= LEAST_SHARE * blame.excess else ""
    return f"{job.members[blame.where].label} takes {longer} before {place}{host}"


def _operation(job: Job, name: Name, topology: Topology | None) -> str:
    number, function, before = name
    group, known = job.groups.get(number), topology.by_id.get(number) if topology is not None else None
    if group is None:
        return f"{function} {before + 1}"
    role = f"{known.role} " if known is not None and known.role is not Role.UNSURE else ""
    return f"{function} {before + 1} of the iteration on the {role}communicator {group.hash:016x} ({group.nranks} ranks)"
