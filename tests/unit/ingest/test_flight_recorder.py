"""Whom Flight Recorder dumps accuse, of what, and whom they do not."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from ncclwatch.cli.foreign import judge_found, judge_ingested
from ncclwatch.ingest import flight_recorder
from ncclwatch.ingest.base import IngestError
from ncclwatch.ingest.flight_recorder import FlightRecorder
from ncclwatch.ingest.flight_recorder_job import FlightJob
from ncclwatch.ingest.folders import find
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.ingest.dumps import BEGAN, SECOND, Dumps


def judged(folder: Path) -> Verdict:
    [job], problems = judge_found(find([folder]))
    assert not problems
    return job.verdicts[0]


def named(verdict: Verdict) -> list[int]:
    return sorted(culprit.rank if culprit.rank is not None else -1 for culprit in verdict.culprits)


def trained(world: int = 4, **more: object) -> Dumps:
    """A job that has run for a while: five steps of three collectives."""
    job = Dumps(world, **more)  # type: ignore[arg-type]
    for _ in range(5):
        job.all_call("_all_gather_base", size=256)
        job.all_call("_reduce_scatter_base", size=256)
        job.all_call()
    return job


def test_numbers_of_groups_that_became_text_are_read(tmp_path: Path) -> None:
    job = Dumps(4, groups={"1": [0, 1, 2, 3]})
    job.all_call(group="1", times=6)
    for rank in (0, 1, 3):
        job.call(rank, group="1", state="scheduled")
    for entries in job.entries.values():
        for entry in entries:
            entry["pg_id"] = str(entry["pg_id"])
    folder = tmp_path / "dumps"
    folder.mkdir()
    for rank in range(4):
        dump = {"version": "2.10", "pg_config": {"1": {"ranks": [0, 1, 2, 3]}}, "entries": job.entries[rank]}
        (folder / f"rank_{rank}.json").write_text(json.dumps(dump))
    assert named(judged(folder)) == [2]


@pytest.mark.parametrize("name", ["rank_{}", "{}"])
def test_the_rank_may_stand_in_the_name_of_the_folder_alone(tmp_path: Path, name: str) -> None:
    job = trained()
    for rank in (0, 1, 3):
        job.call(rank, state="started")
    for rank in range(4):
        folder = tmp_path / name.format(rank)
        folder.mkdir()
        (folder / "trace.pkl").write_bytes(pickle.dumps(job.dump(rank), 2))
    assert named(judged(tmp_path)) == [2]


def test_a_job_of_which_all_has_ended_accuses_nobody(tmp_path: Path) -> None:
    verdict = judged(trained().write(tmp_path))
    assert verdict.verdict_class is VerdictClass.IDLE


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_who_has_not_called_what_the_others_wait_in_is_named(tmp_path: Path, form: str) -> None:
    job = trained()
    for rank in (0, 1, 3):
        job.call(rank, state="started", line=77)
    verdict = judged(job.write(tmp_path, form=form))
    assert (verdict.verdict_class, named(verdict), verdict.victims) == (VerdictClass.NOT_ENTERED, [2], (0, 1, 3))
    assert verdict.operation is not None
    assert (verdict.operation.name, verdict.operation.sequence) == ("AllReduce", 16)
    assert any("train.py:77" in line and line.startswith("rank 0") for line in verdict.evidence)
    assert any("train.py:10" in line and line.startswith("rank 2") for line in verdict.evidence)
    assert "pid" not in verdict.summary
    assert verdict.planes == ("flight-recorder",)


def test_several_who_are_behind_are_all_named(tmp_path: Path) -> None:
    job = trained(8)
    for rank in (0, 1, 3, 4, 6):
        job.call(rank, state="started")
    assert named(judged(job.write(tmp_path))) == [2, 5, 7]


def test_another_size_is_told_by_a_vote(tmp_path: Path) -> None:
    job = trained()
    for rank in range(4):
        job.call(rank, state="started", size=2048 if rank == 1 else 1024)
    verdict = judged(job.write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.INCONSISTENT, [1])
    assert "2048 x float32" in verdict.summary


def test_another_type_and_another_operation_are_told(tmp_path: Path) -> None:
    for number, other in enumerate(({"dtype": "Half"}, {"name": "broadcast"})):
        job = trained()
        for rank in range(4):
            job.call(rank, state="started", **(other if rank == 3 else {}))  # type: ignore[arg-type]
        verdict = judged(job.write(tmp_path / str(number)))
        assert (verdict.verdict_class, named(verdict)) == (VerdictClass.INCONSISTENT, [3])


def test_uneven_all_to_all_is_no_disagreement(tmp_path: Path) -> None:
    job = trained()
    for rank in range(4):
        job.call(rank, "all_to_all", state="started", size=100 + rank)
    assert not judged(job.write(tmp_path)).culprits


def test_whose_gpu_has_not_begun_is_named_though_its_host_has_called(tmp_path: Path) -> None:
    job = trained()
    for rank in range(4):
        job.call(rank, state="scheduled" if rank == 1 else "started")
    verdict = judged(job.write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.NOT_ENTERED, [1])
    assert "its GPU has not begun it" in verdict.culprits[0].reason


def test_without_timing_nobody_is_accused_of_not_having_begun(tmp_path: Path) -> None:
    job = trained(timing=False)
    job.all_call(state="scheduled")
    verdict = judged(job.write(tmp_path))
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert "all in their newest operations" in verdict.summary
    assert any("TORCH_NCCL_ENABLE_TIMING" in line for line in verdict.unobserved)


def test_who_lags_in_completion_alone_is_in_the_operation(tmp_path: Path) -> None:
    job = trained(timing=False)
    for rank in range(4):
        job.call(rank, state="scheduled" if rank == 2 else "completed")
        job.call(rank, state="scheduled")
    verdict = judged(job.write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.HARDWARE, [2])
    assert "others have ended" in verdict.culprits[0].reason


def test_a_rank_without_a_dump_is_told_and_not_accused(tmp_path: Path) -> None:
    job = trained()
    job.all_call(state="started")
    verdict = judged(job.write(tmp_path, without=[3]))
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert "rank 3" in verdict.summary
    assert "no dump" in verdict.summary


def test_who_is_behind_is_named_beside_a_rank_without_a_dump(tmp_path: Path) -> None:
    job = trained()
    for rank in (0, 3):
        job.call(rank, state="started")
    assert named(judged(job.write(tmp_path, without=[1]))) == [2]


def test_rings_of_unequal_length_and_entries_out_of_order_are_lined_up(tmp_path: Path) -> None:
    job = trained()
    for rank in (0, 1, 2):
        job.call(rank, state="started")
    job.entries[0] = job.entries[0][-4:]
    job.entries[1] = job.entries[1][-9:]
    job.entries[3] = job.entries[3][-7:][::-1]
    job.entries[2].insert(0, job.entries[2].pop())
    assert named(judged(job.write(tmp_path))) == [3]


def test_the_graph_over_all_groups_decides_not_the_largest_gap(tmp_path: Path) -> None:
    """Ranks 2 and 3 are three calls behind on their group since rank 2 waits in another for rank 1, which has stopped."""
    job = trained(4, groups={"1": [0, 1], "2": [2, 3], "3": [1, 2]}, about={"1": "tp", "2": "tp", "3": "pp"})
    for group in ("1", "2", "3"):
        job.all_call(group=group, times=5)
    job.call(2, group="3", state="started")
    for _ in range(3):
        job.call(3, group="2", state="started")
    verdict = judged(job.write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.NOT_ENTERED, [1])
    assert any("process group 3 (pp)" in line for line in verdict.evidence)


def test_what_gpus_have_begun_decides_where_hosts_have_run_ahead(tmp_path: Path) -> None:
    """Rank 0 has called its send, and its GPU is still before it: rank 1 waits in the receive, the others for both."""
    job = trained(4, groups={"1": [0, 1]})
    for _ in range(4):
        job.call(0, "send 0->1", group="1")
        job.call(1, "recv 1<-0", group="1")
    job.call(0, "send 0->1", group="1", state="scheduled")
    job.call(1, "recv 1<-0", group="1", state="started")
    for rank in (2, 3):
        job.call(rank, state="started")
    verdict = judged(job.write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.NOT_ENTERED, [0])


def test_those_who_are_together_in_an_operation_that_does_not_end_are_told_by_it(tmp_path: Path) -> None:
    job = trained(4, groups={"1": [0, 2]}, about={"1": "dp"})
    job.all_call(group="1", times=4)
    job.all_call(group="1", state="started")
    for rank in (1, 3):
        job.call(rank, state="started")
    verdict = judged(job.write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.HARDWARE, [0, 2])
    assert verdict.operation is not None
    assert verdict.operation.sequence == 5
    assert "process group 1 (dp)" in verdict.summary


def test_a_receive_that_nobody_sends_names_who_should(tmp_path: Path) -> None:
    job = trained(4, groups={"1": [0, 2]})
    for _ in range(4):
        job.call(0, "send 0->1", group="1")
        job.call(2, "recv 1<-0", group="1")
    job.call(2, "recv 1<-0", group="1", state="started")
    for rank in (1, 3):
        job.call(rank, state="started")
    verdict = judged(job.write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.NOT_ENTERED, [0])


def test_dumps_of_different_moments_accuse_nobody_of_what_has_ended(tmp_path: Path) -> None:
    job = trained()
    for rank in (0, 1, 3):
        job.call(rank)
    assert not judged(job.write(tmp_path)).culprits


def test_a_dump_that_was_asked_for_accuses_nobody_of_a_moment(tmp_path: Path) -> None:
    job = trained()
    for rank in (0, 1, 3):
        job.call(rank, state="started")
    folder = job.write(tmp_path)
    newest = max(entry["time_created_ns"] for entries in job.entries.values() for entry in entries)
    for file in folder.iterdir():
        os.utime(file, ns=(newest + SECOND, newest + SECOND))
    verdict = judged(folder)
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert newest > BEGAN


def test_operations_of_a_coalesced_group_have_its_state(tmp_path: Path) -> None:
    job = trained(2)
    for rank in range(2):
        job.call(rank, "all_reduce", state="scheduled")
        job.call(rank, "coalesced", collective_seq_id=16)
        job.counts[rank, "0", False] = 16
    job.call(0, state="started")
    verdict = judged(job.write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.NOT_ENTERED, [1])


def test_calls_that_entries_miss_are_counted_by_the_status(tmp_path: Path) -> None:
    """What was captured in a graph has no entries: nobody is behind because of it."""
    job = trained()
    for rank in (0, 1, 3):
        job.call(rank, state="started")
    job.counts[2, "0", False] += 1
    assert not judged(job.write(tmp_path)).culprits


def test_gloo_says_nothing_of_ends_and_members(tmp_path: Path) -> None:
    job = Dumps(4, backend="gloo")
    for _ in range(9):
        job.all_call(state="scheduled", retired=True)
    for rank in (0, 1, 2):
        job.call(rank, state="scheduled")
    verdict = judged(job.write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.NOT_ENTERED, [3])


def test_the_first_version_of_the_format_is_read(tmp_path: Path) -> None:
    job = trained(version="2.0")
    for rank in (0, 1, 3):
        job.call(rank, state="started")
    for entries in job.entries.values():
        for entry in entries:
            entry["seq_id"] = entry.pop("collective_seq_id")
            for key in (
                "process_group",
                "p2p_seq_id",
                "op_id",
                "is_p2p",
                "timeout_ms",
                "input_dtypes",
                "output_dtypes",
                "frames",
            ):
                del entry[key]
    verdict = judged(job.write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.NOT_ENTERED, [2])


def test_jobs_are_told_apart_by_their_prefix(tmp_path: Path) -> None:
    for prefix, victim in (("a_", 1), ("b_", 2)):
        job = trained()
        for rank in set(range(4)) - {victim}:
            job.call(rank, state="started")
        job.write(tmp_path, prefix=prefix)
    jobs, _ = judge_found(find([tmp_path]))
    assert {one.job: named(one.verdicts[0]) for one in jobs} == {"a_*": [1], "b_*": [2]}


def test_names_of_hosts_in_names_of_files_do_not_part_a_job(tmp_path: Path) -> None:
    job = trained()
    for rank in (0, 1, 2):
        job.call(rank, state="started")
    for rank in range(4):
        (tmp_path / f"nccl_trace_rank_container-node{rank // 2:02}_{rank}").write_bytes(pickle.dumps(job.dump(rank), 2))
    [one], _ = judge_found(find([tmp_path]))
    assert (one.job, named(one.verdicts[0])) == ("nccl_trace_rank_container-node#_*", [3])


def test_runs_that_are_numbered_are_jobs_of_their_own(tmp_path: Path) -> None:
    for run, victim in ((1, 1), (2, 2)):
        job = trained()
        for rank in set(range(4)) - {victim}:
            job.call(rank, state="started")
        job.write(tmp_path, prefix=f"run{run}_rank_")
    jobs, _ = judge_found(find([tmp_path]))
    assert {one.job: named(one.verdicts[0]) for one in jobs} == {"run1_rank_*": [1], "run2_rank_*": [2]}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_dumps_that_were_kept_by_a_later_pickle_are_read(tmp_path: Path, protocol: int) -> None:
    job = trained()
    for rank in (0, 1, 3):
        job.call(rank, state="started")
    for rank in range(4):
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(job.dump(rank), protocol))
    [one], _ = judge_found(find([tmp_path]))
    assert (one.verdicts[0].verdict_class, named(one.verdicts[0])) == (VerdictClass.NOT_ENTERED, [2])


def of_torchcomms(job: Dumps, dropped: int = 0) -> None:
    """Numbers as torchcomms gives them: over all groups of a process together, from 0."""
    for rank, entries in job.entries.items():
        for number, entry in enumerate(entries):
            entry |= {"collective_seq_id": number, "p2p_seq_id": 0, "op_id": number}
        del job.entries[rank][:dropped]


def mixed_calls(times: int = 6) -> Dumps:
    """Two pairs of ranks; the second pair calls its group twice as often."""
    job = Dumps(4, groups={"1": [0, 1], "2": [2, 3]}, backend="ncclx", about={"1": "tp", "2": "tp"})
    for _ in range(times):
        job.all_call("all_gather_single", group="1")
        job.all_call("all_gather_single", group="2", times=2)
        job.all_call("all_reduce")
    return job


def test_numbers_that_run_over_all_groups_are_counted_by_group(tmp_path: Path) -> None:
    job = mixed_calls()
    of_torchcomms(job)
    assert not judged(job.write(tmp_path)).verdict_class.accuses
    job = mixed_calls()
    for rank in (0, 1, 3):
        job.call(rank, "all_reduce", state="scheduled")
    of_torchcomms(job)
    verdict = judged(job.write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.NOT_ENTERED, [2])
    assert verdict.operation is not None and verdict.operation.sequence == 7


def test_such_numbers_without_the_oldest_entries_line_nobody_up(tmp_path: Path) -> None:
    job = mixed_calls()
    of_torchcomms(job, dropped=3)
    with pytest.raises(IngestError, match="numbers run over all groups"):
        judge_found(find([job.write(tmp_path)]))


def of_nccl2(open_at: int | None = None) -> Dumps:
    """As PyTorch's hook writes of its backend ``nccl2`` (FlightRecorderHook.cpp): ends and no beginnings."""
    job = Dumps(4, groups={"1": [0, 1], "2": [2, 3]}, backend="nccl2", about={"1": "tp", "2": "tp"}, timing=False)
    for _ in range(6):
        for group in ("1", "2"):
            job.all_call("_all_gather_base", group=group)
        for rank in range(4):
            job.call(rank, f"send {rank}->{rank + 1}" if rank % 2 == 0 else f"recv {rank}<-{rank - 1}")
        job.all_call("all_reduce")
    for rank in range(4 if open_at is not None else 0):
        if rank != open_at:
            job.call(rank, "all_reduce", state="scheduled")
    return job


