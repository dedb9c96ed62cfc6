"""The view model: everything that can be shown of a job at one moment, the same live, on a recording, and over the network.

A ``Frame`` is what a session says at one moment; a ``View`` adds what is worth showing of it, worked out only when it is shown:
a dashboard of 4,096 ranks shows a few dozen of them at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

from ncclwatch.collect.windows import CurrentOperation, RankWindow
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.looks import ProcessLook
from ncclwatch.model.network import FlowRecord, NicRecord
from ncclwatch.model.state import Communicator, ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.model.work import FlowWindow, Scope, WorkWindow
from ncclwatch.remote.iterations import Timed
from ncclwatch.view.states import Accused, letter
from ncclwatch.view.waits import Pair, latencies, pairs

MAX_GRID = 1 << 17
"""Ranks in the grid at most; a target can claim any world size."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One way of looking at the job: whether it works, and why not."""

    name: str
    running: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """What watching costs: probe hits a second, their share of one core, and our own share of a core and memory in bytes.

    ``wire_share`` is the largest share of its time that a thread has paid for bursts on work requests, ``wire_budget`` its limit.
    """

    hits_per_s: float | None = None
    probe_share: float | None = None
    own_share: float | None = None
    rss_bytes: int | None = None
    wire_share: float | None = None
    wire_budget: float | None = None


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Something that happened. ``time`` is seconds since the epoch; ``kind`` one of process, verdict, recovery, loss, note."""

    time: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class NicRow:
    """A NIC, and its receive plus send rate (bytes a second) over the last samples, oldest first."""

    record: NicRecord
    rates: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class FlowRow:
    """A connection over a network, and its bytes (or, where those are not known, steps) a second over the last looks. ``work`` is
    the newest window of its queue pair or sockets.
    """

    host: str
    record: FlowRecord
    rates: tuple[float | None, ...] = ()
    work: WorkWindow | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """What a session says at one moment.

    ``time`` is seconds since the epoch, ``number`` counts them. ``samples`` are the newest of each process that could be
    read. ``verdicts`` come worst first. ``flows``, ``nics``, ``topology`` and ``slowness`` are ``None`` where that plane or
    analysis did not run, so that "nothing there" and "not looked" stay apart.
    """

    time: float
    number: int
    windows: Sequence[RankWindow]
    samples: Mapping[ProcessKey, ProcessSample] = field(default_factory=dict)
    verdicts: Sequence[Verdict] = ()
    planes: Sequence[Plane] = ()
    lost: int = 0
    cost: Cost = field(default_factory=Cost)
    log: Sequence[LogEntry] = ()
    nics: Sequence[NicRow] | None = None
    flows: Sequence[FlowRow] | None = None
    work: Sequence[FlowWindow] | None = None
    """The newest window of work of every flow, port and peer; ``None`` where none was ever seen."""
    roles: Mapping[int, str] = field(default_factory=dict)
    """What communicators are for (data, tensor, …), by hash, where that was inferred."""
    layout: str = ""
    """How the job is divided among tensor, pipeline, data, … parallelism, where that was inferred."""
    iterations: Sequence[Timed] = ()
    """The newest iterations, oldest first, where calls are seen."""
    stacks: Sequence[ProcessLook] = ()
    """Where those whom verdicts named were seen to stand, the newest first."""


@dataclass(frozen=True, slots=True)
class GridCell:
    """One rank in the grid: its state's letter, and the position of its window, ``None`` for a rank that nobody observes."""

    rank: int | None
    letter: str
    window: int | None


class Grid(Sequence[GridCell]):
    """Cells in order, made when they are asked for. ``letters`` are those of all cells."""

    def __init__(self, letters: str, ranks: Sequence[int | None], windows: Sequence[int | None]) -> None:
        self.letters = letters
        self.ranks = ranks
        self._windows = windows

    def __len__(self) -> int:
        return len(self.letters)

    @overload
    def __getitem__(self, index: int) -> GridCell: ...
    @overload
    def __getitem__(self, index: slice) -> list[GridCell]: ...
    def __getitem__(self, index: int | slice) -> GridCell | list[GridCell]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return GridCell(self.ranks[index], self.letters[index], self._windows[index])


