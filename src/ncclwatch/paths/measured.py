"""A plan on measured paths: which source port each flow of the next communicator should leave by, and what that would gain.

Nothing is known of the fabric but what probes told (:mod:`ncclwatch.paths.probed`): a path is the links between routers that
answered, one after the other. Where no router answers, queues alone tell paths apart: one is taken for all that were queued, and
one for all that were empty. What a link can carry is known where its flows fill it; all others are taken for alike. The gain is
PREDICTED: an iteration lasts as long as the fullest link of its job needs, so a job that computes beside gains less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ncclwatch.model.paths import Hops, Load, Probe, SeenPath
from ncclwatch.paths.bottlenecks import crowd, is_queued
from ncclwatch.paths.ports import ROCE_PORT

Link = tuple[str, str]
"""(router or address, router or address) in the direction of the flow; (addresses, what queues told) where routers are silent."""
DRAWS = 200
"""Bound: draws of which paths are not what was seen."""
SPREAD = (10, 50, 90)
"""Fact: percentiles that stand for low, middle and high."""
ROUNDS = 50
"""Bound: passes of the local search; each is one over all flows."""
SAME = 1e-9
SLOWER = 0.7
"""A link that is full with this part of what a parallel one carries, or less, is degraded."""


@dataclass(frozen=True, slots=True)
class MeasuredFlow:
    """A flow of a running job, from its flow map. ``weight``: bytes beside other flows of its job, 1 where not known.

    ``waits`` is (round trip, shortest round trip) in µs. ``rate`` is bytes a second (0: not known), the names are host and NIC.
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


@dataclass(frozen=True, slots=True)
class Demand:
    """A connection that the next communicator will make: to this port, on which it receives ``weight``."""

    job: str
    rank: int
    peer: int
    source: str
    destination: str
    port: int
    weight: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A source port and the links it takes. ``wrong``: probability that it takes others."""

    source_port: int
    links: tuple[Link, ...]
    hops: Hops
    wrong: float


@dataclass(frozen=True, slots=True)
class Crowded:
    """A link that carries more of the running flows than it would have to: ``flows`` cross it, ``empty`` has room."""

    link: Link
    flows: tuple[MeasuredFlow, ...]
    empty: tuple[Link, ...]
    confidence: float


@dataclass(frozen=True, slots=True)
class JobGain:
    """PREDICTED. Load of the fullest link that a job crosses, before and after (median of the draws), and the gain in speed.

    ``before_known`` is false where the paths of some running flows are not known: those are drawn from the paths that were seen.
    """

    job: str
    before: float
    before_known: bool
    after: float
    gain_low: float
    gain: float
    gain_high: float
    confidence: float


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """``chosen`` belongs to ``demands``, one each; None where no path is known. ``refused`` says why it is not worth it."""

    demands: tuple[Demand, ...]
    chosen: tuple[Choice | None, ...]
    crowded: tuple[Crowded, ...]
    gains: tuple[JobGain, ...]
    loads: Mapping[Link, float]
    refused: str
    notes: tuple[str, ...]


def as_planned(flows: Sequence[MeasuredFlow], found: MeasuredPlan) -> list[MeasuredFlow]:
    """The next communicator's flows as the plan has them, each with the mean rate of those between the same ranks now."""
    made: list[MeasuredFlow] = []
    for demand, one in zip(found.demands, found.chosen, strict=True):
        same = [flow for flow in flows if (flow.job, flow.rank, flow.peer) == (demand.job, demand.rank, demand.peer)]
        if one is not None and same:
            rate = sum(flow.rate for flow in same) / len(same)
            number = sum((flow.job, flow.rank, flow.peer) == (demand.job, demand.rank, demand.peer) for flow in made)
            made.append(replace(same[0], channel=number, source_port=one.source_port, port=demand.port, rate=rate, waits=None))
    return made


