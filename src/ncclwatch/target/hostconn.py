"""Connections through shared memory: their head and tail, which no proxy operation accompanies."""

from __future__ import annotations

from collections.abc import Sequence

from ncclwatch.model.state import Direction, HostConnection, Transport
from ncclwatch.target.connectors import Connector
from ncclwatch.target.decode import Decoder
from ncclwatch.target.layout import MissingMemberError
from ncclwatch.target.shmlines import Lines, Segment, newest_lines, produced

_POINTERS = ("hostMem", "remHostMem")
_DEVICE_POINTERS = ("devHostMem", "devRemHostMem")


def read_host_connections(decoder: Decoder, communicator: int, connectors: Sequence[Connector]) -> tuple[HostConnection, ...]:
    """Head and tail of every shared-memory connection among a communicator's ``connectors``.

    Both ends keep the two counters in host memory (``shmSendResources``/``shmRecvResources``, src/transport/shm.cc): the
    sender owns ``ncclSendMem.head`` and maps the receiver's ``ncclRecvMem.tail``, the receiver the other way round. Only Simple
    moves the tail; what was written by LL and LL128 is added from their flags. A counter is ``None`` where it is not known, or
    where the memory cannot be read from outside (cuMem host allocations of 2.27 and later live in the driver).
    """
    found = []
    for direction, structure in ((Direction.SEND, "shmSendResources"), (Direction.RECV, "shmRecvResources")):
        mine = [c for c in connectors if c.transport is Transport.SHM and c.direction is direction]
        if not mine:
            continue
        try:
            wanted = decoder.fields(structure, (*_POINTERS, *_DEVICE_POINTERS))
            head, tail = decoder.layout.member("ncclSendMem.head"), decoder.layout.member("ncclRecvMem.tail")
        except MissingMemberError as error:
            decoder.unavailable["shared-memory connections"] = error.message
            continue
        places: list[tuple[int, int]] = []
        segments: list[tuple[Segment, ...]] = []
        for resources in decoder.structures(wanted, [c.resources for c in mine]):
            known = resources or {}
            own, remote = (known.get(name) or 0 for name in _POINTERS)
            send_mem, recv_mem = (own, remote) if direction is Direction.SEND else (remote, own)
            places += [(_place(decoder, send_mem, head.offset), 8), (_place(decoder, recv_mem, tail.offset), 8)]
            pairs = zip(_POINTERS, _DEVICE_POINTERS, strict=True)
            segments.append(tuple(Segment(known.get(host) or 0, known.get(device) or 0) for host, device in pairs))
        decoder.counters += [address for address, _ in places if address]
        counters = [None if data is None else int.from_bytes(data, "little") for data in decoder.reader.read_many(places)]
        if None in counters:
            decoder.unavailable["shared-memory head and tail"] = "some of the memory that holds them cannot be read from outside"
        both = [(counters[2 * i], counters[2 * i + 1]) for i in range(len(mine))]
        lines = newest_lines(decoder, communicator, mine, segments, both)
        for c, (consumed, tail_word), own_lines in zip(mine, both, lines, strict=True):
            written = _written(decoder, consumed, tail_word, own_lines)
            found.append(HostConnection(c.channel, c.peer, direction, c.index, consumed, written))
    return tuple(sorted(found, key=lambda c: (c.channel, c.peer, c.direction, c.connection_index)))


def _written(decoder: Decoder, head: int | None, tail: int | None, lines: Lines | None) -> int | None:
    """The tail, with what was written by LL and LL128."""
    if head is None or tail is None or lines is None:
        return tail
    written = produced(head, tail, lines)
    if written is None:
        decoder.unavailable["steps written into shared memory"] = (
            "messages are so small that some steps have no data, and leave no trace"
        )
    return written


def _place(decoder: Decoder, structure: int, offset: int) -> int:
    """The address to read, or 0 (which every reader refuses) for a pointer that leads nowhere."""
    return structure + offset if decoder.is_readable(structure) else 0
