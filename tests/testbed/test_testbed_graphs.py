"""CUDA graphs on the testbed: NCCL's own capture, replays that compute what eager calls do, what they leave in NCCL's memory."""

from __future__ import annotations

import pytest

from ncclwatch.model.state import Communicator
from ncclwatch.target.session import TargetProcess
from testbed.job import VERSIONS, Job, Transport, has_secret_memory
from testbed.test_testbed_correctness import finish, need

pytestmark = pytest.mark.attach


@pytest.mark.parametrize("transport", ["mixed", "p2p"])
@pytest.mark.parametrize("version", ["2.19.3", *VERSIONS])
def test_replays_of_every_kind_of_call_are_right(version: str, transport: Transport) -> None:
    """Seven graphs, each replayed with new input, and all plans given back: NCCL waits for that before a communicator goes."""
    need(version)
    if transport == "p2p" and not has_secret_memory():
        pytest.skip("this kernel has no secret memory (memfd_secret)")
    with Job(version, 4, "graphs", transport, iterations=4, count=5003, verify=True, wait_for="nothing") as job:
        finish(job)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_replay_with_other_input_is_noticed(version: str) -> None:
    extra = ("--fault", "corrupt:rank=1,at=1")
    with Job(version, 3, "graphs", "shm", iterations=2, count=1000, verify=True, extra=extra, wait_for="nothing") as job:
        assert job.wait(60) == [1] * 3, job.logs()
        assert any(line.startswith("wrong replay of AllReduce") for line in job.lines(0)), job.logs()


def _left(version: str, transport: Transport, replays: int) -> Communicator:
    """Rank 0's communicator after one eager AllReduce, one that was captured, and its replays."""
    job = Job(version, 2, "graph", transport, count=5000, iterations=replays, hold=True, wait_for="nothing")
    with job:
        for rank in range(2):
            job.wait_line(rank, "holding", 60)
        with TargetProcess.open(job.pid(0)) as target:
            return target.sample().communicators[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_replays_leave_in_memory(version: str) -> None:
    """docs/graphs.md has the table."""
    few, many = _left(version, "socket", 2), _left(version, "socket", 7)
    assert few.captured_plans == many.captured_plans == 1
    assert few.collective_count is not None and many.collective_count == few.collective_count + 5
    assert few.sequence_numbers == many.sequence_numbers
    assert max(s.step for s in many.net_steps) - max(s.step for s in few.net_steps) == 5 * 8
    # Inside a host no proxy works, so that NCCL counts no replay: only the steps of the connections do.
    few, many = _left(version, "shm", 2), _left(version, "shm", 7)
    assert few.captured_plans == many.captured_plans == 1
    counts = [(one.op_count, one.collective_count, one.sequence_numbers) for one in (few, many)]
    assert counts[0] == counts[1]
    assert many.host_connections[0].tail - few.host_connections[0].tail == 5 * 8  # type: ignore[operator]
