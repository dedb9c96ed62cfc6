"""The conversation of two probes over TCP: short JSON messages, and proof that both know the same token.

A message is four bytes of length (big endian) and JSON of at most ``MAX_MESSAGE`` bytes. The listener begins with a nonce; the
caller answers with a nonce of its own and a MAC over both, the listener with its own MAC: HMAC-SHA-256 under the shared token,
over a label that tells the two sides apart. Nothing else is read from a caller before its MAC is right.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from typing import Any

from ncclwatch.errors import NcclwatchError

PROTOCOL = "ncclwatch-probe/1"
MAX_MESSAGE = 4096
NONCE_BYTES = 32
_LENGTH = struct.Struct(">I")


class ChannelError(NcclwatchError):
    """The other side said something that is not our protocol, too much of it, or nothing in time."""


class AuthenticationError(ChannelError):
    """The two sides do not share a token."""


class Channel:
    """One connection; every operation ends by ``deadline`` (``time.monotonic``), which a slow sender of single bytes cannot
    move.
    """

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._socket = connection
        self.deadline = deadline

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise ChannelError("a message is too long")
        self._limit()
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> dict[str, Any]:
        """The next message; raises :class:`ChannelError`, :class:`TimeoutError` and :class:`OSError`."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if not 0 < length <= MAX_MESSAGE:
            raise ChannelError("the other side does not speak ncclwatch's probe protocol", "is the port right?")
        try:
            message = json.loads(self._exactly(length))
        except (ValueError, RecursionError):
            raise ChannelError("the other side does not speak ncclwatch's probe protocol", "is the port right?") from None
        if not isinstance(message, dict):
            raise ChannelError("the other side does not speak ncclwatch's probe protocol", "is the port right?")
        return message

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._limit()
            part = self._socket.recv(size - len(data))
            if not part:
                raise ConnectionResetError("the other side closed the connection")
            data += part
        return data

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)


def admit(channel: Channel, token: bytes) -> None:
    """The listener's side of the greeting; raises :class:`AuthenticationError` for a caller that does not know the token."""
    mine = os.urandom(NONCE_BYTES)
    channel.send({"protocol": PROTOCOL, "nonce": mine.hex()})
    answer = channel.receive()
    theirs = _nonce(answer)
    if not _is_mac(_mac(token, b"caller", mine, theirs), answer):
        channel.send({"error": "token"})
        raise AuthenticationError("a caller does not know the token")
    channel.send({"mac": _mac(token, b"listener", mine, theirs)})


def greet(channel: Channel, token: bytes) -> None:
    """The caller's side; raises :class:`AuthenticationError` when either side does not know the token."""
    hello = channel.receive()
    if hello.get("protocol") != PROTOCOL:
        raise ChannelError("the other side does not speak ncclwatch's probe protocol", "is the port right?")
    theirs, mine = _nonce(hello), os.urandom(NONCE_BYTES)
    channel.send({"nonce": mine.hex(), "mac": _mac(token, b"caller", theirs, mine)})
    answer = channel.receive()
    if not _is_mac(_mac(token, b"listener", theirs, mine), answer):
        raise AuthenticationError(
            "the other side does not share our token", "give both the same --token-file or NCCLWATCH_PROBE_TOKEN"
        )


def _nonce(message: dict[str, Any]) -> bytes:
    try:
        nonce = bytes.fromhex(str(message.get("nonce", "")))
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise ChannelError("the other side does not speak ncclwatch's probe protocol", "is the port right?")
    return nonce


def _is_mac(mine: str, answer: dict[str, Any]) -> bool:
    # As bytes: of text compare_digest takes ASCII only, and this is whatever the other side says.
    return hmac.compare_digest(mine.encode(), str(answer.get("mac", "")).encode("utf-8", "replace"))


def _mac(token: bytes, side: bytes, listener: bytes, caller: bytes) -> str:
    # The token is of any length; the labels and nonces are of fixed length or separated by it.
    return hmac.new(token, PROTOCOL.encode() + b"\0" + side + b"\0" + listener + caller, hashlib.sha256).hexdigest()
