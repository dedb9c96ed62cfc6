"""Files that commands about paths share: flow maps and probes read, plans of ports written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from ncclwatch.errors import UsageError
from ncclwatch.model.paths import ElephantFlow, FiveTuple, NicPort, Probe, Protocol
from ncclwatch.paths import probed
from ncclwatch.paths.assignment import Choice, Demand, bond_ports
from ncclwatch.paths.measured import MeasuredFlow
from ncclwatch.paths.pins import Connect, Listen, Roce, plan_text
from ncclwatch.paths.ports import ROCE_PORT
from ncclwatch.text import clean

MAP_SCHEMA = "ncclwatch.paths/1"
MAX_FLOWS = 1 << 16
"""Bound: flows of one map."""
MAX_BOND = 64
"""Bound: ports of one bond."""

_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class _Schema(msgspec.Struct):
    schema: str


class _FiveTuple(msgspec.Struct):
    protocol: Protocol
    source: _Text
    source_port: _Port
    destination: _Text
    destination_port: _Port


class _End(msgspec.Struct):
    host: _Text = ""
    nic: _Text = ""
    bond: Annotated[list[_Text], msgspec.Meta(max_length=MAX_BOND)] = msgspec.field(default_factory=list)
    bond_port: _Text | None = None


class _Flow(msgspec.Struct):
    job: _Text
    comm_hash: _Text
    channel: int | None
    rank: int | None
    peer: int | None
    five_tuple: _FiveTuple | None
    global_rank: int | None = None
    global_peer: int | None = None
    share: float | None = None
    round_trip_us: tuple[float, float] | None = None
    bytes_per_s: float | None = None
    adaptive_routing: bool = False
    source: _End = msgspec.field(default_factory=_End)
    destination: _End = msgspec.field(default_factory=_End)


class FlowMap(msgspec.Struct):
    """What ``ncclwatch paths --json`` wrote."""

    schema: str
    flows: Annotated[list[_Flow], msgspec.Meta(max_length=MAX_FLOWS)]


def flows_of(files: Sequence[Path]) -> list[MeasuredFlow]:
    """Flows of flow maps whose five-tuple is known. Raises :class:`UsageError` for any other file."""
    return measured(_maps(files))


def _maps(files: Sequence[Path]) -> list[FlowMap]:
    maps = []
    for file in files:
        data = probed.read_bytes(file)
        if schema_of(data, file) != MAP_SCHEMA:
            raise UsageError(f"{clean(str(file))} is no flow map", "give output of 'ncclwatch paths --json'")
        maps.append(map_of(data, file))
    return maps


def elephants(files: Sequence[Path]) -> list[ElephantFlow]:
    """Flows of flow maps, by host and NIC: of each connection and direction what the sender's host tells."""
    found: dict[tuple[object, ...], ElephantFlow] = {}
    for one in (flow for each in _maps(files) for flow in each.flows):
        five = None if one.five_tuple is None else FiveTuple(**msgspec.structs.asdict(one.five_tuple))
        key = (one.comm_hash, one.channel, one.rank, one.peer, five)
        if not one.source.nic and key in found:
            continue
        source, destination = (NicPort(end.host, end.nic) for end in (one.source, one.destination))
        found[key] = ElephantFlow(
            one.job,
            one.rank,
            one.peer,
            one.channel,
            source,
            destination,
            tuple=five,
            rate=one.bytes_per_s,
            share=one.share,
            adaptive=one.adaptive_routing,
        )
    return list(found.values())


def probes_of(files: Sequence[Path]) -> list[Probe]:
    """Probes of files. Raises :class:`UsageError` for any other file."""
    return newest(one for file in files for one in probed.read(probed.read_bytes(file), str(file)))


def newest(probes: Iterable[Probe]) -> list[Probe]:
    """Of several probes between the same addresses over the same protocol the last."""
    found = {(one.source, one.destination, one.protocol): one for one in sorted(probes, key=lambda one: one.wall_s)}
    return [found[key] for key in sorted(found)]


def schema_of(data: bytes, file: Path) -> str:
    """The name of the schema of a file. Raises :class:`UsageError` for what is no JSON of ours."""
    try:
        return msgspec.json.decode(data, type=_Schema).schema
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError):
        raise UsageError(f"{clean(str(file))} is no JSON of ncclwatch", "give output of 'ncclwatch paths --json'") from None


