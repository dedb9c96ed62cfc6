"""Who is who in the jobs whose calls are followed: processes and communicators, numbered.

NCCL gives every rank its peers' host and process hashes (``ncclPeerInfo``), equal on all communicators of a job, so the one over
all ranks names the members of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.call_order import MARKS
from ncclwatch.collect.ledger import mix
from ncclwatch.model.events import Function
from ncclwatch.model.job import Job, assemble, identity_of
from ncclwatch.model.state import Communicator, ProcessSample

LARGEST_WORLD = 1 << 20
"""Bound: ranks: ten times the largest job designed for. What a target claims beyond it would only fill memory."""
SPECIMENS = 128
"""Bound: processes: at most two for each of 64 stages, the deepest pipelines in use."""
GATHER, SCATTER, SUM = int(Function.ALL_GATHER), int(Function.REDUCE_SCATTER), int(Function.ALL_REDUCE)


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

    def find_calls(self, calls: NDArray[Any], host: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Process and row of each call, −1 where unknown; group starts and ends have no row."""
        _, first, inverse = np.unique(mix(calls["pid"], calls["comm"]), return_index=True, return_inverse=True)
        process = [self.find(host, pid) for pid in calls["pid"][first].tolist()]
        rows = [self.rows.get(key, -1) for key in zip(process, calls["comm"][first].tolist(), strict=True)]
        row = np.where(np.isin(calls["function"], MARKS), -1, np.array(rows, np.int64)[inverse])
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
    worlds = [group.nranks for group in believed]
    process_of: dict[int, int] = {}
    for member in job.members:
        place = member.info.host, member.info.pid
        if member.rank is not None and not 0 <= member.rank < LARGEST_WORLD:
            member.rank = None
        rank = member.rank if member.rank is not None else -1
        worlds += [rank + 1, member.info.world_size or 0]
        process = process_of[member.index] = result.process[place] = len(result.places)
        if place[0]:
            result.process["", place[1]] = -1 if ("", place[1]) in result.process else process
        result.places.append(place)
        result.rank.append(rank)
        result.job_of.append(len(result.jobs))
    known = KnownJob(max([1, *(world for world in worlds if world <= LARGEST_WORLD)]), list(process_of.values()), [])
    for group in believed:
        ranks = np.full(group.nranks, -1, np.int32)
        view = next(iter(group.members.values()))[1]
        for rank in range(min(group.nranks, len(view.peers))):
            of_job = job.by_identity.get(identity_of(view, rank) or (-1, -1))
            ranks[rank] = -1 if of_job is None else of_job
        hosts = {peer.host_hash for peer in view.peers} - {None}
        one = KnownGroup(group.id, group.hash, group.nranks, ranks, hosts=len(hosts))
        known.groups.append(one)
        for rank, (member, own) in group.members.items():
            if 0 <= rank < group.nranks and member.rank is not None:
                ranks[rank] = member.rank
            process, row = process_of[member.index], len(result.row_process)
            result.rows[process, own.address] = row
            one.rows.append(row)
            result.row_process.append(process)
            result.row_group.append(one)
            result.row_rank.append(rank)
    return known


def choose_specimens(jobmap: JobMap, job: KnownJob) -> list[int]:
    """Processes to keep in full: all, or ranks spread irregularly, so that no dimension of a layout is missed."""
    if len(job.processes) <= SPECIMENS:
        return job.processes
    order = sorted(job.processes, key=lambda process: jobmap.rank[process])
    # Multiples of the golden ratio fall everywhere and never in step with a power of two.
    picks = (np.arange(4 * SPECIMENS) * 0.6180339887498949 % 1.0 * len(order)).astype(int)
    return [order[i] for i in dict.fromkeys(picks.tolist())][:SPECIMENS]
