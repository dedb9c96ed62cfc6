"""Records of the state plane: what NCCL itself believes, read from the memory of a process.

A record holds what was read, in NCCL's own units, and no judgement. A value that this build of NCCL does not keep, or
that could not be read, is ``None``, and the name of its signal is a key of ``ProcessSample.unavailable`` with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from ncclwatch.model.device import DeviceSample
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.steps import Operations
from ncclwatch.model.traits import Traits


class Direction(StrEnum):
    """The side of a connection that a rank plays."""

    SEND = "send"
    RECV = "recv"


class Transport(StrEnum):
    """How two ranks of a connection are joined (``struct ncclTransport`` of NCCL)."""

    NET = "net"
    SHM = "shm"
    P2P = "p2p"
    COLLNET = "collnet"
    NVLS = "nvls"
    UNKNOWN = "unknown"


class OpPhase(StrEnum):
    """``ncclProxyArgs.state``: step counters are valid only while the phase is ``PROGRESS``."""

    NONE = "none"
    READY = "ready"
    PROGRESS = "progress"


class VersionSource(StrEnum):
    """How the NCCL version and layout of a process were established, from certain to weak."""

    DEBUG_INFO = "debug-info"
    BUILD_ID = "build-id"
    VERSION = "version"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process that carries NCCL.

    Ranks are the job's (``RANK`` and the like), not a communicator's; ``rank_source`` names where they came from:
    an environment variable, ``"title"`` for the process's title, ``"communicator"`` for the largest one, ``""`` when unknown.
    ``version`` is (major, minor, patch). ``pid_in_target`` is the pid the process has in its own pid namespace.
    """

    key: ProcessKey
    host: str
    name: str
    command: tuple[str, ...]
    library: str
    version: tuple[int, int, int] | None
    version_source: VersionSource
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    rank_source: str = ""
    container_id: str = ""
    pid_in_target: int | None = None
    uid: int = 0
    statically_linked: bool = False
    traits: Traits | None = None
    """What does not change while it lives, and by which it may differ from its peers; ``None`` where it was not looked at."""

    @property
    def pid(self) -> int:
        """The pid in the agent's pid namespace."""
        return self.key.pid


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What a communicator knows of one of its ranks (``ncclPeerInfo``).

    ``host_hash`` and ``pid_hash`` are NCCL's own without the communicator's hash that it adds: equal on all communicators of
    one job.
    """

    rank: int
    host_hash: int | None = None
    pid_hash: int | None = None
    device: int | None = None
    bus_id: int | None = None
    comm_address: int | None = None
    """Address of the communicator in that rank's process: tells communicators apart whose hashes are equal (splits before
    2.23).
    """


@dataclass(frozen=True, slots=True)
class ChannelRing:
    """Neighbours of this rank in the ring of one channel, and its parent in the channel's tree (ranks of the communicator).

    ``parent`` is -1 for a tree's root, and where it was not read.
    """

    channel: int
    prev: int
    next: int
    parent: int = -1


@dataclass(frozen=True, slots=True)
class HostConnection:
    """One end of a connection whose head and tail lie in host memory (shared-memory transport).

    ``head`` is the step up to which the receiver has consumed, ``tail`` the step up to which the sender has produced;
    both count steps since the connection was made. No proxy operation exists for such a connection.
    """

    channel: int
    peer: int
    direction: Direction
    connection_index: int
    head: int | None
    tail: int | None
    transport: Transport = Transport.SHM


@dataclass(frozen=True, slots=True)
class ProxySub:
    """Progress of one channel's transfer with one peer inside a proxy operation (``ncclProxySubArgs``).

    All counters are in steps, relative to ``base`` (the absolute step of the connection at which this transfer began),
    and rise by ``slice_steps``. ``rank`` is the rank (of the communicator) on whose behalf the transfer runs: with PXN it
    is another process's. ``gpu_ready`` is, for a send in protocol Simple, how far the GPU has produced
    (receive tail − base). Source: NCCL ``src/transport/net.cc`` sendProxyProgress/recvProxyProgress.
    """

    channel: int
    peer: int
    nsteps: int
    base: int
    posted: int
    received: int
    transmitted: int
    done: int
    rank: int | None = None
    nbytes: int | None = None
    gpu_ready: int | None = None
    connection: int = 0
    connection_index: int | None = None
    net_device: int | None = None
    net_device_name: str = ""
    """Name of the NIC (``mlx5_0``) or interface (``eth0``); empty with an external network plugin."""

    @property
    def gpu_began(self) -> bool:
        """Whether a GPU has taken or produced anything of it, as far as its proxy knows."""
        return self.done > 0 or (self.gpu_ready or 0) > 0

    def of_gpu(self, *, sends: bool) -> int:
        """Steps that a GPU has sent into the network (``sends``), or taken from it, as far as its proxy knows."""
        return (self.transmitted if self.gpu_ready is None else self.gpu_ready) if sends else self.done


@dataclass(frozen=True, slots=True)
class ProxyOperation:
    """One unfinished operation of a proxy thread (``ncclProxyArgs``).

    ``op_count`` is NCCL's raw value: the collective counter << 1, or the channel's point-to-point counter << 1 | 1.
    ``queued_behind`` counts the operations before it on the same connection (``nextPeer`` chain): 0 runs now.
    ``comm_hash`` is 0 when the owner could not be told.
    """

    address: int
    comm_hash: int
    direction: Direction
    transport: Transport
    phase: OpPhase
    op_count: int
    collective: str
    protocol: str
    algorithm: str
    slice_steps: int
    subs: tuple[ProxySub, ...]
    queued_behind: int = 0
    net_name: str = ""
    comm_address: int = 0
    """Address of the communicator in this process; hashes of communicators are not unique. 0 when the owner could not be told."""
    pattern: str = ""
    """``ncclPattern_t`` without its prefix: ``Ring``, ``TreeUpDown``, ``Send``, …."""
    idle: bool | None = None
    """``ncclProxyArgs.idle``: the proxy's last pass over the operation moved nothing."""
    proxy_state: int = 0
    """Address of the ``ncclProxyState`` that runs it; several split communicators may share one."""
    owners: tuple[int, ...] = ()
    """Hashes of the communicators it can belong to: one when certain, several when they share the connection, none when
    unknown.
    """

    @property
    def is_point_to_point(self) -> bool:
        """Whether ``op_count`` counts the channel's point-to-point operations."""
        return bool(self.op_count & 1)

    @property
    def sequence(self) -> int:
        """The counter without the point-to-point bit."""
        return self.op_count >> 1


