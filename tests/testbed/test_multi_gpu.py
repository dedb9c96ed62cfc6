"""Processes that drive several GPUs each on real NCCL: every GPU is a rank of its own, and the one that is missing is named."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from testbed.multi_gpu import multi_gpu
from testbed.watcher import live, pids, run

pytestmark = pytest.mark.attach

PROCESSES, GPUS = 2, 2


@pytest.mark.parametrize(
    ("version", "way", "absent"), [("2.21.5", "threads", 1), ("2.27.5", "threads", 2), ("2.32.3", "group", 3)]
)
def test_the_gpu_that_does_not_take_part_is_named(tmp_path: Path, version: str, way: str, absent: int) -> None:
    with multi_gpu(tmp_path, version, way, processes=PROCESSES, gpus=GPUS, absent=absent, before=5) as job:
        job.wait_for(4, stuck=True)
        said = run("diagnose", "--json", *pids(job)).stdout
        verdict = json.loads(said)
        assert verdict["class"] == "not-entered", said
        assert [(c["rank"], c["pid"], c["gpu"]) for c in verdict["culprits"]] == [
            (absent, job.pids[absent // GPUS], absent % GPUS)
        ]
        assert verdict["victims"] == sorted(set(range(PROCESSES * GPUS)) - {absent})


def test_attach_shows_every_gpu_as_a_rank(tmp_path: Path) -> None:
    with multi_gpu(tmp_path, "2.27.5", "group", processes=PROCESSES, gpus=GPUS) as job:
        job.wait_for(3)
        with live(*pids(job)) as watcher:
            for rank in range(PROCESSES * GPUS):
                told = watcher.wait_for("rank", rank=rank, count=3)
                assert (told["pid"], told["gpu"]) == (job.pids[rank // GPUS], rank % GPUS)
                assert told["operations"] > 0
            job.children[1].send_signal(signal.SIGSTOP)
            try:
                verdict = watcher.wait_for("verdict")["verdict"]
            finally:
                job.children[1].send_signal(signal.SIGCONT)
            assert verdict["class"] == "stopped"
            assert {c["rank"] for c in verdict["culprits"]} == {2, 3}
            watcher.wait_for("recovery")
            assert watcher.end() == 0
