"""A real job that is well is hardly looked at, and one that no longer is is named as soon as by steady looks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ncclwatch.cli.live import LiveSession
from ncclwatch.collect import ease
from ncclwatch.engine.slow import watch
from ncclwatch.model.verdict import Verdict, VerdictClass
from testbed.job import Job

pytestmark = [pytest.mark.attach, pytest.mark.quiet]

RANKS, VICTIM = 3, 1
WIDEST_S = 60.0
CALM_S = 5.0
SETTLES_S = 90.0
HANG_FLOOR_S = 5.0
LATE_S = 6.0
"""A busy machine: two samples, pulses twice a second, a judgement a second."""


@contextmanager
def calm(monkeypatch: pytest.MonkeyPatch, *extra: str) -> Iterator[tuple[Job, LiveSession]]:
    """A job that is looked at rarely by now: no look in five seconds."""
    monkeypatch.setattr(watch, "SETTLED_SAMPLES", 6)
    monkeypatch.setattr(ease, "STEADY_S", 3.0)
    with Job("2.27.5", RANKS, "allreduce", "mixed", count=20_000, extra=("--compute-us", "250000", *extra)) as job:
        session = LiveSession(every=False, widest_s=WIDEST_S)
        try:
            session.start(job.pids)
            begun = looked = time.monotonic()
            while time.monotonic() - looked < CALM_S:
                if session.step().windows is not None:
                    looked = time.monotonic()
                assert time.monotonic() - begun < SETTLES_S, "looks never became rare"
                assert session.verdict is None or not session.verdict.verdict_class.accuses, session.verdict
            yield job, session
        finally:
            session.close()


def told(session: LiveSession, within_s: float) -> Verdict | None:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if session.step().told:
            return session.verdict
    return None


@pytest.mark.long
def test_a_stopped_rank_of_a_job_that_was_well_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with calm(monkeypatch) as (job, session):
        job.freeze(VICTIM)
        verdict = told(session, LATE_S)
        job.thaw(VICTIM)
    assert verdict is not None and verdict.verdict_class is VerdictClass.STOPPED
    assert [culprit.rank for culprit in verdict.culprits] == [VICTIM]


def test_a_hang_of_a_job_that_was_well_is_named_in_the_same_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = tmp_path / "now"
    with calm(monkeypatch, "--fault", f"stall_gpu:rank={VICTIM},at=0,when={now}") as (_job, session):
        now.touch()
        verdict = told(session, 1.0 + HANG_FLOOR_S + LATE_S)
    assert verdict is not None and verdict.verdict_class in (VerdictClass.HARDWARE, VerdictClass.NOT_ENTERED), verdict
    assert [culprit.rank for culprit in verdict.culprits] == [VICTIM]
