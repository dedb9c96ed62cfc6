"""Real NCCL on the CPU testbed computes what NCCL computes: every collective, type and reduction, element by element."""

from __future__ import annotations

import itertools

import pytest

from testbed.job import VERSIONS, Job, Transport, available

pytestmark = pytest.mark.attach

TRANSPORTS: tuple[Transport, ...] = ("socket", "shm", "mixed")


def finish(job: Job) -> None:
    """The job ends by itself, with status 0 and no wrong element."""
    codes = job.wait(120)
    assert codes == [0] * job.ranks, job.logs()
    for rank in range(job.ranks):
        assert job.lines(rank)[-1].endswith(", 0 wrong"), job.logs()


def need(version: str) -> None:
    if not available(version):
        pytest.skip(f"NCCL {version} is not in the cache")


# 2.19.3 is only here to be read from outside; mixed covers both of its transports.
@pytest.mark.parametrize(("version", "transport"), [("2.19.3", "mixed"), *itertools.product(VERSIONS, TRANSPORTS)])
def test_every_collective_type_and_reduction(version: str, transport: Transport) -> None:
    need(version)
    with Job(version, 4, "sweep", transport, iterations=1, count=2503, verify=True, wait_for="nothing") as job:
        finish(job)
        assert job.lines(0)[0].endswith(f"nccl {version} ready")


@pytest.mark.parametrize("version", VERSIONS)
def test_results_of_a_rank_with_other_input_are_noticed(version: str) -> None:
    """The checks can fail: one rank works on data the others do not expect."""
    extra = ("--fault", "corrupt:rank=1,at=1")
    with Job(version, 3, "mix", "shm", iterations=2, count=1000, verify=True, extra=extra, wait_for="nothing") as job:
        codes = job.wait(60)
        assert codes == [1] * 3, job.logs()
        for rank in range(3):
            wrong = [line for line in job.lines(rank) if line.startswith("wrong ")]
            assert any("AllReduce" in line for line in wrong), job.logs()
            assert rank == 1 or any("AllToAll" in line for line in wrong), job.logs()


@pytest.mark.parametrize(
    ("shape", "extra"),
    [
        ("pipeline", ()),
        ("split", ()),
        ("split", ("--split-share",)),
        ("split", ("--config",)),
        ("multicomm", ("--config",)),
        ("async", ()),
        ("abort", ("--abort-after", "0.5")),
        ("onerank", ()),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_communicators_and_streams(version: str, shape: str, extra: tuple[str, ...]) -> None:
    with Job(version, 4, shape, "mixed", iterations=2, count=20011, verify=True, extra=extra, wait_for="nothing") as job:
        finish(job)


@pytest.mark.parametrize("version", VERSIONS)
def test_large_messages_in_bursts(version: str) -> None:
    """Many launches before the host waits, each larger than a connection's buffers."""
    extra = ("--burst", "10")
    with Job(version, 2, "allreduce", "socket", iterations=2, count=3 << 20, verify=True, extra=extra, wait_for="nothing") as job:
        finish(job)


@pytest.mark.parametrize("version", VERSIONS)
def test_eight_ranks(version: str) -> None:
    with Job(version, 8, "mix", hosts=(4, 3, 1), iterations=2, count=5000, verify=True, wait_for="nothing") as job:
        finish(job)


def test_jobs_of_tests_pause_unless_their_options_set_the_pace() -> None:
    def pauses(job: Job) -> list[str]:
        return [after for option, after in itertools.pairwise(job._arguments) if option == "--pause-us"]

    assert pauses(Job()) == [str(Job.pause_us)] and Job.pause_us > 0
    assert pauses(Job(extra=("--pause-us", "0"))) == ["0"]
    for job in (Job(iterations=3), Job(shape="training"), Job(extra=("--compute-us", "100")), Job(extra=("--time",))):
        assert not pauses(job)
