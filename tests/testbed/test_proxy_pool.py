"""A pool of proxy operations that is full, for real: a proxy that stands still while launches run ahead of it."""

from __future__ import annotations

import json

import pytest

from ncclwatch.target.session import TargetProcess
from testbed.job import VERSIONS, Job
from testbed.netns import wait_until
from testbed.watcher import pids, run

pytestmark = pytest.mark.attach
VICTIM = 1


@pytest.mark.parametrize("version", VERSIONS)
def test_a_full_pool_is_seen_in_memory_and_told_with_the_verdict(version: str) -> None:
    # A proxy falls asleep where it has nothing to do. While the GPUs compute the first launch has it wait; the others come then.
    ahead = ("--burst", "4000", "--burst-after-us", "2000000", "--compute-us", "4000000")
    asleep = ("--fault", f"stall_proxy:rank={VICTIM},at=0")
    with Job(nccl=version, ranks=2, count=64, extra=ahead + asleep, wait_for="ready") as job:
        target = TargetProcess.open(job.pid(VICTIM))
        wait_until("a full pool", lambda: [one.proxy_pool_full for one in target.sample().communicators] == [True], 120)
        other = TargetProcess.open(job.pid(1 - VICTIM))
        assert [one.proxy_pool_full for one in other.sample().communicators] == [False]
        assert "no free proxy slot" in run("dump", "--pid", str(job.pid(VICTIM))).stdout
        verdict = json.loads(run("diagnose", "--json", *pids(job)).stdout)
        # Its peer may be named for the same link.
        assert VICTIM in [one["rank"] for one in verdict["culprits"]], verdict
        assert verdict["knowledge"][0]["row"] == "proxy-pool-full", verdict["knowledge"]
        full = [line for line in verdict["evidence"] if "no slot is left in the pool of proxy operations" in line]
        assert len(full) == 1 and full[0].startswith(f"rank {VICTIM}, "), verdict


def test_a_job_that_runs_has_slots() -> None:
    with Job(ranks=2, count=64) as job:
        for pid in job.pids:
            target = TargetProcess.open(pid)
            for _ in range(5):
                job.wait_progress(2)
                assert [one.proxy_pool_full for one in target.sample().communicators] == [False]
