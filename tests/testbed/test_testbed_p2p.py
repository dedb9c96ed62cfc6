"""GPUs of one host with direct access to each other: NCCL's P2P transport by CUDA IPC, over memory that no outsider can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.model.state import Transport
from ncclwatch.target.session import TargetProcess
from testbed.job import VERSIONS, Job, has_secret_memory
from testbed.test_testbed_correctness import need

pytestmark = [pytest.mark.attach, pytest.mark.skipif(not has_secret_memory(), reason="no secret memory (memfd_secret)")]


@pytest.mark.parametrize("version", ["2.19.3", *VERSIONS])
def test_results_are_right_and_device_memory_is_neither_read_nor_readable(version: str) -> None:
    need(version)
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM"}
    with Job(version, 4, "mix", "p2p", iterations=3, hold=True, count=5003, verify=True, env=env, wait_for="nothing") as job:
        for rank in range(4):
            job.wait_line(rank, "holding", 60)
            assert not any(line.startswith("wrong") for line in job.lines(rank)), job.logs()
            assert "via P2P/IPC" in job.log(rank) and "via SHM" not in job.log(rank)
        with TargetProcess.open(job.pid(0)) as target:
            sample = target.sample()
        (own,) = sample.communicators
        assert {transport for *_, transport in own.transports} == {Transport.P2P}
        # Whatever we had tried to read there would stand here as refused.
        assert (own.host_connections, sample.unavailable, sample.torn) == ((), {}, 0)
        shared = [line for line in Path(f"/proc/{job.pid(0)}/maps").read_text().splitlines() if "/secretmem" in line]
        assert len(shared) > 8, "buffers, heads and tails of every connection"
        with Path(f"/proc/{job.pid(0)}/mem").open("rb") as memory, pytest.raises(OSError, match="Input/output error"):
            memory.seek(int(shared[0].split("-")[0], 16))
            memory.read(8)
