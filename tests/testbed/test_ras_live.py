"""The RAS service of a real job, asked as a user without privileges would (``ncclwatch diagnose --ras``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.ingest.ras_client import Address
from ncclwatch.model.verdict import Verdict, VerdictClass
from testbed.job import ROOT, Job, available
from testbed.ras import environment, free_address

pytestmark = [pytest.mark.attach]

VERSIONS = ("2.27.5", "2.32.3")
"""The first gives text alone, the second JSON."""
FIRST = 10
HOOK = ROOT / "packaging" / "hooks" / "dumps.py"


def job_of(version: str, address: Address, *extra: str) -> Job:
    if not available(version):
        pytest.skip(f"NCCL {version} is not in the cache")
    return Job(version, 4, "allreduce", "socket", env=environment(address), extra=("--pause-us", "20000", *extra))


def diagnose(address: Address) -> tuple[dict[str, Any] | None, str]:
    """The verdict, and what is said beside it."""
    command = [sys.executable, "-m", "ncclwatch", "diagnose", "--ras", f"{address.host}:{address.port}", "--wait", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_a_frozen_rank_does_not_answer_and_is_named(version: str) -> None:
    address = free_address()
    with job_of(version, address) as job:
        job.freeze(1)
        verdict, said = diagnose(address)
        pid = job.pid(1)
        job.thaw(1)
    assert verdict is not None
    assert (verdict["class"], [culprit["pid"] for culprit in verdict["culprits"]]) == ("stopped", [pid])
    assert said.index("asking RAS has crashed jobs") == len("ncclwatch: ") and "nccl#2346" in said


@pytest.mark.parametrize("version", VERSIONS)
def test_a_hook_keeps_the_answer_while_the_job_hangs(version: str, tmp_path: Path) -> None:
    """``packaging/hooks/dumps.py --ras``; what it keeps is judged afterwards as any answer is."""
    address = free_address()
    with job_of(version, address) as job:
        job.freeze(1)
        given = Verdict(VerdictClass.STOPPED, "rank 1 is stopped")
        words = ["--ras", f"{address.host}:{address.port}", "--keep", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-I", str(HOOK), *words], input=json.dumps(given.to_json()), capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
        job.thaw(1)
        pid = job.pid(1)
    assert done.returncode == 0, done
    (kept,) = tmp_path.glob(f"{given.id}-ras.txt")
    said = subprocess.run(
        [sys.executable, "-m", "ncclwatch", "diagnose", "--json", str(kept)], capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    found = json.loads(said.stdout)
    assert (found["class"], [culprit["pid"] for culprit in found["culprits"]]) == ("stopped", [pid]), said


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rank_that_enters_no_collective_has_called_less(version: str) -> None:
    address = free_address()
    with job_of(version, address, "--fault", f"stuck:rank=1,at={FIRST}") as job:
        job.wait_line(1, "fault stuck strikes")
        verdict, _ = diagnose(address)
        pid = job.pid(1)
    assert verdict is not None
    assert (verdict["class"], [culprit["pid"] for culprit in verdict["culprits"]]) == ("not-entered", [pid])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_that_runs_accuses_nobody_and_goes_on(version: str) -> None:
    address = free_address()
    with job_of(version, address) as job:
        verdict, said = diagnose(address)
        job.wait_progress(5)
    if version == VERSIONS[0]:
        # Its text names ranks only where they differ.
        assert verdict is None or verdict["class"] in ("running", "unknown")
    else:
        assert verdict is not None and verdict["class"] == "running", said
