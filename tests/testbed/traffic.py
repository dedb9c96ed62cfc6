"""Traffic of somebody else: ``python traffic.py sink ADDRESS PORT`` and ``python traffic.py source ADDRESS PORT FLOWS RATE``.

The source sends over FLOWS TCP connections as fast as the network takes it, or RATE bytes a second each where RATE is not 0.
The sink prints ``ready`` when it listens.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys

SO_MAX_PACING_RATE = 47
CHUNK = bytes(1 << 18)
PRIORITY = -20


def sink(address: str, port: int) -> None:
    """Take whatever comes, until ended."""
    selector = selectors.DefaultSelector()
    buffer = bytearray(1 << 20)
    with socket.create_server((address, port), backlog=64) as listener:
        selector.register(listener, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket) and not key.fileobj.recv_into(buffer):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()


def source(address: str, port: int, flows: int, rate: int) -> None:
    """Send, until ended."""
    selector = selectors.DefaultSelector()
    for _ in range(flows):
        connection = socket.create_connection((address, port), timeout=30)
        if rate:
            connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_WRITE)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.send(CHUNK)


def main() -> int:
    """Run one of the two until it is ended."""
    what, address, port, *numbers = sys.argv[1:]
    with contextlib.suppress(PermissionError):  # it comes from other machines, whose processors are their own
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    try:
        if what == "sink":
            sink(address, int(port))
        else:
            source(address, int(port), *map(int, numbers))
    except (KeyboardInterrupt, ConnectionError):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