def links_of(probe: Probe, seen: SeenPath) -> tuple[Link, ...]:
    """The links of a path: between routers next to each other that answered; by queues where none does; none if neither tells."""
    if not seen.told:
        return ((f"{probe.source} → {probe.destination}", str(seen.load)),) if seen.load is not Load.UNKNOWN else ()
    chain = (probe.source, *seen.hops, probe.destination)
    return tuple((a, b) for a, b in pairwise(chain) if a is not None and b is not None)


def next_demands(flows: Sequence[MeasuredFlow], probes: Sequence[Probe]) -> list[Demand]:
    """What the next communicator connects, if it is like the running one: as many flows between the same ranks.

    A receiver's ports are those that were probed. Where several ranks send to one, which port is whose is not known beforehand:
    each gets a source port for each, with its part of the weight. RoCE has one port for all: there each flow is one by itself.
    """
    ports = {(one.source, one.destination): sorted({p.port for p in one.paths if not p.live}) for one in probes}
    sent: defaultdict[tuple[str, int, int, str, str], list[float]] = defaultdict(list)
    into: defaultdict[tuple[str, int, str], int] = defaultdict(int)
    for flow in flows:
        sent[flow.job, flow.rank, flow.peer, flow.source, flow.destination].append(flow.weight)
        into[flow.job, flow.peer, flow.destination] += 1
    found = []
    for (job, rank, peer, source, destination), weights in sorted(sent.items()):
        count = into[job, peer, destination]
        offered = ports.get((source, destination), [])[:count]
        if offered == [ROCE_PORT]:
            found += [Demand(job, rank, peer, source, destination, ROCE_PORT, weight) for weight in weights]
            continue
        found += [Demand(job, rank, peer, source, destination, port, sum(weights) / len(offered)) for port in offered]
    return found


def choices_of(demand: Demand, probes: Sequence[Probe]) -> list[Choice]:
    """Source ports that were seen to take a path to this port, in order."""
    found = []
    for probe in probes:
        if (probe.source, probe.destination) != (demand.source, demand.destination):
            continue
        for seen in probe.paths:
            links = links_of(probe, seen)
            if seen.port != demand.port or seen.live or not links or not seen.steady or (seen.told and not seen.arrived):
                continue
            wrong = probe.wrong if seen.told else 1 - seen.load_confidence
            found.append(Choice(seen.source_port, links, seen.hops, wrong))
    return sorted(found, key=lambda one: one.source_port)


def plan(
    flows: Sequence[MeasuredFlow],
    probes: Sequence[Probe],
    *,
    floor: float,
    kept: Mapping[tuple[str, int, str, int], int] | None = None,
) -> MeasuredPlan:
    """Assign a source port to each demand, so that no link carries more than it must; refuse below ``floor`` (0.05 for 5 %).

    ``kept`` is an older plan, (source, rank, destination, port) → source port: what it says stays where that costs nothing.
    """
    demands = next_demands(flows, probes)
    choices = [choices_of(one, probes) for one in demands]
    now = where_now(flows, probes)
    capacities = capacities_of(flows, now, probes)
    chosen = assign(demands, choices, kept or {}, capacities)
    loads = load_of(demands, chosen)
    gains = _gains(flows, now, demands, chosen, choices, probes, floor, capacities)
    lost = sum(one is None for one in chosen)
    notes = [f"{lost} connections stay as they are: no path to their ports was seen"] if lost else []
    unseen = {(f.source, f.destination) for f in flows} - {(p.source, p.destination) for p in probes}
    notes += [f"no probe was made from {source} to {destination}" for source, destination in sorted(unseen)[:16]]
    return MeasuredPlan(
        tuple(demands),
        tuple(chosen),
        tuple(crowds(flows, now, probes)),
        gains,
        loads,
        _refusal(gains, chosen, floor),
        tuple(notes),
    )


def _refusal(gains: Sequence[JobGain], chosen: Sequence[Choice | None], floor: float) -> str:
    if not any(chosen):
        return "no path to a port of the next communicator was seen"
    best = max((one.gain for one in gains), default=0.0)
    return "" if best >= floor else f"it would gain {best:.0%}, below the floor of {floor:.0%}"


