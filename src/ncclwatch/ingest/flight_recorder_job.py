"""The dumps of a job's ranks as the records that the engine judges: calls, counts and what GPUs have begun and ended.

An entry is a call in the ledger. Ranks are lined up by the sequence number that each process group keeps, never by the place of
an entry: the number of the newest call is what NCCL's own count would be. A job is looked at twice, at the last moment that any
entry speaks of and at the moment of the dump, so a wait has lasted as long as lies between. Operations that a dump knows to be
begun or ended are counted as further views of the same job.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.functions import function
from ncclwatch.ingest.flight_recorder_rank import ENTRY_DTYPE, GroupName, RankDump, State
from ncclwatch.model.device import DeviceCommunicator, DeviceOperation, DeviceSample
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator, Direction, PeerInfo, ProcessInfo, ProcessSample, Transport, VersionSource

COUNTED = "a collective"
"""What the counts of a rank are of: a dump numbers collectives of all kinds together."""
LATE_NS = 600 * 10**9
"""Chosen: a watchdog writes its dump within so long of the timeout that it reports; a file that is newer was copied."""
ALL_TAKE_PART = (Function.ALL_REDUCE, Function.ALL_GATHER, Function.REDUCE_SCATTER, Function.ALL_TO_ALL)
"""Collectives that end on no rank before all have called them."""
_TAKES_ALL = np.isin(np.arange(256), ALL_TAKE_PART)
DEFAULT_GROUP = "default_pg"
"""How PyTorch describes the group of all ranks (``init_process_group``)."""
FIRST_PID = 10_000
TOGETHER = 256
"""Bound: ranks of a batch."""
SHOWN = 8
"""Bound: open operations of a communicator that are told of a GPU."""


@dataclass(slots=True)
class Group:
    """One process group over the ranks of the job. ``stated``: its members stand in the dumps; else those that used it."""

    name: GroupName
    ranks: tuple[int, ...]
    stated: bool
    number: int
    hash: int = field(init=False)
    places: dict[int, int] = field(init=False)
    """Rank of the job → rank in the group."""

    def __post_init__(self) -> None:
        self.places = {rank: place for place, rank in enumerate(self.ranks)}
        text = f"{self.name.name} {self.name.about} {self.ranks}".encode()
        self.hash = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    @property
    def address(self) -> int:
        """Stands for the communicator's address in each process."""
        return 0x10_0000 + self.number * 0x1000

    @property
    def label(self) -> str:
        """As PyTorch's users know it: ``process group 3 (mesh_dp)``."""
        about = f" ({self.name.about})" if self.name.about not in ("", "undefined") else ""
        return f"process group {self.name.name or '(unnamed)'}{about}"


@dataclass(slots=True)
class Part:
    """One rank's calls on one group, by sequence number from 1 (``base`` taken off), one row a collective.

    ``counted``: collectives called in all; ``known``: whether ``rows`` are the newest of them without a gap.
    """

    group: Group
    rows: NDArray[Any]
    messages: NDArray[Any]
    counted: int
    known: bool
    from_birth: bool


