"""Looks at a job for some seconds and says how its operations used the links: what `ncclwatch.knowledge.tuning` judges.

Memory is read many times a second, which costs the job nothing: an operation *moves* from its first step that was handed to the
network, or came from there, until it is done. One that waits for its GPU to begin does not move yet. Bytes and busy times are the
kernel's, of sockets; of RDMA the port's counters, and looks at which steps were in the network.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ncclwatch.collect.flows import FlowCollector, connection_key
from ncclwatch.collect.network import NetworkWatch
from ncclwatch.collect.step_rates import ConnectionKey, in_network
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.network import NicRecord
from ncclwatch.model.state import Communicator, Direction, OpPhase, ProcessSample, ProxyOperation
from ncclwatch.model.tuning import CapacityFrom, CommunicatorUse, FlowUse, Kind, LinkUse, ProcessUse, TuningLook
from ncclwatch.nic.rdma import SYS
from ncclwatch.stopping import Stop
from ncclwatch.target.session import TargetProcess
from ncclwatch.wire.nccl_connections import NetConnection
from ncclwatch.wire.socket_flows import SocketJudgement

CPU_SHARE = 0.2
"""Of a core, for looking."""
REST_S = 0.002
MAX_PERIODS = 20_000
"""Of one process."""
SEGMENT = 1448
"""Bytes that a segment of TCP carries on Ethernet, with timestamps (RFC 7323)."""

Place = tuple[int, str]
"""(network namespace, name of the NIC)."""


@dataclass(slots=True)
class _Seen:
    """One process over all looks. ``periods`` are times of moving, in seconds; ``since`` is when the one that goes on began."""

    looks: int = 0
    moving: int = 0
    periods: list[tuple[float, float]] = field(default_factory=list)
    since: float | None = None
    cut: bool = True
    """What moved at the first look began before."""
    kinds: defaultdict[int, Counter[Kind]] = field(default_factory=lambda: defaultdict(Counter))
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Communicator → operations launched at the first and at the last look."""
    last: ProcessSample | None = None


def moves(operation: ProxyOperation) -> bool:
    """Whether an operation is under way on the network: some step was handed over or has arrived, and not all is done."""
    if operation.phase is not OpPhase.PROGRESS:
        return False
    return any((sub.transmitted or sub.received) and sub.done < sub.nsteps for sub in operation.subs)


