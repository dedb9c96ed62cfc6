"""How a rank of a real job differs from its peers: live, in a snapshot and in a recording; and beside its verdict."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from testbed.job import Job
from testbed.watcher import pids, run

pytestmark = [pytest.mark.attach, pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")]

CPUS = "CPUs it may use"


def _told(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("compare", "--json", *words).stdout)
    assert found["without_traits"] == 0
    return {one["what"]: one for one in found["differences"]}


def test_a_rank_with_fewer_cpus_differs_wherever_it_is_looked_for(tmp_path: Path) -> None:
    with Job(nccl="2.27.5", ranks=3, count=1 << 14, extra=("--pause-us", "20000")) as job:
        assert CPUS not in _told(*pids(job))
        for thread in Path(f"/proc/{job.pid(2)}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {min(os.sched_getaffinity(0))})
        snapshot, recording = tmp_path / "s.ncclwatch", tmp_path / "r.recording"
        run("snapshot", *pids(job), "-o", str(snapshot), "--interval", "0.1")
        run("record", *pids(job), "-o", str(recording), "--duration", "2", "--no-probes")
        for words in (pids(job), [str(snapshot)], [str(recording)]):
            told = _told(*words)[CPUS]
            assert [(one["value"], [who["rank"] for who in one["processes"]]) for one in told["values"]][1] == ("1", [2])
        job.freeze(2)
        verdict = json.loads(run("diagnose", "--json", "--no-stacks", *pids(job)).stdout)
        assert any(line.startswith(f"{CPUS}: 1; of most peers (2 of 2)") for line in verdict["differences"])
