"""What the shims tell of every operation on every GPU of a job, in columns; and what follows from it without a dependency graph.

**Late GPUs.** All ranks leave a collective at about the same time, so who was in it for a shorter time came later (CCL-D 4.2.2):
that needs no clock. **Iterations.** A frame keeps the last operations of each communicator (32). Where no more than that happen
between two samples an iteration can be put together: the calls tell its bounds. What was not seen whole is left out, and why is
said. **Clocks.** Nobody ends a collective before everybody has begun it, nobody receives what was not sent: for two nodes a and
b end on a − begin on b bounds (clock of a − clock of b) from above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.slow.cadence import Cadence, Iteration
from ncclwatch.engine.slow.detect import ENOUGH
from ncclwatch.engine.slow.findings import hosts
from ncclwatch.model.device import DeviceCommunicator, KernelState
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator

Times = NDArray[np.float64]
Indices = NDArray[np.int64]

DRIFT = 1e-4
"""Fact: two common quartzes, each wrong by 50 ppm: what bounds an offset now bounds it less closely the older it is."""
KEPT_OPERATIONS = 1 << 16
"""Bound: operations of a job that are kept, the newest (memory: 6 MiB)."""
BARRIER_ELEMENTS = 1
"""Fact: CCL-D, section 4.2.1: an AllReduce of less than 4 bytes is a barrier; of how many elements it is says the call."""
LEAST_S = 0.002
"""Unit: s. From: threads that poll see a kernel's begin and end: by less no two times of GPUs differ (chosen, not measured)."""
LARGEST_JOB = 64
"""Bound: ranks of a job whose iterations are put together (time and memory)."""
NEWEST = 128
"""Bound: iterations times ranks that are put together in one sample: the newest iterations, two at least."""
OVERLAP_SHARE = 0.02
"""Unit: share of an iteration. From: chosen: by so much (or ``LEAST_S``, where that is more) two operations of a rank may overlap
and still follow each other. Where polling threads want for CPU they are late by more, and so is the iteration.
"""
COLLECTIVE, BARRIER, SEND, RECEIVE = range(4)
OPERATION = np.dtype(
    [
        ("rank", "<i4"), ("own", "<i4"), ("group", "<u8"), ("kind", "<i4"), ("function", "<i4"), ("peer", "<i4"),
        ("sequence", "<i8"), ("ordinal", "<i8"), ("launched", "<f8"), ("begin", "<f8"), ("end", "<f8"), ("lasted", "<f8"),
        ("missed", "<f8"), ("told", "?"),
    ]
)  # fmt: skip
"""One operation of one rank. ``rank`` is a place among the job's members, ``own`` the rank in the communicator, whose operations
``ordinal`` counts. Times are seconds of the host's monotonic clock; NaN: not reported. ``missed`` is when the last one before it
that was seen was launched, if those between the two were not (else inf). ``told``: the round it is part of was handed out.
"""


@dataclass(slots=True)
class Operations:
    """What was observed of one iteration, in columns, sorted by rank and in program order.

    ``joint`` numbers the collective an operation is part of, equal on all its ranks; −1 for messages. ``needs`` has shape (n, 2):
    operation, and an operation of another rank whose beginning it needs (a receive its send). Times are seconds of nodes' clocks.
    """

    rank: Indices
    node: Indices
    joint: Indices
    needs: Indices
    begin: Times
    end: Times
    launched: Times | None = field(default=None, kw_only=True)
    """When the host launched each operation, where that is known."""
    before: Times | None = field(default=None, kw_only=True)
    """When its rank's iteration before ended."""


@dataclass(slots=True)
class TimedIteration(Operations):
    """One iteration of a running job, in wall time; a rank is a place among the job's members."""

    group: NDArray[np.uint64]
    function: NDArray[np.str_]
    number: Indices
    """How many of this function its rank did before on the communicator, in this iteration."""
    called_s: float
    """How long the iteration was by the calls of one host, seconds."""

    def name(self, operation: int) -> tuple[int, str, int]:
        """(group, function, how many of these were before it in the iteration) of an operation."""
        return int(self.group[operation]), str(self.function[operation]), int(self.number[operation])


class Round(NamedTuple):
    """A collective that all ranks have told: when it ended (wall time), and for each rank how long it lasted there, seconds."""

    group: int
    name: str
    time: float
    durations: dict[int, float]

    @property
    def longest(self) -> float:
        """The longest time of a rank in it, seconds."""
        return max(self.durations.values())

    @property
    def shortest(self) -> float:
        """The shortest, which is the time of the rank that came last."""
        return min(self.durations.values())


