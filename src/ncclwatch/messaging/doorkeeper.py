"""Who may speak to an engine: answers ZeroMQ's authentication requests (ZAP, RFC 27) from the folder of known keys."""

from __future__ import annotations

import zmq
from zmq.utils import z85

from ncclwatch.messaging.keys import KnownKeys

ZAP = "inproc://zeromq.zap.01"
DOMAIN = b"ncclwatch"


class Doorkeeper:
    """Takes peers with a known key; counts and remembers the others. With ``known`` ``None`` everybody is taken (loopback)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], known: KnownKeys | None) -> None:
        self._known = known
        self.refused = 0
        self.news: list[str] = []
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP)

    def answer(self) -> None:
        """Answer one request, if there is one."""
        if not self.socket.poll(0):
            return
        request = self.socket.recv_multipart()
        if len(request) < 6:
            self.socket.send_multipart([b"1.0", b"", b"500", b"bad request", b"", b""])
            return
        version, number, _domain, address, _identity, mechanism, *credentials = request
        user = self._user(mechanism, credentials, address)
        status = (b"200", b"OK") if user is not None else (b"400", b"unknown key")
        self.socket.send_multipart([version, number, *status, user or b"", b""])

    def _user(self, mechanism: bytes, credentials: list[bytes], address: bytes) -> bytes | None:
        """``role:name`` of a peer, ``None`` for one that is not taken."""
        if self._known is None:
            return b"local:" if mechanism == b"NULL" else None
        if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            key = self._known.find(z85.encode(credentials[0]))
            if key is not None:
                return f"{key.role}:{key.name}".encode()
        self.refused += 1
        self.news.append(f"a peer at {address.decode('ascii', 'replace')[:64]} was refused: its key is not known here")
        del self.news[:-20]
        return None

    def close(self) -> None:
        """Let go of the socket."""
        self.socket.close(linger=0)
