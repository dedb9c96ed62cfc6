"""Real faults in real NCCL jobs, judged afterwards from outside: the right class and nobody but the right rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import pytest

from ncclwatch.collect.watched import as_gone
from ncclwatch.engine.case import Known
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.errors import TargetError, TargetGoneError
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.target.session import TargetProcess
from testbed.job import Job

pytestmark = pytest.mark.attach

VERSIONS = ("2.21.5", "2.27.5", "2.32.3")
VICTIM = 2


@dataclass(frozen=True)
class Case:
    """A fault of rank 2 and what must be said of it; ``also`` classes are no mistake either."""

    fault: str
    shape: str
    transport: Literal["socket", "shm", "mixed"]
    expected: tuple[VerdictClass, ...]
    hosts: tuple[int, ...] | None = None


CASES = {
    "stuck-socket": Case("stuck", "allreduce", "socket", (VerdictClass.NOT_ENTERED,)),
    "stuck-shm": Case("stuck", "allreduce", "shm", (VerdictClass.NOT_ENTERED,)),
    "stuck-hosts-3-1": Case("stuck", "allreduce", "mixed", (VerdictClass.NOT_ENTERED,), hosts=(3, 1)),
    # Without the device plane a GPU that has not begun and one that never will look the same.
    "stalled-gpu": Case("stall_gpu", "allreduce", "socket", (VerdictClass.NOT_ENTERED, VerdictClass.HARDWARE)),
    "stalled-proxy": Case("stall_proxy", "allreduce", "socket", (VerdictClass.HARDWARE,)),
    "swapped": Case("swap", "ordered", "socket", (VerdictClass.DEADLOCK,)),
    "never-comes": Case("no_init", "allreduce", "socket", (VerdictClass.INIT_HANG,)),
}


def wait_until_it_stands(job: Job, *, creation: bool, timeout_s: float = 60.0) -> None:
    """Until no rank has finished an iteration for a while, reckoned from its first: emulated, it takes a minute."""
    if not creation:
        job.wait_line(VICTIM, "iteration", 300)
    end, standing_since, last = time.monotonic() + timeout_s, time.monotonic(), [-1]
    while time.monotonic() < end:
        now = [job.progress(rank) for rank in range(4)]
        if now != last:
            last, standing_since = now, time.monotonic()
        if time.monotonic() - standing_since > (4.0 if creation else 2.0) and (creation or max(now) > 0):
            return
        time.sleep(0.1)
    raise AssertionError(f"the job did not come to stand: {last}")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rank_that_was_killed_before_anybody_looked_is_named_or_nobody_is(version: str) -> None:
    """Proxies drop broken transfers silently; mostly one is left that shows it, and where none is, nobody is accused."""
    with Job(version, 4, "allreduce", "socket", count=20_000, extra=("--fault", f"crash:rank={VICTIM},at=20,signal=9"),
             wait_for="nothing") as job:  # fmt: skip
        wait_until_it_stands(job, creation=False)
        verdict = judge(job.pids)
    told = f"{verdict.verdict_class}: {verdict.summary} {verdict.evidence}"
    if verdict.verdict_class is VerdictClass.DEAD:
        assert [culprit.rank for culprit in verdict.culprits] == [VICTIM], told
    else:
        assert verdict.verdict_class is VerdictClass.UNKNOWN and not verdict.culprits, told
        assert f"rank {VICTIM}" in verdict.summary, told


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rank_that_is_killed_under_our_eyes_is_named(version: str) -> None:
    found = next(filter(None, (_killed_under_our_eyes(version) for _ in range(5))), None)
    assert found is not None, "in five jobs a survivor exited as well"
    told = f"{found.verdict_class}: {found.summary} {found.evidence}"
    assert found.verdict_class is VerdictClass.DEAD, told
    assert [culprit.rank for culprit in found.culprits] == [VICTIM], told
    assert found.victims == (0, 1, 3), told


def _killed_under_our_eyes(version: str) -> Verdict | None:
    """What is said of it; ``None`` where NCCL noticed, so that a survivor's next call failed and it exited: another case."""
    with Job(version, 4, "allreduce", "socket", count=20_000) as job, ExitStack() as stack:
        targets = [stack.enter_context(TargetProcess.open(pid)) for pid in job.pids]
        last = [target.sample() for target in targets]
        job.kill(VICTIM)
        time.sleep(2.0)
        ended = as_gone(last[VICTIM])
        try:
            series = [[ended, as_gone(ended)] if rank == VICTIM else [target.sample()] for rank, target in enumerate(targets)]
            time.sleep(0.5)
            for rank, target in enumerate(targets):
                if rank != VICTIM:
                    series[rank].append(target.sample())
        except TargetGoneError:
            return None
        return diagnose(series)


def judge(pids: Sequence[int]) -> Verdict:
    """Three looks at every process that is still there."""
    with ExitStack() as stack:
        targets = []
        for pid in pids:
            try:
                targets.append(stack.enter_context(TargetProcess.open(pid)))
            except TargetError:
                continue
        series: list[list[ProcessSample]] = [[] for _ in targets]
        for _ in range(3):
            for samples, target in zip(series, targets, strict=True):
                samples.append(target.sample())
            time.sleep(0.5)
    return diagnose(series, Known(creation_patience_s=0.5))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_rank_with_the_fault_is_named_and_nobody_else(version: str, name: str) -> None:
    case = CASES[name]
    kind, _, more = case.fault.partition(":")
    fault = ",".join(part for part in (f"{kind}:rank={VICTIM}", "" if kind == "no_init" else "at=20", more) if part)
    with Job(
        version, 4, case.shape, case.transport, hosts=case.hosts, count=20_000, extra=("--fault", fault), wait_for="nothing"
    ) as job:
        wait_until_it_stands(job, creation=kind == "no_init")
        verdict = judge(job.pids)
    told = f"{verdict.verdict_class}: {verdict.summary} {verdict.evidence}"
    assert verdict.verdict_class in case.expected, told
    named = [culprit.rank for culprit in verdict.culprits]
    if verdict.link is not None:
        # A proxy that stops in the middle of one send shows no more than its link; the other end cannot be ruled out then.
        assert name == "stalled-proxy" and VICTIM in named and len(named) == 2, told
        assert VICTIM in (verdict.link.source, verdict.link.destination), told
        return
    assert named == [VICTIM], told
    assert VICTIM not in verdict.victims, told
    assert verdict.victims, told
