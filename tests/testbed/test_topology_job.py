"""The layout of a real training job, inferred from its calls alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from testbed.job import Job, available
from testbed.watcher import pids

NCCL = "2.27.5"

pytestmark = [pytest.mark.attach, pytest.mark.skipif(not available(NCCL), reason=f"NCCL {NCCL} is not in the cache")]


def said_by(*words: str) -> Any:
    command = [sys.executable, "-m", "ncclwatch", *words, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_groups_and_iteration_of_a_training_job() -> None:
    options = ["--tp", "2", "--pp", "2", "--micro-batches", "4", "--forward-us", "2000"]
    with Job(NCCL, 4, "training", count=4096, extra=options) as job:
        (said,) = said_by("topology", *pids(job))["jobs"]
    assert said["layout"] == {"tp": 2, "pp": 2, "dp": 1, "ep": 1, "cp": 1}
    groups = {role: sorted(g["ranks"] for g in said["groups"] if g["role"] == role) for role in ("tensor", "pipeline")}
    assert groups == {"tensor": [[0, 1], [2, 3]], "pipeline": [[0, 2], [1, 3]]}
    assert said["stages"] == [0, 0, 1, 1]
    assert {pattern["micro_batches"] for pattern in said["iteration"]["patterns"]} == {4}


def test_who_comes_to_a_job_that_hangs_is_told_layout_and_place() -> None:
    """No call is made any more: NCCL's counts in memory are all there is."""
    options = ["--tp", "2", "--pp", "2", "--micro-batches", "4", "--forward-us", "2000"]
    with Job(NCCL, 8, "training", count=4096, extra=options) as job:
        job.wait_progress(12)
        job.freeze(6)
        time.sleep(2)
        topology = said_by("topology", *pids(job), "--duration", "3")
        verdict = said_by("diagnose", *pids(job))
    (found,) = topology["jobs"]
    assert found["layout"] == {"tp": 2, "pp": 2, "dp": 2, "ep": 1, "cp": 1}
    assert found["stages"] == [0, 0, 0, 0, 1, 1, 1, 1]
    (culprit,) = verdict["culprits"]
    assert (verdict["class"], culprit["rank"]) == ("stopped", 6)
    assert verdict["stage"] == "pipeline stage 1, TP rank 0"
    assert culprit["communicator"]["role"] in {"tensor", "pipeline", "data", "model"}
