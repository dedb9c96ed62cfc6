"""Collectives and Send/Recv on registered buffers that NCCL uses: memory of ``ncclMemAlloc``, which the peers of a node map and
reach directly. The data then passes through no buffer of a connection; what is seen from outside stays as it is.
"""

from __future__ import annotations

import re

import pytest

from ncclwatch.model.state import Transport
from testbed.job import Job, has_secret_memory
from testbed.test_diagnose_job import opened
from testbed.test_testbed_correctness import finish, need
from testbed.test_testbed_p2p import CUMEM
from testbed.watcher import live, pids

pytestmark = [pytest.mark.attach, pytest.mark.skipif(not has_secret_memory(), reason="no secret memory (memfd_secret)")]

REGISTERED = ("--register", "--mem-alloc")
LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,REG", "TESTBED_LOG": "1"}
WAYS = {"written": (0, (4,), "writes into"), "read": (4, (4,), "reads"), "beside-a-network": (4, (2, 2), "reads")}
"""NVLinks, ranks on each host, and what Send/Recv does: over NVLink NCCL has receivers of GPUs like these read, elsewhere senders
write. Collectives always write. Through the network nothing is reached.
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("version", ["2.25.1", "2.27.5", "2.29.2", "2.32.3"])
def test_results_are_right_on_buffers_that_peers_reach_directly(version: str, way: str) -> None:
    need(version)
    nvlinks, hosts, sends = WAYS[way]
    with Job(version, 4, "mix", "p2p", nvlinks=nvlinks, hosts=hosts, iterations=2, hold=True, count=5003, verify=True,
             extra=REGISTERED, env=CUMEM | LOG, wait_for="nothing") as job:  # fmt: skip
        for rank in range(4):
            job.wait_line(rank, "holding", 120)
            log = job.log(rank)
            assert not any(line.startswith("wrong") for line in job.lines(rank)), job.logs()
            # NCCL says for whom it has mapped a buffer (2.25: "registered"), the stand-in what its kernels were told to use.
            mapped = {int(peer) for peer in re.findall(r"IPC register(?:ed)? buffer .* to peer (\d) regAddr 0x", log)}
            assert mapped == {other for other in range(4) if job.host(other) == job.host(rank)} - {rank}, log
            assert "failed to IPC register" not in log
            assert "a collective writes into registered buffers" in log and f"Send/Recv {sends} registered buffers" in log
        with opened(job) as targets:
            samples = [target.sample() for target in targets]
        for sample in samples:
            (own,) = sample.communicators
            assert {transport for *_, transport in own.transports} - {Transport.NET} == {Transport.P2P}
            # Whatever we had tried to read of a GPU's memory would stand here as refused.
            assert (own.host_connections, sample.unavailable, sample.torn) == ((), {}, 0)


@pytest.mark.parametrize("nvlinks", [0, 4], ids=["written", "read"])
def test_every_type_reduction_root_and_size(nvlinks: int) -> None:
    with Job("2.27.5", 4, "sweep", "p2p", nvlinks=nvlinks, iterations=1, count=1003, verify=True, extra=REGISTERED,
             env=CUMEM | LOG, wait_for="nothing") as job:  # fmt: skip
        finish(job)
        assert "a collective writes into registered buffers" in job.log(0)


def test_what_graphs_capture_nccl_registers_by_itself() -> None:
    """``NCCL_GRAPH_REGISTER`` is on unless told otherwise, so memory of ``ncclMemAlloc`` alone will do."""
    with Job("2.27.5", 4, "graphs", nvlinks=4, iterations=3, count=5003, verify=True, extra=("--mem-alloc",),
             env=CUMEM | LOG, wait_for="nothing") as job:  # fmt: skip
        finish(job)
        assert "IPC register buffer" in job.log(0) and "a collective writes into registered buffers" in job.log(0), job.log(0)


@pytest.mark.parametrize("version", ["2.27.5", "2.32.3"])
def test_the_frozen_rank_is_named_and_nobody_before(version: str) -> None:
    need(version)
    extra = (*REGISTERED, "--pause-us", "20000")
    with Job(version, 4, "mix", nvlinks=4, count=5003, extra=extra, env=CUMEM | LOG) as job, live(*pids(job)) as watcher:
        watcher.wait_for("rank", count=2 * 4)
        assert watcher.of("verdict") == [], "all is well"
        job.freeze(2)
        verdict = watcher.wait_for("verdict")["verdict"]
        assert verdict["class"] == "stopped" and [(c["rank"], c["pid"]) for c in verdict["culprits"]] == [(2, job.pid(2))]
        job.thaw(2)
        watcher.wait_for("recovery", id=verdict["id"])
        job.wait_progress(2)
        watcher.end()
        assert (watcher.of("end")[0]["lost"], watcher.of("loss")) == (0, [])
        assert "a collective writes into registered buffers" in job.log(2)
