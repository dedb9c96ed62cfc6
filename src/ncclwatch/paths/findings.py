"""What is wrong with the paths of elephant flows: flows that collide, ports of a bond that idle, links that are slow, a path on
which only one job waits; each with the part of the time of communication that it costs.

What it costs is PREDICTED: a link takes as long as what crosses it, and a fair spread of whole flows over the links that are
there would be the least (the bound that the planner aims at). An iteration that computes beside loses less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from ncclwatch.model.network import NicRecord
from ncclwatch.model.paths import Probe
from ncclwatch.paths.bottlenecks import NOISE, is_queued
from ncclwatch.paths.measured import SLOWER, Crowded, Link, MeasuredFlow, open_links
from ncclwatch.paths.words import crowd_text, link_text, who

LEAST_CONFIDENCE = 0.8
"""What is less sure than this is not said."""
UNEVEN = 1.5
"""Ports of a bond are unbalanced when the fullest sends so many times the mean: with two ports three quarters."""
BUSY = 0.1
"""Part of a bond's speed below which nothing is said of its balance."""
FEWEST_FULL = 3
"""So often a link must have been seen full."""
MOVE_APART = "move them apart: 'ncclwatch paths plan' gives source ports for the next communicator, with the predicted gain"
MORE_PAIRS = "'ncclwatch paths what-if' says what more queue pairs (NCCL_IB_QPS_PER_CONNECTION) or other source ports would gain"
WITHOUT_IT = "look at that link and its ends; 'ncclwatch paths follow' keeps a plan that does without it"
ITS_SPEED = "look at the speed, errors and pauses of that link; 'ncclwatch paths plan' loads it less"
ITS_OWN = "look at what that job alone has there: its traffic class (NCCL_IB_TC), limits of its containers, its hosts"


class Trouble(StrEnum):
    """What is wrong with a path."""

    COLLISION = "flows collide"
    BOND = "unbalanced bond"
    DEAD = "dead link"
    DEGRADED = "degraded link"
    ONE_JOB = "one job waits"


@dataclass(frozen=True, slots=True)
class PathFinding:
    """One thing that is wrong. ``flows`` and ``jobs`` suffer from it; ``share`` is the part of the time of communication that it
    costs (0 to 1, PREDICTED), ``None`` where that cannot be told. ``step`` says what to do.
    """

    trouble: Trouble
    where: str
    flows: tuple[MeasuredFlow, ...]
    confidence: float
    share: float | None
    text: str
    step: str

    @property
    def jobs(self) -> frozenset[str]:
        """Jobs whose flows suffer."""
        return frozenset(flow.job for flow in self.flows)


Where = Sequence[tuple[Link, ...]]
"""The links of each flow, empty where they are not known (``measured.where_now``)."""


def parallel(link: Link, open_: Iterable[Link]) -> set[Link]:
    """The links that a flow might take in place of one: those that leave the same router, else those that reach the same."""
    links = set(open_)
    leaving = {one for one in links if one[0] == link[0]} | {link}
    return leaving if len(leaving) > 1 else {one for one in links if one[1] == link[1]} | {link}


def spread(weights: Sequence[float], links: int) -> float:
    """The least load of the fullest of so many links, whole flows spread over them: no plan is better."""
    return max(*weights, sum(weights) / links)


def collisions(
    crowded: Sequence[Crowded], flows: Sequence[MeasuredFlow], now: Where, probes: Sequence[Probe]
) -> Iterator[PathFinding]:
    """Elephant flows on one link while links beside it are empty."""
    open_ = open_links(probes)
    for one in crowded:
        pairs = {(flow.source, flow.destination) for flow in one.flows}
        beside = parallel(one.link, (link for pair in pairs for link in open_.get(pair, ()))) | set(one.empty)
        weights = [flow.weight for flow, links in zip(flows, now, strict=True) if not beside.isdisjoint(links)]
        share = 1 - spread(weights, len(beside)) / sum(flow.weight for flow in one.flows)
        yield PathFinding(
            Trouble.COLLISION, link_text(one.link), one.flows, one.confidence, max(0.0, share), crowd_text(one), MOVE_APART
        )


