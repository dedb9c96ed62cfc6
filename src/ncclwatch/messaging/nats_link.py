"""An agent's side of NATS JetStream: a batch leaves the spool when the stream has it, which drops what it has already.

The engine is not needed for that, and may be down: what it has not heard lies in the stream. What it has to say (allowances of
few looks, orders, the wish for a key batch) comes over core NATS, and so does its clock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec
from nats.aio.msg import Msg

from ncclwatch.messaging import packing, protocol, subjects
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.messaging.clock import ClockOffset
from ncclwatch.messaging.keys import job_of
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.nats_client import BusClient, LostError, NatsThread, listen, status_of
from ncclwatch.messaging.outbox import Outbox
from ncclwatch.messaging.protocol import Ack, CountWork, NeedKey, Ping, Pong
from ncclwatch.messaging.spool import Entry, Spool
from ncclwatch.text import clean

WINDOW = 64
"""Batches under way at most."""
WINDOW_BYTES = 8 << 20
ACK_S = 10.0
"""After so long without an answer of the stream a connection is given up."""
FIRST_ACK_S = 2.0
"""The same for the first batch over a connection, which is then tried again."""
NO_STREAM = "no stream takes batches there: an engine makes it"
REST_S = 1.0
PING_EVERY_S = 5.0
PING_FIRST_S = 0.5
HELD_S = 0.5, 15.0
"""How long it waits, at first and at most, where no stream takes batches."""
HEADERS_BYTES = 1024
"""Of a message, beside the batch."""
KEY_EVERY = 60
"""Batches after which one builds on nothing: an engine that begins anew reads the stream from the middle."""


class _Answer(msgspec.Struct):
    """What JetStream says of a message: what went wrong, or where it lies."""

    stream: str = ""
    seq: int = 0
    error: dict[str, object] = {}


_answers = msgspec.json.Decoder(_Answer)


class NatsLink(Outbox):
    """Carries the batches of one agent into a stream. Parameters as of :class:`ncclwatch.messaging.link.AgentLink`."""

    def __init__(
        self,
        access: Access,
        spool: Spool,
        *,
        host: str = "",
        token: str = "",
        request_key: Callable[[], None] = lambda: None,
        history: Callable[[int], bytes | None] = lambda n: None,
    ) -> None:
        super().__init__(spool)
        # The stream holds what an engine that begins anew needs: nothing is sent again for it.
        del history
        job = job_of(token)
        self.address, self._host, self._request_key = access.address, host, request_key
        self._batches, self._asks, self._pings = (part(job, host) for part in (subjects.batch, subjects.ask, subjects.ping))
        self._inbox = access.inbox
        self._clock = ClockOffset()
        self._flight: OrderedDict[int, tuple[Entry, float]] = OrderedDict()
        """Batches under way by the number of their message, with when they went."""
        self._taken: set[int] = set()
        """Of those, the ones that the stream has, while one before is not answered for."""
        self._message = self._sent = self._flying = 0
        self._proven = False
        """Whether the stream has taken anything over this connection: until then one batch tries."""
        self._held_s, self._held_until = HELD_S[0], 0.0
        self._next_ping = 0.0
        self._flush_until = 0.0
        self._bus = NatsThread(access, f"ncclwatch agent {host}", self._session, self._lose)

    # --- for the agent's own thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect."""
        self._bus.start()

    def close(self, *, flush_s: float = 2.0) -> None:
        """Send what can be sent in ``flush_s`` seconds, and end; the rest stays in the spool."""
        self._flush_until = time.monotonic() + flush_s
        if self._bus.stop(flush_s + 5.0):
            self._take_given()
            self.spool.close()
        self.status.connected = False

    def _wake(self) -> None:
        self._bus.call(self._spool_given)

    # --- the thread ----------------------------------------------------------------------------------------------------

    def _spool_given(self) -> None:
        if self._given:
            self._sent = max(0, self._sent - self._take_given())
            self._bus.wake.set()

    def _lose(self, reason: str) -> None:
        status = self.status
        if status.connected or status.reason != reason:
            self._tell(f"NATS server {self.address}: {reason}; batches are kept until it takes them")
        status.connected, status.reason = False, reason

    async def _session(self, client: BusClient) -> None:
        # Answers of an earlier connection are not answers to this one.
        inbox = f"{self._inbox}.{self._message}"
        self._restart()
        await listen(client, f"{inbox}.ack.*", self._answered)
        await listen(client, f"{inbox}.pong", self._heard_clock)
        await listen(client, self._asks, self._asked)
        self._next_ping, self._held_until = 0.0, 0.0
        while True:
            self._sent = max(0, self._sent - self._take_given())
            await self._speak(client, inbox)
            if self._bus.stopping.is_set() and self._is_flushed():
                return
            await self._bus.rest(client, self._rest_s())
            self._check_answers(client)

    def _is_flushed(self) -> bool:
        return not len(self.spool) or time.monotonic() >= self._flush_until

    def _rest_s(self) -> float:
        now = time.monotonic()
        limits = [REST_S, self._next_ping - now]
        if self._held_until > now:
            limits.append(self._held_until - now)
        if self._bus.stopping.is_set():
            limits.append(self._flush_until - now)
        return max(0.01, min(limits))

    def _restart(self) -> None:
        """Nothing is under way: all that the spool holds is to be sent (the stream drops what it has)."""
        self._flight.clear()
        self._taken.clear()
        self._sent = self._flying = 0
        self._proven = False

    async def _speak(self, client: BusClient, inbox: str) -> None:
        now = time.monotonic()
        if now >= self._held_until:
            window = WINDOW if self._proven else 1
            for entry in self.spool.after(self._sent):
                if len(self._flight) >= window or self._flying >= WINDOW_BYTES:
                    break
                await self._send(client, inbox, entry)
        if now >= self._next_ping:
            self._next_ping = now + (PING_EVERY_S if self._clock.samples >= 4 else PING_FIRST_S)
            await client.publish(self._pings, protocol.encode(Ping(time.time_ns())), reply=f"{inbox}.pong")

    async def _send(self, client: BusClient, inbox: str, entry: Entry) -> None:
        self._message += 1
        self._sent += 1
        self._flight[self._message] = (entry, time.monotonic())
        self._flying += len(entry.data)
        if len(entry.data) + HEADERS_BYTES > client.max_payload:
            self._tell(f"a batch of {len(entry.data)} bytes was dropped: the server takes {client.max_payload} (max_payload)")
            self._request_key()
            self._settle(self._message)
            return
        headers = {
            subjects.MESSAGE_ID: f"{entry.life}:{entry.n}",
            subjects.LIFE: entry.life,
            subjects.NUMBER: str(entry.n),
            subjects.FORMAT: str(packing.VERSION),
        }
        if packing.is_key(entry.data):
            headers[subjects.KEY] = "1"
        await client.publish(self._batches, entry.data, reply=f"{inbox}.ack.{self._message}", headers=headers)
        self.status.sent_batches += 1
        self.status.sent_bytes += len(entry.data)

    def _check_answers(self, client: BusClient) -> None:
        oldest = next(iter(self._flight.values()), None)
        waited_s = 0.0 if oldest is None else time.monotonic() - oldest[1]
        if waited_s > ACK_S and self._proven:
            raise LostError(client.refused or "the stream does not answer")
        if waited_s > FIRST_ACK_S and not self._proven:
            # Between accounts nobody says that there is no stream.
            self._hold(client.refused or NO_STREAM)

    def _hold(self, reason: str) -> None:
        """Try again later; whatever went may be in the stream or not: all of it is sent again, in order."""
        self._lose(reason)
        self._restart()
        self._held_until = time.monotonic() + self._held_s
        self._held_s = min(self._held_s * 2, HELD_S[1])

    # --- hearing -------------------------------------------------------------------------------------------------------

    async def _answered(self, message: Msg) -> None:
        number = int(message.subject.rpartition(".")[2])
        if number not in self._flight:
            return
        try:
            answer = _answers.decode(message.data) if message.data else _Answer()
        except msgspec.DecodeError:
            answer = _Answer(error={"description": "the stream said something that makes no sense"})
        if answer.stream and not answer.error:
            self._settle(number)
            return
        nobody = status_of(message) == "503"
        self._hold(NO_STREAM if nobody else f"its stream takes no batch: {clean(str(answer.error.get('description')), 200)}")

    def _settle(self, number: int) -> None:
        """The stream has a message; what it has without a gap leaves the spool."""
        self._taken.add(number)
        while self._flight:
            first = next(iter(self._flight))
            if first not in self._taken:
                break
            self._taken.discard(first)
            entry, _ = self._flight.pop(first)
            self._flying -= len(entry.data)
            self._sent = max(0, self._sent - self.spool.acknowledge(entry.life, entry.n))
        self.status.waiting = len(self.spool)
        if not self.status.connected:
            self._tell(f"connected to NATS server {self.address}")
            self.status.connected, self.status.reason = True, ""
        self._proven, self._held_s = True, HELD_S[0]
        self._bus.wake.set()

    async def _heard_clock(self, message: Msg) -> None:
        now_ns = time.time_ns()
        said = self._understood(message)
        if isinstance(said, Pong):
            self._clock.add(said.sent_ns, said.received_ns, said.answered_ns, now_ns)
            self.status.clock_offset_ns, self.status.clock_error_ns = self._clock.offset_ns, self._clock.error_ns

    async def _asked(self, message: Msg) -> None:
        said = self._understood(message)
        if isinstance(said, Ack):
            if said.life == self.spool.life and said.well is not None:
                self.on_ease(said.well, said.narrow)
        elif isinstance(said, NeedKey):
            self._request_key()
        elif isinstance(said, CountWork):
            self._orders.append(said.order(self._host))
            self.on_order()

    def _understood(self, message: Msg) -> protocol.Message | None:
        if status_of(message):
            return None
        try:
            return protocol.decode(message.data)
        except FormatError as error:
            self._tell(f"an engine behind {self.address} said something that makes no sense: {error.message}")
            return None
