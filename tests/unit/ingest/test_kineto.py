"""Traces of PyTorch's profiler: whose GPU comes late, and what a trace does not prove."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.ingest.base import HEAD_BYTES, IngestError
from ncclwatch.ingest.folders import format_of
from ncclwatch.ingest.json_stream import members, opened
from ncclwatch.ingest.kernels import function_of
from ncclwatch.ingest.kineto import Kineto
from ncclwatch.model.events import Function
from ncclwatch.model.verdict import VerdictClass
from unit.ingest.judged import verdict_of
from unit.ingest.made_kineto import events, write
from unit.ingest.made_rank_logs import judged

FORMAT = Kineto()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seq", [False, True])
def test_the_rank_whose_gpu_comes_last_is_named(tmp_path: Path, packed: bool, seq: bool) -> None:
    files = [write(tmp_path, rank, 4, events(rank, 4, late=2, seq=seq), packed=packed) for rank in range(4)]
    job = FORMAT.read(files)[0]
    last = list(judged(job, ask=False))[-1]
    assert last.verdict_class is VerdictClass.SLOW_COMPUTATION
    assert [culprit.rank for culprit in last.culprits] == [2]
    assert any("came last to 30 of 30 collectives" in line for line in last.evidence)
    assert "pid" not in " ".join((last.summary, *last.evidence, *last.next_steps))


def test_a_healthy_job_accuses_nobody(tmp_path: Path) -> None:
    files = [write(tmp_path, rank, 4, events(rank, 4)) for rank in range(4)]
    assert not any(verdict.verdict_class.accuses for verdict in judged(FORMAT.read(files)[0]))


def test_a_rank_whose_window_is_shorter_is_not_said_to_hang(tmp_path: Path) -> None:
    """Kernels that were not recorded prove nothing."""
    files = [write(tmp_path, rank, 4, events(rank, 4, rounds=10 if rank == 1 else 30)) for rank in range(4)]
    job = FORMAT.read(files)[0]
    assert not any(verdict.verdict_class.accuses for verdict in judged(job))
    assert any("no hang is told" in line for line in job.blind)


def test_names_of_older_releases_and_traces_without_calls_are_read(tmp_path: Path) -> None:
    files = [write(tmp_path, r, 2, events(r, 2, late=1, old_names=True, calls=False), info=False) for r in range(2)]
    assert [culprit.rank for culprit in list(judged(FORMAT.read(files)[0], ask=False))[-1].culprits] == [1]


def test_kernels_of_no_known_group_are_counted_and_left_out(tmp_path: Path) -> None:
    made = events(0, 2, calls=False)
    for event in made:
        for key in [key for key in event.get("args", {}) if key.startswith("Process Group")]:
            del event["args"][key]
    job = FORMAT.read([write(tmp_path, 0, 2, made, info=False)])[0]
    assert any("hold no NCCL kernel of a known communicator" in note for note in job.notes)
    assert not job.batches


def test_damage_is_one_line_with_file_and_place(tmp_path: Path) -> None:
    good = [write(tmp_path, rank, 4, events(rank, 4)) for rank in range(3)]
    cut = tmp_path / "rank3.pt.trace.json"
    cut.write_bytes(good[0].read_bytes()[:5_000])
    job = FORMAT.read([*good, cut])[0]
    assert len(job.problems) == 1
    assert "rank3.pt.trace.json: at character " in job.problems[0]
    packed = tmp_path / "alone" / "rank0.json.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(good[0].read_bytes())[:300])
    with pytest.raises(IngestError, match=r"rank0\.json\.gz: at character \d+: (cannot be unpacked|a value is no JSON)"):
        FORMAT.read([packed])


@pytest.mark.parametrize(
    "text",
    [
        "{", '{"traceEvents": [{"ph": "X"',
        '{"traceEvents": [' + "[" * 200_000, '{"traceEvents": ' + '{"a":' * 200_000, '{"a" 1}',
        '{"traceEvents": [1, 2 3]}', '{"traceEvents": [NaN', "[1, 2", '{"traceEvents": "', '{1: 2}x', "",
    ],
)  # fmt: skip
def test_hostile_text_ends_with_file_and_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(IngestError, match=r"x\.json: at character"), opened(path) as file:
        list(members(path, file, "traceEvents"))


def test_items_are_those_of_the_library_wherever_parts_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"a": -12.5e3, "traceEvents": [{"x": 'å\\n"', "y": [1, {}, []]}, 17, None, "ende"], "z": True, "n": 123456}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document, ensure_ascii=False))
    for part in (1, 2, 3, 7, 1 << 20):
        monkeypatch.setattr("ncclwatch.ingest.json_stream.PART", part)
        with opened(path) as file:
            found = list(members(path, file, "traceEvents"))
        values = [value for name, value in found if name == "traceEvents"]
        assert values == document["traceEvents"]
        assert {name: value for name, value in found if name != "traceEvents"} == {"a": -12500.0, "z": True, "n": 123456}


def test_the_format_is_told_by_content(tmp_path: Path) -> None:
    for packed in (False, True):
        head = write(tmp_path, 0, 2, events(0, 2), packed=packed).read_bytes()[:HEAD_BYTES]
        assert FORMAT.recognises(head, tmp_path / "x")
        assert (known := format_of(tmp_path / ("rank0.pt.trace.json.gz" if packed else "rank0.pt.trace.json"))) is not None
        assert known.name == "kineto"
    assert not FORMAT.recognises(b'{"version": "2.10", "entries": []}', tmp_path / "x")
    assert not FORMAT.recognises(b"\x1f\x8bgarbage", tmp_path / "x")


def nameless(
    made: list[dict[str, Any]], kernel: str = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
) -> list[dict[str, Any]]:
    """Events as PyTorch before 2.3 wrote them: nothing says of which group a kernel is."""
    kept = ("External id", "correlation", "stream")
    for event in made:
        event["args"] = {key: value for key, value in event["args"].items() if key in kept}
        if event.get("cat") == "kernel" and event["name"].startswith("nccl"):
            event["name"] = kernel
    return made


@pytest.mark.parametrize("skipped", [0, 3])
def test_where_no_group_is_told_ranks_are_joined_by_their_streams(tmp_path: Path, skipped: int) -> None:
    for rank in range(4):
        made = nameless(events(rank, 4, late=2, seq=False))
        write(tmp_path, rank, 4, made[2 + 2 * skipped :] if rank == 1 else made, packed=True)
    verdict = verdict_of(FORMAT.read(sorted(tmp_path.iterdir()))[0])
    assert verdict.verdict_class is VerdictClass.SLOW_COMPUTATION
    assert [culprit.rank for culprit in verdict.culprits] == [2]


@pytest.mark.parametrize(("calls", "named"), [("nccl:all_to_all", [1]), ("nccl:send 0->1", []), ("", [])])
def test_kernels_of_messages_are_exchanges_only_where_the_trace_says_so(tmp_path: Path, calls: str, named: list[int]) -> None:
    for rank in range(2):
        made = nameless(events(rank, 2, late=1, seq=False), "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)")
        made.append({"ph": "X", "cat": "user_annotation", "name": calls, "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.0})
        write(tmp_path, rank, 2, made)
    assert [culprit.rank for culprit in verdict_of(FORMAT.read(sorted(tmp_path.iterdir()))[0]).culprits] == named


def test_a_list_of_ranks_that_is_cut_follows_from_its_beginning_and_distance(tmp_path: Path) -> None:
    for rank in range(3):
        made = events(rank, 3, late=0)
        for event in made:
            if "Process Group Ranks" in event["args"]:
                event["args"] |= {"Process Group Ranks": "[0, 1, ..., 2]", "Global rank start": 0, "Global rank stride": 1}
        write(tmp_path, rank, 3, made, info=False)
    assert [culprit.rank for culprit in verdict_of(FORMAT.read(sorted(tmp_path.iterdir()))[0]).culprits] == [0]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", Function.ALL_REDUCE),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclWorkElem)", Function.REDUCE_SCATTER),
        ("ncclAllGatherRingLLKernel_copy_i8(ncclColl)", Function.ALL_GATHER),
        ("ncclSymkDevKernel_AllGather_LL", Function.ALL_GATHER),
        ("ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_f32", Function.ALL_REDUCE),
        ("ncclDevKernel_Broadcast_RING_LL", Function.BROADCAST),
        ("ncclDevKernel_Generic_4", None),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", None),
    ],
)
def test_kernels_of_all_releases_are_known_by_name(name: str, function: Function | None) -> None:
    assert function_of(name) is function


def test_a_communicators_number_joins_ranks_though_nothing_says_who_is_in_it(tmp_path: Path) -> None:
    """Ends that differ by more than streams that are joined by them may."""
    files = []
    for rank in range(3):
        made = events(rank, 3, late=1, seq=False)
        for number, event in enumerate(made):
            event["args"].pop("Process Group Ranks", None)
            event["args"]["Comms Id"] = 4711
            event["ts"] = event.get("ts", 0.0) + (
                900.0 * ((number // 2 * 7 + rank * 3) % 5) if event.get("cat") == "kernel" else 0
            )
        files.append(write(tmp_path, rank, 3, made, info=False))
    job = FORMAT.read(files)[0]
    last = list(judged(job, ask=False))[-1]
    assert [culprit.rank for culprit in last.culprits] == [1]
    assert any("collectives of communicator 4711" in note for note in job.notes)
