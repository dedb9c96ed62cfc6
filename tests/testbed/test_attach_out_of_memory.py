"""A rank that the kernel kills for want of memory: the verdict says so, with the kernel's own line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testbed.job import Job
from testbed.memory_limit import memory_cgroup
from testbed.sidecar import daemon
from testbed.watcher import pids

pytestmark = pytest.mark.attach

LIMIT = 64 << 20
GROW = f"import sys, time; sys.stdin.read(1); bytearray({LIMIT}); time.sleep(30)"


def test_a_rank_that_was_killed_for_want_of_memory() -> None:
    with Job(ranks=4, count=1 << 12, extra=("--pause-us", "20000")) as job:
        victim = job.pids[2]
        with daemon("attach", *pids(job), "--plain") as attached:
            attached.wait_line("4 ranks:")
            # Who fills the cgroup is another; whom the kernel picks there is the rank.
            greedy = subprocess.Popen([sys.executable, "-c", GROW], stdin=subprocess.PIPE, text=True)
            try:
                with memory_cgroup(LIMIT) as folder:
                    try:
                        Path(f"/proc/{victim}/oom_score_adj").write_text("1000")
                        for pid in (victim, greedy.pid):
                            (folder / "cgroup.procs").write_text(str(pid))
                        assert greedy.stdin is not None
                        greedy.stdin.write("x")
                        greedy.stdin.close()
                        attached.wait_line("DEAD  rank 2")
                        attached.wait_line("it was killed for want of memory")
                        attached.wait_line("killed-for-memory (judged ")
                    finally:
                        greedy.kill()
                        greedy.wait()
            except OSError as error:
                pytest.skip(f"no cgroup with a limit on memory can be made here: {error}")
            assert f"out of memory: Killed process {victim}" in attached.text
