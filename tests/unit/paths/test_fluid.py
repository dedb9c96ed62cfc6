import time

import numpy as np
import pytest

from ncclwatch.paths.ecmp import Hashing, paths_by_hash
from ncclwatch.paths.fabric import Fabric, Ints
from ncclwatch.paths.fluid import Tied, demands, flow_rates, max_min, throughput, worst, worst_links
from ncclwatch.paths.traffic import Ring, Traffic, rings
from unit.paths.fabrics import fabric, pairs


def _rates(capacity: list[float], routes: list[list[int]], weights: list[float] | None = None) -> list[float]:
    members = np.repeat(np.arange(len(routes)), [len(route) for route in routes])
    coefficients = np.repeat(np.array(weights or [1.0] * len(routes)), [len(route) for route in routes])
    links = np.array([link for route in routes for link in route], np.int64)
    return [float(rate) for rate in max_min(np.array(capacity), links, members, coefficients, len(routes))]


def test_the_parking_lot() -> None:
    # One long flow and one short flow on each of two links, of 10 and 4.
    assert _rates([10, 4], [[0, 1], [0], [1]]) == [2, 8, 2]


def test_what_one_link_leaves_goes_to_others() -> None:
    assert _rates([12, 3, 100], [[0, 1], [0], [0, 2]]) == pytest.approx([3, 4.5, 4.5])


def test_a_member_of_several_flows_takes_a_link_several_times() -> None:
    assert _rates([9], [[0], [0]], [2.0, 1.0]) == [3, 3]


def test_dead_links_and_no_links() -> None:
    assert _rates([0, 5], [[0, 1], [1], []]) == [0, 5, np.inf]


def test_no_rate_can_grow_but_at_the_cost_of_a_lower_one() -> None:
    rng = np.random.default_rng(2)
    capacity = rng.uniform(1, 10, 30)
    routes = [rng.choice(30, 4, replace=False).tolist() for _ in range(200)]
    rates = np.array(_rates(capacity.tolist(), routes))
    load = np.bincount(np.concatenate(routes), np.repeat(rates, 4), 30)
    assert (load <= capacity * (1 + 1e-9)).all()
    on = [[rate for rate, route in zip(rates, routes, strict=True) if link in route] for link in range(30)]
    highest = np.array([max(there, default=0.0) for there in on])
    for rate, route in zip(rates, routes, strict=True):
        # Each has a full link on which none is faster.
        assert any(load[link] >= capacity[link] * (1 - 1e-9) and rate >= highest[link] * (1 - 1e-9) for link in route)


def _collision() -> tuple[Fabric, Traffic, Ints]:
    """Two jobs; both queue pairs of one flow pair of job 0 leave by one port."""
    built = fabric()
    flows = rings(built, [Ring("a", [0, 2], queue_pairs=2), Ring("b", [1, 3], queue_pairs=2)], 2, 1)
    paths = np.array([built.alternatives(int(s), int(d))[0] for s, d in zip(flows.source, flows.destination, strict=True)])
    return built, flows, paths


def test_a_ring_is_as_fast_as_its_slowest_flow() -> None:
    built, flows, paths = _collision()
    for tied in Tied:
        rates = flow_rates(built, flows, paths, tied)
        if tied is not Tied.FLOW:
            assert np.ptp(rates[flows.ring == 0]) < 1e-9
    # Eight flows of both jobs on one uplink of 200 Gb/s: 25 each, two a NIC.
    assert throughput(built, flows, paths, Tied.JOB).tolist() == pytest.approx([50, 50])


def test_a_flow_without_a_path_stops_its_job_and_no_other() -> None:
    built, flows, paths = _collision()
    paths[0] = -1
    assert throughput(built, flows, paths, Tied.JOB).tolist() == pytest.approx([0, 100])


def test_jobs_ask_for_what_their_busiest_nic_has() -> None:
    built = fabric()
    flows = pairs(built)
    assert demands(built, flows).tolist() == [200.0] * len(flows)
    assert demands(built.with_ports([0]), flows)[flows.job == 0].tolist() == [100.0] * 8


def test_the_fullest_link_is_named() -> None:
    built, flows, paths = _collision()
    ask = demands(built, flows)
    assert worst(built, paths, ask) == pytest.approx(8)
    link, use = worst_links(built, paths, ask, 1)[0]
    assert use == pytest.approx(8)
    assert link in paths
    paths[0] = -1
    assert worst(built, paths, ask) == float("inf")


def test_many_flows_take_little_time() -> None:
    built = fabric(hosts=64, nics=8, leaves=16, spines=16, uplink_gbps=800)
    flows = pairs(built, nics=8, queue_pairs=16)
    paths = paths_by_hash(built, flows, Hashing(1))
    began = time.process_time()
    rates = flow_rates(built, flows, paths, Tied.FLOW)
    # 8,192 flows: some 20 ms here.
    assert time.process_time() - began < 2
    assert len(flows) == 8192 and (rates > 0).all()
