"""Who is who: processes, their ranks, and which communicator of which process belongs to which group.

From samples of memory this is exact, ranks that nobody observes included: NCCL gives every rank its peers' host and process
hashes (``ncclPeerInfo``), equal on all communicators of a job, so the one over all ranks names the members of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.job import Group as JobGroup
from ncclwatch.engine.job import Job, assemble
from ncclwatch.model.state import Communicator, ProcessSample

LARGEST_WORLD = 1 << 20
"""Sizes and ranks beyond this, which a target may claim, are not believed."""


@dataclass(slots=True)
class Facts:
    """One group as it is known from outside: ``ranks`` are global, in the communicator's order, −1 where unknown."""

    id: int
    hash: int
    nranks: int
    ranks: NDArray[np.int32]
    rows: list[int] = field(default_factory=list)
    hosts: int = 0
    """Number of hosts its members are on, 0 when unknown."""


@dataclass(slots=True)
class JobFacts:
    """One job: its processes (indices into ``JobMap``) and groups."""

    world: int
    processes: list[int]
    groups: list[Facts]
    process_of_rank: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class JobMap:
    """Every process and communicator, numbered. A row is one communicator of one process."""

    jobs: list[JobFacts] = field(default_factory=list)
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
    row_group: list[Facts] = field(default_factory=list)
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
        if host:
            found = self.process.get((host, pid))
            if found is not None:
                return found
        return self.by_pid.get(pid, -1)

    def _add_process(self, host: str, pid: int, rank: int, job: int) -> int:
        index = len(self.places)
        self.places.append((host, pid))
        self.process[host, pid] = index
        self.by_pid[pid] = -1 if pid in self.by_pid else index
        self.rank.append(rank)
        self.job_of.append(job)
        return index

    def _add_row(self, process: int, address: int, group: Facts, comm_rank: int) -> None:
        self.rows[process, address] = len(self.row_process)
        group.rows.append(len(self.row_process))
        self.row_process.append(process)
        self.row_group.append(group)
        self.row_rank.append(comm_rank)


def fingerprint(samples: Sequence[ProcessSample]) -> int:
    """Changes when a process or communicator comes or goes."""
    parts = []
    for sample in samples:
        parts.append((sample.process.host, sample.process.pid, sample.process.rank))
        parts.append(tuple(c.address for c in sample.communicators))  # type: ignore[arg-type]
    return hash(tuple(parts))


def from_samples(samples: Sequence[ProcessSample]) -> JobMap:
    """The map of all jobs among the processes; O(processes × communicators + ranks)."""
    result = JobMap()
    for number, job in enumerate(job for job in assemble([[sample] for sample in samples]) if job.groups):
        result.jobs.append(_job_facts(result, number, job))
    return result


def _job_facts(result: JobMap, number: int, job: Job) -> JobFacts:
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
    facts = JobFacts(world, list(process_of.values()), [])
    facts.process_of_rank = {result.rank[p]: p for p in facts.processes if result.rank[p] >= 0}
    for group in believed:
        ranks_of, hosts = _global_ranks(group, identity)
        one = Facts(group.id, group.hash, group.nranks, ranks_of, hosts=hosts)
        for comm_rank, (member, own) in group.members.items():
            result._add_row(process_of[member.index], own.address, one, comm_rank)
        facts.groups.append(one)
    return facts


def _identities(job: Job, world: int) -> dict[tuple[int, int], int]:
    """(host hash, pid hash) → global rank, from the communicator over all ranks where its numbering is the job's."""
    known: dict[tuple[int, int], int] = {}
    for group in job.groups.values():
        if not group.members:
            continue
        peers = next(iter(group.members.values()))[1].peers
        by_rank = {p.rank: (p.host_hash, p.pid_hash) for p in peers}
        everybody = group.nranks == world and all(member.rank == rank for rank, (member, _) in group.members.items())
        for rank, (host, pid) in by_rank.items():
            if host is None or pid is None:
                continue
            holder = group.members.get(rank)
            if holder is not None and holder[0].rank is not None:
                known[host, pid] = holder[0].rank
            elif everybody:
                known.setdefault((host, pid), rank)
    return known


def _global_ranks(group: JobGroup, identity: dict[tuple[int, int], int]) -> tuple[NDArray[np.int32], int]:
    ranks = np.full(group.nranks, -1, np.int32)
    peers = next(iter(group.members.values()))[1].peers if group.members else ()
    hosts = {peer.host_hash for peer in peers if peer.host_hash is not None}
    for peer in peers:
        if 0 <= peer.rank < group.nranks and peer.host_hash is not None and peer.pid_hash is not None:
            ranks[peer.rank] = identity.get((peer.host_hash, peer.pid_hash), -1)
    for rank, (member, _) in group.members.items():
        if 0 <= rank < group.nranks and member.rank is not None:
            ranks[rank] = member.rank
    return ranks, len(hosts)
