"""A thread that keeps one connection to a NATS server: ``nats-py`` is asyncio, and neither collector nor judge may wait for it.

Every connection is made anew, by us and with backoff: a client that connects again by itself would send what it holds without our
looking at whom it sends it to.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
import nkeys
from nats.aio.client import Client
from nats.aio.msg import Msg

from ncclwatch.messaging.bus_keys import Access
from ncclwatch.text import clean

BACKOFF_S = (0.2, 3.0)
CONNECT_S = 15.0
"""For the whole of a connection; a server answers in milliseconds."""
STEP_S = 5
PING_S = 5
PENDING_BYTES = 32 << 20
"""Of our own words that wait for the socket."""
MAX_OUT = 65536
"""Words that wait to be said; the oldest go first."""
HEARD_MESSAGES, HEARD_BYTES = 1 << 16, 128 << 20
"""What of one subscription may wait in this process."""
BROKE = "the connection to the NATS server broke"


class LostError(Exception):
    """This connection is of no use any more, and why."""


class BusClient(Client):
    """One connection; ``gone`` is set when it is."""

    def __init__(self, access: Access) -> None:
        super().__init__()
        self.gone = asyncio.Event()
        self.why = BROKE
        self.refused = ""
        """What the server last refused to let us say or hear."""
        self._access = access

    def _connect_command(self) -> bytes:
        # nats-py speaks TLS where the server says so: somebody in between could say that it does not.
        if self._access.tls and not self._server_info.get("tls_required"):
            raise nats.errors.Error("the server does not speak TLS")
        command: bytes = super()._connect_command()
        return command

    async def open(self, name: str) -> None:
        """Connect; raises ``LostError``."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await self.connect(
                    self._access.address,
                    name=name,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=STEP_S,
                    ping_interval=PING_S,
                    pending_size=PENDING_BYTES,
                    error_cb=self._failed,
                    closed_cb=self._closed,
                    inbox_prefix=self._access.inbox,
                    **self.secrets(),
                )
        except (nats.errors.Error, OSError, TimeoutError, ssl.SSLError) as error:
            raise LostError(self._words(error)) from error

    def secrets(self) -> dict[str, Any]:
        """What `connect` wants of key, JWT and TLS; raises ``LostError``."""
        options: dict[str, Any] = {}
        if self._access.tls:
            options["tls"] = self._context()
        if self._access.seed:
            seed = self._access.seed
            if self._access.jwt:
                pair = nkeys.from_seed(bytearray(seed))
                options["user_jwt_cb"] = lambda: bytearray(self._access.jwt)
                options["signature_cb"] = lambda nonce: _base64(pair.sign(nonce.encode()))
                self._auth_configured = True
            else:
                options["nkeys_seed_str"] = seed.decode("ascii")
        return options

    def _context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cadata=self._access.ca or None)
        except ssl.SSLError as error:
            raise LostError("ca.pem holds no certificate") from error

    async def _failed(self, error: Exception) -> None:
        if "permissions violation" in str(error).lower():
            self.refused = clean(str(error).removeprefix("nats: "), 200)
        elif not self.gone.is_set():
            self.why = self._words(error)

    async def _closed(self) -> None:
        self.gone.set()

    def _words(self, error: Exception) -> str:
        text = str(error).lower()
        if "authorization" in text or "authentication" in text:
            return (
                "the server does not take this key: add it with 'ncclwatch keys nats' and let the server read tenants.conf again"
            )
        if isinstance(error, ssl.SSLError):
            return (
                f"TLS failed: {clean(error.reason or str(error), 100)}; is ca.pem the one that signed the server's certificate?"
            )
        if isinstance(error, nats.errors.NoServersError | TimeoutError) or not str(error):
            return self.why if self.why != BROKE else "no NATS server answers"
        if isinstance(error, nats.errors.UnexpectedEOF):
            return BROKE
        return clean(str(error).removeprefix("nats: "), 200)


class NatsThread:
    """Runs ``session`` on one connection after another until it is stopped.

    ``session`` gets an open connection and returns, or raises ``LostError``, when it is over; ``lost`` is told, by the thread,
    why there is no connection.
    """

    def __init__(
        self, access: Access, name: str, session: Callable[[BusClient], Awaitable[None]], lost: Callable[[str], None]
    ) -> None:
        self._access, self._name, self._session, self._lost = access, name, session, lost
        self._loop = asyncio.new_event_loop()
        self._out: deque[tuple[str, bytes]] = deque(maxlen=MAX_OUT)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.stopping = threading.Event()
        self._stop = asyncio.Event()
        self.wake = asyncio.Event()
        """Set when there is something to do."""

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def stop(self, wait_s: float) -> bool:
        """End; sessions see ``stopping``. Whether the thread has ended."""
        self.stopping.set()
        self.call(self._stop.set)
        self.call(self.wake.set)
        if self._thread.is_alive():
            self._thread.join(wait_s)
        elif not self._loop.is_closed():
            self._loop.close()
        return not self._thread.is_alive()

    def call(self, function: Callable[[], object]) -> None:
        """Run something in the thread, soon."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def say(self, subject: str, data: bytes) -> None:
        """Publish from any thread, when and if there is a connection."""
        self._out.append((subject, data))
        self.call(self.wake.set)

    async def speak(self, client: BusClient) -> None:
        """Publish what waits; for a session's own loop."""
        while self._out:
            subject, data = self._out.popleft()
            if len(data) < client.max_payload:
                await client.publish(subject, data)

    async def rest(self, client: BusClient, seconds: float) -> None:
        """Wait until there is something to do, at most so long. Raises ``LostError`` when the connection is gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wake.wait()
        self.wake.clear()
        if client.gone.is_set():
            raise LostError(client.why)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._keep())
        finally:
            with contextlib.suppress(Exception):
                self._loop.run_until_complete(self._end_tasks())
            self._loop.close()

    async def _end_tasks(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _opened(self, client: BusClient) -> bool:
        """Whether there is a connection; not when it was stopped meanwhile."""
        opening, stop = asyncio.ensure_future(client.open(self._name)), asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((opening, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not opening.done():
            opening.cancel()
            return False
        opening.result()
        return True

    async def _keep(self) -> None:
        pause = BACKOFF_S[0]
        while not self.stopping.is_set():
            client = BusClient(self._access)
            try:
                if not await self._opened(client):
                    return
                pause = BACKOFF_S[0]
                await self._session(client)
            except LostError as error:
                self._lost(str(error))
            except (nats.errors.Error, OSError, TimeoutError) as error:
                self._lost(clean(str(error).removeprefix("nats: ") or BROKE, 200))
            finally:
                with contextlib.suppress(Exception):
                    await client.close()
            if self.stopping.is_set():
                return
            self._out.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause * random.uniform(0.7, 1.3)):  # noqa: S311 - that not all come at once
                    await self._stop.wait()
            pause = min(pause * 2, BACKOFF_S[1])


async def listen(client: BusClient, subject: str, take: Callable[[Msg], Awaitable[None]], queue: str = "") -> None:
    """Subscribe within our bounds."""
    await client.subscribe(subject, queue=queue, cb=take, pending_msgs_limit=HEARD_MESSAGES, pending_bytes_limit=HEARD_BYTES)


def status_of(message: Msg) -> str:
    """The server's own word about a message that is none: ``503`` where nobody listens; else empty."""
    headers = message.headers
    return str(headers.get("Status", "")) if headers else ""


def _base64(data: bytes) -> bytes:
    import base64

    return base64.b64encode(data)
