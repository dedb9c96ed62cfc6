"""A connection to NATS for code that is not asynchronous: the client has a thread of its own, calls wait with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as WaitTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

from ncclwatch.errors import NcclwatchError
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.messaging.nats_client import BusClient

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext

CONNECT_S = 10.0
"""For how long the first connection is tried before the command gives up."""
RECONNECT_S = 0.2
"""Between two tries to connect again: a takeover must not wait for it."""
PING_S = 2
"""Between two pings of the client, of which two may be missed."""
REQUEST_S = 2.0
"""For how long one request to JetStream may take."""

T = TypeVar("T")


class UnreachableError(NcclwatchError):
    """The server did not answer in time: nobody knows whether it did what was asked."""


class Connection:
    """One connection, made again by the client whenever it breaks. ``take_news`` says what happened to it."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._news: deque[str] = deque(maxlen=100)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ncclwatch-nats", daemon=True)
        self._spawned: set[Coroutine[Any, Any, Any]] = set()
        self._client: Client | None = None
        self._jetstream: JetStreamContext | None = None
        self._renewed = asyncio.Event()

    def __enter__(self) -> Connection:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Connect; raises :class:`NcclwatchError` when no server can be reached."""
        self._thread.start()
        try:
            self._client = self.call(self._connect(), CONNECT_S)
        except Exception as error:
            self.close()
            why = str(error) or type(error).__name__
            raise NcclwatchError(
                f"no NATS server can be used at {self.address}: {why}", "start one with JetStream, or see docs/fleet.md"
            ) from error
        self._jetstream = self._client.jetstream(timeout=REQUEST_S)

    async def _connect(self) -> Client:
        async def broke() -> None:
            self._news.append("the connection to NATS broke: it is made again")

        async def again() -> None:
            self._news.append("connected to NATS again")
            self._renewed.set()
            self._renewed = asyncio.Event()

        async def failed(error: Exception) -> None:
            self._news.append(f"NATS: {error}")

        client = BusClient(self._access)
        # nats-py sleeps for any part of a second, and says that it wants whole ones.
        again_s: Any = RECONNECT_S
        async with asyncio.timeout(CONNECT_S):
            await client.connect(
                self.address,
                name="ncclwatch fleet",
                max_reconnect_attempts=-1,
                reconnect_time_wait=again_s,
                ping_interval=PING_S,
                disconnected_cb=broke,
                reconnected_cb=again,
                error_cb=failed,
                inbox_prefix=self._access.inbox,
                **client.secrets(),
            )
        return client

    async def _end(self, client: Client) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and task.get_coro() in self._spawned]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await client.close()

    @property
    def client(self) -> Client:
        """The client, for code that runs in the connection's thread."""
        if self._client is None:
            raise RuntimeError("not connected")
        return self._client

    @property
    def jetstream(self) -> JetStreamContext:
        """JetStream, for code that runs in the connection's thread."""
        if self._jetstream is None:
            raise RuntimeError("not connected")
        return self._jetstream

    @property
    def address(self) -> str:
        """Where it is connected to."""
        return self._access.address

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._client is not None and bool(self._client.is_connected)

    @property
    def renewals(self) -> int:
        """How often the connection was made again so far."""
        return int(self.client.stats["reconnects"])

    async def renewed(self) -> None:
        """Wait until the connection is made again the next time."""
        await self._renewed.wait()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 2 * REQUEST_S) -> T:
        """Run a coroutine in the connection's thread and wait for it; raises :class:`UnreachableError` when it takes too long."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s + REQUEST_S)
        except (WaitTimeoutError, TimeoutError) as error:
            future.cancel()
            raise UnreachableError("NATS did not answer in time") from error

    def spawn(self, work: Coroutine[Any, Any, Any]) -> Callable[[], object]:
        """Let a coroutine run in the connection's thread until it ends or what is returned is called."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._spawned.add(work)
        return future.cancel

    def take_news(self) -> list[str]:
        """What happened to the connection since the last time, each line once."""
        found: dict[str, None] = {}
        with contextlib.suppress(IndexError):
            while True:
                found[self._news.popleft()] = None
        return list(found)

    def close(self) -> None:
        """Let go."""
        if self._client is not None:
            with contextlib.suppress(Exception):
                self.call(self._end(self._client), REQUEST_S)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(REQUEST_S)
