"""Whole iterations of a job as its GPUs timed them, put together from what the shims' frames show in each sample.

A frame keeps the last operations of each communicator (32). Where no more than that happen between two samples, nothing is
missed. Then an iteration can be put together: the calls tell its bounds, the GPUs begin and end of every operation of every rank.
What was not seen whole is left out, and why it was not is said. For small jobs: samples of large ones do not hold all of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.slow.cadence import Cadence, Iteration
from ncclwatch.engine.slow.gpu_times import told_of
from ncclwatch.engine.slow.iteration_graph import LEAST_S, Operations, Times
from ncclwatch.model.device import DeviceOperation, KernelState
from ncclwatch.model.identity import ProcessKey

LARGEST_JOB = 64
"""Bound: ranks (time and memory)."""
KEPT_OPERATIONS = 512
"""Bound: operations of a communicator of one rank (memory)."""
NEWEST = 128
"""Bound: times of ranks in one iteration that are put together in one sample (time): the newest iterations, two at least."""
OVERLAP_SHARE = 0.02
"""Unit: share of an iteration. From: chosen: by so much (or ``LEAST_S``, where that is more) two operations of a rank may overlap
and still follow each other. Where polling threads want for CPU they are late by more, and so is the iteration.
"""


@dataclass(slots=True)
class TimedIteration(Operations):
    """One iteration, in wall time; a rank is a place among the job's members."""

    launched: Times
    """When the host launched each operation, and when its rank's iteration before ended."""
    before: Times
    names: list[tuple[int, str, int]]
    """(group, function, how many of these were before it in the iteration) of each operation."""
    called_s: float
    """How long the iteration was by the calls of one host, seconds."""


class _NotWholeError(Exception):
    """An iteration cannot be put together, and why."""


class _StillToComeError(Exception):
    """Some of an iteration may show in the next sample."""


@dataclass(slots=True)
class _Run:
    """Operations of one rank on one communicator that have ended, in the order of their launches, without a gap."""

    operations: list[DeviceOperation] = field(default_factory=list)
    last: int = 0
    """Ordinal of the last that has ended (or was not observed), and the ``newest`` that was launched."""
    newest: int = 0

    def take(self, recent: Sequence[DeviceOperation], newest: int) -> None:
        """Go on with what a sample shows, up to the first that has not ended."""
        self.newest = newest
        for operation in recent:
            if operation.ordinal <= self.last:
                continue
            ended = operation.state is KernelState.FINISHED and operation.started_ns and operation.finished_ns
            if operation.observed and not ended:
                break
            if not operation.observed or operation.ordinal != self.last + 1:
                self.operations.clear()
            self.last = operation.ordinal
            if operation.observed:
                self.operations.append(operation)
        if len(self.operations) > 2 * KEPT_OPERATIONS:
            del self.operations[:-KEPT_OPERATIONS]

    def between(self, begin_ns: int, end_ns: int) -> tuple[list[DeviceOperation], int]:
        """Those that were launched in a stretch of time, and when the last before them ended (0: there is none)."""
        if not self.operations:
            if self.last < self.newest:
                raise _StillToComeError
            raise _NotWholeError("the GPU's times of some operations are not reported")
        first, last = self.operations[0], self.operations[-1]
        if first.ordinal > 1 and first.launched_ns >= begin_ns:
            raise _NotWholeError("more operations of a communicator between two samples than its frame keeps")
        if last.ordinal < self.newest and last.launched_ns < end_ns:
            raise _StillToComeError
        begin, end = (bisect_left(self.operations, time, key=lambda one: one.launched_ns) for time in (begin_ns, end_ns))
        return self.operations[begin:end], (self.operations[begin - 1].finished_ns or 0) if begin else 0


@dataclass(slots=True)
class _Part:
    """One iteration of one member: its operations by launch, with their groups, and when its iteration before ended.

    ``offset_s`` is its host's wall clock minus the monotonic one.
    """

    member: Member
    operations: list[tuple[int, DeviceOperation]]
    before_s: float
    offset_s: float

    @property
    def span_s(self) -> float:
        """From the begin of its first operation to the end of its last, seconds."""
        return ((self.operations[-1][1].finished_ns or 0) - (self.operations[0][1].started_ns or 0)) / 1e9

    @property
    def ended_s(self) -> float:
        """When its last operation ended, wall time."""
        return max(operation.finished_ns or 0 for _, operation in self.operations) / 1e9 + self.offset_s


