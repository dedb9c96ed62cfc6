"""``--on-verdict`` on a real job: the hook gets the verdict with what a ticket needs, once; one that hangs disturbs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.job import Job
from testbed.watcher import live, pids

pytestmark = pytest.mark.attach

PAUSE = ("--pause-us", "20000")


def test_a_hook_gets_the_verdict_once_and_may_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu17")
    hook, told = tmp_path / "hook.sh", tmp_path / "told"
    hook.write_text(f"#!/bin/sh\ncat >>{told}\nsleep 600\n")
    hook.chmod(0o755)
    with (
        Job(nccl="2.27.5", ranks=2, count=1 << 14, extra=PAUSE) as job,
        live("--on-verdict", str(hook), "--hook-log", str(tmp_path / "log"), *pids(job)) as watcher,
    ):
        watcher.wait_for("rank", count=4)
        job.freeze(1)
        verdict = watcher.wait_for("verdict")["verdict"]
        assert verdict["knowledge"][0]["row"] == "stopped-by-signal"
        job.thaw(1)
        watcher.wait_for("recovery", id=verdict["id"])
        job.wait_progress(3)
        assert watcher.end() == 0
        (known,) = map(json.loads, told.read_text().splitlines())
        assert known["id"] == verdict["id"]
        ticket = known["culprits"][0]["ticket"]
        assert (ticket["node"], ticket["job"]) == ("gpu17", "4711")
        (kept,) = map(json.loads, (tmp_path / "log").read_text().splitlines())
        assert kept["result"]["why"] == "ENDED: ncclwatch ends"
