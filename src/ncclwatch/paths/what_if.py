"""SIMULATED: what a change would gain on a fabric that a file describes, before anybody makes it.

Changes are what can be set without changing NCCL: more queue pairs a connection, and source ports by a plan. Each is judged by
rates of the fluid model beside those of today. How switches hash is not known: every figure of a hashed setting is over draws of
the STAND-IN hash (:mod:`ncclwatch.paths.ecmp`), and a gain is of the same draw. ``NCCL_IB_TC`` and ``NCCL_IB_SL`` choose a queue
at each switch and no path: they are not in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ncclwatch.paths.ecmp import Bond, Hashing, paths_by_hash
from ncclwatch.paths.fabric import Fabric, Floats
from ncclwatch.paths.fluid import Tied, throughput
from ncclwatch.paths.planner import SPREAD, Wishes, draws, plan
from ncclwatch.paths.ports import LOWEST
from ncclwatch.paths.traffic import MAX_FLOWS, Traffic

FACTORS = (2, 4, 8)
"""Bound: times as many queue pairs that are tried."""
SEARCH_S = 1.0
"""Bound: seconds for a plan's search."""


@dataclass(frozen=True, slots=True)
class Change:
    """``factor`` times as many queue pairs as now, and source ports by a plan or by the hash."""

    factor: int
    planned: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """SIMULATED. Gb/s a NIC of one job, and the gain over today: 10th, 50th and 90th percentile of the draws."""

    change: Change
    job: str
    gbps: tuple[float, float, float]
    gain: tuple[float, float, float]


@dataclass(frozen=True)
class WhatIf:
    """``today`` (jobs, 3) and every change, ``best`` the one whose gain of all jobs together is largest, None below the floor.

    ``totals`` are gains of all jobs together, by change.
    """

    jobs: tuple[str, ...]
    today: tuple[tuple[float, float, float], ...]
    outcomes: tuple[Outcome, ...]
    totals: tuple[tuple[Change, tuple[float, float, float]], ...]
    best: Change | None
    floor: float


def more_queue_pairs(traffic: Traffic, factor: int, seed: int) -> Traffic:
    """Each flow as ``factor`` flows of equal parts, with source ports of their own, drawn."""
    many = traffic.part(np.repeat(np.arange(len(traffic)), factor))
    ports = np.random.default_rng(seed).integers(LOWEST, 1 << 16, len(many))
    return replace(many, weight=many.weight / factor, source_port=ports)


def what_if(
    fabric: Fabric,
    traffic: Traffic,
    *,
    seeds: int,
    wrong: float,
    floor: float,
    bond: Bond = Bond.HASH,
    tied: Tied = Tied.JOB,
    addresses_alone: bool = False,
) -> WhatIf:
    """Every change beside today. ``wrong``: probability that a planned path is not what was predicted.

    A planned change is judged by draws of which paths are wrong, a hashed one by draws of the hash and of source ports.
    Where switches hash ``addresses_alone`` no source port chooses a path, and none is planned.
    """
    hashes = [Hashing(seed, bond, addresses_alone=addresses_alone) for seed in range(seeds)]
    today = np.stack([_hashed(fabric, traffic, hashing, tied) for hashing in hashes])
    ways = (False,) if addresses_alone else (False, True)
    changes = [Change(factor, planned) for planned in ways for factor in (1, *FACTORS)]
    changes = [one for one in changes if one != Change(1, False) and len(traffic) * one.factor <= MAX_FLOWS]
    outcomes, totals = [], []
    for change in changes:
        after = _after(fabric, traffic, change, hashes, wrong, tied)
        gain = np.divide(after, today, out=np.ones_like(after), where=today > 0) - 1
        for number, job in enumerate(traffic.jobs):
            if np.isfinite(today[:, number]).all():
                outcomes.append(Outcome(change, job, _spread(after[:, number]), _spread(gain[:, number])))
        total = np.nansum(after, axis=1) / np.maximum(np.nansum(today, axis=1), 1e-12) - 1
        totals.append((change, _spread(total)))
    # Of changes that gain the same the smallest: fewer queue pairs, and no plan where hashing does as well.
    order = sorted(totals, key=lambda each: (-round(each[1][1], 2), each[0].planned, each[0].factor))
    best = order[0][0] if order and order[0][1][1] >= floor else None
    return WhatIf(
        traffic.jobs, tuple(_spread(today[:, i]) for i in range(len(traffic.jobs))), tuple(outcomes), tuple(totals), best, floor
    )


def _after(fabric: Fabric, traffic: Traffic, change: Change, hashes: Sequence[Hashing], wrong: float, tied: Tied) -> Floats:
    """(seeds, jobs)"""
    if not change.planned:
        return np.stack(
            [_hashed(fabric, more_queue_pairs(traffic, change.factor, hashing.seed), hashing, tied) for hashing in hashes]
        )
    flows = more_queue_pairs(traffic, change.factor, 0) if change.factor > 1 else traffic
    now = paths_by_hash(fabric, flows, hashes[0])
    made = plan(fabric, flows, now, np.zeros(len(flows)), Wishes(floor=0.0, seconds=SEARCH_S, tied=tied))
    drawn = [draws(fabric, flows, made.paths, np.full(len(flows), wrong), tied, hashing.seed)[0] for hashing in hashes]
    return np.stack(drawn)


def _hashed(fabric: Fabric, traffic: Traffic, hashing: Hashing, tied: Tied) -> Floats:
    return throughput(fabric, traffic, paths_by_hash(fabric, traffic, hashing), tied)


def _spread(values: Floats) -> tuple[float, float, float]:
    low, middle, high = (float(value) for value in np.percentile(values, SPREAD))
    return low, middle, high


def settings(change: Change, queue_pairs: int) -> dict[str, str]:
    """Variables of NCCL that make a change, where it has ``queue_pairs`` a connection now.

    ``NCCL_IB_SPLIT_DATA_ON_QPS=1`` gives each of them a part of every message; without it they take turns by messages (the
    default since 2.20), and a message that is alone uses one (``net_ib``).
    """
    if change.factor == 1:
        return {}
    return {"NCCL_IB_QPS_PER_CONNECTION": str(queue_pairs * change.factor), "NCCL_IB_SPLIT_DATA_ON_QPS": "1"}


def in_words(change: Change, queue_pairs: int) -> str:
    """``4 queue pairs``, ``1 queue pair, planned source ports``."""
    number = queue_pairs * change.factor
    return f"{number} queue pair{'s' if number != 1 else ''}" + (", planned source ports" if change.planned else "")


def hosts_of(fabric: Fabric) -> Sequence[str]:
    """Names of hosts in order."""
    return list(dict.fromkeys(host for host, _ in fabric.nics))
