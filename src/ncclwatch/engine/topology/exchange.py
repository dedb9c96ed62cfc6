"""What Send and Recv are used for on a communicator: a chain of stages, a ring, or everybody with everybody."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.model.events import Function

MINIMUM_CALLS = 3
LATEST_CALLS = 512


class Shape(StrEnum):
    """The pattern of point-to-point calls on one communicator."""

    NONE = "none"
    CHAIN = "sends and receives between neighbours, in both directions"
    RING = "every call sends to one neighbour and receives from the other"
    ALL_TO_ALL = "grouped sends and receives with every rank"
    PAIRS = "every call sends to and receives from the only other rank"
    OTHER = "point-to-point calls without a pattern that is known"


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Point-to-point calls of one rank on one communicator: peers it sends to and receives from, with how often."""

    shape: Shape
    sends: dict[int, int]
    receives: dict[int, int]


def classify(operations: NDArray[Any], own: int, nranks: int) -> Exchanges:
    """Classify the point-to-point operations of one row (``record.OPERATION``) of rank ``own``."""
    send, receive = operations["function"] == Function.SEND, operations["function"] == Function.RECV
    part = operations[send | receive]
    if not len(part):
        return Exchanges(Shape.NONE, {}, {})
    sends = _numbers(part["peer"][part["function"] == Function.SEND])
    receives = _numbers(part["peer"][part["function"] == Function.RECV])
    calls, index = np.unique(part["call"], return_inverse=True)
    if len(calls) < MINIMUM_CALLS:
        return Exchanges(Shape.OTHER, sends, receives)
    # The oldest call may be cut off by the end of the ring, the newest by the end of what arrived.
    inside = (index > max(0, len(calls) - LATEST_CALLS)) & (index < len(calls) - 1)
    inside |= len(calls) <= MINIMUM_CALLS
    part, index = part[inside], index[inside]
    return Exchanges(_shape(part, index, own, nranks, set(sends) | set(receives)), sends, receives)


def _numbers(peers: NDArray[Any]) -> dict[int, int]:
    values, numbers = np.unique(peers, return_counts=True)
    return dict(zip(values.tolist(), numbers.tolist(), strict=True))


def _shape(part: NDArray[Any], index: NDArray[np.int64], own: int, nranks: int, peers: set[int]) -> Shape:
    send = part["function"] == Function.SEND
    numbers = np.unique(index)
    place = np.searchsorted(numbers, index)
    sent = np.bincount(place, weights=send, minlength=len(numbers))
    received = np.bincount(place, weights=~send, minlength=len(numbers))
    both = np.mean((sent > 0) & (received > 0))
    to_self = own in peers
    if to_self and both > 0.9:
        return Shape.ALL_TO_ALL
    if nranks == 2:
        return Shape.PAIRS if both > 0.9 and np.all(sent == received) else Shape.CHAIN
    if len(peers) > 2:
        # Empty parts are left out of uneven exchanges, so not every call has every peer.
        everybody = both > 0.8 and (nranks <= 4 or float(np.median(sent + received)) > 4)
        return Shape.ALL_TO_ALL if everybody else Shape.OTHER
    return _between_two(part, send, sent, received, own, nranks)


def _between_two(
    part: NDArray[Any], send: NDArray[np.bool_], sent: NDArray[Any], received: NDArray[Any], own: int, nranks: int
) -> Shape:
    """At most two peers: a ring only ever sends one way round, a chain of stages returns gradients."""
    targets, origins = set(part["peer"][send].tolist()), set(part["peer"][~send].tolist())
    one_way = len(targets) == 1 and len(origins) == 1 and targets != origins
    if one_way and nranks > 2 and np.mean((sent > 0) & (received > 0)) > 0.9:
        (target,), (origin,) = targets, origins
        if (target - own) % nranks == (own - origin) % nranks:
            return Shape.RING
    return Shape.CHAIN
