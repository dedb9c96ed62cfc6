"""Records of the network: flows of NCCL's connections, NICs, changes of their links, and what the kernel logged about them.

Plain data that can be encoded: rates are a second's, times CLOCK_MONOTONIC ns unless said otherwise, ``None`` is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from ncclwatch.model.state import Direction


class FlowState(StrEnum):
    """What a flow does. ``BLOCKED``: data waits for the other end's application, the path is alive; ``STALLED``: for the wire."""

    IDLE = "idle"
    ACTIVE = "active"
    SLOW = "slow"
    BLOCKED = "blocked"
    STALLED = "stalled"
    ERROR = "error"
    UNKNOWN = "unknown"

    @property
    def is_trouble(self) -> bool:
        """Whether somebody should look at the path."""
        return self in (FlowState.SLOW, FlowState.STALLED, FlowState.ERROR)


class FlowKind(StrEnum):
    """What carries a flow; ``OTHER`` is a network plugin of which only the proxy's steps are seen."""

    RDMA = "rdma"
    SOCKET = "socket"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RdmaCounts:
    """Work requests of one queue pair. With ``exact`` complete since it was watched, else sums over bursts of probes:
    ``in_flight`` is then of the last burst, and never a difference of the two others.

    ``errors`` counts failed requests by status (``retry-exc-err``).
    """

    queue_pair: int
    posted: int
    completed: int
    in_flight: int
    exact: bool
    latency_p50_ns: float | None = None
    latency_p99_ns: float | None = None
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueuePairEnds:
    """Which queue pair one end of a connection uses: ``index`` is its place among those of the connection, the same at both ends.

    ``remote`` is the IP address of the other end, as its RoCE GID names it; empty where it is not known.
    """

    queue_pair: int
    index: int = 0
    remote: str = ""


@dataclass(frozen=True, slots=True)
class SocketFacts:
    """What the kernel says of the TCP sockets of one connection (TCP_INFO).

    Over several sockets: sums of counts and rates, the worst of times. ``retransmits`` are segments since the connection was
    made, ``timeouts`` retransmission timeouts in a row without an answer, ``unacknowledged`` segments, ``send_queue`` and
    ``receive_queue`` bytes. ``window_limited`` is the share of busy time in which the other end's window was full.
    """

    sockets: int
    local: str
    remote: str
    rtt_us: int | None = None
    min_rtt_us: int | None = None
    retransmits: int | None = None
    timeouts: int | None = None
    congestion_window: int | None = None
    delivery_rate: int | None = None
    unacknowledged: int | None = None
    send_queue: int = 0
    receive_queue: int = 0
    window_limited: float | None = None


@dataclass(frozen=True, slots=True)
class StepRate:
    """How fast a connection's proxy counts (CCL-D 4.1), over ``window_s`` seconds of ``looks`` looks.

    ``steps`` is the count of the connection now, ``per_second`` plain steps a second. ``changes`` is how often the count was seen
    to have changed and ``rate`` its reciprocal, CCL-D's SendRate or RecvRate: the more often it had to be caught moving for the
    same work, the slower. Comparable only between connections looked at with the same interval.
    """

    steps: int
    per_second: float
    changes: int
    looks: int
    window_s: float

    @property
    def rate(self) -> float | None:
        """1 / ``changes``; ``None`` where nothing changed."""
        return 1 / self.changes if self.changes else None


@dataclass(frozen=True, slots=True)
class PathAnswer:
    """What a probe of ours found out on the path of a connection that stands still, to the ``address`` of its other end.

    ``time_ns`` is CLOCK_MONOTONIC of its node. ``alive``: the other host or its adapter answered. ``kind`` is ``rdma``
    (zero-payload writes) or ``tcp``; ``answer`` and ``detail`` say it in the words of ``ncclwatch probe``; ``round_trip_us`` is
    the median of those timed.
    """

    time_ns: int
    address: str
    alive: bool
    kind: str
    answer: str
    detail: str = ""
    round_trip_us: float | None = None


