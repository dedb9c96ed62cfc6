"""Jobs by their communicators: the same for everybody, in whatever order the claims come."""

from __future__ import annotations

import random

import pytest

from ncclwatch.fleet import directory
from ncclwatch.fleet.directory import FORGET_NS, FUTURE_NS, REFRESH_NS, Claim, Directory
from ncclwatch.messaging.limits import FormatError

NOW = 1_700_000_000 * 10**9


def test_processes_with_a_communicator_in_common_are_one_job_and_others_are_not() -> None:
    jobs = Directory()
    jobs.join("default", [1, 10], NOW)
    jobs.join("default", [1, 11], NOW + 1)
    jobs.join("default", [2, 20], NOW + 2)
    assert jobs.job("default", 10) == jobs.job("default", 11) == f"{1:016x}"
    assert jobs.job("default", 20) == f"{2:016x}"
    assert sorted(jobs.jobs) == [f"{1:016x}", f"{2:016x}"]
    assert jobs.job("default", 99) is None


def test_jobs_that_turn_out_to_be_one_keep_the_older_name() -> None:
    jobs = Directory()
    jobs.join("default", [7], NOW)
    jobs.join("default", [8], NOW + 1)
    [claim] = jobs.join("default", [9, 8, 7], NOW + 2)
    assert claim.name == f"{7:016x}"
    assert jobs.renamed == [(f"{8:016x}", f"{7:016x}")]
    assert {jobs.job("default", h) for h in (7, 8, 9)} == {f"{7:016x}"}
    assert list(jobs.jobs) == [f"{7:016x}"]


def test_hashes_of_two_tokens_have_nothing_in_common() -> None:
    jobs = Directory()
    jobs.join("red", [5], NOW)
    jobs.join("blue", [5], NOW)
    assert jobs.job("red", 5) != jobs.job("blue", 5)


def test_everybody_comes_to_the_same_jobs() -> None:
    chance = random.Random(5)
    hashes = [h + 1 for h in range(60)]
    claims: list[Claim] = []
    workers = [Directory() for _ in range(4)]
    for step in range(120):
        group = chance.randrange(3)
        seen = [h for h in chance.sample(hashes, 3) if h % 3 == group]
        if seen:
            claims += chance.choice(workers).join("default", seen, NOW + step)
    for worker in workers:
        for claim in chance.sample(claims, len(claims)) + chance.choices(claims, k=40):
            worker.take(claim, NOW + 1000)
    # What a worker concludes from several claims is in nobody's claim alone, so names go round once more.
    named = [{h: worker.job("default", h) for h in hashes} for worker in workers]
    assert named[0] == named[1] == named[2] == named[3]
    assert len({name for name in named[0].values() if name}) >= 3


def test_what_is_seen_is_claimed_again_and_what_is_not_is_forgotten() -> None:
    jobs = Directory()
    assert jobs.join("default", [1, 2], NOW)
    assert jobs.join("default", [1, 2], NOW + 1) == []
    [again] = jobs.join("default", [1], NOW + REFRESH_NS + 1)
    assert again.hashes == [1]
    assert again.born_ns == NOW
    assert jobs.forget(NOW + FORGET_NS + 1) == []
    assert jobs.job("default", 2) is None
    assert jobs.job("default", 1) == f"{2:016x}" or jobs.job("default", 1) == f"{1:016x}"
    assert len(jobs.forget(NOW + REFRESH_NS + 2 * FORGET_NS)) == 1
    assert list(jobs.jobs) == []


def test_a_job_without_communicators_has_the_name_it_was_given() -> None:
    jobs = Directory()
    assert len(jobs.name("red", "red", NOW)) == 1
    assert jobs.name("red", "red", NOW + 1) == []
    assert list(jobs.jobs) == ["red"]


def test_claims_are_checked() -> None:
    claim = Claim("default", "j", NOW, [1, 2])
    assert directory.decode(directory.encode(claim)) == claim
    for bad in (b"", b"\x93", directory.encode(Claim("default", "a.b", NOW, [1])), directory.encode(Claim("t", "j", -1, []))):
        with pytest.raises(FormatError):
            directory.decode(bad)
    jobs = Directory()
    jobs.take(Claim("default", "future", NOW + 2 * FUTURE_NS, [1]), NOW)
    assert list(jobs.jobs) == []
