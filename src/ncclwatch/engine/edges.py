"""What the wait-for graph is made of: places where a wait can end, needs between them, and what a rank could do and does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ncclwatch.engine.connections import ConnectionKey, End
from ncclwatch.engine.job import Member
from ncclwatch.engine.mismatch import Mismatch


@dataclass(frozen=True, slots=True, order=True)
class RankNode:
    """An observed process, by its index in the job's input."""

    index: int


@dataclass(frozen=True, slots=True, order=True)
class AbsentNode:
    """A rank of a communicator that no observed process holds."""

    group_id: int
    comm_rank: int


@dataclass(frozen=True, slots=True, order=True)
class LinkNode:
    """The path between two ranks, when both sides have done their part."""

    group_id: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True, order=True)
class HiddenNode:
    """A wait that the planes at hand cannot see, inside a node."""

    group_id: int
    comm_rank: int


Node = RankNode | AbsentNode | LinkNode | HiddenNode


class Why(StrEnum):
    """Why one side needs the other, as the clause that follows its name."""

    NO_OPERATION = "which has no operation open for it"
    NOT_BEGUN = "whose proxy has not begun the operation that is queued for it"
    GPU_NOT_READY = "whose GPU has not produced the data"
    NOT_TRANSMITTED = "whose proxy has not sent data that is ready"
    IN_NETWORK = "data was handed to the network and has not arrived"
    LEFT_BEHIND = "which has already gone past this step"
    NO_BUFFER = "which has no receive buffer open"
    NO_CREDIT = "the receiver has buffers open, but the sender may not send: the clear-to-send has not arrived"
    NOT_TAKEN = "which does not take the data sent"
    EMPTY = "which has written nothing more into shared memory"
    FULL = "which does not consume what lies in shared memory"
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


@dataclass(frozen=True, slots=True)
class Wait:
    """One proven need: ``waiter`` cannot go on before ``target`` does something."""

    waiter: Node
    target: Node
    why: Why
    key: ConnectionKey
    text: str
    end: End | None = None


@dataclass(frozen=True, slots=True)
class StallMark:
    """One thing a rank could do and does not do."""

    member: Member
    stall: Stall
    key: ConnectionKey
    text: str
    end: End | None = None


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
