from dataclasses import replace

import numpy as np
import pytest

from benchmarks.bench_paths import of_512_ports
from ncclwatch.errors import UsageError
from ncclwatch.paths import exact
from ncclwatch.paths.colouring import spread
from ncclwatch.paths.ecmp import Hashing, paths_by_hash
from ncclwatch.paths.fabric import NO_PATHS
from ncclwatch.paths.fluid import demands, worst
from ncclwatch.paths.placing import bound, place
from ncclwatch.paths.planner import Wishes, greedy, keep_alike, plan, replan
from unit.paths.fabrics import fabric, pairs

WISHES = Wishes(floor=0.05, seconds=2.0)


@pytest.mark.parametrize("colours", [2, 4, 8])
def test_colours_are_even_at_every_vertex(colours: int) -> None:
    rng = np.random.default_rng(3)
    left, right = rng.integers(0, 7, 500), rng.integers(0, 9, 500)
    chosen = spread(left, right, np.zeros(500, np.int64), np.ones(500), colours)
    for ends in (left, right):
        for vertex in np.unique(ends):
            counts = np.bincount(chosen[ends == vertex], minlength=colours)
            assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("spines", [3, 4, 6, 8])
def test_a_sound_fabric_carries_all_at_line_rate(spines: int) -> None:
    built = fabric(hosts=16, nics=4, spines=spines, uplink_gbps=200 * 32 / spines)
    flows = pairs(built, nics=4, queue_pairs=4)
    ask = demands(built, flows)
    placed = place(built, flows, ask, NO_PATHS, 2.0)
    assert worst(built, placed, ask) == pytest.approx(bound(built, flows, ask))
    assert worst(built, placed, ask) < worst(built, greedy(built, flows, ask), ask) + 1e-9


def test_a_plan_gains_and_says_what_it_moves() -> None:
    built = fabric(hosts=8, spines=4, uplink_gbps=400)
    flows = pairs(built)
    now = paths_by_hash(built, flows, Hashing(1))
    made = plan(built, flows, now, np.zeros(len(flows)), WISHES)
    assert made.load_after == pytest.approx(1) and made.proven
    assert [gain.after for gain in made.gains] == pytest.approx([400] * 4)
    assert made.gain > 0.5 and made.confidence == 1 and not made.refused and not made.losers
    assert (made.paths != now).any(axis=1).nonzero()[0].tolist() == made.moved.tolist()


def test_below_the_floor_a_plan_is_refused() -> None:
    built = fabric(hosts=8, spines=4, uplink_gbps=400)
    flows = pairs(built)
    best = plan(built, flows, paths_by_hash(built, flows, Hashing(1)), np.zeros(len(flows)), WISHES).paths
    again = plan(built, flows, best, np.zeros(len(flows)), WISHES)
    assert again.refused == "nothing needs to be moved" and not len(again.moved)
    now = paths_by_hash(built, flows, Hashing(1))
    assert "below the floor" in plan(built, flows, now, np.zeros(len(flows)), replace(WISHES, floor=9.0)).refused


def test_wrong_predictions_cost_gain_and_confidence() -> None:
    built = fabric(hosts=8, spines=4, uplink_gbps=400)
    flows = pairs(built)
    now = paths_by_hash(built, flows, Hashing(1))
    sure, unsure = (plan(built, flows, now, np.full(len(flows), wrong), replace(WISHES, floor=0.8)) for wrong in (0.0, 0.5))
    assert unsure.gain < sure.gain
    assert unsure.confidence < sure.confidence
    assert unsure.gains[0].low <= unsure.gains[0].after <= unsure.gains[0].high


def test_what_may_not_be_moved_stays() -> None:
    built = fabric(hosts=8, spines=4, uplink_gbps=400)
    flows = pairs(built)
    now = paths_by_hash(built, flows, Hashing(1))
    flows = replace(flows, movable=flows.job != 0)
    made = plan(built, flows, now, np.zeros(len(flows)), WISHES)
    assert (made.paths[flows.job == 0] == now[flows.job == 0]).all()
    assert len(made.moved)