class GpuIterations:
    """Puts iterations together from sample to sample; each is handed out once."""

    def __init__(self) -> None:
        self.problem = ""
        """Why the newest iteration is not known whole; empty where it is, and where no process has the shim."""
        self._runs: dict[ProcessKey, dict[int, _Run]] = defaultdict(lambda: defaultdict(_Run))
        self._until = 0.0

    def take(self, job: Job, cadences: Sequence[Cadence | None]) -> list[TimedIteration]:
        """The iterations that have become whole. ``cadences`` are the members' own, in their order."""
        without = [member for member in job.members if member.last.device is None]
        self.problem = ""
        if len(without) == len(job.members):
            return []
        if without or len(job.members) > LARGEST_JOB:
            self.problem = f"{without[0].label} has no shim" if without else f"the job has more than {LARGEST_JOB} ranks"
            return []
        for group in job.groups.values():
            for member, own in group.members.values():
                for told in told_of(member, own):
                    if not told.finished:
                        self._runs[member.info.key][group.id].take(told.recent, told.operations)
        known = [cadence for cadence in cadences if cadence is not None and len(cadence.iterations)]
        if len(known) < len(job.members):
            self.problem = "calls do not show the iterations of all ranks"
            return []
        return self._whole(job, known)

    def _whole(self, job: Job, cadences: list[Cadence]) -> list[TimedIteration]:
        found: list[TimedIteration] = []
        for iteration in list(cadences[0].iterations)[-max(2, NEWEST // len(job.members)) :]:
            if iteration.begin <= self._until:
                continue
            try:
                parts = [self._part(job, job.members[0], iteration)]
                for member, cadence in zip(job.members[1:], cadences[1:], strict=True):
                    parts.append(self._same(job, member, cadence, iteration, parts[0]))
                found.append(_joined(job, parts, iteration.duration))
                self.problem = ""
            except _StillToComeError:
                break
            except _NotWholeError as why:
                self.problem = str(why)
            self._until = iteration.begin
        return found

    def _same(self, job: Job, member: Member, cadence: Cadence, iteration: Iteration, first: _Part) -> _Part:
        """A member's part of the first one's iteration: hosts may begin it far apart, but it ends for all alike."""
        shift = (member.last.wall_ns - member.last.time_ns) / 1e9 - first.offset_s
        near = [one for one in cadence.iterations if abs(one.begin + shift - iteration.begin) <= 1.5 * iteration.duration]
        parts: list[_Part] = []
        unfit = _NotWholeError(f"{member.label}: its iterations do not fit those of the others")
        problem: _NotWholeError | _StillToComeError = unfit if near else _StillToComeError()
        for one in near:
            try:
                parts.append(self._part(job, member, one))
            except _StillToComeError as pending:
                problem = pending
            except _NotWholeError as why:
                problem = why if problem is unfit else problem
        best = min(parts, key=lambda part: abs(part.ended_s - first.ended_s), default=None)
        if best is None or abs(best.ended_s - first.ended_s) > iteration.duration / 2:
            raise problem
        return best

    def _part(self, job: Job, member: Member, iteration: Iteration) -> _Part:
        """A member's operations in one of its iterations."""
        begin_ns, end_ns = round(iteration.begin * 1e9), round(iteration.end * 1e9)
        if member.last.time_ns < end_ns:
            raise _StillToComeError
        chosen: list[tuple[int, DeviceOperation]] = []
        before = 0
        for group, run in self._runs[member.info.key].items():
            if not run.newest:
                continue
            try:
                operations, ended = run.between(begin_ns, end_ns)
            except _NotWholeError as why:
                raise _NotWholeError(f"{member.label}: {why} (communicator of {job.groups[group].nranks} ranks)") from None
            chosen += [(group, operation) for operation in operations]
            before = max(before, ended)
        if not chosen or not before:
            raise _NotWholeError(f"{member.label}: its first iteration")
        chosen.sort(key=lambda item: (item[1].launched_ns, item[1].ordinal))
        offset_s = (member.last.wall_ns - member.last.time_ns) / 1e9
        return _Part(member, chosen, before / 1e9 + offset_s, offset_s)


def _joined(job: Job, parts: Sequence[_Part], called_s: float) -> TimedIteration:
    """The iteration of all ranks."""
    table = _Table(max(LEAST_S, OVERLAP_SHARE * max(part.span_s for part in parts)))
    hosts: dict[str, int] = {}
    for at, part in enumerate(parts):
        table.add_rank(job, part, at, hosts.setdefault(part.member.info.host, len(hosts)))
    if not all(_matches(job, key, sides) for key, sides in table.sides.items()):
        raise _NotWholeError("operations of the ranks do not match each other")
    rank, node, joint = np.array([row[:3] for row in table.rows], np.int64).T
    begin, end, launched, before = np.array([row[3:] for row in table.rows], np.float64).T
    # Of a message's two sides the receive needs the send.
    pairs = [sorted(sides, key=lambda side: side[1] == SEND) for key, sides in table.sides.items() if len(key) == 4]
    needs = np.array([[row for row, _ in pair] for pair in pairs], np.int64).reshape(-1, 2)
    return TimedIteration(rank, node, joint, needs, begin, end, launched, before, table.names, called_s)


SEND = "Send"
Joint = tuple[int, str, int] | tuple[int, int, int, int]
"""(group, function, how many of it the rank did before), or of a message (group, sender, receiver, how many before)."""


def _matches(job: Job, key: Joint, sides: list[tuple[int, object]]) -> bool:
    """Whether all ranks' parts of a collective are there, with one sequence number; of a message, one send and one receive."""
    seen = {what for _, what in sides}
    return len(sides) == len(seen) == 2 if len(key) == 4 else len(sides) == job.groups[key[0]].nranks and len(seen) == 1


@dataclass(slots=True)
class _Table:
    """Operations of an iteration as rows, rank after rank, and what belongs together in them."""

    allowed: float
    """Operations of a rank may overlap by so much, seconds."""
    rows: list[tuple[int, int, int, float, float, float, float]] = field(default_factory=list)
    """rank, node, collective (−1: none), begin, end, launch, end of the iteration before"""
    names: list[tuple[int, str, int]] = field(default_factory=list)
    sides: dict[Joint, list[tuple[int, object]]] = field(default_factory=lambda: defaultdict(list))
    """The rows of each collective with their sequence numbers, of each message with their functions."""
    _collectives: dict[Joint, int] = field(default_factory=dict)

    def add_rank(self, job: Job, part: _Part, rank: int, node: int) -> None:
        """Take all operations of one rank, in their order."""
        counts: dict[tuple[int, str, int | None], int] = defaultdict(int)
        ended, in_message = 0.0, False
        for group, operation in part.operations:
            own = job.groups[group].rank_of(part.member) if group in job.groups else None
            times = (operation.started_ns or 0, operation.finished_ns or 0, operation.launched_ns)
            begin, end, launched = (time / 1e9 + part.offset_s for time in times)
            message = operation.point_to_point
            # Messages of one group call are one kernel.
            joins = message and in_message and begin < ended
            if own is None or (not joins and ended - begin > self.allowed):
                raise _NotWholeError(f"{part.member.label}: operations overlap on its GPU, so their order is not known")
            kind = (group, operation.function, operation.peer if message else None)
            name = (group, operation.function, counts[kind])
            counts[kind] += 1
            if joins:
                first, last, *rest = self.rows[-1][3:]
                self.rows[-1] = rank, node, -1, min(first, begin), max(last, end), rest[0], rest[1]
            else:
                begin = max(begin, ended)
                collective = -1 if message else self._collectives.setdefault(name, len(self._collectives))
                self.rows.append((rank, node, collective, begin, max(begin, end), launched, part.before_s))
                self.names.append(name)
            ended, in_message = self.rows[-1][4], message
            peer = operation.peer if operation.peer is not None else -1
            key: Joint = name
            if message:
                key = (group, *((own, peer) if operation.function == SEND else (peer, own)), name[2])
            self.sides[key].append((len(self.rows) - 1, operation.function if message else operation.sequence))
