"""Flows of a set of processes: NCCL's own connections, joined with the sockets or queue pairs that carry them.

Three sources, each of which may be missing: the state plane (which connections, and their steps), the kernel's TCP_INFO of the
sockets behind them, and the wire plane's accounts of queue pairs. A flow is listed as soon as NCCL has the connection.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ncclwatch.collect.paths import StuckPath
from ncclwatch.collect.step_rates import ConnectionKey, StepRates, absolute_counts, in_network, running_counts
from ncclwatch.errors import NcclwatchError, TargetGoneError
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, QueuePairEnds, RdmaCounts
from ncclwatch.model.state import Direction, ProcessSample
from ncclwatch.nic.rdma import SYS, read_ports
from ncclwatch.nic.sockets import SocketTable
from ncclwatch.target.session import TargetProcess
from ncclwatch.wire.flows import Flow
from ncclwatch.wire.nccl_connections import NetConnection, net_connections, network_name
from ncclwatch.wire.nccl_queues import QueueOwner, pairs_of, queue_owners, remote_address
from ncclwatch.wire.nccl_sockets import SOCKET_NETWORK, connection_sockets
from ncclwatch.wire.session import QpKey, VerbsUser, WireSession
from ncclwatch.wire.socket_flows import SocketJudgement, SocketWatch

SOCKET_INTERVAL_S = 0.25
"""How often the kernel is asked for the sockets: a window of throughput."""
OWNER_INTERVAL_S = 1.0
"""How often connections, and the queue pairs behind them, are looked up."""
CALM_INTERVAL_S = 5.0
"""The same for a session that goes on for days."""
REST_INTERVAL_S = 60.0
"""The same while all is well: connections are made with communicators, and those disturb."""
STILL_S = 1.0
"""An open operation without a step for this long is said to stand still."""


@dataclass(slots=True)
class _Process:
    """What is known of one process. ``open`` are the connections on which an operation runs in the last look."""

    target: TargetProcess
    connections: list[NetConnection] = field(default_factory=list)
    open: frozenset[ConnectionKey] = frozenset()
    in_network: dict[ConnectionKey, int] = field(default_factory=dict)
    descriptors: dict[ConnectionKey, tuple[int, ...]] = field(default_factory=dict)
    """The sockets of each connection, until connections are looked up again."""
    pairs: dict[ConnectionKey, tuple[QueuePairEnds, ...]] = field(default_factory=dict)
    """The queue pairs of each connection, likewise."""


class FlowCollector:
    """Looks at processes again and again, and lists their flows. The targets stay the caller's."""

    def __init__(self, targets: Iterable[TargetProcess], wire: WireSession | None = None, *, sys: Path = SYS) -> None:
        self._processes = {target.pid: _Process(target) for target in targets}
        self.wire = wire
        self.rates = StepRates()
        self.notes: dict[str, None] = {}
        """What could not be looked at, in words and without repetition."""
        self._sys = sys
        self._table = SocketTable()
        self._sockets: dict[ConnectionKey, SocketWatch] = {}
        self._judged: dict[ConnectionKey, SocketJudgement] = {}
        self._owners: dict[QpKey, QueueOwner] = {}
        self._retries_before = _retries(sys)
        self._next_sockets = 0.0
        self._connections_at = -math.inf

    def close(self) -> None:
        """Let go of what is held to ask the kernel; targets and wire plane stay the caller's."""
        self._table.close()

    def users(self) -> list[VerbsUser]:
        """These processes as the wire plane needs to know them; look once (:meth:`step`) before."""
        return [
            VerbsUser(
                pid,
                process.target.layout,
                process.target.load_bias or 0,
                tuple(sorted({c.network for c in process.connections} | self._networks(process))),
                process.target.mappings(),
            )
            for pid, process in self._processes.items()
        ]

    def networks(self) -> dict[int, tuple[str, ...]]:
        """Process → NCCL's names of the networks its communicators use."""
        return {pid: tuple(sorted(self._networks(process))) for pid, process in self._processes.items()}

    @staticmethod
    def _networks(process: _Process) -> set[str]:
        names = {network_name(process.target.decoder, state) for state in process.target.communicator_states}
        return {name for name in names if name}

    @property
    def alive(self) -> bool:
        """Whether any process is left."""
        return bool(self._processes)

    # --- one look ----------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Look at every process once, at sockets and queue pairs when it is time, and let the wire plane do its part."""
        for pid, process in list(self._processes.items()):
            try:
                self._look(process)
            except TargetGoneError:
                self._note(f"pid {pid} has ended")
                self.drop(pid)
            except NcclwatchError as error:
                self._note(f"pid {pid}: {error}")
        self._look_behind(OWNER_INTERVAL_S)

    def observe(self, looks: Iterable[tuple[TargetProcess, ProcessSample]], *, calm: bool = False) -> None:
        """Take looks that somebody else has made: of all processes whose flows are wanted, no others. ``calm``: all is well."""
        seen = {target.pid: (target, sample) for target, sample in looks}
        for pid, process in list(self._processes.items()):
            if pid not in seen or seen[pid][0] is not process.target:
                self.drop(pid)
        for pid, (target, sample) in seen.items():
            if pid not in self._processes:
                self._processes[pid] = _Process(target)
                self.refresh()
            self._take(self._processes[pid], sample)
        self._look_behind(REST_INTERVAL_S if calm else CALM_INTERVAL_S)

    def _look_behind(self, connections_every_s: float) -> None:
        """What lies behind the connections: sockets and queue pairs."""
        now = time.monotonic()
        if now >= self._connections_at + connections_every_s:
            self._connections_at = now
            self._look_at_connections()
        if now >= self._next_sockets:
            self._next_sockets = now + SOCKET_INTERVAL_S
            self._look_at_sockets()
        if self.wire is not None and self.wire.running:
            self.wire.step()

    def refresh(self) -> None:
        """Look connections and their queue pairs up again at the next step: the wire plane has started, say."""
        self._connections_at = -math.inf

    def drop(self, pid: int) -> None:
        """Let go of a process."""
        self._processes.pop(pid, None)
        self.rates.forget([pid])
        for kept in (self._sockets, self._judged):
            for key in [key for key in kept if key[0] == pid]:
                del kept[key]

    def _look(self, process: _Process) -> None:
        self._take(process, process.target.sample())

    def _take(self, process: _Process, sample: ProcessSample) -> None:
        process.open = frozenset(running_counts(sample))
        process.in_network = in_network(sample)
        self.rates.feed(sample.time_ns, absolute_counts(sample))

    def _look_at_sockets(self) -> None:
        pids = [
            pid for pid, process in self._processes.items() if any(one.network == SOCKET_NETWORK for one in process.connections)
        ]
        if not pids:
            return
        try:
            sockets = self._table.by_descriptor(pids)
        except (NcclwatchError, OSError) as error:
            self._note(f"sockets: {error}")
            return
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        for pid in pids:
            process = self._processes[pid]
            decoder = process.target.decoder
            for one in process.connections:
                if one.network != SOCKET_NETWORK:
                    continue
                key = connection_key(pid, one)
                descriptors = process.descriptors.get(key, ())
                if not descriptors or not all(fd in sockets[pid] for fd in descriptors):
                    try:
                        descriptors = tuple(connection_sockets(decoder, one.communicator, sockets[pid]))
                    except TargetGoneError:
                        break
                    process.descriptors[key] = descriptors
                watch = self._sockets.setdefault(key, SocketWatch(one.direction))
                self._judged[key] = watch.look([sockets[pid][fd] for fd in descriptors], now)
        for key in [key for key in self._judged if key[0] in pids and key not in self._sockets]:
            del self._judged[key]

    def _look_at_connections(self) -> None:
        self._owners = {}
        self._table.refresh()
        for pid, process in self._processes.items():
            target = process.target
            process.descriptors.clear()
            process.pairs.clear()
            try:
                process.connections = net_connections(target.decoder, target.load_bias, target.communicator_states)
                for one in process.connections:
                    if one.network == "IB" and (pairs := pairs_of(target.decoder, one)):
                        remote = remote_address(target.decoder, one)
                        ends = (QueuePairEnds(pair.number, index, remote) for index, pair in enumerate(pairs))
                        process.pairs[connection_key(pid, one)] = tuple(ends)
                if self.wire is None or not self.wire.running:
                    continue
                for state in target.communicator_states:
                    record = state.record
                    for owner in queue_owners(target.decoder, record.hash, record.rank, state.connectors):
                        # Connections that share a queue pair: the first one names it.
                        self._owners.setdefault((pid, owner.pair.context, owner.pair.number), owner)
            except (NcclwatchError, OSError) as error:
                self._note(f"pid {pid}: {error}")

    def connections(self) -> Iterator[tuple[TargetProcess, Sequence[NetConnection]]]:
        """The network connections of every process as last looked up: another list once they were looked up again."""
        return ((process.target, process.connections) for process in self._processes.values())

    def socket_of(self, pid: int, one: NetConnection) -> SocketJudgement | None:
        """What the sockets of a connection were last seen to do."""
        return self._judged.get(connection_key(pid, one))

    def stuck(self, pids: Collection[int]) -> list[StuckPath]:
        """The connections of these processes on which steps were handed to the network and are not completed, or bytes are not
        acknowledged, with the addresses of their far ends, where those are known.
        """
        found = []
        for pid, process in ((pid, self._processes[pid]) for pid in pids if pid in self._processes):
            for one in process.connections:
                key = connection_key(pid, one)
                judged = self._judged.get(key)
                facts = judged.facts if judged is not None else None
                if one.direction is not Direction.SEND or not (key in process.in_network or (facts and facts.unacknowledged)):
                    continue
                if facts is not None:
                    found.append(StuckPath(key, facts.remote.rpartition(":")[0].strip("[]")))
                elif address := remote_address(process.target.decoder, one):
                    found.append(StuckPath(key, address, one.device))
        return found

    def _note(self, text: str) -> None:
        if len(self.notes) < 64:
            self.notes[text] = None

    # --- what is seen --------------------------------------------------------------------------------------------------------

    def flows(self) -> list[FlowRecord]:
        """All flows as of the last look: those of NCCL's connections by rank, channel and peer, then other queue pairs."""
        accounted = self._accounted()
        by_connection: dict[tuple[int, int, int, int, int, str], list[Flow]] = {}
        strangers = []
        for flow in accounted:
            if flow.comm_hash is None or flow.rank is None or flow.channel is None or flow.peer is None or flow.direction is None:
                strangers.append(flow)
            else:
                place = (flow.pid, flow.comm_hash, flow.rank, flow.channel, flow.peer, str(flow.direction))
                by_connection.setdefault(place, []).append(flow)
        records: list[FlowRecord] = []
        for pid, process in self._processes.items():
            sharing = Counter(one.communicator for one in process.connections if one.communicator)
            for one in process.connections:
                place = (pid, one.comm_hash, one.rank, one.channel, one.peer, str(one.direction))
                # One connection has several queue pairs (NCCL_IB_QPS_PER_CONNECTION): a flow each.
                pairs = process.pairs.get(connection_key(pid, one), ())
                counted = by_connection.get(place, [])
                ends = {pair.queue_pair: pair for pair in pairs}
                joined: list[tuple[Flow | None, QueuePairEnds | None]] = [(flow, ends.pop(flow.qp, None)) for flow in counted]
                joined += [(None, pair) for pair in ends.values()]
                records += [
                    self._record(process, one, flow, pair, sharing[one.communicator]) for flow, pair in joined or [(None, None)]
                ]
        records.sort(key=_order)
        return records + [_stranger(flow, self._processes) for flow in strangers]

    def _accounted(self) -> list[Flow]:
        if self.wire is None or not self.wire.running:
            return []
        before, now = self._retries_before, _retries(self._sys)
        retries = {name: total - before.get(name, total) for name, total in now.items()}
        return self.wire.flows(self._owners, retries, self._step_rates())

    def _step_rates(self) -> dict[tuple[int, int, int, int, Direction], float]:
        """Steps a second by (pid, communicator, channel, peer, direction), over the connections between two ranks."""
        rates: defaultdict[tuple[int, int, int, int, Direction], float] = defaultdict(float)
        for pid, process in self._processes.items():
            for one in process.connections:
                found = self.rates.rate(connection_key(pid, one))
                if found is not None:
                    rates[pid, one.comm_hash, one.channel, one.peer, one.direction] += found.per_second
        return dict(rates)

    def _record(
        self, process: _Process, one: NetConnection, flow: Flow | None, ends: QueuePairEnds | None, shared_by: int
    ) -> FlowRecord:
        pid = process.target.pid
        key = connection_key(pid, one)
        judged = self._judged.get(key)
        kind = {SOCKET_NETWORK: FlowKind.SOCKET, "IB": FlowKind.RDMA}.get(one.network, FlowKind.RDMA if flow else FlowKind.OTHER)
        steps = self.rates.rate(key)
        traits = process.target.info.traits
        if flow is not None:
            state, reason = flow.state, flow.reason
        elif judged is not None:
            state, reason = judged.state, judged.reason
        else:
            state, reason = FlowState.UNKNOWN, ""
        if state in (FlowState.UNKNOWN, FlowState.IDLE) and not (flow is not None and flow.exact):
            state, reason = self._by_steps(process, key, state, reason, judges_wire=judged is None)
        return FlowRecord(
            pid=pid,
            kind=kind,
            network=one.network,
            device=one.device or (flow.device if flow else "") or _numbered(one),
            port=flow.port if flow else 0,
            state=state,
            reason=reason,
            global_rank=process.target.info.rank,
            comm_hash=one.comm_hash,
            rank=one.rank,
            channel=one.channel,
            peer=one.peer,
            direction=one.direction,
            connection_index=one.index,
            role=flow.role if flow else "data",
            bandwidth=flow.bandwidth if flow else judged.bandwidth if judged else None,
            expected=flow.expected if flow else judged.expected if judged else None,
            retries=flow.retries if flow else judged.retransmitted if judged else None,
            steps=steps,
            rdma=_counts(flow) if flow else None,
            socket=judged.facts if judged else None,
            shared_by=max(shared_by, 1),
            ends=ends,
            adaptive=one.network == "IB" and traits is not None and traits.adaptive_routing,
        )

    def _by_steps(
        self, process: _Process, key: ConnectionKey, state: FlowState, reason: str, *, judges_wire: bool
    ) -> tuple[FlowState, str]:
        """What the proxy's steps say where the wire says nothing, or that it is idle.

        ``judges_wire``: nothing better (TCP_INFO) tells whether what the proxy handed over arrives.
        """
        steps, still_s = self.rates.rate(key), self.rates.still_s(key)
        handed = process.in_network.get(key, 0)
        if judges_wire and handed and still_s >= STILL_S:
            return FlowState.STALLED, f"{handed} steps handed to the network, none completed for {still_s:.1f} s"
        if steps is not None and steps.changes:
            return FlowState.ACTIVE, "" if state is FlowState.IDLE else reason
        if key in process.open:
            since = f"no step for {still_s:.1f} s" if still_s >= STILL_S else "no step yet"
            return state, "; ".join(part for part in (f"an operation is open, {since}", reason) if part)
        return (FlowState.IDLE if steps is not None else state), reason


