"""PyTorch on a real GPU: ranks of ``torch.distributed`` that share it as if each were on a host of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest

from gpu.gpujob import Ranks, watched
from testbed.watcher import pids, run

NO_GPU = not Path("/dev/nvidia0").exists()
NO_TORCH = importlib.util.find_spec("torch") is None

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NO_GPU, reason="GPU layer: no NVIDIA GPU on this machine (/dev/nvidia0)"),
    pytest.mark.skipif(not NO_GPU and NO_TORCH, reason="GPU layer: PyTorch with NCCL is not installed"),
]

TRAINING = """
import os, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank, world, slow, slow_at = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1], int(sys.argv[2])
torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=world)
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
model = DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
other = torch.randn(8192, 8192, device="cuda")
for step in range(1 << 30):
    time.sleep(0.02)
    if slow == "loader" and step >= slow_at:
        time.sleep(0.3)
    batch = torch.randn(64, 256, device="cuda")
    if slow == "gpu" and step >= slow_at:
        for _ in range(10):
            other @ other
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        torch.cuda.synchronize()
        print("step", step, "at", time.monotonic(), flush=True)
"""
"""DistributedDataParallel whose hosts run ahead of their GPUs. One rank's loader, or its GPU, becomes slow."""


class Training(Ranks):
    """A job of PyTorch. ``victim`` becomes slow as ``slow`` says."""

    def __init__(self, ranks: int = 2, *, victim: int = -1, slow: str = "no", slow_at: int = 0) -> None:
        super().__init__(ranks, "ncclwatch-torch-")
        self.victim, self.arguments = victim, [slow, str(slow_at)]

    def __enter__(self) -> Self:
        for rank in range(self.ranks):
            own = {"RANK": str(rank), "WORLD_SIZE": str(self.ranks), "MEETING": str(self.folder / "meeting")}
            # Before 2.30 ranks may share a GPU only as different hosts.
            own |= {"NCCL_HOSTID": f"host{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
            arguments: Sequence[str] = self.arguments if rank == self.victim else ("no", "0")
            self.start(rank, [sys.executable, "-c", TRAINING, *arguments], os.environ | own)
        return self

    def steps(self) -> int:
        """How far the last rank is."""
        last = ["".join(self.lines(rank)[-1:]) for rank in range(self.ranks)]
        return min(int(line.split()[1]) if line.startswith("step ") else 0 for line in last)

    def wait_steps(self, more: int, timeout: float = 120) -> None:
        """Until every rank has made so many more steps."""
        wanted, deadline = self.steps() + more, time.monotonic() + timeout
        while self.steps() < wanted:
            ended = [rank for rank, process in enumerate(self.processes) if process.poll() is not None]
            assert not ended and time.monotonic() < deadline, self.lines((ended or [0])[0])[-12:]
            time.sleep(0.1)


def test_a_frozen_rank_is_named_by_who_comes_afterwards() -> None:
    with Training() as job:
        job.wait_steps(20)
        job.processes[1].send_signal(signal.SIGSTOP)
        time.sleep(3)
        done = run("diagnose", "--json", *pids(job))
        job.processes[1].send_signal(signal.SIGCONT)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["class"] == "stopped", verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [1]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("slow", ["loader", "gpu"])
def test_a_rank_that_becomes_slow_is_named_live(slow: str, ranks: int) -> None:
    """Silence before. A GPU that computes longer is another case than a loader: there the host is as early as the others'."""
    with Training(ranks, victim=1, slow=slow, slow_at=400) as job:
        job.wait_steps(10)
        with watched(job, f"torch-{slow}-{ranks}") as watcher:
            while job.steps() < 380:
                assert not watcher.of("verdict"), watcher.of("verdict")
                job.wait_steps(10)
            begun = time.monotonic()
            verdict = watcher.wait_for("verdict", timeout=90)["verdict"]
            print(f"\n{slow}, {ranks} ranks: after {time.monotonic() - begun:.1f} s: {verdict['class']}: {verdict['summary']}")
            assert watcher.end() == 0
    assert verdict["class"] in ("slow-computation", "slow-mixed"), verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [1], verdict


def test_healthy_training_stays_silent() -> None:
    with Training(4) as job:
        job.wait_steps(10)
        with watched(job, "torch-healthy-4") as watcher:
            time.sleep(60)
            assert not watcher.of("verdict"), watcher.of("verdict")
            assert watcher.end() == 0
