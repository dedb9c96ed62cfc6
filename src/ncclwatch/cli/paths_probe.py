"""``ncclwatch paths probe`` and ``answer``: which source port takes which path to other hosts, by packets of our own."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ncclwatch.cli.options import JsonOption
from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.cli.probe import DEFAULT_PORT
from ncclwatch.errors import TargetError, UsageError
from ncclwatch.model.paths import Hops, Load, PathKey, Probe, Protocol, SeenPath
from ncclwatch.pathprobe.token import TOKEN_VARIABLE, read_token
from ncclwatch.paths.measured import MeasuredFlow
from ncclwatch.paths.ports import LOWEST
from ncclwatch.paths.probed import SCHEMA, ProbeFile
from ncclwatch.text import clean, ranges

PORTS, SOURCES = "26000-26003", "26100-26131"
"""Below the ports that Linux gives by itself (``ip_local_port_range``, 32768 and up), and apart from our own 28050."""
ROCE_SOURCES = f"{LOWEST}-{LOWEST + 63}"
MAX_NUMBERS = 256

PortsOption = Annotated[
    str,
    typer.Option("--ports", metavar="PORTS", help="Ports that the next communicator will listen on: 26000,26001 or 26000-26003."),
]

TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", help=f"For --udp --queues: the secret of 'ncclwatch probe --listen' (or ${TOKEN_VARIABLE})."),
]


def probe(
    destinations: Annotated[list[str], typer.Argument(metavar="ADDRESS...", help="Addresses of the other hosts' NICs.")],
    ports: PortsOption = PORTS,
    sources: Annotated[
        str | None, typer.Option("--sources", metavar="PORTS", help="Source ports to try, dealt to the ports in turns.")
    ] = None,
    udp: Annotated[bool, typer.Option("--udp", help="RoCE: UDP to port 4791. No packet arrives; each dies on the way.")] = False,
    flows: Annotated[
        Path | None,
        typer.Option(
            "--flows",
            metavar="FILE",
            help="Output of 'ncclwatch paths --json': follow these running flows too (see docs/flow-map.md).",
        ),
    ] = None,
    queues: Annotated[
        int,
        typer.Option(
            "--queues",
            metavar="ROUNDS",
            min=0,
            max=1000,
            help="Tell paths apart by queues too, against 'ncclwatch paths answer' there; with --udp 'ncclwatch probe --listen'.",
        ),
    ] = 0,
    lldp: Annotated[
        float,
        typer.Option("--lldp", metavar="SECONDS", min=0.0, max=600.0, help="Hear which switches the NICs are plugged into: 35."),
    ] = 0.0,
    token_file: TokenOption = None,
    looks: Annotated[int, typer.Option("--looks", min=1, max=20, help="Times that each path is followed.")] = 2,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write what was seen to a file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find which source ports share a path: routers on the way answer where packets die, and queues wait. Needs no privilege."""
    from ncclwatch.cli.paths_files import flows_of
    from ncclwatch.pathprobe.look import Asked, look, own_address, roce, with_switches

    protocol = Protocol.UDP if udp else Protocol.TCP
    source_ports = numbers(sources or (ROCE_SOURCES if udp else SOURCES), "--sources")
    offered = numbers(ports, "--ports")
    wanted = roce(source_ports) if udp else [(offered[i % len(offered)], one) for i, one in enumerate(source_ports)]
    running = flows_of([flows]) if flows is not None else []
    token = read_token(token_file) if udp and queues else b""
    made = []
    for where in destinations:
        destination = address(where)
        live = _between(running, own_address(destination), destination)
        asked = Asked(destination, wanted, live, protocol, looks=looks, rounds=queues, listener=(DEFAULT_PORT, token))
        made.append(look(asked, socket.gethostname()))
    if lldp:
        made = with_switches(made, lldp)
    file = ProbeFile(SCHEMA, tuple(made))
    if output is not None:
        write(output, msgspec.json.encode(file))
    if as_json:
        emit_json(msgspec.to_builtins(file))
    else:
        _show(made)


def _between(flows: Sequence[MeasuredFlow], source: str, destination: str) -> list[PathKey]:
    """(port, source port) of running flows from one address to another, each once."""
    mine = [flow for flow in flows if (flow.source, flow.destination) == (source, destination)]
    return list(dict.fromkeys((flow.port, flow.source_port) for flow in mine))


