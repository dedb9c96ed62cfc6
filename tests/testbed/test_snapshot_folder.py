"""A cluster without agents: a snapshot of every node in one folder, some missing, damaged or of another job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.job import Job

pytestmark = pytest.mark.attach

FROZEN, MISSING, CUT_OFF = 5, 2, 3


def ncclwatch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ncclwatch", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
    )


def test_what_is_missing_damaged_or_of_another_job_is_said_and_the_rest_is_judged(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    with Job("2.27.5", 8, "allreduce", "socket", count=4096) as job, Job("2.27.5", 2, "allreduce", "shm", count=4096) as other:
        job.freeze(FROZEN)
        other.freeze(1)
        named = [(f"node{rank}", [job.pid(rank)]) for rank in range(8) if rank != MISSING]
        for name, pids in [*named, ("stranger", other.pids)]:
            (folder / name).mkdir()
            file = folder / name / f"{name}.snapshot"
            words = [word for pid in pids for word in ("--pid", str(pid))]
            done = ncclwatch("snapshot", *words, "--interval", "0.3", "-o", file)
            assert done.returncode == 0, done.stderr
    os.truncate(folder / f"node{CUT_OFF}" / f"node{CUT_OFF}.snapshot", 3000)
    (folder / "notes.txt").write_text("nodes of rack 7\n")
    said = ncclwatch("diagnose", folder)
    assert said.returncode == 0, said.stderr
    first, second = [line for line in said.stdout.splitlines() if line.startswith("STOPPED")]
    assert first.startswith(f"STOPPED  rank {FROZEN} ") and second.startswith("STOPPED  rank 1 ")
    assert "2 of 8 ranks were not observed" in said.stdout
    assert f"node{CUT_OFF}.snapshot is damaged or incomplete" in said.stderr
    assert "notes.txt" in said.stderr
    told = json.loads(ncclwatch("diagnose", "--json", folder).stdout)
    assert told["class"] == "stopped"
