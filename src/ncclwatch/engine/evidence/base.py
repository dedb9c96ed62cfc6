"""What a source of evidence is, and what it says: typed facts with their strength.

A source reads records (samples, calls, what nodes say of their network), and no other source, graph or verdict. Rules conclude.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case
    from ncclwatch.model.job import Group, Job


# --- what facts are about: where a wait can begin or end ----------------------------------------------------------------


class RankNode(int):
    """An observed process, by its index in the job's input. An integer, for it is hashed more often than anything else."""

    __slots__ = ()

    @property
    def index(self) -> int:
        """The process's place in ``Job.members``."""
        return int(self)


class AbsentNode(NamedTuple):
    """A rank of a communicator that no observed process holds."""

    group_id: int
    comm_rank: int
    # Tuples of equal content are equal: the last field keeps the kinds of nodes apart.
    kind: str = "absent"


class LinkNode(NamedTuple):
    """The path between two ranks, when both sides have done their part."""

    group_id: int
    source: int
    destination: int
    kind: str = "link"


class HiddenNode(NamedTuple):
    """A wait that the planes at hand cannot see, inside a node."""

    group_id: int
    comm_rank: int
    kind: str = "hidden"


Node = RankNode | AbsentNode | LinkNode | HiddenNode


def node_of(group: Group, comm_rank: int) -> RankNode | AbsentNode:
    """The process that is a rank of a communicator, or that rank as one nobody observed."""
    holder = group.holder(comm_rank)
    return RankNode(holder.index) if holder is not None else AbsentNode(group.id, comm_rank)


class Nodes:
    """Nodes as numbers: an observed process is its index, everything else is negative."""

    def __init__(self) -> None:
        self._others: list[Node] = []
        self._numbers: dict[Node, int] = {}

    def number(self, node: Node) -> int:
        """The number of a node."""
        if isinstance(node, RankNode):
            return int(node)
        if node not in self._numbers:
            self._others.append(node)
            self._numbers[node] = -len(self._others)
        return self._numbers[node]

    def node(self, number: int) -> Node:
        """The node with a number."""
        return RankNode(number) if number >= 0 else self._others[-1 - number]


# --- facts --------------------------------------------------------------------------------------------------------------


class Strength(IntEnum):
    """How much a fact proves: nothing contradicts it; it is so more often than not; counters of NCCL, the kernel or the network
    say so. Of what one subject may wait for, what is merely possible is followed only where there is nothing else.
    """

    POSSIBLE = 1
    LIKELY = 2
    PROVEN = 3


class FactKind(StrEnum):
    """What a fact says of its subject."""

    WAITS_FOR = "waits for"
    """The subject cannot go on before the object does something: an edge of the wait-for graph."""
    STANDS = "stands"
    """The subject could do something and does not."""
    HALTED = "halted"
    CALLED = "called"
    """What the ranks of a communicator have called, compared."""
    CALLED_OTHER = "called other"
    OPEN_OTHER = "other open"
    """Ranks of one communicator called different things, or have different operations open."""
    PORT_DOWN = "port down"
    PORT_ERRORS = "port errors"
    """A port has counted errors or signs of loss since watching began; ``value`` is how many."""
    PATH_DEAD = "path dead"
    """Nothing that is sent on it is acknowledged."""
    PATH = "path"
    """Something is wrong with the path of flows; ``value``: the part of the time of communication that it costs at most."""
    RETRYING = "retrying"
    """Something was lost on a connection and is sent again; ``value``: within so many seconds it may still come through."""
    FLOW_TROUBLE = "flow trouble"
    """The wire says that a connection is dead or slow, or that data lies in it that nobody reads."""
    LOST = "lost"
    """Segments that one sending connection has sent again in the last 30 s; ``value`` is how many."""
    THROTTLED = "throttled"
    """A CPU limit holds the process back; ``value`` is the share of the limit's periods in which it did."""
    GPU_UNFINISHED = "GPU unfinished"
    """Operations that the GPU has not begun, or is in, by the device shim."""
    GPU_SILENT = "GPU silent"
    """Copies from the GPU do not come back."""
    LOGGED = "logged"
    TOLD = "told"
    """What a rule says beside the facts that it concludes from: a line of evidence, and no more."""
    WORK = "work requests"
    """What a rank's flows over the network show: posted, completed, asked for (``work_requests.WorkFact``)."""


