"""What the NICs of the nodes say, beside a verdict: a link that is down, a port that counts errors, what the kernel logged.

They are attached to a verdict that stands as evidence and next steps, and name the NIC (a port that is down below a standstill
makes the verdict itself: see :mod:`ncclwatch.engine.ports`). Only what concerns the ranks of the verdict is: a NIC that its
connections use, or a line of the kernel's log that names a culprit's process or came from a culprit's host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ncclwatch.engine.dead_paths import DeadPath
from ncclwatch.engine.flow_lines import LOST, flow_lines
from ncclwatch.engine.patience import RETRY_S
from ncclwatch.engine.ports import PortDown
from ncclwatch.engine.slow.delay_matrix import delay_lines, delay_us, is_sending
from ncclwatch.engine.slow.round_trips import FlowPlace
from ncclwatch.model.network import FlowRecord, FlowState, KernelLogLine, LinkChange, NetworkLook, NicKey, NicRecord, SocketFacts
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass

MEMORY_NS = 900_000_000_000
"""Changes and log lines older than this are not told any more."""
MAX_KEPT = 200
MAX_HOSTS = 65536
MAX_FLOWS = 4096
RETRY_LOSSY_S = 60.0
"""Connections that have lost much of late are given so long: an answer after 6.2 s makes the measured round trip so long that
the next tries come only 7, 21 and 49 s after what was lost.
"""
RETRY_ALIVE_S = 30.0
"""So long where something came through meanwhile: the round trip then holds the wait, and the next timeout comes late."""
LAST_TIMEOUT = 5
"""Retransmission timeouts in a row after which TCP's next try is not waited for: 6.2 s where the first comes after 0.2 s."""
LAST_LOSSY_TIMEOUT = 7
"""Likewise on connections that have lost much of late: 25 s where the first comes after 0.2 s. Where a tenth is lost both ways
one try in five goes unanswered, and one row of seven in a hundred thousand.
"""
LOSSY_NS = 120_000_000_000
"""A connection that has lost much is known for it so long: while it stands still it loses nothing that could be counted."""
FLOWS_STALE_NS = 10_000_000_000
"""A host that has listed no flow for this long has none."""
SETTLED_NS = 3_000_000_000
"""A NIC that was up for less between two outages was not up."""
OUT_OF_MEMORY = (
    "it was killed for want of memory: raise the limit of its cgroup, or find what grew (data loaders, pinned buffers, /dev/shm)"
)
MAX_LINES = 6
"""Evidence lines that one verdict gets from here."""
LIKELY_LOSS = 10
"""A port that counted fewer signs of loss than this is not mentioned: a few happen every day."""

NETWORK_CLASSES = frozenset(
    {VerdictClass.HARDWARE, VerdictClass.SLOW_COMMUNICATION, VerdictClass.SLOW_MIXED, VerdictClass.UNKNOWN, VerdictClass.ERROR}
)
"""Verdicts that a NIC in trouble can explain; a stopped process is stopped whatever the network does."""

MISSING_SOMETHING = frozenset({VerdictClass.DEAD, VerdictClass.NOT_ENTERED, VerdictClass.INIT_HANG})
"""Verdicts that a helper process which was killed can explain."""
HELPER_S = 120.0

