"""Which jobs a fleet judges now, for those who look: a thread asks the bucket of leases, and tells of each job once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nats.errors import Error as NatsError

from ncclwatch.errors import NcclwatchError
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.lease import held
from ncclwatch.stopping import Stop

EVERY_S = 2.0
"""Between two looks."""
MAX_JOBS = 1024
"""Bound: jobs that are told."""
_JUDGED = "judge."


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
