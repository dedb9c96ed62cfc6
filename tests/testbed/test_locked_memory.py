"""One process of the node is stuck with its memory map locked: ``ps`` of the system hangs on it, and nothing of ours does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from testbed.job import Job
from testbed.locked import can_lock, locked, mounted, wait_until_held
from testbed.watcher import live, pids, run

pytestmark = [pytest.mark.attach, pytest.mark.quiet, pytest.mark.skipif(not can_lock(), reason="needs root and /dev/fuse")]


HELD = "one of its threads sleeps and holds its memory map"


@pytest.mark.long
def test_a_process_that_nobody_can_look_into_holds_up_nothing(tmp_path: Path) -> None:
    with Job(nccl="2.27.5", ranks=2, count=1 << 12, extra=("--pause-us", "20000")) as job, locked(tmp_path) as pid:
        reader = subprocess.Popen(["cat", f"/proc/{pid}/environ"], stdout=subprocess.DEVNULL)
        with pytest.raises(subprocess.TimeoutExpired):
            reader.wait(1)
        reader.kill()
        reader.wait()
        found = run("ps", timeout=120)
        assert all(str(one) in found.stdout for one in job.pids), found
        assert f"process {pid} cannot be looked into, for one of its threads sleeps" in found.stderr, found
        alone = run("diagnose", "--pid", str(pid), timeout=120)
        assert alone.returncode != 0 and f"process {pid} cannot be looked into" in alone.stderr, alone
        assert "RUNNING  2 processes" in run("diagnose", "--all", timeout=120).stdout


def test_a_rank_that_gets_stuck_so_is_told_and_the_others_are_looked_at(tmp_path: Path) -> None:
    file, folder = tmp_path / "fault", tmp_path / "mount"
    folder.mkdir()
    words = ("locked", str(file))
    with (
        Job(nccl="2.27.5", ranks=3, count=1 << 12, extra=("--pause-us", "20000"), python=words) as job,
        live(*pids(job)) as watcher,
        mounted(folder),
    ):
        watcher.wait_for("rank", count=6)
        made = file.with_suffix(".new")
        made.write_text("1")
        made.rename(file)
        wait_until_held(job.pid(1))
        told = watcher.wait_for("process", change="unreadable", pid=job.pid(1), timeout=120)
        assert HELD in told["detail"], told
        # Its peers wait for it: it is named, by what was read before, and the verdict says that it cannot be read now.
        found = watcher.wait_for("verdict", timeout=120)["verdict"]
        assert [one["pid"] for one in found["culprits"]] == [job.pid(1)], found
        assert any(f"memory of process {job.pid(1)}: cannot be read now" in line and HELD in line for line in found["unobserved"])
        # Then somebody has looked where it sleeps.
        seen = watcher.wait_for("verdict", count=2, timeout=120)["verdict"]
        assert seen["culprits"][0]["doing"] == ["disk-wait"], seen
        assert seen["knowledge"][0]["row"] == "uninterruptible", seen
        # Who comes only now cannot read it at all, and says so.
        after = json.loads(run("diagnose", "--json", *pids(job), timeout=120).stdout)
        assert (after["class"], after["culprits"]) == ("unknown", []), after
        assert any(f"process {job.pid(1)} cannot be looked into" in line for line in after["unobserved"]), after
        # The others are looked at for as long as it is held.
        begun = len(watcher.of("rank"))
        watcher.wait_for("rank", count=begun + 8, timeout=120)
