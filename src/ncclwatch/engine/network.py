"""What the nodes last said of their network and their kernels (NICs, connections, changes of links, lines of the kernel's log),
and what they are asked to count: work requests of jobs that stand or slow, the suspects', and of one that was asked about.

Records alone, bounded; what follows from them is said by the sources of evidence that read it (``evidence.nics``,
``evidence.work_requests``, ``evidence.kernel``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ncclwatch.engine.job import Job, Member
from ncclwatch.model.network import FlowRecord, KernelLogLine, LinkChange, NetworkLook, NicKey, NicRecord, SocketFacts
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Verdict
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkOrder

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
"""Bound: a connection that has lost much is known for it so long: while it stands still it loses nothing that could be counted,
and a row of seven timeouts takes 25 s to 100 s.
"""
FLOWS_STALE_NS = 10_000_000_000
"""Bound: a host that has listed no flow for this long has none; listings come every few seconds."""
KEPT_WINDOWS = 32
"""Bound: windows of work requests of a flow; they come every two to ten seconds."""
SETTLED_NS = 3_000_000_000
"""Fact: a NIC that is switched on goes up, down (no carrier) and up within milliseconds; up for less than this it was not up."""


class Way(NamedTuple):
    """A connection as the network names it: its communicator's hash (which need not be unique), rank and peer in it."""

    comm_hash: int
    rank: int
    peer: int


FlowPlace = tuple[int, int, int, int]
"""Process id of the sender, hash of the communicator, rank in it, and peer."""


@dataclass(slots=True)
class HostNetwork:
    """What is remembered of one host. ``wall`` of a kernel line is when it reached us, in ns since the epoch."""

    nics: dict[NicKey, NicRecord] = field(default_factory=dict)
    flows: tuple[FlowRecord, ...] = ()
    flows_ns: int = 0
    """When ``flows`` were listed, in ns since the epoch."""
    changes: deque[LinkChange] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    kernel: deque[tuple[int, KernelLogLine]] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    lossy: dict[Way, int] = field(default_factory=dict)
    """Connections that have lost much, each with when that was last seen, in ns since the epoch."""
    delays: dict[FlowPlace, float] = field(default_factory=dict)
    """How long what is sent takes to be acknowledged, µs: the longest of the sockets or queue pairs of a connection."""
    work: dict[tuple[object, ...], deque[FlowWindow]] = field(default_factory=dict)
    """The newest windows of work requests of each flow and peer (``FlowWindow.place``), the oldest first."""
    work_ns: int = 0
    """When the newest came, in ns since the epoch."""
    completions: dict[FlowPlace, float] = field(default_factory=dict)
    """As ``delays``, of work requests: the median time from post to completion in the newest windows, µs."""

    def take_work(self, windows: Sequence[FlowWindow], wall_ns: int) -> None:
        """New windows of work requests; those of at most :data:`MAX_FLOWS` flows are kept."""
        completions: dict[FlowPlace, float] = {}
        for window in windows:
            work = window.work
            if window.scope is Scope.PORT or not work.seen_s > 0:
                continue
            place = window.place
            kept = self.work.get(place)
            if kept is None:
                if len(self.work) >= MAX_FLOWS:
                    # Flows that have long said nothing: their processes have ended.
                    self.work = {at: old for at, old in self.work.items() if work.end_ns - old[-1].work.end_ns < MEMORY_NS}
                if len(self.work) >= MAX_FLOWS:
                    continue
                kept = self.work[place] = deque(maxlen=KEPT_WINDOWS)
            kept.append(window)
            delay = work.latency_p50_ns if work.counting is not Counting.TCP and window.role == "data" else None
            if delay is not None and window.direction is Direction.SEND and window.comm_hash is not None:
                flow = window.pid, window.comm_hash, window.rank or 0, window.peer or 0
                completions[flow] = max(completions.get(flow, 0.0), delay / 1e3)
        if completions:
            self.work_ns, self.completions = wall_ns, completions

    def take_flows(self, flows: Sequence[FlowRecord], wall_ns: int) -> None:
        """What the connections do now; at most :data:`MAX_FLOWS` of them."""
        self.flows, self.flows_ns = tuple(flows[:MAX_FLOWS]), wall_ns
        self.lossy, self.delays = {way: seen for way, seen in self.lossy.items() if seen > wall_ns - LOSSY_NS}, {}
        for way, flow in self._known_ways():
            # The timeouts it waits in now are not counted: a path that has just died has as many.
            lost = (flow.retries or 0) - (flow.socket.timeouts or 0) if flow.socket is not None else 0
            if lost >= LOSSY_SEGMENTS and (way in self.lossy or len(self.lossy) < MAX_FLOWS):
                self.lossy[way] = wall_ns
            delay = flow.delay_us if flow.sends_data else None
            if delay is not None:
                place = flow.pid, *way
                self.delays[place] = max(self.delays.get(place, 0.0), delay)

    def measured(self) -> tuple[int, dict[FlowPlace, float]]:
        """When what the connections send was last seen to be acknowledged, in ns since the epoch, and how long that took, µs."""
        return (self.flows_ns, self.delays) if self.delays else (self.work_ns, self.completions)

    def known_sockets(self) -> Iterator[tuple[Way, FlowRecord, SocketFacts]]:
        """The connections over sockets of which it is known whom they connect."""
        return ((way, flow, flow.socket) for way, flow in self._known_ways() if flow.socket is not None)

    def _known_ways(self) -> Iterator[tuple[Way, FlowRecord]]:
        return ((way, flow) for flow in self.flows if (way := way_of(flow)) is not None)

    def last_change(self, nic: NicRecord) -> LinkChange | None:
        """What a NIC's link did last, as far as that was seen."""
        return next(self._newest_changes(nic), None)

    def _newest_changes(self, nic: NicRecord) -> Iterator[LinkChange]:
        """What is remembered of a NIC's link, the newest first."""
        keys = {nic.key, (nic.host, nic.namespace, nic.netdev)}
        return (change for change in reversed(self.changes) if change.key in keys)

    def last_outage(self, nic: NicRecord) -> tuple[float, float | None] | None:
        """From when to when a NIC was down last, in seconds since the epoch, as far as that was seen; ``None`` for the end: it
        still is. Up for a moment only, as while a carrier is found, is not up.
        """
        began: int | None = None
        ended: int | None = None
        for change in self._newest_changes(nic):
            if not change.up:
                began = change.wall_ns
            elif began is None:
                ended = change.wall_ns
            elif began - change.wall_ns > SETTLED_NS:
                break
        return (began / 1e9, ended / 1e9 if ended is not None else None) if began is not None else None


