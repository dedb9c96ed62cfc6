"""The flow map: every connection of every job as an elephant flow, joined from what both of its ends tell.

A socket tells its five-tuple itself. Of a RoCE queue pair each end tells its own number and the other's address; so the numbers
of both, and the address of the sender, are known only where both ends were looked at. What is missing is said with each flow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from ncclwatch.model.network import FlowKind, FlowRecord, NicRecord, nic_label
from ncclwatch.model.paths import ElephantFlow, FiveTuple, NicPort, NodeView, Origin, Protocol
from ncclwatch.model.state import Direction
from ncclwatch.model.traits import ADAPTIVE_ROUTING
from ncclwatch.paths.measured import MeasuredFlow
from ncclwatch.paths.ports import ROCE_PORT, predict

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class MappedFlow:
    """An elephant flow, and how well it is known. ``flow.rank`` and ``flow.peer`` are ranks of the communicator ``comm_hash``.

    ``global_rank`` and ``global_peer`` are those of the job, where known. ``rule`` names the rule a predicted port is from.
    ``bond`` are the members of the sender's bonded NIC, empty where it is none; then ``flow.source.link`` counts only if
    ``link_known``. ``rate_gbps`` is the speed of the sender's NIC. ``missing`` says, in words, what is not known and why.
    ``round_trip_us`` is TCP's round trip now and the shortest of the connection, as the sender's kernel saw them.
    """

    flow: ElephantFlow
    kind: FlowKind
    comm_hash: int
    connection_index: int = 0
    global_rank: int | None = None
    global_peer: int | None = None
    rule: str = ""
    bond: tuple[str, ...] = ()
    link_known: bool = True
    rate_gbps: float | None = None
    missing: tuple[str, ...] = ()
    round_trip_us: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _End:
    """One end's record, on its node."""

    view: NodeView
    record: FlowRecord


_Place = tuple[int, int, int, int, int, int]
"""Communicator, channel, index of the connection, sending and receiving rank, place among its queue pairs."""


Captured = Mapping[tuple[str, int], Collection[int]]
"""(address that sends, queue pair that it is sent to) → UDP source ports that were captured."""


def flow_map(views: Iterable[NodeView], captured: Captured | None = None) -> list[MappedFlow]:
    """The flows of all nodes that carry data, by job, rank, channel and peer. Several views of one host are allowed.

    A port of a queue pair that was ``captured`` is seen, and stands before what a rule predicts.
    """
    sending: dict[_Place, _End] = {}
    receiving: dict[_Place, _End] = {}
    ranks: dict[tuple[int, int], int] = {}
    for view in views:
        for record in view.flows:
            place = _place(record)
            if place is None:
                continue
            side = sending if record.direction is Direction.SEND else receiving
            side[place] = _End(view, record)
            if record.global_rank is not None and record.comm_hash is not None and record.rank is not None:
                ranks[record.comm_hash, record.rank] = record.global_rank
    jobs = _jobs([*sending.values(), *receiving.values()])
    places = sorted(sending.keys() | receiving.keys())
    found = [_mapped(place, sending.get(place), receiving.get(place), jobs[place[0]], ranks, captured or {}) for place in places]
    found.sort(key=lambda one: (one.flow.job, one.comm_hash, one.connection_index, one.flow.rank or 0, one.flow.channel or 0))
    return _with_shares(found, sending, places)


def measured_flows(mapped: Iterable[MappedFlow]) -> list[MeasuredFlow]:
    """Flows whose five-tuple and ranks are known, each once."""
    found = {}
    for one in mapped:
        flow, five = one.flow, one.flow.tuple
        if five is None or flow.rank is None or flow.peer is None:
            continue
        made = MeasuredFlow(
            job=flow.job,
            rank=flow.rank if one.global_rank is None else one.global_rank,
            peer=flow.peer if one.global_peer is None else one.global_peer,
            channel=flow.channel or 0,
            source=five.source,
            source_port=five.source_port,
            destination=five.destination,
            port=five.destination_port,
            waits=one.round_trip_us,
            rate=flow.rate or 0.0,
            from_name=f"{flow.source.host} {flow.source.nic}".strip(),
            to_name=f"{flow.destination.host} {flow.destination.nic}".strip(),
            connection=(f"{one.comm_hash:016x}", flow.rank, flow.peer),
            bond=0 if one.link_known else len(one.bond),
            adaptive=flow.adaptive,
        )
        found[made.source, made.source_port, made.destination, made.port] = made
    return list(found.values())


def _place(record: FlowRecord) -> _Place | None:
    """Where a record belongs; ``None`` for what carries no data of a connection of NCCL's."""
    if record.comm_hash is None or record.rank is None or record.peer is None or record.channel is None:
        return None
    if record.direction is None or record.role not in ("", "data", "control"):
        return None
    sends = record.direction is Direction.SEND
    ends = (record.rank, record.peer) if sends else (record.peer, record.rank)
    return record.comm_hash, record.channel, record.connection_index or 0, *ends, record.ends.index if record.ends else 0


