"""Assemble jobs from what was read of single processes: which processes share communicators, and who is which rank.

A communicator is known by a number of our own, its *group*: in older releases (2.21.5) two splits of one parent may have one
``commHash`` (``src/init.cc``, ``commId``); then the addresses that ranks exchange (``ncclPeerInfo.comm``) tell them apart.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import chain, compress
from operator import attrgetter, itemgetter, or_

from ncclwatch.model.device import DeviceSample
from ncclwatch.model.progress import progressed
from ncclwatch.model.state import Communicator, ProcessInfo, ProcessSample, Transport
from ncclwatch.model.verdict import CommunicatorRef

STOPPED_STATES = frozenset("Tt")
"""Letters of /proc/PID/stat for a process that a signal (T) or a debugger (t) has stopped."""
GONE_STATES = frozenset("ZX")
COUNTS_PROXY_WORK_FROM = (2, 27, 3)
"""Fact: from here on ``opCount`` is no count of launches (``src/enqueue.cc``); no member of the structure tells it."""


class Member:
    """One observed process with its samples in time order; ``halted``: stopped or ended, so that it waits for nobody."""

    __slots__ = ("gone", "halted", "index", "last", "rank", "samples", "stopped")

    def __init__(self, index: int, samples: Sequence[ProcessSample]) -> None:
        """``index`` counts the processes of all jobs."""
        self.index, self.samples, self.last = index, samples, (last := samples[-1])
        self.rank: int | None = last.rank
        self.gone = last.run_state in GONE_STATES
        self.stopped = last.run_state in STOPPED_STATES and samples[-2:][0].run_state in STOPPED_STATES
        self.halted = self.stopped or self.gone

    @property
    def info(self) -> ProcessInfo:
        """Identity of the process."""
        return self.last.process

    @property
    def still_s(self) -> float:
        """For how many seconds NCCL has not moved in it, as far as the samples tell; 0 when it moved in the last interval."""
        samples = self.samples
        since = len(samples) - 1
        while since > 0 and not progressed(samples[since - 1], samples[since]):
            since -= 1
        return (samples[-1].time_ns - samples[since].time_ns) / 1e9

    @property
    def label(self) -> str:
        """How a person knows this process: ``rank 2 (node1, pid 4711)``."""
        host, pid = self.info.host, self.info.pid
        return f"rank {self.rank} ({host}, pid {pid})" if self.rank is not None else f"pid {pid} on {host}"


Held = tuple[Member, Communicator]
"""A process and its view of a communicator."""
Identity = tuple[int, int]
"""What NCCL knows of a process on all communicators alike: (``hostHash``, ``pidHash``) of ``ncclPeerInfo``."""


@dataclass
class Group:
    """One communicator by its observed members; ``id`` is ours, ``hash`` NCCL's; ``ranks``: process index → its rank there."""

    id: int
    hash: int
    nranks: int
    members: dict[int, Held]
    ranks: dict[int, int]

    @cached_property
    def views(self) -> list[Communicator]:
        """Its members' views of it."""
        return [own for _, own in self.members.values()]

    @cached_property
    def missing(self) -> list[int]:
        """Ranks of the communicator that no observed process holds."""
        return [rank for rank in range(self.nranks) if rank not in self.members]

    def holder(self, rank: int) -> Member | None:
        """The observed process that is a rank of it."""
        return self.members[rank][0] if rank in self.members else None

    def reference(self) -> CommunicatorRef:
        """The communicator as a verdict names it."""
        return CommunicatorRef(hash=f"{self.hash:016x}", nranks=self.nranks)

    def identity(self, rank: int) -> Identity | None:
        """Who a rank of it is, where anybody's view of its peers could be read."""
        return next((found for _, own in self.members.values() if (found := identity_of(own, rank)) is not None), None)

    @cached_property
    def numbers_as_the_job(self) -> bool:
        """Whether its ranks are those of the job. Equal numbers in one that is smaller than the job prove nothing."""
        if any(member.rank != rank for rank, (member, _) in self.members.items()):
            return False
        return {member.info.world_size for member, _ in self.members.values()} <= {self.nranks, None}

    @cached_property
    def launches(self) -> dict[int, int]:
        """Collectives that each rank has called by NCCL's counts, where those can be compared."""
        return {rank: count for rank, held in self.members.items() if (count := launched(*held)) is not None}

    @property
    def called_alike(self) -> int | None:
        """How many collectives all ranks that are observed have called; ``None`` where that differs, or cannot be compared."""
        counts = {launched(*held) for held in self.members.values()}
        return counts.pop() if len(counts) == 1 else None

    @cached_property
    def most_called(self) -> Counter[str]:
        """How often who has called each collective most often has called it, where NCCL counts that (2.26 and later)."""
        return reduce(or_, (Counter(own.sequence_numbers) for own in self.views))