class Start(NamedTuple):
    """How much later than the others one rank's GPU comes to collectives, seconds: median over ``rounds``."""

    late_s: float
    rounds: int

    def text(self) -> str:
        """One line of evidence, without the rank's name."""
        late = f"{self.late_s * 1e3:.0f} ms later than the others"
        return f"its GPU comes to collectives {late}, in the middle of {self.rounds} (shim)"


class _NotWholeError(Exception):
    """An iteration cannot be put together, and why; without a reason: the rest may show in the next sample."""


class GpuOperations:
    """The operations of one job's GPUs, taken from sample to sample."""

    def __init__(self) -> None:
        self._begin(())

    def _begin(self, numbered: tuple[ProcessKey, ...]) -> None:
        self._numbered = numbered
        """Whose number here is which place among the members."""
        self.rows = np.zeros(0, OPERATION)
        self.problem = ""
        """Why the newest iteration is not known whole; empty where it is, and where no process has the shim."""
        self._last: dict[tuple[int, int], tuple[int, float, bool]] = {}
        """By rank and group ordinal and launch of the last operation that has ended, or was not observed; and whether it is the
        newest that was launched."""
        self._offset = np.zeros(0)
        """Of each rank's host, wall clock minus monotonic clock, seconds."""
        self._functions: dict[str, int] = {}
        """Names of functions, and the numbers that stand for them."""
        self._until = 0.0

    def take(self, job: Job) -> bool:
        """Take what the newest samples tell; nothing where no process has the shim. False where the processes are numbered in
        another way than before: then nothing that was taken compares with what comes, and it is forgotten.
        """
        numbered = tuple(member.info.key for member in job.members)
        same = numbered == self._numbered
        if not same:
            self._begin(numbered)
        if all(member.last.device is None for member in job.members):
            return same
        place = {member.index: at for at, member in enumerate(job.members)}
        made = [
            row for group in job.groups.values() for own, (member, communicator) in group.members.items()
            for told in _told_of(member, communicator) for row in self._newer(place[member.index], own, group.id, told)
        ]  # fmt: skip
        if made:
            self.rows = np.concatenate([self.rows, np.array(made, OPERATION)])[-KEPT_OPERATIONS:]
        self._offset = np.array([(member.last.wall_ns - member.last.time_ns) / 1e9 for member in job.members])
        return same

    def _newer(self, rank: int, own: int, group: int, told: DeviceCommunicator) -> Iterator[tuple[Any, ...]]:
        """What a communicator's frame tells that was not told before, up to the first operation that has not ended."""
        last, launched, _ = self._last.get((rank, group), (0, -np.inf, True))
        for one in told.recent:
            if one.ordinal <= last:
                continue
            if one.observed and not (one.state is KernelState.FINISHED and one.started_ns and one.finished_ns):
                break
            begin, end = (time / 1e9 if one.observed and time else np.nan for time in (one.started_ns, one.finished_ns))
            lasted = end - begin if one.duration_ns is None else one.duration_ns / 1e9
            kind = BARRIER if one.function == "AllReduce" and one.count <= BARRIER_ELEMENTS else COLLECTIVE
            if one.point_to_point:
                kind = SEND if one.function == "Send" else RECEIVE
            function = self._functions.setdefault(one.function, len(self._functions))
            missed = launched if one.ordinal > last + 1 else np.inf
            last, launched = one.ordinal, one.launched_ns / 1e9
            yield (
                rank, own, group, kind, function, -1 if one.peer is None else one.peer,
                -1 if one.sequence is None else one.sequence, last, launched, begin, end, lasted, missed, False,
            )  # fmt: skip
        self._last[rank, group] = last, launched, last >= told.operations

    # --- collectives that all ranks have told ------------------------------------------------------------------------------

    def _complete(self, job: Job, told: bool) -> tuple[Indices, Indices, Times]:
        """The collectives that every rank of their communicator has told: places among the rows, the round of each, and when each
        round ended (wall time). With ``told`` those that were handed out, too.
        """
        known = (self.rows["kind"] == COLLECTIVE) & np.isfinite(self.rows["end"])
        places = np.flatnonzero(known if told else known & ~self.rows["told"])
        rows = self.rows[places]
        number = np.where(rows["sequence"] >= 0, rows["sequence"], rows["ordinal"])
        key, sizes = _numbered(rows["group"], rows["function"], number)
        whole = sizes[key] == _sizes(job, rows)
        key = np.unique(key[whole], return_inverse=True)[1]
        ended = np.full(int(key.max(initial=-1)) + 1, -np.inf)
        np.maximum.at(ended, key, (rows["end"] + self._offset[rows["rank"]])[whole])
        return places[whole], key, ended

    def rounds(self, job: Job) -> list[Round]:
        """The collectives that have become complete. Each is handed out once."""
        places, key, ended = self._complete(job, told=False)
        found: dict[int, Round] = {}
        names = list(self._functions)
        for row, at in zip(self.rows[places], key.tolist(), strict=True):
            done = found.setdefault(at, Round(int(row["group"]), names[row["function"]], float(ended[at]), {}))
            done.durations[int(row["rank"])] = float(row["lasted"])
        self.rows["told"][places] = True
        return sorted(found.values(), key=lambda done: done.time)

    def starts(self, job: Job, since: float) -> dict[int, Start]:
        """By place among the job's members: whose GPU has come late to collectives since a moment (wall time)."""
        places, key, ended = self._complete(job, told=True)
        recent = ended[key] >= since
        rows, key = self.rows[places[recent]], np.unique(key[recent], return_inverse=True)[1]
        usual, _ = _medians(rows["lasted"], key)
        late, rounds = _medians(usual[key] - rows["lasted"], rows["rank"])
        found = np.flatnonzero((rounds >= ENOUGH) & (late >= LEAST_S))
        return {at: Start(float(late[at]), int(rounds[at])) for at in found.tolist()}

    # --- iterations ---------------------------------------------------------------------------------------------------------

    def iterations(self, job: Job, cadences: Sequence[Cadence | None]) -> list[TimedIteration]:
        """The iterations that have become whole; each is handed out once. ``cadences`` are the members' own, in their order."""
        without = [member for member in job.members if member.last.device is None]
        self.problem = ""
        if len(without) == len(job.members):
            return []
        known = [cadence for cadence in cadences if cadence is not None and cadence.iterations]
        if without:
            self.problem = f"{without[0].label} has no shim"
        elif len(job.members) > LARGEST_JOB:
            self.problem = f"the job has more than {LARGEST_JOB} ranks"
        elif len(known) < len(job.members):
            self.problem = "calls do not show the iterations of all ranks"
        if self.problem:
            return []
        newest = [one for one in known[0].iterations if one.begin > self._until][-max(2, NEWEST // len(job.members)) :]
        rows = self.rows[np.lexsort((self.rows["ordinal"], self.rows["launched"], self.rows["rank"]))] if newest else self.rows
        of_rank = np.split(rows, np.searchsorted(rows["rank"], np.arange(1, len(job.members))))
        found = []
        for iteration in newest:
            try:
                first = self._part(job, 0, of_rank[0], iteration)
                others = [self._same(job, at, of_rank[at], known[at], first) for at in range(1, len(known))]
                found.append(_joined(job, [first, *others], np.array(list(self._functions))))
                self.problem = ""
            except _NotWholeError as why:
                if not str(why):
                    break
                self.problem = str(why)
            self._until = iteration.begin
        return found

    def _same(self, job: Job, at: int, rows: NDArray[Any], cadence: Cadence, first: _Part) -> _Part:
        """A member's part of the first one's iteration: hosts may begin it far apart, but it ends for all alike."""
        iterations, ended = list(cadence.iterations), np.r_[-np.inf, rows["end"] + self._offset[at]]
        ends = ended[np.searchsorted(rows["launched"], [one.end for one in iterations])]
        apart = np.abs(ends - first.ended)
        if not (apart <= first.iteration.duration / 2).any():
            came = bool((ends > first.ended).any())
            raise _NotWholeError(f"{job.members[at].label}: its iterations do not fit those of the others" if came else "")
        return self._part(job, at, rows, iterations[int(np.nanargmin(apart))])

    def _part(self, job: Job, at: int, rows: NDArray[Any], iteration: Iteration) -> _Part:
        """A member's operations (``rows``) in one of its iterations."""
        begin, end = iteration.begin, iteration.end
        unended = [launched for (rank, _), (_, launched, newest) in self._last.items() if rank == at and not newest]
        if min(unended, default=np.inf) < end or job.members[at].last.time_ns / 1e9 < end:
            raise _NotWholeError
        bounds = np.searchsorted(rows["launched"], (begin, end))
        chosen, before = rows[bounds[0] : bounds[1]], rows[: bounds[0]]
        missed = rows[(rows["missed"] < end) & (rows["launched"] >= begin)]
        why = ""
        if len(missed):
            size = job.groups[int(missed["group"][0])].nranks
            why = f"more operations of a communicator between two samples than its frame keeps (communicator of {size} ranks)"
        elif np.isnan(chosen["end"]).any():
            why = "the GPU's times of some operations are not reported"
        elif not len(chosen) or not np.isfinite(before["end"]).any():
            why = "its first iteration"
        if why:
            raise _NotWholeError(f"{job.members[at].label}: {why}")
        offset = float(self._offset[at])
        ended = float(chosen["end"].max()) + offset
        return _Part(iteration, chosen, float(np.nanmax(before["end"])) + offset, ended, offset)


class _Part(NamedTuple):
    """A member's part of an iteration: its operations by launch; when its iteration before and this one ended (wall time)."""

    iteration: Iteration
    rows: NDArray[Any]
    before: float
    ended: float
    offset: float


def _joined(job: Job, parts: Sequence[_Part], functions: NDArray[np.str_]) -> TimedIteration:
    """The iteration of all ranks. Messages of one group call are one kernel, and one row."""
    rows = np.concatenate([part.rows for part in parts])
    offset, before = np.repeat([(part.offset, part.before) for part in parts], [len(part.rows) for part in parts], axis=0).T
    begin, end, launched = (rows[name] + offset for name in ("begin", "end", "launched"))
    allowed = max(LEAST_S, OVERLAP_SHARE * max(float(p.rows["end"][-1] - p.rows["begin"][0]) for p in parts))
    first = np.flatnonzero(np.r_[True, rows["rank"][1:] != rows["rank"][:-1]])
    ended = np.concatenate([np.r_[-np.inf, np.maximum.accumulate(own)[:-1]] for own in np.split(end, first[1:])])
    message, sends = rows["kind"] >= SEND, rows["kind"] == SEND
    joins = message & np.r_[False, message[:-1]] & (begin < ended)
    if (~joins & (ended - begin > allowed)).any():
        label = job.members[int(rows["rank"][np.argmax(~joins & (ended - begin > allowed))])].label
        raise _NotWholeError(f"{label}: operations overlap on its GPU, so their order is not known")
    # The k-th of its kind on one rank is that on the others; the k-th send to a rank is its k-th receive.
    peer = np.where(message, rows["peer"], -1)
    number = _occurrence(_numbered(rows["rank"], rows["group"], rows["function"], peer)[0])
    sender, receiver = np.where(sends, rows["own"], peer), np.where(sends, peer, rows["own"])
    ends = [np.where(message, side, -1) for side in (sender, receiver)]
    joint, sizes = _numbered(rows["group"], np.where(message, -1, rows["function"]), *ends, number)
    # Sequence numbers of a collective are equal; of a message's two sides one sends.
    side, sided = _numbered(joint, np.where(message, sends, rows["sequence"]))
    wanted = np.where(message, 2, _sizes(job, rows))
    if (sizes[joint] != wanted).any() or (sided[side] != np.where(message, 1, wanted)).any():
        raise _NotWholeError("operations of the ranks do not match each other")
    starts = np.flatnonzero(~joins)
    row = np.cumsum(~joins) - 1
    begin = np.maximum(np.minimum.reduceat(begin, starts), ended[starts])
    pairs = np.flatnonzero(message)[np.lexsort((sends[message], joint[message]))]
    kept = rows[starts]
    return TimedIteration(
        kept["rank"].astype(np.int64), hosts(job)[kept["rank"]], np.where(message, -1, joint)[starts], row[pairs].reshape(-1, 2),
        begin, np.maximum(begin, np.maximum.reduceat(end, starts)), kept["group"], functions[kept["function"]], number[starts],
        parts[0].iteration.duration, launched=launched[starts], before=before[starts],
    )  # fmt: skip


def _sizes(job: Job, rows: NDArray[Any]) -> Indices:
    """The ranks of each operation's communicator; −1 where it is gone."""
    groups, number = np.unique(rows["group"], return_inverse=True)
    found = [job.groups[group].nranks if group in job.groups else -1 for group in groups.tolist()]
    return np.array(found, np.int64)[number]


def _told_of(member: Member, own: Communicator) -> Iterator[DeviceCommunicator]:
    """What the shim tells of one communicator of a process."""
    for told in member.last.device.communicators if member.last.device is not None else ():
        if not told.finished and ((told.hash, told.rank) == (own.hash, own.rank) or told.inside_address == own.address):
            yield told


def _numbered(*columns: NDArray[Any]) -> tuple[Indices, Indices]:
    """A number for each row that is equal where all columns are, from 0; and how many rows have each."""
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        kinds, kind = np.unique(column, return_inverse=True)
        number = np.unique(number * len(kinds) + kind, return_inverse=True)[1]
    return number, np.bincount(number)


def _occurrence(key: Indices) -> Indices:
    """How many equal ones are before each."""
    order = np.argsort(key, kind="stable")
    found = np.empty(len(key), np.int64)
    found[order] = np.arange(len(key)) - np.searchsorted(key[order], key[order])
    return found


def _medians(values: Times, key: Indices) -> tuple[Times, Indices]:
    """The median of the values of each key (0 to the largest; nan where there is none), and of how many it is."""
    sizes = np.bincount(key)
    ordered, first = np.append(values[np.lexsort((values, key))], np.nan), np.cumsum(sizes) - sizes
    middle = (ordered[first + np.maximum(sizes - 1, 0) // 2] + ordered[first + sizes // 2]) / 2
    return np.where(sizes, middle, np.nan), sizes


# --- clocks of nodes ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ClockModel:
    """Clocks of nodes (sorted): by how much each is ahead of the first's, seconds, and the largest ``error`` that remains.

    ``error`` bounds every comparison of times between the first node and another; infinite where a node shares no operation.
    """

    nodes: Indices = field(default_factory=lambda: np.zeros(0, np.int64))
    offsets: Times = field(default_factory=lambda: np.zeros(0))
    error: float = 0.0

    def correct(self, node: Indices, time: Times) -> Times:
        """Times of many nodes on the first's clock."""
        corrected: Times = time - self.offsets[np.searchsorted(self.nodes, node)]
        return corrected

    def text(self) -> str:
        """How well they can be compared, in words; empty of one node."""
        if len(self.nodes) < 2:
            return ""
        if not np.isfinite(self.error):
            return "clocks of hosts cannot be compared: they have no operation in common"
        apart, known = float(np.abs(self.offsets).max()) * 1e3, f"known to ±{self.error * 1e3:.1f} ms by operations in common"
        return f"clocks of {len(self.nodes)} hosts differ by up to {apart:.1f} ms, {known}"


def estimate(node: Indices, operation: Indices, begin: Times, end: Times) -> ClockModel:
    """Estimate clocks. Rows are sides of operations: their node, the operation's number, begin and end on the node's clock (s).

    Every side of one operation must need every other's beginning (all collectives but rooted ones; of a message pass begin of the
    send and end of the receive with the receive's begin and the send's end as nan). The offset is in the middle of the tightest
    bounds over any way between two nodes, half their distance is the error. O(rows + operations × nodes² + nodes³).
    """
    if not len(node):
        return ClockModel()
    nodes, node = np.unique(node, return_inverse=True)
    numbers, operation = np.unique(operation, return_inverse=True)
    # The last to begin and the first to end of a node's sides bound tightest.
    begins, ends = np.full((len(numbers), len(nodes)), -np.inf), np.full((len(numbers), len(nodes)), np.inf)
    np.fmax.at(begins, (operation, node), begin)
    np.fmin.at(ends, (operation, node), end)
    time = begins.max(axis=1, keepdims=True)
    ends += DRIFT * (time.max() - time)
    ahead = np.stack([(own[:, None] - begins).min(axis=0) for own in ends.T])
    """How far the row's clock is ahead of the column's at most."""
    np.fill_diagonal(ahead, 0.0)
    for via in range(len(nodes)):
        ahead = np.minimum(ahead, ahead[:, via, None] + ahead[via])
    error = max(0.0, float((ahead[:, 0] + ahead[0]).max()) / 2)
    return ClockModel(nodes, (ahead[:, 0] - ahead[0]) / 2 if np.isfinite(error) else np.zeros(len(nodes)), error)
