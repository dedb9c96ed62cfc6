"""What is remembered of paths, over time: the newest probes, links that were there before, what links have carried.

Fed with what 'ncclwatch paths probe' told on each host, and asked with the flows of the moment. Bounded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from ncclwatch.model.paths import NodeView, PathKey, Probe
from ncclwatch.paths.bottlenecks import is_queued
from ncclwatch.paths.findings import (
    LEAST_CONFIDENCE,
    Capacity,
    PathFinding,
    Where,
    bonds,
    collisions,
    dead,
    degraded,
    one_job_waits,
    parallel,
)
from ncclwatch.paths.measured import Link, MeasuredFlow, crowds, links_of, where_now

MAX_PAIRS = 4096
"""Bound: pairs of addresses."""
MAX_LINKS = 65536
"""Bound: links whose load is remembered, and of a pair links that were seen."""
MAX_FLOWS = 4096
"""Bound: flows that are looked at, those of most bytes first."""
KEPT_FULL = 9
"""Bound: the newest times at which a link was full."""
MAX_FINDINGS = 64
"""Bound: what is said of one moment."""

_Pair = tuple[str, str, str]
"""(source, destination, protocol)."""


@dataclass(slots=True)
class PathMemory:
    """``probes`` are the newest of each pair of addresses; ``capacities`` what links carried."""

    probes: dict[_Pair, Probe] = field(default_factory=dict)
    capacities: dict[Link, Capacity] = field(default_factory=dict)
    unasked: int = 0
    """Pairs of addresses that flows use and nobody probed."""
    _before: dict[_Pair, dict[Link, set[PathKey]]] = field(default_factory=dict)
    """Every link that was seen, with the ports that took it when it was last seen."""
    _made: tuple[Hashable, list[PathFinding]] = (None, [])
    _taken: int = 0

    def take(self, probes: Iterable[Probe]) -> None:
        """Take what was probed; of a pair that is known an older look is left."""
        for probe in sorted(probes, key=lambda one: one.wall_s):
            pair = probe.source, probe.destination, str(probe.protocol)
            known = self.probes.get(pair)
            if (known is not None and known.wall_s >= probe.wall_s) or (known is None and len(self.probes) >= MAX_PAIRS):
                continue
            self.probes[pair] = probe
            self._taken += 1
            links = self._before.setdefault(pair, {})
            took: dict[Link, set[PathKey]] = {}
            for seen in probe.paths:
                for link in links_of(probe, seen) if seen.told else ():
                    took.setdefault(link, set()).add(seen.path)
            links |= {link: ports for link, ports in took.items() if link in links or len(links) < MAX_LINKS}

    def findings(self, views: Sequence[NodeView], moment: Hashable) -> list[PathFinding]:
        """What is wrong now, what costs most first; ``moment`` says whether the flows are those of the last time."""
        if not self.probes and not any(nic.bond for view in views for nic in view.nics):
            return []
        key = moment, self._taken
        if self._made[0] != key:
            from ncclwatch.paths.flow_map import flow_map, measured_flows

            flows = sorted(measured_flows(flow_map(views)), key=lambda flow: -flow.rate)[:MAX_FLOWS]
            found = [one for one in self._find(flows, views) if one.confidence >= LEAST_CONFIDENCE]
            self._made = key, sorted(found, key=lambda one: (-(one.share or 0.0), one.trouble, one.where))[:MAX_FINDINGS]
        return self._made[1]

    def _find(self, flows: Sequence[MeasuredFlow], views: Sequence[NodeView]) -> Iterator[PathFinding]:
        probes = list(self.probes.values())
        asked = {(probe.source, probe.destination) for probe in probes}
        self.unasked = len({(flow.source, flow.destination) for flow in flows} - asked)
        now = where_now(flows, probes)
        self._learn(flows, now)
        yield from collisions(crowds(flows, now, probes), flows, now, probes)
        yield from degraded(self.capacities, flows, now, probes)
        yield from bonds(chain.from_iterable(view.nics for view in views), flows)
        yield from one_job_waits(flows, now)
        for pair in self.probes:
            yield from self._dead(pair, flows)

    def _learn(self, flows: Sequence[MeasuredFlow], now: Where) -> None:
        loads: dict[Link, list[MeasuredFlow]] = {}
        for flow, links in zip(flows, now, strict=True):
            for link in links:
                loads.setdefault(link, []).append(flow)
        for link, crossing in loads.items():
            if link in self.capacities or len(self.capacities) < MAX_LINKS:
                queued = any(flow.waits is not None and is_queued(*flow.waits) for flow in crossing)
                load = sum(flow.rate for flow in crossing)
                self.capacities[link] = self.capacities.get(link, Capacity()).seen(load, queued=queued, kept=KEPT_FULL)

    def _dead(self, pair: _Pair, flows: Sequence[MeasuredFlow]) -> Iterator[PathFinding]:
        """Links of a pair that none of its paths takes any more, though the router before them is still there.

        A living link of k is missed by one of the asked ports with the probability 1 − 1/k, by all n with (1 − 1/k)^n; and a
        path may be another than was seen (``wrong``).
        """
        probe, before = self.probes[pair], self._before[pair]
        asked = [seen for seen in probe.paths if not seen.live]
        taken = {link for seen in probe.paths for link in links_of(probe, seen)}
        there = {probe.source} | {hop for seen in probe.paths for hop in seen.hops if hop is not None}
        mine = [flow for flow in flows if (flow.source, flow.destination) == pair[:2]]
        if not asked or not mine:
            return
        for link in sorted(before.keys() - taken):
            if link[0] not in there or any(seen.arrived and _hides(link, probe.source, seen.hops) for seen in asked):
                continue
            beside = len(parallel(link, before))
            confidence = 1 - max((1 - 1 / beside) ** len(asked), probe.wrong)
            took = before[link]
            moved = sum(seen.path in took and seen.arrived for seen in asked)
            lost = sum(seen.path in took and not seen.arrived for seen in asked)
            yield dead(link, (len(asked), moved, lost), beside, mine, confidence)


def _hides(link: Link, source: str, hops: Sequence[str | None]) -> bool:
    """Whether a router that does not answer stands where the end of a link would: it may be that link."""
    chain_ = (source, *hops)
    return any(a == link[0] and b is None for a, b in pairwise(chain_))
