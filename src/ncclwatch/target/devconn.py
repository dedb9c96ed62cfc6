"""Counters of connections that lie in GPU memory (P2P and NVLink): where they are, without reading them.

Each rank keeps in its own GPU's memory what it polls: a sender the head (consumed by its peer), a receiver the tail (produced by
its peer). Their addresses stand in the host's copy of the connection (``ncclConnInfo.head`` and ``tail``, src/include/device.h of
all tags from v2.18.3-1 on). Only the counter shim inside the process can read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ncclwatch.model.state import Direction, Transport
from ncclwatch.target.commstate import CommState
from ncclwatch.target.decode import Decoder
from ncclwatch.target.layout import MissingMemberError

MAX_PLACES = 1024
"""Counters of one process that are looked up (``FRAME_WORDS``)."""

HIDDEN = frozenset({Transport.P2P})
"""Transports whose counters lie in GPU memory and count steps, as those of shared memory do."""


@dataclass(frozen=True, slots=True)
class CounterPlace:
    """One counter: ``address`` is of the word in GPU memory, ``held_at`` where in host memory NCCL keeps this address."""

    comm_address: int
    channel: int
    peer: int
    direction: Direction
    connection_index: int
    counter: str
    address: int
    held_at: int
    size: int = 8


def counter_places(
    decoder: Decoder, states: Sequence[CommState], transports: frozenset[Transport] = HIDDEN
) -> tuple[CounterPlace, ...]:
    """The counters of all connections through these transports, of each the one that this rank polls; bounded by ``MAX_PLACES``.

    Empty in a build without the members.
    """
    wanted: list[tuple[int, int, int, Direction, int, str, int]] = []
    try:
        members = {
            Direction.SEND: ("head", decoder.layout.member("ncclConnector.conn.head")),
            Direction.RECV: ("tail", decoder.layout.member("ncclConnector.conn.tail")),
        }
    except MissingMemberError:
        return ()
    for state in states:
        for connector in state.connectors:
            if connector.transport not in transports or len(wanted) >= MAX_PLACES:
                continue
            name, member = members[connector.direction]
            key = (state.record.address, connector.channel, connector.peer, connector.direction, connector.index, name)
            wanted.append((*key, connector.address + member.offset))
    found = decoder.reader.read_many([(entry[-1], 8) for entry in wanted])
    places = []
    for entry, data in zip(wanted, found, strict=True):
        address = int.from_bytes(data, "little") if data else 0
        if address and address % 8 == 0:
            places.append(CounterPlace(*entry[:-1], address=address, held_at=entry[-1]))
    return tuple(places)