def test_a_dead_link_moves_few_flows() -> None:
    built = fabric(hosts=16, nics=4, spines=8, uplink_gbps=800)
    flows = pairs(built, nics=4, queue_pairs=4)
    ask = demands(built, flows)
    placed = place(built, flows, ask, NO_PATHS, 2.0)
    broken = built.with_uplinks([0])
    again = replan(broken, flows, placed, np.zeros(len(flows)), WISHES)
    hit = (~broken.is_path(placed)).sum()
    assert hit > 0 and broken.is_path(again.paths).all() and not len(again.unplaced)
    assert hit <= len(again.moved) <= 2 * hit
    assert again.load_before == float("inf") and again.load_after <= 1.25


def test_a_new_job_leaves_the_others_where_they_are() -> None:
    built = fabric(hosts=16, nics=4, spines=8, uplink_gbps=800)
    flows = pairs(built, nics=4, queue_pairs=4)
    placed = place(built, flows, demands(built, flows), NO_PATHS, 2.0)
    placed[flows.job == 7] = -1
    again = replan(built, flows, placed, np.zeros(len(flows)), WISHES)
    assert again.load_after == pytest.approx(1)
    assert set(flows.job[again.moved].tolist()) == {7}


def test_a_flow_that_nothing_reaches_is_named() -> None:
    built = fabric().with_ports([0, 1])
    flows = pairs(built)
    now = paths_by_hash(built, flows, Hashing(1))
    made = replan(built, flows, now, np.zeros(len(flows)), WISHES)
    assert set(made.unplaced.tolist()) == set(np.flatnonzero((flows.source == 0) | (flows.destination == 0)).tolist())


def test_flows_that_are_alike_are_not_exchanged() -> None:
    built = fabric()
    flows = pairs(built, queue_pairs=4)
    now = paths_by_hash(built, flows, Hashing(2))
    other = now.reshape(-1, 4, 4)[:, ::-1].reshape(-1, 4)
    assert (keep_alike(flows, demands(built, flows), now, other) == now).all()


def test_input_that_does_not_fit() -> None:
    built = fabric()
    flows = pairs(built)
    now = paths_by_hash(built, flows, Hashing(2))
    with pytest.raises(UsageError):
        plan(built, flows, now[1:], np.zeros(len(flows)), WISHES)
    with pytest.raises(UsageError):
        plan(built, flows, now, np.full(len(flows), 1.5), WISHES)


@pytest.mark.skipif(not exact.available(), reason="OR-tools is not installed (ncclwatch[paths])")
def test_the_search_reaches_what_is_proven() -> None:
    built = fabric(hosts=4, spines=3, uplink_gbps=300).with_uplinks([0])
    flows = replace(pairs(built, queue_pairs=4), movable=np.arange(32) % 8 > 0)
    ask, now = demands(built, flows), paths_by_hash(built, flows, Hashing(2))
    found = exact.solve(built, flows, ask, now, None, 10.0)
    assert found is not None and found.paths is not None and found.proven
    assert worst(built, found.paths, ask) == pytest.approx(found.bound, rel=1e-5)
    assert (found.paths[~flows.movable] == now[~flows.movable]).all()
    assert worst(built, place(built, flows, ask, now, 2.0), ask) == pytest.approx(found.bound, rel=1e-5)


def test_where_every_link_is_full_flows_change_places_between_two_spines() -> None:
    cases = {name: (built, flows, now) for name, built, flows, now in of_512_ports(1)}
    built, flows, now = cases["2:1, a dead uplink"]
    # CP-SAT proves 2 (tests/benchmarks/bench_paths.py); moves one by one end at 2.25.
    ask = demands(built, flows)
    assert worst(built, place(built, flows, ask, now, 10.0), ask) == pytest.approx(2)
