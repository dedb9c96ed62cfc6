"""What ranks of a real job are doing: the stopped one stands out, beside a verdict and alone; the job goes on."""

from __future__ import annotations

import json

import pytest

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
