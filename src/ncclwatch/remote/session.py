"""A session on the other side of a network: what an engine sends of a job, shown by the surfaces of ``attach``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import zmq

from ncclwatch import __version__
from ncclwatch.collect.batch import Overhead, PlaneState
from ncclwatch.collect.watched import Problem
from ncclwatch.collect.windows import RankWindow
from ncclwatch.engine.session import Update
from ncclwatch.errors import NcclwatchError
from ncclwatch.messaging import packing, protocol
from ncclwatch.messaging.keys import Key
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.monitor import next_event
from ncclwatch.messaging.protocol import Farewell, Hello, Ping, Refused, View, Welcome
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.model.verdict import Verdict
from ncclwatch.remote.iterations import Timed
from ncclwatch.remote.job_view import JobView, ViewReader
from ncclwatch.stopping import Stop

CONNECT_S = 10.0
FIRST_VIEW_S = 10.0
HELLO_EVERY_S = 2.0
PING_EVERY_S = 5.0
SILENT_S = 5.0


class EngineUnreachableError(NcclwatchError):
    """No engine answers, or it does not take us."""


class RemoteSession:
    """Follows one job of an engine."""

    def __init__(self, address: str, *, keys: tuple[Key, bytes] | None = None, token: str = "", stop: Stop | None = None) -> None:
        self.address = address
        self.stop = stop or Stop()
        self.verdicts: Sequence[Verdict] = ()
        self.windows: Sequence[RankWindow] = ()
        self.samples: Mapping[ProcessKey, ProcessSample] = {}
        self.planes: Sequence[PlaneState] = ()
        self.problems: Sequence[Problem] = ()
        self.view: JobView | None = None
        self.iterations: Sequence[Timed] = ()
        self.roles: Mapping[int, str] = {}
        self.layout = ""
        self.lost = 0
        self._overhead: Overhead | None = None
        self._token = token
        self._reader = ViewReader()
        self._notes: list[str] = []
        self._heard = 0.0
        self._told_silence = False
        self._next_hello = self._next_ping = 0.0
        self._welcomed = False
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

    # --- what surfaces ask ---------------------------------------------------------------------------------------------

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that stands, of the worst job."""
        return self.verdicts[0] if self.verdicts else None

    @property
    def infos(self) -> list[ProcessInfo]:
        """The processes that are watched."""
        return [window.process for window in self.windows]

    def overhead(self) -> Overhead | None:
        """What watching costs, on the node where it costs most."""
        return self._overhead

    @property
    def is_silent(self) -> bool:
        """Whether the engine has said nothing for so long that what is shown is old."""
        return time.monotonic() - self._heard > SILENT_S

    # --- beginning, steps, end -----------------------------------------------------------------------------------------

    def start(self, duration: float | None = None) -> None:
        """Connect and wait for the first view. Raises when no engine answers; a job nobody sends of yet is waited for."""
        began = time.monotonic()
        limit = began + CONNECT_S
        while not self._welcomed and not self.stop.is_set():
            if time.monotonic() > limit:
                raise EngineUnreachableError(
                    f"no engine answers at {self.address}",
                    "see that 'ncclwatch engine' runs there and has the same keys",
                )
            self._hear(0.1)
        patience = FIRST_VIEW_S if duration is None else min(duration, FIRST_VIEW_S)
        while self.view is None and not self.stop.is_set():
            self._hear(0.1)
            if time.monotonic() - began > patience:
                self._notes.append("the engine has heard no agent of this job yet")
                return

    def step(self, *, until: float | None = None) -> Update:
        """Wait for the next view, at most a moment."""
        left = 0.25 if until is None else max(0.0, min(0.25, until - time.monotonic()))
        update = self._hear(left) or Update(time.monotonic_ns())
        update.notes += self._notes
        self._notes = []
        silent = self.is_silent
        if silent and not self._told_silence:
            update.notes.append("the engine says nothing: what is shown is old")
        self._told_silence = silent
        if self.stop.is_set():
            update.finished = "interrupted"
        elif until is not None and time.monotonic() >= until:
            update.finished = "duration over"
        return update

    def close(self) -> None:
        """Leave."""
        self._send(Farewell())
        self._socket.close(linger=100)
        self._monitor.close(linger=0)
        self._context.destroy(linger=100)

    # --- the connection ------------------------------------------------------------------------------------------------

    def _send(self, message: protocol.Message) -> bool:
        try:
            self._socket.send(protocol.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _hear(self, timeout_s: float) -> Update | None:
        now = time.monotonic()
        if not self._welcomed and now >= self._next_hello:
            if self._send(Hello(__version__, packing.VERSION, "viewer", token=self._token)):
                self._next_hello = now + HELLO_EVERY_S
        elif self._welcomed and now >= self._next_ping:
            self._next_ping = now + PING_EVERY_S
            self._send(Ping(time.time_ns()))
        self._watch()
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        frames = self._socket.recv_multipart()
        try:
            message = protocol.decode(frames[0])
            if isinstance(message, View) and len(frames) == 2:
                return self._show(frames[1])
        except FormatError as error:
            self._notes.append(f"the engine said something that makes no sense: {error.message}")
            return None
        if isinstance(message, Welcome):
            self._welcomed = True
            self._heard = time.monotonic()
        elif isinstance(message, Refused):
            raise EngineUnreachableError(f"the engine at {self.address} refuses: {message.reason}", message.hint)
        elif isinstance(message, Farewell):
            self._welcomed = False
        return None

    def _show(self, payload: bytes) -> Update | None:
        self._heard = time.monotonic()
        found = self._reader.decode(payload)
        if found is None:
            return None
        self.view, batch, update = found
        self.verdicts, self.windows, self.lost = update.verdicts, update.windows or (), update.lost
        self.samples = {sample.process.key: sample for sample in batch.samples}
        self.planes = batch.planes
        self.iterations, self.roles, self.layout = self.view.iterations, self.view.roles, self.view.layout
        self._overhead = batch.overhead or self._overhead
        return update

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
