"""Send and receive rates of every network connection, from the steps its proxy has counted (CCL-D 4.1).

A connection's count is absolute, so operations that come and go between two looks are counted too: of a running operation
``base`` + ``transmitted`` (a send) or ``received`` (a receive), else the step up to which the connection's operations have begun,
which of an idle connection is what it has done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ncclwatch.model.network import StepRate
from ncclwatch.model.state import Direction, OpPhase, ProcessSample, ProxyOperation, ProxySub

ConnectionKey = tuple[int, int, int, int, int, Direction, int]
"""(pid, communicator's hash, rank, channel, peer, direction, connection index)."""

WINDOW_NS = 10_000_000_000
"""Looks older than this are forgotten."""

MAX_LOOKS = 4096


@dataclass(slots=True)
class _Counts:
    """Looks at one connection: (time, count) of each at which the count had changed, and of the first and the last look."""

    changes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_LOOKS))
    looks: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_LOOKS))
    begun_ns: int = -1

    def add(self, time_ns: int, count: int, window_ns: int) -> None:
        last = self.changes[-1][1] if self.changes else None
        # A count that falls was read in the moment between two operations: what was counted stays counted.
        if last is None or count > last:
            self.changes.append((time_ns, count))
        self.looks.append(time_ns)
        if self.begun_ns < 0:
            self.begun_ns = time_ns
        while self.looks and self.looks[0] < time_ns - window_ns:
            self.looks.popleft()
        while len(self.changes) > 1 and self.changes[1][0] < self.looks[0]:
            self.changes.popleft()


class StepRates:
    """Feed it every look; it says how fast each connection counts. ``window_ns`` is the sampling window."""

    def __init__(self, window_ns: int = WINDOW_NS) -> None:
        self._window_ns = window_ns
        self._connections: dict[ConnectionKey, _Counts] = {}

    def feed(self, time_ns: int, counts: Mapping[ConnectionKey, int]) -> None:
        """Take the counts of one look (CLOCK_MONOTONIC ns, in order)."""
        for key, count in counts.items():
            self._connections.setdefault(key, _Counts()).add(time_ns, count, self._window_ns)

    def forget(self, pids: Iterable[int]) -> None:
        """Drop the connections of processes that are gone."""
        gone = set(pids)
        self._connections = {key: counts for key, counts in self._connections.items() if key[0] not in gone}

    def still_s(self, key: ConnectionKey) -> float:
        """Seconds from the last change that was seen, or the first look, to the last look."""
        counts = self._connections.get(key)
        if counts is None or not counts.looks:
            return 0.0
        return (counts.looks[-1] - max(counts.changes[-1][0], counts.begun_ns)) / 1e9

    def rate(self, key: ConnectionKey) -> StepRate | None:
        """The rate of one connection over the window; ``None`` before two looks."""
        counts = self._connections.get(key)
        if counts is None or len(counts.looks) < 2:
            return None
        begin, end = counts.looks[0], counts.looks[-1]
        seen = [count for time, count in counts.changes if time > begin]
        first = next((count for time, count in reversed(counts.changes) if time <= begin), counts.changes[0][1])
        last = counts.changes[-1][1]
        elapsed = (end - begin) / 1e9
        return StepRate(last, (last - first) / elapsed if elapsed > 0 else 0.0, len(seen), len(counts.looks), elapsed)


def absolute_counts(sample: ProcessSample) -> dict[ConnectionKey, int]:
    """The counts of every connection: of one on which an operation runs its own, of others the step they have come to."""
    pid = sample.process.pid
    used = {
        (pid, c.hash, c.rank, one.channel, one.peer, one.direction, one.connection_index): one.step
        for c in sample.communicators
        for one in c.net_steps
    }
    return used | running_counts(sample)


def in_network(sample: ProcessSample) -> dict[ConnectionKey, int]:
    """Connections on which steps have been handed to the network and are not completed, with their number: running sends."""
    found: dict[ConnectionKey, int] = {}
    for key, (operation, sub) in _running(sample):
        if operation.direction is Direction.SEND and sub.transmitted > sub.done:
            found[key] = sub.transmitted - sub.done
    return found


def running_counts(sample: ProcessSample) -> dict[ConnectionKey, int]:
    """The counts of the connections on which an operation runs in this sample."""
    counts: dict[ConnectionKey, int] = {}
    for key, (operation, sub) in _running(sample):
        count = sub.base + (sub.transmitted if operation.direction is Direction.SEND else sub.received)
        counts[key] = max(counts.get(key, 0), count)
    return counts


def _running(sample: ProcessSample) -> Iterator[tuple[ConnectionKey, tuple[ProxyOperation, ProxySub]]]:
    ranks = {(c.hash, address): c.rank for c in sample.communicators for address in (0, c.address)}
    for operation in sample.operations:
        if operation.phase is not OpPhase.PROGRESS:
            continue
        rank = ranks.get((operation.comm_hash, operation.comm_address))
        for sub in operation.subs:
            own = sub.rank if rank is None else rank
            if own is None:
                continue
            place = (sample.process.pid, operation.comm_hash, own, sub.channel, sub.peer, operation.direction)
            yield (*place, sub.connection_index or 0), (operation, sub)
