"""Asks a running job's RAS service (a thread of NCCL in every process) for its status, as NCCL's own ``ncclras`` does.

The service was seen to crash the job it belongs to, so nothing here runs unless somebody names the address. Protocol: NCCL
``src/ras/client_support.cc``, ``rasClientEventLoop`` (2.24.3 and later): lines; whoever knows a command answers ``OK``.
"""

from __future__ import annotations

import socket
import time
from typing import NamedTuple

from ncclwatch.errors import TargetError, UsageError

PORT = 28028
"""NCCL_RAS_CLIENT_PORT (``src/ras/ras_internal.h``, all tags)."""
LEG_TIMEOUT_S = 5
"""How long the service waits for one process at a time, unless it is told otherwise (RAS_COLLECTIVE_LEG_TIMEOUT)."""
EXTRA_S = 10.0
"""Beyond twice that: the service gives a whole collection up after two such times; the rest is for the network and us."""
GREETING_S = 2.0
TRIES = 8
"""All processes of a node listen on one port (SO_REUSEPORT), those that are stopped as well: the kernel gives a connection to any
of them, and the next try to another.
"""
MAX_ANSWER_BYTES = 128 << 20
MAX_LINE_BYTES = 1024

KNOWN_CRASHES = (
    "nccl#1669: 2.26.2, asked while communicators are created",
    "nccl#1718: 2.26.5, asked again and again",
    "nccl#1762: 2.27.3, asked with VERBOSE STATUS",
    "nccl#2346: 2.29.7, communicators created and destroyed while it is asked",
)
"""Reports of jobs that crashed when their RAS service was asked: none of them names a release in which it cannot happen."""


class Address(NamedTuple):
    """Where a RAS service listens."""

    host: str
    port: int


def parse_address(text: str) -> Address:
    """``host``, ``host:port`` or ``[v6]:port``. Raises :class:`UsageError`."""
    hint = f"give HOST:PORT, for example localhost:{PORT} (NCCL_RAS_ADDR of the job says where it listens)"
    host, separator, port = text.rpartition(":")
    if not separator or (":" in host and not host.startswith("[")):
        host, port = text, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 1 << 16:
        raise UsageError(f"{text!r} is no address of a RAS service", hint)
    return Address(host, int(port))


def ask(address: Address, *, leg_timeout_s: int = LEG_TIMEOUT_S, as_json: bool | None = None) -> bytes:
    """The answer of a RAS service: JSON where it can give it (2.28.7 and later), else text with all details.

    ``as_json``: only that form. Takes up to three times ``leg_timeout_s`` (s) where processes do not answer. Raises
    :class:`TargetError` when nobody listens, no RAS service does, or the answer does not end.
    """
    unanswered: OSError | None = None
    for _ in range(TRIES):
        try:
            with socket.create_connection(address, timeout=GREETING_S) as connection:
                talk = _greeted(connection, address)
                return _told(talk, leg_timeout_s, as_json)
        except _NotGreetedError as error:
            unanswered = error
        except OSError as error:
            unanswered = error
            break
    raise TargetError(
        f"the RAS service at {address.host}:{address.port} does not answer: {unanswered}",
        "RAS is in NCCL 2.24 and later and listens on localhost of each node unless NCCL_RAS_ENABLE=0",
    ) from None


class _NotGreetedError(OSError):
    """Who got the connection does not speak: its process may be stopped."""


def _greeted(connection: socket.socket, address: Address) -> _Talk:
    talk = _Talk(connection, time.monotonic() + GREETING_S)
    try:
        answer = talk.say("CLIENT PROTOCOL 2")
    except OSError as error:
        raise _NotGreetedError(str(error)) from None
    if not answer.startswith("SERVER PROTOCOL"):
        raise TargetError(f"{address.host}:{address.port} is no RAS service of NCCL", "check the port")
    return talk


def _told(talk: _Talk, leg_timeout_s: int, as_json: bool | None) -> bytes:
    talk.deadline = time.monotonic() + 2 * leg_timeout_s + EXTRA_S
    talk.say(f"TIMEOUT {leg_timeout_s}")
    json = talk.say("SET FORMAT json") == "OK" if as_json is not False else False
    if as_json and not json:
        raise TargetError("this release's RAS service gives no JSON (2.28.7 and later do)", "ask for text")
    return talk.last("STATUS" if json else "VERBOSE STATUS")


class _Talk:
    """One connection: lines there and back, then everything up to its end."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self.deadline = deadline
        self._read = b""

    def say(self, line: str) -> str:
        """Send a line and return the line that answers it."""
        self._connection.sendall(line.encode() + b"\n")
        while b"\n" not in self._read:
            if len(self._read) > MAX_LINE_BYTES or not (more := self._receive()):
                raise TargetError("what listens there does not answer in lines, as a RAS service of NCCL does", "check the port")
            self._read += more
        answer, _, self._read = self._read.partition(b"\n")
        return answer.decode(errors="replace").strip()

    def last(self, line: str) -> bytes:
        """Send the last line and return everything that comes until the connection is closed."""
        self._connection.sendall(line.encode() + b"\n")
        parts, size = [self._read], len(self._read)
        while more := self._receive():
            parts.append(more)
            size += len(more)
            if size > MAX_ANSWER_BYTES:
                raise TargetError(f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB", "ask `ncclras` and give its file")
        return b"".join(parts)

    def _receive(self) -> bytes:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("its answer does not end")
        self._connection.settimeout(left)
        return self._connection.recv(1 << 16)