def test_dumps_of_backend_nccl2(tmp_path: Path) -> None:
    assert not judged(of_nccl2().write(tmp_path)).verdict_class.accuses
    verdict = judged(of_nccl2(open_at=2).write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.NOT_ENTERED, [2])


def crossing(swapped: bool) -> Dumps:
    """Four ranks in two pairs by rows and two by columns; without timing. All have called all, none ends."""
    groups = {"1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3]}
    job = Dumps(4, groups=groups, about={"1": "tp", "2": "tp", "3": "dp", "4": "dp"}, timing=False)
    for _ in range(4):
        for group in groups:
            job.all_call(group=group)
    for rank in range(4):
        rows, columns = ("1" if rank < 2 else "2"), ("3" if rank in (0, 2) else "4")
        order = (columns, rows) if swapped and rank in (0, 3) else (rows, columns)
        for group in order:
            job.call(rank, group=group, state="scheduled")
    return job


def test_calls_in_orders_that_wait_for_each_other_are_a_deadlock(tmp_path: Path) -> None:
    verdict = judged(crossing(swapped=True).write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.DEADLOCK, [0, 1, 2, 3])
    assert any("rank 0 is in AllReduce #5 of process group 3 (dp)" in line for line in verdict.evidence)
    assert verdict.confidence <= 0.6


def test_calls_in_one_order_are_none(tmp_path: Path) -> None:
    verdict = judged(crossing(swapped=False).write(tmp_path))
    assert verdict.verdict_class is VerdictClass.UNKNOWN and not verdict.culprits


def test_a_circle_of_a_moment_is_none(tmp_path: Path) -> None:
    """The dump was asked for: its newest call is two seconds old."""
    folder = crossing(swapped=True).write(tmp_path)
    newest = (BEGAN + 12 * SECOND) / SECOND
    for file in folder.iterdir():
        os.utime(file, (newest, newest))
    assert not judged(folder).verdict_class.accuses


def larger(size: int) -> Dumps:
    """Two pairs; rank 2 asks for another size on the group of all, after which the others go on and it does not."""
    job = Dumps(4, groups={"1": [0, 1], "2": [2, 3]}, about={"1": "tp", "2": "tp"}, timing=False)
    for _ in range(5):
        for group in ("1", "2", "0"):
            job.all_call(group=group)
    for rank in range(4):
        job.call(rank, size=size if rank == 2 else 1024)
    for rank in (0, 1, 3):
        job.call(rank, group="1" if rank < 2 else "2", state="scheduled" if rank == 3 else "completed")
    return job


def test_who_is_behind_after_another_size_is_named_for_the_size(tmp_path: Path) -> None:
    verdict = judged(larger(4096).write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.INCONSISTENT, [2])
    assert verdict.operation is not None and (verdict.operation.name, verdict.operation.sequence) == ("AllReduce", 6)
    assert "called AllReduce of 4096 x float32 as #6, unlike its peers" in verdict.summary


def test_who_is_behind_after_the_same_size_is_behind(tmp_path: Path) -> None:
    verdict = judged(larger(1024).write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.NOT_ENTERED, [2])


def stuck_in_a_column(**more: object) -> Dumps:
    """Two rows and two columns of ranks, without timing: ranks 0 and 2 are in an AllReduce of their column. Hosts have run ahead:
    all have called all, or wait in a receive for one that has.
    """
    groups = {"1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3], "5": [3, 4]}
    about = {"1": "tp", "2": "tp", "3": "dp", "4": "dp", "5": "pp"}
    job = Dumps(5, groups=groups, about=about, timing=False)
    for _ in range(4):
        for group in ("3", "4", "1", "2"):
            job.all_call(group=group)
    for rank in (0, 2):
        job.call(rank, group="3", state="scheduled", **more)  # type: ignore[arg-type]
    job.all_call(group="1", state="scheduled")
    job.all_call(group="2", state="scheduled")
    job.call(3, "send 0->1", group="5", state="scheduled")
    job.call(4, "recv 1<-0", group="5", state="scheduled")
    return job


def test_the_operation_that_all_wait_for_in_the_end_is_told_with_its_ranks(tmp_path: Path) -> None:
    verdict = judged(stuck_in_a_column().write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.HARDWARE, [0, 2])
    assert verdict.operation is not None and (verdict.operation.name, verdict.operation.sequence) == ("AllReduce", 5)
    assert verdict.victims == (1, 3) and verdict.confidence <= 0.6


def test_a_rank_that_is_in_nothing_and_waited_for_is_no_such_end(tmp_path: Path) -> None:
    """Rank 2 has ended its column's operation, and called nothing after it."""
    job = stuck_in_a_column()
    job.entries[2] = [entry for entry in job.entries[2] if entry["state"] == "completed"]
    assert judged(job.write(tmp_path)).verdict_class is not VerdictClass.HARDWARE


def test_what_was_called_a_moment_ago_is_no_such_end(tmp_path: Path) -> None:
    folder = stuck_in_a_column().write(tmp_path)
    newest = BEGAN / SECOND + 13
    for file in folder.iterdir():
        os.utime(file, (newest, newest))
    assert not judged(folder).verdict_class.accuses


def test_one_dump_of_many_tells_what_its_rank_waits_in(tmp_path: Path) -> None:
    verdict = judged(stuck_in_a_column().write(tmp_path, without=(1, 2, 3, 4)))
    assert verdict.verdict_class is VerdictClass.UNKNOWN and not verdict.culprits
    assert verdict.summary == (
        "rank 0 may wait for any of 4 ranks of which there is no dump: "
        "the oldest open operation of rank 0 is AllReduce #5 of process group 3 (dp)"
    )
    assert any("train.py:10" in line for line in verdict.evidence)


@pytest.mark.parametrize(("after_s", "sure"), [(700, 0.6), (3 * 86_400, 0.4)])
def test_copied_files_make_an_end_of_waits_less_sure(tmp_path: Path, after_s: int, sure: float) -> None:
    folder = stuck_in_a_column().write(tmp_path)
    for file in folder.iterdir():
        os.utime(file, (BEGAN / SECOND + after_s,) * 2)
    verdict = judged(folder)
    assert (verdict.verdict_class, verdict.confidence) == (VerdictClass.HARDWARE, sure)
    assert any("so they were copied" in line for line in verdict.unobserved) == (sure < 0.6)


def test_dumps_of_many_ranks_are_read_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same is said, a damaged dump is told, and the ranks share one list of members."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(flight_recorder, "MANY_FILES", 4)
    monkeypatch.setattr(flight_recorder, "CHUNK", 2)
    job = Dumps(6)
    job.all_call(times=3)
    for rank in (0, 1, 2, 4, 5):
        job.call(rank, state="started")
    job.write(tmp_path, prefix="fr_")
    (tmp_path / "fr_4").write_bytes((tmp_path / "fr_4").read_bytes()[:300])
    [ingested] = FlightRecorder().read(sorted(tmp_path.iterdir()))
    assert isinstance(ingested.source, FlightJob)
    assert len({id(members) for one in ingested.source.ranks for members in one.members.values()}) == 1
    [verdict] = judge_ingested(ingested)
    assert [culprit.rank for culprit in verdict.culprits] == [3]
    assert "fr_4 is damaged" in "\n".join(ingested.problems)


@pytest.mark.parametrize("ended", [True, False])
def test_who_has_not_ended_what_others_have_is_in_it_though_it_is_behind_elsewhere(tmp_path: Path, ended: bool) -> None:
    """Rank 1 has not ended an AllReduce of ranks 1 and 3, and so calls nothing more; rank 0 waits for it in another group."""
    job = Dumps(4, groups={"tp": [0, 1], "other": [2, 3], "dp": [1, 3]}, timing=False)
    for _ in range(4):
        for group in ("tp", "other", "dp"):
            job.all_call(group=group)
    job.call(1, group="dp", state="scheduled" if ended else "completed")
    job.call(3, group="dp")
    job.call(0, group="tp", state="scheduled")
    verdict = judged(job.write(tmp_path))
    assert named(verdict) == [1]
    if ended:
        assert verdict.verdict_class is VerdictClass.HARDWARE
        assert "AllReduce #5 of process group dp, which others have ended" in verdict.culprits[0].reason
    else:
        assert verdict.verdict_class is VerdictClass.NOT_ENTERED


def test_all_that_have_not_ended_what_others_have_are_named_whatever_messages_they_exchanged(tmp_path: Path) -> None:
    """Of two pairs that have exchanged messages one rank each is still in the AllReduce: in no message, for those have ended."""
    job = Dumps(40)
    for step in range(50):
        job.all_call()
        for rank in range(0, 40, 2) if step % 2 else ():
            job.call(rank, f"send {rank}->{rank + 1}")
            job.call(rank + 1, f"recv {rank + 1}<-{rank}")
    for rank in range(40):
        job.call(rank, state="started" if rank in (1, 4) else "completed")
    verdict = judged(job.write(tmp_path))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.HARDWARE, [1, 4]), verdict.summary
    assert "AllReduce #51" in verdict.summary


@pytest.mark.parametrize(
    ("told", "noted"),
    [({"nccl_version": "2.21.5"}, "2.21.5"), ({"comm_lib_version": "2.27.5"}, "2.27.5"), ({"nccl_version": ["x"]}, ""), ({}, "")],
)
def test_the_release_of_the_library_is_told_where_a_dump_has_it(tmp_path: Path, told: dict[str, object], noted: str) -> None:
    job = trained(2)
    for rank in range(2):
        dump = {key: value for key, value in job.dump(rank).items() if key not in ("nccl_version", "comm_lib_version")}
        (tmp_path / f"fr_{rank}").write_bytes(pickle.dumps({**dump, **told}, 2))
    [ingested] = FlightRecorder().read(sorted(tmp_path.iterdir()))
    assert (f", library {noted}" in ingested.notes[0]) if noted else ("library" not in ingested.notes[0])
