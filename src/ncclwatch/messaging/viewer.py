"""A viewer's side of ZeroMQ: what an engine shows of one job."""

from __future__ import annotations

import time

import zmq

from ncclwatch import __version__
from ncclwatch.messaging import packing, protocol
from ncclwatch.messaging.keys import Key
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.monitor import next_event
from ncclwatch.messaging.protocol import Farewell, Hello, Ping, Refused, View, Welcome
from ncclwatch.messaging.transport import EngineUnreachableError

HELLO_EVERY_S = 2.0
PING_EVERY_S = 5.0


class ZmqViewer:
    """Hears one job of the engine at ``address``; ``keys`` are our own and the engine's."""

    def __init__(self, address: str, *, keys: tuple[Key, bytes] | None = None, token: str = "") -> None:
        self.address = address
        self.heard = 0.0
        self._welcomed = False
        self._token = token
        self._news: list[str] = []
        self._next_hello = self._next_ping = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0), (zmq.IMMEDIATE, 1), (zmq.IPV6, 1), (zmq.RCVHWM, 64), (zmq.RECONNECT_IVL_MAX, 5000),
            (zmq.MAXMSGSIZE, protocol.MAX_MESSAGE), (zmq.HEARTBEAT_IVL, int(protocol.HEARTBEAT_S * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, int(protocol.SILENCE_S * 1000)),
        ):  # fmt: skip
            self._socket.setsockopt(option, value)
        if keys is not None:
            own, engine = keys
            self._socket.curve_publickey, self._socket.curve_secretkey = own.public, own.secret
            self._socket.curve_serverkey = engine
        self._monitor = self._socket.get_monitor_socket()
        self._socket.connect(address)

    @property
    def welcomed(self) -> bool:
        """Whether the engine takes us."""
        return self._welcomed

    def take_news(self) -> list[str]:
        """What is to be said since the last time."""
        found, self._news = self._news, []
        return found

    def close(self) -> None:
        """Leave."""
        self._send(Farewell())
        self._socket.close(linger=100)
        self._monitor.close(linger=0)
        self._context.destroy(linger=100)

    def hear(self, timeout_s: float) -> bytes | None:
        """The next view, waiting at most so long. Raises ``EngineUnreachableError`` when we are refused."""
        now = time.monotonic()
        if not self._welcomed and now >= self._next_hello:
            if self._send(Hello(__version__, packing.VERSION, "viewer", token=self._token)):
                self._next_hello = now + HELLO_EVERY_S
        elif self._welcomed and now >= self._next_ping:
            self._next_ping = now + PING_EVERY_S
            self._send(Ping(time.time_ns()))
        # While there is something to hear the connection is well: looking takes as long as hearing does.
        if not self._socket.poll(0):
            self._watch()
            if not self._socket.poll(int(timeout_s * 1000)):
                return None
        frames = self._socket.recv_multipart()
        try:
            message = protocol.decode(frames[0])
        except FormatError as error:
            self._news.append(f"the engine said something that makes no sense: {error.message}")
            return None
        if isinstance(message, View) and len(frames) == 2:
            self.heard = time.monotonic()
            return frames[1]
        if isinstance(message, Welcome):
            self._welcomed = True
            self.heard = time.monotonic()
        elif isinstance(message, Refused):
            raise EngineUnreachableError(f"the engine at {self.address} refuses: {message.reason}", message.hint)
        elif isinstance(message, Farewell):
            self._welcomed = False
        return None

    def _send(self, message: protocol.Message) -> bool:
        try:
            self._socket.send(protocol.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _watch(self) -> None:
        while self._monitor.poll(0):
            event, _ = next_event(self._monitor)
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise EngineUnreachableError(
                    f"the engine at {self.address} does not know this key", "copy its public half to the engine's known/ folder"
                )
            if event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                raise EngineUnreachableError(
                    f"the handshake with {self.address} failed",
                    "its key is not the one in engine.pub, or only one side has --keys",
                )
            if event == zmq.EVENT_DISCONNECTED:
                self._welcomed = False
                self._next_hello = 0.0
