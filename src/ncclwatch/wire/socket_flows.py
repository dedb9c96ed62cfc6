"""What the TCP sockets of a connection do, judged from successive looks at the kernel's own measurements (TCP_INFO).

The measure of the wire is bytes over the time in which there was something to send (``tcpi_busy_time``): a job that computes for
a while does not look slow. The kernel also tells who stands still: a sender whose segments nobody acknowledges, with one
retransmission timeout after another, has a dead path; one whose peer's window is full has a peer that does not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ncclwatch.model.network import FlowState, SocketFacts
from ncclwatch.model.state import Direction
from ncclwatch.nic.sockets import TcpSocket

STALL_MS = 500
"""Nothing acknowledged for this long, with segments outstanding (the threshold of VenusTrace 3.2.2)."""

STALL_TIMEOUTS = 2
"""…and so many retransmission timeouts in a row: a single lost segment is daily bread."""

SLOW_SHARE = 0.2
LEARNING = 8
"""Loaded windows before the throughput of a connection is judged."""
JUDGED = 4
"""Loaded windows whose median is judged: one alone is noise."""
MIN_BUSY_US = 5_000
"""A window with less busy time says nothing about throughput."""
RTT_FACTOR = 2.0
"""A slow wire shows in the round trip too: its queues fill."""
RECENT_NS = 30_000_000_000
"""What was sent again longer ago says nothing about now."""
COUNTED_EVERY_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SocketJudgement:
    """``bandwidth`` and ``expected`` are bytes a second of busy time; ``retransmitted`` segments in the last 30 s.

    ``moved`` are bytes since the connection was made, acknowledged by the other end or received, until ``time_ns`` (monotonic);
    ``busy_us`` is for how long the busiest of its sockets has had something to send.
    """

    state: FlowState
    reason: str
    facts: SocketFacts | None
    bandwidth: float | None
    expected: float | None
    retransmitted: int | None
    moved: int = 0
    time_ns: int = 0
    busy_us: int = 0


@dataclass
class SocketWatch:
    """Successive looks at the sockets of one connection, one direction."""

    direction: Direction
    _retransmits: deque[tuple[int, int]] = field(default_factory=deque)
    """(time, count so far), the oldest of which is as old as what is recent."""
    _last: tuple[int, int, int] | None = None
    _moved_ns: int | None = None
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=JUDGED))
    _baseline: deque[float] = field(default_factory=lambda: deque(maxlen=LEARNING))
    _usual_rtt: list[int] = field(default_factory=list)
    _bandwidth: float | None = None
    _since_ns: int = 0

    def look(self, sockets: Sequence[TcpSocket], now_ns: int) -> SocketJudgement:
        """Judge the sockets as they are at ``now_ns`` (CLOCK_MONOTONIC)."""
        if not sockets:
            return SocketJudgement(FlowState.UNKNOWN, "its sockets cannot be told apart from others", None, None, None, None)
        facts = summarise(sockets)
        sends = self.direction is Direction.SEND
        moved = sum((s.bytes_acknowledged if sends else s.bytes_received) or 0 for s in sockets)
        busy = sum(s.busy_us or 0 for s in sockets)
        if self._last is None:
            self._since_ns = now_ns
        progressed = self._last is None or moved > self._last[1]
        if self._last is not None:
            self._measure(now_ns, moved, busy, sends)
        if progressed:
            self._moved_ns = now_ns
        first = self._last is None
        self._last = (now_ns, moved, busy)
        retransmitted = self._sent_again(facts.retransmits, now_ns)
        state, reason = self._state(sockets, facts, retransmitted, progressed and not first, now_ns)
        busiest = max(s.busy_us or 0 for s in sockets)
        return SocketJudgement(state, reason, facts, self._bandwidth, self.expected, retransmitted, moved, now_ns, busiest)

    @property
    def expected(self) -> float | None:
        """What this connection usually reaches while it has something to send; ``None`` until that is learned."""
        return _median(self._baseline) if len(self._baseline) == LEARNING else None

    def _sent_again(self, counted: int | None, now_ns: int) -> int | None:
        """Segments retransmitted in the last 30 s, or since the first look."""
        known = self._retransmits
        if counted is None:
            return None
        if known and counted < known[-1][1]:  # other sockets than before
            known.clear()
        if not known or now_ns - known[-1][0] >= COUNTED_EVERY_NS:
            known.append((now_ns, counted))
        while len(known) > 1 and known[1][0] <= now_ns - RECENT_NS:
            known.popleft()
        return counted - known[0][1]

    def _measure(self, now_ns: int, moved: int, busy: int, sends: bool) -> None:
        assert self._last is not None  # noqa: S101 - the caller looked
        then, before, busy_before = self._last
        if moved < before:
            self._last = None
            return
        span_us = (busy - busy_before) if sends else (now_ns - then) / 1000
        if moved == before or span_us <= 0:
            return
        self._bandwidth = (moved - before) * 1e6 / span_us
        if sends and span_us >= MIN_BUSY_US:
            self._rates.append(self._bandwidth)
            # A slow wire must not become the new normal: only the first windows teach.
            if len(self._baseline) < LEARNING:
                self._baseline.append(self._bandwidth)

    def _state(
        self, sockets: Sequence[TcpSocket], facts: SocketFacts, retransmitted: int | None, progressed: bool, now_ns: int
    ) -> tuple[FlowState, str]:
        if self.direction is Direction.SEND:
            stalled = _stalled(sockets)
            if stalled:
                return FlowState.STALLED, stalled
        lossy = f"{retransmitted} segment{'s' if retransmitted != 1 else ''} retransmitted" if retransmitted else ""
        if progressed:
            return self._throughput(facts, lossy)
        still = f"{(now_ns - (self._moved_ns or self._since_ns)) / 1e9:.1f} s"
        if self.direction is Direction.SEND and facts.send_queue:
            if any(s.window_probes for s in sockets) or (facts.window_limited or 0) > 0.5:
                return FlowState.BLOCKED, f"{facts.send_queue} bytes wait: the other end's window is full, it does not read"
            return FlowState.ACTIVE, f"{facts.send_queue} bytes on their way for {still}" + (f"; {lossy}" if lossy else "")
        if self.direction is Direction.RECV and facts.receive_queue:
            return FlowState.BLOCKED, f"{facts.receive_queue} bytes arrived and are not read here"
        return FlowState.IDLE, lossy

    def _throughput(self, facts: SocketFacts, lossy: str) -> tuple[FlowState, str]:
        if facts.rtt_us is not None and len(self._usual_rtt) < LEARNING:
            self._usual_rtt.append(facts.rtt_us)
        expected = self.expected
        if expected is None or len(self._rates) < JUDGED or len(self._usual_rtt) < LEARNING:
            return FlowState.ACTIVE, lossy
        now, usual = _median(self._rates), _median(self._usual_rtt)
        queues = facts.rtt_us is not None and facts.rtt_us > RTT_FACTOR * usual
        if now < expected * (1 - SLOW_SHARE) and (lossy or queues):
            why = f"; round trip {facts.rtt_us} µs where {usual:.0f} µs is usual" if queues else ""
            return FlowState.SLOW, f"{now / 1e6:.1f} MB/s where {expected / 1e6:.1f} is usual{why}" + (
                f"; {lossy}" if lossy else ""
            )
        return FlowState.ACTIVE, lossy


def _stalled(sockets: Sequence[TcpSocket]) -> str:
    """Why the path of a sending socket is thought dead, or ``""``."""
    for one in sockets:
        silent = one.last_acknowledged_ms or 0
        if (one.unacknowledged or 0) > 0 and (one.timeouts or 0) >= STALL_TIMEOUTS and silent >= STALL_MS:
            return (
                f"{one.unacknowledged} segments to {one.peer} unacknowledged for {silent / 1000:.1f} s, "
                f"{one.timeouts} retransmission timeouts in a row: the path or the other host does not answer"
            )
    return ""


def summarise(sockets: Sequence[TcpSocket]) -> SocketFacts:
    """Several sockets as one; the addresses are those of the one that moved most."""
    main = max(sockets, key=lambda s: (s.bytes_acknowledged or 0) + (s.bytes_received or 0))
    busy = sum(s.busy_us or 0 for s in sockets)
    limited = sum(s.receive_window_limited_us or 0 for s in sockets)
    local = f"[{main.local}]" if ":" in main.local else main.local
    return SocketFacts(
        sockets=len(sockets),
        local=f"{local}:{main.local_port}",
        remote=main.peer,
        rtt_us=_over(max, (s.rtt_us for s in sockets if s is main or s.busy_us)),
        min_rtt_us=_over(min, (s.min_rtt_us for s in sockets)),
        retransmits=_over(sum, (s.retransmits for s in sockets)),
        timeouts=_over(max, (s.timeouts for s in sockets)),
        congestion_window=_over(min, (s.congestion_window for s in sockets if s is main)),
        delivery_rate=_over(sum, (s.delivery_rate for s in sockets)),
        unacknowledged=_over(sum, (s.unacknowledged for s in sockets)),
        send_queue=sum(s.send_queue for s in sockets),
        receive_queue=sum(s.receive_queue for s in sockets),
        window_limited=limited / busy if busy else None,
    )


def _over(combine: Callable[[list[int]], int], values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return combine(known) if known else None


def _median(values: Iterable[float]) -> float:
    """The middle one, or the mean of the two; Python's ``statistics`` brings a megabyte along."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
