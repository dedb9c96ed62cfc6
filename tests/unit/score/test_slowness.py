"""The fitting of the slowness estimate: known weights are found again, and thresholds keep wrong names rare."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ncclwatch.engine.slow import calibration
from ncclwatch.engine.slow.terms import TERMS, CandidateKind, Terms
from ncclwatch.simulate.scenario import FaultKind, ScoreClass, load_all
from score import network
from score.drawn import draw
from score.slowness import (
    COLUMNS,
    KINDS,
    LEAST_NAMED,
    WRONG_AT_MOST,
    Moment,
    _named_from,
    as_weights,
    fit,
    mixed,
    outcome,
    scenario_of,
    threshold,
    validate,
)

SCENARIOS = Path(__file__).resolve().parent.parent.parent / "scenarios"
CANDIDATES = 6
TRUE = {"ends": 3.0, "activity": 1.5, "late": 0.0}


def moments(jobs: int, *, healthy: float = 0.3, each: int = 1, seed: int = 1) -> list[Moment]:
    """Jobs whose culprit is drawn by the odds that ``TRUE`` gives to each candidate's terms, and nobody at ``healthy``."""
    chance = np.random.default_rng(seed)
    made = []
    for job in range(jobs):
        values = np.zeros((CANDIDATES, len(TERMS)))
        for name in TRUE:
            values[:, TERMS.index(name)] = chance.normal(0.0, 1.0, CANDIDATES)
        odds = values @ np.array([TRUE.get(name, 0.0) for name in TERMS])
        culprit = int(np.argmax(odds + chance.gumbel(size=CANDIDATES))) if chance.random() >= healthy else -1
        if culprit < 0:
            values = np.minimum(values, 0.0)
        terms = Terms(
            [CandidateKind.RANK] * CANDIDATES, [(rank,) for rank in range(CANDIDATES)], values, np.zeros(CANDIDATES),
            np.zeros(CANDIDATES, np.int64), [[]] * CANDIDATES,
        )  # fmt: skip
        right = np.arange(CANDIDATES) == culprit
        one = Moment(f"job-{job}", False, False, list(range(CANDIDATES)), terms, 0.0, right, right)
        made += [replace(one) for _ in range(each)]
    return made


def column(weights: np.ndarray, name: str) -> float:
    return float(weights[COLUMNS.index(name)])


def test_weights_that_made_the_truth_are_found_again() -> None:
    found = fit(moments(400))
    assert column(found, "ends") > column(found, "activity") > 3 * max(column(found, "late"), 0.05)
    assert column(found, "ends") == pytest.approx(TRUE["ends"], rel=0.4)
    assert all(column(found, name) == pytest.approx(0.0, abs=1e-6) for name in TERMS if name not in TRUE), "never shown"
    assert (found[: len(TERMS)] >= 0).all() and column(found, "rank") == 0.0


def test_a_job_has_one_voice_however_often_it_was_judged() -> None:
    once, often = fit(moments(60)), fit(moments(60, each=5))
    assert np.allclose(once, often, atol=0.02)


def test_more_healthy_jobs_make_nobody_likelier() -> None:
    assert column(fit(moments(200, healthy=0.8)), "nobody") > column(fit(moments(200, healthy=0.1)), "nobody")


def test_the_table_holds_what_was_fitted() -> None:
    fitted = fit(moments(60))
    weights = as_weights(fitted, 60)
    assert set(weights.terms) == {*TERMS, "idle"} and set(weights.kinds) == set(KINDS) and weights.jobs == 60
    assert weights.terms["ends"] == pytest.approx(column(fitted, "ends"), abs=1e-3)
    assert weights.nobody == pytest.approx(column(fitted, "nobody"), abs=1e-3)


def test_validation_judges_no_job_by_weights_that_it_made() -> None:
    """One job whose culprit has terms as no other has: weights fitted with it would find it."""
    many = moments(60, each=2)
    odd = [moment for moment in many if moment.job == "job-0"]
    for moment in odd:
        moment.terms.values[:] = 0.0
        moment.terms.values[2, TERMS.index("asleep")] = 5.0
        moment.right = moment.guilty = np.arange(CANDIDATES) == 2
    validate(many)
    assert all(moment.chances is not None and 0 <= moment.chances.sum() <= 1 for moment in many)
    assert odd[0].chances is not None and odd[0].chances[2] == pytest.approx(odd[0].chances[0])
    assert column(fit(many), "asleep") > 0.05


def test_a_threshold_keeps_wrong_names_under_the_chosen_rate() -> None:
    judged = moments(300, each=2)
    validate(judged)
    chosen = WRONG_AT_MOST["healthy"]
    least = threshold(judged, chosen)
    result = outcome(judged, least)
    assert result.jobs == 300 and result.wrong <= chosen * result.jobs and 0 < result.right <= result.faulty
    lower = outcome(judged, least - 0.01)
    assert least == LEAST_NAMED or lower.wrong > chosen * lower.jobs, "and it is the smallest that does"
    assert outcome(judged, 1.01).silent == result.faulty


