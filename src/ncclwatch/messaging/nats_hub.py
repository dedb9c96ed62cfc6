"""An engine's side of NATS JetStream: the stream's batches, each once, whatever somebody of the tenant put there; orders back.

Whose batch it is the subject says, which the server checks against the sender's key; what the batch says of itself has to fit
that. Everything that does not is counted, and told at most once a minute.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from nats.aio.msg import Msg
from nats.js.client import JetStreamContext

from ncclwatch.messaging import protocol, subjects
from ncclwatch.messaging.bus_batch import Allowance, allowance, marks
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.lines import Lines
from ncclwatch.messaging.lives import FORGET_PEER_S, MAX_LIVES, Life, forget
from ncclwatch.messaging.nats_client import BusClient, LostError, NatsThread, listen
from ncclwatch.messaging.nats_stream import CONTEXT_ERRORS, REPLAY_S, Held, StreamReader, ensure_stream
from ncclwatch.messaging.protocol import Ack, CountWork, NeedKey, Ping, Pong
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.transport import HubCounts, Take
from ncclwatch.messaging.values import Shared
from ncclwatch.model.work import WorkOrder

PER_POLL = 2000
MAX_SUBJECTS = 65_536
MISSING = 256
"""Numbers of a life that were skipped and may still come."""
VIEWER_S = 8.0
"""A viewer says every two seconds that it is there."""
MAX_VIEWERS = 1024
EASE_AGAIN_S = 2.0
"""An allowance holds for five seconds, the wish for more looks 2.5 (``collect.ease``)."""
REST_S = 0.5
SWEEP_S = 10.0
_VIEWER = re.compile(rb"[0-9a-f]{16}\Z")


@dataclass(slots=True)
class _Life(Life):
    """Of an agent that is heard by a stream; ``missing``: numbers below ``upto`` that were not heard."""

    missing: set[int] = field(default_factory=set)
    eased_at: float = 0.0


class NatsHub:
    """Hears what a stream holds. ``subject``: of which batches; ``replay_s``: of how many seconds before now."""

    def __init__(self, access: Access, take: Take, *, subject: str = subjects.ALL_BATCHES, replay_s: float = REPLAY_S) -> None:
        self.counts = HubCounts()
        self.engine = secrets.token_hex(8)
        self.address = access.address
        self._take = take
        self._lines = Lines()
        self._lives: OrderedDict[str, _Life] = OrderedDict()
        self._allowances: OrderedDict[str, Allowance] = OrderedDict()
        self._shared = Shared()
        self._viewers: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._came = threading.Event()
        self._missed_told = 0
        self._reader = StreamReader(self._came.set, subject, replay_s)
        self._connected = False
        self._trouble: deque[str] = deque(maxlen=100)
        self._heard = self._emptied = time.monotonic()
        self._next_sweep = 0.0
        self._bus = NatsThread(access, f"ncclwatch engine {self.engine}", self._session, self._lose)
        self._bus.start()

    # --- for the engine's own thread -----------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the stream is read."""
        return self._connected

    @property
    def npeers(self) -> int:
        """Agents that were heard of late, and viewers."""
        since = time.monotonic() - FORGET_PEER_S
        return sum(life.heard > since for life in self._lives.values()) + len(self._viewers)

    @property
    def unheard_s(self) -> float:
        """For how long there has always been more to hear than was heard, or nothing could be heard; else 0."""
        return max(0.0, self._heard - self._emptied)

    def poll(self, timeout_s: float) -> int:
        """Hear what there is, waiting at most ``timeout_s`` for the first; returns how many batches were taken."""
        waiting = self._reader.waiting
        if not waiting:
            self._came.wait(max(0.0, timeout_s))
        self._came.clear()
        self._heard = time.monotonic()
        taken = nbytes = 0
        while waiting and taken < PER_POLL:
            held = waiting.popleft()
            taken += 1
            nbytes += len(held.data)
            try:
                self._hear(held)
            except FormatError as error:
                self._bad(held, error)
        if taken:
            self._bus.call(lambda: self._made_room(nbytes))
        if self._connected and not waiting and self._reader.pending < PER_POLL:
            self._emptied = time.monotonic()
        self.counts.missed = self._reader.missed
        self._tidy()
        return taken

    def take_news(self) -> list[str]:
        """Lines about what was turned away, each kind at most once a minute."""
        while self._trouble:
            self._lines.tell("bus", self._trouble.popleft())
        missed, self._missed_told = self.counts.missed - self._missed_told, self.counts.missed
        if missed:
            self._lines.tell(
                "missed", f"{missed} batches went out of the stream before they were heard: it is too small, or flooded"
            )
        return self._lines.take()

    def tell(self, kind: str, text: str) -> None:
        """Say something with the next news, each kind at most once a minute."""
        self._lines.tell(kind, text)

    def viewers(self, job: str) -> Sequence[bytes]:
        """Those who said of late that they want to see a job."""
        name, since = subjects.token_of(job), time.monotonic() - VIEWER_S
        return [viewer for (wanted, viewer), heard in list(self._viewers.items()) if wanted == name and heard > since]

    def show(self, job: str, payload: bytes) -> None:
        """Send a view to all viewers of a job."""
        self._bus.say(subjects.view(job), payload)

    def order(self, number: str, order: WorkOrder) -> bool:
        """Send an order to the agent of this life; whether it could be sent."""
        life = self._lives.get(number)
        if life is None or not self._connected:
            return False
        self._ask(life, CountWork.of(order))
        return True

    def ease(self, number: str, *, well: bool, narrow: bool = False) -> None:
        """Let the agent of this life know whether few looks at its node will do, or more are wanted."""
        life, now = self._lives.get(number), time.monotonic()
        if life is None:
            return
        new = (life.well, life.narrow) != (well, narrow)
        life.well, life.narrow = well, narrow
        if new or ((well or narrow) and now - life.eased_at > EASE_AGAIN_S):
            life.eased_at = now
            self._ask(life, Ack(number, life.upto, well, narrow))

    def close(self) -> None:
        """Let go."""
        self._bus.stop(5.0)

    def _ask(self, life: _Life, message: protocol.Message) -> None:
        self._bus.say(subjects.ask(life.job, life.host), protocol.encode(message))

    # --- hearing -------------------------------------------------------------------------------------------------------

    def _hear(self, held: Held) -> None:
        parts = subjects.batch_parts(held.subject)
        if parts is None:
            raise FormatError("a batch on a subject that is none of ours")
        if not self._within_rate(held):
            self.counts.flooded += 1
            self._lines.tell(f"flood {held.subject}", f"node {parts[1]} of job {parts[0]} says more than is heard of one node")
            return
        number, n = marks(held.headers)
        life = self._life(number, *parts)
        self.counts.nbytes += len(held.data)
        if not _is_new(life, n):
            self.counts.duplicates += 1
            return
        decoded = life.reader.decode(held.data)
        batch = decoded.batch
        if subjects.token_of(batch.host) != life.host:
            raise FormatError(f"a batch of another node than {life.host}, which sent it")
        if held.sequence <= self._reader.replay_upto and batch.clock_offset_ns is None:
            # It lay in the stream: without a measured clock it counts as old where the clocks of the machines say so.
            batch.clock_offset_ns = 0
        self.counts.batches += 1
        if decoded.needs_key and life.heard - life.asked_key > 1.0:
            life.asked_key = life.heard
            self.counts.keys_asked += 1
            self._ask(life, NeedKey())
        self._take(life.job, number, batch)

    def _life(self, number: str, job: str, node: str) -> _Life:
        life, now = self._lives.get(number), time.monotonic()
        if life is None:
            if len(self._lives) >= MAX_LIVES:
                self._lives.popitem(last=False)
            life = self._lives[number] = _Life(job, node, BatchReader(self._shared), now)
        elif (life.job, life.host) != (job, node):
            raise FormatError("a batch of an agent of another job or node")
        life.heard = now
        self._lives.move_to_end(number)
        return life

    def _within_rate(self, held: Held) -> bool:
        allowed = self._allowances.get(held.subject)
        if allowed is None:
            if len(self._allowances) >= MAX_SUBJECTS:
                self._allowances.popitem(last=False)
            allowed = self._allowances[held.subject] = allowance(held.at_ns)
        return allowed.take(held.at_ns)

    def _bad(self, held: Held, error: FormatError) -> None:
        self.counts.bad += 1
        job, node = subjects.batch_parts(held.subject) or ("?", "?")
        self._lines.tell(f"bad {held.subject}", f"node {node} of job {job} sent something that makes no sense: {error.message}")

    def _tidy(self) -> None:
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_S
        forget(self._lives, now)
        for key in [key for key, heard in list(self._viewers.items()) if now - heard > VIEWER_S]:
            self._viewers.pop(key, None)

    # --- the thread ----------------------------------------------------------------------------------------------------

    def _lose(self, reason: str) -> None:
        self._connected = False
        self._trouble.append(f"NATS server {self.address}: {reason}; trying again")

    def _made_room(self, nbytes: int) -> None:
        self._reader.waiting_bytes -= nbytes
        self._bus.wake.set()

    async def _session(self, client: BusClient) -> None:
        context: JetStreamContext = client.jetstream()
        try:
            await ensure_stream(context)
            await listen(client, subjects.ALL_PINGS, self._pinged(client), queue="ncclwatch")
            await listen(client, subjects.ALL_WATCHES, self._watched)
            await self._reader.begin(client, context)
        except CONTEXT_ERRORS as error:
            raise LostError(f"JetStream refuses: {client.refused or error}") from error
        self._connected = True
        while not self._bus.stopping.is_set():
            await self._bus.speak(client)
            await self._reader.ask(client)
            await self._bus.rest(client, REST_S)

    def _pinged(self, client: BusClient) -> Callable[[Msg], Awaitable[None]]:
        async def answer(message: Msg) -> None:
            received = time.time_ns()
            if not subjects.is_inbox(message.reply or ""):
                return
            try:
                said = protocol.decode(message.data)
            except FormatError:
                self.counts.bad += 1
                return
            if isinstance(said, Ping):
                await client.publish(message.reply, protocol.encode(Pong(said.sent_ns, received, time.time_ns())))

        return answer

    async def _watched(self, message: Msg) -> None:
        if not _VIEWER.match(message.data):
            self.counts.bad += 1
            return
        key = (message.subject.rpartition(".")[2], message.data)
        if key not in self._viewers and len(self._viewers) >= MAX_VIEWERS:
            self.counts.refused_peers += 1
            return
        self._viewers[key] = time.monotonic()


def _is_new(life: _Life, n: int) -> bool:
    """Whether a batch was not heard before; it counts as heard from then on, also when it makes no sense."""
    if n > life.upto:
        if life.upto >= 0:
            life.missing.update(range(max(life.upto + 1, n - MISSING), n))
        if len(life.missing) > MISSING:
            life.missing = set(sorted(life.missing)[-MISSING:])
        life.upto = n
        return True
    if n in life.missing:
        # Sent again behind a later one, because the stream had not taken it the first time.
        life.missing.remove(n)
        return True
    return False
