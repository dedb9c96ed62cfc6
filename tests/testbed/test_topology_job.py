"""The layout of a real training job, inferred from its calls alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from testbed.job import Job, available

NCCL = "2.27.5"

pytestmark = [pytest.mark.attach, pytest.mark.skipif(not available(NCCL), reason=f"NCCL {NCCL} is not in the cache")]


def test_groups_and_iteration_of_a_training_job() -> None:
    options = ["--tp", "2", "--pp", "2", "--micro-batches", "4", "--forward-us", "2000"]
    with Job(NCCL, 4, "training", count=4096, extra=options) as job:
        pids = ",".join(str(pid) for pid in job.pids)
        command = [sys.executable, "-m", "ncclwatch", "topology", "--pid", pids, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    (said,) = json.loads(done.stdout)["jobs"]
    assert said["layout"] == {"tp": 2, "pp": 2, "dp": 1, "ep": 1, "cp": 1}
    groups = {role: sorted(g["ranks"] for g in said["groups"] if g["role"] == role) for role in ("tensor", "pipeline")}
    assert groups == {"tensor": [[0, 1], [2, 3]], "pipeline": [[0, 2], [1, 3]]}
    assert said["stages"] == [0, 0, 1, 1]
    assert {pattern["micro_batches"] for pattern in said["iteration"]["patterns"]} == {4}
