"""A hearing worker: the nodes that are its share, heard from the stream of batches and sent on to the judges of their jobs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError
from nats.js.kv import KeyValue

from ncclwatch.collect.look_times import next_time
from ncclwatch.errors import NcclwatchError
from ncclwatch.fleet import directory, reduced, streams
from ncclwatch.fleet.connection import Connection, UnreachableError
from ncclwatch.fleet.follow import Follower, Message
from ncclwatch.fleet.hearing import Hearing, WorkerState
from ncclwatch.fleet.lease import TTL_S
from ncclwatch.fleet.share import Share
from ncclwatch.messaging import subjects
from ncclwatch.messaging.bus_batch import marks
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.lines import Lines
from ncclwatch.messaging.protocol import NeedKey, Ping, Pong
from ncclwatch.messaging.protocol import decode as decode_word
from ncclwatch.messaging.protocol import encode as encode_word

if TYPE_CHECKING:
    from nats.aio.msg import Msg

PHASE = 0.2
"""Sent on is this part of an interval after the agents' looks: what they saw has arrived, and judges come a little later."""
MAX_BACKLOG = 200_000
"""Batches from before this worker's time that are heard at most, of nodes that nobody heard meanwhile."""
MAX_WAITING_BYTES = 8 << 20
"""Batches of one part that were read and are not yet heard."""
PER_STEP = 128
"""Batches of one part that are heard before those of another."""
PER_CALL = 512
"""Messages that are on their way to the server at once."""
RETRY_S = 0.2
SHARE_OF_PAYLOAD = 0.9
"""Of what the server takes in one message: headers need the rest."""
SWEEP_S = 60.0
UNMAPPED = "unmapped"
"""The part of all nodes whose batches the account does not map to one: one worker hears all of them."""
PIECES = (*(str(number) for number in range(subjects.PARTITIONS)), UNMAPPED)


@dataclass(slots=True)
class _Part:
    """A part of the nodes that is heard here. ``upto``: its last message that was heard; ``written``: what the bucket has."""

    follower: Follower
    upto: int
    written: int


