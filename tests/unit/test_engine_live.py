"""The standing verdict: patience, since when, recovery."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import VerdictClass
from unit.synthetic import SECOND, frozen_ring, looks, moved


def rounds(count: int, *, run_state: str = "T") -> list[list[ProcessSample]]:
    """Rounds of samples of a ring in which nothing moves."""
    series = looks(frozen_ring(2, run_state=run_state), count=count)
    return [[samples[index] for samples in series] for index in range(count)]


def test_a_stopped_rank_is_named_on_the_second_round_with_the_time_of_the_last_progress() -> None:
    live = LiveDiagnosis()
    first, second, third = rounds(3)
    assert live.update(first).verdict_class is VerdictClass.UNKNOWN
    verdict = live.update(second)
    assert verdict.verdict_class is VerdictClass.STOPPED
    assert verdict.since == first[0].wall_ns / SECOND
    assert live.update(third).since == verdict.since


def test_recovery_closes_the_verdict_with_its_duration() -> None:
    live = LiveDiagnosis()
    looks_ = rounds(4)
    for samples in looks_[:3]:
        live.update(samples)
    verdict = live.update([replace(moved(sample), run_state="S") for sample in looks_[3]])
    assert verdict.verdict_class is VerdictClass.RUNNING
    [(closed, duration)] = live.closed
    assert closed.verdict_class is VerdictClass.STOPPED
    assert duration == 3.0


def test_waits_alone_need_the_floor() -> None:
    live = LiveDiagnosis(floor_s=5)
    classes = [live.update(samples).verdict_class for samples in rounds(8, run_state="S")]
    assert not any(verdict_class.accuses for verdict_class in classes[:5])


def test_age_of_a_standstill_survives_many_rounds() -> None:
    live = LiveDiagnosis()
    verdict = None
    for samples in rounds(30):
        verdict = live.update(samples)
    assert verdict is not None and any("29.0 s" in line for line in verdict.evidence)


def test_a_process_that_is_no_longer_reported_is_forgotten() -> None:
    live = LiveDiagnosis()
    first, second = rounds(2)
    live.update(first)
    live.update(second[:1])
    assert len(live._series) == 1


def going_on(live: LiveDiagnosis, before: list[ProcessSample], at: int) -> list[ProcessSample]:
    """One round in which everything has moved since ``before``, at the given second."""
    moved_on = [replace(moved(sample), time_ns=at * SECOND, wall_ns=(1_700_000_000 + at) * SECOND) for sample in before]
    assert live.update(moved_on).verdict_class is VerdictClass.RUNNING
    return moved_on


def test_patience_grows_with_the_pauses_a_job_ends_by_itself() -> None:
    live = LiveDiagnosis(floor_s=5)
    looks_ = rounds(9, run_state="S")
    for samples in looks_:
        live.update(samples)
    going_on(live, looks_[-1], 110)
    assert live.patience_s >= 2 * 8


def test_a_stopped_process_teaches_no_patience() -> None:
    live = LiveDiagnosis(floor_s=5)
    looks_ = rounds(9)
    for samples in looks_:
        live.update(samples)
    going_on(live, [replace(sample, run_state="S") for sample in looks_[-1]], 110)
    assert live.patience_s == 5
