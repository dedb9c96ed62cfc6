"""Which source port each connection of the next communicator leaves by: what it connects, what may be chosen, what is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ncclwatch.model.paths import Hops, Probe
from ncclwatch.paths.measured import Link, MeasuredFlow, links_of
from ncclwatch.paths.ports import ROCE_PORT
from ncclwatch.paths.probed import alike

ROUNDS = 50
"""Bound: passes of the local search; each is one over all flows."""
SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Demand:
    """A connection that the next communicator will make: to this port, on which it receives ``weight``; ``bond``: ports of the
    sender's bond that all send, 0 for none."""

    job: str
    rank: int
    peer: int
    source: str
    destination: str
    port: int
    weight: float
    bond: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A source port and the links it takes. ``wrong``: probability that it takes others."""

    source_port: int
    links: tuple[Link, ...]
    hops: Hops
    wrong: float


def next_demands(flows: Sequence[MeasuredFlow], probes: Sequence[Probe]) -> list[Demand]:
    """What the next communicator connects, if it is like the running one: as many flows between the same ranks.

    A receiver's ports are those that were probed. Where several ranks send to one, which port is whose is not known beforehand:
    each gets a source port for each, with its part of the weight. RoCE has one port for all: there each flow is one by itself.
    """
    ports = {(one.source, one.destination): sorted({p.port for p in one.paths if not p.live}) for one in probes}
    sent: defaultdict[tuple[str, int, int, str, str], list[float]] = defaultdict(list)
    into: defaultdict[tuple[str, int, str], int] = defaultdict(int)
    bonds: defaultdict[str, int] = defaultdict(int)
    for flow in flows:
        bonds[flow.source] = max(bonds[flow.source], flow.bond)
        sent[flow.job, flow.rank, flow.peer, flow.source, flow.destination].append(flow.weight)
        into[flow.job, flow.peer, flow.destination] += 1
    found = []
    for (job, rank, peer, source, destination), weights in sorted(sent.items()):
        count = into[job, peer, destination]
        offered = ports.get((source, destination), [])[:count]
        if offered == [ROCE_PORT]:
            found += [Demand(job, rank, peer, source, destination, ROCE_PORT, weight, bonds[source]) for weight in weights]
            continue
        found += [Demand(job, rank, peer, source, destination, port, sum(weights) / len(offered)) for port in offered]
    return found


def choices_of(demand: Demand, probes: Sequence[Probe]) -> list[Choice]:
    """Source ports that were seen to take a path to this port, in order.

    Of a path on which a router was silent it is not known whether it is one of those that told all of theirs: where it may be, it
    is not used. Without the silent router's links it would look emptier than they are.
    """
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
    whole = {one.hops for one in found if None not in one.hops}
    known = [one for one in found if one.hops in whole or not any(alike(one.hops, hops) for hops in whole)]
    return sorted(known, key=lambda one: one.source_port)


def without(barred: Collection[Link], choices: Sequence[Choice]) -> list[Choice]:
    """Choices that take none of these links; all of them where each takes one."""
    return [one for one in choices if not any(link in barred for link in one.links)] or list(choices)


def in_series(capacities: Mapping[Link, float], choices: Sequence[Sequence[Choice]]) -> dict[Link, float]:
    """The same with links that only lead to or from narrow ones: they carry no more than what those let through."""
    most: defaultdict[Link, float] = defaultdict(float)
    for one in (one for each in choices for one in each):
        through = min((capacities.get(link, 1.0) for link in one.links), default=1.0)
        for link in one.links:
            most[link] = max(most[link], through)
    narrow = {link: through for link, through in most.items() if through < 1.0}
    return {**capacities, **{link: min(through, capacities.get(link, 1.0)) for link, through in narrow.items()}}


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


def bond_ports(demands: Sequence[Demand], chosen: Sequence[Choice | None]) -> list[int]:
    """The port of the sender's bond for each RoCE flow that is planned, from 1; 0 where there is none to choose.

    The heaviest first, to the port of its NIC that has least to send."""
    found = [0] * len(demands)
    sent: defaultdict[tuple[str, int], float] = defaultdict(float)
    for number in sorted(range(len(demands)), key=lambda i: (-demands[i].weight, i)):
        demand = demands[number]
        if chosen[number] is None or demand.port != ROCE_PORT or demand.bond < 2:
            continue
        found[number] = min(range(1, demand.bond + 1), key=lambda port: (sent[demand.source, port], port))
        sent[demand.source, found[number]] += demand.weight
    return found