Way = tuple[int, int, int]
"""A connection: its communicator's hash, rank and peer in it."""


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

    def take_flows(self, flows: Sequence[FlowRecord], wall_ns: int) -> None:
        """What the connections do now; at most :data:`MAX_FLOWS` of them."""
        self.flows, self.flows_ns = tuple(flows[:MAX_FLOWS]), wall_ns
        self.lossy = {way: seen for way, seen in self.lossy.items() if seen > wall_ns - LOSSY_NS}
        for way, flow, facts in self.known_sockets():
            # The timeouts it waits in now are not counted: a path that has just died has as many.
            if (flow.retries or 0) - (facts.timeouts or 0) >= LOST and (way in self.lossy or len(self.lossy) < MAX_FLOWS):
                self.lossy[way] = wall_ns
        self.delays = {}
        for way, flow in self._known_ways():
            delay = delay_us(flow) if is_sending(flow) else None
            if delay is not None:
                place = flow.pid, *way
                self.delays[place] = max(self.delays.get(place, 0.0), delay)

    def known_sockets(self) -> Iterator[tuple[Way, FlowRecord, SocketFacts]]:
        """The connections over sockets of which it is known whom they connect."""
        return ((way, flow, flow.socket) for way, flow in self._known_ways() if flow.socket is not None)

    def _known_ways(self) -> Iterator[tuple[Way, FlowRecord]]:
        for flow in self.flows:
            if flow.comm_hash is not None and flow.rank is not None and flow.peer is not None:
                yield (flow.comm_hash, flow.rank, flow.peer), flow

    def tries_left(self, way: Way, facts: SocketFacts) -> bool:
        """Whether TCP is to be given another try on a connection whose sockets wait for an answer."""
        return (facts.timeouts or 0) < (LAST_LOSSY_TIMEOUT if way in self.lossy else LAST_TIMEOUT)

    def down_since(self, nic: NicRecord) -> LinkChange | None:
        """The change that took a link down, if that is known and it was the last one."""
        last = next(self._newest_changes(nic), None)
        return last if last is not None and not last.up else None

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
        """Take one look of a host; ``wall_ns`` is when it was taken."""
        known = self.hosts.get(host)
        if known is None:
            if len(self.hosts) >= MAX_HOSTS:
                return
            known = self.hosts[host] = HostNetwork()
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

    def ports_down(self) -> list[PortDown]:
        """NICs that ranks use and that are, or were, down, each with when that was, where it was seen."""
        found = []
        for _, known in sorted(self.hosts.items()):
            for nic in known.nics.values():
                outage = known.last_outage(nic) if nic.used_by else None
                if outage is not None and (outage[1] is None) is not nic.up:
                    found.append(PortDown(nic, *outage))
                elif nic.used_by and not nic.up:
                    found.append(PortDown(nic))
        return found

    def delays(self) -> dict[str, tuple[int, dict[FlowPlace, float]]]:
        """Of each host when its connections were listed, in ns since the epoch, and their delays, µs."""
        return {host: (known.flows_ns, known.delays) for host, known in self.hosts.items() if known.delays}

    def retrying(self) -> dict[Way, float]:
        """Connections (communicator's hash, rank and peer in it) whose sockets wait to send again what was lost, and may come
        through, each with the seconds of standstill it is worth waiting for that: each time they wait twice as long, so a link
        that only loses much can stand still for many seconds.
        """
        found: dict[Way, float] = {}
        for known in self.hosts.values():
            for way, _, facts in known.known_sockets():
                if facts.unacknowledged and facts.timeouts is not None and known.tries_left(way, facts):
                    alone = RETRY_S if facts.timeouts else RETRY_ALIVE_S
                    found[way] = max(found.get(way, 0.0), RETRY_LOSSY_S if way in known.lossy else alone)
        return found

    def dead_paths(self) -> list[DeadPath]:
        """Connections whose sockets have sent the same again and again, and longer than TCP is given, without an answer."""
        return [
            DeadPath(*way, _address(facts.local), _address(facts.remote), flow.global_rank)
            for known in self.hosts.values()
            for way, flow, facts in known.known_sockets()
            if flow.state is FlowState.STALLED and facts.unacknowledged and not known.tries_left(way, facts)
        ]

    def explain(self, verdict: Verdict) -> Verdict:
        """The verdict with what the NICs have to say about it, itself when that is nothing. Its id stays the same."""
        logged = list(self._kernel_lines(verdict))
        evidence = [f"kernel log of {line.origin}: {line.text}" for line in logged]
        steps = [OUT_OF_MEMORY] if any(line.kind == "memory" and _names(line, verdict.culprits) for line in logged) else []
        if verdict.verdict_class in NETWORK_CLASSES or verdict.verdict_class is VerdictClass.NOT_ENTERED:
            for line, step in self._nic_lines(verdict):
                evidence.append(line)
                steps.append(step)
        if verdict.verdict_class in NETWORK_CLASSES:
            flows = [flow for _, known in sorted(self.hosts.items()) for flow in known.flows]
            slow = verdict.verdict_class.slow
            lines, lossy = flow_lines(flows, verdict, slow=slow)
            evidence += lines
            steps += lossy
            evidence += delay_lines(flows, verdict) if slow else []
        evidence = [line for line in dict.fromkeys(evidence) if line not in verdict.evidence][:MAX_LINES]
        if not evidence:
            return verdict
        planes = verdict.planes if "nic" in verdict.planes else (*verdict.planes, "nic")
        fresh = tuple(step for step in dict.fromkeys(steps) if step not in verdict.next_steps)
        return replace(verdict, evidence=(*verdict.evidence, *evidence), next_steps=(*fresh, *verdict.next_steps), planes=planes)

    def _nic_lines(self, verdict: Verdict) -> Iterator[tuple[str, str]]:
        """(evidence, next step) for every NIC in trouble that ranks of this verdict use."""
        ranks = {culprit.rank for culprit in verdict.culprits if culprit.rank is not None} | set(verdict.victims)
        device = verdict.link.device if verdict.link else ""
        culprits = {culprit.host for culprit in verdict.culprits}
        for host, known in sorted(self.hosts.items()):
            used = [nic for nic in known.nics.values() if nic.used_by and (not ranks or ranks & set(nic.used_by))]
            # Every host has an eth0, and so may each of its containers: the name alone says little where users are known.
            if not any(_is_called(nic, device) for nic in used) and (host in culprits or not culprits):
                used += [nic for nic in known.nics.values() if not nic.used_by and _is_called(nic, device)]
            if verdict.verdict_class is VerdictClass.NOT_ENTERED:
                # Whose port is down may have lost its operations to the error: of a rank that came late a few errors say nothing.
                used = [nic for nic in used if not nic.up]
            for nic in used:
                if (said := _trouble(host, nic, known, ranks)) is not None:
                    yield said

    def _kernel_lines(self, verdict: Verdict) -> Iterator[KernelLogLine]:
        """Lines of the kernel's log on hosts of culprits: Xids, NIC errors, processes that it ended."""
        if not verdict.verdict_class.accuses and verdict.verdict_class is not VerdictClass.UNKNOWN:
            return
        hosts = {culprit.host for culprit in verdict.culprits} or set(self.hosts)
        for host in sorted(hosts & set(self.hosts)):
            for _, line in list(self.hosts[host].kernel)[-MAX_LINES:]:
                if line.pid is None or not verdict.culprits or _names(line, verdict.culprits) or _is_a_helpers(line, verdict):
                    yield line