_INDEX, _RANK, _NRANKS = map(attrgetter, ("index", "rank", "nranks"))
_HALTED, _DEVICE, _WALL_NS = map(attrgetter, ("halted", "last.device", "last.wall_ns"))


@dataclass
class Job:
    """Processes that are joined by communicators, directly or through others."""

    members: list[Member]
    groups: dict[int, Group] = field(default_factory=dict)
    _told_apart: dict[tuple[int, int], int] = field(default_factory=dict)
    """(index of the member, address of the communicator in its process) → group, where several have one hash"""

    def __post_init__(self) -> None:
        # By the index of a process, which counts those of all jobs, its place in this one.
        self.place_of = {member.index: place for place, member in enumerate(self.members)}

    @property
    def time(self) -> float:
        """When the newest of its samples was taken, seconds since the epoch."""
        newest: int = max(map(_WALL_NS, self.members))
        return newest / 1e9

    @cached_property
    def transports(self) -> frozenset[Transport]:
        """What joins its ranks. O(connections), once."""
        return frozenset(map(itemgetter(3), chain.from_iterable(map(attrgetter("transports"), self.views))))

    @cached_property
    def views(self) -> list[Communicator]:
        """Its processes' views of their communicators."""
        return [own for group in self.groups.values() for own in group.views]

    @cached_property
    def halted(self) -> list[Member]:
        """Its processes that are stopped or have ended."""
        return [*compress(self.members, map(_HALTED, self.members))]

    @cached_property
    def shims(self) -> list[tuple[Member, DeviceSample]]:
        """Its processes with a shim, and what that says of the GPU."""
        frames = zip(self.members, map(_DEVICE, self.members), strict=True)
        return [(member, device) for member, device in frames if device is not None]

    @property
    def gone(self) -> list[Member]:
        """Its processes that have ended."""
        return [member for member in self.halted if member.gone]

    @cached_property
    def processes(self) -> int:
        """How many processes it has: one that drives several GPUs is a member for each of them."""
        return len(set(map(attrgetter("last.process.host", "last.process.key.pid"), self.members)))

    @cached_property
    def by_hash(self) -> dict[int, list[Group]]:
        """Its communicators by NCCL's hash, which several may have."""
        found: dict[int, list[Group]] = defaultdict(list)
        for group in self.groups.values():
            found[group.hash].append(group)
        return found

    def of_rank(self, comm_hash: int, rank: int, place: tuple[str, int]) -> Iterator[Group]:
        """The communicators of a hash in which a process (host, pid) is this rank: mostly one."""
        for group in self.by_hash.get(comm_hash, ()):
            holder = group.holder(rank)
            if holder is not None and (holder.info.host, holder.info.pid) == place:
                yield group

    @cached_property
    def by_identity(self) -> dict[Identity, int | None]:
        """The job's rank of every process that a communicator knows, as far as it is evident; ``None`` where two claim it."""
        ranks: dict[Identity, int | None] = {}
        for group in self.groups.values():
            _, view = next(iter(group.members.values()))
            for rank in range(len(view.peers)):
                identity, holder = identity_of(view, rank), group.holder(rank)
                known = holder.rank if holder is not None else rank if group.numbers_as_the_job else None
                if identity is not None and known is not None:
                    ranks[identity] = known if ranks.get(identity, known) == known else None
        return ranks

    def add_group(self, number: int, held: Sequence[Held]) -> None:
        """Take a communicator in: its processes, each with its view. Of two that claim one rank the first has it."""
        _, first = held[0]
        members: dict[int, Held] = {}
        for pair in held:
            members.setdefault(pair[1].rank, pair)
        ranks = dict(zip([member.index for member, _ in members.values()], members, strict=True))
        self.groups[number] = Group(number, first.hash, first.nranks, members, ranks)
        if number != first.hash:
            self._told_apart.update({(member.index, own.address): number for member, own in held})

    def number(self, index: int, own: Communicator) -> int:
        """The number of the communicator that a process has this view of."""
        return self._told_apart.get((index, own.address), own.hash)

    def member(self, index: int) -> Member:
        """The process with this index."""
        return self.members[self.place_of[index]]

    def held_by(self, member: Member) -> Iterator[tuple[Group, Communicator]]:
        """The communicators in which a process is a rank, with its views of them."""
        for own in member.last.communicators:
            group = self.groups[self.number(member.index, own)]
            if member.index in group.ranks:
                yield group, own

    def find_group(self, member: Member, address: int, comm_hash: int) -> int | None:
        """The group an operation belongs to: by its communicator's address, else by a hash that is unique in the process."""
        for own in member.last.communicators:
            if own.address == address:
                return self.number(member.index, own)
        numbers = {self.number(member.index, own) for own in member.last.communicators if own.hash == comm_hash}
        return numbers.pop() if len(numbers) == 1 else None

    def global_rank(self, group_id: int, comm_rank: int) -> int | None:
        """The job's rank of a communicator's rank: observed, evident by numbering, or known by another communicator."""
        group = self.groups.get(group_id)
        if group is None:
            return None
        holder = group.holder(comm_rank)
        if holder is not None:
            return holder.rank
        if group.numbers_as_the_job:
            return comm_rank
        identity = group.identity(comm_rank)
        return self.by_identity.get(identity) if identity is not None else None

    def rank_name(self, group_id: int, comm_rank: int) -> str:
        """``rank 5`` where the job's rank is known, else ``rank 1 of communicator 12ab…``."""
        known = self.global_rank(group_id, comm_rank)
        if known is not None:
            return f"rank {known}"
        group = self.groups.get(group_id)
        return f"rank {comm_rank} of communicator {group.hash if group else group_id:016x}"


