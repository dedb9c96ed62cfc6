"""The calls plane on jobs of real NCCL: as many records as calls, with what the communicator says, for every release."""

from __future__ import annotations

import os
from functools import lru_cache

import numpy as np
import pytest

from ncclwatch.model.events import Flag, Function, Kind
from ncclwatch.probes.attach import Backend
from ncclwatch.probes.map_layouts import Counter
from ncclwatch.probes.tracer import CallTracer, CommunicatorOffsets, TracedFile
from ncclwatch.target.elf import ElfFile
from ncclwatch.target.resolve import resolve_layout
from testbed.calls.harness import Events, calls, collect, compilation, summary
from testbed.job import VERSIONS, Job, available, library

pytestmark = [pytest.mark.attach, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


@lru_cache(maxsize=4)
def traced_file(version: str) -> TracedFile:
    path = library(version)
    with ElfFile.open(path) as elf:
        return TracedFile(str(path), CommunicatorOffsets.from_layout(resolve_layout(elf)))


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    if not available(chosen):
        pytest.skip(f"NCCL {chosen} is not in the cache")
    return chosen


def start(version: str, watch: list[int] | None = None, backend: Backend | None = None) -> CallTracer:
    """Watch this process's own descendants: other jobs of the machine are none of our business."""
    return CallTracer.start([traced_file(version)], watch=watch or [os.getpid()], compilation=compilation(), backend=backend)


def run_to_end(tracer: CallTracer, job: Job) -> Events:
    """All records of a job, until every rank has exited."""
    with job:
        events = collect(tracer, lambda e: int((e["kind"] == Kind.EXIT).sum()) == job.ranks)
        assert job.wait() == [0] * job.ranks
        assert set(events["pid"]) == set(job.pids)
    return events


@pytest.mark.parametrize("ranks", [2, 8])
def test_23_all_reduces_in_23_records_out(version: str, ranks: int) -> None:
    with start(version) as tracer:
        events = run_to_end(tracer, Job(version, ranks, "allreduce", iterations=23, count=1024, wait_for="nothing"))
        assert sum(tracer.losses()) == 0
    reduced = calls(events, Function.ALL_REDUCE)
    assert sorted(np.unique(reduced["pid"], return_counts=True)[1]) == [23] * ranks
    assert set(reduced["flags"]) == {Flag.COMM_READ}
    assert set(reduced["count"]) == {1024}
    assert set(reduced["nranks"]) == {ranks}
    ranks_by_pid = {int(e["pid"]): int(e["rank"]) for e in reduced}
    assert sorted(ranks_by_pid.values()) == list(range(ranks))
    assert len(set(reduced["comm_hash"])) == 1
    for pid in ranks_by_pid:
        mine = reduced[reduced["pid"] == pid]
        assert len(set(mine["comm"])) == 1
        assert (np.diff(mine["time_ns"].astype(np.int64)) > 0).all()
        assert (np.diff(mine["op_count"].astype(np.int64)) >= 0).all()


def test_the_making_and_the_end_of_a_communicator(version: str) -> None:
    with start(version) as tracer:
        events = run_to_end(tracer, Job(version, 3, "allreduce", iterations=1, count=64, wait_for="nothing"))
    entered, left = calls(events, Function.COMM_INIT_RANK), calls(events, Function.COMM_INIT_RANK, Kind.LEAVE)
    assert sorted(entered["rank"]) == sorted(left["rank"]) == [0, 1, 2]
    assert set(entered["nranks"]) == {3}
    # Ranks that are to meet are known by the unique id before any of them has a communicator.
    made = calls(events, Function.GET_UNIQUE_ID, Kind.LEAVE)
    assert set(entered["unique_id"]) == set(left["unique_id"]) <= set(made["unique_id"])
    assert set(left["result"]) == {0}
    assert set(left["flags"]) == {Flag.COMM_READ}
    assert set(left["comm_hash"]) == set(calls(events, Function.ALL_REDUCE)["comm_hash"])
    assert set(left["comm"]) == set(calls(events, Function.COMM_DESTROY)["comm"])
    gone = calls(events, Function.COMM_DESTROY, Kind.LEAVE)
    assert set(gone["comm_hash"]) == set(left["comm_hash"])
    assert (left["time_ns"] > left["enter_time_ns"]).all()


MIXED = {
    "ALL_REDUCE": 1 + 5,
    "ALL_GATHER": 1,
    "REDUCE_SCATTER": 1,
    "BROADCAST": 1,
    "REDUCE": 1,
    "SEND": 1 + 2,
    "RECV": 1 + 2,
    "GROUP_START": 3,
    "GROUP_END": 3,
}
"""Calls of one iteration of the shape mix on two ranks: five grouped AllReduces, a ring of Send/Recv, AllToAll by Send/Recv."""


@pytest.mark.parametrize("backend", list(Backend))
def test_every_kind_of_operation(version: str, backend: Backend) -> None:
    with start(version, backend=backend) as tracer:
        events = run_to_end(tracer, Job(version, 2, "mix", iterations=7, count=1024, wait_for="nothing"))
        assert sum(tracer.losses()) == 0
    found = summary(events)
    assert {name: found[f"{name} ENTER"] for name in MIXED} == {name: 2 * 7 * count for name, count in MIXED.items()}
    assert found["GROUP_END LEAVE"] == found["GROUP_END ENTER"]
    sent = calls(events, Function.SEND)
    assert set(sent["peer"]) <= {0, 1}
    for rank in (0, 1):
        assert 1 - rank in set(sent[sent["rank"] == rank]["peer"])


def test_split_communicators_are_told_apart(version: str) -> None:
    with start(version) as tracer:
        events = run_to_end(tracer, Job(version, 4, "split", iterations=2, count=256, wait_for="nothing", extra=["--tp", "2"]))
    made = calls(events, Function.COMM_SPLIT, Kind.LEAVE)
    assert len(made) >= 8, "a tensor and a data group for every rank"
    assert set(made["result"]) == {0}
    assert set(made["nranks"]) == {2}
    assert set(calls(events, Function.COMM_SPLIT)["nranks"]) == {4}, "on entry: the parent's"
    used = events[(events["kind"] == Kind.ENTER) & np.isin(events["function"], [Function.ALL_REDUCE, Function.ALL_GATHER])]
    assert set(used["comm_hash"]) <= set(made["comm_hash"]) | set(calls(events, Function.COMM_INIT_RANK, Kind.LEAVE)["comm_hash"])
    assert len(set(used["comm_hash"])) >= 2


def test_two_jobs_on_one_library(version: str) -> None:
    with Job(version, 2, "allreduce", count=64) as ours, Job(version, 2, "allreduce", count=128) as theirs:
        with start(version, ours.pids) as tracer:
            events = collect(tracer, lambda e: len(e) > 50)
            assert set(events["pid"]) == set(ours.pids)
            assert set(calls(events, Function.ALL_REDUCE)["count"]) == {64}
            # The calls of an iteration that ends now may have been made before there were probes: the next one's were not.
            theirs.wait_progress(2)
            assert sum(tracer.counters()[Counter.FOREIGN]) > 0
        ours.wait_progress(5)
        theirs.wait_progress(5)


def test_attached_in_the_middle_of_a_running_job(version: str) -> None:
    """No call is missed between the first record and the last, and the job goes on when we are gone."""
    with Job(version, 2, "allreduce", count=64) as job:
        with start(version, job.pids) as tracer:
            events = calls(collect(tracer, lambda e: len(e) > 200), Function.ALL_REDUCE)
        for pid in job.pids:
            counted = events[events["pid"] == pid]["op_count"].astype(np.int64)
            assert (np.diff(counted) == 1).all(), "one record for every operation NCCL itself counted"
        job.wait_progress(5)


def test_a_rank_that_never_comes_shows_as_an_init_that_is_not_left(version: str) -> None:
    """The blind spot of tools that look at communicators: there is none yet."""
    with start(version) as tracer:
        job = Job(version, 2, "allreduce", iterations=1, count=64, wait_for="nothing", env={"WORLD_SIZE": "3"})
        with job:
            events = collect(tracer, lambda e: len(calls(e, Function.COMM_INIT_RANK)) == 2)
            assert sorted(calls(events, Function.COMM_INIT_RANK)["rank"]) == [0, 1]
            assert set(calls(events, Function.COMM_INIT_RANK)["nranks"]) == {3}
            assert len(calls(tracer.poll(1.0), Function.COMM_INIT_RANK, Kind.LEAVE)) == 0
            assert len(set(calls(events, Function.COMM_INIT_RANK)["unique_id"])) == 1
