"""A viewer's side of NATS: it says that it wants to see a job, and hears what the job's engine shows."""

from __future__ import annotations

import queue
import secrets
import time

from nats.aio.msg import Msg

from ncclwatch.messaging import subjects
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.messaging.keys import job_of
from ncclwatch.messaging.nats_client import BusClient, NatsThread, listen
from ncclwatch.messaging.transport import EngineUnreachableError

WATCH_EVERY_S = 2.0
MAX_VIEWS = 64
"""Views that wait to be shown; more are dropped, and the next that stands by itself is waited for."""


class NatsViewer:
    """Hears one job of whoever judges it: that of a token, or ``job`` as a fleet calls it."""

    def __init__(self, access: Access, *, token: str = "", job: str = "") -> None:
        self.address = access.address
        self.heard = 0.0
        self._job = job or job_of(token)
        self._id = secrets.token_hex(8).encode()
        self._views: queue.Queue[bytes] = queue.Queue(MAX_VIEWS)
        self._news: list[str] = []
        self._welcomed = False
        self._refused = ""
        self._bus = NatsThread(access, "ncclwatch viewer", self._session, self._lose)
        self._bus.start()

    @property
    def welcomed(self) -> bool:
        """Whether the server takes us; whether an engine is there, a view tells."""
        return self._welcomed

    def take_news(self) -> list[str]:
        """What is to be said since the last time."""
        found, self._news = self._news, []
        return found

    def hear(self, timeout_s: float) -> bytes | None:
        """The next view, waiting at most so long. Raises ``EngineUnreachableError`` when the server refuses us."""
        if self._refused:
            raise EngineUnreachableError(
                f"the NATS server at {self.address} refuses: {self._refused}", "ask who made this key for one"
            )
        try:
            return self._views.get(timeout=max(0.001, timeout_s))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Leave."""
        self._bus.stop(5.0)

    def _lose(self, reason: str) -> None:
        if self._welcomed or not self._news:
            self._news.append(f"NATS server {self.address}: {reason}")
        self._welcomed = False

    async def _session(self, client: BusClient) -> None:
        await listen(client, subjects.view(self._job), self._saw)
        await client.flush()
        self._welcomed, self.heard = True, time.monotonic()
        while not self._bus.stopping.is_set():
            self._refused = client.refused
            await client.publish(subjects.watch(self._job), self._id)
            await self._bus.rest(client, WATCH_EVERY_S)

    async def _saw(self, message: Msg) -> None:
        self.heard = time.monotonic()
        if not self._views.full():
            self._views.put_nowait(message.data)
