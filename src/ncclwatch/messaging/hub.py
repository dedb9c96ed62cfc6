"""The engine's side: one socket for all agents and viewers; everything it hears is bounded, counted, and handed on as batches."""

from __future__ import annotations

import contextlib
import resource
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass

import zmq

from ncclwatch import __version__
from ncclwatch.errors import NcclwatchError, UsageError
from ncclwatch.messaging import packing, protocol
from ncclwatch.messaging.doorkeeper import DOMAIN, Doorkeeper
from ncclwatch.messaging.keys import Key, KnownKeys, job_of
from ncclwatch.messaging.limits import APART, FormatError
from ncclwatch.messaging.lines import Lines
from ncclwatch.messaging.lives import FORGET_PEER_S, MAX_LIVES, READERS_OF_A_HOST, Life, forget
from ncclwatch.messaging.monitor import next_event
from ncclwatch.messaging.protocol import (
    Ack,
    Batch,
    CountWork,
    Farewell,
    Hello,
    History,
    NeedKey,
    Ping,
    Pong,
    Refused,
    View,
    Welcome,
)
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.transport import HubCounts, Take
from ncclwatch.messaging.values import Shared
from ncclwatch.model.work import WorkOrder

MAX_PEERS = 20_000
MAX_BAD = 50
"""Messages that make no sense after which a peer is not read any more."""
ACK_EVERY = 8
ACK_WITHIN_S = 0.25
PER_POLL = 2000
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
RECEIVE_QUEUE = 2 * 64


@dataclass(slots=True)
class Peer:
    """One connection that said hello."""

    name: str
    role: str
    job: str
    host: str
    heard: float
    user: str = ""
    bad: int = 0
    refused: bool = False


@dataclass(slots=True)
class _Life(Life):
    """Of an agent that is heard over connections of ours."""

    unacknowledged: int = 0
    last_ack: float = 0.0
    peer: bytes = b""


