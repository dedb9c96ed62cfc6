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

pytestmark = pytest.mark.attach

QUICK = {scenario.name: scenario for scenario in load_all(SCENARIOS, "quick")}
SEED = 1
JOBS = (os.cpu_count() or 2) + 2
"""The ranks mostly sleep, and most of a run is waiting for patience to end."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    runs, left_out = matrix.choose(
        QUICK.values(), versions=[], transports=[], attaches=tuple(Attach), tries=1, seed=SEED, after_s=9.0
    )
    assert not left_out, left_out
    played = matrix.run_all(runs, jobs=JOBS, with_baselines=False, tell=matrix.tell_progress)
    return {outcome.run.scenario.name: outcome for outcome in played}


def hangs(scenario: Scenario) -> bool:
    return scenario.expect.score_class in HANG_CLASSES


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_scenario_is_judged_right(outcomes: dict[str, Outcome], name: str) -> None:
    """The fault shows in the job itself (it came to stand), and both collectors' records lead to the right class and ranks."""
    scenario, outcome = QUICK[name], outcomes[name]
    assert outcome.note == "", outcome
    by_attach = {result.setting.split()[2]: result for result in outcome.results}
    assert by_attach.keys() == {str(attach) for attach in Attach}
    for attach, result in by_attach.items():
        told = f"{attach}, seed {SEED}: {result.said or 'nothing'} {result.named} {result.summary}"
        assert not result.false_alarm, told
        if hangs(scenario):
            assert result.right, told


def test_the_quick_scenarios_cover_the_classes_releases_and_transports() -> None:
    classes = {scenario.expect.score_class for scenario in QUICK.values()}
    assert classes == {*HANG_CLASSES, ScoreClass.CLEAN}
    assert {s.network.nccl for s in QUICK.values()} == {"2.21.5", "2.27.5", "2.32.3"}
    assert {s.network.intra_node for s in QUICK.values()} == {"net", "shm"}