@dataclass(frozen=True, slots=True)
class PendingOperation:
    """An operation the main thread has put into the pool and the proxy thread has not yet taken (``ncclProxyOp``)."""

    comm_hash: int
    direction: Direction
    op_count: int
    channel: int
    peer: int
    nsteps: int
    collective: str
    protocol: str
    nbytes: int | None = None
    rank: int | None = None
    comm_address: int = 0


@dataclass(frozen=True, slots=True)
class NetStep:
    """How far a network connection has been used: the absolute step up to which operations on it have begun.

    With no operation open on it, that is what this end has done. Ranks are of the communicator; ``connection_index`` is 0 for
    collectives. Source: ``step`` of ``sendNetResources`` and ``recvNetResources``, NCCL ``src/transport/net.cc``.
    """

    channel: int
    peer: int
    direction: Direction
    connection_index: int
    step: int


@dataclass(frozen=True, slots=True)
class Communicator:
    """One communicator of one process (``ncclComm``).

    ``hash`` alone does not name a communicator before 2.24: there all splits of one parent by one colour have the same (2.18.3 to
    2.23, src/init.cc: hash of the parent's hash and the colour); ``nranks`` and membership tell most of them apart.
    ``parent_hash`` is known where resources are shared.

    ``op_count`` counts launched plans; whether it counts every rank depends on the version: never compare it between ranks
    unvalidated. ``sequence_numbers`` is ``seqNumber[]`` by collective name (2.26 and later). ``async_result`` is the
    ``ncclResult_t`` name. ``address`` is the address in the process. ``finder`` says how it was found
    (``kept-by-nccl``, ``magic``, ``invariants``, ``hint``: an API call named it).
    """

    address: int
    hash: int
    rank: int
    nranks: int
    device: int | None = None
    bus_id: int | None = None
    node: int | None = None
    nnodes: int | None = None
    local_rank: int | None = None
    local_ranks: int | None = None
    op_count: int | None = None
    collective_count: int | None = None
    sequence_numbers: dict[str, int] = field(default_factory=dict)
    async_result: str | None = None
    init_state: str | None = None
    aborted: bool | None = None
    finalize_called: bool | None = None
    destroyed: bool | None = None
    parent_hash: int | None = None
    name: str = ""
    finder: str = "magic"
    peers: tuple[PeerInfo, ...] = ()
    rings: tuple[ChannelRing, ...] = ()
    host_connections: tuple[HostConnection, ...] = ()
    transports: tuple[tuple[int, int, str, Transport], ...] = ()
    """(channel, peer, direction, transport) of every connection made."""
    revoked: bool | None = None
    """``ncclComm.revokedFlag`` (2.29 and later)."""
    captured_plans: int | None = None
    """Plan lists captured in CUDA graphs that are alive (``persistentRefs``, later ``localPersistentRefs``)."""
    device_initiated: bool | None = None
    """Whether GPU-initiated networking is connected (``ncclSharedResources.ginState.connected``, 2.28 and later)."""
    multi_node_nvlink: bool | None = None
    """Whether NVLink joins nodes (``ncclComm.MNNVL``)."""
    net_steps: tuple[NetStep, ...] = ()
    shares_resources: bool | None = None
    """Whether it shares connections and proxy with communicators split from it, or with the one it was split from
    (``splitShare``).
    """
    proxy_pool_full: bool | None = None
    """Whether no slot is left in which a launch could leave an operation for the proxy thread: the next one spins until there is
    (``ncclLocalOpAppend``, src/proxy.cc).
    """
    message_peers: tuple[int, ...] | None = None
    """Peers with which connections for sends and receives were made, or are being made; ``None`` where that was not read."""

    proxy_thread: int | None = None
    """The kernel's id of its proxy's progress thread, in the process's own pid namespace; 0 once that has ended, ``None`` where
    it was not read.
    """

    def ring(self, channel: int) -> ChannelRing | None:
        """The ring of a channel, where it was read. O(channels)."""
        return next((ring for ring in self.rings if ring.channel == channel), None)

    def may_message(self, peer: int) -> bool:
        """Whether a Send or Recv with a peer may be under way: NCCL connects the two for it before it launches
        (``connIndex`` 1, src/enqueue.cc).
        """
        return self.message_peers is None or peer in self.message_peers


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """What a control group's CPU limit has done so far: its periods (``nr_periods`` of ``cpu.stat``), and those in which it held
    its processes back (``nr_throttled``). ``group`` is the control group as a number of its machine (the inode of its folder).
    """

    periods: int
    throttled: int
    group: int = 0

    def since(self, before: CpuLimit) -> tuple[int, int] | None:
        """Periods and throttled ones since another reading; ``None`` where the process was put into a group only in between,
        whose past is not its own.
        """
        periods, throttled = self.periods - before.periods, self.throttled - before.throttled
        moved = periods < 0 or throttled < 0 or (self.periods > 0 and before.periods == 0)
        return None if moved else (periods, throttled)


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One look at one process.

    ``time_ns`` is CLOCK_MONOTONIC of the machine that read, ``wall_ns`` CLOCK_REALTIME; both of the moment the reading began,
    ``duration_ns`` how long it took. ``run_state`` is the letter of ``/proc/PID/stat``
    (``T`` stopped, ``Z`` zombie, ``X`` dead or gone).
    ``torn`` counts structures dropped because they changed while they were read; ``truncated`` lists the bounds that were hit.
    """

    process: ProcessInfo
    time_ns: int
    wall_ns: int
    duration_ns: int
    run_state: str
    communicators: tuple[Communicator, ...] = ()
    operations: tuple[ProxyOperation, ...] = Operations()
    pending: tuple[PendingOperation, ...] = ()
    torn: int = 0
    truncated: tuple[str, ...] = ()
    unavailable: dict[str, str] = field(default_factory=dict)
    cpu_time_ns: int | None = None
    """User plus system CPU time of the process so far."""
    context_switches: int | None = None
    """Voluntary plus involuntary context switches over all threads, when they could be read."""
    run_queue_wait_ns: int | None = None
    """How long the threads alive now were runnable without a CPU (``schedstat``). ``None`` where the kernel does not keep it,
    and in most samples of a process with very many threads.
    """
    cpu_limit: CpuLimit | None = None
    """Of the control group that the process is in; zeros where nothing limits it, ``None`` where that could not be read."""
    calls_seen: int | None = None
    """Calls of NCCL functions that the calls plane has seen in this process, where it is attached."""
    device: DeviceSample | None = None
    """What the counter shim in the process says about its GPU, where the process has it."""

    def __post_init__(self) -> None:
        """Whatever the operations came in, their columns are made once."""
        if type(self.operations) is not Operations:
            object.__setattr__(self, "operations", Operations(self.operations))

    def ended(self, time_ns: int, wall_ns: int) -> ProcessSample:
        """What is known of a process that was found to have ended at these times: its communicators as last seen, nothing under
        way, run state ``X``.
        """
        return replace(self, run_state="X", time_ns=time_ns, wall_ns=wall_ns, duration_ns=0, operations=(), pending=())

    def not_read(self, time_ns: int, wall_ns: int, run_state: str, why: str) -> ProcessSample:
        """What is known of a process whose memory could not be read at these times: its communicators as last seen, nothing of
        what is under way, and why under ``unavailable``.
        """
        unavailable = {**self.unavailable, self._memory: why}
        again = self.ended(time_ns, wall_ns)
        return replace(again, run_state=run_state, unavailable=unavailable)

    @property
    def unread(self) -> bool:
        """Whether the memory of the process could not be read, so that nothing is known of what is under way."""
        return bool(self.unavailable) and self._memory in self.unavailable

    @property
    def _memory(self) -> str:
        return f"memory of process {self.process.pid}"

    @property
    def proxy_threads(self) -> frozenset[int]:
        """The ids of its proxies' progress threads, as far as they were read."""
        return frozenset(own.proxy_thread for own in self.communicators if own.proxy_thread is not None)

    @property
    def largest(self) -> Communicator | None:
        """The largest communicator, of several the first made (by address)."""
        return max(self.communicators, key=lambda c: (c.nranks, -c.address), default=None)

    @property
    def rank(self) -> int | None:
        """The job's rank: as the environment says or, without, the rank in the largest communicator."""
        if self.process.rank is not None:
            return self.process.rank
        largest = self.largest
        return largest.rank if largest is not None else None