def map_of(data: bytes, file: Path) -> FlowMap:
    """A flow map. Raises :class:`UsageError` for anything else."""
    try:
        return msgspec.json.decode(data, type=FlowMap)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise UsageError(f"{clean(str(file))} is no flow map: {clean(str(error), 200)}", "write it anew") from None


def measured(maps: Sequence[FlowMap]) -> list[MeasuredFlow]:
    """Flows whose five-tuple and ranks are known, each once: what the sender's host tells is told best.

    Ranks are of the job, where the map of some host knows them, else of the communicator.
    """
    every = [flow for each in maps for flow in each.flows]
    ranks: dict[tuple[str, int | None], int | None] = {}
    for one in every:
        ranks |= {(one.comm_hash, rank): of_job for rank, of_job in _ranks(one) if of_job is not None}
    found: dict[tuple[str, int, str, int], MeasuredFlow] = {}
    for one in every:
        five = one.five_tuple
        if five is None or one.rank is None or one.peer is None:
            continue
        key = five.source, five.source_port, five.destination, five.destination_port
        flow = MeasuredFlow(
            job=one.job,
            rank=_known(ranks.get((one.comm_hash, one.rank)), one.rank),
            peer=_known(ranks.get((one.comm_hash, one.peer)), one.peer),
            channel=one.channel or 0,
            source=five.source,
            source_port=five.source_port,
            destination=five.destination,
            port=five.destination_port,
            weight=-1.0 if one.share is None else one.share,
            waits=one.round_trip_us,
            rate=one.bytes_per_s or 0.0,
            from_name=f"{one.source.host} {one.source.nic}".strip(),
            to_name=f"{one.destination.host} {one.destination.nic}".strip(),
            connection=(one.comm_hash, one.rank, one.peer),
            bond=len(one.source.bond) if one.source.bond_port is None else 0,
            adaptive=one.adaptive_routing,
        )
        if key not in found or found[key].waits is None:
            found[key] = flow
    return _weighed(list(found.values()))


def _known(of_job: int | None, of_communicator: int) -> int:
    return of_communicator if of_job is None else of_job


def _ranks(one: _Flow) -> tuple[tuple[int | None, int | None], ...]:
    return (one.rank, one.global_rank), (one.peer, one.global_peer)


def _weighed(flows: list[MeasuredFlow]) -> list[MeasuredFlow]:
    """Weights beside one another: 1 is the mean of a job; where the share of some is not known all weigh the same."""
    by_job: defaultdict[str, list[float]] = defaultdict(list)
    for flow in flows:
        by_job[flow.job].append(flow.weight)
    mean = {job: sum(each) / len(each) if min(each) >= 0 else 0.0 for job, each in by_job.items()}
    return [replace(flow, weight=flow.weight / mean[flow.job] if mean[flow.job] > 0 else 1.0) for flow in flows]


def pins_of(demands: Sequence[Demand], chosen: Sequence[Choice | None], own: Collection[str] | None = None) -> str:
    """The file that ``path_pins/plan.h`` describes: listening ports, source ports, ports of bonds.

    With ``own`` addresses the connections that leave by these alone, and listening ports of the ranks that are there.
    """
    listens: defaultdict[tuple[int, str], set[int]] = defaultdict(set)
    connects, roce = [], defaultdict[tuple[int, str], list[tuple[int, int]]](list)
    for demand, one, port in zip(demands, chosen, bond_ports(demands, chosen), strict=True):
        if demand.port == ROCE_PORT:
            if one is not None and (own is None or demand.source in own):
                roce[demand.rank, demand.destination].append((one.source_port, port))
            continue
        if own is None or demand.destination in own:
            listens[demand.peer, demand.destination].add(demand.port)
        if one is not None and (own is None or demand.source in own):
            connects.append(Connect(demand.rank, demand.destination, demand.port, one.source_port))
    return plan_text(
        [Listen(rank, where, tuple(sorted(ports))) for (rank, where), ports in sorted(listens.items())],
        connects,
        [_roce(rank, where, ports) for (rank, where), ports in sorted(roce.items())],
    )


def _roce(rank: int, destination: str, ports: Sequence[tuple[int, int]]) -> Roce:
    bonded = tuple(bond for _, bond in ports)
    return Roce(rank, destination, tuple(source for source, _ in ports), bonded if any(bonded) else ())