def _address(end: str) -> str:
    """``10.0.0.1`` of ``10.0.0.1:4711``."""
    return end.rpartition(":")[0]


def _is_called(nic: NicRecord, device: str) -> bool:
    return bool(device) and device in (nic.name, nic.name.partition(":")[0], nic.netdev)


def _with_users(nic: NicRecord, before: NicRecord | None) -> NicRecord:
    """A NIC keeps its users: between two operations nobody is seen to use it, and over a dead link nothing begins."""
    if before is None or not before.used_by:
        return nic
    return replace(nic, used_by=tuple(sorted({*nic.used_by, *before.used_by})))


def _trouble(host: str, nic: NicRecord, known: HostNetwork, ranks: Iterable[int]) -> tuple[str, str] | None:
    users = sorted(set(nic.used_by) & set(ranks)) or list(nic.used_by)
    used = (
        f"; {'rank' if len(users) == 1 else 'ranks'} {', '.join(map(str, users[:8]))} {'uses' if len(users) == 1 else 'use'} it"
    )
    used = used if users else ""
    if not nic.up:
        change = known.down_since(nic)
        what = change.detail if change is not None and change.detail else nic.state
        when = f", since {_clock(change.wall_ns)}" if change is not None else ""
        step = f"bring {nic.label} on {host} up again, or look at its cable and switch port ('ip link', 'ibstat')"
        return f"{nic.label} on {host} is down ({what}{when}){used}", step
    total = sum(nic.errors.values())
    if total < LIKELY_LOSS:
        return None
    worst = sorted(nic.errors.items(), key=lambda item: -item[1])[:3]
    counted = ", ".join(f"{name} {number}" for name, number in worst)
    step = f"look at the path of {nic.label} on {host}: its cable, transceiver and switch port, and congestion"
    return f"{nic.label} on {host} counted errors since watching began: {counted}{used}", step


def _is_a_helpers(line: KernelLogLine, verdict: Verdict) -> bool:
    """Whether another process was killed for want of memory shortly before, or since: a data loader's worker, perhaps."""
    began = verdict.since if verdict.since is not None else verdict.time
    if line.kind != "memory" or verdict.verdict_class not in MISSING_SOMETHING or began is None:
        return False
    return began - HELPER_S <= line.wall_ns / 1e9


def _names(line: KernelLogLine, culprits: Iterable[Culprit]) -> bool:
    return any((culprit.host, culprit.pid) == (line.host, line.pid) for culprit in culprits)


def _clock(wall_ns: int) -> str:
    from datetime import datetime

    return f"{datetime.fromtimestamp(wall_ns / 1e9):%H:%M:%S}"


def worst_nics(memory: Mapping[str, HostNetwork]) -> list[NicRecord]:
    """NICs that are used and in trouble, over all hosts."""
    return [nic for _, host in sorted(memory.items()) for nic in host.nics.values() if nic.is_trouble and nic.used_by]
