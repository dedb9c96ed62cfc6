"""Diagnosis of real NCCL jobs that were never traced: the frozen rank is named, and healthy jobs of every shape accuse nobody."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.target.session import TargetProcess
from testbed.job import Job

pytestmark = pytest.mark.attach

VERSIONS = ("2.21.5", "2.27.5", "2.32.3")
ROUNDS = 20
SAMPLES = 100
APART = 10
"""Samples, a tenth of a second each, between the two looks that are compared."""


@contextmanager
def opened(job: Job) -> Iterator[list[TargetProcess]]:
    """Sessions on all ranks of a job."""
    with ExitStack() as stack:
        targets = []
        for pid in job.pids:
            target = TargetProcess.open(pid)
            stack.callback(target.close)
            targets.append(target)
        yield targets


def look(targets: Sequence[TargetProcess], apart_s: float) -> list[list[ProcessSample]]:
    """Two samples of every process."""
    first = [target.sample() for target in targets]
    time.sleep(apart_s)
    return [[before, target.sample()] for before, target in zip(first, targets, strict=True)]


def judge_the_hang(targets: Sequence[TargetProcess]) -> Verdict:
    """What the command does: look again while the job still moves, or while the others have not yet come to wait."""
    for _ in range(20):
        verdict = diagnose(look(targets, 0.3))
        if verdict.verdict_class.accuses and verdict.victims:
            break
    return verdict


def judge_frozen(job: Job, victim: int) -> Verdict:
    """Freeze a rank, judge, thaw it. Attached only in between: nothing was known of the job before it hung."""
    job.freeze(victim)
    try:
        with opened(job) as targets:
            return judge_the_hang(targets)
    finally:
        job.thaw(victim)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_frozen_rank_is_named_in_every_round_of_freeze_and_thaw(version: str) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    with Job(nccl=version, ranks=4, shape="allreduce", count=1 << 16) as job:
        for number in range(ROUNDS):
            victim = number % 4 if number < 8 else chance.randrange(4)
            time.sleep(chance.uniform(0.0, 0.3))
            verdict = judge_frozen(job, victim)
            told = f"seed {seed}, round {number}, rank {victim}: {verdict.summary} {verdict.evidence}"
            assert verdict.verdict_class is VerdictClass.STOPPED, told
            assert [culprit.rank for culprit in verdict.culprits] == [victim], told
            assert verdict.culprits[0].pid == job.pid(victim), told
            assert set(verdict.victims) == set(range(4)) - {victim}, told


SHAPES = {
    "socket": {"shape": "allreduce", "transport": "socket"},
    "shared-memory": {"shape": "allreduce", "transport": "shm"},
    "hosts-3-1": {"shape": "allreduce", "transport": "mixed", "hosts": (3, 1)},
    "pipeline": {"shape": "pipeline", "transport": "socket"},
    "split": {"shape": "split", "transport": "socket"},
    "grouped": {"shape": "grouped", "transport": "socket"},
}


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "socket"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_frozen_rank_is_named_in_every_shape(version: str, shape: str) -> None:
    with Job(nccl=version, ranks=4, count=1 << 14, **SHAPES[shape]) as job:  # type: ignore[arg-type]
        for victim in range(4):
            verdict = judge_frozen(job, victim)
            told = f"rank {victim}: {verdict.summary} {verdict.evidence}"
            assert verdict.verdict_class is VerdictClass.STOPPED, told
            assert [culprit.rank for culprit in verdict.culprits] == [victim], told
            assert verdict.victims, told
            assert victim not in verdict.victims, told


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("version", VERSIONS)
def test_healthy_jobs_of_every_shape_accuse_nobody(version: str, shape: str) -> None:
    rounds = SAMPLES if shape == "socket" else SAMPLES // 5
    with Job(nccl=version, ranks=4, count=1 << 14, **SHAPES[shape]) as job, opened(job) as targets:  # type: ignore[arg-type]
        # Looks a second apart, as a diagnosis wants them: a thread that got no processor for a tenth of one is no hang.
        earlier: deque[list[ProcessSample]] = deque(maxlen=APART)
        seen_running = 0
        for number in range(rounds + APART):
            time.sleep(0.1)
            current = [target.sample() for target in targets]
            if number < APART:
                earlier.append(current)
                continue
            verdict = diagnose([[before, after] for before, after in zip(earlier[0], current, strict=True)])
            assert not verdict.verdict_class.accuses, f"{number}: {verdict.summary} {verdict.evidence}"
            assert verdict.culprits == ()
            seen_running += verdict.verdict_class is VerdictClass.RUNNING
            earlier.append(current)
        assert seen_running > rounds // 2, "progress must be seen for silence to mean anything"