Subject = Hashable
"""A node of the wait-for graph (:data:`Node`), a connection (``network.Way``), the key of a NIC, a host."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that a source saw. ``value`` is a quantity with the unit its kind names; ``describe`` makes the line of
    evidence: of thousands of facts a few are ever shown. A source that has more to say returns a class of its own.
    """

    kind: FactKind
    subject: Subject
    strength: Strength = Strength.PROVEN
    object: Subject | None = None
    value: float | None = None
    describe: Callable[[], str] = field(default=str, compare=False)

    @property
    def text(self) -> str:
        """The fact as a line of evidence."""
        return self.describe()


F = TypeVar("F", bound=Fact)


@dataclass(frozen=True, slots=True)
class FactColumns(Generic[F]):
    """Facts of one kind in columns: 100,000 ranks say hundreds of thousands, of which a handful ever becomes an object.

    ``subject`` and ``object`` are numbers of :class:`Nodes`; ``possible`` marks those that are no more than that; ``make``
    makes the fact of a row. ``collectives``: ids of the communicators of which some fact is about a collective.
    """

    kind: FactKind
    subject: NDArray[np.int64]
    object: NDArray[np.int64]
    possible: NDArray[np.bool_]
    make: Callable[[int], F]
    collectives: frozenset[int]

    def __len__(self) -> int:
        return len(self.subject)

    def __iter__(self) -> Iterator[F]:
        return map(self.make, range(len(self)))

    def some(self, rows: NDArray[np.int64]) -> FactColumns[F]:
        """Those of some rows, in their order."""
        columns = self.subject[rows], self.object[rows], self.possible[rows]
        return FactColumns(self.kind, *columns, lambda number: self.make(int(rows[number])), self.collectives)


def one_by_one(facts: Iterable[Fact | FactColumns[Fact]]) -> Iterator[Fact]:
    """Facts with those in columns made objects."""
    return chain.from_iterable(part if isinstance(part, FactColumns) else (part,) for part in facts)


class Source(ABC):
    """One source of evidence: a class of this package, listed in ``case.SOURCES``."""

    kinds: frozenset[FactKind]
    """What its facts may say: it is asked only where one of them is wanted."""

    def complete(self, job: Job) -> None:  # noqa: B027 - most sources have nothing to add
        """Add to the records of a job what only those of several processes together show. Done once, before anything else."""

    @abstractmethod
    def facts(self, case: Case) -> Iterable[Fact | FactColumns[Fact]]:
        """What it saw of a job, of what is very many in columns. A pure function of the case's records. O(records)."""

    def coverage(self, case: Case) -> Iterable[str]:
        """Where it was blind, as lines for people: they stand under "not observed" in every verdict. O(processes)."""
        return ()


class Facts:
    """What the sources say of one case; each runs once, when asked. ``nodes`` numbers what facts in columns are about."""

    def __init__(self, case: Case, sources: Sequence[Source]) -> None:
        self.nodes = Nodes()
        self._case = case
        self._waiting = list(sources)
        self._by_kind: dict[FactKind, list[Fact | FactColumns[Fact]]] = defaultdict(list)
        self._by_subject: dict[FactKind, dict[Subject, list[Fact]]] = {}

    def parts(self, kind: FactKind) -> Sequence[Fact | FactColumns[Fact]]:
        """All facts of a kind, in the order of the sources; columns as they are."""
        for source in [source for source in self._waiting if kind in source.kinds]:
            self._waiting.remove(source)
            for fact in source.facts(self._case):
                self._by_kind[fact.kind].append(fact)
        return self._by_kind[kind]

    @overload
    def of(self, kind: FactKind) -> tuple[Fact, ...]: ...
    @overload
    def of(self, kind: FactKind, form: type[F]) -> tuple[F, ...]: ...
    def of(self, kind: FactKind, form: type[Fact] = Fact) -> tuple[Fact, ...]:
        """All facts of a kind one by one; those of a class (``form``) where one is given."""
        return tuple(fact for fact in one_by_one(self.parts(kind)) if isinstance(fact, form))

    def about(self, kind: FactKind, subject: Subject) -> tuple[Fact, ...]:
        """The facts of a kind that are about one subject."""
        if kind not in self._by_subject:
            index = self._by_subject[kind] = defaultdict(list)
            for fact in self.of(kind):
                index[fact.subject].append(fact)
        return tuple(self._by_subject[kind].get(subject, ()))
