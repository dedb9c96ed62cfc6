"""PyTorch's backend ``nccl2`` (what ``nccl`` means from 2.15 on), PLAYED: its launch lines and what it asks of NCCL, by real NCCL
on the testbed (``program/shapes_torch.cc``). PyTorch itself has the backend only in builds for GPUs.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ncclwatch.target.session import TargetProcess
from testbed.job import Job
from testbed.watcher import pids, run

pytestmark = pytest.mark.attach

BACKEND = {"TORCH_DIST_USE_NCCL2": "1"}
TORCHRUN = BACKEND | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
HIDDEN = "r=$RANK n=$WORLD_SIZE; unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE"
SPAWN = ("sh", "-c", f'{HIDDEN}; exec "$@" --rank $r --ranks $n', "sh")
"""``torch.multiprocessing.spawn``: rank and size are arguments of a function, and in no environment."""
VERSION = "2.32.3"
VICTIM = 2


def diagnosed(job: Job) -> dict[str, Any]:
    """What the command says of the job, as JSON."""
    said: dict[str, Any] = json.loads(run("diagnose", "--json", *pids(job)).stdout)
    return said


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_ranks_are_shown_and_the_frozen_one_is_named(launcher: str) -> None:
    env, wrap = (TORCHRUN, ()) if launcher == "torchrun" else (BACKEND, SPAWN)
    with Job(VERSION, 4, "nccl2", hosts=(4,), count=1000, env=env, wrap=wrap, extra=("--verify", "--pause-us", "2000")) as job:
        listed = {process["pid"]: process for process in json.loads(run("ps", "--json").stdout)}
        for rank, pid in enumerate(job.pids):
            told = (listed[pid]["rank"], listed[pid]["world_size"], listed[pid]["version"])
            assert told == ((rank, 4) if launcher == "torchrun" else (None, None)) + ([2, 32, 3],)
        if launcher == "torchrun":
            said = diagnosed(job)
            assert (said["class"], said["culprits"]) in (("running", []), ("idle", [])), said
        job.freeze(VICTIM)
        said = diagnosed(job)
        assert said["class"] == "stopped", said
        assert [(culprit["rank"], culprit["pid"]) for culprit in said["culprits"]] == [(VICTIM, job.pid(VICTIM))], said
        job.thaw(VICTIM)
        job.wait_progress(2)
        assert not any(line.startswith("wrong") for rank in range(4) for line in job.lines(rank)), job.logs()


def test_communicators_have_their_names_and_no_name_that_is_gone() -> None:
    """NCCL keeps the program's pointer; the backend frees the name of a split when it returns."""
    with Job(VERSION, 4, "nccl2", hosts=(4,), count=1000, iterations=2, hold=True, env=TORCHRUN, wait_for="nothing") as job:
        for rank in range(4):
            job.wait_line(rank, "holding")
        with TargetProcess.open(job.pid(VICTIM)) as target:
            found = sorted((own.nranks, own.rank, own.name) for own in target.sample().communicators)
    assert found == [(2, 0, ""), (2, 0, "pair1"), (4, 2, "0")]
