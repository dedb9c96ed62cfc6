"""The rule that tells from a job's own iteration times whether a slow fault shows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ncclwatch.simulate.scenario import load_all
from score.__main__ import SCENARIOS
from score.visible import LEVEL, chance, shows, visibility

CATALOGUE = {scenario.name: scenario for scenario in load_all(SCENARIOS)}


def iterations(*lengths: float) -> list[tuple[float, float]]:
    ends = np.cumsum(lengths).tolist()
    return list(zip(lengths, ends, strict=True))


def noisy(count: int, seconds: float, scatter: float, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [seconds * (1 + draw.uniform(-scatter, scatter)) for _ in range(count)]


def test_a_third_more_shows_and_a_twentieth_does_not() -> None:
    before = noisy(20, 0.5, 0.1, 1)
    at = 2.0 + sum(before)  # after a first iteration that makes connections
    assert shows(iterations(2.0, *before, *noisy(20, 0.65, 0.1, 2)), at).visible
    small = shows(iterations(2.0, *before, *noisy(20, 0.525, 0.01, 3)), at)
    assert not small.visible and small.p is not None and small.p < LEVEL, "certain, and too little to matter"


def test_chance_alone_does_not_show() -> None:
    shown = 0
    for seed in range(200):
        lengths = [random.Random(seed).lognormvariate(-0.7, 0.5)] + [
            random.Random(f"{seed}/{n}").lognormvariate(-0.7, 0.5) for n in range(40)
        ]
        shown += shows(iterations(*lengths), sum(lengths[:21])).visible
    assert shown <= 6, "of 200 jobs without a fault two are expected"


def test_pauses_in_one_iteration_of_four_show() -> None:
    before, since = noisy(30, 0.5, 0.05, 4), [0.5, 0.5, 0.5, 0.9] * 8
    assert shows(iterations(0.5, *before, *since), 0.5 + sum(before)).visible


def test_few_iterations_since_are_enough_where_they_are_long() -> None:
    before = noisy(13, 0.6, 0.1, 5)
    at = 1.0 + sum(before)
    slow = iterations(1.0, *before, 1.8, 5.5, 5.7)  # the fault falls into the first of the last three
    assert shows(slow, at + 0.5).visible
    assert not shows(iterations(1.0, *before, 0.7), at).visible
    # None has ended since: that it has lasted so long tells.
    alone = iterations(1.0, *before)
    assert shows(alone, at, until=at + 20.0).visible
    assert not shows(alone, at, until=at + 0.5).visible


def test_without_a_before_nothing_is_told() -> None:
    few = shows(iterations(1.0, 0.5, 0.5, *([5.0] * 10)), 2.0)
    assert not few.visible and few.p is None


def test_the_permutation_test_is_exact_where_that_is_possible() -> None:
    assert chance(np.array([1.0, 2.0, 3.0]), np.array([4.0])) == pytest.approx(1 / 4)
    assert chance(np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0])) == pytest.approx(1 / 10)
    assert chance(np.array([1.0]), np.array([4.0, 5.0, 6.0])) == pytest.approx(1 / 4)
    assert chance(np.ones(5), np.ones(5)) == 1.0
    many = chance(np.arange(30.0), np.arange(30.0) + 100)
    assert many == pytest.approx(1 / 20_001)


def test_a_job_that_is_slow_from_its_start_is_measured_against_the_model_of_its_program() -> None:
    scenario = CATALOGUE["s1-slow-gpu-from-start"]
    quick = iterations(*[0.6] * 20)
    assert visibility(scenario, quick, 0.0).visible
    # On a machine where everything else takes ten times as long as the fault adds, it does not show.
    assert not visibility(scenario, iterations(*[60.0] * 20), 0.0).visible
