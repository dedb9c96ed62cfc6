"""What ranks of a real job are doing: the stopped one stands out, beside a verdict and alone; the job goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclwatch.target.session import TargetProcess
from testbed.job import Job
from testbed.watcher import pids, run

pytestmark = pytest.mark.attach


def test_a_stopped_rank_stands_out_and_is_told_beside_the_verdict() -> None:
    with Job(nccl="2.27.5", ranks=4, count=1 << 14, extra=("--pause-us", "20000")) as job:
        healthy = json.loads(run("stacks", "--json", *pids(job)).stdout)
        assert {one["rank"] for one in healthy} == {0, 1, 2, 3}
        assert {doing for one in healthy for doing in one["doing"]} == {"unknown"}, "these ranks are no Python"
        job.freeze(2)
        found = json.loads(run("stacks", "--json", *pids(job)).stdout)
        assert [(one["rank"], one["doing"]) for one in found if "stopped" in one["doing"]] == [(2, ["stopped"])]
        verdict = json.loads(run("diagnose", "--json", *pids(job)).stdout)
        (culprit,) = verdict["culprits"]
        assert (culprit["rank"], culprit["doing"]) == (2, ["stopped"])
        assert any(line.startswith("rank 2 is stopped by a signal: main thread stopped") for line in verdict["evidence"])
        assert any(line.startswith("meanwhile rank 0 ") for line in verdict["evidence"])
        job.thaw(2)
        job.wait_progress(3)


@pytest.mark.parametrize("version", ["2.21.5", "2.27.5", "2.32.3"])
def test_what_the_proxy_thread_does_is_told_beside_the_verdict(version: str) -> None:
    """A proxy that stands still sleeps in the stand-in; NCCL names its threads, so that it shows which one was found."""
    extra = ("--fault", "stall_proxy:rank=2,at=20")
    env = {"NCCL_SET_THREAD_NAME": "1"}
    with Job(nccl=version, ranks=4, transport="socket", count=1 << 14, extra=extra, env=env, wait_for="nothing") as job:
        job.wait_line(2, "fault stall_proxy")
        with TargetProcess.open(job.pid(2)) as target:
            (own,) = target.sample().communicators
        comm = Path(f"/proc/{job.pid(2)}/task/{own.proxy_thread}/comm").read_text()
        assert comm.startswith("NCCL Progress"), comm
        verdict = json.loads(run("diagnose", "--json", *pids(job)).stdout)
    # Where the proxy fell asleep decides whether it is named, or its link with both ends.
    assert 2 in [culprit["rank"] for culprit in verdict["culprits"]], verdict
    (line,) = [line for line in verdict["evidence"] if line.startswith("rank 2 shows")]
    assert "; proxy thread sleeping in " in line, line