@dataclass(slots=True)
class NetworkMemory:
    """The newest word of every host about its network; bounded."""

    hosts: dict[str, HostNetwork] = field(default_factory=dict)

    def feed(self, host: str, look: NetworkLook, wall_ns: int) -> None:
        """Take what a host says; ``wall_ns`` is when it looked."""
        known = self._host(host)
        if known is None:
            return
        if look.nics:
            known.nics = {nic.key: _with_users(nic, known.nics.get(nic.key)) for nic in look.nics}
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
        known = self._host(host)
        if known is not None:
            known.take_work(windows, wall_ns)

    def _host(self, host: str) -> HostNetwork | None:
        """What is known of a host; ``None`` where there are too many."""
        if host not in self.hosts and len(self.hosts) < MAX_HOSTS:
            self.hosts[host] = HostNetwork()
        return self.hosts.get(host)

    def delays(self) -> dict[str, tuple[int, dict[FlowPlace, float]]]:
        """Of each host when its connections were measured, in ns since the epoch, and their delays, µs: round trips of sockets,
        else the times in which work requests are completed.
        """
        measured = ((host, *known.measured()) for host, known in self.hosts.items())
        return {host: (time_ns, delays) for host, time_ns, delays in measured if delays}


def way_of(flow: FlowRecord) -> Way | None:
    """Which connection it is, where that is known."""
    known = flow.comm_hash is not None and flow.rank is not None and flow.peer is not None
    return Way(flow.comm_hash or 0, flow.rank or 0, flow.peer or 0) if known else None


def _with_users(nic: NicRecord, before: NicRecord | None) -> NicRecord:
    """A NIC keeps its users: between two operations nobody is seen to use it, and over a dead link nothing begins."""
    if before is None or not before.used_by:
        return nic
    return replace(nic, used_by=tuple(sorted({*nic.used_by, *before.used_by})))


# --- orders ---------------------------------------------------------------------------------------------------------------

MOST_PIDS = 64
"""Bound: processes of one order, and of a job of which all are counted where nobody is named."""
STANDS_S = 3.0
"""Bound: a job of which nobody is named yet is counted once it has stood so long: before anybody is, after five seconds."""
AGAIN_NS = 30_000_000_000
"""Bound: a process is not counted again before."""
SAME_NS = 60_000_000_000
"""Bound: nor before this in one standstill. Counts stay what they are then, but a path may show only later that it is stuck."""
MOST_REMEMBERED = 100_000
"""Bound: processes of which it is remembered when they were counted."""


@dataclass(slots=True)
class Ordering:
    """Decides on orders, and remembers what it has ordered. ``newest`` is the number of the last order."""

    newest: int = 0
    _last: dict[tuple[str, int], int] = field(default_factory=dict)

    def orders(
        self, judged: Iterable[tuple[Job, Verdict]], hosts: Collection[str], now_ns: int, *, asked: bool = False
    ) -> list[WorkOrder]:
        """What is to be counted on ``hosts``, where it can be, after these verdicts. O(members of jobs that stand or slow)."""
        found: dict[tuple[str, bool], list[int]] = {}
        for job, verdict in judged if hosts else ():
            still = min((member.still_s for member in job.members if not member.gone), default=0.0)
            standing = still > 0
            if not (asked or still >= STANDS_S or verdict.verdict_class.accuses):
                continue
            for member in _suspects(job, verdict):
                place = member.info.host, member.info.pid
                if member.gone or place[0] not in hosts:
                    continue
                ago = now_ns - self._last.get(place, -SAME_NS)
                if not asked and ago < (SAME_NS if standing and ago < still * 1e9 else AGAIN_NS):
                    continue
                self._last[place] = now_ns
                found.setdefault((place[0], standing), []).append(place[1])
        if len(self._last) > MOST_REMEMBERED:
            self._last.clear()
        orders = []
        for (host, standing), pids in found.items():
            self.newest += 1
            orders.append(WorkOrder(self.newest, host, tuple(sorted(set(pids))[:MOST_PIDS]), standing))
        return orders


def _suspects(job: Job, verdict: Verdict) -> Sequence[Member]:
    """All of a small job, whose flows with those named count as well; of a large one those that are named."""
    if len(job.members) <= MOST_PIDS:
        return job.members
    named = {(culprit.host, culprit.pid) for culprit in verdict.culprits}
    return [member for member in job.members if (member.info.host, member.info.pid) in named]
