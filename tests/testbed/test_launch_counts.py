"""The shape of NVIDIA/nccl#1730: all ranks have launched the same operations, NCCL's RAS says all is well, the job is stuck."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.state import ProcessSample
from ncclwatch.simulate.wire import RecordSet
from ncclwatch.target.session import TargetProcess
from score.baselines import LaunchCounts
from testbed.job import Job
from testbed.test_diagnose_faults import wait_until_it_stands

pytestmark = pytest.mark.attach

VICTIM = 1


@pytest.mark.parametrize("version", ["2.27.5", "2.32.3"])
def test_launch_counts_agree_and_the_rank_is_named_all_the_same(version: str) -> None:
    """These releases count every call in ``seqNumber``, which RAS compares."""
    fault = ("--fault", f"stall_gpu:rank={VICTIM},at=20")
    with Job(version, 4, "allreduce", "socket", count=20_000, extra=fault, wait_for="nothing") as job, ExitStack() as stack:
        wait_until_it_stands(job, creation=False)
        targets = [stack.enter_context(TargetProcess.open(pid)) for pid in job.pids]
        series: list[list[ProcessSample]] = [[] for _ in targets]
        for _ in range(3):
            for samples, target in zip(series, targets, strict=True):
                samples.append(target.sample())
            time.sleep(0.5)
    counts = [sum(communicator.sequence_numbers.values()) for samples in series for communicator in samples[-1].communicators]
    assert len(counts) == 4 and len(set(counts)) == 1 and counts[0] > 0, counts
    assert LaunchCounts().diagnose(RecordSet(samples=series, calls={}, lost={}), 0.0) == []
    verdict = diagnose(series)
    told = f"{verdict.verdict_class}: {verdict.summary} {verdict.evidence}"
    assert [culprit.rank for culprit in verdict.culprits] == [VICTIM], told
    assert verdict.victims == (0, 2, 3), told
