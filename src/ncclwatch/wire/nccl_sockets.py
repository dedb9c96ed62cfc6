"""Which TCP sockets serve which channel and peer: read from the structures of NCCL's own socket transport.

The network's object of a connection (``ncclNetSocketComm``, src/transport/net_socket.cc of v2.18.3-1 to v2.30.7-1) holds a
control socket, which carries sizes and small data, and up to 64 data sockets. Where in an ``ncclSocket`` the descriptor lies is
not taken from a version: it is the first word that, in every socket of the connection, is the descriptor of a connected TCP
socket of this process. What does not pass that test is not believed, so that another plugin's object is never mistaken for one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ncclwatch.nic.sockets import TcpSocket
from ncclwatch.target.decode import Decoder
from ncclwatch.target.layout import Layout

MAX_SOCKETS = 64
"""``MAX_SOCKETS`` of net_socket.cc, v2.18.3-1 … v2.30.7-1."""

SOCKET_NETWORK = "Socket"

LAST_STANDARD = 2
"""Standard input, output and error are not NCCL's, and small numbers abound."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Offsets in bytes in ``ncclNetSocketComm``: control socket, data sockets and their size, number of data sockets."""

    control: int
    first: int
    stride: int
    count: int
    capacity: int


def connection_sockets(decoder: Decoder, communicator: int, sockets: Mapping[int, TcpSocket]) -> list[int]:
    """Descriptors of the sockets of one connection, the control socket first; empty where they cannot be told.

    ``sockets`` are the connected TCP sockets of the process by descriptor.
    """
    shape = _shape(decoder.layout)
    if shape is None:
        decoder.unavailable.setdefault("sockets", "this build of NCCL keeps its sockets in a way that is not known")
        return []
    counted = decoder.words(communicator + shape.count, 1, 4, signed=True) if communicator else None
    if counted is None or not 0 <= counted[0] <= min(shape.capacity, MAX_SOCKETS):
        return []
    places = [communicator + shape.control]
    places += [communicator + shape.first + index * shape.stride for index in range(counted[0])]
    parts = decoder.reader.read_many([(place, shape.stride) for place in places])
    words = [struct.unpack(f"<{len(part) // 4}i", part[: len(part) // 4 * 4]) for part in parts if part is not None]
    if len(words) != len(places):
        return []
    for offset in range(shape.stride // 4):
        descriptors = [word[offset] for word in words]
        if len(set(descriptors)) == len(descriptors) and all(fd > LAST_STANDARD and fd in sockets for fd in descriptors):
            return descriptors
    return []


def _shape(layout: Layout) -> _Shape | None:
    paths = ("socks", "ctrlSock", "nSocks")
    if not all(layout.has(f"ncclNetSocketComm.{path}") for path in paths):
        return None
    data, control, count = (layout.member(f"ncclNetSocketComm.{path}") for path in paths)
    return _Shape(control.offset, data.offset, data.stride, count.offset, data.count)
