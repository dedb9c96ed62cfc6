"""Jobs in which the cause is not plain: what is drawn, and which answers are right."""

from __future__ import annotations

import pytest

from ncclwatch.model.verdict import Advice, Culprit, Verdict, VerdictClass
from ncclwatch.simulate.scenario import FaultKind
from score.ambiguous import LARGEST, LITTLE, Doubt, draw
from score.causes import right_answer

GPU, LOADER, LIMIT = FaultKind.SLOW_GPU, FaultKind.SLOW_LOADER, FaultKind.CPU_LIMIT


def test_a_number_draws_the_same_job_and_all_kinds_come() -> None:
    drawn = [draw(1, number) for number in range(30)]
    assert drawn[3] == draw(1, 3) != draw(2, 3)
    assert {one.doubt for one in drawn} == set(Doubt)
    for one in drawn:
        faults = one.scenario.faults
        assert one.scenario.layout.world <= LARGEST
        if one.doubt is Doubt.TWO:
            first, second = faults
            assert (first.rank, first.start_s) == (second.rank, second.start_s) and first.kind is not second.kind
        else:
            assert len(faults) == (one.doubt is Doubt.SMALL) and one.scenario.expect.score_class.quiet
        if one.doubt is Doubt.SMALL and faults[0].kind is GPU:
            assert 1.0 < faults[0].strength <= 1.0 + 6.0 * LITTLE


def said(**rows: float) -> Verdict:
    """A verdict with these rows, each with its confidence."""
    knowledge = tuple(Advice(name.replace("_", "-"), "", "", sure) for name, sure in rows.items())
    return Verdict(VerdictClass.SLOW_COMPUTATION, "", (Culprit(1, 1, "h", 7, 0),), knowledge=knowledge)


@pytest.mark.parametrize(
    ("kinds", "verdict", "right"),
    [
        ([LIMIT, LOADER], said(cpu_limit=0.9, slow_host=0.65), True),
        ([LIMIT, GPU], said(cpu_limit=0.9, slow_host=0.65), False),
        ([LOADER, GPU], said(slow_host=0.65), True),
        ([LOADER, GPU], said(slow_network=0.6, slow_host=0.5), False),
        ([LOADER, GPU], None, False),
    ],
    ids=["both", "sure of one alone", "one of several, not sure", "neither first", "nobody"],
)
def test_of_two_causes_both_are_told_or_none_is_sure(kinds: list[FaultKind], verdict: Verdict | None, right: bool) -> None:
    assert right_answer(kinds, verdict, must_accuse=True) is right


def test_of_what_is_too_small_and_of_healthy_jobs_silence_is_right() -> None:
    assert right_answer([GPU], None, must_accuse=False) and right_answer([], None, must_accuse=False)
    assert right_answer([GPU], said(slow_compute=0.6), must_accuse=False), "it was played"
    assert not right_answer([GPU], said(slow_host=0.65), must_accuse=False)
    assert not right_answer([], said(slow_host=0.65), must_accuse=False)
