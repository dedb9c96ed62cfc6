"""Processes that drive several GPUs each on real NCCL: every GPU is a rank of its own, and the one that is missing is named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testbed.job import build, build_folder
from testbed.watcher import live, run

pytestmark = pytest.mark.attach

PROCESSES, GPUS = 2, 2


class MultiGpuJob:
    """``PROCESSES`` processes with ``GPUS`` GPUs each, one host a process; rank ``absent`` leaves after ``before`` iterations."""

    def __init__(self, folder: Path, version: str, way: str, absent: int, before: int) -> None:
        build(version)
        self.folder = folder
        program = build_folder() / version / "multigpu-testjob"
        self.children = []
        for process in range(PROCESSES):
            with self.log(process).open("w") as log:
                arguments = [process, PROCESSES, GPUS, folder, way, absent, before]
                self.children.append(
                    subprocess.Popen([program, *map(str, arguments)], stdout=log, stderr=log, env=self._environment(process))
                )

    @staticmethod
    def _environment(process: int) -> dict[str, str]:
        return os.environ | {
            "NCCL_HOSTID": f"multigpu-{process}-{os.getpid()}",
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_ALGO": "Ring",
            "NCCL_PROTO": "Simple",
            "TESTBED_DEVICES": str(GPUS),
            "TESTBED_BUS": str(process * GPUS),
            # As a launcher that starts one process a host sets it: it counts processes.
            "RANK": str(process),
            "WORLD_SIZE": str(PROCESSES),
        }

    def log(self, process: int) -> Path:
        return self.folder / f"log.{process}"

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self.children]

    def _iteration(self, process: int) -> int:
        return int((re.findall(r"iteration (\d+)$", self.log(process).read_text(), re.MULTILINE) or ["-1"])[-1])

    def wait_for(self, iteration: int, *, stuck: bool = False) -> None:
        """Until every process has finished an iteration; with ``stuck`` until it is also the last for a while."""
        deadline = time.monotonic() + 60
        before: list[int] = []
        while True:
            now = [self._iteration(process) for process in range(PROCESSES)]
            if min(now) >= iteration and (not stuck or now == before):
                return
            assert time.monotonic() < deadline, [self.log(p).read_text()[-500:] for p in range(PROCESSES)]
            before = now
            time.sleep(0.5)


@contextmanager
def multi_gpu(folder: Path, version: str, way: str, *, absent: int = -1, before: int = 0) -> Iterator[MultiGpuJob]:
    job = MultiGpuJob(folder, version, way, absent, before)
    try:
        yield job
    finally:
        for child in job.children:
            child.kill()
            child.wait()


@pytest.mark.parametrize(
    ("version", "way", "absent"), [("2.21.5", "threads", 1), ("2.27.5", "threads", 2), ("2.32.3", "group", 3)]
)
def test_the_gpu_that_does_not_take_part_is_named(tmp_path: Path, version: str, way: str, absent: int) -> None:
    with multi_gpu(tmp_path, version, way, absent=absent, before=5) as job:
        job.wait_for(4, stuck=True)
        said = run("diagnose", "--json", "--pid", ",".join(map(str, job.pids))).stdout
        verdict = json.loads(said)
        assert verdict["class"] == "not-entered", said
        assert [(c["rank"], c["pid"], c["gpu"]) for c in verdict["culprits"]] == [
            (absent, job.pids[absent // GPUS], absent % GPUS)
        ]
        assert verdict["victims"] == sorted(set(range(PROCESSES * GPUS)) - {absent})


def test_attach_shows_every_gpu_as_a_rank(tmp_path: Path) -> None:
    with multi_gpu(tmp_path, "2.27.5", "group") as job:
        job.wait_for(3)
        with live("--pid", ",".join(map(str, job.pids))) as watcher:
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
