"""NCCL's Inspector: what it wrote of a real job that slows down (scripts/record_inspector.py), and damaged lines."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.ingest.base import HEAD_BYTES, Ingested, IngestError
from ncclwatch.ingest.inspector import NO_TIMES, Inspector
from ncclwatch.ingest.inspector_lines import KEPT_OPERATIONS
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.ingest.judged import verdict_of

SLOW = Path(__file__).parents[2] / "fixtures" / "nccl" / "inspector-2.29.2-slow.xz"
LINES = lzma.decompress(SLOW.read_bytes()).decode().splitlines()
LATE = "came to them later"


def read(folder: Path, lines: list[str], name: str = "node-pid1.log") -> Ingested:
    (folder / name).write_text("".join(line + "\n" for line in lines))
    [job] = Inspector().read([folder / name])
    return job


def changed(change: Callable[[Any], object], lines: list[str]) -> list[str]:
    told = [json.loads(line) for line in lines]
    for one in told:
        change(one)
    return [json.dumps(one) for one in told]


def rank_of(line: str) -> int:
    return int(json.loads(line)["header"]["rank"])


HEALTHY = [line for line in LINES if 40 <= json.loads(line)["coll_perf"]["coll_sn"] < 95]


def test_a_job_that_slows_down_is_slower_and_who_comes_later_is_told(tmp_path: Path) -> None:
    verdict = verdict_of(read(tmp_path, LINES))
    assert verdict.verdict_class is VerdictClass.RUNNING and "slower than it did" in verdict.summary
    [line] = [line for line in verdict.evidence if LATE in line]
    assert line.startswith("rank 1 of communicator ")


def test_nobody_comes_later_in_a_healthy_job(tmp_path: Path) -> None:
    verdict = verdict_of(read(tmp_path, HEALTHY))
    assert verdict.verdict_class is VerdictClass.RUNNING and not any(LATE in line for line in verdict.evidence)


def test_what_is_missing_accuses_nobody(tmp_path: Path) -> None:
    """One rank's file ends early: its operations were small, or were not written yet."""
    cut = [line for line in HEALTHY if rank_of(line) != 1 or json.loads(line)["coll_perf"]["coll_sn"] < 60]
    assert not verdict_of(read(tmp_path, cut)).verdict_class.accuses


@pytest.mark.parametrize("said", [VerdictClass.NOT_ENTERED, VerdictClass.INCONSISTENT, VerdictClass.UNKNOWN, VerdictClass.IDLE])
def test_no_hang_is_ever_told(said: VerdictClass, tmp_path: Path) -> None:
    verdict = read(tmp_path, HEALTHY[:8]).amend(Verdict(said, "a rank has not come", confidence=0.9))
    assert verdict.verdict_class is VerdictClass.RUNNING and "what came after is not in these files" in verdict.summary


def test_without_times_durations_still_tell_who_came_later(tmp_path: Path) -> None:
    def terse(one: Any) -> None:
        one["coll_perf"].pop("event_trace_ts"), one["coll_perf"].pop("event_trace_sn")

    job = read(tmp_path, changed(terse, LINES[::2] + LINES[1::2]))
    assert NO_TIMES in job.blind and sum(len(batch.events) for batch in job.batches if batch.events is not None) == 0
    assert any(LATE in line for line in verdict_of(job).evidence)


def test_numbers_that_are_missing_are_counted(tmp_path: Path) -> None:
    first = [line for line in HEALTHY if rank_of(line) == 0]
    job = read(tmp_path, [first[5], *first[10:20], *first[6:8]])
    assert "2 operations are missing between others: they were small, or came too fast" in job.notes
    assert job.batches[-1].lost == 2


def test_messages_are_taken_with_their_peers(tmp_path: Path) -> None:
    def message(one: Any) -> None:
        own = one.pop("coll_perf")
        one["p2p_perf"] = {
            "p2p": "Send", "p2p_sn": own["coll_sn"], "p2p_peer": 3, "p2p_exec_time_us": 5, "event_trace_ts": {"p2p_start_ts": 7}
        }  # fmt: skip

    job = read(tmp_path, changed(message, HEALTHY[:1]))
    [operation] = job.batches[-1].samples[0].device.communicators[0].recent  # type: ignore[union-attr]
    assert (operation.function, operation.peer, operation.point_to_point) == ("Send", 3, True)


