"""What agents, engine and viewers say to each other: a small control message (msgpack, by msgspec), and with some a payload.

A message is one or two ZeroMQ frames: the control message, then the payload. Who speaks first is always the agent or viewer.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from ncclwatch.errors import UsageError
from ncclwatch.messaging.limits import MAX_FRAME, UNDECODABLE, FormatError
from ncclwatch.model.work import WorkOrder
from ncclwatch.text import clean

MAX_MESSAGE = MAX_FRAME + 65536
MAX_CONTROL = 65536
DEFAULT_PORT = 7311

HEARTBEAT_S = 2.0
SILENCE_S = 8.0
"""ZeroMQ's own heartbeats, and after how long without one a connection counts as broken."""


class Hello(msgspec.Struct, tag="hello"):
    """The first message of an agent or viewer. ``lives`` are those of which it holds batches, oldest first, its own last."""

    release: str
    format: int
    role: str
    host: str = ""
    token: str = ""
    lives: list[str] = []


class Welcome(msgspec.Struct, tag="welcome"):
    """The engine takes it. ``upto``: the number of the last batch it has, for each of the lives; -1 for one it does not know."""

    engine: str
    release: str
    format: int
    upto: dict[str, int] = {}


class Refused(msgspec.Struct, tag="refused"):
    """The engine does not take it; nothing further is read from it on this connection."""

    reason: str
    hint: str = ""


class Batch(msgspec.Struct, tag="batch"):
    """Payload: an encoded batch, number ``n`` of a life of an agent."""

    life: str
    n: int


class History(msgspec.Struct, tag="history"):
    """Payload: a key batch with the calls before the first batch the agent still has, for an engine that has begun anew."""

    life: str


class Ack(msgspec.Struct, tag="ack"):
    """The engine has every batch of a life up to ``upto``. ``well``: all goes well on the node, and few looks will do
    (:mod:`ncclwatch.collect.ease`); ``None``, from an older engine, says nothing. ``narrow``: more looks are wanted, for a
    culprit is looked for.
    """

    life: str
    upto: int
    well: bool | None = None
    narrow: bool = False


class NeedKey(msgspec.Struct, tag="need-key"):
    """A batch built on one that the engine does not have: send a key batch next."""


class Ping(msgspec.Struct, tag="ping"):
    """For the clocks: ``sent_ns`` is the sender's CLOCK_REALTIME."""

    sent_ns: int


class Pong(msgspec.Struct, tag="pong"):
    """Answer: the engine's CLOCK_REALTIME when the ping came and when this was sent."""

    sent_ns: int
    received_ns: int
    answered_ns: int


class View(msgspec.Struct, tag="view"):
    """Payload: what a job looks like now (``messaging/view.py``)."""


class Farewell(msgspec.Struct, tag="farewell"):
    """The speaker goes away on purpose."""


class CountWork(msgspec.Struct, tag="count-work"):
    """From an engine: count the work requests of these processes now (:class:`ncclwatch.model.work.WorkOrder`), and probe the
    paths on which they stand still. The agent does so as far as its own options allow; the windows come in a batch under this
    number, the answers of probes with the connections. Only sent to agents that say that their wire plane runs, or that they
    probe paths: older ones do not know it.
    """

    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    pids: Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]], msgspec.Meta(min_length=1, max_length=64)]
    standing: bool = False
    look: bool = False
    """Nothing is counted: where they stand is looked at, and the state of the node's GPUs. For agents that say that they do."""

    @classmethod
    def of(cls, order: WorkOrder) -> CountWork:
        """An engine's order to one agent."""
        return cls(order.number, list(order.pids), order.standing, order.look)

    def order(self, host: str) -> WorkOrder:
        """The order that an agent of ``host`` has heard."""
        return WorkOrder(self.number, host, tuple(self.pids), self.standing, self.look)


Message = Hello | Welcome | Refused | Batch | History | Ack | NeedKey | Ping | Pong | View | CountWork | Farewell

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """A control message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """A control message; raises ``FormatError``."""
    if len(data) > MAX_CONTROL:
        raise FormatError(f"a control message of {len(data)} bytes is more than the {MAX_CONTROL} allowed")
    try:
        found: Message = _decoder.decode(data)
    except UNDECODABLE as error:
        raise FormatError(f"this is no message of ncclwatch: {error}") from error
    return found


def endpoint(text: str, *, bind: bool = False) -> str:
    """``tcp://HOST:PORT`` (or ``ipc://FILE``) as ZeroMQ takes it; scheme and port may be left out. Raises ``UsageError``."""
    if text.startswith("ipc://") and len(text) > 6:
        return text
    whole = text if "://" in text else f"tcp://{text}"
    try:
        parts = urlsplit(whole)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORT
    except ValueError:
        host, port = "", 0
    if parts_are_odd(whole) or not host or not 0 < port < 65536:
        example = "tcp://0.0.0.0:7311" if bind else "tcp://engine-host:7311"
        raise UsageError(f"'{clean(text, 100)}' is no address of an engine", f"write it like {example}")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def parts_are_odd(text: str) -> bool:
    """Whether there is anything but a scheme, a host and a port."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return True
    return parts.scheme != "tcp" or bool(parts.path.strip("/") or parts.query or parts.fragment or parts.username)


def is_loopback(address: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if address.startswith("ipc://"):
        return True
    host = urlsplit(address).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
