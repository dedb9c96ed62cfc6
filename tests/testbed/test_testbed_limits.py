"""What the testbed does not do is refused by name, and the launcher cleans up after itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed.job import HERE, ROOT, VERSIONS, Job, JobError, library

pytestmark = pytest.mark.attach


def test_what_is_not_played_is_named() -> None:
    with Job("2.27.5", 9, "allgather", iterations=1, algorithm="PAT", wait_for="nothing") as job:
        for rank in range(9):
            deadline = time.monotonic() + 60
            while job.alive(rank) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert "not supported by the CPU testbed: PAT among 9 ranks" in job.log(rank), job.logs()


def test_the_library_of_another_release_is_refused() -> None:
    env = {"LD_LIBRARY_PATH": str(library("2.32.3").parent)}
    with Job("2.27.5", 1, iterations=1, env=env, wait_for="nothing") as job:
        assert job.wait(60) == [85], job.logs()
        assert "was built for the libnccl with build id" in job.log(0)


def test_layouts_of_a_library_without_debug_information_are_refused(tmp_path: Path) -> None:
    header = tmp_path / "nccl_layout.h"
    command = [sys.executable, str(HERE / "gen_layout.py"), "/bin/true", str(header)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "testbed: /bin/true carries no debug information; use the libnccl of the wheel nvidia-nccl-cu12"
    ]
    assert not header.exists()


@pytest.mark.parametrize("version", VERSIONS)
def test_libnccl_stays_mapped_from_its_unmodified_file(version: str) -> None:
    before = library(version).stat()
    with Job(version, 2, transport="shm") as job:
        text = [
            line for line in Path(f"/proc/{job.pid(0)}/maps").read_text().splitlines() if line.endswith(str(library(version)))
        ]
        assert any(" r-xp " in line for line in text)
        assert not any("w" in line.split()[1] and "x" in line.split()[1] for line in text)
        assert "LD_PRELOAD" not in Path(f"/proc/{job.pid(0)}/environ").read_text()
    after = library(version).stat()
    assert (before.st_mtime_ns, before.st_size, before.st_ino) == (after.st_mtime_ns, after.st_size, after.st_ino)


def test_freeze_thaw_kill_and_close() -> None:
    with Job("2.27.5", 3, transport="mixed") as job:
        pids = job.pids
        job.freeze(1)
        job.thaw(1)
        job.wait_progress(3)
        job.freeze(2)
        job.kill(0)
        assert not job.alive(0)
        assert job.alive(2)
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_a_job_that_does_not_start_shows_its_logs() -> None:
    with pytest.raises(JobError, match="unknown shape nonsense"):
        Job("2.27.5", 2, "nonsense").start()


def test_a_waiting_job_leaves_the_processor_alone() -> None:
    """Eight ranks that wait for a ninth use less than one core together, though NCCL's proxy threads poll."""
    with Job("2.27.5", 9, "allreduce", "socket") as job:
        job.freeze(4)
        time.sleep(1)
        before = sum(_cpu_seconds(pid) for pid in job.pids)
        start = time.monotonic()
        time.sleep(2)
        used = sum(_cpu_seconds(pid) for pid in job.pids) - before
        assert used < time.monotonic() - start


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_command_line_takes_its_ranks_with_it(end: signal.Signals) -> None:
    command = [sys.executable, "-m", "testbed.job", "--ranks", "2", "--transport", "shm"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline().split()[3]) for _ in range(2)]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        launcher.send_signal(end)
        try:
            launcher.wait(30)
        finally:
            launcher.kill()
        assert launcher.returncode == (-end if end == signal.SIGKILL else 0)
        deadline = time.monotonic() + 30
        while any(_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(_running(pid) for pid in pids)


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