def assign(
    demands: Sequence[Demand],
    choices: Sequence[Sequence[Choice]],
    kept: Mapping[tuple[str, int, str, int], int],
    capacities: Mapping[Link, float] | None = None,
) -> list[Choice | None]:
    """One choice for each demand: what ``kept`` says first, then the heaviest first where the sum of squared loads (over what
    links can carry) grows least, then moves of single flows while they lower it. A source port is given once from an address to a
    port of another."""
    chosen: list[Choice | None] = [None] * len(demands)
    board = _Board(capacities or {})
    late = []
    for number, demand in enumerate(demands):
        old = kept.get((demand.source, demand.rank, demand.destination, demand.port))
        stays = next((one for one in choices[number] if one.source_port == old), None)
        if stays is not None and board.free(demand, stays):
            chosen[number] = stays
            board.add(demand, stays)
        else:
            late.append(number)
    for number in sorted(late, key=lambda i: (-demands[i].weight, i)):
        chosen[number] = board.best(demands[number], choices[number])
        if (one := chosen[number]) is not None:
            board.add(demands[number], one)
    for _ in range(ROUNDS):
        if not sum(_improve(number, demands, choices, chosen, board) for number in range(len(demands))):
            break
    return chosen


def _improve(
    number: int, demands: Sequence[Demand], choices: Sequence[Sequence[Choice]], chosen: list[Choice | None], board: _Board
) -> bool:
    demand, here = demands[number], chosen[number]
    if here is None:
        return False
    board.remove(demand, here)
    better = board.best(demand, choices[number])
    moves = better is not None and board.cost(demand, better) < board.cost(demand, here) - SAME
    stands = better if moves and better is not None else here
    board.add(demand, stands)
    chosen[number] = stands
    return moves


class _Board:
    """What links carry, and which source ports are given. ``capacities``: parts of what the largest link can carry."""

    def __init__(self, capacities: Mapping[Link, float]) -> None:
        self._capacities = capacities
        self.load: defaultdict[Link, float] = defaultdict(float)
        self._given: set[tuple[str, str, int, int]] = set()

    def free(self, demand: Demand, one: Choice) -> bool:
        return (demand.source, demand.destination, demand.port, one.source_port) not in self._given

    def cost(self, demand: Demand, one: Choice) -> float:
        """By how much the sum of squared loads, each over its link's capacity, would grow."""
        grows = ((2 * self.load[link] + demand.weight) * demand.weight for link in one.links)
        return sum(more / self._capacities.get(link, 1.0) for more, link in zip(grows, one.links, strict=True))

    def best(self, demand: Demand, choices: Iterable[Choice]) -> Choice | None:
        free = [one for one in choices if self.free(demand, one)]
        return min(free, key=lambda one: (self.cost(demand, one), one.wrong, one.source_port), default=None)

    def add(self, demand: Demand, one: Choice) -> None:
        self._given.add((demand.source, demand.destination, demand.port, one.source_port))
        for link in one.links:
            self.load[link] += demand.weight

    def remove(self, demand: Demand, one: Choice) -> None:
        self._given.discard((demand.source, demand.destination, demand.port, one.source_port))
        for link in one.links:
            self.load[link] -= demand.weight


def load_of(demands: Sequence[Demand], chosen: Sequence[Choice | None]) -> dict[Link, float]:
    """Weight that each link would carry."""
    found: defaultdict[Link, float] = defaultdict(float)
    for demand, one in zip(demands, chosen, strict=True):
        for link in one.links if one is not None else ():
            found[link] += demand.weight
    return dict(found)


