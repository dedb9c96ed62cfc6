"""What is recorded of a job: who is who, and what they called.

Who is who is exact, ranks that nobody observes included: NCCL gives every rank its peers' host and process hashes
(``ncclPeerInfo``), equal on all communicators of a job, so the one over all ranks names the members of the others.

Ranks of a stage run the same program, so the latest calls of at most ``SPECIMENS`` processes are kept in full; of everybody they
are counted by communicator and function. Memory is bounded whatever the size of the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.job import Group as JobGroup
from ncclwatch.engine.job import Identity, Job, assemble, identity_of
from ncclwatch.model.events import Flag, Function
from ncclwatch.model.groups import group_depth
from ncclwatch.model.state import Communicator, ProcessSample

LARGEST_WORLD = 1 << 20
"""Bound: ranks: ten times the largest job designed for. What a target claims beyond it would only fill memory."""

SPECIMENS = 128
"""Bound: processes: at most two for each of 64 stages, the deepest pipelines in use."""
BUDGET = 2_000_000
"""Bound: operations kept over all specimens: 64 MB."""
LONGEST = 32_768
"""Bound: operations kept of one specimen: ten iterations of 64 micro-batches of 12 layers with four calls each."""
THREADS = 1024
"""Bound: threads of one process that are told apart: thread ids that keep changing do not fill memory."""
STUCK_GROUP = 4096
"""Bound: operations: a group call with so many has lost its GroupEnd; an exchange with 1,024 peers, both ways, makes 2,048."""

FUNCTIONS = 16
"""Fact: functions below this number are operations (``model.events.Function``)."""
POINT_TO_POINT = (int(Function.SEND), int(Function.RECV))
GATHER, SCATTER, SUM = int(Function.ALL_GATHER), int(Function.REDUCE_SCATTER), int(Function.ALL_REDUCE)

OPERATION = np.dtype(
    {
        "names": ["time_ns", "count", "row", "peer", "call", "function", "datatype", "thread", "spare"],
        "formats": ["<u8", "<u8", "<i4", "<i4", "<u4", "u1", "i1", "u1", "u1"],
    }
)
"""One operation, 32 bytes. ``call`` numbers calls: what lies between a GroupStart and its GroupEnd is one call."""


@dataclass(slots=True)
class KnownGroup:
    """One group as it is known from outside: ``ranks`` are global, in the communicator's order, −1 where unknown."""

    id: int
    hash: int
    nranks: int
    ranks: NDArray[np.int32]
    rows: list[int] = field(default_factory=list)
    hosts: int = 0
    """Number of hosts its members are on, 0 when unknown."""


@dataclass(slots=True)
class KnownJob:
    """One job: its processes (indices into ``JobMap``) and groups."""

    world: int
    processes: list[int]
    groups: list[KnownGroup]


