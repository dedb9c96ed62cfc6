"""Which jobs a fleet judges now, for those who look: asked once, or by a thread that tells of each job once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from ncclwatch.errors import NcclwatchError
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.lease import held
from ncclwatch.fleet.verdict_log import VerdictLog
from ncclwatch.stopping import Stop

EVERY_S = 2.0
"""Between two looks."""
MAX_JOBS = 1024
"""Bound: jobs that are told."""
_JUDGED = "judge."


@dataclass(frozen=True, slots=True)
class Judged:
    """A job that a judge holds, and what its log says: ``verdict`` is what stands (JSON), ``None`` where nobody is accused."""

    job: str
    told_s: float
    """When the log was last written to, seconds since the epoch; 0 for never."""
    verdict: dict[str, Any] | None


def judged(connection: Connection) -> list[Judged]:
    """All jobs that are judged now, by name. The connection is open. Raises ``NcclwatchError``."""

    async def ask() -> list[Judged]:
        keys = await held(connection.jetstream)
        names = sorted(key.removeprefix(_JUDGED) for key in keys if key.startswith(_JUDGED))[:MAX_JOBS]
        return [await _told(connection, name) for name in names]

    try:
        return connection.call(ask(), 30.0)
    except NotFoundError:
        return []


async def _told(connection: Connection, job: str) -> Judged:
    _, record = await VerdictLog(connection.jetstream, job, "").last()
    if record is None:
        return Judged(job, 0.0, None)
    return Judged(job, record.at_ns / 1e9, record.verdict if record.state.is_open else None)


def follow(connection: Connection, found: Callable[[str], None], stop: Stop) -> None:
    """Call ``found`` in a thread for every job that a judge holds, once, until ``stop`` is set; the connection is opened here.

    A server that is away is asked again. Raises ``NcclwatchError`` where none can be reached at the start.
    """
    connection.open()

    def look() -> None:
        told: set[str] = set()
        try:
            while not stop.is_set():
                time.sleep(EVERY_S)
                try:
                    keys = connection.call(held(connection.jetstream))
                except (NatsError, NcclwatchError, TimeoutError, OSError):
                    continue
                jobs = {key.removeprefix(_JUDGED) for key in keys if key.startswith(_JUDGED)}
                for job in sorted(jobs - told)[: MAX_JOBS - len(told)]:
                    told.add(job)
                    found(job)
        finally:
            connection.close()

    threading.Thread(target=look, name="jobs of the fleet", daemon=True).start()
