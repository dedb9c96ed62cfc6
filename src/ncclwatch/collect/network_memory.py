"""What the nodes last said of their network and their kernels: NICs, connections, changes of links, lines of the kernel's log,
work requests. Records alone, bounded; the engine's sources of evidence say what follows from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ncclwatch.model.job import Job
from ncclwatch.model.network import FlowRecord, KernelLogLine, LinkChange, NetworkLook, NicKey, NicRecord, PathAnswer
from ncclwatch.model.paths import NodeView
from ncclwatch.model.state import Direction
from ncclwatch.model.work import Counting, FlowWindow, Scope
from ncclwatch.paths.findings import PathFinding
from ncclwatch.paths.memory import PathMemory

MEMORY_NS = 900_000_000_000
"""Bound: changes and log lines older than this are not told any more."""
MAX_KEPT = 200
"""Bound: changes and log lines of a host."""
MAX_HOSTS = 65536
"""Bound: hosts."""
MAX_FLOWS = 4096
"""Bound: connections of a host."""
LOSSY_SEGMENTS = 10
"""Unit: segments that a connection sent again within 30 s, as hosts list it, or errors of a port since watching began; with so
many it has lost much. From: of eight kept healthy recordings six sent at most 4 again and counted no errors; two on a loaded
machine sent up to 27, so that it is no proof by itself.
"""
LOSSY_NS = 120_000_000_000
"""Bound: a connection that has lost much is known for it so long: a row of seven timeouts can take 100 s."""
FLOWS_STALE_NS = 10_000_000_000
"""Bound: a host that has listed no flow for this long has none; listings come every few seconds."""
KEPT_WINDOWS = 32
"""Bound: windows of work requests of a flow; they come every two to ten seconds."""


class Way(NamedTuple):
    """A connection as the network names it: its communicator's hash (which need not be unique), rank and peer in it."""

    comm_hash: int
    rank: int
    peer: int


Delays = dict[tuple[int, int, int, int], float]
"""How long what is sent takes to be acknowledged, µs, by process id of the sender, hash of the communicator, rank and peer."""
Measured = tuple[int, Delays]
"""When the connections of a host were measured, in ns since the epoch, and what they took."""


@dataclass(slots=True)
class HostNetwork:
    """What is remembered of one host."""

    nics: dict[NicKey, NicRecord] = field(default_factory=dict)
    flows: tuple[FlowRecord, ...] = ()
    flows_ns: int = 0
    """When ``flows`` were listed, in ns since the epoch."""
    changes: deque[LinkChange] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    kernel: deque[tuple[int, KernelLogLine]] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    """Each line with when it reached us, in ns since the epoch."""
    lossy: dict[Way, int] = field(default_factory=dict)
    """Connections that have lost much, each with when that was last seen, in ns since the epoch."""
    work: dict[tuple[object, ...], deque[FlowWindow]] = field(default_factory=dict)
    """The newest windows of work requests of each flow and peer (``FlowWindow.place``), the oldest first."""
    delays: Measured = (0, {})
    """By what hosts list of connections: the longest of the sockets or queue pairs of each."""
    completions: Measured = (0, {})
    """By work requests: the median time from post to completion in the newest windows, the longest of its queue pairs."""

    def take_work(self, windows: Sequence[FlowWindow], wall_ns: int) -> None:
        """New windows of work requests; those of at most :data:`MAX_FLOWS` flows are kept."""
        completions: Delays = {}
        for window in windows:
            work, place = window.work, window.place
            if window.scope is Scope.PORT or not work.seen_s > 0:
                continue
            if place not in self.work and len(self.work) >= MAX_FLOWS:
                # Flows that have long said nothing: their processes have ended.
                self.work = {at: kept for at, kept in self.work.items() if work.end_ns - kept[-1].work.end_ns < MEMORY_NS}
                if len(self.work) >= MAX_FLOWS:
                    continue
            self.work.setdefault(place, deque(maxlen=KEPT_WINDOWS)).append(window)
            delay = work.latency_p50_ns if work.counting is not Counting.TCP and window.role == "data" else None
            if delay is not None and window.direction is Direction.SEND and window.comm_hash is not None:
                flow = window.pid, window.comm_hash, window.rank or 0, window.peer or 0
                completions[flow] = max(completions.get(flow, 0.0), delay / 1e3)
        if completions:
            self.completions = wall_ns, completions

    def take_flows(self, flows: Sequence[FlowRecord], wall_ns: int) -> None:
        """What the connections do now; at most :data:`MAX_FLOWS` of them."""
        self.flows, self.flows_ns = tuple(flows[:MAX_FLOWS]), wall_ns
        self.lossy = {way: seen for way, seen in self.lossy.items() if seen > wall_ns - LOSSY_NS}
        delays: Delays = {}
        for way, flow in self.known_ways():
            # The timeouts it waits in now are not counted: a path that has just died has as many.
            lost = (flow.retries or 0) - (flow.socket.timeouts or 0) if flow.socket is not None else 0
            if lost >= LOSSY_SEGMENTS and (way in self.lossy or len(self.lossy) < MAX_FLOWS):
                self.lossy[way] = wall_ns
            if flow.sends_data and flow.delay_us is not None:
                place = flow.pid, *way
                delays[place] = max(delays.get(place, 0.0), flow.delay_us)
        self.delays = wall_ns, delays

    def known_ways(self) -> Iterator[tuple[Way, FlowRecord]]:
        """The connections of which it is known whom they connect."""
        return ((way, flow) for flow in self.flows if (way := way_of(flow)) is not None)


