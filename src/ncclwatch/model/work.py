"""Records of the wire plane: what queue pairs and sockets carried in a window of time, as far as that was seen.

A window says by which means it was counted, of which time it is, and how much of that time was seen (its coverage). What was not
seen is not nothing: counts are of the seen time alone, and ``None`` is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import hypot
from typing import TypeVar

from ncclwatch.model.state import Direction

_Number = TypeVar("_Number", int, float)


class Counting(StrEnum):
    """How it was counted. ``BURSTS``: every request while probes were in place, for moments. ``EXACT``: every request all the
    time. ``TCP``: by the kernel, bytes and not requests. ``ORDER``: like ``BURSTS``, because the engine or somebody asked.
    """

    BURSTS = "bursts"
    EXACT = "exact"
    TCP = "tcp"
    ORDER = "order"


class Scope(StrEnum):
    """What a window is of: one queue pair or the sockets of one connection, all of a rank's over one port of a NIC, or all of a
    rank's with one peer.
    """

    FLOW = "flow"
    PORT = "port"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class WorkWindow:
    """Work requests (of sockets: bytes) in one window of time.

    ``begin_ns`` to ``end_ns`` is CLOCK_MONOTONIC of the node. Windows of one flow follow one another without a gap; ``seen_s`` is
    how much of this one was seen, all at its end, and :attr:`coverage` the share. Counts are of the seen time.

    ``posted`` and ``completed`` are requests of the send queue, ``posted_bytes`` what they carry, ``completed_bytes`` what is
    known to have been acknowledged: of bursts, only of requests whose posting was seen too. ``received`` and ``received_bytes``
    are completions of the receive queue, ``receives_posted`` requests to it. ``in_flight`` are requests posted and not completed
    at the end: of bursts only of those posted in the burst, and never a difference of the counts. ``oldest_s`` is how long the
    oldest of them waits. ``errors`` are completions with an error status. Of sockets ``posted_bytes`` were acknowledged by the
    other end and all that counts requests is ``None``; latencies are round trips.

    ``latency_p50_ns`` and ``latency_p99_ns`` are from post to polled completion. ``throughput`` is MegaTrace's: bytes over time
    between the last w + 1 = 65 completions, in bytes a second; of a port or peer of the completions of all its queue pairs
    together; of sockets bytes over the time in which there was something to send. ``uncertainty`` is the relative standard error
    of :attr:`bytes_per_s` as a mean of the last 16 windows: 0 where all was seen, ``None`` where too little was.

    ``send_rate`` and ``recv_rate`` are CCL-D's: 1 / how often the step counts were seen to have changed in the last 10 s.

    ``polls`` is how often the threads of the process asked for completions in the seen time: of the process, not of the flow.
    """

    counting: Counting
    begin_ns: int
    end_ns: int
    seen_s: float
    posted: int | None = None
    posted_bytes: int = 0
    completed: int | None = None
    completed_bytes: int = 0
    received: int | None = None
    received_bytes: int = 0
    receives_posted: int | None = None
    in_flight: int | None = None
    oldest_s: float | None = None
    errors: int = 0
    latency_p50_ns: float | None = None
    latency_p99_ns: float | None = None
    throughput: float | None = None
    uncertainty: float | None = None
    send_rate: float | None = None
    recv_rate: float | None = None
    polls: int | None = None

    @property
    def coverage(self) -> float:
        """The share of the window that was seen, 0 to 1."""
        span = (self.end_ns - self.begin_ns) / 1e9
        return min(self.seen_s / span, 1.0) if span > 0 else 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes handed to the network a second of the seen time; ``None`` where nothing was seen."""
        return self.posted_bytes / self.seen_s if self.seen_s > 0 else None

    @property
    def received_per_s(self) -> float | None:
        """Bytes received a second of the seen time; ``None`` where nothing was seen."""
        return self.received_bytes / self.seen_s if self.seen_s > 0 else None


@dataclass(frozen=True, slots=True)
class FlowWindow:
    """One window of one flow, port or peer, and whose it is.

    ``rank`` and ``peer`` are ranks of the communicator ``comm_hash``; of a port or peer with several communicators those are
    ``None``. ``global_rank`` is the rank of the job. ``queue_pair`` is 0 for sockets, ``remote`` the other end of a socket.
    ``role`` is ``data``, ``control`` (clear-to-send) or ``flush``: ports and peers add up data alone. ``order`` is the number of
    the order that brought it, 0 for none.
    """

    pid: int
    scope: Scope
    work: WorkWindow
    global_rank: int | None = None
    device: str = ""
    port: int = 0
    comm_hash: int | None = None
    rank: int | None = None
    channel: int | None = None
    peer: int | None = None
    direction: Direction | None = None
    connection_index: int | None = None
    queue_pair: int = 0
    remote: str = ""
    role: str = ""
    order: int = 0
    host: str = ""

    @property
    def place(self) -> tuple[object, ...]:
        """What no other flow, port or peer has."""
        connection = (self.comm_hash, self.rank, self.channel, self.peer, self.direction, self.connection_index)
        return self.host, self.pid, self.scope, self.device, self.port, *connection, self.queue_pair


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """What an engine wants counted: now, every request of these processes of a host. ``standing``: since their job stands.

    With ``look`` nothing is counted: it wants to know where they stand (:class:`ncclwatch.model.looks.ProcessLook`).
    """

    number: int
    host: str
    pids: tuple[int, ...]
    standing: bool = False
    look: bool = False


def added(windows: Iterable[WorkWindow]) -> WorkWindow | None:
    """Windows of several flows over the same time as one; ``None`` of none.

    Sums of counts; the longest of the latencies, for quantiles of a mixture are not known from those of its parts; the sum of the
    throughputs of those that send; the lowest of CCL-D's rates. The seen time is that of the part that was seen least: more is
    not known of all.
    """
    parts = list(windows)
    if not parts:
        return None
    total = sum(part.posted_bytes for part in parts)
    # Errors of parts that were counted apart are independent.
    errors = [part.uncertainty * part.posted_bytes for part in parts if part.uncertainty is not None]
    known = len(errors) == len(parts)
    return WorkWindow(
        counting=parts[0].counting if len({part.counting for part in parts}) == 1 else Counting.BURSTS,
        begin_ns=min(part.begin_ns for part in parts),
        end_ns=max(part.end_ns for part in parts),
        seen_s=min(part.seen_s for part in parts),
        posted=_sum(part.posted for part in parts),
        posted_bytes=total,
        completed=_sum(part.completed for part in parts),
        completed_bytes=sum(part.completed_bytes for part in parts),
        received=_sum(part.received for part in parts),
        received_bytes=sum(part.received_bytes for part in parts),
        receives_posted=_sum(part.receives_posted for part in parts),
        in_flight=_sum(part.in_flight for part in parts),
        oldest_s=_most(part.oldest_s for part in parts),
        errors=sum(part.errors for part in parts),
        latency_p50_ns=_most(part.latency_p50_ns for part in parts),
        latency_p99_ns=_most(part.latency_p99_ns for part in parts),
        throughput=_sum(part.throughput for part in parts if part.posted_bytes or not total),
        uncertainty=hypot(*errors) / total if known and total else 0.0 if known else None,
        send_rate=_least(part.send_rate for part in parts),
        recv_rate=_least(part.recv_rate for part in parts),
        polls=_most(part.polls for part in parts),
    )


def _sum(values: Iterable[_Number | None]) -> _Number | None:
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


def _most(values: Iterable[_Number | None]) -> _Number | None:
    return max((value for value in values if value is not None), default=None)


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)
