"""The page's own webhook: a verdict that begins to stand, and its end, posted as JSON with a link to the moment on the page.

What waits, and who tries again when, is an :class:`~ncclwatch.export.exporter.Exporter`'s. Only jobs that are judged now are told
of; a page that begins anew tells what stands again, with the same ids.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

from ncclwatch.errors import UsageError
from ncclwatch.export.base import Answer, JobMetrics
from ncclwatch.export.events import Event, recovery_event, verdict_event
from ncclwatch.export.exporter import Exporter
from ncclwatch.export.outbox import Outbox
from ncclwatch.model.verdict import Verdict
from ncclwatch.text import clean

SETTLED_S = 30.0
"""A verdict that is in no view for so long is over: a job whose judge is another than before may be without one for seconds."""
TIMEOUT_S, IDLE_S = 10.0, 3600.0
MAX_STANDING = 4096
"""Bound: verdicts of which it is remembered that they were told."""
AGAIN = (408, 429)
"""Answers of 400 to 499 after which the same may be taken later."""

Document = Callable[[Verdict], dict[str, Any]]
"""A verdict as plain JSON data, its texts cleaned."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Whoever is asked to post elsewhere does not: what is told would go to somebody who was not named."""

    def redirect_request(self, *_: Any) -> None:
        return None


class WebhookReceiver:
    """Takes events, one a request. ``header``: one more (name, value), for who asks who posts."""

    def __init__(self, url: str, header: tuple[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"'{clean(url, 100)}' is no address to post to", "write it like https://chat.example/hook")
        # What comes behind the host may be a secret.
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self.left_out = 0
        self._url, self._header = url, header
        self._opener = urllib.request.build_opener(_NoRedirect)

    def send_metrics(self, jobs: Sequence[JobMetrics]) -> Answer:
        """None are sent."""
        return Answer(ok=not jobs)

    def send_events(self, events: Sequence[Event]) -> Answer:
        """Post each, up to one that is not taken."""
        for event in events:
            answer = self._post(event.body.encode())
            if not answer.ok:
                return answer
        return Answer(ok=True)

    def _post(self, body: bytes) -> Answer:
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")  # noqa: S310 - checked
        if self._header is not None:
            request.add_header(*self._header)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S):
                return Answer(ok=True)
        except urllib.error.HTTPError as error:
            return Answer(ok=False, again=error.code >= 500 or error.code in AGAIN, reason=f"HTTP {error.code}")
        except (OSError, ValueError) as error:
            return Answer(ok=False, again=True, reason=clean(str(getattr(error, "reason", error)), 100))

    def close(self) -> None:
        """Nothing is kept open."""


class _Standing:
    """A verdict that was told, and when it was seen first and last (CLOCK_MONOTONIC, seconds)."""

    __slots__ = ("begun", "document", "seen")

    def __init__(self, document: dict[str, Any], now: float) -> None:
        self.document, self.begun, self.seen = document, now, now


class Webhook:
    """Tells a receiver of what begins and ends. ``page``: the address by which browsers reach the page."""

    def __init__(self, receiver: WebhookReceiver, page: str, document: Document, *, settled_s: float = SETTLED_S) -> None:
        self.exporter = Exporter(receiver, list, outbox=Outbox(at_once=1), interval_s=IDLE_S, signals=("events",), name="webhook")
        self._page, self._document, self._settled_s = page.rstrip("/"), document, settled_s
        self._standing: dict[tuple[str, str], _Standing] = {}

    def take(self, job: str, verdicts: Sequence[Verdict]) -> None:
        """What stands in a job now. Never waits."""
        now, at_ns = time.monotonic(), time.time_ns()
        link = f"{self._page}/?{urlencode({'job': job, 't': round(at_ns / 1e9, 3)})}"
        for verdict in verdicts:
            known = self._standing.get((job, verdict.id))
            if known is not None:
                known.seen = now
            elif verdict.verdict_class.accuses and len(self._standing) < MAX_STANDING:
                document = {"event": "verdict", "page": link, **self._document(verdict)}
                self._standing[job, verdict.id] = _Standing(document, now)
                self.exporter.put(verdict_event(verdict, document, job, at_ns))
        for key, one in [*self._standing.items()]:
            if key[0] == job and now - one.seen > self._settled_s:
                del self._standing[key]
                ended = one.document | {"event": "over", "page": link}
                self.exporter.put(recovery_event(ended, one.seen - one.begun, job, at_ns))
