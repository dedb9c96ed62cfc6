"""The stream of batches: how it is made, and how an engine reads it, from some minutes ago on, in bounded pieces, without a gap.

An engine keeps no place on the server: where it has read up to it knows itself, and when the server, or its consumer there, has
gone, it goes on behind that. One that begins anew reads what the stream holds of the last minutes.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, DiscardPolicy, StorageType, StreamConfig
from nats.js.client import JetStreamContext
from nats.js.errors import APIError, Error, NotFoundError

from ncclwatch.messaging import subjects
from ncclwatch.messaging.limits import MAX_FRAME
from ncclwatch.messaging.nats_client import BusClient, LostError, listen, status_of

MAX_AGE_S = 1800.0
MAX_BYTES = 4 << 30
"""Of the stream, when we make it: what is older goes, and beyond that the oldest."""
MAX_OF_A_NODE = 8192
"""Messages of one subject: who floods it pushes out what it said itself, and nothing of others."""
DUPLICATES_S = 120.0
"""For so long the server drops what it has by its message id; later the engine does, by its number."""
REPLAY_S = 300.0
"""What an engine that begins anew reads first: several times what a cadence needs (120 s)."""
PIECE = 512
MAX_WAITING, MAX_WAITING_BYTES = 4096, 64 << 20
"""Batches that were read and are not yet heard."""
EXPIRES_S, BEAT_S = 20.0, 4.0
SILENT_S = 3 * BEAT_S
"""The server says something every ``BEAT_S``: after so long without a word it is asked anew."""
IDLE_S = 60.0
"""After so long without us the server forgets that we read."""


@dataclass(slots=True)
class Held:
    """A batch as the stream holds it. ``at_ns``: the server's CLOCK_REALTIME when it took it."""

    subject: str
    headers: dict[str, str]
    data: bytes
    sequence: int
    at_ns: int


async def ensure_stream(context: JetStreamContext) -> None:
    """Make the stream of batches where there is none; one that is there stays as its administrator made it, but that it takes
    batches which are mapped, too.
    """
    try:
        found = (await context.stream_info(subjects.BATCHES)).config
        if found.subjects == [subjects.SAID_BATCHES]:
            await context.update_stream(found, subjects=[subjects.ALL_BATCHES])
    except NotFoundError:
        limit = MAX_BYTES
        while not await _add(context, limit):
            limit //= 2


async def replicas(context: JetStreamContext) -> int:
    """How many servers of a cluster hold the stream of batches, as what belongs to it is to be held; 1 where there is none."""
    try:
        return (await context.stream_info(subjects.BATCHES)).config.num_replicas or 1
    except NotFoundError:
        return 1


async def _add(context: JetStreamContext, max_bytes: int) -> bool:
    """Whether the stream is there now; not where its account may not hold so much."""
    try:
        await context.add_stream(
            StreamConfig(
                name=subjects.BATCHES,
                subjects=[subjects.ALL_BATCHES],
                storage=StorageType.FILE,
                discard=DiscardPolicy.OLD,
                max_age=MAX_AGE_S,
                max_bytes=max_bytes,
                max_msgs_per_subject=MAX_OF_A_NODE,
                max_msg_size=MAX_FRAME,
                duplicate_window=DUPLICATES_S,
            )
        )
    except APIError as error:
        # 10047, 10028: of storage the server, the account has no more.
        if error.err_code in (10028, 10047) and max_bytes > MAX_FRAME:
            return False
        raise
    return True


