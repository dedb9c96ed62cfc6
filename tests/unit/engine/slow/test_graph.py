"""The dependency graph of an iteration: critical path, bubbles, what-if; and the experiment with delays at random places."""

from __future__ import annotations

import numpy as np
import pytest

from ncclwatch.engine.slow.critical_path import analyse, critical_path, slack, straggling
from ncclwatch.engine.slow.graph import build, replay, weigh
from ncclwatch.engine.slow.whatif import costs, duration_without, explained
from score.venus import clean, experiment

# Two ranks of a stage, then one of the next: 0 and 1 work, add up, 0 sends to 2, all end together.
RANK = np.array([0, 0, 0, 1, 1, 2, 2])
JOINT = np.array([5, -1, 9, 5, 9, -1, 9])
NEEDS = np.array([[5, 1]])
WORK = np.array([1.0, 0.0, 0.2, 1.0, 0.5, 0.0, 1.0])
TRANSFER = np.array([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])


def test_replay_and_weigh_are_inverse() -> None:
    structure = build(RANK, JOINT, NEEDS)
    begin, end = replay(structure, WORK, TRANSFER, 0.0)
    assert end.max() == pytest.approx(1.0 + 0.1 + 0.1 + 1.0 + 0.1)
    weights = weigh(structure, begin, end, 0.0)
    assert weights.work == pytest.approx(WORK) and weights.transfer == pytest.approx(TRANSFER)


def test_the_path_goes_through_messages_and_collectives() -> None:
    structure = build(RANK, JOINT, NEEDS)
    begin, end = replay(structure, WORK, TRANSFER, 0.0)
    path = critical_path(structure, weigh(structure, begin, end, 0.0))
    assert sum(element.seconds for element in path) == pytest.approx(float(end.max()))
    assert {int(structure.rank[element.operation]) for element in path if element.work and element.seconds > 0.5} <= {0, 1, 2}
    assert any(element.operation == 6 and element.work for element in path), "rank 2 works on what it received"


def test_only_what_is_on_the_path_is_blamed() -> None:
    structure = build(RANK, JOINT, NEEDS)
    _, usual = replay(structure, WORK, TRANSFER, 0.0)
    # Rank 1 has 0.6 s to spare before the last operation: half a second more is absorbed, two seconds are not.
    for delay, harmful in ((0.5, False), (2.0, True)):
        work = WORK.copy()
        work[4] += delay
        begin, end = replay(structure, work, TRANSFER, 0.0)
        weights = weigh(structure, begin, end, 0.0)
        result = analyse(structure, weights, WORK, TRANSFER, float(usual.max()), 0.0, with_slack=True)
        assert [anomaly.operation for anomaly in result.culprits] == ([4] if harmful else [])
        assert [anomaly.operation for anomaly in result.harmless] == ([] if harmful else [4])
        if not harmful:
            assert result.harmless[0].slack == pytest.approx(slack(structure, weights)[4]) and result.harmless[0].slack > 0
        else:
            assert duration_without(structure, weights, result.culprits, 0.0) == pytest.approx(float(usual.max()))
            cost = costs(structure, weights, result.culprits, 0.0)[0]
            assert cost.cost == pytest.approx(float(end.max() - usual.max()))
            graph = explained(structure, weights, result.path)
            assert 4 in graph and graph.nodes[4]["rank"] == 1


def test_two_culprits_are_ranked_by_what_they_cost() -> None:
    structure = build(RANK, JOINT, NEEDS)
    _, usual = replay(structure, WORK, TRANSFER, 0.0)
    work, transfer = WORK.copy(), TRANSFER.copy()
    work[0] += 2.0
    transfer[5] += 5.0
    begin, end = replay(structure, work, transfer, 0.0)
    result = analyse(structure, weigh(structure, begin, end, 0.0), WORK, TRANSFER, float(usual.max()), 0.0)
    assert [(a.operation, a.work) for a in result.culprits] == [(5, False), (0, True)]


def test_only_the_straggling_replica_is_kept() -> None:
    structure = build(RANK, JOINT, NEEDS)
    begin, end = replay(structure, WORK, TRANSFER, 0.0)
    weights = weigh(structure, begin, end, 0.0)
    assert straggling(weights, RANK, np.array([2, 4, 6])).tolist() == [False, False, True]


def test_delays_at_random_places() -> None:
    outcome = experiment(40, seed=11)
    assert outcome.f1 >= 0.97 and outcome.clean_alarms == 0
    assert outcome.absorbed > 0, "some delays must fall into bubbles, or nothing shows that those are not blamed"
    assert np.median(outcome.whatif_errors) < 0.01


def test_a_healthy_run_is_silent() -> None:
    judged, alarms = clean(20)
    assert judged == 14 and alarms == 0