CommunicatorKey = tuple[int, int, int]
"""Hash, size, and the address rank 0 knows itself by (0 when unknown): hashes alone are not unique before 2.24."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process in a communicator."""

    key: ProcessKey
    communicator: Communicator


@dataclass(frozen=True, slots=True)
class CommunicatorRow:
    """A communicator over all observed processes. ``open_on`` counts the members that have an operation open in it."""

    key: CommunicatorKey
    members: tuple[Member, ...]
    role: str
    open_on: int
    operations: tuple[str, ...]

    @property
    def hash(self) -> int:
        """``commHash``."""
        return self.key[0]

    @property
    def nranks(self) -> int:
        """Its size."""
        return self.key[1]


@dataclass(frozen=True, slots=True)
class OperationRow:
    """An operation that is open on at least one rank: who is in it, the oldest age, the fewest and most steps done."""

    name: str
    sequence: int | None
    comm_hash: int
    nranks: int | None
    windows: tuple[int, ...]
    age_s: float
    at_least: bool
    least_done: int
    most_done: int
    steps_total: int


class View:
    """One frame with everything derived from it, each part worked out when it is first asked for."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame

    @cached_property
    def accused(self) -> Accused:
        """Whom the verdicts name."""
        return Accused.by(self.frame.verdicts)

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict, if one was reached."""
        return self.frame.verdicts[0] if self.frame.verdicts else None

    @cached_property
    def letters(self) -> str:
        """A letter for each window (``states``), in their order."""
        accused = self.accused
        return "".join([letter(window, accused) for window in self.frame.windows])

    @cached_property
    def grid(self) -> Grid:
        """All ranks in order, those that nobody observes among them where the size of the world is known."""
        windows, letters = self.frame.windows, self.letters
        ranks = [window.rank for window in windows]
        world = max((w.process.world_size or 0 for w in windows), default=0)
        known = {rank for rank in ranks if rank is not None}
        # Two jobs on one node share numbers: then there is no telling whose rank is missing.
        if len(known) != len(ranks) or len({w.process.world_size for w in windows}) > 1:
            return Grid(letters, ranks, range(len(ranks)))
        if len(known) >= world or max(world, *known) > MAX_GRID or min(known) < 0:
            return Grid(letters, ranks, range(len(ranks)))
        place = {rank: i for i, rank in enumerate(ranks)}
        named = self.accused.ranks
        everyone = range(max(world, max(known, default=0) + 1))
        places = [place.get(rank) for rank in everyone]
        shown = [letters[i] if i is not None else "X" if rank in named else "." for rank, i in enumerate(places)]
        return Grid("".join(shown), everyone, places)

    @cached_property
    def census(self) -> Counter[str]:
        """How many ranks are in which state, by letter."""
        return Counter(self.grid.letters)

    @cached_property
    def communicators(self) -> list[CommunicatorRow]:
        """Every communicator of the observed processes, the largest first."""
        members: dict[CommunicatorKey, list[Member]] = {}
        for key, sample in self.frame.samples.items():
            for communicator in sample.communicators:
                members.setdefault(communicator_key(communicator), []).append(Member(key, communicator))
        open_in: dict[int, Counter[str]] = {}
        for window in self.frame.windows:
            if window.operation is not None:
                open_in.setdefault(window.operation.comm_hash, Counter())[operation_title(window.operation)] += 1
        roles = self._roles
        rows = []
        for found, who in members.items():
            counted = open_in.get(found[0], Counter())
            names = tuple(name for name, _ in counted.most_common(3))
            ordered = tuple(sorted(who, key=lambda m: m.communicator.rank))
            rows.append(CommunicatorRow(found, ordered, roles.get(found[0], ""), counted.total(), names))
        return sorted(rows, key=lambda row: (-row.nranks, row.key))

    @cached_property
    def _roles(self) -> dict[int, str]:
        named = [ref for v in self.frame.verdicts for ref in (v.communicator, *(c.communicator for c in v.culprits)) if ref]
        roles = {int(ref.hash, 16): ref.role for ref in named if ref.role and _is_hex(ref.hash)} | dict(self.frame.roles)
        for sample in self.frame.samples.values():
            for communicator in sample.communicators:
                if communicator.name:
                    roles.setdefault(communicator.hash, communicator.name)
        return roles

    @cached_property
    def ports(self) -> list[FlowWindow]:
        """What each rank's ports carried in their newest windows, by rank."""
        found = [window for window in self.frame.work or () if window.scope is Scope.PORT]
        return sorted(found, key=lambda w: (w.global_rank is None, w.global_rank or 0, w.host, w.pid, w.device, w.port))

    @cached_property
    def latencies(self) -> dict[Pair, float]:
        """How long what one rank sends another takes to be completed, ns: the median in the newest window, by (source,
        destination).
        """
        return latencies(self.frame.work or (), self.frame.samples)

    @cached_property
    def operations(self) -> list[OperationRow]:
        """Operations that are open somewhere, the oldest first."""
        groups: dict[tuple[str, int | None, int], list[int]] = {}
        windows = self.frame.windows
        for i, window in enumerate(windows):
            operation = window.operation
            if operation is not None:
                groups.setdefault((operation.name, operation.sequence, operation.comm_hash), []).append(i)
        rows = []
        for (name, sequence, comm_hash), places in groups.items():
            inside = [op for i in places if (op := windows[i].operation) is not None]
            oldest = max(inside, key=lambda op: op.age_s)
            done = [op.steps_done for op in inside]
            rows.append(
                OperationRow(
                    name=name,
                    sequence=sequence,
                    comm_hash=comm_hash,
                    nranks=oldest.nranks,
                    windows=tuple(places),
                    age_s=oldest.age_s,
                    at_least=oldest.at_least,
                    least_done=min(done),
                    most_done=max(done),
                    steps_total=max(op.steps_total for op in inside),
                )
            )
        return sorted(rows, key=lambda row: (-row.age_s, row.name, row.comm_hash))

    @cached_property
    def waits(self) -> set[Pair]:
        """Who waits for whom now: (waiting, waited for)."""
        return pairs(self.frame.samples, self.accused.victims)

    @cached_property
    def hosts(self) -> list[str]:
        """Host names, in order."""
        return sorted({window.process.host for window in self.frame.windows})

    @cached_property
    def versions(self) -> list[str]:
        """Releases of NCCL among the processes."""
        return sorted({".".join(map(str, w.process.version)) for w in self.frame.windows if w.process.version})

    @cached_property
    def place_of(self) -> dict[ProcessKey, int]:
        """Position of each process's window."""
        return {window.process.key: i for i, window in enumerate(self.frame.windows)}

    def window_of(self, key: ProcessKey) -> RankWindow | None:
        """The window of a process, while it is watched."""
        place = self.place_of.get(key)
        return None if place is None else self.frame.windows[place]

    def communicator(self, key: CommunicatorKey) -> CommunicatorRow | None:
        """A communicator by its key."""
        return next((row for row in self.communicators if row.key == key), None)


def communicator_key(communicator: Communicator) -> CommunicatorKey:
    """What tells one communicator from another on every member alike."""
    first = next((peer.comm_address for peer in communicator.peers if peer.rank == 0), None)
    return communicator.hash, communicator.nranks, first or 0


def operation_title(operation: CurrentOperation) -> str:
    """``AllReduce #14``, or ``in CommSplit`` for a call that has not returned."""
    if operation.blocked_call:
        return f"in {operation.name}"
    return operation.name if operation.sequence is None else f"{operation.name} #{operation.sequence}"


def is_calm(verdict: Verdict | None) -> bool:
    """Whether nothing is wrong as far as can be told."""
    return verdict is not None and verdict.verdict_class in (VerdictClass.RUNNING, VerdictClass.IDLE)


def _is_hex(text: str) -> bool:
    return bool(text) and all(ch in "0123456789abcdef" for ch in text)
