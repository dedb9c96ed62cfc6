"""Whole iterations of a job as its GPUs timed them, put together from what the shims' frames show at each look.

A frame keeps the last operations of each communicator (32). Where no more than that happen between two looks, nothing is missed,
and an iteration (whose bounds the calls tell) can be put together: every operation of every rank with begin and end on its GPU.
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
from ncclwatch.engine.slow.graph import Indices, Times
from ncclwatch.model.device import DeviceOperation, KernelState
from ncclwatch.model.identity import ProcessKey

LARGEST_JOB = 64
RANKS_A_LOOK = 128
"""Times of ranks in one iteration that are put together at a look: of small jobs every iteration, of larger ones the newest."""
SEND = "Send"
KEPT_OPERATIONS = 512
"""Of a communicator of one rank."""
OVERLAP_S, OVERLAP_SHARE = 0.002, 0.02
"""Ends and beginnings are seen by polling threads: operations of a rank that overlap by less than that, or than this share of the
iteration, follow each other."""


@dataclass(slots=True)
class TimedIteration:
    """One iteration. Arrays of shape (operations,), sorted by rank (place among the job's members) and in the order of launches.

    ``joint`` numbers the collective an operation is part of, −1 for messages; ``needs`` pairs a receive with its send and is of
    shape (n, 2). Times are seconds of each node's wall clock; ``before`` says by rank when its iteration before ended.
    """

    rank: Indices
    node: Indices
    joint: Indices
    needs: Indices
    begin: Times
    end: Times
    before: Times
    nodes: Indices
    """Of each rank."""
    launched: Times
    """When the host launched each operation."""
    called_s: float
    """How long the iteration was by the calls of one host, seconds."""
    names: list[tuple[int, str, int]]
    """(group, function, how many of these were before it in the iteration) of each operation."""


@dataclass(slots=True)
class _Run:
    """Operations of one rank on one communicator that have ended, in the order of their launches, without a gap."""

    operations: list[DeviceOperation] = field(default_factory=list)
    launched: list[int] = field(default_factory=list)
    last: int = 0
    newest: int = 0
    """Ordinal of the newest that was launched."""

    def take(self, recent: Sequence[DeviceOperation], newest: int) -> None:
        """Go on with what a look shows, up to the first that has not ended."""
        self.newest = newest
        for operation in recent:
            if operation.ordinal <= self.last:
                continue
            ended = operation.state is KernelState.FINISHED and operation.started_ns and operation.finished_ns
            if operation.observed and not ended:
                break
            if not operation.observed or operation.ordinal != self.last + 1:
                self.operations.clear()
                self.launched.clear()
            self.last = operation.ordinal
            if operation.observed:
                self.operations.append(operation)
                self.launched.append(operation.launched_ns)
        if len(self.operations) > 2 * KEPT_OPERATIONS:
            del self.operations[:-KEPT_OPERATIONS], self.launched[:-KEPT_OPERATIONS]

    def between(self, begin_ns: int, end_ns: int) -> list[DeviceOperation]:
        """Those that were launched in a stretch of time."""
        return self.operations[bisect_left(self.launched, begin_ns) : bisect_left(self.launched, end_ns)]

    def ended_before(self, begin_ns: int) -> int:
        """When the last that was launched before a moment ended; 0 without any."""
        at = bisect_left(self.launched, begin_ns)
        return (self.operations[at - 1].finished_ns or 0) if at else 0


@dataclass(slots=True)
class _Part:
    """One iteration of one member: its operations by launch, with their groups, and when its iteration before ended."""

    operations: list[tuple[int, DeviceOperation]]
    before_ns: int

    @property
    def ended_s(self) -> float:
        """When its last operation ended, on its node's monotonic clock."""
        return max(operation.finished_ns or 0 for _, operation in self.operations) / 1e9


class GpuIterations:
    """Puts iterations together from look to look; each is handed out once."""

    def __init__(self) -> None:
        self.problem = ""
        """Why the newest iteration is not known whole; empty where it is, and where no process has the shim."""
        self._runs: dict[ProcessKey, dict[int, _Run]] = defaultdict(lambda: defaultdict(_Run))
        self._until = 0.0

    def take(self, job: Job, cadences: Sequence[Cadence | None]) -> list[TimedIteration]:
        """The iterations that have become whole. ``cadences`` are the members' own, in their order."""
        told = [member for member in job.members if member.last.device is not None]
        self.problem = ""
        if not told:
            return []
        if len(told) < len(job.members):
            without = next(member for member in job.members if member.last.device is None)
            self.problem = f"{without.label} has no shim"
            return []
        if len(job.members) > LARGEST_JOB:
            self.problem = f"the job has more than {LARGEST_JOB} ranks"
            return []
        for member in job.members:
            self._read(job, member)
        known = [cadence for cadence in cadences if cadence is not None and len(cadence.iterations)]
        if len(known) < len(job.members):
            self.problem = "calls do not show the iterations of all ranks"
            return []
        return self._whole(job, known)

    def _read(self, job: Job, member: Member) -> None:
        for told in member.last.device.communicators if member.last.device is not None else ():
            own = next(
                (
                    c
                    for c in member.last.communicators
                    if (told.hash, told.rank) == (c.hash, c.rank) or told.inside_address == c.address
                ),
                None,
            )
            group = job.group_of.get((member.index, own.address)) if own is not None else None
            if group is not None and not told.finished:
                self._runs[member.info.key][group].take(told.recent, told.operations)

    def _whole(self, job: Job, cadences: list[Cadence]) -> list[TimedIteration]:
        offsets = [(member.last.wall_ns - member.last.time_ns) / 1e9 for member in job.members]
        found: list[TimedIteration] = []
        for iteration in list(cadences[0].iterations)[-max(2, RANKS_A_LOOK // len(job.members)) :]:
            if iteration.begin <= self._until:
                continue
            first = self._part(job, job.members[0], iteration)
            if first is None:
                break  # some of it is still to come
            parts: list[_Part] = []
            for member, cadence, offset in zip(job.members, cadences, offsets, strict=True):
                if isinstance(first, str):
                    self.problem = f"{job.members[0].label}: {first}"
                    break
                part = self._same(job, member, cadence, offset - offsets[0], iteration, first)
                if part is None:
                    return found
                if isinstance(part, str):
                    self.problem = f"{member.label}: {part}"
                    break
                parts.append(part)
            self._until = iteration.begin
            if len(parts) == len(job.members):
                self.problem = ""
                timed = self._join(job, parts, offsets, iteration.duration)
                if timed is not None:
                    found.append(timed)
        return found

    def _same(
        self, job: Job, member: Member, cadence: Cadence, shift: float, iteration: Iteration, first: _Part
    ) -> _Part | str | None:
        """A member's part of the reference's iteration: hosts may begin it at quite different times, but it ends for all alike.

        ``shift``: what is added to times of the member for those of the reference, seconds.
        """
        near = [i for i in cadence.iterations if abs(i.begin + shift - iteration.begin) <= 1.5 * iteration.duration]
        parts = [self._part(job, member, one) for one in near]
        known = [part for part in parts if isinstance(part, _Part)]
        best = min(known, key=lambda part: abs(part.ended_s + shift - first.ended_s), default=None)
        if best is not None and abs(best.ended_s + shift - first.ended_s) <= iteration.duration / 2:
            return best
        if None in parts or not near:
            return None
        return next((part for part in parts if isinstance(part, str)), "its iterations do not fit those of the others")

    def _part(self, job: Job, member: Member, iteration: Iteration) -> _Part | str | None:
        """A member's operations in one of its iterations; ``None`` while some may still come, or why they will not."""
        begin_ns, end_ns = round(iteration.begin * 1e9), round(iteration.end * 1e9)
        if member.last.time_ns < end_ns:
            return None
        chosen: list[tuple[int, DeviceOperation]] = []
        before = 0
        for group, run in self._runs[member.info.key].items():
            if not run.newest:
                continue
            if not run.operations:
                return None if run.last < run.newest else "the GPU's times of some operations are not reported"
            if run.operations[0].ordinal > 1 and run.operations[0].launched_ns >= begin_ns:
                size = job.groups[group].nranks if group in job.groups else 0
                return f"more operations of a communicator of {size} ranks between two looks than its frame keeps"
            if run.operations[-1].ordinal < run.newest and run.operations[-1].launched_ns < end_ns:
                return None
            chosen += [(group, operation) for operation in run.between(begin_ns, end_ns)]
            before = max(before, run.ended_before(begin_ns))
        if not chosen or not before:
            return "its first iteration"
        return _Part(sorted(chosen, key=lambda item: (item[1].launched_ns, item[1].ordinal)), before)

    def _join(self, job: Job, parts: Sequence[_Part], offsets: Sequence[float], called_s: float) -> TimedIteration | None:
        """The iteration of all ranks; ``None`` (and why) where what they did does not match."""
        spans = [(p.operations[0][1].started_ns or 0, p.operations[-1][1].finished_ns or 0) for p in parts]
        joining = _Joining(max(OVERLAP_S, OVERLAP_SHARE * max(end - begin for begin, end in spans) / 1e9))
        hosts: dict[str, int] = {}
        for at, (member, part, offset) in enumerate(zip(job.members, parts, offsets, strict=True)):
            node = hosts.setdefault(member.info.host, len(hosts))
            joining.next_rank(at, node, offset)
            for group, operation in part.operations:
                own = job.groups[group].rank_of(member) if group in job.groups else None
                if own is None or not joining.add(group, own, operation):
                    self.problem = f"{member.label}: operations overlap on its GPU, so their order is not known"
                    return None
        before = np.array([part.before_ns / 1e9 + offset for part, offset in zip(parts, offsets, strict=True)])
        made = joining.made(job, before, called_s)
        if made is None:
            self.problem = "operations of the ranks do not match each other"
        return made


Message = tuple[int, int, int, int]
"""(group, sender, receiver, how many the sender sent before)"""


@dataclass(slots=True)
class _Joining:
    """Rows of an iteration as they come, rank after rank, and what belongs together in them."""

    allowed: float
    """Operations of a rank may overlap by so much, seconds."""
    rows: list[tuple[int, int, int, float, float, float]] = field(default_factory=list)
    """rank, node, collective (−1: none), begin, end, launch"""
    names: list[tuple[int, str, int]] = field(default_factory=list)
    _joint: dict[tuple[int, str, int], int] = field(default_factory=dict)
    _held: dict[tuple[int, str, int], list[int | None]] = field(default_factory=lambda: defaultdict(list))
    _sends: dict[Message, int] = field(default_factory=dict)
    _receives: dict[Message, int] = field(default_factory=dict)
    _counts: dict[tuple[int, str, int | None], int] = field(default_factory=lambda: defaultdict(int))
    _place: tuple[int, int, float] = (0, 0, 0.0)
    _ended: float = 0.0
    _message: bool = False

    def next_rank(self, rank: int, node: int, offset: float) -> None:
        """What is added from now on is of this rank; ``offset`` is its wall clock minus its monotonic clock."""
        self._place = rank, node, offset
        self._counts.clear()
        self._ended, self._message = 0.0, False

    def add(self, group: int, own: int, operation: DeviceOperation) -> bool:
        """Take the rank's next operation; ``False`` where it began long before the one before it had ended."""
        rank, node, offset = self._place
        begin, end = (operation.started_ns or 0) / 1e9 + offset, (operation.finished_ns or 0) / 1e9 + offset
        message, launched = operation.point_to_point, operation.launched_ns / 1e9 + offset
        kind = (group, operation.function, operation.peer if message else None)
        key = (group, operation.function, self._counts[kind])
        self._counts[kind] += 1
        if message and self._message and begin < self._ended:
            # Messages of one group call are one kernel.
            _, _, _, first, last, called = self.rows[-1]
            self.rows[-1] = rank, node, -1, min(first, begin), max(last, end), called
        elif self._ended - begin > self.allowed:
            return False
        else:
            begin = max(begin, self._ended)
            collective = -1 if message else self._joint.setdefault(key, len(self._joint))
            self.rows.append((rank, node, collective, begin, max(begin, end), launched))
            self.names.append(key)
        self._ended, self._message = self.rows[-1][4], message
        if not message:
            self._held[key].append(operation.sequence)
        elif operation.function == SEND:
            self._sends[group, own, _peer(operation), key[2]] = len(self.rows) - 1
        else:
            self._receives[group, _peer(operation), own, key[2]] = len(self.rows) - 1
        return True

    def made(self, job: Job, before: Times, called_s: float) -> TimedIteration | None:
        """The iteration; ``None`` where a rank's part of something that several do is missing."""
        whole = all(len(seen) == job.groups[key[0]].nranks and len(set(seen)) == 1 for key, seen in self._held.items())
        if not whole or self._sends.keys() != self._receives.keys():
            return None
        table = np.array(self.rows, np.float64)
        rank, node, joint = (table[:, column].astype(np.int64) for column in range(3))
        pairs = [(self._receives[key], self._sends[key]) for key in sorted(self._sends)]
        needs = np.array(pairs, np.int64).reshape(-1, 2)
        nodes = node[np.searchsorted(rank, np.arange(len(before)))]
        begin, end, launched = (table[:, column] for column in range(3, 6))
        return TimedIteration(rank, node, joint, needs, begin, end, before, nodes, launched, called_s, self.names)


def _peer(operation: DeviceOperation) -> int:
    return operation.peer if operation.peer is not None else -1