def where_now(flows: Sequence[MeasuredFlow], probes: Sequence[Probe]) -> list[tuple[Link, ...]]:
    """The links of each running flow, by routers where its own five-tuple was followed, else by queues: flows that wait, while
    some paths between the same addresses are empty, are on the queued ones. Nothing where neither tells."""
    found: dict[MeasuredFlow, tuple[Link, ...]] = {}
    for probe in probes:
        mine = [flow for flow in flows if (flow.source, flow.destination) == (probe.source, probe.destination)]
        told = {seen.path: links_of(probe, seen) for seen in probe.paths if seen.told}
        found |= {flow: told[flow.port, flow.source_port] for flow in mine if (flow.port, flow.source_port) in told}
        waiting = crowd(
            {flow: flow.waits for flow in mine if flow not in found and flow.waits is not None},
            {seen.path: seen.as_load for seen in probe.paths if not seen.live and not seen.told},
        )
        for flow in waiting.flows if waiting is not None else ():
            found[flow] = ((_pair(probe), str(Load.QUEUED)),)
    return [found.get(flow, ()) for flow in flows]


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


@dataclass(frozen=True, slots=True)
class _Row:
    """A flow and where it may go: on ``links``, but with probability ``wrong`` on any of ``ways``."""

    job: str
    weight: float
    links: tuple[Link, ...]
    wrong: float
    ways: Sequence[tuple[Link, ...]]


def _gains(
    flows: Sequence[MeasuredFlow],
    now: Sequence[tuple[Link, ...]],
    demands: Sequence[Demand],
    chosen: Sequence[Choice | None],
    choices: Sequence[Sequence[Choice]],
    probes: Sequence[Probe],
    floor: float,
    capacities: Mapping[Link, float],
) -> tuple[JobGain, ...]:
    """By draws. Only links that paths differ in count: what all flows of a host share no plan can relieve."""
    open_ = open_links(probes)
    ways: defaultdict[tuple[str, str], list[tuple[Link, ...]]] = defaultdict(list)
    after = []
    for demand, one, all_ in zip(demands, chosen, choices, strict=True):
        pair = demand.source, demand.destination
        mine = [_only(each.links, open_.get(pair, set())) for each in all_]
        ways[pair] += mine
        if one is not None:
            after.append(_Row(demand.job, demand.weight, _only(one.links, open_[pair]), one.wrong, mine))
    before = []
    for flow, links in zip(flows, now, strict=True):
        pair = flow.source, flow.destination
        before.append(_Row(flow.job, flow.weight, _only(links, open_.get(pair, set())), 0.0 if links else 1.0, ways[pair]))
    rng = np.random.default_rng(0)
    had = [_fullest(before, rng, capacities) for _ in range(DRAWS)]
    has = [_fullest(after, rng, capacities) for _ in range(DRAWS)]
    found = []
    for job in sorted({flow.job for flow in flows}):
        old, new = (np.array([draw.get(job, 0.0) for draw in draws]) for draws in (had, has))
        gain = np.divide(old, new, out=np.ones(DRAWS), where=new > 0) - 1
        low, middle, high = (float(value) for value in np.percentile(gain, SPREAD))
        known = all(links for flow, links in zip(flows, now, strict=True) if flow.job == job)
        sure = float((gain >= floor - SAME).mean())
        found.append(JobGain(job, float(np.median(old)), known, float(np.median(new)), low, middle, high, sure))
    return tuple(found)


def _only(links: tuple[Link, ...], kept: set[Link]) -> tuple[Link, ...]:
    return tuple(link for link in links if link in kept)


def _fullest(rows: Sequence[_Row], rng: np.random.Generator, capacities: Mapping[Link, float]) -> dict[str, float]:
    """Job → load over capacity of the fullest link that it crosses, all jobs together, in one draw."""
    taken = []
    load: defaultdict[Link, float] = defaultdict(float)
    for row in rows:
        hit = row.wrong > 0 and row.ways and rng.random() < row.wrong
        links = row.ways[int(rng.integers(len(row.ways)))] if hit else row.links
        taken.append((row.job, links))
        for link in links:
            load[link] += row.weight
    found: dict[str, float] = {}
    for job, links in taken:
        found[job] = max([found.get(job, 0.0), *(load[link] / capacities.get(link, 1.0) for link in links)])
    return found
