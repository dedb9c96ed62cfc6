"""Where in the order of its calls a process stands, by what of its messages inside its node is over."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ncclwatch.collect.call_order import CallOrder
from ncclwatch.collect.message_steps import Place, way_of
from ncclwatch.model.rings import CONNECTION_SLOTS, steps_unread
from ncclwatch.model.state import Communicator, Direction, PendingOperation, ProcessSample, ProxyOperation, Transport

ALMOST = 1e-6
"""Fact: what a quotient of whole numbers may err by."""
BEFORE_NEXT = 1
"""Fact: the position of the call that is not made yet: 0 is the newest."""


class Standing(NamedTuple):
    """The oldest call that is not over: its ``position`` as of :meth:`CallOrder.locate`, and whether it has ``begun``; ``None``
    where that does not show. ``awaits``: the messages open in it that cannot go on for the peer's sake. ``collective``: address
    of its communicator where it is one, and steps made there.
    """

    position: int
    begun: bool | None
    awaits: list[Place]
    collective: tuple[int, int] | None = None


def find_standing(order: CallOrder, sample: ProcessSample, unfinished: Mapping[Place, Collection[int]]) -> Standing | None:
    """Where a process stands, if that is in a message inside its node or before its next call; ``None`` where it does not show.
    ``unfinished``: operations that its proxies have not ended. O(connections and open calls).

    The kernels of a process run in the order of its calls. So the newest call that is over must be the last before the oldest
    that is not: if it comes later, or something lies between of which nothing shows, the counts do not tell.
    """
    inside = order.open_inside(sample)
    if not inside:
        return None
    until_ns = sample.time_ns + sample.duration_ns
    left = {place: range(math.ceil(number - ALMOST)) for place, number in inside.items() if number > ALMOST}
    located = order.locate({**unfinished, **left}, until_ns)
    if located is None:
        return None
    first = min(located.values(), default=BEFORE_NEXT)
    open_at = {(position, place) for (place, _), position in located.items()}
    shows, calls = _shows(sample, inside), order.since(first - 1, until_ns)
    over = max((position for position, place in calls if (position, place) not in open_at and shows(place)), default=None)
    before = max((position for position, _ in calls if position < first), default=None)
    if over is None or before is None or not before <= over <= first:
        return None
    if not located:
        return Standing(first, begun=False, awaits=[])
    own = [place for position, place in open_at if position == first]
    if len(own) == 1 and own[0][1] is None and own[0] in inside:
        # Whether it has begun, its rings tell.
        return Standing(first, None, [], (own[0][0], order.steps_at(own[0])))
    if not all(place in inside and place[1] is not None for place in own):
        return None
    # A message takes a few steps; a rank that has made one, or the other half of an exchange, is inside.
    begun = over == first or any(inside[place] % 1 > ALMOST for place in own)
    held = _held_up(sample)
    awaits = [place for place in own if place in held]
    if begun or len(awaits) < len(own):
        return Standing(first, begun, awaits if begun else [])
    return Standing(first, None, awaits)


def places_of(own: Communicator | None, operation: ProxyOperation | PendingOperation) -> list[Place]:
    """The places in the order of calls that an operation fills; empty where its communicator is not known."""
    if own is None:
        return []
    if not operation.op_count & 1:
        return [(own.address, None)]
    peers = {sub.peer for sub in (operation.subs if isinstance(operation, ProxyOperation) else (operation,))}
    return [(own.address, (operation.direction is Direction.SEND, peer)) for peer in sorted(peers)]


def exchanges_held_up(order: CallOrder, sample: ProcessSample) -> list[Place]:
    """Receives in which a process waits, as it has written its own half of the exchange, unread, and finds nothing to read."""
    exchanged, written = order.exchanged, set[tuple[int, int]]()
    for own in sample.communicators:
        sends = (end for end in own.host_connections if (way := way_of(end)) is not None and way[0])
        written |= {(own.address, end.peer) for end in sends if steps_unread(end)}
    held = _held_up(sample) if written else ()
    return [(at, (False, peer)) for at, peer in sorted(written & exchanged) if (at, (False, peer)) in held]


def _held_up(sample: ProcessSample) -> set[Place]:
    """Messages inside a node that find nothing to read, or no room to write."""
    unread: dict[Place, list[int | None]] = defaultdict(list)
    for own in sample.communicators:
        for end in own.host_connections:
            if (way := way_of(end)) is not None:
                unread[own.address, way].append(steps_unread(end))
    full = {place for place, left in unread.items() if place[1] and place[1][0] and any(one == CONNECTION_SLOTS for one in left)}
    return full | {place for place, left in unread.items() if place[1] and not place[1][0] and all(one == 0 for one in left)}


def _shows(sample: ProcessSample, inside: Mapping[Place, float]) -> Callable[[Place], bool]:
    """Whether it shows of a place what is open there: it is counted, or all of it passes the proxy."""
    near = {own.address: {peer for _, peer, _, by in own.transports if by is not Transport.NET} for own in sample.communicators}

    def shows(place: Place) -> bool:
        peers, way = near.get(place[0]), place[1]
        return place in inside or (peers is not None and (not peers if way is None else way[1] not in peers))

    return shows
