"""Recordings of real jobs that were judged wrongly once, or are of a kind that is rare: judged as they must be, anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.model.verdict import Verdict
from ncclwatch.store.replay import Recordings

JOBS = sorted((Path(__file__).resolve().parent.parent / "fixtures" / "jobs").glob("*.ncclwatch"))


def accusing(path: Path) -> list[Verdict]:
    """What was said at each look, as far as it accuses."""
    session, found = DiagnosisSession(), []
    with Recordings([path]) as recordings:
        for _, _, batch in recordings.batches():
            session.feed(batch)
            if batch.looked:
                found += [v for v in session.judge(batch.time_ns).verdicts if v.verdict_class.accuses]
    return found


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_kept_job_is_judged_as_it_must_be(path: Path) -> None:
    kept = json.loads(path.with_suffix(".json").read_text("utf-8"))
    said = accusing(path)
    if not kept["verdicts"]:
        assert [verdict.summary for verdict in said] == [], kept["about"]
        return
    assert said, kept["about"]
    named = {culprit.rank for culprit in said[-1].culprits}
    assert said[-1].verdict_class.value in kept["verdicts"], said[-1].summary
    assert set(kept["ranks"]) <= named <= {*kept["ranks"], *kept["also"]}, said[-1].summary


def test_there_are_jobs_of_every_release_and_of_both_kinds() -> None:
    known = [json.loads(path.with_suffix(".json").read_text("utf-8")) for path in JOBS]
    assert {"2.21.5", "2.27.5", "2.32.3"} <= {kept["nccl"] for kept in known}
    assert {"shm", "socket"} <= {kept["transport"] for kept in known}
    assert {"live", "post-hang"} <= {kept["attach"] for kept in known}
    assert sum(path.stat().st_size for path in JOBS) < 3 << 20
