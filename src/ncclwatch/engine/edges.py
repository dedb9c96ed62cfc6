"""What the wait-for graph is made of: places where a wait can end, needs between them, and what a rank could do and does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ncclwatch.engine.columns import Column
from ncclwatch.engine.connections import ConnectionKey, End
from ncclwatch.engine.job import Member
from ncclwatch.engine.mismatch import Mismatch
from ncclwatch.model.verdict import OperationRef

T = TypeVar("T")


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


class Why(StrEnum):
    """Why one side needs the other, as the clause that follows its name."""

    NO_OPERATION = "which has no operation open for it"
    NOT_BEGUN = "whose proxy has not begun the operation that is queued for it"
    GPU_NOT_READY = "whose GPU has not produced the data"
    NOT_TRANSMITTED = "whose proxy has not sent data that is ready"
    IN_NETWORK = "data was handed to the network and has not arrived"
    UNCONFIRMED = "data has arrived, and the network has not confirmed it to the sender"
    LEFT_BEHIND = "which has already gone past this step"
    NO_BUFFER = "which has no receive buffer open"
    NO_CREDIT = "the receiver has buffers open, but the sender may not send: the clear-to-send has not arrived"
    NOT_TAKEN = "which does not take the data sent"
    EMPTY = "which has written nothing more into shared memory"
    FULL = "which does not consume what lies in shared memory"
    NOT_CALLED = "which has not called it"
    NO_MESSAGE = "which has not called the other half of it"
    BROKEN = "whose connection is broken: NCCL has dropped the receive"
    DROPPED = "in an operation that shows no more: NCCL drops the transfers with a rank that has ended"
    UNOBSERVED = "which was not observed"


class Stall(StrEnum):
    """What a rank could do and does not do."""

    GPU_NOT_PRODUCING = "its GPU produces no data although buffers are free"
    GPU_NOT_CONSUMING = "its GPU does not consume data that has arrived"
    FLUSH = "data arrived but the flush to GPU memory does not complete"
    PROXY_NOT_SENDING = "its proxy does not send data that is ready although the receiver has buffers open"
    PROXY_NOT_POSTING = "its proxy opens no receive buffers"
    PROXY_NOT_TAKING = "data has arrived in its memory, and its proxy does not take it"
    PROXY_NOT_COMPLETING = "what it sent has been received, and its proxy does not take the completions"
    PROXY_NOT_OPENING = "its proxy opens no further send buffers although it may"
    PROXY_NOT_BEGUN = "its proxy thread does not begin a queued operation"


PROXY_STALLS = frozenset({
    Stall.PROXY_NOT_SENDING, Stall.PROXY_NOT_POSTING, Stall.PROXY_NOT_TAKING, Stall.PROXY_NOT_COMPLETING, Stall.PROXY_NOT_OPENING,
    Stall.PROXY_NOT_BEGUN,
})  # fmt: skip
"""What a proxy thread alone decides: no peer and no GPU can hold it up there."""


@dataclass(slots=True)
class Wait:
    """One proven need: ``waiter`` cannot go on before ``target`` does something.

    ``describe`` makes its text: of the thousands of waits of a large job a few are ever shown. ``operation`` is set where no end
    of a transfer tells it. ``weak``: nothing shows that the waiter has begun the operation; it may wait in one before.
    """

    waiter: Node
    target: Node
    why: Why
    key: ConnectionKey
    describe: Callable[[], str]
    end: End | None = None
    operation: OperationRef | None = None
    weak: bool = False

    @property
    def text(self) -> str:
        """The wait as a line of evidence."""
        return self.describe()


def enough_pairs(waiting: Sequence[T], behind: Sequence[T]) -> list[tuple[T, T]]:
    """Who waits for whom where everybody waits and everybody behind is waited for: one wait for each is enough to follow."""
    return [(waiter, behind[0]) for waiter in waiting] + [(waiting[0], other) for other in behind[1:]]


@dataclass(slots=True)
class StallMark:
    """One thing a rank could do and does not do."""

    member: Member
    stall: Stall
    key: ConnectionKey
    describe: Callable[[], str]
    end: End | None = None

    @property
    def text(self) -> str:
        """The stall as a line of evidence."""
        return self.describe()


class Nodes:
    """Nodes as numbers: an observed process is its index, everything else is negative."""

    def __init__(self) -> None:
        self._others: list[Node] = []
        self._numbers: dict[Node, int] = {}

    def number(self, node: Node) -> int:
        """The number of a node."""
        if isinstance(node, RankNode):
            return int(node)
        number = self._numbers.setdefault(node, -1 - len(self._others))
        if number == -1 - len(self._others):
            self._others.append(node)
        return number

    def node(self, number: int) -> Node:
        """The node with a number."""
        return RankNode(number) if number >= 0 else self._others[-1 - number]


@dataclass(slots=True)
class Columns(Generic[T]):
    """Waits or stalls of the network's transfers, in columns: who (waiter or stalled process), and for whom where it waits.

    ``make`` turns a row into an object; ``collectives`` are the ids of the communicators that have a collective among the rows.
    """

    who: Column
    target: Column
    make: Callable[[int], T]
    collectives: set[int]

    def __len__(self) -> int:
        return len(self.who)


class Waits:
    """The wait-for graph of one job: what the network's transfers show in columns, the rest as objects.

    Waits have an order, and a number by it: those of the columns come first.
    """

    def __init__(
        self, edges: Iterable[Wait] = (), stalls: Iterable[StallMark] = (), mismatches: Iterable[Mismatch] = (),
        *, columns: Columns[Wait] | None = None, stall_columns: Columns[StallMark] | None = None, nodes: Nodes | None = None,
    ) -> None:  # fmt: skip
        self.nodes = nodes or Nodes()
        self.mismatches = list(mismatches)
        self.columns, self.stall_columns = columns, stall_columns
        self.added, self.added_stalls = list(edges), list(stalls)

    @property
    def open(self) -> bool:
        """Whether any transfer is unfinished."""
        return bool(self.added or self.added_stalls or self.columns or self.stall_columns)

    def with_edges(self, edges: Iterable[Wait]) -> Waits:
        """The same stalls, and these waits."""
        return Waits(edges, self.added_stalls, self.mismatches, stall_columns=self.stall_columns, nodes=self.nodes)

    def ends(self) -> tuple[Column, Column]:
        """Numbers of the waiters and of those waited for, of every wait."""
        waiters = np.array([self.nodes.number(wait.waiter) for wait in self.added], np.int64)
        targets = np.array([self.nodes.number(wait.target) for wait in self.added], np.int64)
        if self.columns is None:
            return waiters, targets
        return np.r_[self.columns.who, waiters], np.r_[self.columns.target, targets]

    def wait(self, number: int) -> Wait:
        """One wait."""
        in_columns = len(self.columns) if self.columns is not None else 0
        if self.columns is not None and number < in_columns:
            return self.columns.make(number)
        return self.added[number - in_columns]

    def standing(self) -> Column:
        """Indices of the processes that stand still, one for every stall."""
        added = np.array([mark.member.index for mark in self.added_stalls], np.int64)
        return added if self.stall_columns is None else np.r_[self.stall_columns.who, added]

    def stall(self, number: int) -> StallMark:
        """One stall."""
        in_columns = len(self.stall_columns) if self.stall_columns is not None else 0
        if self.stall_columns is not None and number < in_columns:
            return self.stall_columns.make(number)
        return self.added_stalls[number - in_columns]

    def all(self) -> Iterator[Wait]:
        """Every wait as an object."""
        yield from map(self.wait, range(len(self.ends()[0])))

    def of(self, indices: Iterable[int]) -> dict[int, list[Wait]]:
        """For each of these processes its waits and those for it."""
        found: dict[int, list[Wait]] = {index: [] for index in indices}
        wanted = np.array(list(found), np.int64)
        waiters, targets = self.ends()
        for place in np.flatnonzero(np.isin(waiters, wanted) | np.isin(targets, wanted)).tolist():
            wait = self.wait(place)
            for number in {int(waiters[place]), int(targets[place])} & found.keys():
                found[number].append(wait)
        return found

    def first(self, waiters: int) -> list[Wait]:
        """All waits of the first so many nodes that wait."""
        who, _ = self.ends()
        _, place = np.unique(who, return_index=True)
        chosen = who[np.sort(place)[:waiters]]
        return [self.wait(number) for number in np.flatnonzero(np.isin(who, chosen)).tolist()]

    def waiting(self) -> set[int]:
        """Indices of the processes that wait."""
        waiters, _ = self.ends()
        return set(np.unique(waiters[waiters >= 0]).tolist())

    def busy(self) -> set[int]:
        """Indices of the processes that wait or stand still in something that shows."""
        return self.waiting() | set(np.unique(self.standing()).tolist())

    def collectives(self) -> set[int]:
        """Ids of the communicators in which a collective stands still."""
        keys = (*(wait.key for wait in self.added), *(mark.key for mark in self.added_stalls))
        found = {key.group for key in keys if not key.point_to_point}
        for columns in (self.columns, self.stall_columns):
            if columns is not None:
                found |= columns.collectives
        return found