def _jobs(ends: Iterable[_End]) -> dict[int, str]:
    """Communicator → its job: processes that have a communicator in common are of one, named by the largest communicator."""
    members = nx.Graph((end.record.comm_hash, (end.view.host, end.record.pid)) for end in ends)
    jobs: dict[int, str] = {}
    for joined in nx.connected_components(members):
        comms = [one for one in joined if isinstance(one, int)]
        largest = min(comms, key=lambda comm: (-members.degree(comm), comm))
        jobs |= dict.fromkeys(comms, f"{largest:016x}")
    return jobs


def _mapped(
    place: _Place, sender: _End | None, receiver: _End | None, job: str, ranks: Mapping[tuple[int, int], int], captured: Captured
) -> MappedFlow:
    comm, channel, index, rank, peer, _ = place
    told = sender or receiver
    assert told is not None  # noqa: S101 - a place is of one end at least
    record = told.record
    missing: list[str] = []
    nic = _nic(sender)
    if sender is None:
        missing.append("the sending process was not looked at")
    elif record.shared_by > 1:
        missing.append(f"{record.shared_by} connections share it")
    five, origin, rule, known = _tuple(sender, receiver, nic, captured)
    missing += known
    bond, link, link_known = _link(nic)
    if not link_known:
        missing.append(f"which of {len(bond)} ports of the bond it leaves by")
    if record.adaptive:
        missing.append(f"its path: {ADAPTIVE_ROUTING} is on, and where switches route adaptively no port fixes one")
    flow = ElephantFlow(
        job=job, rank=rank, peer=peer, channel=channel,
        source=_port(sender, five.source if five else "", link),
        destination=_port(receiver, five.destination if five else record.ends.remote if record.ends and sender else "", 0),
        tuple=five, origin=origin, rate=record.bandwidth,
        queue_pair=sender.record.ends.queue_pair if sender is not None and sender.record.ends is not None else None,
        adaptive=record.adaptive,
    )  # fmt: skip
    return MappedFlow(
        flow=flow, kind=record.kind, comm_hash=comm, connection_index=index,
        global_rank=ranks.get((comm, rank)), global_peer=ranks.get((comm, peer)), rule=rule, bond=bond, link_known=link_known,
        rate_gbps=nic.rate_gbps if nic is not None else None, missing=tuple(missing), round_trip_us=_round_trip(sender),
    )  # fmt: skip


def _round_trip(sender: _End | None) -> tuple[int, int] | None:
    facts = sender.record.socket if sender is not None else None
    return (facts.rtt_us, facts.min_rtt_us) if facts is not None and facts.rtt_us and facts.min_rtt_us else None


def _tuple(
    sender: _End | None, receiver: _End | None, nic: NicRecord | None, captured: Captured
) -> tuple[FiveTuple | None, Origin, str, list[str]]:
    """Five-tuple, how it is known, the rule it is from, and what is missing for it."""
    told = sender or receiver
    assert told is not None  # noqa: S101
    record = told.record
    if record.kind is FlowKind.SOCKET:
        five = _of_socket(record, reverse=sender is None)
        if five is None:
            return None, Origin.SEEN, "", ["its sockets cannot be told apart from others"]
        many = record.socket.sockets if record.socket else 1
        return five, Origin.SEEN, "", [f"{many - 1} more sockets, whose ports are not shown"] if many > 1 else []
    if record.kind is not FlowKind.RDMA:
        return None, Origin.PREDICTED, "", [f"the network {record.network or '?'} does not show its connections"]
    if nic is not None and nic.link_layer == "InfiniBand":
        return None, Origin.PREDICTED, "", ["InfiniBand: its path is chosen by LIDs, not by a port"]
    here = sender.record.ends if sender is not None else None
    there = receiver.record.ends if receiver is not None else None
    if here is None:
        return None, Origin.PREDICTED, "", ["its queue pair is not known"]
    missing = []
    source = there.remote if there is not None else ""
    if not source:
        missing.append("the address it sends from: the other end was not looked at, or does not tell")
    if not here.remote:
        missing.append("the address it sends to")
    answer = predict(nic.driver if nic else "", nic.kernel if nic else "", here.queue_pair, there.queue_pair if there else None)
    seen = sorted(captured.get((source, there.queue_pair), ())) if there is not None else []
    if len(seen) == 1 and not missing:
        # A job may set flow labels (path_pins/labels.c), a driver may do as no rule says.
        other = [f"the rule {answer.rule} has port {answer.port}"] if answer.port not in (None, seen[0]) else []
        return FiveTuple(Protocol.UDP, source, seen[0], here.remote, ROCE_PORT), Origin.SEEN, answer.rule, other
    if answer.port is None:
        missing.append(f"its source port: {answer.reason}")
    if missing or answer.port is None:
        return None, Origin.PREDICTED, "", missing
    return FiveTuple(Protocol.UDP, source, answer.port, here.remote, ROCE_PORT), Origin.PREDICTED, answer.rule, []


