"""The trail of a verdict: what rules took back, what was weighed and lost, what stands."""

from __future__ import annotations

from pathlib import Path

from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.model.verdict import Step, StepKind, Verdict
from ncclwatch.store.replay import Recordings

JOBS = Path(__file__).resolve().parents[2] / "fixtures" / "jobs"


def last(name: str) -> Verdict:
    """The last verdict on a kept job."""
    session, found = DiagnosisSession(), []
    with Recordings([JOBS / f"{name}.ncclwatch"]) as recordings:
        for _, _, batch in recordings.batches():
            session.feed(batch)
            found += session.judge(batch.time_ns).verdicts if batch.looked else []
    return found[-1]


def of(verdict: Verdict, kind: StepKind) -> list[Step]:
    return [step for step in verdict.trail if step.kind is kind]


def test_what_was_retracted_and_what_lost_is_told_with_the_rule() -> None:
    verdict = last("drawn-802-72-skip-2.27.5-socket-post-hang-0")
    assert {step.rule for step in of(verdict, StepKind.RETRACTED)} == {"not-begun"}
    assert all("waits for" in step.text for step in of(verdict, StepKind.RETRACTED)[:1])
    lost = [step for step in of(verdict, StepKind.LOST) if step.rule == "unseen"]
    assert lost and lost[0].against == "cycle" and lost[0].text.startswith("unknown: nobody is named (")
    assert verdict.rules == ("not-begun", "cycle")
    assert verdict.trail[-1].rule == "cycle" and verdict.trail[-1].kind is StepKind.STANDS


def test_a_long_trail_is_cut_and_says_so() -> None:
    verdict = last("drawn-801-51-gpu-stall-2.27.5-socket-post-hang-0")
    assert len(verdict.trail) < 64
    assert any(step.text.startswith("… ") for step in verdict.trail)
