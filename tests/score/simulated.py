"""Simulated scenarios scored several at a time, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

from ncclwatch.simulate.scenario import Scenario
from score.baselines import all_baselines
from score.cases import Case
from score.diagnosers import Ncclwatch
from score.scoring import Result, score_case


def score_one(scenario: Scenario, with_baselines: bool, shift: int = 0) -> list[Result]:
    """One scenario; of large ones only what is ours is scored."""
    baselines = with_baselines and "scale" not in scenario.tags
    case = Case(scenario, shift)
    return score_case(case, [Ncclwatch(every=case.every), *(all_baselines() if baselines else ())])


def score_all(scenarios: Sequence[Scenario], *, jobs: int = 0, with_baselines: bool = True, shift: int = 0) -> list[list[Result]]:
    """The results of each scenario, in their order; ``jobs`` 0: as many at a time as there are cores."""
    with ProcessPoolExecutor(jobs or os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        return list(pool.map(score_one, scenarios, repeat(with_baselines), repeat(shift)))