def _of_socket(record: FlowRecord, *, reverse: bool) -> FiveTuple | None:
    if record.socket is None:
        return None
    local, remote = endpoint(record.socket.local), endpoint(record.socket.remote)
    if local is None or remote is None:
        return None
    source, destination = (remote, local) if reverse else (local, remote)
    return FiveTuple(Protocol.TCP, *source, *destination)


def endpoint(text: str) -> tuple[str, int] | None:
    """``10.0.0.1:50000`` and ``[fe80::1]:50000`` as address and port; ``None`` for anything else."""
    address, _, port = text.rpartition(":")
    if not address or not (port.isascii() and port.isdigit()) or len(port) > 5 or int(port) > MAX_PORT:
        return None
    return address.removeprefix("[").removesuffix("]"), int(port)


def _nic(end: _End | None) -> NicRecord | None:
    """The NIC a record names; ``None`` where there is none, or several of that name in network namespaces that are not told."""
    if end is None:
        return None
    record = end.record
    names = {record.device, f"{record.device}:{record.port or 1}"}
    kind = "rdma" if record.kind is FlowKind.RDMA else "netdev"
    found = [nic for nic in end.view.nics if nic.kind == kind and nic.name in names]
    if kind == "netdev" and record.pid in end.view.namespaces:
        found = [nic for nic in found if nic.namespace == end.view.namespaces[record.pid]]
    return found[0] if len(found) == 1 else None


def _link(nic: NicRecord | None) -> tuple[tuple[str, ...], int, bool]:
    """Members of the bond, the one it leaves by, and whether that is known."""
    if nic is None or len(nic.bond) < 2:
        return (), 0, True
    return (nic.bond, nic.bond.index(nic.bond_active), True) if nic.bond_active in nic.bond else (nic.bond, 0, False)


def _port(end: _End | None, address: str, link: int) -> NicPort:
    """Where an end is; of one that was not looked at no more than its address."""
    if end is None:
        return NicPort(address, "", 0)
    record = end.record
    device = record.device + (f":{record.port}" if record.port else "")
    return NicPort(end.view.host, nic_label(device, end.view.namespaces.get(record.pid, 0)), link)


def _with_shares(found: Sequence[MappedFlow], sending: Mapping[_Place, _End], places: Sequence[_Place]) -> list[MappedFlow]:
    """Each flow's part of what its rank sends for the operations of one communicator: by steps of NCCL's proxy, else by rates."""
    pairs = Counter(place[:5] for place in places)
    steps: dict[tuple[int, int, int, int, int], float] = {}
    for place, end in sending.items():
        if end.record.steps is not None:
            # The queue pairs of one connection take turns, or halves (NCCL_IB_SPLIT_DATA_ON_QPS): alike either way.
            steps[place[:5]] = end.record.steps.per_second / pairs[place[:5]]
    groups: defaultdict[tuple[int, int, int], list[MappedFlow]] = defaultdict(list)
    for one in found:
        groups[one.comm_hash, one.connection_index, one.flow.rank or 0].append(one)
    shared = []
    for group in groups.values():
        # Steps of all connections of a process are read at once: one that shows none, beside others that do, carries nothing
        # (a ring leaves the connections of trees idle).
        moved = [steps.get(_connection(one), 0.0) for one in group]
        weights = moved if sum(moved) > 0 else _rates(group)
        total = sum(weights) if weights else 0.0
        for number, one in enumerate(group):
            share = weights[number] / total if weights and total > 0 else None
            shared.append(replace(one, flow=replace(one.flow, share=share)))
    return shared


def _connection(one: MappedFlow) -> tuple[int, int, int, int, int]:
    return one.comm_hash, one.flow.channel or 0, one.connection_index, one.flow.rank or 0, one.flow.peer or 0


def _rates(group: Sequence[MappedFlow]) -> list[float] | None:
    known = [one.flow.rate for one in group if one.flow.rate is not None]
    return known if len(known) == len(group) and sum(known) > 0 else None


def to_capture(views: Iterable[NodeView]) -> tuple[set[tuple[str, int]], set[str]]:
    """What of RoCE is to be captured on these hosts: (address that sends, queue pair sent to), and the network devices."""
    every = list(views)
    wanted, netdevs = set(), set()
    for view in every:
        for record in view.flows:
            nic = _nic(_End(view, record))
            if record.kind is FlowKind.RDMA and record.ends is not None and nic is not None and nic.netdev:
                netdevs.add(nic.netdev)
                if record.direction is Direction.RECV and record.ends.remote and _place(record) is not None:
                    wanted.add((record.ends.remote, record.ends.queue_pair))
    return wanted, netdevs
