"""Which queue pair serves which channel and peer: read from the structures of NCCL's own InfiniBand transport.

What :mod:`ncclwatch.wire.nccl_connections` finds as the network's object is, for the network "IB", an ``ncclIbSendComm`` or
``ncclIbRecvComm`` with its queue pairs: an array of ``ibv_qp*`` in the communicator itself until 2.19, of ``ncclIbQp`` in
``ncclIbNetCommBase`` from 2.20 on (src/transport/net_ib.cc of v2.18.3-1 and v2.21.5-1; net_ib/common.h of v2.30.7-1). Every
pointer is checked to be a queue pair, so that the object of another network plugin is never mistaken for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ncclwatch.model.state import Direction
from ncclwatch.target.connectors import Connector
from ncclwatch.target.decode import Decoder
from ncclwatch.target.layout import Layout
from ncclwatch.wire.contexts import QueuePair, queue_pair_at
from ncclwatch.wire.nccl_connections import NetConnection, network_communicators

MAX_QUEUE_PAIRS = 128
"""``NCCL_IB_MAX_QPS``, v2.18.3-1 … v2.30.7-1."""


MAPPED = bytes(10) + b"\xff\xff"
"""How the GID of an IPv4 address begins (RoCE v2)."""
REMOTE_BYTES = 64
"""Of what the other end told, as much as holds its GID in every release."""


@dataclass(frozen=True, slots=True)
class QueueOwner:
    """What a queue pair serves: ranks are of the communicator, ``index`` its place among the queue pairs of the connection."""

    comm_hash: int
    rank: int
    channel: int
    peer: int
    direction: Direction
    index: int
    pair: QueuePair


@dataclass(frozen=True, slots=True)
class _QueueArray:
    """Where an InfiniBand communicator keeps its queue pairs: offsets in bytes from its start."""

    first: int
    stride: int
    pointer: int
    count: int
    capacity: int


def queue_owners(decoder: Decoder, comm_hash: int, rank: int, connectors: Iterable[Connector]) -> list[QueueOwner]:
    """The queue pairs of a communicator's connectors that this process serves itself.

    A connector of another process (PXN), of another transport or of another network gives none. Where this build lacks a
    structure, ``decoder.unavailable["flows"]`` says which.
    """
    found: list[QueueOwner] = []
    arrays = {direction: _array(decoder.layout, direction) for direction in Direction}
    asked = list(connectors)
    for connector, (communicator, _, _) in zip(asked, network_communicators(decoder, asked), strict=True):
        array = arrays[connector.direction]
        if array is None:
            decoder.unavailable.setdefault("flows", "this build of NCCL keeps its queue pairs in a way that is not known")
        elif communicator:
            pairs = _queue_pairs(decoder, communicator, array)
            found += [
                QueueOwner(comm_hash, rank, connector.channel, connector.peer, connector.direction, index, pair)
                for index, pair in enumerate(pairs)
            ]
    return found


def pairs_of(decoder: Decoder, connection: NetConnection) -> list[QueuePair]:
    """The queue pairs of one connection that was found before; none where it has none (yet), or they are not NCCL's own."""
    array = _array(decoder.layout, connection.direction)
    return _queue_pairs(decoder, connection.communicator, array) if array is not None and connection.communicator else []


def remote_address(decoder: Decoder, connection: NetConnection) -> str:
    """The IP address of a connection's other end, as a RoCE GID names it (``::ffff:10.0.0.2``); empty where it has none, or this
    build keeps it elsewhere.

    What both ends told each other is in ``remDevs`` (2.20 on; src/transport/net_ib.cc of v2.21.5-1), whose first address is the
    remote GID behind some small numbers: whatever there is not an IPv4 address as a GID is none.
    """
    layout = decoder.layout
    structure = "ncclIbSendComm" if connection.direction is Direction.SEND else "ncclIbRecvComm"
    if not (connection.communicator and layout.has(f"{structure}.base") and layout.has("ncclIbNetCommBase.remDevs")):
        return ""
    place = layout.member(f"{structure}.base").offset + layout.member("ncclIbNetCommBase.remDevs").offset
    (data,) = decoder.reader.read_many([(connection.communicator + place, REMOTE_BYTES)])
    for at in range(0, REMOTE_BYTES - 15, 8):
        gid = (data or b"")[at : at + 16]
        if gid.startswith(MAPPED) and any(gid[12:]):
            return ".".join(map(str, gid[12:]))
    return ""


def _queue_pairs(decoder: Decoder, communicator: int, array: _QueueArray) -> list[QueuePair]:
    counted = decoder.words(communicator + array.count, 1, 4, signed=True)
    if counted is None or not 0 < counted[0] <= min(array.capacity, MAX_QUEUE_PAIRS):
        return []
    places = [(communicator + array.first + index * array.stride + array.pointer, 8) for index in range(counted[0])]
    pairs = []
    for data in decoder.reader.read_many(places):
        pair = queue_pair_at(decoder.reader, int.from_bytes(data, "little")) if data is not None else None
        if pair is None:
            return []  # not an ncclIb…Comm: one bad pointer is enough
        pairs.append(pair)
    return pairs


def _array(layout: Layout, direction: Direction) -> _QueueArray | None:
    """Where the queue pairs are in this build, or ``None``."""
    structure = "ncclIbSendComm" if direction is Direction.SEND else "ncclIbRecvComm"
    if layout.has(f"{structure}.base") and layout.has("ncclIbNetCommBase.qps"):
        holder, start = "ncclIbNetCommBase", layout.member(f"{structure}.base").offset
    else:
        holder, start = structure, 0
    if not layout.has(f"{holder}.qps") or not layout.has(f"{holder}.nqps"):
        return None
    pairs, count = layout.member(f"{holder}.qps"), layout.member(f"{holder}.nqps")
    pointer = layout.member("ncclIbQp.qp").offset if pairs.element == "struct" and layout.has("ncclIbQp.qp") else 0
    return _QueueArray(start + pairs.offset, pairs.stride, pointer, start + count.offset, pairs.count)
