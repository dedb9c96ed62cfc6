"""``--metrics``: an HTTP endpoint for Prometheus, on the loopback interface unless told otherwise."""

from __future__ import annotations

import ipaddress
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self

from ncclwatch.cli.output import note
from ncclwatch.errors import UsageError
from ncclwatch.report.exposition import CONTENT_TYPE
from ncclwatch.report.metrics import WatchedJobs, metrics
from ncclwatch.text import clean

if TYPE_CHECKING:
    from ncclwatch.cli.live import Session
    from ncclwatch.engine.session import Update
    from ncclwatch.view.builder import Told

MAX_SCRAPES = 4
"""Scrapes answered at a time; further ones are told to come again."""
SCRAPE_S = 10.0

_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<four>[0-9.]*|localhost)):(?P<port>\d{1,5})")


def parse_address(text: str, what: str = "metrics", *, any_port: bool = False) -> tuple[str, int]:
    """``:9464``, ``10.0.0.1:9464`` or ``[::1]:9464`` as (address, port); without an address the loopback interface. With
    ``any_port`` 0 is one: the kernel chooses.
    """
    found = _ADDRESS.fullmatch(text.strip())
    address, port = (found["six"] or found["four"], int(found["port"])) if found else ("", 0)
    if address in ("", "localhost"):
        address = "127.0.0.1"
    try:
        ipaddress.ip_address(address)
    except ValueError:
        found = None
    if found is None or not (0 if any_port else 1) <= port < 65536:
        raise UsageError(f"'{clean(text, 60)}' is no address to serve {what} on", "write :9464, or 10.0.0.1:9464")
    return address, port


class Endpoint:
    """Answers scrapes, from threads of its own, with what ``page`` gives. ``what`` that tells of. A context manager."""

    def __init__(self, text: str, page: Callable[[], str], what: str) -> None:
        self.address, self.port = parse_address(text)
        self._page = page
        self._slots = threading.BoundedSemaphore(MAX_SCRAPES)
        kind = type(
            "Server", (ThreadingHTTPServer,), {"address_family": 10 if ":" in self.address else 2, "daemon_threads": True}
        )
        try:
            self._server = kind((self.address, self.port), self._handler())
        except OSError as error:
            raise UsageError(
                f"metrics cannot be served on {clean(text, 60)}: {error.strerror or error}", "choose another port or address"
            ) from error
        if not ipaddress.ip_address(self.address).is_loopback:
            note(f"metrics on {self.address}:{self.port} can be read by everybody who reaches it: {what}")
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def page(self) -> bytes:
        """What a scrape is answered with."""
        return self._page().encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = SCRAPE_S
            server_version = "ncclwatch"
            sys_version = ""

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "the metrics are at /metrics")
                    return
                if not outer._slots.acquire(blocking=False):
                    self.send_error(503, "busy with other scrapes")
                    return
                try:
                    page = outer.page()
                    self.send_response(200)
                    self.send_header("Content-Type", CONTENT_TYPE)
                    self.send_header("Content-Length", str(len(page)))
                    self.end_headers()
                    self.wfile.write(page)
                finally:
                    outer._slots.release()

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are no news."""

        return Handler


class MetricsServer(Endpoint):
    """A surface that keeps the newest view of a session, or of several jobs, and answers scrapes with it."""

    def __init__(self, text: str) -> None:
        self._jobs = WatchedJobs()
        super().__init__(text, lambda: metrics(self._jobs.current()), "host names, pids, verdicts")

    def attached(self, session: Session) -> None:
        """The first view."""
        self._jobs.of("").begin(session)

    def update(self, session: Session, update: Update) -> None:
        """Keep the newest view, and count."""
        self.take(session, update)

    def take(self, session: Told, update: Update, job: str = "") -> None:
        """The same of one job of several."""
        self._jobs.of(job).update(session, update)

    def end(self, session: Session, reason: str) -> None:
        """What was last seen is told until the program ends."""
