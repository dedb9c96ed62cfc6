"""Shared bottlenecks from rates alone: on rates of the fluid model (SIMULATED), and on series that share nothing."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from ncclwatch.paths.fabric import Floats, Ints, regular
from ncclwatch.paths.fluid import Tied, flow_rates
from ncclwatch.paths.tomography import FEWEST_LOOKS, shared, slowness
from ncclwatch.paths.traffic import Ring, rings

LOOKS = 160


def on_and_off(rng: np.random.Generator, jobs: int) -> Floats:
    """(looks, jobs): who sends; spells of some looks each."""
    spells = [np.repeat(rng.random(LOOKS) < 0.5, rng.integers(3, 9, LOOKS))[:LOOKS] for _ in range(jobs)]
    return np.stack(spells, axis=1)


def simulated(seed: int, *, both_ways_alike: bool = True) -> tuple[Floats, Ints]:
    """SIMULATED rates of six jobs of two hosts, one flow each way, over two spines, with noise; and leaf and spine of each flow.

    Jobs 0 and 1 are always on; job k takes spine k modulo 2, and the same one back or, if the ways differ, that of k // 2.
    """
    rng = np.random.default_rng(seed)
    fabric = regular(hosts=12, nics=1, ports=1, port_gbps=100, leaves=2, spines=2, links=1, uplink_gbps=100, rails=False)
    traffic = rings(fabric, [Ring(f"job{k}", [k, 6 + k]) for k in range(6)], 1, seed)
    rows = [fabric.alternatives(int(s), int(d)) for s, d in zip(traffic.source, traffic.destination, strict=True)]
    back = [int(source) >= 6 and not both_ways_alike for source in traffic.source]
    spines = [(job // 2 if other_way else job) % 2 for job, other_way in zip(traffic.job.tolist(), back, strict=True)]
    paths = np.array([alternatives[spine] for alternatives, spine in zip(rows, spines, strict=True)])
    on = on_and_off(rng, 6)
    on[:, :2] = True
    rates = np.zeros((LOOKS, len(traffic)))
    for look in range(LOOKS):
        active = np.flatnonzero(on[look, traffic.job])
        rates[look, active] = flow_rates(fabric, traffic.part(active), paths[active], Tied.FLOW)
    return rates * rng.normal(1, 0.04, rates.shape), np.stack([traffic.source >= 6, paths[:, 1] % 2], axis=1)


@pytest.mark.parametrize("seed", range(3))
def test_flows_of_one_spine_are_found_and_no_others(seed: int) -> None:
    rates, link = simulated(seed)
    found = shared(rates)
    assert found and all(0.9 < group.confidence <= 1 for group in found)
    for group in found:
        members = link[list(group.flows)]
        # Flows of one job go both ways at the same times; who shares a spine one way does so the other way.
        assert len({int(spine) for spine in members[:, 1]}) == 1, (group, members.tolist())
    assert sum(len(group.flows) for group in found) == len(link), "each spine carries six flows, all of which are found"


def test_both_ways_of_a_job_send_at_the_same_times_and_are_told_apart() -> None:
    """Who drops when a job sends shares a link with one of its two flows: with the one that drops for the same jobs."""
    right, told, there = 0, 0, 0
    for seed in range(8):
        rates, link = simulated(seed, both_ways_alike=False)
        pairs = [pair for group in shared(rates) for pair in combinations(group.flows, 2)]
        same = [bool((link[a] == link[b]).all()) for a, b in combinations(range(len(link)), 2)]
        right += sum(bool((link[a] == link[b]).all()) for a, b in pairs)
        told, there = told + len(pairs), there + sum(same)
    assert right >= 0.9 * told and right >= 0.5 * there, (right, told, there)


def test_flows_that_vary_by_themselves_share_nothing() -> None:
    told = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        quiet = on_and_off(rng, 6) * rng.normal(60, 3, (LOOKS, 6)) + 40
        told += len(shared(quiet))
    assert told <= 3, "of twenty sets at most a few are told by chance"


def test_few_looks_and_steady_rates_tell_nothing() -> None:
    rates, _ = simulated(0)
    assert shared(rates[: FEWEST_LOOKS - 1]) == [] and shared(np.full((LOOKS, 4), 9.0)) == []
    assert shared(np.zeros((LOOKS, 3))) == [] and shared(np.full((LOOKS, 3), np.nan)) == []
    assert shared(np.zeros((LOOKS, 0))) == shared(rates[:, :1]) == []


def test_slowness_is_of_what_was_sent() -> None:
    rates = np.array([[10.0], [10.0], [8.0], [5.0], [0.0], [10.0], [np.nan]])
    assert np.nan_to_num(slowness(rates)[:, 0], nan=-1).tolist() == pytest.approx([0, 0, 0.25, 1, -1, 0, -1])
