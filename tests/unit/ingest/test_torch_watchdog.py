"""Lines of PyTorch's watchdog, as several releases write them (made up by ProcessGroupNCCL.cpp)."""

from __future__ import annotations

from pathlib import Path

from ncclwatch.ingest.base import HEAD_BYTES
from ncclwatch.ingest.nccl_log import NcclLog
from ncclwatch.ingest.torch_watchdog import Watchdog
from ncclwatch.model.verdict import VerdictClass
from unit.ingest.judged import verdict_of


def timed_out(rank: int, number: int, kind: str = "ALLREDUCE") -> str:
    return (
        f"[rank{rank}]:[E603 17:48:01.005 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={kind}, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600068 milliseconds before "
        "timing out."
    )


def status(rank: int, number: int, called: int) -> str:
    return (
        f"[rank{rank}]:[E603 17:48:01.005 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure "
        f"detected by watchdog at work sequence id: {number} PG status: last enqueued work: {called}, "
        f"last completed work: {number - 1}"
    )


OLDER = (
    "[rank3]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 3] Exception (either an error or timeout) detected by "
    "watchdog at work: 1580, last enqueued NCCL work: 1582, last completed NCCL work: 1579."
)
OLDEST = (
    "[E ProcessGroupNCCL.cpp:458] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=64088, "
    "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25625251 milliseconds before timing out."
)


def said(*lines: str) -> list[str]:
    watchdog = Watchdog()
    for line in lines:
        watchdog.take(line)
    return [line.removeprefix("PyTorch's watchdog: ") for line in watchdog.lines()]


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
