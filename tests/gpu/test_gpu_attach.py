"""On a machine with a GPU: real CUDA under real NCCL. Two ranks of PyTorch share it as if on two hosts; one is frozen and named.

Not run yet on any GPU: it stands here so that the first machine that has one needs no more than ``pytest tests/gpu``.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.target.session import TargetProcess

NO_GPU = not Path("/dev/nvidia0").exists()
NO_TORCH = importlib.util.find_spec("torch") is None

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NO_GPU, reason="GPU layer: no NVIDIA GPU on this machine (/dev/nvidia0)"),
    pytest.mark.skipif(not NO_GPU and NO_TORCH, reason="GPU layer: PyTorch with NCCL is not installed"),
]

JOB = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method="file://" + os.environ["MEETING"], rank=int(os.environ["RANK"]), world_size=2)
data = torch.ones(1 << 20, device="cuda")
while True:
    dist.all_reduce(data)
    torch.cuda.synchronize()
    print("step", flush=True)
"""


def test_a_frozen_rank_on_a_real_gpu_is_named(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            # Before 2.30 two ranks may share a GPU only as different hosts.
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "MEETING": str(tmp_path / "meeting"), "NCCL_HOSTID": f"host{rank}"}
            own |= {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
            child = subprocess.Popen([sys.executable, "-c", JOB], env=os.environ | own, stdout=subprocess.PIPE, text=True)
            stack.callback(child.wait)
            stack.callback(child.kill)
            ranks.append(child)
        for child in ranks:
            assert child.stdout is not None and child.stdout.readline() == "step\n"
        targets = [stack.enter_context(TargetProcess.open(child.pid)) for child in ranks]
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(3)
        first = [target.sample() for target in targets]
        time.sleep(1)
        verdict = diagnose([[before, target.sample()] for before, target in zip(first, targets, strict=True)])
        ranks[1].send_signal(signal.SIGCONT)
    assert verdict.verdict_class is VerdictClass.STOPPED, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [1]
