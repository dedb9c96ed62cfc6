"""GPU health through the real bindings and a made-up driver (``standin/gpus.c``) that hangs, lies and loses GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed.job import Job, build, build_folder

pytestmark = pytest.mark.attach

SAME = "sm_max=1980 limit=700000 busy=99 width_max=16 links=18"
WELL = f"{SAME} sm=1980 reasons=0x4 power=690000 temperature=61 ecc=0 rows=0 width=16"
SICK = f"{SAME} sm=345 reasons=0x48 power=300000 temperature=91 ecc=2 rows=1 pending=1 width=8"


@pytest.fixture(scope="module", autouse=True)
def driver() -> Path:
    build("2.27.5")
    return build_folder().resolve() / "gpus"


def gpus(driver: Path, state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "NCCLWATCH_STANDIN_GPUS": str(state)}
    command = [sys.executable, "-m", "ncclwatch", "gpus", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_what_is_wrong_with_which_gpu(driver: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text(f"{WELL}\n{SICK} down=0x20 recovered=0x4\n{WELL}\nlost=1\n")
    told = json.loads(gpus(driver, state, "--json").stdout)
    assert told["driver"] == "550.54.15"
    assert [[one["trouble"] for one in gpu["troubles"]] for gpu in told["gpus"]] == [
        [],
        ["ecc-uncorrected", "rows-pending", "nvlink-down", "nvlink-errors", "hw-thermal", "pcie-narrow"],
        [],
        ["lost"],
    ]
    said = gpus(driver, state).stdout
    assert "GPU 1: NVLink 5 inactive, active on its peers\n" in said
    state.write_text(f"{WELL}\n{WELL}\n")
    assert "nothing is wrong with any" in gpus(driver, state).stdout


def test_a_driver_that_hangs_or_is_not_there_is_one_line(driver: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text(f"{WELL} hang=60\n")
    began = time.monotonic()
    hung = gpus(driver, state)
    assert time.monotonic() - began < 30
    assert hung.returncode == 3 and "did not answer" in hung.stderr and hung.stderr.count("\n") == 1
    for folder, file in ((driver, tmp_path / "nothing"), (tmp_path, state)):
        done = gpus(folder, file)
        assert done.returncode == 3 and done.stderr.count("\n") == 1, done.stderr


def test_a_gpu_that_stalls_is_named_with_what_its_driver_says(driver: Path, tmp_path: Path) -> None:
    """A GPU of a real NCCL job stalls; its driver says that it is hot and has failed memory, and of the others nothing."""
    state = tmp_path / "state"
    extra = ("--fault", "stall_gpu:rank=1,at=20", "--pause-us", "1000")
    with Job("2.27.5", 3, "allreduce", "shm", count=4096, extra=extra) as job:
        job.wait_line(1, "gpu stalled", 60)
        sick = f"{SICK} down=0x20 recovered=0x4"
        state.write_text("\n".join(sick if rank == 1 else WELL for rank in range(3)))
        environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "NCCLWATCH_STANDIN_GPUS": str(state)}
        pids = [word for pid in job.pids for word in ("--pid", str(pid))]
        command = [sys.executable, "-m", "ncclwatch", "diagnose", "--json", *pids]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    told = json.loads(done.stdout)
    (culprit,) = told["culprits"]
    troubles = ["ecc-uncorrected", "rows-pending", "nvlink-down", "nvlink-errors", "hw-thermal", "pcie-narrow"]
    assert (culprit["rank"], culprit["gpu_trouble"]) == (1, troubles)
    assert culprit["ticket"]["gpu_bus"] == "0000:11:00.0"
    assert {advice["row"] for advice in told["knowledge"]} >= {"gpu-held-down", "gpu-memory", "gpu-nvlink"}, told["knowledge"]
