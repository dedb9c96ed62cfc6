"""Where running flows are on measured paths, and who crowds there.

Nothing is known of the fabric but what probes told (:mod:`ncclwatch.paths.probed`): a path is the links between routers that
answered, one after the other. Where no router answers, queues alone tell paths apart: one is taken for all that were queued, and
one for all that were empty. What a link can carry is known where its flows fill it; all others are taken for alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ncclwatch.model.paths import Load, Probe, SeenPath
from ncclwatch.paths.bottlenecks import crowd, is_queued

Link = tuple[str, str]
"""(router or address, router or address) in the direction of the flow; (addresses, what queues told) where routers are silent."""
SLOWER = 0.7
"""A link that is full with this part of what a parallel one carries, or less, is degraded."""


@dataclass(frozen=True, slots=True)
class MeasuredFlow:
    """A flow of a running job, from its flow map. ``weight``: bytes beside other flows of its job, 1 where not known.

    ``waits`` is (round trip, shortest round trip) in µs. ``rate`` is bytes a second (0: not known), the names are host and NIC.
    ``connection``: communicator (16 hexadecimal digits) and ranks in it; ``rank`` and ``peer`` are of the job where known.
    ``bond``: ports of the sender's bond that all send; 0 where there is none, or only one of them sends.
    ``adaptive``: its job is set up for adaptive routing: it has no path of its own.
    """

    job: str
    rank: int
    peer: int
    channel: int
    source: str
    source_port: int
    destination: str
    port: int
    weight: float = 1.0
    waits: tuple[float, float] | None = None
    rate: float = 0.0
    from_name: str = ""
    to_name: str = ""
    connection: tuple[str, int, int] = ("", 0, 0)
    bond: int = 0
    adaptive: bool = False


@dataclass(frozen=True, slots=True)
class Crowded:
    """A link that carries more of the running flows than it would have to: ``flows`` cross it, ``empty`` has room."""

    link: Link
    flows: tuple[MeasuredFlow, ...]
    empty: tuple[Link, ...]
    confidence: float


def links_of(probe: Probe, seen: SeenPath) -> tuple[Link, ...]:
    """The links of a path: between routers next to each other that answered; by queues where none does; none if neither tells."""
    if not seen.told:
        return ((f"{probe.source} → {probe.destination}", str(seen.load)),) if seen.load is not Load.UNKNOWN else ()
    chain = (probe.source, *seen.hops, probe.destination)
    return tuple((a, b) for a, b in pairwise(chain) if a is not None and b is not None)


def where_now(flows: Sequence[MeasuredFlow], probes: Sequence[Probe]) -> list[tuple[Link, ...]]:
    """The links of each running flow: by its own five-tuple where that was followed, or probed for queues (RoCE); else flows that
    wait, while some paths between the same addresses are empty, are on the queued ones. Nothing where neither tells, and of flows
    that are routed adaptively."""
    found: dict[MeasuredFlow, tuple[Link, ...]] = {}
    for probe in probes:
        mine = [flow for flow in flows if (flow.source, flow.destination) == (probe.source, probe.destination)]
        told = {seen.path: links for seen in probe.paths if (seen.told or seen.live) and (links := links_of(probe, seen))}
        found |= {flow: told[flow.port, flow.source_port] for flow in mine if (flow.port, flow.source_port) in told}
        waiting = crowd(
            {flow: flow.waits for flow in mine if flow not in found and flow.waits is not None},
            {seen.path: seen.as_load for seen in probe.paths if not seen.live and not seen.told},
        )
        for flow in waiting.flows if waiting is not None else ():
            found[flow] = ((_pair(probe), str(Load.QUEUED)),)
    return [() if flow.adaptive else found.get(flow, ()) for flow in flows]


def _pair(probe: Probe) -> str:
    return f"{probe.source} → {probe.destination}"


def capacities_of(flows: Sequence[MeasuredFlow], now: Sequence[tuple[Link, ...]], probes: Sequence[Probe]) -> dict[Link, float]:
    """What links that a plan chooses among can carry, as parts of the most that any of them does: of those that are full, since
    all their flows wait in queues. Of all others nothing is known, and they are taken for as good as the best.
    """
    open_ = {link for links in open_links(probes).values() for link in links}
    crossing: defaultdict[Link, list[MeasuredFlow]] = defaultdict(list)
    for flow, links in zip(flows, now, strict=True):
        for link in open_.intersection(links):
            crossing[link].append(flow)
    rates = {link: sum(flow.rate for flow in each) for link, each in crossing.items()}
    most = max(rates.values(), default=0.0)
    full = [link for link, each in crossing.items() if all(flow.waits is not None and is_queued(*flow.waits) for flow in each)]
    return {link: rates[link] / most for link in full if 0 < rates[link] < SLOWER * most}


def open_links(probes: Sequence[Probe]) -> dict[tuple[str, str], set[Link]]:
    """(source, destination) → links that some source ports take and others do not: those that a plan can choose among."""
    sets: defaultdict[tuple[str, str], list[set[Link]]] = defaultdict(list)
    for probe in probes:
        sets[probe.source, probe.destination] += [set(links) for seen in probe.paths if (links := links_of(probe, seen))]
    return {pair: set().union(*each) - each[0].intersection(*each) for pair, each in sets.items() if each}


def crowds(flows: Sequence[MeasuredFlow], now: Sequence[tuple[Link, ...]], probes: Sequence[Probe]) -> list[Crowded]:
    """Links on which running flows crowd while other links between the same addresses are empty, the fullest first."""
    carried: defaultdict[Link, list[MeasuredFlow]] = defaultdict(list)
    for flow, links in zip(flows, now, strict=True):
        for link in links:
            carried[link].append(flow)
    open_ = open_links(probes)
    found: dict[tuple[MeasuredFlow, ...], Crowded] = {}
    for link, crossing in carried.items():
        pairs = {(flow.source, flow.destination) for flow in crossing}
        if len(crossing) < 2 or not all(link in open_.get(pair, ()) for pair in pairs):
            continue
        others = {other for pair in pairs for other in open_[pair]} - carried.keys()
        empty = sorted(other for other in others if other[0] == link[0] or other[1] == link[1])
        if empty and tuple(crossing) not in found:
            sure = [_sureness(link, probe) for probe in probes if (probe.source, probe.destination) in pairs]
            found[tuple(crossing)] = Crowded(link, tuple(crossing), tuple(empty), min(sure))
    return sorted(found.values(), key=lambda one: (-len(one.flows), one.link))


def crowds_of(flows: Sequence[MeasuredFlow], probes: Sequence[Probe]) -> list[Crowded]:
    """Who crowds where, by what probes told."""
    return crowds(flows, where_now(flows, probes), probes)


def _sureness(link: Link, probe: Probe) -> float:
    """How sure it is that two flows are on this link and not on others: by routers both were seen; by queues a path is empty."""
    if link[1] == Load.QUEUED:
        return max((seen.load_confidence for seen in probe.paths if seen.load is Load.EMPTY), default=0.0)
    return (1 - probe.wrong) ** 2
