"""Lines of PyTorch's watchdog, as several releases write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.ingest.base import HEAD_BYTES
from ncclwatch.ingest.nccl_log import NcclLog
from ncclwatch.ingest.torch_watchdog import Watchdog
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.ingest.judged import verdict_of
from unit.ingest.made_watchdog import NEVER_JOINED, OLDER, OLDEST, REPORT, STUCK, answer, differ, prefix, status, timed_out


def said(*lines: str) -> list[str]:
    watchdog = Watchdog()
    for line in lines:
        watchdog.take(line)
    return [line.removeprefix("PyTorch's watchdog: ") for line in watchdog.lines()]


def waits(rank: int, number: int, kind: str = "ALLREDUCE", elements: int = 8) -> list[str]:
    return [timed_out(rank, number, kind, elements), status(rank, number, number + 1)]


def judged(folder: Path, *lines: str) -> Verdict:
    (folder / "x").write_text("\n".join(lines) + "\n")
    assert NcclLog().recognises((folder / "x").read_bytes()[:HEAD_BYTES], folder / "x")
    [job] = NcclLog().read([folder / "x"])
    return verdict_of(job)


def named(verdict: Verdict) -> tuple[VerdictClass, list[int | None]]:
    return verdict.verdict_class, [culprit.rank for culprit in verdict.culprits]


def test_who_waits_in_what_and_who_says_nothing() -> None:
    lines = [one for rank in (0, 1, 3) for one in (timed_out(rank, 79), status(rank, 79, 80))]
    assert said(*lines) == [
        "ranks 0-1,3 wait in ALLREDUCE #79 of process group default_pg, for 600 s",
        "no line of rank 2 about process group default_pg: ended before, not in this log, or not of this group",
    ]


def test_who_has_called_less_than_others_wait_in_is_told() -> None:
    lines = [timed_out(0, 79), status(0, 79, 80), timed_out(1, 70, "BROADCAST"), status(1, 70, 70)]
    assert said(*lines) == [
        "rank 1 waits in BROADCAST #70 of process group default_pg, for 600 s",
        "rank 0 waits in ALLREDUCE #79 of process group default_pg, for 600 s",
        "rank 1 has called no more than #70 of process group default_pg, and others wait in #79",
    ]


def test_a_rank_far_from_the_others_takes_no_memory_for_those_between() -> None:
    assert said(timed_out(9_999_999, 1)) == ["rank 9999999 waits in ALLREDUCE #1 of a process group that is not told, for 600 s"]


def test_lines_of_older_releases_are_read() -> None:
    assert said(OLDER, OLDEST) == [
        "rank 3 waits in an operation #1580 of process group 1",
        "rank 7 waits in ALLREDUCE #64088 of a process group that is not told, for 25625 s",
    ]


def test_a_log_of_these_lines_alone_is_known_and_accuses_nobody(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("\n".join([timed_out(0, 79), status(0, 79, 80), "other words", timed_out(1, 79)]))
    assert NcclLog().recognises((tmp_path / "x").read_bytes()[:HEAD_BYTES], tmp_path / "x")
    [job] = NcclLog().read([tmp_path / "x"])
    verdict = verdict_of(job)
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert verdict.summary.startswith("PyTorch's watchdog: rank 0 waits in ALLREDUCE #79 of process group default_pg")


SHORT = (
    prefix(3, group="0 (default_pg)")
    + " Timeout at NCCL work: 2070, last enqueued NCCL work: 2082, last completed NCCL work: 2069."
)


def test_what_has_begun_may_stand_in_the_line_and_the_word_watchdog_need_not() -> None:
    begun = status(0, 39, 40, started="last started work: 19 (_ALLGATHER_BASE), ")
    assert said(begun) == ["rank 0 waits in an operation #39 of process group default_pg"]
    assert said(SHORT)[:1] == ["rank 3 waits in an operation #2070 of process group default_pg"]


def test_of_what_a_rank_has_timed_out_in_the_oldest_is_told() -> None:
    assert said(timed_out(0, 97), timed_out(0, 96), timed_out(0, 98)) == [
        "rank 0 waits in ALLREDUCE #96 of a process group that is not told, for 600 s"
    ]


def test_a_watchdog_that_stood_itself_is_told() -> None:
    assert said(STUCK) == ["that of rank 6 itself stood for 480 s: in a call of CUDA or NCCL, or for Python's lock"]


def test_who_has_nothing_open_and_has_not_called_what_others_wait_in_is_named(tmp_path: Path) -> None:
    verdict = judged(tmp_path, *waits(0, 167), *waits(1, 167), *waits(3, 167), answer(2, 166))
    assert named(verdict) == (VerdictClass.NOT_ENTERED, [2])
    assert verdict.summary == (
        "rank 2 holds up the job: rank 2 has not called ALLREDUCE #167 of process group default_pg, and ranks 0-1,3 timed out "
        "waiting"
    )
    assert verdict.victims == (0, 1, 3) and verdict.confidence <= 0.6


@pytest.mark.parametrize(
    "lines",
    [
        # More have not called it than have: nobody knows who is wrong.
        [*waits(7, 167), *(answer(rank, 166) for rank in range(7))],
        # It waits in another group itself.
        [*waits(0, 167), *waits(1, 167), answer(2, 166), status(2, 5, 6, place=0, group="ID 1 PG GUID 3(mesh_tp)")],
        # It is in an operation that the others have ended.
        [*waits(0, 167), *waits(1, 167), answer(2, 166, 165)],
        # It has called it.
        [*waits(0, 167), *waits(1, 167), answer(2, 168, 166)],
        # Two groups of one number: each rank numbers its own.
        [*(status(rank, 9, 9, place=rank % 2, group="1") for rank in range(3)), answer(3, 4, group="1")],
    ],
)
def test_who_may_be_right_is_told_and_not_named(lines: list[str], tmp_path: Path) -> None:
    verdict = judged(tmp_path, *lines)
    assert not verdict.verdict_class.accuses and not verdict.culprits
    assert "PyTorch's watchdog" in verdict.summary


def test_ranks_of_two_groups_with_one_description_are_not_compared(tmp_path: Path) -> None:
    groups = ("ID 1 PG GUID 3(mesh_tp)", "ID 1 PG GUID 4(mesh_tp)")
    lines = [status(rank, 9, 9, place=rank % 2, group=groups[rank // 2]) for rank in (0, 1)]
    lines += [answer(rank, 4, group=groups[1]) for rank in (2, 3)]
    verdict = judged(tmp_path, *lines)
    assert not verdict.verdict_class.accuses
    assert any("ranks 0-1 wait in an operation #9 of process group 3 (mesh_tp)" in line for line in verdict.evidence)


@pytest.mark.parametrize(("kind", "elements"), [("BROADCAST", 8), ("ALLREDUCE", 16)])
def test_who_calls_otherwise_under_one_number_is_named(kind: str, elements: int, tmp_path: Path) -> None:
    lines = [line for rank in (0, 1, 3) for line in waits(rank, 79)]
    verdict = judged(tmp_path, *lines, *waits(2, 79, kind, elements))
    assert named(verdict) == (VerdictClass.INCONSISTENT, [2])
    assert f"rank 2 called {kind} of {elements} elements as #79, ranks 0-1,3 called ALLREDUCE of 8 elements" in verdict.summary


def test_of_equal_sides_both_are_named_and_uneven_parts_are_no_difference(tmp_path: Path) -> None:
    pair = judged(tmp_path, *waits(0, 5), *waits(1, 5, "_ALLGATHER_BASE"))
    assert named(pair) == (VerdictClass.INCONSISTENT, [0, 1])
    parts = judged(tmp_path, *waits(0, 5, "ALLGATHER", 8), *waits(1, 5, "ALLGATHER", 9))
    assert not parts.verdict_class.accuses


def test_the_number_of_an_operation_in_two_groups_says_nothing_of_its_kind(tmp_path: Path) -> None:
    other = [timed_out(1, 5, "_ALLGATHER_BASE"), status(1, 5, 5, place=0, group="ID 1 PG GUID 3(mesh_tp)")]
    verdict = judged(tmp_path, *waits(0, 5), *waits(1, 5), *other)
    assert not verdict.verdict_class.accuses


def test_its_report_on_ranks_out_of_step_names_them(tmp_path: Path) -> None:
    verdict = judged(tmp_path, *REPORT)
    assert named(verdict) == (VerdictClass.NOT_ENTERED, [2]) and "ALLREDUCE #39" in verdict.summary
    never = judged(tmp_path, *(line for rank in range(3) for line in waits(rank, 1)), NEVER_JOINED)
    assert named(never) == (VerdictClass.NOT_ENTERED, [3, 4]) and "any collective" in never.summary


def test_calls_that_pytorch_itself_compared_are_told_and_named(tmp_path: Path) -> None:
    usual, odd = ("_REDUCE_SCATTER_BASE", 960), ("_REDUCE_SCATTER_BASE", 1024)
    lines = [differ(rank, usual, 2, odd) for rank in (0, 1, 3)]
    verdict = judged(tmp_path, *lines, differ(2, odd, 0, usual))
    assert named(verdict) == (VerdictClass.INCONSISTENT, [2])
    assert "rank 2 called _REDUCE_SCATTER_BASE of shape [1024] as #19" in verdict.summary


def test_no_more_is_kept_than_a_bound() -> None:
    watchdog = Watchdog()
    for rank in range(70_000):
        watchdog.take(status(rank, rank, rank, group=f"ID {rank}"))
    assert len(watchdog.groups) == 65536