class Hub:
    """Listens at ``address``. ``keys`` are the engine's own key and those it knows; without them only loopback is allowed."""

    def __init__(self, address: str, take: Take, *, keys: tuple[Key, KnownKeys] | None = None) -> None:
        if keys is None and not protocol.is_loopback(address):
            raise UsageError(
                f"{address} can be reached from other machines, and there are no keys",
                "make keys with 'ncclwatch keys make' and give --keys, or bind to 127.0.0.1",
            )
        _raise_file_limit()
        self.counts = HubCounts()
        self.engine = secrets.token_hex(8)
        self.peers: OrderedDict[bytes, Peer] = OrderedDict()
        self._take = take
        self._lines = Lines()
        self._lives: OrderedDict[str, _Life] = OrderedDict()
        self._shared = Shared()
        self._next_sweep = 0.0
        self._next_acks = 0.0
        self._heard = self._emptied = time.monotonic()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 1023)
        self.door = Doorkeeper(self._context, keys[1] if keys else None)
        self._router = self._open(address, keys[0] if keys else None)
        self._monitor = self._router.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._poller = zmq.Poller()
        for socket in (self._router, self.door.socket, self._monitor):
            self._poller.register(socket, zmq.POLLIN)
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise NcclwatchError(f"cannot listen at {address}: {error.strerror}", "choose another address with --bind") from error
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _open(self, address: str, key: Key | None) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        router.setsockopt(zmq.SNDHWM, 256)
        router.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE)
        router.setsockopt(zmq.BACKLOG, 4096)
        router.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        router.setsockopt(zmq.HEARTBEAT_IVL, int(protocol.HEARTBEAT_S * 1000))
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(protocol.SILENCE_S * 1000))
        if address.startswith("tcp://["):
            router.setsockopt(zmq.IPV6, 1)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        if key is not None:
            router.curve_server, router.curve_secretkey, router.curve_publickey = True, key.secret, key.public
        return router

    # --- the loop's part -----------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> int:
        """Hear what there is, waiting at most ``timeout_s`` for the first; returns how many messages were taken."""
        self._poller.poll(max(0, int(timeout_s * 1000)))
        self._heard = time.monotonic()
        self.door.answer()
        self._count_failures()
        taken = 0
        while taken < PER_POLL:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            taken += 1
            self._hear(frames)
            if taken % 64 == 0:
                self.door.answer()
        if taken < PER_POLL:
            self._emptied = time.monotonic()
        self._tidy()
        return taken

    @property
    def npeers(self) -> int:
        """Agents and viewers that said hello and were heard of late."""
        return len(self.peers)

    @property
    def unheard_s(self) -> float:
        """For how long there has always been more to hear than was heard; 0 while everything is."""
        return max(0.0, self._heard - self._emptied)

    def take_news(self) -> list[str]:
        """Lines about what was turned away, each kind at most once a minute."""
        for text in self.door.news:
            self._lines.tell("key", text)
        self.door.news.clear()
        self.counts.refused_keys = self.door.refused
        return self._lines.take()

    def tell(self, kind: str, text: str) -> None:
        """Say something with the next news, each kind at most once a minute."""
        self._lines.tell(kind, text)

    def viewers(self, job: str) -> list[bytes]:
        """Connections that want to see a job."""
        return [route for route, peer in self.peers.items() if peer.role == "viewer" and peer.job == job and not peer.refused]

    def show(self, job: str, payload: bytes) -> None:
        """Send a view to all viewers of a job; to one that does not read it is dropped."""
        for route in self.viewers(job):
            self._send(route, View(), payload)

    def order(self, number: str, order: WorkOrder) -> bool:
        """Send an order to the agent of this life; whether it could be sent."""
        life = self._lives.get(number)
        if life is None or life.peer not in self.peers:
            return False
        return self._send(life.peer, CountWork.of(order))

    def ease(self, number: str, *, well: bool, narrow: bool = False) -> None:
        """Say with the next acknowledgement of this life whether few looks at its node will do, or more are wanted."""
        life = self._lives.get(number)
        if life is not None:
            life.well, life.narrow = well, narrow

    def close(self) -> None:
        """Tell everybody and let go."""
        for route in self.peers:
            self._send(route, Farewell())
        self._router.close(linger=200)
        self._monitor.close(linger=0)
        self.door.close()
        self._context.destroy(linger=200)

    # --- hearing -------------------------------------------------------------------------------------------------------

    def _hear(self, frames: list[zmq.Frame]) -> None:
        route = bytes(frames[0].buffer)
        peer = self.peers.get(route)
        if peer is not None and peer.refused:
            return
        try:
            if not 2 <= len(frames) <= 3:
                raise FormatError(f"a message of {len(frames)} frames")
            message = protocol.decode(frames[1].buffer)
            user = _user(frames[0]) if isinstance(message, Hello) or peer is not None else ""
            if isinstance(message, Hello):
                self._greet(route, message, user)
                return
            if peer is None or peer.user != user:
                # It spoke to an engine before us, or was forgotten: then it says hello again.
                self._send(route, Farewell())
                return
            peer.heard = time.monotonic()
            payload = frames[2].buffer if len(frames) == 3 else None
            self._answer(route, peer, message, payload)
        except FormatError as error:
            self._bad(route, peer, error)

    def _bad(self, route: bytes, peer: Peer | None, error: FormatError) -> None:
        self.counts.bad += 1
        who = f"{peer.role} {peer.name or peer.host}" if peer is not None else "a peer"
        self._lines.tell(f"bad {who}", f"{who} sent something that makes no sense: {error.message}")
        if peer is not None:
            peer.bad += 1
            if peer.bad >= MAX_BAD:
                peer.refused = True
                self.counts.refused_peers += 1
                self._lines.tell(f"deaf {who}", f"{who} is not listened to any more on this connection")
                self._send(route, Refused("too many messages that make no sense"))

    def _greet(self, route: bytes, hello: Hello, user: str) -> None:
        role, _, name = user.partition(":")
        if hello.role not in ("agent", "viewer") or (role == "viewer" and hello.role == "agent"):
            raise FormatError(f"a {role or 'peer'} that wants to speak as {hello.role[:20]}")
        if len(self.peers) >= MAX_PEERS and route not in self.peers:
            self._send(route, Refused("this engine has as many peers as it takes", "run another engine"))
            self.counts.refused_peers += 1
            return
        peer = Peer(name, hello.role, job_of(hello.token), hello.host[:64], time.monotonic(), user)
        self.peers[route] = peer
        if abs(hello.format - packing.VERSION) > 1:
            self.counts.refused_peers += 1
            line = f"format {hello.format} of ncclwatch {hello.release[:20]} cannot be read here (format {packing.VERSION})"
            self._lines.tell(f"version {peer.host}", f"{peer.role} on {peer.host} is refused: {line}")
            self._send(route, Refused(line, APART))
            peer.refused = True
            return
        upto = {}
        for life in hello.lives[-8:] if hello.role == "agent" else ():
            known = self._lives.get(life)
            # A life belongs to the job it began in: nobody can add to another job by naming its lives.
            upto[life] = known.upto if known is not None and known.job == peer.job else -1
        self._send(route, Welcome(self.engine, __version__, packing.VERSION, upto))

    def _answer(self, route: bytes, peer: Peer, message: protocol.Message, payload: memoryview | None) -> None:
        if isinstance(message, Ping):
            received = time.time_ns()
            self._send(route, Pong(message.sent_ns, received, time.time_ns()))
        elif isinstance(message, Batch | History):
            if peer.role != "agent" or payload is None:
                raise FormatError("a batch from somebody who is no agent, or without its payload")
            self._take_batch(route, peer, message, payload)
        elif isinstance(message, Farewell):
            self.peers.pop(route, None)
        else:
            raise FormatError(f"a message only an engine sends ({type(message).__name__})")

    def _take_batch(self, route: bytes, peer: Peer, message: Batch | History, payload: memoryview) -> None:
        life = self._life(message.life, peer)
        life.peer, life.heard = route, peer.heard
        self.counts.nbytes += len(payload)
        if isinstance(message, History):
            if life.upto < 0:
                decoded = BatchReader(self._shared).decode(payload)
                self._take(life.job, message.life, decoded.batch)
            return
        if message.n <= life.upto:
            self.counts.duplicates += 1
            self._acknowledge(message.life, life)
            return
        # A batch that makes no sense is acknowledged all the same: sent again it would make no more.
        life.upto = message.n
        life.unacknowledged += 1
        decoded = life.reader.decode(payload)
        self.counts.batches += 1
        if decoded.needs_key and peer.heard - life.asked_key > 1.0:
            life.asked_key = peer.heard
            self.counts.keys_asked += 1
            self._send(route, NeedKey())
        self._take(life.job, message.life, decoded.batch)
        if life.unacknowledged >= ACK_EVERY:
            self._acknowledge(message.life, life)

    def _life(self, number: str, peer: Peer) -> _Life:
        life = self._lives.get(number)
        if life is None:
            if not 0 < len(number) <= 64:
                raise FormatError("a life without a name")
            if len(self._lives) >= MAX_LIVES:
                self._lives.popitem(last=False)
            life = self._lives[number] = _Life(peer.job, peer.host, BatchReader(self._shared), peer.heard)
        elif life.job != peer.job:
            raise FormatError("a batch of an agent of another job")
        self._lives.move_to_end(number)
        return life

    def _acknowledge(self, number: str, life: _Life) -> None:
        if self._send(life.peer, Ack(number, life.upto, life.well, life.narrow)):
            life.unacknowledged = 0
            life.last_ack = time.monotonic()

    def _send(self, route: bytes, message: protocol.Message, payload: bytes | None = None) -> bool:
        frames = [route, protocol.encode(message)] + ([payload] if payload is not None else [])
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    # --- housekeeping --------------------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        now = time.monotonic()
        if now >= self._next_acks:
            self._next_acks = now + ACK_WITHIN_S
            for number, life in self._lives.items():
                if life.unacknowledged:
                    self._acknowledge(number, life)
        if now < self._next_sweep:
            return
        self._next_sweep = now + 10.0
        for route in [route for route, peer in self.peers.items() if now - peer.heard > FORGET_PEER_S]:
            del self.peers[route]
        forget(self._lives, now, READERS_OF_A_HOST)

    def _count_failures(self) -> None:
        while self._monitor.poll(0):
            next_event(self._monitor)
            self.counts.failed_handshakes += 1
            self._lines.tell("handshake", "a peer was turned away: no key, the wrong engine key, or it does not speak ZeroMQ")


def _user(frame: zmq.Frame) -> str:
    with contextlib.suppress(zmq.ZMQError, KeyError):
        found = frame.get("User-Id")
        return found if isinstance(found, str) else ""
    return ""


def _raise_file_limit() -> None:
    """A connection is a file descriptor; the usual limit is 1,024."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536, hard))
