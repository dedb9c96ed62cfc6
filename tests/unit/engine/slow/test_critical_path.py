"""The dependency graph of an iteration: critical path, bubbles, what-if; and the experiment with delays at random places."""

from __future__ import annotations

import numpy as np
import pytest

from ncclwatch.engine.slow.critical_path import Structure, Weights
from score.venus import clean, experiment

# Two ranks of a stage, then one of the next: 0 and 1 work, add up, 0 sends to 2, all end together.
RANK = np.array([0, 0, 0, 1, 1, 2, 2])
JOINT = np.array([5, -1, 9, 5, 9, -1, 9])
NEEDS = np.array([[5, 1]])
WORK = np.array([1.0, 0.0, 0.2, 1.0, 0.5, 0.0, 1.0])
TRANSFER = np.array([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
USUAL = np.stack([TRANSFER, WORK])


def test_replay_and_weigh_are_inverse() -> None:
    structure = Structure(RANK, JOINT, NEEDS)
    begin, end = structure.replay(WORK, TRANSFER)
    assert end.max() == pytest.approx(1.0 + 0.1 + 0.1 + 1.0 + 0.1)
    weights = Weights(structure, begin, end, 0.0)
    assert weights.work == pytest.approx(WORK) and weights.transfer == pytest.approx(TRANSFER)


def test_the_path_goes_through_messages_and_collectives() -> None:
    structure = Structure(RANK, JOINT, NEEDS)
    begin, end = structure.replay(WORK, TRANSFER)
    weights = Weights(structure, begin, end, 0.0)
    path = list(weights.critical_path())
    assert sum((weights.work if work else weights.transfer)[at] for at, work in path) == pytest.approx(float(end.max()))
    assert (6, True) in path, "rank 2 works on what it received"
    assert (4, True) not in path, "rank 1 has time to spare"


def test_operations_that_need_each_other_in_a_cycle_are_left_out() -> None:
    """Rank 0 receives before it sends to rank 1, which does the same."""
    crossed = Structure(np.array([0, 0, 1, 1]), np.full(4, -1), np.array([[0, 3], [2, 1]]))
    _, end = crossed.replay(np.ones(4), np.ones(4))
    assert np.isnan(end).all()


def test_only_what_is_on_the_path_is_blamed() -> None:
    structure = Structure(RANK, JOINT, NEEDS)
    _, usual = structure.replay(WORK, TRANSFER)
    # Rank 1 has 0.6 s to spare before the last operation: half a second more is absorbed, two seconds are not.
    for delay, harmful in ((0.5, False), (2.0, True)):
        work = WORK.copy()
        work[4] += delay
        begin, end = structure.replay(work, TRANSFER)
        weights = Weights(structure, begin, end, 0.0)
        result = weights.analyse(USUAL)
        assert [anomaly.operation for anomaly in result.culprits] == ([4] if harmful else [])
        assert [anomaly.operation for anomaly in result.harmless] == ([] if harmful else [4])
        if not harmful:
            assert weights.slack(4) == pytest.approx(0.1)
        else:
            assert weights.without(result.culprits) == pytest.approx(float(usual.max()))


def test_two_culprits_are_ranked_by_what_they_cost() -> None:
    structure = Structure(RANK, JOINT, NEEDS)
    work, transfer = WORK.copy(), TRANSFER.copy()
    work[0] += 2.0
    transfer[5] += 5.0
    begin, end = structure.replay(work, transfer)
    weights = Weights(structure, begin, end, 0.0)
    found = weights.analyse(USUAL).culprits
    assert [(a.operation, a.work) for a in found] == [(5, False), (0, True)]
    unsure = weights.analyse(USUAL, clock_error_s=6.0).culprits
    assert [(a.operation, a.work) for a in unsure] == [(0, True)], "clocks explain a transfer, and no work of one rank"


def test_delays_at_random_places() -> None:
    outcome = experiment(40, seed=11)
    assert outcome.f1 >= 0.97 and outcome.clean_alarms == 0
    assert outcome.absorbed > 0, "some delays must fall into bubbles, or nothing shows that those are not blamed"
    assert np.median(outcome.whatif_errors) < 0.01


def test_a_healthy_run_is_silent() -> None:
    judged, alarms = clean(20)
    assert judged == 14 and alarms == 0
