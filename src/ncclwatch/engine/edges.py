"""What the wait-for graph is made of: places where a wait can end, waits between them, and what a rank could do and does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Generic, TypeVar

from ncclwatch.engine.connections import ConnectionKey, End
from ncclwatch.engine.evidence.base import Fact, FactKind, Strength
from ncclwatch.engine.job import Member
from ncclwatch.engine.nodes import Node, RankNode
from ncclwatch.engine.transfers import Column
from ncclwatch.model.verdict import OperationRef

T = TypeVar("T")


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
    """One need: ``waiter`` cannot go on before ``target`` does something.

    ``describe`` makes its text: of the thousands of waits of a large job a few are ever shown. ``operation`` is set where no end
    of a transfer tells it. ``strength``: proven by counters of both ends; likely where nothing shows that the waiter has begun
    the operation, and it may wait in one before; possible where nothing contradicts it.
    """

    waiter: Node
    target: Node
    why: Why
    key: ConnectionKey
    describe: Callable[[], str]
    end: End | None = None
    other: End | None = None
    """The far end of the transfer, where that is open."""
    operation: OperationRef | None = None
    strength: Strength = Strength.PROVEN
    number: int = -1
    """In the graph it was taken from."""

    @property
    def weak(self) -> bool:
        """Whether nothing shows that the waiter has begun the operation."""
        return self.strength is Strength.LIKELY

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

    @property
    def fact(self) -> Fact:
        """The stall as a fact."""
        return Fact(FactKind.STANDS, RankNode(self.member.index), "state", describe=self.describe)


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


def wait_facts(waits: Iterable[Wait]) -> list[Fact]:
    """Waits as facts: one for all channels between the same two ranks that stand for the same reason."""
    first: dict[object, Wait] = {}
    channels: dict[object, set[int]] = {}
    for wait in waits:
        same = (wait.waiter, wait.target, wait.why, wait.end.operation.direction if wait.end else None)
        first.setdefault(same, wait)
        channels.setdefault(same, set()).add(wait.key.channel)
    return [_fact(wait, len(channels[same]) - 1) for same, wait in first.items()]


def _fact(wait: Wait, more: int) -> Fact:
    def describe() -> str:
        return wait.text + (f" (and {more} more channel{'s' if more > 1 else ''})" if more else "")

    return Fact(FactKind.WAITS_FOR, wait.waiter, "state", wait.strength, wait.target, operation=wait.operation, describe=describe)


def told(text: str, subject: Node | None = None, kind: FactKind = FactKind.CALLED_OTHER, source: str = "state") -> Fact:
    """A line of evidence that is made already."""
    return Fact(kind, subject, source, describe=partial(str, text))
