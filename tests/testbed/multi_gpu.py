"""Processes that drive several GPUs each, on real NCCL: every GPU is a rank of its own (``multigpu/main.cc``)."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.job import build, build_folder


class MultiGpuJob:
    """``processes`` processes with ``gpus`` GPUs each, one host a process; rank ``absent`` leaves after ``before`` iterations.

    ``way`` is "threads", a thread for each GPU, or "group", one thread for all. Logs are in ``folder``.
    """

    def __init__(
        self, folder: Path, version: str, way: str, *, processes: int, gpus: int, absent: int = -1, before: int = 0
    ) -> None:
        build(version)
        self.folder, self.processes, self.gpus = folder, processes, gpus
        program = build_folder() / version / "multigpu-testjob"
        self.children = []
        for process in range(processes):
            with self.log(process).open("w") as log:
                arguments = [process, processes, gpus, folder, way, absent, before]
                self.children.append(
                    subprocess.Popen([program, *map(str, arguments)], stdout=log, stderr=log, env=self._environment(process))
                )

    def _environment(self, process: int) -> dict[str, str]:
        return os.environ | {
            "NCCL_HOSTID": f"multigpu-{process}-{os.getpid()}",
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_ALGO": "Ring",
            "NCCL_PROTO": "Simple",
            "TESTBED_DEVICES": str(self.gpus),
            "TESTBED_BUS": str(process * self.gpus),
            # As a launcher that starts one process a host sets it: it counts processes.
            "RANK": str(process),
            "WORLD_SIZE": str(self.processes),
        }

    def log(self, process: int) -> Path:
        """File that gets a process's output."""
        return self.folder / f"log.{process}"

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [child.pid for child in self.children]

    def _lines(self, process: int) -> list[tuple[int, int, float]]:
        """Every line of a process: rank, iteration, time."""
        found = re.findall(r"^rank (\d+) iteration (\d+) at (\d+\.\d+)$", self.log(process).read_text(), re.MULTILINE)
        return [(int(rank), int(iteration), float(at)) for rank, iteration, at in found]

    def ends(self, process: int) -> list[float]:
        """When the first GPU of a process finished each of its iterations (s, CLOCK_MONOTONIC)."""
        return [at for rank, _, at in self._lines(process) if rank == process * self.gpus]

    def wait_for(self, iteration: int, *, stuck: bool = False) -> None:
        """Until every process has finished an iteration; with ``stuck`` until it is also the last for a while."""
        deadline = time.monotonic() + 60
        before: list[int] = []
        while True:
            now = [(self._lines(process) or [(0, -1, 0.0)])[-1][1] for process in range(self.processes)]
            if min(now) >= iteration and (not stuck or now == before):
                return
            assert time.monotonic() < deadline, [self.log(p).read_text()[-500:] for p in range(self.processes)]
            before = now
            time.sleep(0.5)


@contextmanager
def multi_gpu(
    folder: Path, version: str, way: str, *, processes: int, gpus: int, absent: int = -1, before: int = 0
) -> Iterator[MultiGpuJob]:
    """Such a job for the length of a block."""
    job = MultiGpuJob(folder, version, way, processes=processes, gpus=gpus, absent=absent, before=before)
    try:
        yield job
    finally:
        for child in job.children:
            child.kill()
            child.wait()
