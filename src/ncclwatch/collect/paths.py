"""Probes of paths that stand still, by this node itself: with sockets and queue pairs of its own, never by way of the job.

Only where the user allows it, only when the engine orders it, and only while the processes stand (``collect.ordering``). Each
probe is a process that ends by itself; here it is only started and heard. With a token, probes of other nodes are answered too.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from ncclwatch.collect.batch import PlaneState
from ncclwatch.collect.step_rates import ConnectionKey
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.network import FlowRecord, PathAnswer
from ncclwatch.model.work import FlowWindow
from ncclwatch.pathprobe.outcome import Answer
from ncclwatch.probes.capabilities import inherited
from ncclwatch.text import clean

if TYPE_CHECKING:
    from ncclwatch.pathprobe.listener import Listener

PORT = 28050
"""Where probes of other nodes are answered, unless the user says otherwise."""
MOST_PATHS = 4
"""Paths that are probed for one order."""
SECONDS = 8.0
"""How long an answer is waited for. TCP asks for a connection after 0, 1, 3 and 7 s: where a tenth is lost both ways, one such
row in a thousand goes unanswered."""
ENDS_S = 20.0
"""A probe that still runs after that is ended."""
KEPT_NS = 120_000_000_000
"""An answer older than this is not told any more."""


class StuckPath(NamedTuple):
    """A connection that stands still: the far end's address, and the RDMA device it leaves by (empty: a socket)."""

    key: ConnectionKey
    address: str
    device: str = ""


@dataclass(slots=True)
class _Probe:
    process: subprocess.Popen[bytes]
    address: str
    keys: list[ConnectionKey]
    until: float


@dataclass(slots=True)
class PathProbes:
    """Starts probes and keeps their answers. ``token`` is the secret that nodes share; without, nobody is answered here."""

    token: bytes = b""
    port: int = PORT
    reason: str = ""
    """Why probes of other nodes are not answered; empty while they are, or where there is no token."""
    _listener: Listener | None = None
    _running: list[_Probe] = field(default_factory=list)
    _answers: dict[ConnectionKey, PathAnswer] = field(default_factory=dict)

    def listen(self) -> None:
        """Answer probes of other nodes, where there is a token."""
        if self.token and self._listener is None:
            from ncclwatch.pathprobe.listener import Listener

            try:
                self._listener = Listener("0.0.0.0", self.port, self.token)  # noqa: S104 - callers must know the token
            except NcclwatchError as error:
                self.reason = clean(str(error), 200)

    @property
    def plane(self) -> PlaneState:
        """That paths are probed here when that is ordered."""
        return PlaneState("paths", True, self.reason)

    def order(self, paths: Iterable[StuckPath]) -> int:
        """Begin to probe these paths, each way to an address once; how many probes were begun."""
        self.take()
        if self._running:
            return 0
        ways: dict[tuple[int, str, str], list[ConnectionKey]] = {}
        for path in paths:
            ways.setdefault((path.key[0], path.address, path.device), []).append(path.key)
        for (pid, address, device), keys in list(ways.items())[:MOST_PATHS]:
            command = [sys.executable, "-P", "-m", "ncclwatch.pathprobe.child", f"/proc/{pid}/ns/net", address, str(self.port)]
            # Ctrl-C is not for it, hence a group of its own. Not a session: that would be a scheduling group of its own, too
            # (autogroup), and on full cores such a probe was seen to get no CPU for 20 s.
            with contextlib.suppress(OSError), inherited():
                process = subprocess.Popen(
                    [*command, device, str(SECONDS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    process_group=0,
                )  # fmt: skip
                self._running.append(_Probe(process, address, keys, time.monotonic() + ENDS_S))
                assert process.stdin is not None  # noqa: S101 - a pipe was asked for
                with process.stdin as stream:
                    stream.write(self.token)
        return len(self._running)

    def take(self) -> None:
        """Hear the probes that have ended, and end those that do not."""
        for probe in list(self._running):
            if probe.process.poll() is None:
                if time.monotonic() < probe.until:
                    continue
                probe.process.kill()
                probe.process.wait()
            self._running.remove(probe)
            answer = _heard(probe)
            if answer is not None:
                self._answers |= dict.fromkeys(probe.keys, answer)

    def joined(self, records: Iterable[FlowRecord], now_ns: int) -> tuple[FlowRecord, ...]:
        """Connections with what was answered on their path of late."""
        self.take()
        self._answers = {key: answer for key, answer in self._answers.items() if now_ns - answer.time_ns < KEPT_NS}
        return tuple(self._joined(record) for record in records)

    def _joined(self, record: FlowRecord) -> FlowRecord:
        key = key_of(record)
        answer = self._answers.get(key) if key is not None else None
        return replace(record, path=answer) if answer is not None else record

    def close(self) -> None:
        """End every probe, and answer nobody."""
        for probe in self._running:
            probe.process.kill()
            probe.process.wait()
        self._running.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _heard(probe: _Probe) -> PathAnswer | None:
    """What a probe that has ended says; ``None`` where it could not probe, which says nothing of the path."""
    assert probe.process.stdout is not None  # noqa: S101 - a pipe was asked for
    with probe.process.stdout as stream:
        said = stream.read()
    try:
        outcome = json.loads(said)
        answer, trips = Answer(outcome["answer"]), sorted(map(float, outcome["round_trips"]))
        detail, kind = clean(str(outcome["detail"]), 200), clean(str(outcome["kind"]), 10)
    except (ValueError, KeyError, TypeError):
        return None
    if answer.path_is_alive is None:
        return None
    middle = trips[len(trips) // 2] * 1e6 if trips else None
    now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return PathAnswer(now_ns, probe.address, answer.path_is_alive, kind, str(answer), detail, middle)


def key_of(flow: FlowWindow | FlowRecord) -> ConnectionKey | None:
    """The connection of a flow, where it is known."""
    if flow.comm_hash is None or flow.direction is None:
        return None
    place = (flow.pid, flow.comm_hash, flow.rank or 0, flow.channel or 0, flow.peer or 0)
    return *place, flow.direction, flow.connection_index or 0
