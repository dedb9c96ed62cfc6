"""The server under the page: uvicorn in a thread of its own, on a socket that is bound before anything else begins."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from ncclwatch.errors import NcclwatchError, UsageError
from ncclwatch.serve.access import Rules
from ncclwatch.serve.application import application
from ncclwatch.serve.board import MAX_READERS, Board
from ncclwatch.serve.feed import Feed
from ncclwatch.text import clean

if TYPE_CHECKING:
    from ncclwatch.serve.remembered import Remembered

MAX_CONNECTIONS = 2 * MAX_READERS
MAX_HEADER = 16384
"""Bytes of a request's head."""
END_S = 3.0
"""Connections are given so long when the server ends."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files of a TLS certificate (with its chain) and its key, in PEM."""

    chain: Path
    key: Path

    def check(self) -> None:
        """Raise ``UsageError`` unless both can be used."""
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.chain, self.key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"TLS cannot be served with {self.chain} and {self.key}: {error.strerror or error}",
                "give a certificate and its key, both in PEM",
            ) from error


def bind(address: str, port: int) -> socket.socket:
    """A bound socket; raises ``UsageError``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((address, port))
    except OSError as error:
        found.close()
        raise UsageError(
            f"the page cannot be served on {clean(address, 60)}:{port}: {error.strerror or error}", "choose another with --bind"
        ) from error
    return found


@contextlib.contextmanager
def serving(
    feeds: Sequence[Feed],
    rules: Rules,
    listener: socket.socket,
    certificate: Certificate | None = None,
    begun: Callable[[Board], None] = lambda _board: None,
    remembered: Remembered | None = None,
) -> Iterator[threading.Thread]:
    """Serve while the context lasts; gives the thread that does. Raises ``NcclwatchError`` when it cannot begin.

    ``begun`` is given the board, to add jobs that are found later; ``remembered`` is the history that the page shows.
    """
    boards: list[Board] = []
    config = uvicorn.Config(
        application(feeds, rules, boards.append, remembered), http="h11", ws="none", lifespan="on", log_level="warning",
        access_log=False,
        # Who asks is who is connected: what a header says of that is believed nowhere.
        proxy_headers=False, server_header=False, limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=15,
        timeout_graceful_shutdown=int(END_S), h11_max_incomplete_event_size=MAX_HEADER,
        ssl_certfile=certificate.chain if certificate else None, ssl_keyfile=certificate.key if certificate else None,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="page", daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise NcclwatchError("the page's server did not begin", "run with NCCLWATCH_DEBUG=1 and report it")
        time.sleep(0.02)
    try:
        begun(boards[0])
        yield thread
    finally:
        server.should_exit = True
        for board in boards:
            board.end_streams()
        thread.join(END_S + 15.0)
        listener.close()
