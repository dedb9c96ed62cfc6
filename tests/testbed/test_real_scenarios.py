"""The quick scenarios, played by real NCCL and watched from outside as `make eval-full` does with all of them.

One collector is there from before the first communicator, another comes when the job already stands; three releases, sockets and
shared memory. They run several at a time, once for all tests of this file.
"""

from __future__ import annotations

import os

import pytest

from ncclwatch.simulate.scenario import Scenario, ScoreClass, load_all
from score import matrix
from score.__main__ import SCENARIOS
from score.diagnosers import HANG_CLASSES
from score.real import Attach, Outcome

pytestmark = [pytest.mark.attach, pytest.mark.quiet, pytest.mark.timeout(900)]  # the first test plays them all

QUICK = {scenario.name: scenario for scenario in load_all(SCENARIOS, "quick")}
SEED = 1
JOBS = (os.cpu_count() or 2) + 4
"""The ranks mostly sleep, and most of a run is waiting for patience to end."""

LONG = {
    "quick-clean",
    "quick-clean-shared-memory",
    "quick-gpu-stall",
    "quick-kill",
    "quick-link-down",
    "quick-never-enters-pipeline",
    "quick-never-enters-shared-memory",
    "quick-proxy-stall",
    "quick-stop",
    "quick-stop-shared-memory",
    "quick-swap",
    "quick-two-stopped",
}
"""Played by `make test-all`: like another one, or like a job of ``test_diagnose_job`` (healthy), ``test_diagnose_faults`` or
``test_network_faults``."""

IN_HINDSIGHT = {
    ("quick-skip", Attach.POST_HANG): "that a call was left out is in the order of finished calls, which memory does not keep",
    ("quick-other-operation", Attach.POST_HANG): "what the odd rank called is there no more once its proxies have gone on",
}
"""Where the evidence is gone for who comes late: the rank must be among those named, others may be."""


def play(chosen: list[Scenario], jobs: int) -> list[Outcome]:
    runs, left_out = matrix.choose(chosen, versions=[], transports=[], attaches=tuple(Attach), tries=1, seed=SEED, after_s=9.0)
    assert not left_out, left_out
    return matrix.run_all(runs, jobs=jobs, with_baselines=False, tell=matrix.tell_progress)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Of the scenarios whose tests were chosen."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module]
    names = {item.callspec.params["name"] for item in tests if hasattr(item, "callspec")}
    chosen = [scenario for name, scenario in QUICK.items() if name in names]
    # Healthy jobs have the machine to themselves: one that others slow down is no healthy job.
    played = play([s for s in chosen if hangs(s)], JOBS) + play([s for s in chosen if not hangs(s)], 1)
    return {outcome.run.scenario.name: outcome for outcome in played}


def hangs(scenario: Scenario) -> bool:
    return scenario.expect.score_class in HANG_CLASSES


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in QUICK])
def test_a_quick_scenario_is_judged_right(outcomes: dict[str, Outcome], name: str) -> None:
    """The fault shows in the job itself (it came to stand), and both collectors' records lead to the right class and ranks."""
    scenario, outcome = QUICK[name], outcomes[name]
    assert outcome.note == "", outcome
    by_attach = {Attach(result.setting.split()[2]): result for result in outcome.results}
    assert by_attach.keys() == set(Attach)
    for attach, result in by_attach.items():
        told = f"{attach}, seed {SEED}: {result.said or 'nothing'} {result.named} {result.summary}"
        if (name, attach) in IN_HINDSIGHT:
            assert not result.detected or set(scenario.expect.ranks) <= set(result.named), told
        else:
            assert result.right, told


def test_every_long_one_is_there() -> None:
    assert QUICK.keys() > LONG


def test_the_quick_scenarios_cover_the_classes_releases_and_transports() -> None:
    classes = {scenario.expect.score_class for scenario in QUICK.values()}
    assert classes == {*HANG_CLASSES, ScoreClass.CLEAN}
    assert {s.network.nccl for s in QUICK.values()} == {"2.21.5", "2.27.5", "2.32.3"}
    assert {s.network.intra_node for s in QUICK.values()} == {"net", "shm"}
