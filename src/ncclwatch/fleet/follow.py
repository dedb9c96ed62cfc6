"""Follows a stream from a place on, each message once and in order, whatever happens to the connection or the server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from nats.errors import Error as NatsError
from nats.js import api
from nats.js.errors import NotFoundError

from ncclwatch.fleet.connection import Connection

if TYPE_CHECKING:
    from nats.aio.msg import Msg

FETCH = 256
"""Messages asked for at a time."""
WAIT_S = 2.0
"""For how long the server may have nothing before it is asked whether it still knows us."""
AGAIN_S = 0.2
FORGET_S = 30.0
"""After so long without a word from us the server forgets us."""
MAX_WAITING = 4096
MAX_WAITING_BYTES = 64 << 20
"""What may wait here for whoever takes it; the rest waits in the stream."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a stream. ``time_ns`` is when the server stored it (its CLOCK_REALTIME), ``pending`` how many more there
    were then.
    """

    subject: str
    sequence: int
    time_ns: int
    data: bytes
    pending: int
    headers: dict[str, str] = field(default_factory=dict)


class Follower:
    """Messages of ``subject``; ``bell`` is set when there are some. Begins at a sequence number, or ``back_s`` seconds ago."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        subject: str,
        bell: threading.Event,
        *,
        sequence: int = 0,
        back_s: float | None = None,
        max_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._connection, self._stream, self._subject, self._bell = connection, stream, subject, bell
        self._next = sequence
        self._from = None if back_s is None else time.time() - back_s
        self._found: deque[Message] = deque()
        self._nbytes, self._max_bytes = 0, max_bytes
        self.caught_up = False
        """Whether everything that was in the stream has been handed on once."""
        self._current_as_of = -1
        self._stop = connection.spawn(self._run())

    @property
    def next(self) -> int:
        """The sequence number that what is taken next has at least."""
        return self._found[0].sequence if self._found else self._next

    @property
    def current(self) -> bool:
        """Whether everything that was in the stream has come since the connection was made last."""
        return self._current_as_of == self._connection.renewals

    @property
    def waiting(self) -> int:
        """Messages that were read and not taken, and those that the stream held behind the newest of them."""
        found = len(self._found)
        return found + self._found[-1].pending if found else 0

    @property
    def oldest_ns(self) -> int | None:
        """When the oldest of these was stored (CLOCK_REALTIME of the server)."""
        return self._found[0].time_ns if self._found else None

    def take(self, limit: int) -> list[Message]:
        """Messages that have come, at most so many."""
        found: list[Message] = []
        while self._found and len(found) < limit:
            found.append(self._found.popleft())
        self._nbytes -= sum(len(message.data) for message in found)
        return found

    def __len__(self) -> int:
        return len(self._found)

    def close(self) -> None:
        """Follow no longer."""
        self._stop()

    def _config(self) -> api.ConsumerConfig:
        config = api.ConsumerConfig(ack_policy=api.AckPolicy.NONE, inactive_threshold=FORGET_S, mem_storage=True)
        if self._from is not None:
            config.deliver_policy = api.DeliverPolicy.BY_START_TIME
            config.opt_start_time = datetime.fromtimestamp(self._from, UTC)
        elif self._next > 0:
            config.deliver_policy, config.opt_start_seq = api.DeliverPolicy.BY_START_SEQUENCE, self._next
        else:
            config.deliver_policy = api.DeliverPolicy.ALL
        return config

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except (NatsError, TimeoutError, OSError):
                await asyncio.sleep(AGAIN_S)

    async def _follow(self) -> None:
        renewals = self._connection.renewals
        last = (await self._connection.jetstream.stream_info(self._stream)).state.last_seq
        # What it holds behind its end will be new, whatever its numbers.
        self._next = min(self._next, last + 1)
        subscription = await self._connection.jetstream.pull_subscribe(self._subject, stream=self._stream, config=self._config())
        expected = 1
        try:
            self._note_end((await subscription.consumer_info()).num_pending, renewals)
            while self._connection.renewals == renewals:
                if len(self._found) >= MAX_WAITING or self._nbytes > self._max_bytes:
                    await asyncio.sleep(AGAIN_S / 10)
                    continue
                try:
                    messages = await self._fetch(subscription)
                except TimeoutError:
                    # Nothing came: because there is nothing, or because a server that began anew does not know us.
                    self._note_end((await subscription.consumer_info()).num_pending, renewals)
                    continue
                for message in messages:
                    if message.metadata.sequence.consumer != expected:
                        # Some were lost under way.
                        return
                    expected += 1
                    self._add(message)
                    self._note_end(message.metadata.num_pending, renewals)
                self._bell.set()
        finally:
            await self._leave(subscription)

    async def _fetch(self, subscription: Any) -> list[Msg]:
        """Messages; none when the connection was made again meanwhile. All who follow begin again at once then: one that waited
        for the end of its request would hear its part of a job seconds later than others theirs.
        """
        fetching = asyncio.ensure_future(subscription.fetch(FETCH, timeout=WAIT_S))
        renewed = asyncio.ensure_future(self._connection.renewed())
        try:
            await asyncio.wait((fetching, renewed), return_when=asyncio.FIRST_COMPLETED)
            return await fetching if fetching.done() else []
        finally:
            renewed.cancel()
            if not fetching.cancel() and not fetching.cancelled():
                # Whoever cancels us does not ask what came of it.
                fetching.exception()

    def _note_end(self, pending: int | None, renewals: int) -> None:
        if pending == 0:
            self.caught_up, self._current_as_of = True, renewals
            self._bell.set()

    async def _leave(self, subscription: Any) -> None:
        try:
            async with asyncio.timeout(1.0):
                info = await subscription.consumer_info()
                await subscription.unsubscribe()
                await self._connection.jetstream.delete_consumer(self._stream, info.name)
        except (NatsError, TimeoutError, NotFoundError, OSError, ValueError):
            return

    def _add(self, message: Msg) -> None:
        about = message.metadata
        stored = about.timestamp
        self._found.append(
            Message(
                message.subject, about.sequence.stream, int(stored.timestamp() * 1e9), message.data, about.num_pending,
                message.headers or {},
            )
        )  # fmt: skip
        self._nbytes += len(message.data)
        self._next, self._from = about.sequence.stream + 1, None