class StreamReader:
    """Reads the stream over one connection after another. ``waiting`` holds what came; ``came`` is called when something does."""

    def __init__(self, came: Callable[[], None], subject: str = subjects.ALL_BATCHES, replay_s: float = REPLAY_S) -> None:
        self.waiting: deque[Held] = deque()
        self.waiting_bytes = 0
        self.pending = 0
        """Messages that the server holds for us, as it said with the last one."""
        self.last = 0
        """Sequence number of the last message that was read."""
        self.missed = 0
        """Messages that had gone out of the stream before they were read."""
        self.replay_upto = 0
        """What has no higher number lay in the stream when we began."""
        self._tell, self._subject, self._replay_s = came, subject, replay_s
        self._asked = 0
        """Messages that the server was asked for and that have not come."""
        self._heard = 0.0
        self._next = ""
        self._inbox = ""

    async def begin(self, client: BusClient, context: JetStreamContext) -> None:
        """Begin to read over a new connection, or anew over this one, where we were."""
        state = (await context.stream_info(subjects.BATCHES)).state
        if not self.last:
            self.replay_upto = state.last_seq
        elif state.last_seq < self.last:
            # Another stream of the same name, or a server that lost its end: everything it holds is new.
            self.last = self.replay_upto = 0
        config = ConsumerConfig(
            name=f"engine-{secrets.token_hex(8)}",
            ack_policy=AckPolicy.NONE,
            filter_subject=self._subject,
            inactive_threshold=IDLE_S,
            mem_storage=True,
            max_waiting=8,
        )
        if self.last:
            config.deliver_policy, config.opt_start_seq = DeliverPolicy.BY_START_SEQUENCE, self.last + 1
        else:
            since = datetime.now(UTC) - timedelta(seconds=self._replay_s)
            config.deliver_policy, config.opt_start_time = DeliverPolicy.BY_START_TIME, since
        made = await context.add_consumer(subjects.BATCHES, config)
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.BATCHES}.{made.name}"
        self._inbox = client.new_inbox()
        self._asked, self._heard = 0, time.monotonic()
        await listen(client, self._inbox, self._came)
        await self.ask(client)

    async def ask(self, client: BusClient) -> None:
        """Ask for more where there is room for it; raises ``LostError`` where the server has gone quiet."""
        now = time.monotonic()
        if now - self._heard > SILENT_S:
            raise LostError("the stream is not heard any more")
        room = min(MAX_WAITING - len(self.waiting), PIECE * 2) - self._asked
        if room >= PIECE and self.waiting_bytes < MAX_WAITING_BYTES:
            wanted = {"batch": room, "expires": int(EXPIRES_S * 1e9), "idle_heartbeat": int(BEAT_S * 1e9)}
            self._asked += room
            await client.publish(self._next, json.dumps(wanted).encode(), reply=self._inbox)
        elif not self._asked:
            # Nobody beats for what is not asked.
            self._heard = now

    async def _came(self, message: Msg) -> None:
        self._heard = time.monotonic()
        where = message.reply.split(".")
        if where[:2] != ["$JS", "ACK"]:
            self._status(message)
            return
        # $JS.ACK.STREAM.CONSUMER.DELIVERED.SEQUENCE.OURS.TIME.PENDING; newer servers put domain and account before the stream.
        sequence, _, at_ns, pending = (int(word) for word in (where[5:9] if len(where) < 12 else where[7:11]))
        self._asked = max(0, self._asked - 1)
        self.pending = pending
        if self.last and sequence > self.last + 1 and self._subject == subjects.ALL_BATCHES:
            self.missed += sequence - self.last - 1
        self.last = sequence
        self.waiting_bytes += len(message.data)
        self.waiting.append(Held(message.subject, message.headers or {}, message.data, sequence, at_ns))
        self._tell()

    def _status(self, message: Msg) -> None:
        status = status_of(message)
        if status in ("404", "408"):
            left = (message.headers or {}).get("Nats-Pending-Messages", "")
            self._asked = max(0, self._asked - int(left)) if left.isdigit() else 0
        elif status and status != "100":
            # The consumer is gone, or does not know us: it is not heard any more, and asked anew.
            self._heard = -SILENT_S


CONTEXT_ERRORS = (Error, nats.errors.Error)
"""What asking JetStream raises."""