class Worker:
    """One worker. ``step`` hears for a moment, and sends on what is due."""

    def __init__(self, connection: Connection, *, interval_s: float = 1.0, ttl_s: float = TTL_S) -> None:
        self.name = secrets.token_hex(6)
        self.interval_s = interval_s
        self.lines = Lines()
        self._connection = connection
        connection.call(streams.ensure(connection.jetstream, subjects.BATCHES, subjects.REDUCED, streams.JOBS), 30.0)
        self._positions: KeyValue = connection.call(streams.heard_bucket(connection.jetstream))
        self.hearing = Hearing(int(connection.client.max_payload * SHARE_OF_PAYLOAD), interval_s)
        self._bell = threading.Event()
        self._claims = Follower(connection, streams.JOBS, streams.ALL_CLAIMS, self._bell)
        self._heard: dict[str, _Part] = {}
        self._unsent: deque[tuple[str, bytes, str]] = deque()
        self._numbered = 0
        self._keys_wanted: deque[str] = deque(maxlen=1000)
        self._next_flush = self._next_sweep = 0.0
        self.share = Share(connection, "hear", self.name, ttl_s=ttl_s)
        self.share.wanted = PIECES
        connection.call(self._listen())

    async def _listen(self) -> None:
        client = self._connection.client

        async def needed(message: Msg) -> None:
            self._keys_wanted.append(message.data.decode("ascii", "replace")[:64])

        async def pinged(message: Msg) -> None:
            received = time.time_ns()
            if not subjects.is_inbox(message.reply or ""):
                return
            with contextlib.suppress(FormatError):
                said = decode_word(message.data)
                if isinstance(said, Ping):
                    await client.publish(message.reply, encode_word(Pong(said.sent_ns, received, time.time_ns())))

        await client.subscribe(streams.need(self.name), cb=needed)
        await client.subscribe(subjects.ALL_PINGS, queue="ncclwatch", cb=pinged)

    @property
    def parts(self) -> list[str]:
        """What it hears now."""
        return sorted(self._heard)

    @property
    def state(self) -> WorkerState:
        """How it stands now."""
        followers = [part.follower for part in self._heard.values()]
        stored = [at_ns for follower in followers if (at_ns := follower.oldest_ns) is not None]
        now = time.time()
        return WorkerState(
            at_s=now, connected=self._connection.connected, parts=len(followers), nodes=len(self.hearing),
            jobs=len(self.hearing.jobs), waiting=sum(follower.waiting for follower in followers),
            lag_s=max(0.0, now - min(stored, default=int(now * 1e9)) / 1e9), unsent=len(self._unsent),
            counts=self.hearing.counts.copy(),
        )  # fmt: skip

    def take_news(self) -> list[str]:
        """Lines about what was turned away and what happened to the connection."""
        for text in self._connection.take_news():
            self.lines.tell(text, text)
        return self.lines.take()

    def step(self, timeout_s: float) -> None:
        """Hear what there is, for ``timeout_s`` seconds at most, and send on what is due."""
        self.share.beat()
        self._take_claims()
        self._take_share()
        if not self._unsent:
            self._hear(timeout_s)
        if time.monotonic() >= self._next_flush and (not self._unsent or not self._send()):
            self._flush()
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_S
            self.hearing.directory.forget(time.time_ns())

    # --- its share -----------------------------------------------------------------------------------------------------

    def _take_share(self) -> None:
        mine = set(self.share.mine)
        for lost in self._heard.keys() - mine:
            self._let_go(lost)
        # Others have less than their share: what is handed over is sent on before.
        for piece in sorted(self._heard)[self.share.share :] if self.share.share else ():
            if not self._unsent and self._flush():
                self._let_go(piece)
                self.share.release(piece)
        new = mine - self._heard.keys() - self.share.leaving
        if new:
            try:
                self._begin(new)
            except (NatsError, NcclwatchError) as error:
                self.lines.tell("begin", f"cannot begin to hear {len(new)} of {len(PIECES)} parts: {error}")

    def _let_go(self, piece: str) -> None:
        self._heard.pop(piece).follower.close()
        self.hearing.forget(piece)

    def _begin(self, new: set[str]) -> None:
        first, last, known = self._connection.call(self._places(new), 30.0)
        oldest = max(first, last - MAX_BACKLOG + 1)
        for piece in new:
            place = known.get(piece, 0)
            # A place behind the end is one in a stream that is no more.
            begin = max(1, place + 1 if oldest <= place <= last else oldest)
            subject = subjects.SAID_BATCHES if piece == UNMAPPED else subjects.part(int(piece))
            follower = Follower(
                self._connection, subjects.BATCHES, subject, self._bell, sequence=begin, max_bytes=MAX_WAITING_BYTES
            )
            self._heard[piece] = _Part(follower, begin - 1, begin - 1)

    async def _places(self, pieces: set[str]) -> tuple[int, int, dict[str, int]]:
        info = await self._connection.jetstream.stream_info(subjects.BATCHES)

        async def known(piece: str) -> int:
            try:
                return int((await self._positions.get(piece)).value or b"0")
            except (KeyNotFoundError, ValueError):
                return 0

        found = await asyncio.gather(*map(known, pieces))
        return info.state.first_seq, info.state.last_seq, dict(zip(pieces, found, strict=True))

    # --- hearing -------------------------------------------------------------------------------------------------------

    def _take_claims(self) -> None:
        while found := self._claims.take(PER_STEP):
            for message in found:
                try:
                    self.hearing.directory.take(directory.decode(message.data), time.time_ns())
                except FormatError as error:
                    self.lines.tell("claim", f"a claim makes no sense: {error.message}")

    def _hear(self, timeout_s: float) -> None:
        if not any(len(part.follower) for part in self._heard.values()):
            rest = min(timeout_s, max(0.0, self._next_flush - time.monotonic()))
            self._bell.wait(rest)
        self._bell.clear()
        until = min(time.monotonic() + timeout_s, self._next_flush)
        more = True
        while more and time.monotonic() < until:
            more = False
            for piece, part in self._heard.items():
                for message in part.follower.take(PER_STEP):
                    more = True
                    part.upto = message.sequence
                    self._hear_one(piece, message)
        while self._keys_wanted:
            self.hearing.request_keys(self._keys_wanted.popleft())

    def _hear_one(self, piece: str, message: Message) -> None:
        parts = subjects.batch_parts(message.subject)
        if parts is None:
            return
        token, node = parts
        try:
            life, n = marks(message.headers)
        except FormatError as error:
            self.hearing.counts.bad += 1
            self._tell_bad(message, error)
            return
        flooded = self.hearing.counts.flooded
        try:
            self.hearing.take(token, node, life, n, message.data, time.time_ns(), piece, message.time_ns)
        except FormatError as error:
            self._tell_bad(message, error)
        if self.hearing.counts.flooded > flooded:
            self.lines.tell(f"flood {message.subject}", f"node {node} of job {token} says more than is heard of one node")

    def _tell_bad(self, message: Message, error: FormatError) -> None:
        token, node = subjects.batch_parts(message.subject) or ("?", "?")
        text = f"node {node} of job {token} sent something that makes no sense: {error.message}"
        self.lines.tell(f"bad {message.subject}", text)

    # --- sending on ----------------------------------------------------------------------------------------------------

    def _flush(self) -> bool:
        """Send on what was heard; whether all of it is sent."""
        now = time.monotonic()
        wall = time.time() + self.interval_s / 2
        self._next_flush = now + self.interval_s / 2 + next_time(wall, self.interval_s, after_s=PHASE * self.interval_s) - wall
        for claim in self.hearing.claims:
            self._queue(streams.claims(self.name), directory.encode(claim))
        self.hearing.claims.clear()
        silent = set(self.hearing.jobs)
        for job, data in self.hearing.flush():
            silent.discard(job)
            self._queue(subjects.reduced(job, self.name), data)
        for job in silent:
            self._queue(subjects.reduced(job, self.name), reduced.present(self.interval_s))
        for token, node in self.hearing.asks:
            self._connection.spawn(self._connection.client.publish(subjects.ask(token, node), encode_word(NeedKey())))
        self.hearing.asks.clear()
        return self._send()

    def _queue(self, subject: str, data: bytes) -> None:
        self._unsent.append((subject, data, f"{self.name}:{self._numbered}"))
        self._numbered += 1

    def _send(self) -> bool:
        """Publish what waits, in its order for each subject, and write down how far was heard; whether all of it is stored."""
        try:
            while self._unsent:
                batch = list(self._unsent)[:PER_CALL]
                self._connection.call(self._publish(batch), 30.0)
                for _ in batch:
                    self._unsent.popleft()
            self._connection.call(self._write_positions(), 30.0)
        except (NatsError, UnreachableError, OSError) as error:
            self.lines.tell("send", f"what was heard cannot be sent on, and is kept: {error}")
            self._bell.wait(RETRY_S)
            return False
        return True

    async def _publish(self, batch: list[tuple[str, bytes, str]]) -> None:
        publish = self._connection.jetstream.publish
        # All are under way at once, in this order: a try again is known by its id.
        await asyncio.gather(*(publish(to, data, headers={subjects.MESSAGE_ID: number}) for to, data, number in batch))

    async def _write_positions(self) -> None:
        places = {piece: part.upto for piece, part in self._heard.items() if part.upto != part.written}
        await asyncio.gather(*(self._positions.put(piece, str(upto).encode()) for piece, upto in places.items()))
        for piece, upto in places.items():
            self._heard[piece].written = upto

    def close(self) -> None:
        """Send on what was heard, and let others hear."""
        with contextlib.suppress(NatsError, NcclwatchError, OSError):
            if not self._unsent or self._send():
                self._flush()
                for job in self.hearing.jobs:
                    self._queue(subjects.reduced(job, self.name), reduced.present(self.interval_s, leaves=True))
                self._send()
        self.share.close()
        self._claims.close()
        for part in self._heard.values():
            part.follower.close()