@dataclass(frozen=True, slots=True)
class FlowRecord:
    """One connection of NCCL over a network at one moment, or one queue pair of nobody's we know (``comm_hash`` ``None``).

    ``rank`` and ``peer`` are ranks of the communicator. ``network`` is NCCL's name of it (``IB``, ``Socket``, a plugin's).
    ``device`` is the NIC (``mlx5_0``, ``eth0``), ``port`` its port where it has several (RDMA, from 1). ``bandwidth`` and
    ``expected`` are bytes a second: over the last w completions (RDMA), or while the socket had something to send. ``retries``
    are signs of loss: of the RDMA port during the look, or segments its sockets sent again in the last 30 s. ``role`` is
    ``data``, ``control`` (clear-to-send), ``flush`` or empty. ``shared_by`` counts the connections that use the same queue pairs
    or sockets. ``path`` is what a probe of ours found, where one was ordered of late. ``ends`` is its queue pair, counted or not.
    ``adaptive``: the process was started with ``NCCL_IB_ADAPTIVE_ROUTING`` on, and it is NCCL's own RDMA.
    """

    pid: int
    kind: FlowKind
    network: str
    device: str
    port: int
    state: FlowState
    reason: str = ""
    global_rank: int | None = None
    comm_hash: int | None = None
    rank: int | None = None
    channel: int | None = None
    peer: int | None = None
    direction: Direction | None = None
    connection_index: int | None = None
    role: str = ""
    bandwidth: float | None = None
    expected: float | None = None
    retries: int | None = None
    steps: StepRate | None = None
    rdma: RdmaCounts | None = None
    socket: SocketFacts | None = None
    shared_by: int = 1
    path: PathAnswer | None = None
    ends: QueuePairEnds | None = None
    adaptive: bool = False

    @property
    def sends_data(self) -> bool:
        """Whether it is a connection that sends the data of transfers."""
        return self.direction is Direction.SEND and self.role in ("", "data")

    @property
    def delay_us(self) -> float | None:
        """How long what it sends takes to be acknowledged, µs: work requests, or TCP's round trip; ``None``: unknown."""
        if self.rdma is not None and self.rdma.latency_p50_ns:
            return self.rdma.latency_p50_ns / 1e3
        if self.socket is not None and self.socket.rtt_us:
            return float(self.socket.rtt_us)
        return None


NicKey = tuple[str, int, str]
"""(host, network namespace, name)."""


def nic_label(name: str, namespace: int) -> str:
    """``eth0``, or ``eth0 (netns 4026532281)`` in another network namespace than that of who looked."""
    return f"{name} (netns {namespace})" if namespace else name


class _OfNic:
    """What is said of one NIC: by host, network namespace and name it is told from all others."""

    __slots__ = ()
    host: str
    name: str
    namespace: int

    @property
    def key(self) -> NicKey:
        """What no other NIC has."""
        return self.host, self.namespace, self.name

    @property
    def label(self) -> str:
        """Its name for people."""
        return nic_label(self.name, self.namespace)


@dataclass(frozen=True, slots=True)
class NicRecord(_OfNic):
    """A NIC at one look. ``name`` is the network device, or ``device:port`` of an RDMA port; ``kind`` is ``netdev`` or ``rdma``.

    ``up`` is false where it can carry no traffic; ``state`` says it in the kernel's words. ``rate_gbps`` is the speed of the
    link, ``receive_rate`` and ``send_rate`` bytes a second since the look before. ``errors`` are counters of errors and of signs
    of loss that rose since watching began, by the kernel's names; ``congestion`` is the number of congestion notifications since
    then. ``used_by`` are the ranks of the job whose connections name it, where that is known. ``namespace`` is the inode of its
    network namespace (``lsns -t net``), 0 in the one of who looked: containers of one host may each have an ``eth0``. ``driver``
    is the driver of an RDMA device and ``kernel`` the release it runs in. ``bond`` are the members of a bonded network device
    (for an RDMA port: of its network device), ``bond_active`` the one that sends where only one does.
    """

    host: str
    name: str
    kind: str
    up: bool
    state: str
    rate_gbps: float | None = None
    netdev: str = ""
    link_layer: str = ""
    receive_rate: float | None = None
    send_rate: float | None = None
    errors: dict[str, int] = field(default_factory=dict)
    congestion: int = 0
    used_by: tuple[int, ...] = ()
    namespace: int = 0
    driver: str = ""
    kernel: str = ""
    bond: tuple[str, ...] = ()
    bond_active: str = ""

    @property
    def is_trouble(self) -> bool:
        """Whether it is down or counted errors."""
        return not self.up or bool(self.errors)


@dataclass(frozen=True, slots=True)
class LinkChange(_OfNic):
    """A link went up or down; ``time_ns`` and ``wall_ns`` are of the moment the kernel's message was read. ``namespace`` as in
    :class:`NicRecord`.
    """

    host: str
    name: str
    up: bool
    detail: str
    time_ns: int
    wall_ns: int
    namespace: int = 0


@dataclass(frozen=True, slots=True)
class KernelLogLine:
    """A line of the kernel's log that matters to a job (see :mod:`ncclwatch.nic.kmsg` for ``kind``); ``time_ns`` is since
    boot, ``wall_ns`` by the host's clock (0: not known).
    """

    host: str
    kind: str
    device: str
    text: str
    time_ns: int
    severity: int
    code: int | None = None
    pid: int | None = None
    wall_ns: int = 0

    @property
    def origin(self) -> str:
        """Where and when it was logged: ``node1, 2026-11-22 03:12:44``, the time as of where this is read."""
        if not 0 < self.wall_ns < 1 << 62:  # from a socket it may be anything
            return self.host
        return f"{self.host}, {datetime.fromtimestamp(self.wall_ns / 1e9):%Y-%m-%d %H:%M:%S}"


@dataclass(frozen=True, slots=True)
class NetworkLook:
    """What one look at a node's network brought. ``notes`` say what could not be looked at, and why."""

    nics: tuple[NicRecord, ...] = ()
    changes: tuple[LinkChange, ...] = ()
    kernel: tuple[KernelLogLine, ...] = ()
    flows: tuple[FlowRecord, ...] = ()
    notes: tuple[str, ...] = ()
