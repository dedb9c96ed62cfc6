"""What the wait-for graph is made of: places where a wait can end, needs between them, and what a rank could do and does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ncclwatch.engine.connections import ConnectionKey, End
from ncclwatch.engine.job import Member
from ncclwatch.engine.mismatch import Mismatch
from ncclwatch.model.verdict import OperationRef


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
    BROKEN = "whose connection is broken: NCCL has dropped the receive"
    UNOBSERVED = "which was not observed"


class Stall(StrEnum):
    """What a rank could do and does not do."""

    GPU_NOT_PRODUCING = "its GPU produces no data although buffers are free"
    GPU_NOT_CONSUMING = "its GPU does not consume data that has arrived"
    FLUSH = "data arrived but the flush to GPU memory does not complete"
    PROXY_NOT_SENDING = "its proxy does not send data that is ready although the receiver has buffers open"
    PROXY_NOT_POSTING = "its proxy opens no receive buffers"
    PROXY_NOT_OPENING = "its proxy opens no further send buffers although it may"
    PROXY_NOT_BEGUN = "its proxy thread does not begin a queued operation"


PROXY_STALLS = frozenset({Stall.PROXY_NOT_SENDING, Stall.PROXY_NOT_POSTING, Stall.PROXY_NOT_OPENING, Stall.PROXY_NOT_BEGUN})
"""What a proxy thread alone decides: no peer and no GPU can hold it up there."""


@dataclass(slots=True)
class Wait:
    """One proven need: ``waiter`` cannot go on before ``target`` does something.

    ``describe`` makes its text: of the thousands of waits of a large job a few are ever shown. ``operation`` is set where no end
    of a transfer tells it.
    """

    waiter: Node
    target: Node
    why: Why
    key: ConnectionKey
    describe: Callable[[], str]
    end: End | None = None
    operation: OperationRef | None = None

    @property
    def text(self) -> str:
        """The wait as a line of evidence."""
        return self.describe()


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


@dataclass(slots=True)
class Waits:
    """The wait-for graph of one job."""

    edges: list[Wait] = field(default_factory=list)
    stalls: list[StallMark] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether any transfer is unfinished."""
        return bool(self.edges or self.stalls)