@dataclass(slots=True)
class NetworkMemory:
    """The newest word of every host about its network; bounded."""

    hosts: dict[str, HostNetwork] = field(default_factory=dict)
    ways: PathMemory = field(default_factory=PathMemory)
    """What was probed of paths, and what links carried."""

    def feed(self, host: str, look: NetworkLook, wall_ns: int) -> None:
        """Take what a host says; ``wall_ns`` is when it looked."""
        known = self._host(host)
        if look.nics:
            # A NIC keeps its users: between two operations nobody is seen to use it, and over a dead link nothing begins.
            users = {key: nic.used_by for key, nic in known.nics.items()}
            known.nics = {n.key: replace(n, used_by=tuple(sorted({*n.used_by, *users.get(n.key, ())}))) for n in look.nics}
        if look.flows or wall_ns - known.flows_ns > FLOWS_STALE_NS:
            known.take_flows(look.flows, wall_ns)
        known.changes.extend(look.changes)
        known.kernel.extend((wall_ns, line) for line in look.kernel)
        while known.changes and known.changes[0].wall_ns < wall_ns - MEMORY_NS:
            known.changes.popleft()
        while known.kernel and known.kernel[0][0] < wall_ns - MEMORY_NS:
            known.kernel.popleft()

    def feed_work(self, host: str, windows: Sequence[FlowWindow], wall_ns: int) -> None:
        """Take what a host has counted of work requests; ``wall_ns`` is when it said so."""
        self._host(host).take_work(windows, wall_ns)

    def _host(self, host: str) -> HostNetwork:
        """What is known of a host; of one too many nothing is kept."""
        if host not in self.hosts and len(self.hosts) >= MAX_HOSTS:
            return HostNetwork()
        return self.hosts.setdefault(host, HostNetwork())

    def delays(self) -> dict[str, Measured]:
        """Of each host its connections' delays: round trips of sockets, else the times in which work requests are completed."""
        measured = {host: known.delays if known.delays[1] else known.completions for host, known in self.hosts.items()}
        return {host: found for host, found in measured.items() if found[1]}

    def path_findings(self) -> Sequence[PathFinding]:
        """What is wrong with the paths of flows now; made anew when a host has listed its flows. O(flows)."""
        known = sorted(self.hosts.items())
        views = [NodeView(host, one.flows, tuple(one.nics.values())) for host, one in known]
        return self.ways.findings(views, tuple(one.flows_ns for _, one in known))

    def probes(self, job: Job, still: float) -> Iterator[tuple[str, FlowRecord, PathAnswer]]:
        """Probes during a standstill: host, connection, answer; silence counts where the connection has none, or over RDMA."""
        hosts = sorted(self.hosts.items())
        probed = [(host, flow, flow.path) for host, known in hosts for flow in known.flows if flow.path is not None]
        looked = {(member.info.host, member.info.pid): member.last.time_ns for member in job.members} if probed else {}
        for host, flow, answer in probed:
            looked_ns = looked.get((host, flow.pid))
            fresh = looked_ns is not None and answer.time_ns >= looked_ns - int(still * 1e9)
            waits = flow.socket is not None and bool(flow.socket.unacknowledged)
            if fresh and (answer.alive or answer.kind == "rdma" or waits):
                yield host, flow, answer


def way_of(flow: FlowRecord) -> Way | None:
    """Which connection it is, where that is known."""
    if flow.comm_hash is None or flow.rank is None or flow.peer is None:
        return None
    return Way(flow.comm_hash, flow.rank, flow.peer)
