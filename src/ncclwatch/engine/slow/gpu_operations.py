"""What the shims tell of every operation on every GPU of a job, in columns; and what follows from it without a dependency graph.

All ranks leave a collective together, so who was in it for a shorter time came later (CCL-D 4.2.2). End on node a − begin on node
b bounds (clock of a − clock of b) from above: nobody ends a collective before all began it, or receives what was not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.cadence import Cadence, Iteration, Times
from ncclwatch.engine.evidence.device import told_of
from ncclwatch.engine.patience import BARRIER_ELEMENTS
from ncclwatch.engine.slow.detect import ENOUGH
from ncclwatch.engine.slow.findings import hosts
from ncclwatch.engine.slow.snapshot import NEAR_SHARE
from ncclwatch.model.columns import medians, numbered
from ncclwatch.model.device import DeviceCommunicator, KernelState
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.job import Job

Indices = NDArray[np.int64]
Name = tuple[int, str, int]
"""(group, function, how many of these were before it in the iteration)"""
DRIFT = 1e-4
"""Fact: two common quartzes, each wrong by 50 ppm: what bounds an offset now bounds it less closely the older it is."""
KEPT_OPERATIONS = 1 << 16
"""Bound: operations of a job that are kept, the newest (memory: 6 MiB)."""
LEAST_S = 0.002
"""Unit: s. From: threads that poll see a kernel's begin and end: by less no two times of GPUs differ (chosen, not measured)."""
LARGEST_JOB = 64
"""Bound: ranks of a job whose iterations are put together (time and memory)."""
NEWEST = 128
"""Bound: iterations times ranks that are put together in one sample: the newest iterations, two at least."""
COLLECTIVE, BARRIER, SEND, RECEIVE = range(4)
OPERATION = np.dtype(
    [
        ("rank", "<i4"), ("own", "<i4"), ("group", "<u8"), ("kind", "<i4"), ("function", "<i4"), ("peer", "<i4"),
        ("sequence", "<i8"), ("ordinal", "<i8"), ("launched", "<f8"), ("begin", "<f8"), ("end", "<f8"), ("lasted", "<f8"),
        ("missed", "<f8"),
    ]
)  # fmt: skip
"""One operation of one rank. ``rank`` is a place among the job's members, ``own`` the rank in the communicator, whose operations
``ordinal`` counts. Times are seconds of the host's monotonic clock; NaN: not reported. ``missed`` is when the last one before it
that was seen was launched, if those between the two were not (else inf).
"""


@dataclass(slots=True)
class Operations:
    """What was observed of one iteration, in columns, sorted by rank and in program order.

    ``joint`` numbers the collective an operation is part of, equal on all its ranks; −1 for messages. ``needs`` has shape (n, 2):
    operation, and an operation of another rank whose beginning it needs (a receive its send). Times are seconds of nodes' clocks:
    if known ``launched`` is when the host launched each, ``before`` when its rank's iteration before ended. Nodes count from 0.
    """

    rank: Indices
    node: Indices
    joint: Indices
    needs: Indices
    begin: Times
    end: Times
    launched: Times | None = field(default=None, kw_only=True)
    before: Times | None = field(default=None, kw_only=True)


