"""What is said in words of kept recordings of real jobs; whether it is right, tests/unit/score/test_archive.py judges."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.model.verdict import Verdict
from ncclwatch.store.replay import Recordings

JOBS = sorted((Path(__file__).resolve().parent.parent.parent / "fixtures" / "jobs").glob("*.ncclwatch"))


def accusing(path: Path) -> list[Verdict]:
    """What was said at each look, as far as it accuses."""
    session, found = DiagnosisSession(), []
    with Recordings([path]) as recordings:
        for _, _, batch in recordings.batches():
            session.feed(batch)
            if batch.looked:
                found += [v for v in session.judge(batch.time_ns).verdicts if v.verdict_class.accuses]
    return found


PLACES = {
    "h1-skip-gradients-2.32.3-shm-post-hang-0": "pipeline stage 0, TP rank 1",
    "drawn-802-72-skip-2.27.5-socket-post-hang-0": "pipeline stage 1, TP rank 2",
    "drawn-802-69-gpu-stall-2.21.5-socket-post-hang-0": (
        "pipeline stage 0, TP rank 0: ReduceScatter of the data-parallel group (gradients)"
    ),
    "drawn-801-64-gpu-stall-2.21.5-shm-post-hang-0": "",  # groups of one kind alone: nothing tells tensor from data
}


@pytest.mark.parametrize("name", PLACES)
def test_who_comes_afterwards_is_told_the_place_in_the_layout(name: str) -> None:
    (path,) = (job for job in JOBS if job.stem == name)
    assert accusing(path)[-1].stage == PLACES[name]


def test_many_ranks_are_named_as_a_range() -> None:
    (path,) = (job for job in JOBS if job.stem == "drawn-801-63-slow-link-2.21.5-shm-live-0")
    verdict = accusing(path)[-1]
    assert "ranks 0-7 (network interface)" in verdict.summary
    assert not any("of its communicator" in line for line in verdict.evidence)


def test_a_late_loader_is_not_said_to_be_seen_in_more_looks_than_there_were() -> None:
    (path,) = (job for job in JOBS if job.stem == "drawn-801-28-slow-loader-2.32.3-shm-live-0")
    verdict = accusing(path)[-1]
    assert not any(" of 24 looks" in line for line in verdict.evidence)
    assert "others wait in an operation of 8 ranks" in verdict.stage
