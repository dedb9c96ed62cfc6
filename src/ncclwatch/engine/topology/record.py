"""What is recorded of a job: who is who, and what they called.

Who is who is exact, ranks that nobody observes included: NCCL gives every rank its peers' host and process hashes
(``ncclPeerInfo``), equal on all communicators of a job, so the one over all ranks names the members of the others.

Ranks of a stage run the same program, so the calls of at most ``SPECIMENS`` processes are kept in full, each in a ring; counts by
communicator and function are kept of everybody. Memory is bounded whatever the size of the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.functions import TYPES
from ncclwatch.engine.job import Group as JobGroup
from ncclwatch.engine.job import Identity, Job, assemble, identity_of
from ncclwatch.model.events import Flag, Function
from ncclwatch.model.state import Communicator, ProcessSample

LARGEST_WORLD = 1 << 20
"""Ranks: ten times the largest job designed for. What a target claims beyond it would only fill memory."""

SPECIMENS = 128
"""Processes: at most two for each of 64 stages, the deepest pipelines in use."""
BUDGET = 2_000_000
"""Operations kept over all specimens: 64 MB."""
LONGEST = 32_768
"""Operations kept of one specimen: ten iterations of 64 micro-batches of 12 layers with four calls each."""
THREADS = 1024
"""Threads of one process that are told apart: thread ids that keep changing do not fill memory."""
STUCK_GROUP = 4096
"""Operations: a group call with so many has lost its GroupEnd; an exchange with 1,024 peers, both ways, makes 2,048."""

FUNCTIONS = 16
"""Functions below this number are operations (``model.events.Function``)."""
POINT_TO_POINT = (int(Function.SEND), int(Function.RECV))
GATHER, SCATTER, SUM = int(Function.ALL_GATHER), int(Function.REDUCE_SCATTER), int(Function.ALL_REDUCE)

OPERATION = np.dtype(
    [
        ("time_ns", "<u8"),
        ("count", "<u8"),
        ("row", "<i4"),
        ("peer", "<i4"),
        ("call", "<u4"),
        ("function", "u1"),
        ("datatype", "i1"),
        ("thread", "u1"),
        ("spare", "u1"),
    ]
)
"""One operation, 32 bytes. ``call`` numbers calls: what lies between a GroupStart and its GroupEnd is one call."""

ELEMENT_BYTES = np.array([size for _, size in TYPES], np.int64)
"""By ``ncclDataType_t``."""


# --- who is who ----------------------------------------------------------------------------------------------------------------


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
    by_pid: dict[int, int] = field(default_factory=dict)
    """pid → process; −1 where several hosts have that pid"""
    rank: list[int] = field(default_factory=list)
    job_of: list[int] = field(default_factory=list)
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    """(process, address of the communicator) → row"""
    row_process: list[int] = field(default_factory=list)
    row_group: list[KnownGroup] = field(default_factory=list)
    row_rank: list[int] = field(default_factory=list)
    communicators: dict[int, Communicator] = field(default_factory=dict)
    """row → the communicator as it was last read (see ``note_counts``)"""
    _keys: NDArray[np.uint64] | None = None
    """Sorted hashes of the keys of ``rows``, whose values are in ``_sorted``: to look up whole batches."""
    _sorted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def note_counts(self, samples: Iterable[ProcessSample]) -> None:
        """Take what NCCL has counted by now."""
        for sample in samples:
            process = self.process.get((sample.process.host, sample.process.pid), -1)
            for own in sample.communicators:
                if (row := self.rows.get((process, own.address))) is not None:
                    self.communicators[row] = own

    def find(self, host: str, pid: int) -> int:
        """The process, or −1; without a host by its pid alone."""
        if host:
            found = self.process.get((host, pid))
            if found is not None:
                return found
        return self.by_pid.get(pid, -1)

    def find_calls(self, events: NDArray[Any], host: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Process and row of each call record, −1 where unknown."""
        if self._keys is None:
            hashed = _hash(*np.array(list(self.rows), np.uint64).reshape(-1, 2).T)
            order = np.argsort(hashed)
            self._keys, self._sorted = hashed[order], np.array(list(self.rows.values()), np.int64)[order]
        pids, inverse = np.unique(events["pid"], return_inverse=True)
        process = np.array([self.find(host, pid) for pid in pids.tolist()], np.int64)[inverse]
        row = np.full(len(events), -1, np.int64)
        if len(self._keys):
            wanted = _hash(process.astype(np.uint64), events["comm"].astype(np.uint64))
            place = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
            hit = (self._keys[place] == wanted) & (process >= 0) & ((events["flags"] & np.uint16(Flag.COMM_READ)) != 0)
            row[hit] = self._sorted[place[hit]]
        return process, row

    def _add_process(self, host: str, pid: int, rank: int, job: int) -> int:
        index = len(self.places)
        self.places.append((host, pid))
        self.process[host, pid] = index
        self.by_pid[pid] = -1 if pid in self.by_pid else index
        self.rank.append(rank)
        self.job_of.append(job)
        return index

    def _add_row(self, process: int, address: int, group: KnownGroup, comm_rank: int) -> None:
        self.rows[process, address] = len(self.row_process)
        group.rows.append(len(self.row_process))
        self.row_process.append(process)
        self.row_group.append(group)
        self.row_rank.append(comm_rank)