@dataclass(slots=True)
class TimedIteration(Operations):
    """One iteration in wall time; ranks are places among members, ``number`` counts a function on a communicator."""

    group: NDArray[np.uint64]
    function: NDArray[np.str_]
    number: Indices
    called_s: float

    def name(self, operation: int) -> Name:
        """What an operation is called."""
        return int(self.group[operation]), str(self.function[operation]), int(self.number[operation])


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
        """By rank and group ordinal and launch of the last operation that ended or was not observed; whether none is newer."""
        self._offset = np.zeros(0)
        """Of each rank's host, wall clock minus monotonic clock, seconds."""
        self.functions: dict[str, int] = {}
        """Names of functions, and the numbers that stand for them."""
        self._until = 0.0

    def take(self, job: Job) -> bool:
        """Take what the newest samples tell; False: processes are numbered anew, and what was taken is forgotten."""
        numbered = tuple(member.info.key for member in job.members)
        same = numbered == self._numbered
        if not same:
            self._begin(numbered)
        if all(member.last.device is None for member in job.members):
            return same
        made = [
            row for group in job.groups.values() for own, (member, view) in group.members.items()
            if (told := told_of(member, view)) is not None for row in self._newer(job.place_of[member.index], own, group.id, told)
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
            function = self.functions.setdefault(one.function, len(self.functions))
            missed = launched if one.ordinal > last + 1 else np.inf
            last, launched = one.ordinal, one.launched_ns / 1e9
            yield (
                rank, own, group, kind, function, -1 if one.peer is None else one.peer,
                -1 if one.sequence is None else one.sequence, last, launched, begin, end, lasted, missed,
            )  # fmt: skip
        self._last[rank, group] = last, launched, last >= told.operations

    # --- collectives that all ranks have told ------------------------------------------------------------------------------

    def complete(self, job: Job) -> tuple[Indices, Indices, Times]:
        """Collectives all ranks have told: places of their rows, number of each's collective, end of each collective."""
        places = np.flatnonzero((self.rows["kind"] == COLLECTIVE) & np.isfinite(self.rows["end"]))
        rows = self.rows[places]
        number = np.where(rows["sequence"] >= 0, rows["sequence"], rows["ordinal"])
        key, sizes = _numbered(rows["group"], rows["function"], number)
        whole = sizes[key] == _sizes(job, rows)
        key = np.unique(key[whole], return_inverse=True)[1]
        ended = np.full(int(key.max(initial=-1)) + 1, -np.inf)
        np.maximum.at(ended, key, (rows["end"] + self._offset[rows["rank"]])[whole])
        return places[whole], key, ended

    def starts(self, job: Job, since: float) -> dict[int, Start]:
        """By place among the job's members: whose GPU has come late to collectives since a moment (wall time)."""
        places, key, ended = self.complete(job)
        recent = ended[key] >= since
        rows, key = self.rows[places[recent]], np.unique(key[recent], return_inverse=True)[1]
        usual, _ = medians(rows["lasted"], key)
        late, rounds = medians(usual[key] - rows["lasted"], rows["rank"])
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
        newest = [one for one in known[0].iterations if one.begin > self._until] if not self.problem else []
        if not newest:
            return []
        rows = self.rows[np.lexsort((self.rows["ordinal"], self.rows["launched"], self.rows["rank"]))]
        for name in ("begin", "end"):
            rows[name] += self._offset[rows["rank"]]
        of_rank = np.split(rows, np.searchsorted(rows["rank"], np.arange(1, len(job.members))))
        found = []
        for iteration in newest[-max(2, NEWEST // len(job.members)) :]:
            try:
                found.append(self._joined(job, iteration, self._parts(job, iteration, of_rank, known)))
                self.problem = ""
            except _NotWholeError as why:
                if not str(why):
                    break
                self.problem = str(why)
            self._until = iteration.begin
        return found

    def _parts(
        self, job: Job, iteration: Iteration, of_rank: Sequence[NDArray[Any]], cadences: Sequence[Cadence]
    ) -> list[tuple[NDArray[Any], float]]:
        """Each member's part of the first one's iteration: hosts may begin it far apart, but it ends for all alike."""
        parts = [self._part(job, 0, of_rank[0], iteration)]
        ended = parts[0][0]["end"].max()
        for at, (rows, cadence) in enumerate(zip(of_rank[1:], cadences[1:], strict=True), 1):
            own = list(cadence.iterations)
            ends = np.r_[-np.inf, rows["end"]]
            apart = np.abs(ends[np.searchsorted(rows["launched"], [one.end for one in own])] - ended)
            if not (apart <= iteration.duration / 2).any():
                came = bool((ends > ended).any())
                raise _NotWholeError(f"{job.members[at].label}: its iterations do not fit those of the others" if came else "")
            parts.append(self._part(job, at, rows, own[int(np.nanargmin(apart))]))
        return parts

    def _part(self, job: Job, at: int, rows: NDArray[Any], iteration: Iteration) -> tuple[NDArray[Any], float]:
        """A member's operations in one of its iterations, by launch, and when its iteration before ended (wall time)."""
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
        return chosen, float(np.nanmax(before["end"]))

    def _joined(self, job: Job, iteration: Iteration, parts: Sequence[tuple[NDArray[Any], float]]) -> TimedIteration:
        """The iteration of all ranks. Messages of one group call are one kernel, and one row."""
        rows = np.concatenate([part for part, _ in parts])
        message, sends = rows["kind"] >= SEND, rows["kind"] == SEND
        ended = np.concatenate([np.r_[-np.inf, np.maximum.accumulate(part["end"])[:-1]] for part, _ in parts])
        overlap = ended - rows["begin"]
        joins = message & np.r_[False, message[:-1]] & (overlap > 0)
        # Polling threads that want for CPU are late by more, and so is the iteration.
        allowed = max(LEAST_S, NEAR_SHARE * max(part["end"][-1] - part["begin"][0] for part, _ in parts))
        if (~joins & (overlap > allowed)).any():
            label = job.members[int(rows["rank"][np.argmax(~joins & (overlap > allowed))])].label
            raise _NotWholeError(f"{label}: operations overlap on its GPU, so their order is not known")
        joint, number = _matched(job, rows)
        starts = np.flatnonzero(~joins)
        kept, row = rows[starts], np.cumsum(~joins) - 1
        begin = np.maximum(np.minimum.reduceat(rows["begin"], starts), ended[starts])
        pairs = np.flatnonzero(message)[np.lexsort((sends[message], joint[message]))]
        return TimedIteration(
            kept["rank"].astype(np.int64), hosts(job)[kept["rank"]], np.where(message, -1, joint)[starts],
            row[pairs].reshape(-1, 2), begin, np.maximum(begin, np.maximum.reduceat(rows["end"], starts)), kept["group"],
            np.array(list(self.functions))[kept["function"]], number[starts], iteration.duration,
            launched=kept["launched"] + self._offset[kept["rank"]], before=np.array([b for _, b in parts])[kept["rank"]],
        )  # fmt: skip


def _matched(job: Job, rows: NDArray[Any]) -> tuple[Indices, Indices]:
    """The collective or message that each row of an iteration is one side of, and its number among its rank's own of that kind.

    The k-th of its kind on one rank is that on the others; the k-th send to a rank is its k-th receive.
    """
    message, sends = rows["kind"] >= SEND, rows["kind"] == SEND
    peer = np.where(message, rows["peer"], -1)
    kind = _numbered(rows["rank"], rows["group"], rows["function"], peer)[0]
    order = np.argsort(kind, kind="stable")
    number = np.empty(len(rows), np.int64)
    number[order] = np.arange(len(rows)) - np.searchsorted(kind[order], kind[order])
    sender, receiver = np.where(sends, rows["own"], peer), np.where(sends, peer, rows["own"])
    ends = [np.where(message, side, -1) for side in (sender, receiver)]
    joint, sizes = _numbered(rows["group"], np.where(message, -1, rows["function"]), *ends, number)
    # Sequence numbers of a collective are equal; of a message's two sides one sends.
    side, sided = _numbered(joint, np.where(message, sends, rows["sequence"]))
    wanted = np.where(message, 2, _sizes(job, rows))
    if (sizes[joint] != wanted).any() or (sided[side] != np.where(message, 1, wanted)).any():
        raise _NotWholeError("operations of the ranks do not match each other")
    return joint, number


def _sizes(job: Job, rows: NDArray[Any]) -> Indices:
    """The ranks of each operation's communicator; −1 where it is gone."""
    groups, number = np.unique(rows["group"], return_inverse=True)
    found = [job.groups[group].nranks if group in job.groups else -1 for group in groups.tolist()]
    return np.array(found, np.int64)[number]


def _numbered(*columns: NDArray[Any]) -> tuple[Indices, Indices]:
    """A number for each row that is equal where all columns are, from 0; and how many rows have each."""
    number = numbered([np.asarray(column, np.int64) for column in columns])
    return number, np.bincount(number)


# --- clocks of nodes ----------------------------------------------------------------------------------------------------------


class ClockModel(NamedTuple):
    """Clocks of nodes ahead of the first's, seconds; ``error`` bounds every comparison, infinite where nothing is shared."""

    offsets: Times
    error: float = 0.0

    def correct(self, node: Indices, time: Times) -> Times:
        """Times of many nodes on the first's clock."""
        return time - self.offsets[node]

    def text(self) -> str:
        """How well they can be compared, in words; empty of one node."""
        if len(self.offsets) < 2:
            return ""
        if not np.isfinite(self.error):
            return "clocks of hosts cannot be compared: they have no operation in common"
        apart, known = float(np.abs(self.offsets).max()) * 1e3, f"known to ±{self.error * 1e3:.1f} ms by operations in common"
        return f"clocks of {len(self.offsets)} hosts differ by up to {apart:.1f} ms, {known}"


def estimate(node: Indices, operation: Indices, begin: Times, end: Times) -> ClockModel:
    """Clocks by sides of operations: their node (from 0), the operation's number, begin and end on the node's clock (s), of shape
    (sides,). Every side must need every other's beginning (of a message pass begin of the send and end of the receive, else nan).
    The offset is in the middle of the tightest bounds over any way between two nodes, half their distance is the error.
    O(sides + operations × nodes² + nodes³).
    """
    nodes, (numbers, operation) = int(node.max()) + 1, np.unique(operation, return_inverse=True)
    # The last to begin and the first to end of a node's sides bound tightest.
    begins, ends = np.full((len(numbers), nodes), -np.inf), np.full((len(numbers), nodes), np.inf)
    np.fmax.at(begins, (operation, node), begin)
    np.fmin.at(ends, (operation, node), end)
    time = begins.max(axis=1, keepdims=True)
    ends += DRIFT * (time.max() - time)
    # How far the row's clock is ahead of the column's at most.
    ahead = np.stack([(own[:, None] - begins).min(axis=0) for own in ends.T])
    np.fill_diagonal(ahead, 0.0)
    for via in range(nodes):
        ahead = np.minimum(ahead, ahead[:, via, None] + ahead[via])
    error = max(0.0, float((ahead[:, 0] + ahead[0]).max()) / 2)
    return ClockModel((ahead[:, 0] - ahead[0]) / 2 if np.isfinite(error) else np.zeros(nodes), error)
