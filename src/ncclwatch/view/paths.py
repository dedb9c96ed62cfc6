"""The paths of flows as a picture: hosts, the routers between them in the order they are passed, and what each link carries.

A column is a place on the way, from who sends to who receives, so both directions of two hosts are drawn apart: routers answer
with other addresses each way, and which of these are one router is not guessed. A link is red where flows crowd on it while
others between the same hosts are empty (:mod:`ncclwatch.paths.measured`). Without probes the way is a line of dashes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ncclwatch.model.network import NicRecord
from ncclwatch.model.paths import NodeView, Probe
from ncclwatch.paths.flow_map import flow_map, measured_flows
from ncclwatch.paths.measured import Crowded, Link, MeasuredFlow, crowds, open_links, where_now
from ncclwatch.view.frame import View

MAX_NODES = 24
"""Bound: hosts or routers in one column; flows of those that crowd, then the fastest, are drawn first."""
MAX_DRAWN = 2048
"""Bound: flows that are looked at."""

SILENT = "?"
"""The name of a router that does not answer."""

Place = tuple[int, str]
"""(column, name)."""


@dataclass(slots=True)
class Edge:
    """A link as drawn. ``rate`` is bytes a second of the ``flows`` on it; ``known``: routers, or queues, told the way."""

    rate: float = 0.0
    flows: list[MeasuredFlow] = field(default_factory=list)
    crowded: bool = False
    known: bool = True


@dataclass(frozen=True, slots=True)
class Way:
    """One way with the flows that take it, none where probes alone saw it; ``places`` from the sender to the receiver."""

    places: tuple[Place, ...]
    flows: tuple[MeasuredFlow, ...]

    @property
    def rate(self) -> float:
        """Bytes a second of its flows."""
        return sum(flow.rate for flow in self.flows)


@dataclass(frozen=True, slots=True)
class Picture:
    """``places`` by column from the left, ``labels`` of hosts by address, ``edges`` between places of neighbouring columns.

    ``crowded`` says in records what is red; ``hidden`` counts flows that are not drawn.
    """

    headings: tuple[str, ...]
    places: tuple[tuple[str, ...], ...]
    labels: dict[str, str]
    edges: dict[tuple[Place, Place], Edge]
    crowded: tuple[Crowded, ...]
    hidden: int
    followed: bool
    ways: tuple[Way, ...] = ()


def node_views(view: View) -> list[NodeView]:
    """Flows and NICs of a view by host. A flow's record does not name its host: its process does."""
    hosts = {window.process.pid: window.process.host for window in view.frame.windows}
    nics: defaultdict[str, list[NicRecord]] = defaultdict(list)
    for row in view.frame.nics or ():
        nics[row.record.host].append(row.record)
    flows = defaultdict(list)
    for flow in view.frame.flows or ():
        flows[flow.host or hosts.get(flow.record.pid, "?")].append(flow.record)
    return [NodeView(host, flows[host], nics[host]) for host in sorted(flows)]


def picture_of_view(view: View, probes: Sequence[Probe]) -> Picture:
    """Of what a session says at one moment."""
    return picture(measured_flows(flow_map(node_views(view))), probes)


def picture(every: Sequence[MeasuredFlow], probes: Sequence[Probe]) -> Picture:
    """The flows on what probes told of their ways."""
    flows = list(every[:MAX_DRAWN])
    now = where_now(flows, probes)
    crowded = crowds(flows, now, probes)
    red = {flow for one in crowded for flow in one.flows}
    ways = {flow: _way(flow, links) for flow, links in zip(flows, now, strict=True)}
    talking = {(flow.source, flow.destination) for flow in flows}
    seen = [
        (probe.source, *(hop or SILENT for hop in one.hops), probe.destination)
        for probe in probes
        if (probe.source, probe.destination) in talking or not flows
        for one in probe.paths
        if one.told and one.arrived
    ]
    columns = max(map(len, [*ways.values(), *seen]), default=2)
    drawn = _Drawing(columns)
    hidden = len(every) - len(flows)
    hidden += sum(not drawn.add(ways[flow], flow) for flow in sorted(flows, key=lambda flow: (flow not in red, -flow.rate)))
    drawn.mark(red, crowded, open_links(probes))
    for way in seen:
        drawn.add(way, None)
    named = {seen.hops[0]: probe.switch for probe in probes if probe.switch for seen in probe.paths if seen.hops and seen.hops[0]}
    labels = named | {flow.source: flow.from_name for flow in flows} | {flow.destination: flow.to_name for flow in flows}
    return Picture(
        _headings(columns), drawn.places(), labels, drawn.edges, tuple(crowded), hidden, any(now), _grouped(columns, ways, seen)
    )


