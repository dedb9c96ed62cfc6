"""Verdicts of slowness name ranks by what they are: equal pids on two hosts, several ranks of a process, processes that end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ncclwatch.engine.slow.classify import Judgement
from ncclwatch.engine.slow.detect import SlowDown
from ncclwatch.engine.slow.explain import TERM_WORDS, holds, unlocated, verdict
from ncclwatch.engine.slow.findings import Context, Finding
from ncclwatch.engine.slow.lateness import Lateness
from ncclwatch.engine.slow.profile import add_up
from ncclwatch.engine.slow.snapshot import LinkPlace
from ncclwatch.engine.slow.terms import TERMS
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.job import Job, assemble
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import SlowKind as Kind
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.synthetic import WORLD, Rank, communicator

HOSTS = ("red", "red", "blue", "blue")


def samples() -> list[list[ProcessSample]]:
    """Two hosts with the same pid, and on each a process that drives two GPUs."""
    ranks = len(HOSTS)
    return [
        [
            replace(s, process=replace(s.process, key=ProcessKey("boot-" + HOSTS[rank], 700, 5, "ab" * 20, part=rank % 2)))
            for s in Rank(rank, ranks, (communicator(rank, ranks),), host=HOSTS[rank]).looks()
        ]
        for rank in range(ranks)
    ]


def job_of(processes: list[list[ProcessSample]]) -> Job:
    (job,) = assemble(processes)
    return job


def judgement(job: Job, *findings: Finding) -> Judgement:
    size = len(job.members)
    context = Context(np.zeros(size, np.int64), np.zeros(size, np.int64), None)
    profile = add_up([], [member.info.key for member in job.members])
    return Judgement(list(findings), profile, context, None, 0.0, 1.0)


def test_equal_pids_of_two_hosts_and_ranks_of_one_process_are_told_apart() -> None:
    job = job_of(samples())
    slow = (Finding(Kind.COMPUTE, (1,), 0.4, 9, 0.0), Finding(Kind.PROXY, (2,), 0.3, 9, 0.0))
    said = verdict(job, judgement(job, *slow))
    assert [(c.rank, c.host, c.pid) for c in said.culprits] == [(1, "red", 700), (2, "blue", 700)]
    assert "rank 1 (computation" in said.summary and "rank 2 (proxy" in said.summary
    assert "rank 0" not in said.summary and "rank 3" not in said.summary
    assert [step.partition(":")[0] for step in said.next_steps] == ["on red", "on blue"]


def test_a_link_is_told_in_its_direction_whoever_was_named_before() -> None:
    job = job_of(samples())
    place = LinkPlace(WORLD, 3, 1, job.members[3].info.key, job.members[1].info.key)
    slow = (Finding(Kind.COMPUTE, (1,), 0.4, 9, 0.0), Finding(Kind.LINK, (3, 1), 0.3, 9, 0.0, link=place))
    assert "the link from rank 3 to rank 1" in verdict(job, judgement(job, *slow)).summary


def test_the_summary_says_why_in_a_word_where_something_shows_it() -> None:
    """The on-call reads one line: a CPU limit, pauses or a late beginning belong there."""
    job = job_of(samples())

    def summary(finding: Finding, late_times: int = 0, held_back: float = 0.0, slow: SlowDown | None = None) -> str:
        made = replace(judgement(job, finding), slow=slow)
        size = len(job.members)
        at = np.arange(size) == finding.members[0]
        made.profile.held_back = np.where(at, held_back, 0.0)
        late = Lateness(np.where(at, 0.4, 0.0), np.where(at, late_times, 0), 10, np.where(at, 0.5, 0.0))
        made.context = replace(made.context, late=late if late_times else None)
        return verdict(job, made).summary

    host, gpu = Finding(Kind.HOST, (1,), 0.4, 9, 0.0), Finding(Kind.COMPUTE, (1,), 0.4, 9, 0.0)
    assert "rank 1 (host: CPU throttling, costs" in summary(host, held_back=0.9)
    assert "rank 1 (host: pauses, costs" in summary(host, late_times=4)
    assert "rank 1 (host: begins iterations late, costs" in summary(host, late_times=9)
    assert "rank 1 (host: begins iterations late)" in summary(host, late_times=4, slow=SlowDown(0.0, 0.0, 1.0, 2.0, 4, 4)), (
        "of four iterations since it was late in each: those before do not count"
    )
    assert "rank 1 (host, costs" in summary(host)
    assert "rank 1 (computation, costs" in summary(gpu)


def test_what_was_judged_of_a_process_stays_with_it_when_others_end() -> None:
    everybody = samples()
    judged = judgement(job_of(everybody), Finding(Kind.COMPUTE, (2,), 0.4, 9, 0.0))
    later = job_of([everybody[0], everybody[3], everybody[2]])
    assert holds(later, judged)
    said = verdict(later, judged)
    assert [c.rank for c in said.culprits] == [2] and "rank 2" in said.summary
    assert any("rank 2" in line for line in said.evidence) and not any("rank 3" in line for line in said.evidence)
    assert not holds(job_of(everybody[:2]), judged), "who has ended holds nobody up"


def test_a_job_that_takes_twice_as_long_is_said_to_as_soon_as_that_has_repeated() -> None:
    job, running = job_of(samples()), Verdict(VerdictClass.RUNNING, "4 processes: NCCL makes progress")

    def said(ratio: float, iterations: int) -> str:
        return unlocated(job, running, SlowDown(0.0, 0.0, 1.0, 1.0 + ratio, iterations, iterations)).summary

    assert "iterations take 12.00 s instead of 1.00 s" in said(11.0, 3)
    assert said(0.5, 3) == running.summary and "who holds it up does not show" in said(0.5, 8)
    assert said(0.1, 8) == running.summary


def test_every_term_has_words() -> None:
    """The trail says what spoke for a culprit: a term without words would end the judgement."""
    assert set(TERM_WORDS) == set(TERMS)


def test_who_is_named_may_not_be_the_only_one() -> None:
    job = job_of(samples())

    def may_grow(kind: str, members: tuple[int, ...], chance: float) -> bool:
        found = Finding(Kind.COMPUTE, (1,), 0.4, 9, 0.8, rivals=(("nobody", (), 0.2), (kind, members, chance)))
        return judgement(job, found).may_grow

    assert may_grow("two-ranks", (1, 3), 0.15) and may_grow("host", (0, 1), 0.15)
    assert not may_grow("two-ranks", (1, 3), 0.02), "unlikely"
    assert not may_grow("two-ranks", (2, 3), 0.15) and not may_grow("rank", (2,), 0.15), "in place of it, not beside it"
