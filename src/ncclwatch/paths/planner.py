"""Plans paths for the flows of all jobs together and says, SIMULATED, what each job would gain; nothing is applied here.

A plan gives each flow its port of the bond, its spine and the port it arrives at. It makes the largest load over capacity of
any link small, keeps dead links out, and leaves alone what may not be moved. What it is worth is judged by rates of the fluid
model before and after, with some paths predicted wrong; below a floor it is refused.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclwatch.errors import UsageError
from ncclwatch.paths import exact
from ncclwatch.paths.ecmp import mispredicted
from ncclwatch.paths.fabric import NO_PATHS, Fabric, Floats, Ints
from ncclwatch.paths.fluid import SAME, Tied, demands, throughput, worst
from ncclwatch.paths.placing import Board, best_of, bound, finish, place
from ncclwatch.paths.traffic import Traffic

DRAWS = 20
"""Bound: draws of which paths are predicted wrong."""
SPREAD = (10, 50, 90)
"""Fact: percentiles that stand for low, middle and high."""
WORTH = 0.01
"""Unit: share of throughput. Chosen: a plan that moves everything must gain so much over one that moves little."""


@dataclass(frozen=True)
class Gain:
    """SIMULATED throughput of a job, Gb/s sent from each of its NICs; after: 10th, 50th and 90th percentile of the draws."""

    job: str
    before: float
    low: float
    after: float
    high: float

    @property
    def ratio(self) -> float:
        """Gain, 0.25 for a quarter more; inf where the job had no live path before."""
        return self.after / self.before - 1 if self.before > 0 else (float("inf") if self.after > 0 else 0.0)


@dataclass(frozen=True)
class Plan:
    """What to change, and what it would bring. ``refused`` says why it should not be applied; empty where it may."""

    paths: Ints
    moved: Ints
    """Flows whose path differs from what it was."""
    unplaced: Ints
    """Flows that no live path is left for."""
    load_before: float
    """Largest load over capacity; above 1, jobs are held up. inf: a flow has no live path."""
    load_after: float
    bound: float
    """No placing has less; ``proven`` where the plan has just that."""
    proven: bool
    gains: tuple[Gain, ...]
    gain: float
    """Of all jobs' throughput together: the middle of the draws."""
    confidence: float
    """Share of the draws in which that gain is at least the floor."""
    refused: str

    @property
    def losers(self) -> tuple[str, ...]:
        """Jobs that would lose."""
        return tuple(each.job for each in self.gains if each.ratio < -SAME)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a plan must keep to."""

    floor: float
    """Gain of all jobs together below which a plan is refused, 0.05 for 5 %."""
    seconds: float
    """For the search; the rest takes less."""
    tied: Tied = Tied.JOB
    exact_seconds: float = 0.0
    """For OR-tools, where the search does not reach its bound and the fabric is small; 0: not used."""
    seed: int = 0


def plan(fabric: Fabric, traffic: Traffic, now: Ints, wrong: Floats, wishes: Wishes) -> Plan:
    """A plan for flows whose paths are ``now`` (F, 4); a row of -1 where a flow has none that lives, or none yet.

    ``wrong`` (F): probability that the path of a flow is not what is predicted. Raises :class:`UsageError` for input that does
    not fit.
    """
    _check(traffic, now, wrong)
    demand = demands(fabric, traffic)
    few = finish(fabric, traffic, demand, now, time.monotonic() + wishes.seconds / 2)
    all_ = keep_alike(traffic, demand, now, place(fabric, traffic, demand, now, wishes.seconds / 2))
    floor = bound(fabric, traffic, demand)
    # What holds up one job may be beyond help while others can be helped: so rates decide, not the fullest link alone.
    rates = [_total(fabric, traffic, paths, wishes.tied) for paths in (few, all_)]
    better = worst(fabric, all_, demand) < worst(fabric, few, demand) * (1 - WORTH) or rates[1] > rates[0] * (1 + WORTH)
    paths = all_ if better and rates[1] >= rates[0] * (1 - SAME) else few
    if wishes.exact_seconds > 0 and worst(fabric, paths, demand) > floor * (1 + SAME) and exact.available():
        found = exact.solve(fabric, traffic, demand, now, paths, wishes.exact_seconds)
        if found is not None:
            floor = max(floor, found.bound)
            if found.paths is not None:
                proved = keep_alike(traffic, demand, now, found.paths)
                paths = best_of(fabric, demand, [paths, proved])
    return judge(fabric, traffic, now, paths, wrong, floor, wishes)


def replan(fabric: Fabric, traffic: Traffic, now: Ints, wrong: Floats, wishes: Wishes) -> Plan:
    """A plan after a job began or ended, or a link died: only flows without a live path move, and those in the way of the bound.

    ``now`` holds -1 for flows of new jobs; flows of a job that ended are not in ``traffic`` any more.
    """
    _check(traffic, now, wrong)
    demand = demands(fabric, traffic)
    paths = finish(fabric, traffic, demand, now, time.monotonic() + wishes.seconds)
    return judge(fabric, traffic, now, paths, wrong, bound(fabric, traffic, demand), wishes)


def greedy(fabric: Fabric, traffic: Traffic, demand: Floats) -> Ints:
    """(F, 4): each flow where the fullest of its links is least full, one after the other: what a planner without search does."""
    board = Board(fabric, traffic, demand, np.full((len(traffic), 4), -1, np.int64))
    for flow in range(len(traffic)):
        board.place(flow)
    return board.paths


def _check(traffic: Traffic, now: Ints, wrong: Floats) -> None:
    if now.shape != (len(traffic), 4) or wrong.shape != (len(traffic),):
        raise UsageError("paths or probabilities do not belong to the flows", "give one of each for every flow")
    if len(wrong) and not (wrong.min() >= 0 and wrong.max() <= 1):
        raise UsageError("a probability is not one", "give numbers from 0 to 1")


def _total(fabric: Fabric, traffic: Traffic, paths: Ints, tied: Tied) -> float:
    return float(np.nansum(throughput(fabric, traffic, paths, tied)))


def keep_alike(traffic: Traffic, demand: Floats, now: Ints, paths: Ints) -> Ints:
    """The same placing with flows that are alike exchanged so that as many as can be stay where they are ``now``."""
    if not len(paths):
        return NO_PATHS
    found = paths.copy()
    order = np.lexsort((demand, traffic.movable, traffic.destination, traffic.source))
    key = np.stack([traffic.source, traffic.destination, traffic.movable, demand])[:, order]
    starts = np.flatnonzero(np.r_[True, (key[:, 1:] != key[:, :-1]).any(axis=0)])
    for members in np.split(order, starts[1:]):
        if len(members) < 2:
            continue
        spare: dict[tuple[int, ...], int] = {}
        for path in map(tuple, paths[members].tolist()):
            spare[path] = spare.get(path, 0) + 1
        moving = []
        for flow in members.tolist():
            here = tuple(now[flow].tolist())
            if spare.get(here, 0):
                spare[here] -= 1
                found[flow] = here
            else:
                moving.append(flow)
        rest = [path for path, count in spare.items() for _ in range(count)]
        for flow, path in zip(moving, rest, strict=True):
            found[flow] = path
    return found


def judge(fabric: Fabric, traffic: Traffic, now: Ints, paths: Ints, wrong: Floats, floor: float, wishes: Wishes) -> Plan:
    """What a placing would bring. ``floor``: a lower bound of the largest load over capacity."""
    demand = demands(fabric, traffic)
    before = throughput(fabric, traffic, now, wishes.tied)
    moved = (paths != now).any(axis=1)
    after = draws(fabric, traffic, paths, np.where(moved, wrong, 0.0), wishes.tied, wishes.seed)
    spread = np.percentile(after, SPREAD, axis=0)
    gains = tuple(
        Gain(job, float(before[i]), *(float(value) for value in spread[:, i]))
        for i, job in enumerate(traffic.jobs)
        if np.isfinite(before[i])
    )
    total, had = np.nansum(after, axis=1), float(np.nansum(before))
    relative: NDArray[np.float64] = total / had - 1 if had > 0 else np.where(total > 0, np.inf, 0.0)
    gain = float(np.median(relative))
    load = worst(fabric, paths, demand)
    why = ""
    if not moved.any():
        why = "nothing needs to be moved"
    elif gain < wishes.floor:
        why = f"it would gain {gain:.1%}, below the floor of {wishes.floor:.1%}"
    return Plan(
        paths,
        np.flatnonzero(moved),
        np.flatnonzero(~fabric.is_path(paths)),
        worst(fabric, now, demand),
        load,
        floor,
        load <= floor * (1 + 1e-6),
        gains,
        gain,
        float((relative >= wishes.floor).mean()),
        why,
    )


def draws(fabric: Fabric, traffic: Traffic, paths: Ints, wrong: Floats, tied: Tied, seed: int) -> Floats:
    """(draws, jobs): SIMULATED throughput where paths come true only with some probability; one draw where all are certain."""
    if not wrong.any():
        return throughput(fabric, traffic, paths, tied)[None, :]
    rng = np.random.default_rng(seed)
    return np.stack([throughput(fabric, traffic, mispredicted(fabric, traffic, paths, wrong, rng), tied) for _ in range(DRAWS)])
