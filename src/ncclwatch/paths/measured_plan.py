"""A plan on measured paths: which source port each flow of the next communicator should leave by, and what that would gain.

The gain is PREDICTED: an iteration lasts as long as the fullest link of its job needs, so a job that computes beside gains less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ncclwatch.model.paths import Probe
from ncclwatch.model.traits import ADAPTIVE_ROUTING
from ncclwatch.paths.assignment import (
    SAME,
    Choice,
    Demand,
    assign,
    bond_ports,
    choices_of,
    in_series,
    load_of,
    next_demands,
    without,
)
from ncclwatch.paths.measured import Crowded, Link, MeasuredFlow, capacities_of, crowds, open_links, where_now
from ncclwatch.paths.suspects import Suspect, Told, suspects

DRAWS = 200
"""Bound: draws of which paths are not what was seen."""
SPREAD = (10, 50, 90)
"""Fact: percentiles that stand for low, middle and high."""
BONDED = (
    "ports of bonds are dealt evenly by what flows carry, which no gain counts; a probe leaves by whichever port its host hashes "
    "it to: where the ports of a bond lead to different switches, look at the paths again with the plan in place"
)


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
    avoided: tuple[Suspect, ...] = ()
    """Links that verdicts call dead or slow."""

    @property
    def bond_ports(self) -> list[int]:
        """The port of the sender's bond for each of ``demands``, from 1; 0 where there is none to choose."""
        return bond_ports(self.demands, self.chosen)


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


def plan(
    flows: Sequence[MeasuredFlow],
    probes: Sequence[Probe],
    *,
    floor: float,
    kept: Mapping[tuple[str, int, str, int], int] | None = None,
    told: Sequence[Told] = (),
) -> MeasuredPlan:
    """Assign a source port to each demand, so that no link carries more than it must; refuse below ``floor`` (0.05 for 5 %).

    ``kept`` is an older plan, (source, rank, destination, port) → source port: what it says stays where that costs nothing.
    ``told``: what verdicts say of links. A dead one is given nothing while another path is left, a slow one less.
    Flows that are routed adaptively have no fixed path: they are left out, and no gain is told of them.
    """
    flows, loose = [one for one in flows if not one.adaptive], [one for one in flows if one.adaptive]
    demands = next_demands(flows, probes)
    now = where_now(flows, probes)
    capacities = capacities_of(flows, now, probes)
    avoided, unplaced = suspects(told, flows, now, open_links(probes))
    for each in avoided:
        capacities[each.link] = min(capacities.get(each.link, 1.0), each.expected)
    barred = {each.link for each in avoided if each.barred}
    choices = [without(barred, choices_of(one, probes)) for one in demands]
    capacities = in_series(capacities, choices)
    chosen = assign(demands, choices, kept or {}, capacities)
    loads = load_of(demands, chosen)
    gains = _gains(flows, now, demands, chosen, choices, probes, floor, capacities)
    lost = sum(one is None for one in chosen)
    notes = [f"{lost} connections stay as they are: no path to their ports was seen"] if lost else []
    unseen = {(f.source, f.destination) for f in flows} - {(p.source, p.destination) for p in probes}
    notes += [_without_ports(loose)] if loose and flows else []
    notes += unplaced[:16]
    notes += [BONDED] if any(bond_ports(demands, chosen)) else []
    notes += [f"no probe was made from {source} to {destination}" for source, destination in sorted(unseen)[:16]]
    return MeasuredPlan(
        tuple(demands),
        tuple(chosen),
        tuple(crowds(flows, now, probes)),
        gains,
        loads,
        _refusal(gains, chosen, floor) if flows or not loose else _without_ports(loose),
        tuple(notes),
        tuple(avoided),
    )


def _without_ports(loose: Sequence[MeasuredFlow]) -> str:
    jobs, many = ", ".join(sorted({one.job for one in loose}))[:200], len(loose) != 1
    return (
        f"{len(loose)} flow{'s' if many else ''} of job {jobs} {'have' if many else 'has'} {ADAPTIVE_ROUTING} on: where "
        "switches route adaptively a flow has no fixed path, and no source port gives it one; no gain is promised"
    )


def _refusal(gains: Sequence[JobGain], chosen: Sequence[Choice | None], floor: float) -> str:
    if not any(chosen):
        return "no path to a port of the next communicator was seen"
    best = max((one.gain for one in gains), default=0.0)
    return "" if best >= floor else f"it would gain {best:.0%}, below the floor of {floor:.0%}"


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
