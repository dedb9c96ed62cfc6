"""A port of loopback inside a namespace that leads to one outside.

What is not encrypted never leaves loopback, so a server without
keys can be reached from a host of ``netns.py`` this way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNET = 0x40000000


def listen_in(network: str, port: int) -> socket.socket:
    """A socket that listens on loopback of a network namespace (a path such as ``/proc/PID/ns/net``)."""
    made: list[socket.socket | OSError] = []

    def inside() -> None:
        # A thread has a namespace of its own; it keeps it until it ends, which is at once.
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(network).open("rb") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                made.append(OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))
                return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        made.append(listener)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    [found] = made
    if isinstance(found, OSError):
        raise found
    return found


@contextlib.contextmanager
def door(network: str, port: int, to: int) -> Iterator[None]:
    """Connections to ``port`` inside go to loopback's port ``to`` outside, for the length of a block."""
    listener = listen_in(network, port)

    def accept() -> None:
        while True:
            try:
                inner, _ = listener.accept()
            except OSError:
                return
            try:
                outer = socket.create_connection(("127.0.0.1", to), timeout=10)
            except OSError:
                inner.close()
                continue
            outer.settimeout(None)
            for source, target in ((inner, outer), (outer, inner)):
                threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        # Closing alone does not wake who accepts.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
