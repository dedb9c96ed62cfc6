"""GPUs of one host with direct access to each other: NCCL's P2P transport by CUDA IPC and by virtual memory (cuMem), over
memory that no outsider can read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.model.state import Transport
from ncclwatch.target.session import TargetProcess
from testbed.job import VERSIONS, Job, has_secret_memory
from testbed.test_testbed_correctness import finish, need

pytestmark = [pytest.mark.attach, pytest.mark.skipif(not has_secret_memory(), reason="no secret memory (memfd_secret)")]


CUMEM = {"NCCL_CUMEM_ENABLE": "1", "TESTBED_CUMEM": "1"}
"""NCCL asks the driver for virtual memory, and the stand-in has it."""
WAYS = {"IPC": {}, "CUMEM": CUMEM}
PLAYED = [*((version, "IPC") for version in ("2.19.3", *VERSIONS)), *((version, "CUMEM") for version in VERSIONS)]


@pytest.mark.parametrize(("version", "way"), PLAYED)
def test_results_are_right_and_device_memory_is_neither_read_nor_readable(version: str, way: str) -> None:
    need(version)
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM", **WAYS[way]}
    with Job(version, 4, "mix", "p2p", iterations=3, hold=True, count=5003, verify=True, env=env, wait_for="nothing") as job:
        for rank in range(4):
            job.wait_line(rank, "holding", 120)
            assert not any(line.startswith("wrong") for line in job.lines(rank)), job.logs()
            assert f"via P2P/{way}" in job.log(rank) and "via SHM" not in job.log(rank)
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


@pytest.mark.parametrize("shape", ["allreduce", pytest.param("alltoall", marks=pytest.mark.long)])
def test_messages_of_64_mebibytes(shape: str) -> None:
    with Job(
        "2.27.5", 2, shape, nvlinks=4, iterations=1, count=16 << 20, verify=True, as_nccl_likes=True, wait_for="nothing"
    ) as job:
        finish(job)


@pytest.mark.parametrize(
    "env", [pytest.param(env, id=way, marks=[pytest.mark.long] * (way == "IPC")) for way, env in WAYS.items()]
)
def test_a_server_with_experts_starts_over(env: dict[str, str]) -> None:
    """All-to-all inside and outside of graphs; communicators that are aborted free what other ranks have mapped."""
    extra = ("--experts", "--layers", "1", "--prefill-every", "2", "--rebuild-every", "3")
    with Job(
        "2.27.5", 4, "serving", "p2p", iterations=7, count=500, verify=True, extra=extra, env=env, wait_for="nothing"
    ) as job:
        finish(job)
        for rank in range(4):
            assert sum(line.startswith("started over") for line in job.lines(rank)) == 2, job.logs()


def test_a_communicator_that_hangs_is_aborted_and_made_anew() -> None:
    """Not by cuMem: there NCCL's abort waits for all ranks of the node to abort as well (``ncclProxyService``, src/proxy.cc)."""
    extra = ("--abort-after", "0.5")
    with Job("2.27.5", 4, "abort", "p2p", iterations=2, count=20_011, verify=True, extra=extra, wait_for="nothing") as job:
        finish(job)


@pytest.mark.parametrize("way", WAYS)
def test_registered_buffers_are_taken_and_not_used(way: str) -> None:
    """Peers cannot map memory of ``cudaMalloc``: NCCL says so itself and goes by its own buffers, with the right results."""
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,REG", **WAYS[way]}
    extra = ("--register",)
    with Job("2.27.5", 4, "mix", "p2p", iterations=2, count=5003, verify=True, extra=extra, env=env, wait_for="nothing") as job:
        finish(job)
        assert "failed to IPC register userbuff" in job.log(0), job.log(0)
