"""What shows a live session, and the loop that tells it of every step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ncclwatch.cli.live import Session, Steps
    from ncclwatch.cli.metrics import MetricsServer
    from ncclwatch.engine.session import Update
    from ncclwatch.fleet.hearing import WorkerState


class Surface(Protocol):
    """Where a live session is shown."""

    def attached(self, session: Session) -> None:
        """Every process was read once and the probes are in place."""

    def update(self, session: Session, update: Update) -> None:
        """One step of the session."""

    def end(self, session: Session, reason: str) -> None:
        """The session is over."""


def watch(session: Steps, surface: Surface, duration: float | None, also: Sequence[Surface] = ()) -> None:
    """Run a started session to its end; ``also`` are told everything before ``surface`` is."""
    until = None if duration is None else time.monotonic() + duration
    for each in (*also, surface):
        each.attached(session)
    reason = ""
    try:
        while not reason:
            update = session.step(until=until)
            for each in (*also, surface):
                each.update(session, update)
            reason = update.finished
    except Exception as error:
        reason = f"ended by an error ({type(error).__name__})"
        raise
    finally:
        surface.end(session, reason)


@contextmanager
def serving(address: str | None) -> Iterator[Sequence[MetricsServer]]:
    """The surfaces besides the one that is looked at: metrics where they were asked for."""
    if address is None:
        yield ()
        return
    from ncclwatch.cli.metrics import MetricsServer

    with MetricsServer(address) as server:
        yield (server,)


@contextmanager
def serving_worker(address: str | None, told: Sequence[WorkerState]) -> Iterator[None]:
    """Serve the metrics of a hearing worker where they were asked for; ``told`` holds how it stands now."""
    if address is None:
        yield
        return
    from ncclwatch.cli.metrics import Endpoint
    from ncclwatch.report.hearing_metrics import hearing_metrics

    with Endpoint(address, lambda: hearing_metrics(told[0]), "how much is heard of how many nodes and jobs"):
        yield
