"""What ZeroMQ says of a connection, read without ``zmq.utils.monitor``: that loads asyncio and TLS, which nobody uses here."""

from __future__ import annotations

import struct

import zmq

_EVENT = struct.Struct("=hi")


def next_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """(event, value) of the next message of a monitoring socket (zmq_socket_monitor(3)); waits for it."""
    frames = monitor.recv_multipart()
    event, value = _EVENT.unpack(frames[0])
    return event, value
