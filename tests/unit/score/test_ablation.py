"""What leaving out a rule or a term costs is told apart from what it does not cost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from ncclwatch.engine import diagnose as diagnosis
from ncclwatch.engine.rules import RULES
from ncclwatch.engine.slow.terms import TERMS
from score import ablation
from score.ablation import Cost
from score.archive import JOBS, name_of, recordings_in
from score.observations import read
from score.slowness import Moment, moments_of
from unit.engine.test_rules import HELD_BY

(LINK_DOWN,) = (path for path in recordings_in(JOBS) if name_of(path) == "drawn-801-27-link-down-2.27.5-socket-post-hang-0")


@cache
def a_moment() -> Moment:
    """One of a kept job."""
    job = next(job for job in read(ablation.KEPT.with_name("slowness-unfitted.xz")) if len(job.observations) > 1)
    return moments_of(replace(job, observations=job.observations[:1]))[0]


def test_a_rule_that_a_recording_needs_costs_and_one_that_says_nothing_does_not() -> None:
    costs: dict[str, Cost] = defaultdict(Cost)
    before = dict(diagnosis._BY_STRATUM)
    ablation.of_recording(LINK_DOWN, costs, most=6)
    assert dict(diagnosis._BY_STRATUM) == before, "the diagnosis has its own table again"
    assert costs["network-down"].wrong.keys() == {name_of(LINK_DOWN)}
    assert "all-ended" not in costs
    rows = list(ablation.rows(costs, defaultdict(Cost)))
    assert len(rows) == len(RULES) + 2 and "| 1 | 1 | 1 of 1 |" in next(row for row in rows if "`network-down`" in row)


def test_of_each_rule_so_many_recordings_are_replayed_and_no_more() -> None:
    costs: dict[str, Cost] = defaultdict(Cost)
    ablation.of_recording(LINK_DOWN, costs, most=0)
    assert costs["network-down"].differs and not costs["network-down"].replayed and not costs["network-down"].wrong


@pytest.mark.parametrize("term", [*TERMS, "idle"])
def test_a_term_that_is_left_out_says_nothing_and_the_others_what_they_said(term: str) -> None:
    moment = a_moment()
    (changed,) = ablation.without_term([moment], term)
    same = [
        name == term or np.array_equal(changed.terms.values[:, at], moment.terms.values[:, at]) for at, name in enumerate(TERMS)
    ]
    assert all(same) and (term != "idle" or not changed.idle)
    assert term == "idle" or not changed.terms.values[:, TERMS.index(term)].any()


def test_a_case_fails_without_the_rule_that_it_is_for_and_not_without_another() -> None:
    recording = f"tests/fixtures/jobs/{name_of(LINK_DOWN)}"
    assert ablation.fails_without("network-down", recording) and not ablation.fails_without("tcp-slow", recording)
    case = "tests/unit/engine/test_diagnose.py::test_a_single_look_accuses_nobody"
    assert ablation.fails_without("one-sample", case) and not ablation.fails_without("network-down", case)


@pytest.mark.parametrize(
    "rule",
    # A case that is a test is run by a pytest of its own: the test above shows that it would be seen.
    [pytest.param(rule.id, marks=[pytest.mark.long] * ("::" in HELD_BY[rule.id][0])) for rule in RULES],
)
def test_every_rule_is_needed_by_the_case_it_is_kept_for(rule: str) -> None:
    assert ablation.fails_without(rule, HELD_BY[rule][0])