@dataclass(slots=True)
class JobMap:
    """Every process and communicator, numbered. A row is one communicator of one process."""

    jobs: list[KnownJob] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)
    """process → (host, pid)"""
    process: dict[tuple[str, int], int] = field(default_factory=dict)
    """(host, pid) → process; without a host −1 where several hosts have that pid"""
    rank: list[int] = field(default_factory=list)
    job_of: list[int] = field(default_factory=list)
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    """(process, address of the communicator) → row"""
    row_process: list[int] = field(default_factory=list)
    row_group: list[KnownGroup] = field(default_factory=list)
    row_rank: list[int] = field(default_factory=list)
    communicators: dict[int, Communicator] = field(default_factory=dict)
    """row → the communicator as it was last read (see ``note_counts``)"""

    def note_counts(self, samples: Iterable[ProcessSample]) -> None:
        """Take what NCCL has counted by now."""
        for sample in samples:
            process = self.process.get((sample.process.host, sample.process.pid), -1)
            for own in sample.communicators:
                if (row := self.rows.get((process, own.address))) is not None:
                    self.communicators[row] = own

    def find(self, host: str, pid: int) -> int:
        """The process, or −1; without a host by its pid alone."""
        return self.process.get((host, pid), self.process.get(("", pid), -1))

    def find_calls(self, events: NDArray[Any], host: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Process and row of each call record, −1 where unknown."""
        _, first, inverse = np.unique(mix(events["pid"], events["comm"]), return_index=True, return_inverse=True)
        process = [self.find(host, pid) for pid in events["pid"][first].tolist()]
        rows = [self.rows.get(key, -1) for key in zip(process, events["comm"][first].tolist(), strict=True)]
        row = np.array(rows, np.int64)[inverse]
        row[(events["flags"] & np.uint16(Flag.COMM_READ)) == 0] = -1
        return np.array(process, np.int64)[inverse], row


def from_samples(samples: Sequence[ProcessSample]) -> JobMap:
    """The map of all jobs among the processes; O(processes × communicators + ranks)."""
    result = JobMap()
    for job in assemble([[sample] for sample in samples]):
        if job.groups:
            result.jobs.append(_known_job(result, job))
    return result


def _known_job(result: JobMap, job: Job) -> KnownJob:
    believed = [group for group in job.groups.values() if 0 < group.nranks <= LARGEST_WORLD]
    world = max([1, *(group.nranks for group in believed)])
    process_of: dict[int, int] = {}
    for member in job.members:
        place = member.info.host, member.info.pid
        if member.rank is not None and not 0 <= member.rank < LARGEST_WORLD:
            member.rank = None
        rank = member.rank if member.rank is not None else -1
        said = member.info.world_size or 0
        world = max(world, rank + 1, said if said <= LARGEST_WORLD else 0)
        process = process_of[member.index] = result.process[place] = len(result.places)
        if place[0]:
            result.process["", place[1]] = -1 if ("", place[1]) in result.process else process
        result.places.append(place)
        result.rank.append(rank)
        result.job_of.append(len(result.jobs))
    known = KnownJob(world, list(process_of.values()), [_known_group(group, job.by_identity) for group in believed])
    for one, group in zip(known.groups, believed, strict=True):
        for comm_rank, (member, own) in group.members.items():
            process, row = process_of[member.index], len(result.row_process)
            result.rows[process, own.address] = row
            one.rows.append(row)
            result.row_process.append(process)
            result.row_group.append(one)
            result.row_rank.append(comm_rank)
    return known


def _known_group(group: JobGroup, rank_of: Mapping[Identity, int | None]) -> KnownGroup:
    ranks = np.full(group.nranks, -1, np.int32)
    view = next(iter(group.members.values()))[1]
    for rank in range(min(group.nranks, len(view.peers))):
        known = rank_of.get(identity_of(view, rank) or (-1, -1))
        ranks[rank] = -1 if known is None else known
    for rank, (member, _) in group.members.items():
        if 0 <= rank < group.nranks and member.rank is not None:
            ranks[rank] = member.rank
    hosts = {peer.host_hash for peer in view.peers} - {None}
    return KnownGroup(group.id, group.hash, group.nranks, ranks, hosts=len(hosts))


def choose_specimens(jobmap: JobMap, job: KnownJob) -> list[int]:
    """Processes to keep in full: all, or ranks spread irregularly, so that no dimension of a layout is missed."""
    if len(job.processes) <= SPECIMENS:
        return job.processes
    order = sorted(job.processes, key=lambda process: jobmap.rank[process])
    # Multiples of the golden ratio fall everywhere and never in step with a power of two.
    picks = (np.arange(4 * SPECIMENS) * 0.6180339887498949 % 1.0 * len(order)).astype(int)
    return [order[i] for i in dict.fromkeys(picks.tolist())][:SPECIMENS]


@dataclass(slots=True)
class _Latest:
    """The latest operations of one process, and the group calls its threads have open."""

    parts: deque[NDArray[Any]] = field(default_factory=deque)
    kept: int = 0
    calls: int = 0
    depth: dict[int, int] = field(default_factory=dict)
    threads: dict[int, int] = field(default_factory=dict)

    def extend(self, part: NDArray[Any], most: int) -> None:
        self.parts.append(part)
        self.kept += len(part)
        while self.kept - len(self.parts[0]) >= most:
            self.kept -= len(self.parts.popleft())


class Recorder:
    """Counts and rings. Rows and processes are those of a ``JobMap``."""

    def __init__(self, specimens: Sequence[int], rows: int) -> None:
        self._most = min(LONGEST, BUDGET // max(1, len(specimens)))
        self.specimens = specimens
        """Processes that are kept in full."""
        self._latest = {process: _Latest() for process in specimens}
        self.calls: NDArray[np.int64] = np.zeros((rows, FUNCTIONS), np.int64)
        """Operations by row and function. Shape (rows, FUNCTIONS)."""
        self.taken = 0

    def add(self, events: NDArray[Any], process: NDArray[np.int64], row: NDArray[np.int64]) -> None:
        """Take calls (operations, group starts and ends), process by process in order of time, with their row (−1: a group's)."""
        operation = row >= 0
        function = events["function"].astype(np.int64)
        # Of all the rows a batch of one node touches a few.
        touched, which = np.unique(row[operation] * FUNCTIONS + function[operation], return_inverse=True)
        self.calls.reshape(-1)[touched] += np.bincount(which, minlength=len(touched))
        self.taken += int(np.count_nonzero(operation))
        at = np.flatnonzero(np.isin(process, self.specimens))
        for part in np.split(at, np.flatnonzero(np.diff(process[at])) + 1) if len(at) else ():
            self._extend(self._latest[int(process[part[0]])], events[part], row[part])

    def _extend(self, latest: _Latest, events: NDArray[Any], row: NDArray[np.int64]) -> None:
        starts_call = np.zeros(len(events), np.bool_)
        threads = np.zeros(len(events), np.uint8)
        opens, closes = events["function"] == Function.GROUP_START, events["function"] == Function.GROUP_END
        if len(latest.depth) > THREADS:
            latest.depth.clear()
            latest.threads.clear()
        for tid in np.unique(events["tid"]).tolist():
            own = np.flatnonzero(events["tid"] == tid)
            threads[own] = latest.threads.setdefault(tid, min(255, len(latest.threads)))
            change = opens[own].astype(np.int64) - closes[own].astype(np.int64)
            depth = group_depth(change, latest.depth.get(tid, 0))
            starts_call[own] = (depth - change <= 0) & ~closes[own]
            latest.depth[tid] = int(depth[-1])
        call = latest.calls + np.cumsum(starts_call)
        latest.calls = int(call[-1])
        at = np.flatnonzero(row >= 0)
        part = np.zeros(len(at), OPERATION)
        for name in ("time_ns", "count", "peer", "function"):
            part[name] = events[name][at]
        part["datatype"] = np.clip(events["datatype"][at], -1, 127)
        part["row"], part["call"], part["thread"] = row[at], call[at], threads[at]
        latest.extend(part, self._most)
        if len(part) and int(np.count_nonzero(part["call"] == part["call"][-1])) >= STUCK_GROUP:
            latest.depth.clear()

    def history(self, process: int) -> NDArray[Any]:
        """The kept operations of a specimen, oldest first."""
        return np.concatenate([np.zeros(0, OPERATION), *self._latest[process].parts])[-self._most :]

    def inherit(self, older: Recorder, processes: dict[int, int], rows: NDArray[np.int64]) -> None:
        """Take over what an older recorder kept, under new numbers: ``processes`` old → new, ``rows`` old → new or −1."""
        known = np.flatnonzero(rows >= 0)
        self.calls[rows[known]] += older.calls[known]
        self.taken = int(self.calls.sum())
        for old, new in processes.items():
            if old in older._latest and new in self._latest:
                before, after = older._latest[old], self._latest[new]
                kept = older.history(old)
                kept["row"] = rows[kept["row"]]
                after.calls, after.depth, after.threads = before.calls, before.depth, before.threads
                after.extend(kept[kept["row"] >= 0], self._most)


def mix(*columns: NDArray[Any]) -> NDArray[np.uint64]:
    """A hash over columns of integers, of equal length (multiply and shift, as in splitmix64)."""
    result = np.full(len(columns[0]), 0x9E3779B97F4A7C15, np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            result = (result ^ column.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            result ^= result >> np.uint64(29)
    return result