def connection_key(pid: int, one: NetConnection) -> ConnectionKey:
    """What no other connection has."""
    return pid, one.comm_hash, one.rank, one.channel, one.peer, one.direction, one.index


def _order(record: FlowRecord) -> tuple[int, ...]:
    rank = record.global_rank if record.global_rank is not None else 1 << 30
    place = (record.connection_index or 0, record.channel or 0, record.peer or 0)
    return rank, record.pid, record.comm_hash or 0, record.direction is Direction.RECV, *place


def _numbered(one: NetConnection) -> str:
    return f"device {one.net_device}" if one.net_device is not None else ""


def _counts(flow: Flow) -> RdmaCounts:
    return RdmaCounts(
        queue_pair=flow.qp,
        posted=flow.posted,
        completed=flow.completed,
        in_flight=flow.in_flight,
        exact=flow.exact,
        latency_p50_ns=flow.latency_p50_ns,
        latency_p99_ns=flow.latency_p99_ns,
        errors=dict(flow.errors),
    )


def _stranger(flow: Flow, processes: dict[int, _Process]) -> FlowRecord:
    """A queue pair that no connection of NCCL's names: of another library, or of a plugin."""
    process = processes.get(flow.pid)
    return FlowRecord(
        pid=flow.pid,
        kind=FlowKind.RDMA,
        network="",
        device=flow.device,
        port=flow.port,
        state=flow.state,
        reason=flow.reason,
        global_rank=process.target.info.rank if process else None,
        role=flow.role,
        bandwidth=flow.bandwidth,
        expected=flow.expected,
        retries=flow.retries,
        rdma=_counts(flow),
    )


def _retries(sys: Path) -> dict[str, int]:
    """Signs of loss of every RDMA device, over its ports."""
    totals: Counter[str] = Counter()
    for port in read_ports(sys):
        totals[port.device] += port.retries
    return dict(totals)
