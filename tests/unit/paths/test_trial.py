"""A plan on trial: rates that fall when it is taken are told once, others are not."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.paths.measured import MeasuredFlow
from ncclwatch.paths.trial import LOOKS, Fall, Trial
from unit.paths.test_measured import A, B, flow

PLANNED = {(A, 700 + n, B, 26000 + n) for n in (0, 1)}


def at(*rates: float, planned: bool = False) -> list[MeasuredFlow]:
    flows = [flow(n, 500 + n, rate=rate) for n, rate in enumerate(rates)]
    return [replace(one, source_port=700 + n, port=26000 + n) for n, one in enumerate(flows)] if planned else flows


def told(trial: Trial, before: list[list[MeasuredFlow]], after: list[list[MeasuredFlow]]) -> list[Fall]:
    return [fall for one in (*before, *after) if (fall := trial.look(one)) is not None]


def test_flows_that_are_slower_on_the_plan_are_told_once() -> None:
    trial = Trial(PLANNED)
    assert told(trial, [at(90, 100)] * 5, [at(200, 40, planned=True)] * 9) == [Fall(90, 40)], "the slowest flow counts"


def test_flows_that_are_as_fast_or_faster_are_left() -> None:
    assert not told(Trial(PLANNED), [at(90, 100)] * 5, [at(85, 85, planned=True)] * 9)
    assert not told(Trial(PLANNED), [at(90, 100)] * 5, [at(180, 190, planned=True)] * 9)


def test_a_job_that_varied_as_much_before_has_not_fallen() -> None:
    before = [at(100, 100), at(40, 100), at(100, 100), at(100, 100), at(40, 100)]
    assert not told(Trial(PLANNED), before, [at(50, 50, planned=True)] * 9)


def test_too_few_looks_and_idle_flows_tell_nothing() -> None:
    assert not told(Trial(PLANNED), [at(90, 100)] * (LOOKS - 1), [at(40, 40, planned=True)] * 9)
    assert not told(Trial(PLANNED), [at(90, 100)] * 5, [at(40, 40, planned=True)] * (LOOKS - 1))
    assert not told(Trial(PLANNED), [at(90, 100)] * 5, [at(0, 0, planned=True)] * 9)
    other = [[replace(one, destination="10.9.9.9") for one in at(1, 1)]] * 9
    assert not told(Trial(PLANNED), [at(90, 100)] * 5, other)


def test_half_of_the_flows_on_the_plan_is_no_side() -> None:
    mixed = [at(1, 1)[0], at(1, 1, planned=True)[1]]
    assert not told(Trial(PLANNED), [at(90, 100)] * 5, [mixed] * 9)
