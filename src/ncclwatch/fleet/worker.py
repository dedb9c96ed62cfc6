"""A hearing worker: the nodes that are its share, heard from the stream of batches and sent on to the judges of their jobs."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError
from nats.js.kv import KeyValue

from ncclwatch.collect.look_times import next_time
from ncclwatch.errors import NcclwatchError
from ncclwatch.fleet import directory, reduced, streams
from ncclwatch.fleet.connection import Connection, UnreachableError
from ncclwatch.fleet.follow import Follower, Message
from ncclwatch.fleet.hearing import PARTITIONS, Hearing, partition_of
from ncclwatch.fleet.lease import TTL_S
from ncclwatch.fleet.share import Share
from ncclwatch.messaging import subjects
from ncclwatch.messaging.limits import MAX_COUNT, FormatError
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
PER_STEP = 512
RETRY_S = 0.2
SHARE_OF_PAYLOAD = 0.9
"""Of what the server takes in one message: headers need the rest."""
SWEEP_S = 60.0
_LIFE = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


class Worker:
    """One worker. ``step`` hears for a moment, and sends on what is due."""

    def __init__(
        self, connection: Connection, *, interval_s: float = 1.0, partitions: int = PARTITIONS, ttl_s: float = TTL_S
    ) -> None:
        self.name = secrets.token_hex(6)
        self.interval_s = interval_s
        self.lines = Lines()
        self._connection, self._partitions = connection, partitions
        connection.call(streams.ensure(connection.jetstream, subjects.BATCHES, subjects.REDUCED, streams.JOBS), 30.0)
        self._positions: KeyValue = connection.call(streams.heard_bucket(connection.jetstream))
        self.hearing = Hearing(int(connection.client.max_payload * SHARE_OF_PAYLOAD))
        self._bell = threading.Event()
        self._claims = Follower(connection, streams.JOBS, streams.ALL_CLAIMS, self._bell)
        self._batches: Follower | None = None
        self._upto: dict[int, int] = {}
        """For each partition that is heard here, up to where in the stream it was sent on by whoever heard it before."""
        self._unsent: deque[tuple[str, bytes, str]] = deque()
        self._position = self._lost_ends = 0
        self._numbered = 0
        self._keys_wanted: deque[str] = deque(maxlen=1000)
        self._next_flush = self._next_sweep = 0.0
        self.share = Share(connection, "hear", self.name, ttl_s=ttl_s)
        self.share.wanted = [str(number) for number in range(partitions)]
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
    def partitions(self) -> list[int]:
        """What it hears now."""
        return sorted(self._upto)

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
        mine = {int(piece) for piece in self.share.mine}
        for lost in self._upto.keys() - mine:
            self._let_go(lost)
        # Others have less than their share: what is handed over is sent on before.
        for number in sorted(self._upto)[self.share.share :] if self.share.share else ():
            if not self._unsent and self._flush():
                self._let_go(number)
                self.share.release(str(number))
        new = mine - self._upto.keys() - {int(piece) for piece in self.share.leaving}
        if new:
            try:
                self._begin(new)
            except (NatsError, NcclwatchError) as error:
                self.lines.tell("begin", f"cannot begin to hear {len(new)} of {self._partitions} parts: {error}")

    def _let_go(self, number: int) -> None:
        del self._upto[number]
        self.hearing.forget(number, self._partitions)

    def _begin(self, new: set[int]) -> None:
        first, last, known = self._connection.call(self._places(new), 30.0)
        oldest = max(first, last - MAX_BACKLOG + 1)
        # A place behind the end is one in a stream that is no more.
        begin = {number: max(place + 1, oldest) if (place := known.get(number, 0)) <= last else oldest for number in new}
        self._upto |= {number: place - 1 for number, place in begin.items()}
        start = min(begin.values())
        if self._batches is None:
            self._batches = Follower(self._connection, subjects.BATCHES, subjects.ALL_BATCHES, self._bell, sequence=max(1, start))
            self._position = start - 1
            return
        # What others' nodes said since is passed over: it was heard.
        here = self._position + 1
        for number in self._upto.keys() - new:
            self._upto[number] = max(self._upto[number], self._position)
        if start < here:
            self._batches.seek(max(1, start))
            self._position = start - 1

    async def _places(self, numbers: set[int]) -> tuple[int, int, dict[int, int]]:
        info = await self._connection.jetstream.stream_info(subjects.BATCHES)

        async def known(number: int) -> int:
            try:
                return int((await self._positions.get(str(number))).value or b"0")
            except (KeyNotFoundError, ValueError):
                return 0

        found = await asyncio.gather(*map(known, numbers))
        return info.state.first_seq, info.state.last_seq, dict(zip(numbers, found, strict=True))

    # --- hearing -------------------------------------------------------------------------------------------------------

    def _take_claims(self) -> None:
        while found := self._claims.take(PER_STEP):
            for message in found:
                try:
                    self.hearing.directory.take(directory.decode(message.data), time.time_ns())
                except FormatError as error:
                    self.lines.tell("claim", f"a claim makes no sense: {error.message}")

    def _hear(self, timeout_s: float) -> None:
        if self._batches is None or not len(self._batches):
            rest = min(timeout_s, max(0.0, self._next_flush - time.monotonic()))
            self._bell.wait(rest)
        self._bell.clear()
        if self._batches is not None and self._batches.lost_ends != self._lost_ends:
            self._lost_ends = self._batches.lost_ends
            self._upto = dict.fromkeys(self._upto, 0)
        until = min(time.monotonic() + timeout_s, self._next_flush)
        while self._batches is not None and (found := self._batches.take(PER_STEP)):
            for message in found:
                self._hear_one(message)
            if time.monotonic() >= until:
                break
        while self._keys_wanted:
            self.hearing.request_keys(self._keys_wanted.popleft())

    def _hear_one(self, message: Message) -> None:
        self._position = message.sequence
        parts = subjects.batch_parts(message.subject)
        if parts is None:
            return
        token, node = parts
        upto = self._upto.get(partition_of(node, self._partitions))
        if upto is None or message.sequence <= upto:
            return
        life, n = message.headers.get(subjects.LIFE, ""), message.headers.get(subjects.NUMBER, "")
        try:
            if not _LIFE.match(life) or not n.isascii() or not n.isdigit() or int(n) > MAX_COUNT:
                self.hearing.counts.bad += 1
                raise FormatError("a batch without the headers that say whose it is")
            self.hearing.take(token, node, life, int(n), message.data, time.time_ns())
        except FormatError as error:
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
            self._queue(subjects.reduced(job, self.name), reduced.PRESENT)
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
                batch = list(self._unsent)[:PER_STEP]
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
        put, place = self._positions.put, self._position
        numbers = [number for number, upto in self._upto.items() if upto < place]
        await asyncio.gather(*(put(str(number), str(place).encode()) for number in numbers))

    def close(self) -> None:
        """Send on what was heard, and let others hear."""
        with contextlib.suppress(NatsError, NcclwatchError, OSError):
            if not self._unsent or self._send():
                self._flush()
                for job in self.hearing.jobs:
                    self._queue(subjects.reduced(job, self.name), reduced.FAREWELL)
                self._send()
        self.share.close()
        self._claims.close()
        if self._batches is not None:
            self._batches.close()
