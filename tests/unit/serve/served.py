"""A page with jobs that a test pushes views to, on a real server, asked over real HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ncclwatch.serve.access import Rules
from ncclwatch.serve.feed import LIVE, Feed
from ncclwatch.serve.remembered import Remembered
from ncclwatch.serve.server import Certificate, bind, serving
from ncclwatch.serve.snapshot import Composer
from ncclwatch.view.frame import View


class PushedFeed(Feed):
    """A job whose views come from a test."""

    kind = "live"

    def __init__(self, job: str, *views: View) -> None:
        super().__init__(job, "pushed by a test")
        self._composer = Composer(job)
        self._first = views

    def _run(self) -> None:
        for view in self._first:
            self.push(view)
        self._stop.wait()

    def push(self, view: View) -> None:
        self._composer.take(view)
        self._show(self._composer.compose(view), view)
        self._say(LIVE)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = b""
    cookies: list[str] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Served:
    """Where the page is."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, *, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        """One request, with the headers that are given (``_`` for ``-``) and no others."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.putrequest(method, path, skip_host="host" in {name.lower() for name in given}, skip_accept_encoding=True)
            for name, value in given.items():
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body.encode() if body is not None else None)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read(), answer.headers.get_all("set-cookie") or [])
        finally:
            connection.close()


@contextmanager
def served(
    feeds: Sequence[Feed], rules: Rules | None = None, certificate: Certificate | None = None, past: Remembered | None = None
) -> Iterator[Served]:
    """Serve jobs on a free port of loopback."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with serving(feeds, rules or Rules(), listener, certificate, remembered=past):
        yield Served(port)
