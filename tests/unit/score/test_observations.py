"""What is kept of weighed jobs is what was weighed, names no machine, and is refused in another format."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from score.observations import FORMAT, Observed, read, write
from score.slowness import HEALTHY, Moment, moments_of

KEPT = Path(__file__).resolve().parent.parent.parent / "fixtures" / "slowness.xz"


@pytest.fixture(scope="module")
def jobs() -> list[Observed]:
    return read(KEPT)


def test_the_kept_jobs_are_slow_and_healthy_ones_of_several_seeds(jobs: list[Observed]) -> None:
    assert len({job.name for job in jobs}) == len(jobs) > 150
    healthy = [job for job in jobs if not job.verdicts]
    assert len(healthy) > 40 and all(not job.wanted and not any(one.shows for one in job.observations) for job in healthy)
    assert all(job.real for job in jobs)
    assert {"1001", "1405", "1406", "1503"} <= {
        job.name.removeprefix("drawn-").removeprefix("slow-").split("-")[0] for job in jobs
    }


def test_what_is_written_is_read_again(jobs: list[Observed], tmp_path: Path) -> None:
    some = [job for job in jobs if job.verdicts][:3]
    write(some, tmp_path / "some.xz")
    for before, after in zip(some, read(tmp_path / "some.xz"), strict=True):
        assert replace(before, observations=[]) == replace(after, observations=[])
        one, other = moments_of(before), moments_of(after)
        assert [_facts(moment) for moment in one] == [_facts(moment) for moment in other] and one
        assert all(np.array_equal(a.terms.values, b.terms.values) for a, b in zip(one, other, strict=True))


def _facts(moment: Moment) -> tuple[object, ...]:
    return moment.job, moment.start, moment.fitted, moment.ranks, moment.terms.members, moment.right.tolist(), moment.idle


def test_moments_before_the_fault_shows_and_pretended_ones_have_nobody_at_fault(jobs: list[Observed]) -> None:
    job = next(
        job for job in jobs if any(one.pretended for one in job.observations) and any(one.shows for one in job.observations)
    )
    found = moments_of(job)
    assert any(moment.right.any() for moment in found)
    pretended = [moment for moment in found if moment.job.endswith(HEALTHY)]
    assert pretended and not any(moment.right.any() or moment.start for moment in pretended)


def test_nothing_names_the_machine() -> None:
    packed = msgspec.msgpack.decode(lzma.decompress(KEPT.read_bytes()))
    assert {key for job in packed["jobs"] for key in job} == {"name", "real", "truth", "moments"}


def test_another_format_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.xz"
    other.write_bytes(lzma.compress(msgspec.msgpack.encode({"format": FORMAT + 1, "jobs": []})))
    with pytest.raises(ValueError, match="make it anew"):
        read(other)