class TuningLooks:
    """Looks again and again; a context manager. The targets stay the caller's."""

    def __init__(self, targets: Iterable[TargetProcess], host: str, *, sys: Path = SYS) -> None:
        self._targets = list(targets)
        self._sys = sys
        self._network = NetworkWatch(host, sys=sys, kernel_log=False, listens=False)
        self._flows = FlowCollector(self._targets, sys=sys)
        self._seen = {target.pid: _Seen() for target in self._targets}
        self._first: dict[ConnectionKey, SocketJudgement] = {}
        self._busy: Counter[ConnectionKey] = Counter()
        self._round_trips: defaultdict[ConnectionKey, list[int]] = defaultdict(lambda: [0, 0])
        """Sum of µs, and how many."""
        self._moving: Counter[int] = Counter()
        """Looks at which a process of a network namespace moved something."""
        self._namespaces: dict[int, int] = {}
        self._rounds = 0
        self._began = self._ended = 0.0

    def __enter__(self) -> TuningLooks:
        return self

    def __exit__(self, *_: object) -> None:
        self._flows.close()
        self._network.close()

    def watch(self, seconds: float, stop: Stop | None = None) -> None:
        """Look for so many seconds, or until nobody is left."""
        stop = stop or Stop()
        self._step()
        _, self._namespaces = self._network.nics_behind(self._flows.flows())
        self._began = time.monotonic()
        while not stop.is_set() and self._flows.alive and time.monotonic() - self._began < seconds:
            before = time.process_time()
            self._step()
            stop.wait(max(REST_S, (time.process_time() - before) * (1 / CPU_SHARE - 1)))
        self._ended = time.monotonic()

    def _step(self) -> None:
        looks = []
        for target in list(self._targets):
            try:
                looks.append((target, target.sample()))
            except NcclwatchError:
                self._targets.remove(target)
        self._flows.observe(looks)
        if not self._began:
            return
        self._rounds += 1
        moving = set()
        for target, sample in looks:
            if self._note(self._seen[target.pid], sample):
                moving.add(self._namespaces.get(target.pid, 0))
            self._busy.update(in_network(sample).keys())
        self._moving.update(moving)
        for target, connections in self._flows.connections():
            for one in connections:
                judged = self._flows.socket_of(target.pid, one)
                if judged is not None and judged.facts is not None:
                    self._first.setdefault(key := connection_key(target.pid, one), judged)
                    if judged.facts.rtt_us is not None:
                        self._round_trips[key][0] += judged.facts.rtt_us
                        self._round_trips[key][1] += 1

    def _note(self, seen: _Seen, sample: ProcessSample) -> bool:
        now = sample.time_ns / 1e9
        moving = [operation for operation in sample.operations if moves(operation)]
        seen.looks += 1
        seen.moving += bool(moving)
        seen.last = sample
        for comm_hash in {operation.comm_hash for operation in moving}:
            kinds = {_kind(operation) for operation in moving if operation.comm_hash == comm_hash}
            seen.kinds[comm_hash].update(kinds)
        for one in sample.communicators:
            if (count := _launched(one)) is not None:
                seen.counts[one.hash] = seen.counts.get(one.hash, (count, count))[0], count
        if moving and seen.since is None:
            seen.since = now
        elif not moving:
            if seen.since is not None and not seen.cut and len(seen.periods) < MAX_PERIODS:
                seen.periods.append((seen.since, now - seen.since))
            seen.since, seen.cut = None, False
        return bool(moving)

    # --- what was seen ---------------------------------------------------------------------------------------------------------

    def result(self, told: float | None = None) -> TuningLook:
        """All of it. ``told`` is what somebody says that each link carries, in bytes a second."""
        seconds = self._ended - self._began
        nics, _ = self._network.nics_behind(self._flows.flows())
        behind: defaultdict[Place, list[tuple[int, NetConnection]]] = defaultdict(list)
        for target, connections in self._flows.connections():
            for one in connections:
                # NCCL names devices that it merges "mlx5_0+mlx5_1": each carries its part, which is not known.
                if one.device and "+" not in one.device:
                    behind[self._namespaces.get(target.pid, 0), one.device].append((target.pid, one))
        links = [self._link(place, found, nics, seconds, told) for place, found in sorted(behind.items())]
        links = [link for link in links if link.flows]
        flows = [flow for link in links for flow in link.flows]
        return TuningLook(
            seconds=seconds,
            interval_s=seconds / self._rounds if self._rounds else 0.0,
            links=tuple(links),
            communicators=tuple(self._communicators(flows)),
            processes=tuple(self._process(pid, seen, flows) for pid, seen in self._seen.items() if seen.looks),
        )

    def _link(
        self,
        place: Place,
        found: Sequence[tuple[int, NetConnection]],
        nics: Sequence[NicRecord],
        seconds: float,
        told: float | None,
    ) -> LinkUse:
        namespace, name = place
        like = (nic for nic in nics if nic.name.split(":")[0] == name)
        nic = next((nic for nic in like if nic.kind == "rdma" or nic.namespace == namespace), None)
        sends, received = [], 0.0
        for pid, one in found:
            first, last = self._first.get(key := connection_key(pid, one)), self._flows.socket_of(pid, one)
            if one.direction is Direction.SEND:
                sends.append(self._flow(key, one, first, last))
            elif first is not None and last is not None:
                received += max(last.moved - first.moved, 0) / seconds
        flows = tuple(flow for flow in sends if flow.busy and flow.rate != 0)
        by_sockets = sum(flow.rate or 0.0 for flow in flows) if any(flow.sockets for flow in flows) else None
        capacity, source = (told, CapacityFrom.TOLD) if told else self._nominal(nic)
        return LinkUse(
            host=self._network.host,
            namespace=namespace,
            name=name,
            moving=max(self._moving[namespace] / self._rounds if self._rounds else 0.0, *(flow.busy for flow in sends)),
            send_rate=by_sockets if by_sockets is not None else nic.send_rate if nic else None,
            receive_rate=received if by_sockets is not None else nic.receive_rate if nic else None,
            flows=flows,
            capacity=capacity,
            capacity_from=source,
        )

    def _nominal(self, nic: NicRecord | None) -> tuple[float | None, CapacityFrom | None]:
        """What the driver says of a real NIC: the speed of a virtual one (``veth``: 10 Gbit/s, always) means nothing."""
        if nic is None or not nic.rate_gbps:
            return None, None
        if nic.kind == "netdev" and not nic.bond and not (self._sys / "class/net" / nic.name / "device").exists():
            return None, None
        return nic.rate_gbps * 1e9 / 8, CapacityFrom.DRIVER

    def _flow(
        self, key: ConnectionKey, one: NetConnection, first: SocketJudgement | None, last: SocketJudgement | None
    ) -> FlowUse:
        if first is None or last is None or first.facts is None or last.facts is None:
            share = self._busy[key] / self._rounds if self._rounds else 0.0
            return FlowUse(one.comm_hash, one.rank, one.peer, one.channel, None, share)
        seconds = max((last.time_ns - first.time_ns) / 1e9, 1e-9)
        sent = max(last.moved - first.moved, 0)
        total, times = self._round_trips[key]
        again = (last.facts.retransmits or 0) - (first.facts.retransmits or 0)
        return FlowUse(
            comm_hash=one.comm_hash,
            rank=one.rank,
            peer=one.peer,
            channel=one.channel,
            rate=sent / seconds,
            busy=min(max(last.busy_us - first.busy_us, 0) / 1e6 / seconds, 1.0),
            sockets=max(last.facts.sockets, 1),
            rtt_us=round(total / times) if times else None,
            min_rtt_us=last.facts.min_rtt_us,
            resent=again * SEGMENT / sent if sent and again >= 0 else None,
            window_limited=last.facts.window_limited,
        )

    def _communicators(self, flows: Sequence[FlowUse]) -> list[CommunicatorUse]:
        found: dict[int, CommunicatorUse] = {}
        for seen in self._seen.values():
            for record in seen.last.communicators if seen.last is not None else ():
                kinds = seen.kinds.get(record.hash)
                if not kinds:
                    continue
                total, known = sum(kinds.values()), found.get(record.hash)
                first, last = seen.counts.get(record.hash, (0, 0))
                use = CommunicatorUse(
                    comm_hash=record.hash,
                    nranks=record.nranks,
                    nnodes=record.nnodes,
                    ranks=tuple(sorted({record.rank, *(known.ranks if known else ())})),
                    kinds={kind: count / total for kind, count in kinds.most_common()},
                    moving=min(max(total / seen.looks, _busiest(flows, record.hash)), 1.0),
                    operations=last - first if record.hash in seen.counts else None,
                )
                # Of several ranks here the one that moved longest speaks.
                if known is not None and known.moving > use.moving:
                    use = CommunicatorUse(
                        known.comm_hash, known.nranks, known.nnodes, use.ranks, known.kinds, known.moving, known.operations
                    )
                found[record.hash] = use
        return list(found.values())

    def _process(self, pid: int, seen: _Seen, flows: Sequence[FlowUse]) -> ProcessUse:
        traits = seen.last.process.traits if seen.last is not None else None
        mine = seen.last.communicators if seen.last is not None else ()
        busy = max((_busiest(flows, one.hash, one.rank) for one in mine), default=0.0)
        return ProcessUse(
            pid=pid,
            rank=seen.last.rank if seen.last is not None else None,
            moving=max(seen.moving / seen.looks, busy),
            periods=tuple(seen.periods),
            settings=dict(traits.settings) if traits is not None else {},
        )


def _busiest(flows: Sequence[FlowUse], comm_hash: int, rank: int | None = None) -> float:
    """The share of the time in which something of a communicator was on its way.

    A socket takes more than it has sent: an operation of few steps may be done, to NCCL, while all of it is still in the kernel.
    """
    return max((flow.busy for flow in flows if flow.comm_hash == comm_hash and rank in (None, flow.rank)), default=0.0)


def _kind(operation: ProxyOperation) -> Kind:
    return Kind(operation.collective, operation.algorithm, operation.protocol)


def _launched(one: Communicator) -> int | None:
    """Collectives that were launched so far, by the counter that this release has."""
    return one.collective_count if one.collective_count is not None else one.op_count