def _show(made: Sequence[Probe]) -> None:
    for one in made:
        for line in describe(one):
            emit(line)
        for line in one.notes:
            note(line)
    if not any(seen.told or seen.load is not Load.UNKNOWN for one in made for seen in one.paths):
        raise TargetError(
            "no router on the way answers, and queues were not asked or tell nothing",
            "start 'ncclwatch paths answer' there, and probe with --queues 20 while the job runs",
        )


def answer(
    where: Annotated[str, typer.Argument(metavar="ADDRESS", help="Address of this host that is probed.")],
    ports: PortsOption = PORTS,
    duration: Annotated[float, typer.Option("--duration", "-d", min=0.1, max=1e6, help="Seconds to answer.")] = 3600.0,
) -> None:
    """Answer 'ncclwatch paths probe --queues' of other hosts on the ports of the next communicator, until interrupted."""
    from ncclwatch.pathprobe.varied import answer as answer_probes

    try:
        answer_probes(address(where), numbers(ports, "--ports"), duration)
    except OSError as error:
        raise TargetError(
            f"{clean(where)} cannot be listened on: {error.strerror}", "give a free port of an address of this host"
        ) from None


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: who reads it meanwhile sees the old one or the new one."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        raise UsageError(f"{clean(str(path))} cannot be written: {error.strerror}", "give a file in a folder of yours") from None


def address(text: str) -> str:
    """An IP address, as Python writes it. Raises :class:`UsageError`."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise UsageError(
            f"'{clean(text, 60)}' is no IP address", "give the address of a NIC, as 'ncclwatch paths' shows it"
        ) from None


def numbers(text: str, option: str) -> list[int]:
    """``26000,26002-26004`` as ports. Raises :class:`UsageError`."""
    found: list[int] = []
    for word in text.replace(",", " ").split():
        first, dash, last = word.partition("-")
        ends = [first, last] if dash else [first, first]
        if not all(end.isascii() and end.isdigit() and 0 < int(end[:6]) <= 65535 for end in ends):
            raise UsageError(
                f"'{clean(word, 40)}' of {option} is no port and no range of ports", "write 26000,26001 or 26000-26003"
            )
        found += range(int(ends[0]), min(int(ends[1]), int(ends[0]) + MAX_NUMBERS) + 1)
    if not 0 < len(set(found)) <= MAX_NUMBERS:
        raise UsageError(f"{option} names {len(set(found))} ports", f"give 1 to {MAX_NUMBERS}")
    return list(dict.fromkeys(found))


def describe(one: Probe) -> Iterator[str]:
    """Lines for people: each path with its source ports, then what queues told."""
    asked = [seen for seen in one.paths if not seen.live]
    by_hops = grouped(asked)
    told = sum(len(each) for each in by_hops.values())
    yield (
        f"{clean(one.host)}  {one.source} → {one.destination} ({one.protocol}): {told} of {len(asked)} source ports told, "
        f"{len(by_hops)} path{'s' if len(by_hops) != 1 else ''}; a path is another one with probability {one.wrong:.0%} at most"
    )
    if one.nic:
        says = f"{clean(one.switch, 64)} port {clean(one.switch_port, 64)}" if one.switch else "no switch has told (LLDP)"
        yield f"  leaves by {clean(one.nic, 40)}: {says}"
    for hops, members in by_hops.items():
        yield f"  {len(members):3d}  {route(hops)}"
        yield f"       source ports {ranges(sorted(seen.source_port for seen in members))}"
    changing = [seen for seen in asked if not seen.steady]
    if changing:
        yield f"  {len(changing):3d}  change from look to look, and are used in no plan"
    for load in (Load.QUEUED, Load.EMPTY):
        members = [seen for seen in asked if seen.load is load]
        if members:
            sure = min(seen.load_confidence for seen in members)
            ports = ranges(sorted(seen.source_port for seen in members))
            yield f"  {len(members):3d}  {load} (confidence {sure:.0%}): source ports {ports}"
    for seen in one.paths:
        if seen.live:
            where = route(seen.hops) if seen.told else "no router told"
            yield f"  running flow {one.source}:{seen.source_port} → {one.destination}:{seen.port}: {where}"


def grouped(paths: Sequence[SeenPath]) -> dict[Hops, list[SeenPath]]:
    """Paths by their routers, those that most take first; without what is silent, unsteady or did not arrive."""
    found: dict[Hops, list[SeenPath]] = {}
    for seen in paths:
        if seen.told and seen.steady and seen.arrived:
            found.setdefault(seen.hops, []).append(seen)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), str(item[0]))))


def route(hops: Hops) -> str:
    """Routers of a path, for people."""
    return " → ".join(clean(hop, 48) if hop else "?" for hop in hops) or "no router between"