def _grouped(columns: int, ways: dict[MeasuredFlow, tuple[str, ...]], seen: Sequence[tuple[str, ...]]) -> tuple[Way, ...]:
    """Each way once, by who sends and where to."""
    found: dict[tuple[str, ...], list[MeasuredFlow]] = {way: [] for way in seen}
    for flow, way in ways.items():
        found.setdefault(way, []).append(flow)
    order = sorted(found, key=lambda way: (_by_number(way[0]), _by_number(way[-1]), [_by_number(name) for name in way]))
    return tuple(Way(tuple(zip(_columns(way, columns), way, strict=True)), tuple(found[way])) for way in order)


def _columns(way: Sequence[str], columns: int) -> list[int]:
    """A way that is shorter than others ends in the last column all the same."""
    return [*range(len(way) - 1), columns - 1]


def _way(flow: MeasuredFlow, links: Sequence[Link]) -> tuple[str, ...]:
    """Names from the sender to the receiver; a router that is silent is ``?``."""
    if not links:
        return flow.source, flow.destination
    if links[0][0] != flow.source and len(links) == 1 and "→" in links[0][0]:
        return flow.source, f"{links[0][1]} paths", flow.destination
    names = [flow.source]
    for a, b in links:
        if names[-1] != a:
            names += [SILENT, a] if a != flow.source else []
        names.append(b)
    return tuple(names if names[-1] == flow.destination else [*names, SILENT, flow.destination])


def _headings(columns: int) -> tuple[str, ...]:
    """Of two tiers the names of the field; of others the place on the way."""
    between = {0: (), 1: ("leaf",), 3: ("leaf", "spine", "leaf")}.get(columns - 2)
    if between is None:
        between = tuple(f"router {number + 1}" for number in range(columns - 2))
    return ("sends", *between, "receives")


class _Drawing:
    """Places and edges as they are added, as long as columns hold them."""

    def __init__(self, columns: int) -> None:
        self.edges: dict[tuple[Place, Place], Edge] = {}
        self._columns: list[dict[str, None]] = [{} for _ in range(columns)]

    def places(self) -> tuple[tuple[str, ...], ...]:
        """Each column in the order of what leads to it, so that few lines cross."""
        leading: defaultdict[Place, list[int]] = defaultdict(list)
        done = [sorted(self._columns[0], key=_by_number)]
        for k, column in enumerate(self._columns[1:], 1):
            for (m, a), (n, b) in self.edges:
                if n == k and m == k - 1:
                    leading[n, b].append(done[m].index(a))
            done.append(sorted(column, key=lambda name: (_mean(leading[k, name]), _by_number(name))))
        return tuple(map(tuple, done))

    def add(self, way: Sequence[str], flow: MeasuredFlow | None) -> bool:
        """Draw a way; False where a column is full."""
        at = _columns(way, len(self._columns))
        fits = all(name in self._columns[k] or len(self._columns[k]) < MAX_NODES for k, name in zip(at, way, strict=True))
        if not fits:
            return False
        for k, name in zip(at, way, strict=True):
            self._columns[k][name] = None
        for (k, a), (m, b) in zip(list(zip(at, way, strict=True)), list(zip(at[1:], way[1:], strict=True)), strict=False):
            edge = self.edges.setdefault(((k, a), (m, b)), Edge(known=len(way) > 2 or len(self._columns) == 2))
            if flow is not None:
                edge.rate += flow.rate
                edge.flows.append(flow)
        return True

    def mark(self, red: set[MeasuredFlow], crowded: Sequence[Crowded], open_: dict[tuple[str, str], set[Link]]) -> None:
        """Links that a plan could relieve, where those that crowd go together; the link to the receiver is none of these."""
        for (a, b), edge in self.edges.items():
            if b[0] == len(self._columns) - 1 and "paths" not in a[1]:
                continue
            together = [one for one in crowded if set(one.flows) <= set(edge.flows)]
            free = any((a[1], b[1]) in open_.get((flow.source, flow.destination), ()) for flow in edge.flows if flow in red)
            edge.crowded = bool(together) and (free or "paths" in a[1] or "paths" in b[1])


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers) if numbers else float("inf")


def _by_number(name: str) -> tuple[object, ...]:
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))
