"""Where a GPU stalls decides what must be said of it."""

from __future__ import annotations

from ncclwatch.model.verdict import VerdictClass
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import Scenario, load_all
from score.__main__ import SCENARIOS
from score.cases import Case
from score.drawn import draw
from score.stalls import Stalled, stalled_in, where_it_stalled

CATALOGUE = {scenario.name: scenario for scenario in load_all(SCENARIOS)}


def drawn_stalls() -> list[Scenario]:
    return [one for number in range(140) if "gpu-stall" in (one := draw(7, number)).name]


def test_a_gpu_that_stalls_inside_an_operation_is_hardware_and_between_two_it_has_not_entered() -> None:
    scenario = CATALOGUE["quick-gpu-stall"]
    for stalled, verdicts in {
        Stalled.INSIDE: {VerdictClass.HARDWARE},
        Stalled.BETWEEN: {VerdictClass.NOT_ENTERED},
        Stalled.AT_BEGIN: {VerdictClass.HARDWARE, VerdictClass.NOT_ENTERED},
    }.items():
        assert set(where_it_stalled(scenario, stalled).expect.verdicts) == verdicts
    assert where_it_stalled(scenario, "") is scenario
    other = CATALOGUE["quick-stop"]
    assert where_it_stalled(other, Stalled.INSIDE) is other


def test_the_simulator_says_where_it_was() -> None:
    assert stalled_in(simulate(CATALOGUE["h3-gpu-stall-gradients"])) == Stalled.INSIDE
    assert stalled_in(simulate(CATALOGUE["quick-stop"])) == ""
    left = {Stalled.INSIDE, Stalled.BETWEEN}
    for one in drawn_stalls():
        left.discard(Stalled(stalled_in(simulate(one)) or Stalled.AT_BEGIN))
        if not left:
            break
    assert not left


def test_a_case_expects_what_follows_from_it() -> None:
    for one in drawn_stalls()[:2]:
        case = Case(one)
        assert case.scenario.expect.verdicts == where_it_stalled(one, stalled_in(case.timeline)).expect.verdicts
