"""A TCP relay between a client and a server that the test can hold, so that probes are in place before the client goes on."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable


class Gate:
    """Relays one connection from ``port`` to ``target``; ``before_forward`` runs before every chunk that is passed on.

    Programs of perftest open their device, connect, make their queues, exchange addresses, and only then post: a chunk that is
    held back holds the program at a known point. An exception in ``before_forward`` ends the relay and is raised by
    :meth:`close`.
    """

    def __init__(self, port: int, target: tuple[str, int], before_forward: Callable[[], None]) -> None:
        self._listener = socket.create_server(("", port))
        self._target = target
        self._before_forward = before_forward
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        try:
            with client, socket.create_connection(self._target, timeout=30) as server:
                self._relay(client, server)
        except Exception as error:  # whatever a test's callback raises belongs to the test
            self._error = error

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        self._before_forward()
        selector = selectors.DefaultSelector()
        for one, other in ((client, server), (server, client)):
            selector.register(one, selectors.EVENT_READ, other)
        while selector.get_map():
            for key, _ in selector.select(timeout=60):
                source, sink = key.fileobj, key.data
                assert isinstance(source, socket.socket)
                data = source.recv(1 << 16)
                self._before_forward()
                if data:
                    sink.sendall(data)
                else:
                    selector.unregister(source)
                    sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Stop; raises what went wrong inside."""
        # A thread that waits in accept() is woken by shutdown, not by close.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=10)
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
