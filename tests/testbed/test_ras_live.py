"""The RAS service of a real job, asked as a user without privileges would (``ncclwatch diagnose --ras``)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ncclwatch.ingest.ras_client import Address
from testbed.job import Job, available
from testbed.ras import environment, free_address

pytestmark = [pytest.mark.attach]

VERSIONS = ("2.27.5", "2.32.3")
"""The first gives text alone, the second JSON."""
FIRST = 10


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