def assemble(samples: Iterable[Sequence[ProcessSample]]) -> list[Job]:
    """Split observed processes into jobs: two belong together when they hold ranks of one communicator, directly or through
    others; one without communicators is a job of its own. ``samples``: one sequence a process, in time order; empty ones are
    ignored. O(processes x communicators).
    """
    members = [Member(index, series) for index, series in enumerate(samples) if len(series)]
    holders: dict[int, list[Held]] = defaultdict(list)
    for member in members:
        for communicator in member.last.communicators:
            holders[communicator.hash].append((member, communicator))
    sharing = {number: held for comm_hash, found in holders.items() for number, held in _split(comm_hash, found).items()}
    # The processes that each is joined with: the smaller part joins the larger.
    part_of: dict[int, list[int]] = {}
    for held in sharing.values():
        indices = [member.index for member, _ in held]
        parts = {id(part): part for index in indices if (part := part_of.get(index)) is not None}
        largest = max(parts.values(), key=len, default=list[int]())
        joining = [index for part in parts.values() if part is not largest for index in part]
        joining += [index for index in indices if index not in part_of]
        largest += joining
        part_of |= dict.fromkeys(joining, largest)
    by_part: dict[int, list[Member]] = defaultdict(list)
    for member in members:
        by_part[id(part_of.setdefault(member.index, [member.index]))].append(member)
    jobs = {part: Job(found) for part, found in by_part.items()}
    for number, held in sharing.items():
        jobs[id(part_of[held[0][0].index])].add_group(number, held)
    return list(jobs.values())


def _split(comm_hash: int, found: list[Held]) -> dict[int, list[Held]]:
    """The communicators of one hash, each by a number that is the same on all its ranks, where their peers can be read."""
    views = [communicator for _, communicator in found]
    if len({*map(_RANK, views)}) == len(found) and len({*map(_NRANKS, views)}) == 1:
        return {comm_hash: found}
    groups: dict[int, list[Held]] = defaultdict(list)
    for member, communicator in found:
        addresses = [peer.comm_address for peer in communicator.peers]
        text = f"{comm_hash:x} {addresses}".encode()
        told_apart = bool(addresses) and None not in addresses
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") if told_apart else comm_hash
        groups[number].append((member, communicator))
    return groups


def identity_of(communicator: Communicator, comm_rank: int) -> Identity | None:
    """Who a rank of the communicator is, where its peers could be read."""
    if not 0 <= comm_rank < len(communicator.peers):
        return None
    peer = communicator.peers[comm_rank]
    if peer.rank != comm_rank or peer.host_hash is None or peer.pid_hash is None:
        return None
    return peer.host_hash, peer.pid_hash


def launched(member: Member, own: Communicator) -> int | None:
    """How many collectives NCCL has counted on a communicator of a process, ``None`` where that cannot be compared among ranks.

    Releases without counts of each collective count all launches alike (``ncclComm.opCount``) up to 2.27.2; later ones, up to
    2.30.7, only those in which the rank has proxy work: then no count of collectives means that there were none.
    """
    if own.captured_plans:
        return None
    if own.sequence_numbers:
        return sum(own.sequence_numbers.values())
    version = member.info.version
    return own.op_count if version is not None and version < COUNTS_PROXY_WORK_FROM else None