def from_samples(samples: Sequence[ProcessSample]) -> JobMap:
    """The map of all jobs among the processes; O(processes × communicators + ranks)."""
    result = JobMap()
    for number, job in enumerate(job for job in assemble([[sample] for sample in samples]) if job.groups):
        result.jobs.append(_known_job(result, number, job))
    return result


def _known_job(result: JobMap, number: int, job: Job) -> KnownJob:
    believed = [group for group in job.groups.values() if 0 < group.nranks <= LARGEST_WORLD]
    for member in job.members:
        if member.rank is not None and not 0 <= member.rank < LARGEST_WORLD:
            member.rank = None
    said = [size for member in job.members if 0 < (size := member.info.world_size or 0) <= LARGEST_WORLD]
    ranks = [member.rank + 1 for member in job.members if member.rank is not None]
    world = max([1, *said, *ranks, *(group.nranks for group in believed)])
    process_of = {
        member.index: result._add_process(
            member.info.host, member.info.pid, member.rank if member.rank is not None else -1, number
        )
        for member in job.members
    }
    identity = _identities(job, world)
    known = KnownJob(world, list(process_of.values()), [])
    for group in believed:
        ranks_of, hosts = _global_ranks(group, identity)
        one = KnownGroup(group.id, group.hash, group.nranks, ranks_of, hosts=hosts)
        for comm_rank, (member, own) in group.members.items():
            result._add_row(process_of[member.index], own.address, one, comm_rank)
        known.groups.append(one)
    return known


def _identities(job: Job, world: int) -> dict[Identity, int]:
    """Global rank of every process that some communicator knows: of observed ones, and by the numbering of the one over all."""
    known: dict[Identity, int] = {}
    for group in job.groups.values():
        if not group.members:
            continue
        view = next(iter(group.members.values()))[1]
        everybody = group.nranks == world and all(member.rank == rank for rank, (member, _) in group.members.items())
        for rank in range(len(view.peers)):
            identity, holder = identity_of(view, rank), group.holder(rank)
            if identity is None:
                continue
            if holder is not None and holder.rank is not None:
                known[identity] = holder.rank
            elif everybody:
                known.setdefault(identity, rank)
    return known


def _global_ranks(group: JobGroup, identity: dict[Identity, int]) -> tuple[NDArray[np.int32], int]:
    """The job's ranks of a group, and the number of hosts they are on."""
    ranks = np.full(group.nranks, -1, np.int32)
    view = next(iter(group.members.values()))[1]
    for rank in range(min(group.nranks, len(view.peers))):
        ranks[rank] = identity.get(identity_of(view, rank) or (-1, -1), -1)
    for rank, (member, _) in group.members.items():
        if 0 <= rank < group.nranks and member.rank is not None:
            ranks[rank] = member.rank
    return ranks, len({peer.host_hash for peer in view.peers if peer.host_hash is not None})


