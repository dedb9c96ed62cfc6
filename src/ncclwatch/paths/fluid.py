"""SIMULATED rates: max-min fairness of flows over links, as a fluid without packets, round trips or congestion control.

Progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2): all rates grow alike; where a link is full, what
crosses it stays. A link whose share is the least for everything that crosses it can be filled at once, as shares of others
only grow.

What belongs together grows and stays together (:class:`Tied`): a ring moves no faster than its slowest flow, as each rank
forwards what it got, and iterations of a job none faster than its slowest ring.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ncclwatch.paths.fabric import Fabric, Floats, Ints
from ncclwatch.paths.traffic import Traffic

SAME = 1e-9
"""Relative difference below which two shares are the same; rounding of double precision is far below."""


class Tied(StrEnum):
    """Which flows have one rate, beside their weights."""

    FLOW = "flow"
    """None: each flow takes what it gets, and the slowest then decides. Wastes most."""
    RING = "ring"
    """Those of a ring: a step waits for the step before."""
    JOB = "job"
    """Those of a job: over many iterations all have moved the same bytes, and who was early has left room to other jobs."""


def max_min(capacity: Floats, links: Ints, members: Ints, coefficients: Floats, count: int) -> Floats:
    """(count): max-min fair rates of members.

    Entry i says that member ``members[i]`` at rate r takes ``coefficients[i]`` × r of link ``links[i]``. Units are those of
    ``capacity`` (L). A member without entries has rate inf, one over a dead link 0.
    """
    rates = np.full(count, np.inf)
    left = capacity.astype(np.float64).copy()
    order = np.argsort(members, kind="stable")
    links, members, coefficients = links[order], members[order], coefficients[order]
    while len(links):
        usage = np.bincount(links, coefficients, len(left))
        share = np.divide(np.maximum(left, 0.0), usage, out=np.full(len(left), np.inf), where=usage > 0)
        starts = np.flatnonzero(np.r_[True, members[1:] != members[:-1]])
        least = np.minimum.reduceat(share[links], starts)
        of_entry = np.repeat(least, np.diff(np.r_[starts, len(members)]))
        # A link is filled now when none that crosses it is held lower elsewhere.
        lower = np.bincount(links, of_entry < share[links] * (1 - SAME), len(left))
        full = (usage > 0) & (lower == 0)
        frozen = np.logical_or.reduceat(full[links], starts)
        rates[members[starts[frozen]]] = least[frozen]
        stays = np.repeat(frozen, np.diff(np.r_[starts, len(members)]))
        left -= np.bincount(links[stays], coefficients[stays] * of_entry[stays], len(left))
        links, members, coefficients = links[~stays], members[~stays], coefficients[~stays]
    return rates


def _groups(traffic: Traffic, tied: Tied) -> Ints:
    return {Tied.FLOW: np.arange(len(traffic)), Tied.RING: traffic.ring, Tied.JOB: traffic.job}[tied]


def flow_rates(fabric: Fabric, traffic: Traffic, paths: Ints, tied: Tied) -> Floats:
    """(F): SIMULATED rate of each flow on its path, Gb/s; 0 for a flow without a live path, and for all that are tied to it.

    At a full link the rates of two flows are as their weights, so queue pairs of equal parts get equal shares.
    """
    if not len(traffic):
        return np.zeros(0)
    group = _groups(traffic, tied)
    count = int(group.max()) + 1
    lost = np.zeros(count, bool)
    lost[group[~fabric.is_path(paths)]] = True
    used = (paths >= 0) & ~lost[group][:, None]
    flow, _ = np.nonzero(used)
    rates = max_min(fabric.capacity, paths[used], group[flow], traffic.weight[flow], count)
    rates[lost] = 0.0
    return np.asarray(rates[group] * traffic.weight)


def throughput(fabric: Fabric, traffic: Traffic, paths: Ints, tied: Tied) -> Floats:
    """(jobs): SIMULATED Gb/s that each job sends from each of its NICs, on average over them, at the pace of its slowest flow.

    For a ring AllReduce this is the bus bandwidth over the number of NICs (nccl-tests, ``doc/PERFORMANCE.md``). nan: no flows.
    """
    rates = flow_rates(fabric, traffic, paths, tied)
    pace = np.full(len(traffic.jobs), np.inf)
    np.minimum.at(pace, traffic.job, rates / traffic.weight)
    total = np.bincount(traffic.job, traffic.weight, len(traffic.jobs))
    pairs = np.unique(np.stack([traffic.job, traffic.source]), axis=1)[0]
    nics = np.bincount(pairs, minlength=len(traffic.jobs))
    return np.asarray(np.divide(pace * total, nics, out=np.full(len(pace), np.nan), where=nics > 0))


def loads(fabric: Fabric, paths: Ints, demand: Floats) -> Floats:
    """(L): what each link would carry, Gb/s, if every flow had what it asks for."""
    used = paths >= 0
    flow, _ = np.nonzero(used)
    return np.asarray(np.bincount(paths[used], demand[flow], len(fabric.capacity)))


def demands(fabric: Fabric, traffic: Traffic) -> Floats:
    """(F): Gb/s that each flow asks for: those of a job in step, and as fast as the busiest NIC of the job allows."""
    scale = np.full(len(traffic.jobs), np.inf)
    for ends in (traffic.source, traffic.destination):
        key = traffic.job * len(fabric.nics) + ends
        keys, place = np.unique(key, return_inverse=True)
        total = np.bincount(place, traffic.weight, len(keys))
        np.minimum.at(scale, keys // len(fabric.nics), fabric.nic_gbps[keys % len(fabric.nics)] / total)
    return np.asarray(traffic.weight * np.where(np.isfinite(scale), scale, 0.0)[traffic.job])


def worst(fabric: Fabric, paths: Ints, demand: Floats) -> float:
    """The largest load over capacity of any link: what a plan makes small. inf where a flow has no live path."""
    if not len(paths):
        return 0.0
    if not fabric.is_path(paths).all():
        return float("inf")
    load = loads(fabric, paths, demand)
    return float(np.max(np.divide(load, fabric.capacity, out=np.zeros_like(load), where=fabric.capacity > 0)))


def worst_links(fabric: Fabric, paths: Ints, demand: Floats, most: int) -> list[tuple[int, float]]:
    """At most ``most`` links that are asked for more than they have, worst first: (link, load over capacity)."""
    load = loads(fabric, paths, demand)
    use: NDArray[np.float64] = np.divide(load, fabric.capacity, out=np.zeros_like(load), where=fabric.capacity > 0)
    return [(int(link), float(use[link])) for link in np.argsort(-use, kind="stable")[:most] if use[link] > 1 + SAME]
