"""The faults of the testbed's job really happen: seen in the job's own progress and processes, not in a diagnosis.

Those that slow a job are in ``test_training_faults.py``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from testbed.job import VERSIONS, Job

pytestmark = pytest.mark.attach

AT = 5  # iterations that are still fine


def faulty(version: str, shape: str, fault: str, *, ranks: int = 3, extra: Sequence[str] = (), rank: int = 1) -> Job:
    specification = f"{fault}:rank={rank},at={AT}" if ":" not in fault else f"{fault},rank={rank},at={AT}"
    return Job(version, ranks, shape, "mixed", count=20000, extra=("--fault", specification, *extra), wait_for="ready")


def stands_still(job: Job) -> list[int]:
    """Iterations of all ranks, once none of them moves any more."""
    before = [job.progress(rank) for rank in range(job.ranks)]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = [job.progress(rank) for rank in range(job.ranks)]
        if now == before and min(now) >= AT - 1:
            return now
        before = now
    raise AssertionError(f"the job does not stand still\n{job.logs()}")


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ("allreduce", "stall_gpu"),
        ("allreduce", "stall_proxy"),
        ("ordered", "swap"),
        ("mix", "stuck:group=world"),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_faults_that_hang_the_job(version: str, shape: str, fault: str) -> None:
    with faulty(version, shape, fault) as job:
        job.wait_line(1, f"fault {fault.partition(':')[0]} begins before iteration {AT + 1}")
        assert max(stands_still(job)) <= AT + 1, job.logs()
        assert all(job.alive(rank) for rank in range(3))


def test_a_gpu_that_stalls_says_where() -> None:
    """A rank of plain AllReduces runs kernels of NCCL alone; in training, an iteration begins with a kernel that computes."""
    with faulty("2.27.5", "allreduce", "stall_gpu") as job:
        job.wait_line(1, "gpu stalled at-begin of an operation")
    extra = ("--tp", "3", "--forward-us", "2000", "--fault", f"stall_gpu:rank=1,at={AT}")
    with Job("2.27.5", 3, "training", "mixed", count=1000, extra=extra, wait_for="ready") as job:
        job.wait_line(1, "gpu stalled between operations")
        assert not any("gpu stalled" in line for rank in (0, 2) for line in job.lines(rank))


@pytest.mark.parametrize("fault", ["skip", "other_op", "other_size", "other_type"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_collective_left_out_or_changed_spoils_results_or_hangs(version: str, fault: str) -> None:
    """NCCL compares nothing: what happens depends on how many steps each rank takes. It does not stay without effect."""
    with faulty(version, "mix", fault, extra=("--verify", "--iterations", str(AT + 1))) as job:
        job.wait_line(1, f"fault {fault} begins")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and all(job.alive(rank) for rank in range(3)):
            time.sleep(0.2)
            if any(line.startswith("wrong") for rank in range(3) for line in job.lines(rank)):
                return
            if time.monotonic() > deadline - 25 and max(job.progress(rank) for rank in range(3)) <= AT:
                break
        finished = [job.lines(rank)[-1].endswith(" 0 wrong") for rank in range(3)]
        assert not all(finished), job.logs()


def test_a_stalled_proxy_matters_only_on_the_network() -> None:
    with Job(
        "2.27.5", 3, "allreduce", "shm", count=20000, extra=("--fault", f"stall_proxy:rank=1,at={AT}"), wait_for="ready"
    ) as job:
        job.wait_line(1, "fault stall_proxy begins")
        job.wait_progress(10)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rank_that_never_creates_its_communicator(version: str) -> None:
    with Job(version, 3, extra=("--fault", "no_init:rank=1"), wait_for="nothing") as job:
        job.wait_line(1, "fault no_init begins")
        time.sleep(2)
        assert all(job.alive(rank) for rank in range(3))
        assert not any("ready" in line for rank in range(3) for line in job.lines(rank))


def test_an_exit_status_of_its_own() -> None:
    with faulty("2.27.5", "allreduce", "crash:exit=17") as job:
        job.wait_line(1, "fault crash begins")
        deadline = time.monotonic() + 30
        while job.alive(1) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not job.alive(1)
        assert job.alive(0)
        assert "ended with status 17" in job.logs()


@pytest.mark.parametrize(
    ("ranks", "extra"),
    [
        (4, ("--tp", "2", "--pp", "2", "--schedule", "1f1b")),
        (4, ("--pp", "4", "--schedule", "gpipe", "--sequence-parallel")),
        (4, ("--pp", "2", "--chunks", "2", "--schedule", "interleaved", "--ep", "2")),
        pytest.param(
            8,
            ("--tp", "2", "--cp", "2", "--sequence-parallel", "--evaluate-every", "2", "--checkpoint-every", "3"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_training_runs_in_every_layout(ranks: int, extra: tuple[str, ...]) -> None:
    arguments = (*extra, "--forward-us", "300", "--micro-batches", "4")
    with Job("2.27.5", ranks, "training", "mixed", count=4096, iterations=3, extra=arguments, wait_for="nothing") as job:
        assert job.wait(200) == [0] * ranks, job.logs()


@pytest.mark.parametrize("version", VERSIONS)
def test_training_enters_the_operations_of_its_schedule(version: str) -> None:
    """Two stages, two micro-batches, one layer: what each rank enters is known in advance."""
    extra = ("--pp", "2", "--micro-batches", "2", "--layers", "1", "--forward-us", "300", "--trace", "--hold")
    with Job(version, 4, "training", "socket", count=1000, iterations=1, extra=extra, wait_for="running") as job:
        traces = [job.log_path(rank).with_name(f"trace.{rank}").read_text().splitlines() for rank in range(4)]
        operations = [[tuple(line.split()[1:]) for line in trace] for trace in traces]
    first = [("Send", 1), ("Send", 1), ("Recv", 1), ("Recv", 1)]
    for rank, dp in ((0, "dp-0-0-0"), (1, "dp-0-0-0"), (2, "dp-0-0-1"), (3, "dp-0-0-1")):
        entered = [("mp" if name.startswith("mp-") else name, *rest) for name, *rest in operations[rank]]
        assert entered[-3:] == [
            (dp, "ReduceScatter", "32768", "-1"),
            ("mp", "AllReduce", "1", "-1"),
            (dp + "-gather", "AllGather", "32768", "-1"),
        ]
        transfers = [(kind, int(peer)) for _, kind, _, peer in entered[:-3]]
        assert sorted(transfers) == sorted(first if rank < 2 else [("Recv", 0), ("Recv", 0), ("Send", 0), ("Send", 0)])


def test_a_fault_in_training_strikes_one_group() -> None:
    fault = f"skip:rank=2,at={AT},group=dp"
    extra = ("--tp", "2", "--layers", "1", "--forward-us", "300", "--fault", fault)
    with Job("2.27.5", 4, "training", "mixed", count=1000, extra=extra, wait_for="ready") as job:
        job.wait_line(2, "fault skip begins")
        assert max(stands_still(job)) <= AT + 1, job.logs()