def test_memory_is_bounded(tmp_path: Path) -> None:
    one = changed(lambda one: one["coll_perf"].pop("event_trace_sn"), HEALTHY[:1])[0]
    job = read(tmp_path, [one] * (KEPT_OPERATIONS + 20))
    assert "20 older operations are not looked at" in job.notes


@pytest.mark.parametrize("head", [b"", b'{"header": 1}', b'{"nccl_version": "2.29.2", "communicators": []}', b"NCCL INFO"])
def test_other_files_are_not_taken_for_one(head: bytes) -> None:
    assert not Inspector().recognises(head, Path("x"))


def test_a_file_is_known_by_its_first_line() -> None:
    assert Inspector().recognises(LINES[0].encode()[:HEAD_BYTES], Path("x"))


def test_a_line_that_is_cut_off_is_a_problem_and_the_rest_is_read(tmp_path: Path) -> None:
    job = read(tmp_path, [*HEALTHY[:4], HEALTHY[4][:300]])
    assert [f"{tmp_path / 'node-pid1.log'}: line 5: " in problem for problem in job.problems] == [True]


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one["header"].update(rank=10**30),
        lambda one: one["header"].update(id="0x" + "f" * 100, rank=9),
        lambda one: one["coll_perf"].update(coll_exec_time_us=-5),
        lambda one: one["coll_perf"].update(coll_sn=2**63),
        lambda one: one["metadata"].update(pid=-1),
    ],
)
def test_absurd_numbers_are_refused(change: Callable[[Any], object], tmp_path: Path) -> None:
    with pytest.raises(IngestError, match="line 1: no line of the Inspector"):
        read(tmp_path, changed(change, HEALTHY[:1]))


def below_markers(lines: list[str], **stats: int) -> list[str]:
    """The same operations as v4.3 writes them: a line that says whose they are, and below it lines without a header."""
    told = []
    for line in lines:
        one = json.loads(line)
        marker = {key: one.pop(key) for key in ("header", "metadata")}
        marker["metadata"]["inspector_output_format_version"] = "v4.3"
        told += [json.dumps({**marker, "dump_stats": {"coll_records": 1, **stats}}), json.dumps(one)]
        told.append(json.dumps({"proxy_trace": {"record_type": "proxy_op", "record_sn": 1}}))
    return told


def test_lines_below_a_marker_are_of_its_communicator(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    old, new = read(tmp_path / "old", HEALTHY), read(tmp_path, below_markers(HEALTHY))
    assert new.notes == old.notes and not new.problems
    assert verdict_of(new).summary == verdict_of(old).summary


def test_what_was_overwritten_counts_as_lost(tmp_path: Path) -> None:
    job = read(tmp_path, below_markers(HEALTHY, coll_dropped_total=40, p2p_dropped_total=2))
    ranks = len({rank_of(line) for line in HEALTHY})
    assert f"{42 * ranks} operations were overwritten before the Inspector wrote them: raise its ring's size" in job.notes
    assert {batch.lost for batch in job.batches} == {42 * ranks}


def test_a_line_without_a_header_takes_none_of_another_file(tmp_path: Path) -> None:
    marked = below_markers(HEALTHY[:4])
    (tmp_path / "a.log").write_text("\n".join(marked) + "\n")
    (tmp_path / "b.log").write_text(marked[1] + "\n")
    [job] = Inspector().read([tmp_path / "a.log", tmp_path / "b.log"])
    assert [line for line in job.problems if "b.log: line 1" in line and "which communicator" in line]


def test_kernels_may_be_children_of_an_operation(tmp_path: Path) -> None:
    """As RCCL's Inspector (v4.1) writes them."""

    def nested(one: Any) -> None:
        times = one["coll_perf"]["event_trace_ts"].pop("kernel_events")
        one["coll_perf"]["events"] = [{"event_type": "KernelCh", "channel_id": 0, "event_trace_ts": each} for each in times]
        one["coll_perf"]["events"].append({"event_type": "ProxyOp", "proxy_id": 1, "proxy_states": []})

    (tmp_path / "old").mkdir()
    old, new = read(tmp_path / "old", HEALTHY), read(tmp_path, changed(nested, HEALTHY))
    assert NO_TIMES not in new.blind and verdict_of(new).summary == verdict_of(old).summary