def _hash(process: NDArray[np.uint64], address: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        mixed: NDArray[np.uint64] = (address ^ (process * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
    return mixed


# --- what they called ----------------------------------------------------------------------------------------------------------


def chosen_specimens(ranks: Sequence[int]) -> list[int]:
    """Indices of the processes to keep in full: all, or ranks spread irregularly, so that no dimension of a layout is missed."""
    if len(ranks) <= SPECIMENS:
        return list(range(len(ranks)))
    order = np.argsort(ranks, kind="stable").tolist()
    # Multiples of the golden ratio fall everywhere and never in step with a power of two.
    picks = np.floor(np.mod(np.arange(4 * SPECIMENS) * 0.6180339887498949, 1.0) * len(order)).astype(int)
    return [order[i] for i in dict.fromkeys(picks.tolist())][:SPECIMENS]


@dataclass(slots=True)
class _Ring:
    operations: NDArray[Any]
    written: int = 0
    calls: int = 0
    depth: dict[int, int] = field(default_factory=dict)
    threads: dict[int, int] = field(default_factory=dict)

    def extend(self, part: NDArray[Any]) -> None:
        size = len(self.operations)
        kept = part[-size:]
        at = (self.written + len(part) - len(kept) + np.arange(len(kept))) % size
        self.operations[at] = kept
        self.written += len(part)

    def history(self) -> NDArray[Any]:
        if self.written <= len(self.operations):
            return self.operations[: self.written].copy()
        return np.roll(self.operations, -self.written)


class Recorder:
    """Counts and rings. Rows and processes are those of a ``JobMap``."""

    def __init__(self, specimens: Sequence[int], rows: int) -> None:
        depth = max(1024, min(LONGEST, BUDGET // max(1, len(specimens))))
        self._rings = {process: _Ring(np.zeros(depth, OPERATION)) for process in specimens}
        self.calls: NDArray[np.int64] = np.zeros((rows, FUNCTIONS), np.int64)
        """Operations by row and function. Shape (rows, FUNCTIONS)."""
        self.elements: NDArray[np.float64] = np.zeros((rows, FUNCTIONS))
        """Sum of the elements named in the calls, likewise."""
        self.taken = 0

    def add(self, events: NDArray[Any], process: NDArray[np.int64], row: NDArray[np.int64]) -> None:
        """Take calls (operations and group starts and ends, in order of time) with their process and row (−1: a group's)."""
        operation = row >= 0
        function = events["function"].astype(np.int64)
        # Of all the rows a batch of one node touches a few.
        touched, which = np.unique(row[operation] * FUNCTIONS + function[operation], return_inverse=True)
        weights = np.minimum(events["count"][operation], np.uint64(1 << 50)).astype(np.float64)
        self.calls.reshape(-1)[touched] += np.bincount(which, minlength=len(touched))
        self.elements.reshape(-1)[touched] += np.bincount(which, weights=weights, minlength=len(touched))
        self.taken += int(np.count_nonzero(operation))
        at = np.flatnonzero(np.isin(process, list(self._rings)))
        if not len(at):
            return
        order = at[np.argsort(process[at], kind="stable")]
        bounds = np.flatnonzero(np.diff(process[order])) + 1
        for part in np.split(order, bounds):
            self._extend(self._rings[int(process[part[0]])], events[part], row[part])

    def _extend(self, ring: _Ring, events: NDArray[Any], row: NDArray[np.int64]) -> None:
        starts_call = np.zeros(len(events), np.bool_)
        threads = np.zeros(len(events), np.uint8)
        opens, closes = events["function"] == Function.GROUP_START, events["function"] == Function.GROUP_END
        if len(ring.depth) > THREADS:
            ring.depth.clear()
            ring.threads.clear()
        for tid in np.unique(events["tid"]).tolist():
            own = np.flatnonzero(events["tid"] == tid)
            threads[own] = ring.threads.setdefault(tid, min(255, len(ring.threads)))
            change = opens[own].astype(np.int64) - closes[own].astype(np.int64)
            total = ring.depth.get(tid, 0) + np.cumsum(change)
            # An end without a start (it was lost) leaves the depth at 0.
            depth = total - np.minimum(np.minimum.accumulate(total), 0)
            starts_call[own] = (depth - change <= 0) & ~closes[own]
            ring.depth[tid] = int(depth[-1])
        call = ring.calls + np.cumsum(starts_call)
        ring.calls = int(call[-1])
        operation = row >= 0
        part = np.zeros(int(np.count_nonzero(operation)), OPERATION)
        for name in ("time_ns", "count", "peer", "function"):
            part[name] = events[name][operation]
        part["datatype"] = np.clip(events["datatype"][operation], -1, 127)
        part["row"], part["call"], part["thread"] = row[operation], call[operation], threads[operation]
        ring.extend(part)
        if len(part) and int(np.count_nonzero(part["call"] == part["call"][-1])) >= STUCK_GROUP:
            ring.depth.clear()

    def history(self, process: int) -> NDArray[Any]:
        """The kept operations of a specimen, oldest first."""
        return self._rings[process].history()

    def inherit(self, older: Recorder, processes: dict[int, int], rows: NDArray[np.int64]) -> None:
        """Take over what an older recorder kept, under new numbers: ``processes`` old → new, ``rows`` old → new or −1."""
        known = np.flatnonzero(rows >= 0)
        self.calls[rows[known]] += older.calls[known]
        self.elements[rows[known]] += older.elements[known]
        self.taken = int(self.calls.sum())
        for old, new in processes.items():
            before, after = older._rings.get(old), self._rings.get(new)
            if before is None or after is None:
                continue
            kept = before.history()
            kept["row"] = rows[kept["row"]]
            after.calls, after.depth, after.threads = before.calls, before.depth, before.threads
            after.extend(kept[kept["row"] >= 0])

    @property
    def specimens(self) -> list[int]:
        """Processes that are kept in full."""
        return list(self._rings)


def element_bytes(datatype: NDArray[Any]) -> NDArray[np.int64]:
    """Bytes of an element by ``ncclDataType_t``; 4 where unknown."""
    known = (datatype >= 0) & (datatype < len(ELEMENT_BYTES))
    result: NDArray[np.int64] = np.where(known, ELEMENT_BYTES[np.where(known, datatype, 0)], 4)
    return result
