"""``--otlp``: metrics and verdicts of a live session to an OpenTelemetry receiver (docs/export.md)."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from ncclwatch.cli.output import note, plain

if TYPE_CHECKING:
    from ncclwatch.cli.live import Session
    from ncclwatch.engine.session import Update
    from ncclwatch.export.base import JobMetrics, Sends
    from ncclwatch.view.builder import Told

OtlpOption = Annotated[
    str | None,
    typer.Option(
        "--otlp", metavar="URL", help="Send metrics and verdicts to an OpenTelemetry receiver (OTLP over HTTP: http://HOST:4318)."
    ),
]


class OtlpSurface:
    """A surface that hands on what one session, or several jobs, have to tell."""

    def __init__(self, receiver: Sends) -> None:
        from ncclwatch.export.exporter import Exporter
        from ncclwatch.report.metrics import WatchedJobs

        self._jobs = WatchedJobs()
        self.exporter = Exporter(receiver, self.metrics)

    def attached(self, session: Session) -> None:
        """The first view."""
        self._jobs.of("").begin(session)

    def update(self, session: Session, update: Update) -> None:
        """One step of a session without other jobs beside it."""
        self.take(session, update)

    def take(self, session: Told, update: Update, job: str = "") -> None:
        """The same of one job of several."""
        from ncclwatch.export.events import recovery_event, verdict_event

        self._jobs.of(job).update(session, update)
        now = time.time_ns()
        for verdict in update.told:
            self.exporter.put(verdict_event(verdict, plain(verdict.to_json()), job, now))
        for recovery in update.recoveries:
            document = plain(recovery.verdict.to_json())
            self.exporter.put(recovery_event(document, recovery.duration_s, job, now))
        update.notes += self.exporter.lines()

    def end(self, session: Session, reason: str) -> None:
        """Nothing is to be done: :func:`exporting` ends it."""

    def metrics(self) -> list[JobMetrics]:
        """What is known of every job; called on the exporter's thread."""
        from ncclwatch.export.base import JobMetrics
        from ncclwatch.report.metrics import families

        found = []
        for job, watched in self._jobs.current():
            view = watched.view
            at_ns = time.time_ns() if view is None else int(view.frame.time * 1e9)
            found.append(JobMetrics(job, at_ns, list(families(view, watched.counts))))
        return found


@contextmanager
def exporting(url: str | None) -> Iterator[Sequence[OtlpSurface]]:
    """The surface that sends to ``url``, if one was asked for; at the end what waits is sent, as far as it is taken."""
    if url is None:
        yield ()
        return
    from ncclwatch.export.receiver import Receiver

    receiver = Receiver(url)
    if in_the_clear(receiver.url):
        note(f"host names, pids and verdicts go to {receiver.url} in the clear: use https beyond networks of your own")
    surface = OtlpSurface(receiver)
    try:
        yield (surface,)
    finally:
        surface.exporter.close()
        for line in surface.exporter.lines():
            note(line)


def in_the_clear(url: str) -> bool:
    """Whether what is sent leaves this machine unencrypted."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return parts.scheme == "http" and not local