def test_who_is_named_from_which_probability_on_is_derived_by_the_weights_as_they_are() -> None:
    """All else of the table stays, and so does what was found of the jobs that it is fitted to."""
    kept, judged = json.loads(Path(calibration.__file__).with_name(calibration.FILE).read_text("utf-8")), moments(200, each=2)
    table = _named_from(judged)
    least = table["name_from"]["since"]
    assert least == threshold(judged, WRONG_AT_MOST["slow"]) == table["note"]["named from"]["since"]
    assert table["note"]["named from"]["wrong"] == outcome(judged, least).wrong
    assert {**table, "name_from": 0, "note": 0} == {**kept, "name_from": 0, "note": 0}
    assert {**table["name_from"], "since": 0} == {**kept["name_from"], "since": 0}


def with_two(moment: Moment, guilty: set[int], chance: float) -> Moment:
    """The same with one more candidate, the first two ranks together, of this probability; the rest is the first rank's."""
    terms = Terms(
        [*moment.terms.kinds, CandidateKind.TWO_RANKS], [*moment.terms.members, (0, 1)],
        np.vstack([moment.terms.values, moment.terms.values[:1]]),
        np.zeros(CANDIDATES + 1), np.zeros(CANDIDATES + 1, np.int64), [[]] * (CANDIDATES + 1),
    )  # fmt: skip
    who = [set(members) for members in terms.members]
    return replace(
        moment, terms=terms, right=np.array([one == guilty for one in who]), guilty=np.array([one <= guilty for one in who]),
        chances=np.array([1 - chance, *[0.0] * (CANDIDATES - 1), chance]),
    )  # fmt: skip


def test_one_of_two_culprits_is_no_innocent() -> None:
    made = [with_two(one, {0, 1}, 0.3) for one in moments(1, healthy=0.0, each=2)]
    result = outcome(made, 0.65)
    assert (result.right, result.wrong, result.silent) == (0, 0, 0)


def test_who_is_named_once_is_not_named() -> None:
    """As the engine does: two moments in a row that name the same."""
    judged = [moment for moment in moments(3, healthy=0.0, each=2) if moment.job == "job-0"]
    culprit = int(np.argmax(judged[0].right))
    for moment in judged:
        moment.chances = np.where(np.arange(CANDIDATES) == culprit, 0.9, 0.0)
    assert (outcome(judged[:1], 0.5).right, outcome(judged, 0.5).right) == (0, 1)
    other = (culprit + 1) % CANDIDATES
    judged[1].chances = np.where(np.arange(CANDIDATES) == other, 0.9, 0.0)
    assert outcome(judged, 0.5).wrong == 0 and outcome(judged, 0.5).silent == 1
    judged[0].chances = judged[1].chances
    assert outcome(judged, 0.5).wrong == 1


def test_no_jobs_make_no_threshold() -> None:
    with pytest.raises(ValueError, match="no jobs"):
        threshold([], 0.05)


def test_answers_and_tables_end_with_nobody() -> None:
    moment = moments(1, healthy=1.0)[0]
    assert moment.answers().tolist() == [False] * CANDIDATES + [True]
    table = replace(moment, idle=0.4).table()
    assert table.shape == (CANDIDATES + 1, len(COLUMNS))
    assert table[-1, COLUMNS.index("nobody")] == 1 and table[-1, COLUMNS.index("idle")] == 0.4 and not table[:-1, -2:].any()


def test_scenarios_are_found_by_their_names() -> None:
    known = {scenario.name: scenario for scenario in load_all(SCENARIOS, "")}
    name = next(iter(known))
    assert scenario_of(name, known) is known[name]
    for drawn in (draw(7, 3), draw(7, 3, slow=True)):
        assert scenario_of(drawn.name, known) == drawn
    cable = network.draw("late-link", 7, 3)
    assert scenario_of(cable.name, known) == cable
    with pytest.raises((ValueError, IndexError)):
        scenario_of("nowhere", {})


def test_a_loaded_host_may_share_its_links_too() -> None:
    scenarios = [draw(2001, number, slow=True) for number in range(60)]
    loaded = [scenario for scenario in scenarios if any(fault.kind is FaultKind.HOST_LOAD for fault in scenario.faults)]
    assert loaded, "some are drawn"
    for scenario in scenarios:
        both = mixed(scenario)
        assert (both is None) == (scenario not in loaded)
        if both is not None:
            assert both.expect.score_class is ScoreClass.S3 and len(both.faults) == len(scenario.faults) + 1
            assert both.faults[-1].kind is FaultKind.BACKGROUND_TRAFFIC