class FlightJob:
    """The ranks of one job with their groups. ``base``: the number of the first collective of a group, 0 or 1; ``unread``: ranks
    of which there is a dump that could not be read.
    """

    def __init__(self, ranks: Sequence[RankDump], unread: Collection[int] = ()) -> None:
        self.ranks = sorted(ranks, key=lambda one: one.rank)
        # Ranks of a group have the same list of its members.
        lists = {id(members): members for one in self.ranks for members in one.members.values()}
        stated = {number for members in lists.values() for number in members}
        found = {one.rank for one in self.ranks}
        # Ranks are numbered without gaps: a number that is left out between others wrote no dump.
        dense = range(max(found) + 1) if 2 * len(found) > max(found) else ()
        self.world = sorted(found | stated | {*dense} | {*unread})
        self.unread = sorted({*unread} - found)
        self._first_of = {one.rank: self.ranks[at // TOGETHER * TOGETHER].rank for at, one in enumerate(self.ranks)}
        self.missing = sorted(set(self.world) - {one.rank for one in self.ranks})
        self.groups: dict[tuple[GroupName, tuple[int, ...]], Group] = {}
        self._used: dict[GroupName, list[int]] = defaultdict(list)
        for one in self.ranks:
            for name in one.groups:
                self._used[name].append(one.rank)
        self._of_all = [name for name in self._used if name.about == DEFAULT_GROUP]
        zero = any((one.entries["sequence"][~one.entries["message"]] == 0).any() for one in self.ranks)
        self.base = 0 if zero else 1
        self.ended_known = self._backends(State.COMPLETED)
        self.begun_known = self._backends(State.STARTED) if all(one.begun_known for one in self.ranks) else frozenset()
        for one in self.ranks:
            one.entries["open"] = self._open(one)
        self.parts = {one.rank: self._parts(one) for one in self.ranks}
        self._count_proven()
        self.moments = self._moments()

    def _backends(self, state: State) -> frozenset[str]:
        """Backends of which any entry was seen in a state: others never leave ``scheduled`` (gloo up to 2.14), which proves
        nothing.
        """
        return frozenset(
            one.backends[number] for one in self.ranks
            for number in set(one.entries["backend"][one.entries["state"] == state].tolist()) if number < len(one.backends)
        )  # fmt: skip

    def group(self, one: RankDump, name: GroupName) -> Group:
        """The group that a rank knows by a name."""
        members = one.members.get(name.name, ())
        stated = one.rank in members
        if not stated:
            members = tuple(self.world if name.about == DEFAULT_GROUP else sorted(self._used[name]))
        key = (name, members)
        if key not in self.groups:
            self.groups[key] = Group(name, members, stated, len(self.groups))
        return self.groups[key]

    def _parts(self, one: RankDump) -> list[Part]:
        entries, parts = one.entries, []
        # Who has called nothing on the group of all ranks is a rank of it all the same.
        silent = [name for name in self._of_all if name not in one.groups and not one.partial]
        names = (*one.groups, *silent)
        # Sorted once, and not by an index of records: that copies them column by column.
        entries = entries.take(np.argsort(entries["group"], kind="stable"))
        bounds = np.searchsorted(entries["group"], np.arange(len(names) + 1))
        for number, name in enumerate(names):
            own = entries[bounds[number] : bounds[number + 1]]
            said = own["message"]
            rows, messages = (own[~said], own[said & ~own["coalesced"]]) if said.any() else (own, own[:0])
            parts.append(self._part(one, self.group(one, name), rows, messages))
        return parts

    def _part(self, one: RankDump, group: Group, rows: NDArray[Any], messages: NDArray[Any]) -> Part:
        rows = _one_each(rows)
        # Numbers rise from row to row.
        oldest, newest = (int(rows["sequence"][at]) - self.base + 1 for at in (0, -1)) if len(rows) else (1, 0)
        whole = len(rows) in (0, newest - oldest + 1)
        counted = newest = max(newest, 0)
        if not len(messages):
            counted = max(newest, one.enqueued.get(group.name.name, 0))
        known = whole and counted == newest and bool(rows["function"].all())
        return Part(group, rows, messages, counted, known, one.whole and known and oldest == 1 and group.name not in one.cut)

    def _count_proven(self) -> None:
        """A collective that has ended anywhere was called by all: who shows fewer wrote its dump earlier."""
        proven: dict[int, int] = defaultdict(int)
        for part in (part for parts in self.parts.values() for part in parts):
            ended = (part.rows["state"] == State.COMPLETED) & _TAKES_ALL[part.rows["function"]]
            number = int(part.rows["sequence"].max(initial=self.base - 1, where=ended)) - self.base + 1
            proven[part.group.number] = max(proven[part.group.number], number)
        for part in (part for parts in self.parts.values() for part in parts):
            if proven[part.group.number] > part.counted:
                part.counted, part.known, part.from_birth = proven[part.group.number], False, False

    def _moments(self) -> tuple[int, int]:
        """The last moment of which any entry speaks, and that of the dump: when the last of them was written, but no later than
        the last wait was given up. (Files that were copied look younger than they are.) Nanoseconds since the epoch.
        """
        newest = max((one.newest_ns for one in self.ranks), default=0)
        written = max((one.written_ns for one in self.ranks), default=0)
        expires = max((one.expires_ns for one in self.ranks), default=0)
        return newest, max(newest + 1, min(written, expires) if expires > newest else written)

    @property
    def depth(self) -> int:
        """Collectives of a rank on a group that are looked at, at most; 1 where there is none."""
        return max((len(part.rows) for parts in self.parts.values() for part in parts), default=1) or 1

    @property
    def partial(self) -> list[int]:
        """Ranks of which another record tells the calls alone."""
        return [one.rank for one in self.ranks if one.partial]

    @property
    def dated(self) -> bool:
        """Whether the files' times can be those of the dumps: else nothing says that the waits had lasted."""
        written, expires = (max((times(one) for one in self.ranks), default=0) for times in (_written, _expires))
        return written <= expires + LATE_NS

    @property
    def waited_s(self) -> float:
        """How long nothing had moved when the job was dumped."""
        return (self.moments[1] - self.moments[0]) / 1e9

    def _open(self, one: RankDump) -> NDArray[np.bool_]:
        """In which of its entries a rank may wait: those that have not ended, and all of backends that do not tell."""
        silent = np.array([backend not in self.ended_known for backend in one.backends] or [True])
        found: NDArray[np.bool_] = (one.entries["state"] != State.COMPLETED) | silent[one.entries["backend"]]
        return found

    @property
    def waiting(self) -> list[int]:
        """Ranks that may wait in a collective."""
        return [one.rank for one in self.ranks if any(part.rows["open"].any() for part in self.parts[one.rank])]

    def all_inside(self, group: Group) -> tuple[int, int] | None:
        """The oldest open collective of a group (number, function), where it is the same on all its ranks and they are known to
        have called and not ended it; else ``None``.
        """
        oldest = set()
        by_rank = {one.rank: one for one in self.ranks}
        for rank in group.ranks:
            own = next((part for part in self.parts.get(rank, ()) if part.group is group), None)
            if own is None:
                return None
            rows = own.rows[own.rows["state"] != State.COMPLETED]
            if not len(rows) or by_rank[rank].backends[int(rows[0]["backend"])] not in self.ended_known:
                return None
            oldest.add((int(rows[0]["sequence"]), int(rows[0]["function"])))
        return oldest.pop() if len(oldest) == 1 else None

    # --- records -------------------------------------------------------------------------------------------------------

    def batches(self, least: State = State.SCHEDULED) -> Iterator[NodeBatch]:
        """The job at its two moments: what has come as far as ``least``. Some ranks a batch: which were on one host is not known,
        and a batch costs more than its records.
        """
        parts = [self.ranks[at : at + TOGETHER] for at in range(0, len(self.ranks), TOGETHER)]
        peers = {group.number: _peers(group) for group in self.groups.values()}
        samples = {one.rank: self._sample(one, peers, least) for one in self.ranks}
        for turn, moment in enumerate(self.moments):
            for part in parts:
                events = self._events(part, least) if turn == 0 else None
                yield NodeBatch(
                    host=host_of(part[0].rank), boot_id=host_of(part[0].rank), sequence=turn, time_ns=moment, wall_ns=moment,
                    interval_s=max(1.0, self.waited_s), looked=True, events=events,
                    samples=tuple(_at(samples[one.rank], moment) for one in part),
                )  # fmt: skip

    def _sample(self, one: RankDump, peers: Mapping[int, tuple[PeerInfo, ...]], least: State) -> ProcessSample:
        """What a rank is and has at the first moment, by its calls."""
        host = host_of(self._first_of[one.rank])
        info = ProcessInfo(
            key=ProcessKey(host, FIRST_PID + one.rank, 0, ""), host=host, name="python", command=(), library="", version=None,
            version_source=VersionSource.UNKNOWN, rank=one.rank, world_size=len(self.world), rank_source="dump",
        )  # fmt: skip
        communicators = tuple(self._communicator(one, part, peers, least) for part in self.parts[one.rank])
        device = None
        if self.begun_known:
            told = tuple(_device(part, one.rank) for part in self.parts[one.rank])
            device = DeviceSample("flight recorder", 0, "", communicators=told)
        return ProcessSample(info, self.moments[0], self.moments[0], 0, "S", communicators, device=device)

    def _communicator(
        self, one: RankDump, part: Part, peers: Mapping[int, tuple[PeerInfo, ...]], least: State
    ) -> Communicator:  # fmt: skip
        group, rank = part.group, part.group.places[one.rank]
        others = [(rank - 1) % len(group.ranks), (rank + 1) % len(group.ranks)]
        others += [group.places[number] for number in self.missing if number in group.places]
        open_here = part.rows["open"].any() or part.messages["open"].any()
        ways = tuple((0, peer, Direction.SEND, Transport.UNKNOWN) for peer in sorted({*others} - {rank}) if open_here)
        return Communicator(
            address=group.address, hash=group.hash, rank=rank, nranks=len(group.ranks), name=group.name.about,
            sequence_numbers={COUNTED: self._come(part, least)}, peers=peers[group.number], transports=ways,
        )  # fmt: skip

    def _come(self, part: Part, least: State) -> int:
        """How many collectives have come as far."""
        if least is State.SCHEDULED:
            return part.counted
        come = part.rows["state"] >= least
        return int(part.rows["sequence"].max(initial=self.base - 1, where=come)) - self.base + 1

    def _events(self, ranks: Sequence[RankDump], least: State) -> NDArray[Any]:
        """The calls of some ranks, one rank after the other, each in the order of their times; before them that a communicator
        was made, where all its calls are known.
        """
        parts = [(one.rank, part) for one in ranks for part in self.parts[one.rank]]
        told = [_told(part, least) for _, part in parts]
        sizes = [part.from_birth + sum(map(len, rows)) for (_, part), rows in zip(parts, told, strict=True)]
        entries, at = np.zeros(sum(sizes), ENTRY_DTYPE), 0
        for (_, part), several in zip(parts, told, strict=True):
            if part.from_birth:
                entries["function"][at] = Function.COMM_INIT_RANK
                at += 1
            for rows in several:
                entries[at : at + len(rows)] = rows
                at += len(rows)
        places = [
            (FIRST_PID + rank, part.group.address, part.group.hash, part.group.places[rank], len(part.group.ranks))
            for rank, part in parts
        ]
        names = ("pid", "comm", "comm_hash", "rank", "nranks")
        columns = {name: np.array([one[at] for one in places], EVENT_DTYPE[name]) for at, name in enumerate(names)}
        whose = np.repeat(np.arange(len(parts)), np.array(sizes, np.int64))
        # Put in order while they are narrow, and not by an index of records: that copies them column by column.
        order = np.lexsort((np.maximum(entries["created_ns"], 0), columns["pid"][whose]))
        entries, whose = entries.take(order), whose[order]
        events = np.zeros(len(entries), EVENT_DTYPE)
        for name in ("function", "datatype", "peer", "count"):
            events[name] = entries[name]
        for name, values in columns.items():
            events[name] = values[whose]
        events["tid"] = events["pid"]
        events["time_ns"] = np.maximum(entries["created_ns"], 0)
        events["op_count"] = np.maximum(entries["sequence"] - self.base, 0)
        events["kind"] = np.where(entries["function"] == Function.COMM_INIT_RANK, Kind.LEAVE, Kind.ENTER)
        events["flags"] = Flag.COMM_READ
        return events


def _at(sample: ProcessSample, moment: int) -> ProcessSample:
    """The same at another moment."""
    return sample if sample.time_ns == moment else replace(sample, time_ns=moment, wall_ns=moment)


def _written(one: RankDump) -> int:
    return one.written_ns


def _expires(one: RankDump) -> int:
    return one.expires_ns


def _told(part: Part, least: State) -> list[NDArray[Any]]:
    """The calls of a part that have come as far as ``least``, collectives and messages: collectives only where no number is
    missing between them.
    """
    if not part.known:
        return []
    if least is State.SCHEDULED:
        return [part.rows, part.messages]
    rows = part.rows.take((part.rows["state"] >= least).nonzero()[0])
    # Nobody waits in a message that has ended.
    messages = part.messages[:0] if least is State.COMPLETED else part.messages[part.messages["state"] >= least]
    # Numbers rise from row to row.
    whole = not len(rows) or int(rows["sequence"][-1]) - int(rows["sequence"][0]) == len(rows) - 1
    return [rows, messages] if whole else [messages]


def host_of(rank: int) -> str:
    """Stands for the host of some ranks, of which a dump says nothing; ``rank`` is the first of them."""
    return f"host-of-rank-{rank}"


def _one_each(rows: NDArray[Any]) -> NDArray[Any]:
    """Collectives in the order of their numbers, those that were called as one (coalesced) as one row: of all their elements.

    A group that is closed and of which no call was recorded (before 2.7) stays without a name.
    """
    if _rise(rows["sequence"]):
        return rows
    rows = rows[np.argsort(rows["sequence"], kind="stable")]
    if _rise(rows["sequence"]):
        return rows
    inside = rows[~rows["coalesced"] | ~np.isin(rows["sequence"], rows["sequence"][~rows["coalesced"]])]
    _, first = np.unique(inside["sequence"], return_index=True)
    joined = inside[first].copy()
    joined["count"] = np.add.reduceat(inside["count"], first)
    joined["state"] = np.minimum.reduceat(inside["state"], first)
    joined["open"] = np.logical_or.reduceat(inside["open"], first)
    return joined


def _rise(numbers: NDArray[np.int64]) -> bool:
    return bool((numbers[1:] > numbers[:-1]).all())


def _peers(group: Group) -> tuple[PeerInfo, ...]:
    """Who is which rank: by what NCCL would know of their processes."""
    return tuple(PeerInfo(place, host_hash=1, pid_hash=1 + rank) for place, rank in enumerate(group.ranks))


def _device(part: Part, rank: int) -> DeviceCommunicator:
    """What a GPU has open on a group: the oldest first."""
    rows = part.rows[part.rows["state"] != State.COMPLETED][:SHOWN]
    recent = tuple(
        DeviceOperation(
            ordinal=int(row["sequence"]), function=function(int(row["function"])).name, point_to_point=False,
            sequence=int(row["sequence"]), count=int(row["count"]), peer=None, channels=1,
            started=int(row["state"] >= State.STARTED), finished=0, observed=True, launched_ns=int(row["created_ns"]),
        )
        for row in rows
    )  # fmt: skip
    counted = part.counted
    address, place = part.group.address, part.group.places[rank]
    return DeviceCommunicator(part.group.hash, address, place, len(part.group.ranks), False, counted, counted, 0, recent=recent)
