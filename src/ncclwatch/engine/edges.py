"""What the wait-for graph is made of: places where a wait can end, waits between them, and what a rank could do and does not."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

import numpy as np

from ncclwatch.engine.connections import ConnectionKey, End
from ncclwatch.engine.evidence.base import Fact, FactColumns, FactKind, Strength
from ncclwatch.engine.job import Member
from ncclwatch.engine.nodes import Node, Nodes, RankNode

T = TypeVar("T")

NOBODY = -1
"""Fact: stands for the object of a fact in columns that has none."""


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
    EMPTY = "which has written nothing more for it"
    FULL = "which does not consume what was written for it"
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
    PROXY_NOT_BEGUN = "its proxy thread does not begin a queued operation"


PROXY_STALLS = frozenset({
    Stall.PROXY_NOT_SENDING, Stall.PROXY_NOT_POSTING, Stall.PROXY_NOT_TAKING, Stall.PROXY_NOT_COMPLETING,
    Stall.PROXY_NOT_BEGUN,
})  # fmt: skip
"""What a proxy thread alone decides: no peer and no GPU can hold it up there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Fact):
    """An edge of the wait-for graph: the subject cannot go on before the object does something.

    Its text is made when it is asked for: of the thousands of waits of a large job a few are ever shown. ``operation`` is set
    where no end of a transfer tells it. ``strength``: proven by counters of both ends; likely where nothing shows that the waiter
    has begun the operation, and it may wait in one before; possible where nothing contradicts it.
    """

    kind: FactKind = FactKind.WAITS_FOR
    subject: Node
    object: Node
    why: Why
    key: ConnectionKey
    end: End | None = None
    other: End | None = None
    """The far end of the transfer, where that is open."""
    number: int = -1
    """In the graph it was taken from."""

    @property
    def waiter(self) -> Node:
        """Who waits."""
        return self.subject

    @property
    def target(self) -> Node:
        """For whom."""
        return self.object

    @property
    def weak(self) -> bool:
        """Whether nothing shows that the waiter has begun the operation."""
        return self.strength is Strength.LIKELY


def enough_pairs(waiting: Sequence[T], behind: Sequence[T]) -> list[tuple[T, T]]:
    """Who waits for whom where everybody waits and everybody behind is waited for: one wait for each is enough to follow."""
    return [(waiter, behind[0]) for waiter in waiting] + [(waiting[0], other) for other in behind[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StallMark(Fact):
    """One thing a rank could do and does not do: it accuses nobody by itself, for the rank may wait elsewhere."""

    kind: FactKind = FactKind.STANDS
    subject: RankNode
    member: Member
    stall: Stall
    key: ConnectionKey
    end: End | None = None


EdgeT = TypeVar("EdgeT", Wait, StallMark)


def in_columns(facts: Sequence[EdgeT], nodes: Nodes) -> FactColumns[EdgeT]:
    """Waits or stalls that are objects already, as those that are not."""
    subjects = np.array([nodes.number(fact.subject) for fact in facts], np.int64)
    objects = np.array([nodes.number(fact.object) if isinstance(fact, Wait) else NOBODY for fact in facts], np.int64)
    possible = np.array([fact.strength is Strength.POSSIBLE for fact in facts], np.bool_)
    collectives = frozenset(fact.key.group for fact in facts if not fact.key.point_to_point)
    return FactColumns(facts[0].kind, subjects, objects, possible, facts.__getitem__, collectives)


def wait_facts(waits: Iterable[Wait]) -> list[Fact]:
    """Waits as they are told: one for all channels between the same two ranks that stand for the same reason."""
    first: dict[Hashable, Wait] = {}
    channels: dict[Hashable, set[int]] = {}
    for wait in waits:
        same = (wait.waiter, wait.target, wait.why, wait.end.operation.direction if wait.end else None)
        first.setdefault(same, wait)
        channels.setdefault(same, set()).add(wait.key.channel)
    return [replace(wait, describe=partial(_text, wait, len(channels[same]) - 1)) for same, wait in first.items()]


def _text(wait: Wait, more: int) -> str:
    return wait.text + (f" (and {more} more channel{'s' if more > 1 else ''})" if more else "")


def told(text: str, subject: Node | None = None, kind: FactKind = FactKind.CALLED_OTHER, source: str = "state") -> Fact:
    """A line of evidence that is made already."""
    return Fact(kind, subject, source, describe=partial(str, text))
