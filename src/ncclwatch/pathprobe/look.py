"""One look at the paths from this host to another: routers by source port, running flows, and queues, put together."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ncclwatch.errors import NcclwatchError, TargetError
from ncclwatch.model.paths import Hops, PathKey, PathLoad, Probe, Protocol, SeenPath
from ncclwatch.nic import lldp
from ncclwatch.nic.rdma import read_ports
from ncclwatch.pathprobe import hops, segments, varied, varied_rdma
from ncclwatch.pathprobe.rdma import device_of
from ncclwatch.pathprobe.verbs import VerbsError
from ncclwatch.paths.bottlenecks import loads
from ncclwatch.paths.ports import ROCE_PORT
from ncclwatch.paths.probed import alike, joined, wrong_rate


@dataclass(frozen=True, slots=True)
class Asked:
    """What to look at: ``paths`` by attempts of our own, ``live`` five-tuples of running flows, each (port, source port).

    ``looks`` times, at least ``apart_s`` apart; ``rounds`` > 0: exchanges with a listener of ours for queues, over UDP that of
    'ncclwatch probe --listen' (``listener``: its TCP port, the secret that it knows).
    """

    destination: str
    paths: Sequence[PathKey]
    live: Sequence[PathKey] = ()
    protocol: Protocol = Protocol.TCP
    looks: int = 2
    apart_s: float = 0.2
    rounds: int = 0
    effort: hops.Effort = hops.THOROUGH
    listener: tuple[int, bytes] = (0, b"")


def own_address(destination: str) -> str:
    """The address this host sends from to another. Raises :class:`TargetError` where there is no route."""
    family = socket.AF_INET6 if ipaddress.ip_address(destination).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as end:
        try:
            # Of a datagram socket this asks the route and sends nothing.
            end.connect((destination, 9))
        except OSError as error:
            raise TargetError(
                f"there is no route to {destination}: {error.strerror}", "look at the routes of this host"
            ) from None
        return str(end.getsockname()[0])


def own_nic(source: str) -> str:
    """The NIC that has an address, of this network namespace; empty where none has."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        for message in route.get_addr():
            addresses = {str(value) for name, value in message["attrs"] if name in ("IFA_LOCAL", "IFA_ADDRESS")}
            if source in addresses:
                return str(socket.if_indextoname(message["index"]))
    return ""


def with_switches(probes: Sequence[Probe], seconds: float) -> list[Probe]:
    """The same with the switches that the NICs are plugged into, as far as these tell within so many seconds (LLDP)."""
    nics = {probe.source: own_nic(probe.source) for probe in probes}
    found = lldp.listen(sorted(set(filter(None, nics.values()))), seconds)
    made = []
    for probe in probes:
        nic = nics[probe.source]
        told = found.get(nic)
        made.append(replace(probe, nic=nic, switch=told.switch if told else "", switch_port=told.port if told else ""))
    return made


def look(asked: Asked, host: str, first: Sequence[hops.Trace] = ()) -> Probe:
    """Follow every path, and say how sure that is; ``first`` is a look that was made already, and counts as one.

    Raises :class:`TargetError` where nothing can be sent.
    """
    source = own_address(asked.destination)
    notes: list[str] = []
    seen: list[dict[PathKey, hops.Trace]] = [{one.path: one for one in first}] if first else []
    while len(seen) < max(1, asked.looks):
        if seen:
            time.sleep(asked.apart_s)
        own = hops.traces(asked.destination, asked.paths, asked.protocol, asked.effort)
        found = {one.path: one for one in own}
        if asked.live:
            try:
                found |= {one.path: one for one in _live(asked, source, own)}
            except NcclwatchError as error:
                notes.append(str(error))
        seen.append(found)
    every = list(dict.fromkeys([*asked.paths, *asked.live]))
    by_look: list[list[Hops]] = [[found[path].hops if path in found else () for path in every] for found in seen]
    queued = _queues(asked, source) if asked.rounds else {}
    running = set(asked.live)
    paths = tuple(
        _seen(path, [found[path] for found in seen if path in found], path in running, queued.get(path)) for path in every
    )
    reasons = sorted({one.reason for found in seen for one in found.values() if one.reason})
    notes += reasons[:8] + ([f"and {len(reasons) - 8} more ports that could not be used"] if len(reasons) > 8 else [])
    return Probe(
        host, source, asked.destination, asked.protocol, time.time(), wrong_rate(by_look), paths, tuple(dict.fromkeys(notes))
    )


def _live(asked: Asked, source: str, own: Sequence[hops.Trace]) -> list[hops.Trace]:
    if asked.protocol is Protocol.UDP:
        # Of RoCE no socket of the host's has the port: datagrams of our own may leave by it, and die on the way.
        return hops.traces(asked.destination, asked.live, Protocol.UDP, asked.effort)
    if ipaddress.ip_address(asked.destination).version == 6:
        raise TargetError("running flows over IPv6 are not followed", "their source ports can be asked when the job has ended")
    before = {len(one.hops) for one in own if one.arrived}
    if not before:
        raise TargetError(
            "running flows are not followed: how far the other host is was not told", "let it answer, or refuse, TCP"
        )
    return segments.traces(source, asked.destination, asked.live, min(before))


def _queues(asked: Asked, source: str) -> Mapping[PathKey, PathLoad]:
    if asked.protocol is Protocol.UDP:
        device = _rdma_port(source)
        # A queue pair of ours may leave by the port of a running flow: it waits where that flow does.
        ports = list(dict.fromkeys(port for _, port in (*asked.live, *asked.paths)))
        tcp_port, token = asked.listener
        trips = varied_rdma.probe(device, (asked.destination, tcp_port), ports, asked.rounds, token)
        return loads({(ROCE_PORT, port): each for port, each in trips.items()})
    rows = varied.probe(asked.destination, asked.paths, asked.rounds)
    if not any(each for _, _, each in rows):
        raise TargetError(
            f"nobody answers at {asked.destination} on the probed ports",
            f"run 'ncclwatch paths answer {asked.destination} --ports ...' there",
        )
    return loads({(port, source_port): [there for there, _ in each] for port, source_port, each in rows})


def _rdma_port(source: str) -> tuple[str, int]:
    try:
        return device_of(source, read_ports())
    except VerbsError:
        raise TargetError(
            f"no RDMA port here has the address {source}", "see 'ncclwatch doctor', or probe without --queues"
        ) from None


def _seen(path: PathKey, traces: Sequence[hops.Trace], live: bool, load: PathLoad | None) -> SeenPath:
    found: Hops = ()
    steady, arrived = True, False
    for number, one in enumerate(traces):
        steady &= number == 0 or alike(found, one.hops)
        found = joined(found, one.hops) if number else one.hops
        arrived = one.arrived
    made = SeenPath(*path, hops=found, arrived=arrived, steady=steady, live=live)
    if load is None:
        return made
    return replace(made, load=load.load, load_confidence=load.confidence, waited=load.waited, probes=load.probes)


def roce(source_ports: Sequence[int]) -> list[PathKey]:
    """Paths of RoCE by source port."""
    return [(ROCE_PORT, port) for port in source_ports]
