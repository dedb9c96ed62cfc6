"""An agent's side of the connection: a thread that sends what the spool holds and never makes the collector wait.

The engine acknowledges what it has; only a window of batches is under way, so a slow engine fills the spool and nothing else. The
connection is made again with backoff (ZeroMQ's own), and what was under way is sent again: the engine drops what it has already.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
import time
from collections.abc import Callable

import zmq

from ncclwatch import __version__
from ncclwatch.messaging import packing, protocol
from ncclwatch.messaging.clock import ClockOffset
from ncclwatch.messaging.keys import Key
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.monitor import next_event
from ncclwatch.messaging.outbox import Outbox
from ncclwatch.messaging.protocol import Ack, Batch, CountWork, Farewell, Hello, History, NeedKey, Ping, Pong, Refused, Welcome
from ncclwatch.messaging.spool import Spool
from ncclwatch.messaging.transport import NOT_YET

WINDOW = 64
"""Batches under way at most."""
PING_EVERY_S = 5.0
HELLO_AGAIN_S = 5.0
REFUSED_AGAIN_S = 30.0
POLL_S = 0.2, 1.0
"""How long the thread sleeps at least and at most, unless something comes."""
BACKOFF_MS = (200, 3_000)
BROKE = "the connection to the engine broke"


class AgentLink(Outbox):
    """Carries the batches of one agent to one engine.

    ``request_key`` is called (from this thread) when the next batch has to be a key batch; ``history`` gives, for an engine that
    has begun anew, an encoded batch of the calls before number ``n``, or ``None``.
    """

    def __init__(
        self,
        address: str,
        spool: Spool,
        *,
        keys: tuple[Key, bytes] | None = None,
        host: str = "",
        token: str = "",
        request_key: Callable[[], None] = lambda: None,
        history: Callable[[int], bytes | None] = lambda n: None,
    ) -> None:
        super().__init__(spool)
        self.address = address
        self._keys, self._host, self._token = keys, host, token
        self._request_key, self._history = request_key, history
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._stop = threading.Event()
        self._flush_until = 0.0
        self._clock = ClockOffset()
        self._welcomed = False
        self._refused_until = 0.0
        self._sent = 0
        self._next_ping = self._next_hello = 0.0
        self._thread = threading.Thread(target=self._run, name="ncclwatch-link", daemon=True)

    # --- for the agent's own thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def close(self, *, flush_s: float = 2.0) -> None:
        """Send what can be sent in ``flush_s`` seconds, and end; the rest stays in the spool."""
        self._flush_until = time.monotonic() + flush_s
        self._stop.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(flush_s + 5.0)
        self._wake_in.close()
        self._wake_out.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b".")

    # --- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        try:
            self._loop(context)
        finally:
            self.status.connected = False
            self.spool.close()
            context.destroy(linger=0)

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.SNDHWM, WINDOW * 2)
        dealer.setsockopt(zmq.RCVHWM, 1024)
        dealer.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_CONTROL)
        dealer.setsockopt(zmq.RECONNECT_IVL, BACKOFF_MS[0])
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, BACKOFF_MS[1])
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, int(protocol.HEARTBEAT_S * 1000))
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(protocol.SILENCE_S * 1000))
        if self._keys is not None:
            own, engine = self._keys
            dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = own.public, own.secret, engine
        monitor = dealer.get_monitor_socket()
        dealer.connect(self.address)
        return dealer, monitor

    def _loop(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        dealer, monitor = self._open(context)
        poller = zmq.Poller()
        for source in (dealer, monitor, self._wake_out):
            poller.register(source, zmq.POLLIN)
        while True:
            poller.poll(int(self._rest_s() * 1000))
            self._watch(monitor)
            with contextlib.suppress(OSError):
                while self._wake_out.recv(4096):
                    pass
            self._sent = max(0, self._sent - self._take_given())
            while _has_more(dealer):
                self._hear(dealer)
            self._speak(dealer)
            if self._stop.is_set():
                done = not len(self.spool) or not self._welcomed
                if (done and not self._given) or time.monotonic() >= self._flush_until:
                    self._say(dealer, Farewell())
                    dealer.close(linger=200)
                    return

    def _rest_s(self) -> float:
        """How long there is nothing to say."""
        if self._stop.is_set():
            return POLL_S[0]
        due = self._next_ping if self._welcomed else max(self._next_hello, self._refused_until)
        return min(max(due - time.monotonic(), POLL_S[0]), POLL_S[1])

    def _watch(self, monitor: zmq.Socket[bytes]) -> None:
        """What ZeroMQ says of the connection."""
        while _has_more(monitor):
            kind, value = next_event(monitor)
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._next_hello = 0.0
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._lose(
                    f"the engine does not know this agent's key (status {value}): copy the public half to its known/ folder"
                )
            elif kind in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                self._lose("the handshake failed: the engine's key is not the one expected, or only one side uses keys")
            elif kind == zmq.EVENT_DISCONNECTED:
                self._lose(BROKE)

    def _lose(self, reason: str) -> None:
        status = self.status
        self._welcomed = False
        self._sent = 0
        if not status.connected and reason == BROKE and status.reason != NOT_YET:
            # A handshake that failed is followed by a disconnection, which explains less.
            return
        if status.connected or status.reason != reason:
            self._tell(f"engine {self.address}: {reason}; batches are kept until it is back")
        status.connected, status.reason = False, reason

    # --- speaking ------------------------------------------------------------------------------------------------------

    def _say(self, dealer: zmq.Socket[bytes], message: protocol.Message, payload: bytes | None = None) -> bool:
        frames = [protocol.encode(message)] + ([payload] if payload is not None else [])
        try:
            dealer.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _speak(self, dealer: zmq.Socket[bytes]) -> None:
        now = time.monotonic()
        if not self._welcomed:
            if now >= self._next_hello and now >= self._refused_until:
                hello = Hello(__version__, packing.VERSION, "agent", self._host, self._token, self.spool.lives)
                if self._say(dealer, hello):
                    self._next_hello = now + HELLO_AGAIN_S
            return
        for entry in self.spool.after(self._sent):
            if self._sent >= WINDOW or not self._say(dealer, Batch(entry.life, entry.n), entry.data):
                break
            self._sent += 1
            self.status.sent_batches += 1
            self.status.sent_bytes += len(entry.data)
        if now >= self._next_ping and self._say(dealer, Ping(time.time_ns())):
            self._next_ping = now + (PING_EVERY_S if self._clock.samples >= 4 else 0.5)

    # --- hearing -------------------------------------------------------------------------------------------------------

    def _hear(self, dealer: zmq.Socket[bytes]) -> None:
        frames = dealer.recv_multipart()
        now_ns = time.time_ns()
        try:
            message = protocol.decode(frames[0])
        except FormatError as error:
            self._tell(f"engine {self.address} said something that makes no sense: {error.message}")
            return
        if isinstance(message, Ack):
            self._sent = max(0, self._sent - self.spool.acknowledge(message.life, message.upto))
            if message.well is not None:
                self.on_ease(message.well, message.narrow)
        elif isinstance(message, Pong):
            self._clock.add(message.sent_ns, message.received_ns, message.answered_ns, now_ns)
            self.status.clock_offset_ns, self.status.clock_error_ns = self._clock.offset_ns, self._clock.error_ns
        elif isinstance(message, NeedKey):
            self._request_key()
        elif isinstance(message, CountWork):
            self._orders.append(message.order(self._host))
            self.on_order()
        elif isinstance(message, Welcome):
            # A hello that went out just before the handshake was told of is said twice: what is under way would be sent again.
            if not self._welcomed or message.engine != self.status.engine:
                self._begin(dealer, message)
        elif isinstance(message, Refused):
            self._refused_until = time.monotonic() + REFUSED_AGAIN_S
            self._lose(f"it refuses this agent: {message.reason}" + (f": {message.hint}" if message.hint else ""))
        elif isinstance(message, Farewell):
            self._lose("it has ended")

    def _begin(self, dealer: zmq.Socket[bytes], welcome: Welcome) -> None:
        if abs(welcome.format - packing.VERSION) > 1:
            self._refused_until = time.monotonic() + REFUSED_AGAIN_S
            self._lose(f"it speaks format {welcome.format}, this agent {packing.VERSION} (ncclwatch {welcome.release} there)")
            return
        if not self.status.connected:
            self._tell(f"connected to engine {self.address}")
        self.status.connected, self.status.reason, self.status.engine = True, "", welcome.engine
        self._welcomed, self._sent, self._next_ping = True, 0, 0.0
        for life in self.spool.lives:
            self.spool.acknowledge(life, welcome.upto.get(life, -1))
        if welcome.upto.get(self.spool.life, -1) < 0:
            # It has begun anew: what it had from us is gone.
            first = next(iter(self.spool.after(0)), None)
            past = self._history(first.n if first is not None and first.life == self.spool.life else 0 if first else 1 << 62)
            if past is not None:
                self._say(dealer, History(self.spool.life), past)
            self._request_key()


def _has_more(source: zmq.Socket[bytes]) -> bool:
    """Whether a message waits, in a tenth of the time of ``poll(0)``."""
    return bool(int(source.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
