"""``ncclwatch paths``: the flow map: which flow of which job leaves by which port of which NIC, under which five-tuple."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import AllOption, BudgetOption, JsonOption, LookOption, PidOption
from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.errors import TargetError, UsageError
from ncclwatch.model.network import FlowRecord, NetworkLook, NicRecord
from ncclwatch.model.paths import NodeView
from ncclwatch.paths.flow_map import MappedFlow, flow_map, measured_flows, to_capture
from ncclwatch.paths.measured import Crowded, crowds_of
from ncclwatch.paths.words import crowd_text
from ncclwatch.text import Style

SCHEMA_NAME = "ncclwatch.paths/1"


def paths(
    words: Annotated[list[str] | None, typer.Argument(metavar="[PID|FILE]...", help="More pids, or recordings.")] = None,
    pid: PidOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
    budget: BudgetOption = 0.1,
    duration: LookOption = None,
    capture: Annotated[
        float,
        typer.Option("--capture", metavar="SECONDS", min=0.0, max=60.0, help="See RoCE's ports in packets, for so long."),
    ] = 0.0,
    probes: Annotated[
        list[Path] | None, typer.Option("--paths", metavar="FILE", help="What 'paths probe -o FILE' told: say which flows crowd.")
    ] = None,
) -> None:
    """Show which flow takes which path: five-tuple (seen or predicted), NIC and port of a bond, rate, share of its operation."""
    from ncclwatch.cli.paths_files import probes_of

    known = probes_of(probes or ())
    named, files = options.split_words(pid, words)
    options.require_files(files)
    if files and (named or every):
        raise UsageError("recordings and processes exclude each other", "give one or the other")
    if files and capture:
        raise UsageError("packets are of now: nothing can be captured of a recording", "leave --capture out")
    views, remarks = recorded(files) if files else _live(options.choose_pids(named, every), budget, duration)
    found = flow_map(views, _captured(views, capture) if capture else None)
    crowded = crowds_of(measured_flows(found), known)
    if as_json:
        emit_json(to_json(found, remarks, crowded))
        return
    from ncclwatch.cli.paths_text import screen

    width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 160
    for line in screen(found, width=width, style=Style()):
        emit(line)
    for one in crowded:
        emit(f"{Style().bad('CROWDED')}  {crowd_text(one)}")
    for remark in remarks:
        note(remark)


def _live(pids: Sequence[int], budget: float, duration: float | None) -> tuple[list[NodeView], list[str]]:
    from ncclwatch.cli.flows import look_at
    from ncclwatch.collect.network import NetworkWatch

    looked = look_at(pids, exact=False, budget=budget, duration_s=duration)
    host = socket.gethostname()
    network = NetworkWatch(host, kernel_log=False)
    try:
        nics, namespaces = network.nics_behind(looked.records)
    finally:
        network.close()
    remarks = [*(problem.line for problem in looked.problems), *looked.collector.notes]
    return [NodeView(host, looked.records, nics, namespaces)], remarks


def _captured(views: Sequence[NodeView], seconds: float) -> dict[tuple[str, int], set[int]]:
    from ncclwatch.pathprobe.capture import capture

    wanted, netdevs = to_capture(views)
    return capture(sorted(netdevs), wanted, seconds) if wanted else {}


def recorded(files: Sequence[Path]) -> tuple[list[NodeView], list[str]]:
    """The newest flows and NICs of each recorded host, and what could not be read. Raises :class:`NcclwatchError`."""
    from ncclwatch.cli.recorded import recordings_among
    from ncclwatch.store.replay import Recordings

    if not recordings_among(files, alone=True):
        raise UsageError("snapshots hold no flows", "give recordings: 'ncclwatch record --all -o FILE' on each node")
    looks: list[tuple[str, NetworkLook]] = []
    whole: dict[str, Sequence[FlowRecord]] = {}
    with Recordings(files) as recordings:
        for _, _, batch in recordings.batches():
            if batch.network is not None:
                looks.append((batch.host, batch.network))
            if batch.all_flows:
                whole[batch.host] = batch.all_flows
        problems = list(recordings.problems)
    # A look holds so many flows; where there are more, all of them are told now and then.
    views = [replace(view, flows=whole.get(view.host, view.flows)) for view in latest(looks)]
    if not any(view.flows for view in views):
        raise TargetError("the recording holds no flows", "record for some seconds, while the job runs over a network")
    return views, problems


def latest(looks: Iterable[tuple[str, NetworkLook]]) -> list[NodeView]:
    """The newest flows and NICs of each host; looks that list no flows come between those that do."""
    flows: dict[str, tuple[FlowRecord, ...]] = {}
    nics: dict[str, tuple[NicRecord, ...]] = {}
    for host, look in looks:
        flows[host] = look.flows or flows.get(host, ())
        nics[host] = look.nics or nics.get(host, ())
    return [NodeView(host, flows[host], nics[host]) for host in sorted(flows)]


def to_json(found: Sequence[MappedFlow], remarks: Sequence[str], crowded: Sequence[Crowded] = ()) -> dict[str, Any]:
    """``ncclwatch.paths/1`` (docs/flow-map.md)."""
    return {
        "schema": SCHEMA_NAME,
        "flows": [_flow_json(one) for one in found],
        "crowded": [crowd_json(one) for one in crowded],
        "notes": list(remarks),
    }


def crowd_json(one: Crowded) -> dict[str, Any]:
    """Flows that crowd on a link while others are empty."""
    keys = ("job", "rank", "peer", "channel", "port", "source_port")
    return {
        "link": list(one.link),
        "empty": [list(link) for link in one.empty],
        "confidence": one.confidence,
        "flows": [{key: getattr(flow, key) for key in keys} for flow in one.flows],
        "text": crowd_text(one),
    }


def _flow_json(one: MappedFlow) -> dict[str, Any]:
    flow = one.flow
    five = flow.tuple
    source = {"host": flow.source.host, "nic": flow.source.nic, "rate_gbps": one.rate_gbps}
    return {
        "job": flow.job,
        "comm_hash": one.comm_hash,
        "channel": flow.channel,
        "connection_index": one.connection_index,
        "rank": flow.rank,
        "peer": flow.peer,
        "global_rank": one.global_rank,
        "global_peer": one.global_peer,
        "kind": one.kind,
        "queue_pair": flow.queue_pair,
        "source": source | {"bond": list(one.bond), "bond_port": _bond_port(one)},
        "destination": {"host": flow.destination.host, "nic": flow.destination.nic},
        "five_tuple": None
        if five is None
        else {
            "protocol": five.protocol,
            "source": five.source,
            "source_port": five.source_port,
            "destination": five.destination,
            "destination_port": five.destination_port,
        },
        "origin": None if five is None else flow.origin,
        "rule": one.rule or None,
        "bytes_per_s": flow.rate,
        "share": flow.share,
        "missing": list(one.missing),
        "adaptive_routing": flow.adaptive,
        "round_trip_us": None if one.round_trip_us is None else list(one.round_trip_us),
    }


def _bond_port(one: MappedFlow) -> str | None:
    """The member of the bond it leaves by, where that is known."""
    return one.bond[one.flow.source.link] if one.bond and one.link_known else None