def bonds(nics: Iterable[NicRecord], flows: Sequence[MeasuredFlow]) -> Iterator[PathFinding]:
    """Bonds of which one port sends much more than the others, where they hash (in mode active-backup one is meant to)."""
    every = list(nics)
    members = {(nic.host, nic.name, nic.namespace): nic for nic in every if nic.kind == "netdev"}
    for nic in every:
        if nic.kind != "netdev" or len(nic.bond) < 2 or nic.bond_active:
            continue
        ports = [members.get((nic.host, name, nic.namespace)) for name in nic.bond]
        rates = [port.send_rate for port in ports if port is not None and port.send_rate is not None]
        if len(rates) < len(nic.bond) or not sum(rates):
            continue
        speed = sum((port.rate_gbps or 0.0) for port in ports if port is not None) * 1e9 / 8
        mean, most = sum(rates) / len(rates), max(rates)
        names = {f"{one.host} {one.label}" for one in every if one is nic or (one.host, one.netdev) == (nic.host, nic.name)}
        mine = tuple(flow for flow in flows if flow.from_name in names)
        if not mine or most < UNEVEN * mean or sum(rates) < BUSY * speed:
            continue
        shares = ", ".join(f"{name} {rate / sum(rates):.0%}" for name, rate in zip(nic.bond, rates, strict=True))
        # One flow cannot use both: then more queue pairs are what helps, and no other port.
        text = f"{nic.label} on {nic.host}: its ports carry {shares} of what it sends ({who(mine)})"
        yield PathFinding(Trouble.BOND, f"{nic.label} on {nic.host}", mine, 1.0, 1 - mean / most, text, MORE_PAIRS)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What was learned of a link: bytes a second that it carried at most, and those it carried whenever its flows waited in a
    queue: then it, or another one of theirs, was full."""

    most: float = 0.0
    full: tuple[float, ...] = ()

    def seen(self, load: float, *, queued: bool, kept: int) -> Capacity:
        """The same with one look more; of the times it was full the newest ``kept`` count."""
        return Capacity(max(self.most, load), (*self.full, load)[-kept:] if queued else self.full)

    @property
    def bytes_per_s(self) -> float | None:
        """What it can carry; ``None`` until it was full."""
        return median(self.full) if len(self.full) >= FEWEST_FULL else None


def degraded(
    capacities: Mapping[Link, Capacity], flows: Sequence[MeasuredFlow], now: Where, probes: Sequence[Probe]
) -> Iterator[PathFinding]:
    """Links that are full with much less than a parallel one has carried, or than they have carried themselves."""
    open_ = {link for links in open_links(probes).values() for link in links}
    told: set[tuple[MeasuredFlow, ...]] = set()
    for link in sorted(open_ & capacities.keys()):
        known = capacities[link]
        carries, best = known.bytes_per_s, max(capacities[one].most for one in parallel(link, open_) if one in capacities)
        crossing = tuple(flow for flow, links in zip(flows, now, strict=True) if link in links)
        if carries is None or not crossing or carries > SLOWER * best or crossing in told:
            continue
        told.add(crossing)
        # By chance each look is below the usual as often as above.
        confidence = 1 - 0.5 ** sum(load <= SLOWER * best for load in known.full)
        text = f"{link_text(link)} is full with {carries / 1e6:,.1f} MB/s, where a link beside it, or it itself, has carried"
        text = f"{text} {best / 1e6:,.1f} MB/s ({who(crossing)}; confidence {confidence:.0%})"
        yield PathFinding(Trouble.DEGRADED, link_text(link), crossing, confidence, 1 - carries / best, text, ITS_SPEED)


def one_job_waits(flows: Sequence[MeasuredFlow], now: Where) -> Iterator[PathFinding]:
    """Links, or pairs of addresses whose paths are not known, on which the flows of one job wait in queues and no other's do."""
    sharing: defaultdict[tuple[Link, ...], list[MeasuredFlow]] = defaultdict(list)
    for flow, links in zip(flows, now, strict=True):
        if flow.waits is not None:
            sharing[links or ((flow.source, flow.destination),)].append(flow)
    for links, together in sorted(sharing.items()):
        waiting = {flow.job for flow in together if is_queued(*flow.waits or (0.0, 0.0))}
        others = {flow.job for flow in together} - waiting
        mine = tuple(flow for flow in together if flow.job in waiting)
        if len(waiting) != 1 or not others or not all(is_queued(*flow.waits or (0.0, 0.0)) for flow in mine):
            continue
        confidence = 1 - NOISE ** len(mine)
        longest = max(flow.waits or (0.0, 0.0) for flow in mine)
        trips = f"round trip {longest[0] / 1e3:.1f} ms, shortest {longest[1] / 1e3:.1f} ms"
        beside = f"{len(others)} other job{'s do' if len(others) > 1 else ' does'} not"
        text = f"on {link_text(links[0])} only job {mine[0].job} waits ({who(mine)}: {trips}), and {beside}"
        yield PathFinding(Trouble.ONE_JOB, link_text(links[0]), mine, confidence, None, text, ITS_OWN)


def dead(link: Link, now: tuple[int, int, int], beside: int, flows: Sequence[MeasuredFlow], confidence: float) -> PathFinding:
    """A link that no path takes any more. ``now``: source ports that were asked, and of those that took it the ones that arrive
    by another, and those that do not arrive. ``beside``: links that there were, with this one.
    """
    asked, moved, lost = now
    gone = [f"the network moved {moved}"] * bool(moved) + [f"{lost} do not arrive"] * bool(lost)
    of = f"; of {moved + lost} that did {' and '.join(gone)}" if gone else ""
    text = f"{link_text(link)} is dead: none of {asked} source ports takes it any more{of} ({who(flows)}; "
    weights = [flow.weight for flow in flows]
    share = 1 - spread(weights, beside) / spread(weights, max(1, beside - 1))
    return PathFinding(
        Trouble.DEAD, link_text(link), tuple(flows), confidence, share, f"{text}confidence {confidence:.0%})", WITHOUT_IT
    )
