"""Dumps that PyTorch wrote over gloo (tests/fixtures/flight-recorder): what happened to which rank is found in them."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from ncclwatch.cli.foreign import judge_found
from ncclwatch.ingest.folders import find
from ncclwatch.model.verdict import Verdict, VerdictClass

FIXTURES = Path(__file__).parents[2] / "fixtures" / "flight-recorder"
RELEASES = sorted({file.name.partition("-")[0] for file in FIXTURES.glob("*.tar.xz")})


def judged(folder: Path, release: str, case: str, form: str) -> Verdict:
    """The verdict on one form of the dumps; their times are those of the archive."""
    with tarfile.open(FIXTURES / f"{release}-{case}.tar.xz") as archive:
        for member in archive.getmembers():
            source = archive.extractfile(member)
            if source is not None and member.name.endswith(".json") == (form == "json"):
                file = folder / Path(member.name).name
                file.write_bytes(source.read())
                os.utime(file, (member.mtime, member.mtime))
    [job], problems = judge_found(find([folder]))
    assert not problems
    return job.verdicts[0]


def test_there_are_dumps() -> None:
    assert RELEASES


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("case", "found"),
    [("skipped", VerdictClass.NOT_ENTERED), ("size", VerdictClass.INCONSISTENT), ("late", VerdictClass.NOT_ENTERED)],
)
def test_class_and_rank_are_found(tmp_path: Path, release: str, case: str, found: VerdictClass, form: str) -> None:
    verdict = judged(tmp_path, release, case, form)
    assert verdict.verdict_class is found
    assert [culprit.rank for culprit in verdict.culprits] == [2]
    assert verdict.operation is not None
    assert verdict.operation.sequence == 13
    if form == "pickle":
        assert any("train.py" in line and line.startswith("rank 2") for line in verdict.evidence)


@pytest.mark.parametrize("release", RELEASES)
def test_a_frozen_rank_is_told_by_the_dump_that_it_did_not_write(tmp_path: Path, release: str) -> None:
    """A dump of its peers cannot tell frozen from dead: the class stays open."""
    verdict = judged(tmp_path, release, "frozen", "pickle")
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert [(culprit.rank, culprit.observed) for culprit in verdict.culprits] == [(2, False)]
    assert "rank 2, of which there is no dump" in verdict.summary


@pytest.mark.parametrize("release", RELEASES)
def test_nobody_is_accused_of_a_job_that_ended_well(tmp_path: Path, release: str) -> None:
    verdict = judged(tmp_path, release, "healthy", "pickle")
    assert not verdict.verdict_class.accuses
    assert not verdict.culprits
