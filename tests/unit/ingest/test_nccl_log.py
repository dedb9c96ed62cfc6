"""NCCL's debug logs: those of real jobs (scripts/record_ras_answers.py made them: rank 1 is the culprit), and damaged ones."""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclwatch.cli.foreign import judge_found
from ncclwatch.ingest.base import HEAD_BYTES, Ingested, IngestError
from ncclwatch.ingest.folders import find
from ncclwatch.ingest.moment import CONFIDENCE, UNTOLD
from ncclwatch.ingest.nccl_log import NO_CALLS, NcclLog
from ncclwatch.ingest.nccl_log_lines import KEPT_CALLS, LogReader
from ncclwatch.model.verdict import VerdictClass
from unit.ingest.judged import verdict_of

FIXTURES = Path(__file__).parents[2] / "fixtures" / "nccl"
LOGS = sorted(FIXTURES.glob("*.log.xz"))
SAID = {"stuck": VerdictClass.NOT_ENTERED, "other": VerdictClass.INCONSISTENT, "smaller": VerdictClass.INCONSISTENT}


def name(path: Path) -> str:
    return path.name


def fault(path: Path) -> str:
    return path.name.removesuffix(".log.xz").rpartition("-")[2]


def text(path: Path) -> str:
    return lzma.decompress(path.read_bytes()).decode()


def read(folder: Path, *logs: str) -> Ingested:
    files = []
    for number, log in enumerate(logs):
        files.append(folder / f"{number}.log")
        files[-1].write_text(log)
    [job] = NcclLog().read(files)
    return job


def by_process(log: str) -> list[str]:
    """The log of each rank by itself."""
    pids = dict.fromkeys(re.findall(r"^node:(\d+):", log, re.MULTILINE))
    return ["".join(line for line in log.splitlines(keepends=True) if f"node:{pid}:" in line) for pid in pids]


STUCK = text(FIXTURES / "2.27.5-stuck.log.xz")


@pytest.mark.parametrize("path", [path for path in LOGS if fault(path) in SAID], ids=name)
def test_rank_and_class_of_real_logs(path: Path, tmp_path: Path) -> None:
    verdict = verdict_of(read(tmp_path, text(path)))
    assert (verdict.verdict_class, [culprit.rank for culprit in verdict.culprits]) == (SAID[fault(path)], [1])
    assert verdict.operation is not None and verdict.operation.sequence == 20
    assert verdict.confidence <= CONFIDENCE and UNTOLD in verdict.unobserved


def test_a_program_may_say_much_before_and_between(tmp_path: Path) -> None:
    words = b"step 1 of 1000: loss 2.5\n" * 100_000
    for number, data in enumerate((words[:8192] + STUCK.encode(), words + STUCK.encode(), words)):
        (tmp_path / f"{number}.out").write_bytes(data)
    found = find([tmp_path])
    assert {path.name for path in found.files["nccl-log"]} == {"0.out", "1.out"}


@pytest.mark.parametrize("path", [path for path in LOGS if fault(path) == "init"], ids=name)
def test_who_has_not_come_to_the_creation_is_told(path: Path, tmp_path: Path) -> None:
    verdict = verdict_of(read(tmp_path, text(path)))
    assert "3 of 4 ranks wait in the creation of communicator" in verdict.summary
    assert "rank 1 of this communicator was not observed" in verdict.evidence


@pytest.mark.parametrize("path", [path for path in LOGS if fault(path) == "healthy"], ids=name)
def test_ranks_of_a_healthy_job_called_the_same(path: Path, tmp_path: Path) -> None:
    log = text(path)
    calls = [one.count(" opCount ") for one in by_process(log)]
    least = min(calls)
    # Ranks that run differ by a call when their logs are copied.
    cut = [re.sub(rf"(?s)((?:.*? opCount [^\n]*\n){{{least}}}).*", r"\1", one) for one in by_process(log)]
    assert not verdict_of(read(tmp_path, *cut)).verdict_class.accuses


@pytest.mark.parametrize("path", LOGS, ids=name)
def test_a_log_is_known_by_its_lines(path: Path) -> None:
    assert NcclLog().recognises(text(path).encode()[:HEAD_BYTES], path)


@pytest.mark.parametrize("head", [b"", b"NCCL version 2.27.5+cuda12.9\n", b"a:b:c NCCL INFO x", b"\x80\x04\x95NCCL INFO "])
def test_other_files_are_not_taken_for_one(head: bytes) -> None:
    assert not NcclLog().recognises(head, Path("x"))


def test_a_file_a_rank_says_the_same_as_one_of_all(tmp_path: Path) -> None:
    assert verdict_of(read(tmp_path, *by_process(STUCK))).summary == verdict_of(read(tmp_path, STUCK)).summary


@pytest.mark.parametrize(
    "prefix", ["[rank1]: ", "3: ", "[1,2]<stdout>:", "2026-11-25T14:00:00 worker-3 | ", "[2026-11-25 14:00:00] "]
)
def test_what_launchers_put_before_lines_is_skipped(prefix: str, tmp_path: Path) -> None:
    log = "".join(prefix + line for line in STUCK.splitlines(keepends=True))
    assert [culprit.rank for culprit in verdict_of(read(tmp_path, log)).culprits] == [1]


def test_a_log_that_ends_inside_a_line_accuses_nobody_for_that(tmp_path: Path) -> None:
    """Standard output is written in blocks: the newest lines of a process are held back."""
    logs = by_process(STUCK)
    assert " opCount 14 " not in logs[1]
    logs[1] = logs[1].rstrip("\n")[:-20]
    job = read(tmp_path, *logs)
    assert not verdict_of(job).verdict_class.accuses
    assert any("a line that ends in the middle" in problem for problem in job.problems)


def test_without_calls_nobody_is_accused_and_it_says_why(tmp_path: Path) -> None:
    log = "".join(line for line in STUCK.splitlines(keepends=True) if " opCount " not in line)
    verdict = verdict_of(read(tmp_path, log))
    assert not verdict.verdict_class.accuses and NO_CALLS in verdict.unobserved


def test_warnings_of_who_is_named_stand_beside_it(tmp_path: Path) -> None:
    pid = re.findall(r"^node:(\d+):", by_process(STUCK)[1])[0]
    warning = f"\nnode:{pid}:{pid} [0] net_ib.cc:99 NCCL WARN NET/IB : Got completion from peer with status=12\n"
    verdict = verdict_of(read(tmp_path, STUCK + warning))
    assert f"pid {pid} on node warned 1 times, first: NET/IB : Got completion from peer with status=12" in verdict.evidence


# --- communicators ------------------------------------------------------------------------------------------------------------

HEAD = "node:{0}:{0} [0] NCCL INFO "


def said(pid: int, *lines: str) -> str:
    return "".join(HEAD.format(pid) + line + "\n" for line in lines)


def created(rank: int, *, comm: str = "0xaaa0", comm_id: str = "0x77", nranks: int = 2) -> list[str]:
    life = f"ncclCommInitRank comm {comm} rank {rank} nranks {nranks} cudaDev 0 nvmlDev 0 busId 10000 commId {comm_id} - Init "
    return [life + "START", life + "COMPLETE"]


def call(number: int, *, function: str = "AllReduce") -> str:
    buffers = "sendbuff 0x1 recvbuff 0x2 count 8 datatype 7 op 0 root 0"
    return f"{function}: opCount {number:x} {buffers} comm 0xaaa0 [nranks=2] stream 0x3"


def split(rank: int, colour: int, comm: str) -> str:
    """As 2.24 to 2.29 log it: without an id (src/init.cc)."""
    parent = f"parent 0xaaa0 splitCount 1 color {colour} key {rank}"
    return f"ncclCommSplit comm {comm} rank {rank} nranks 2 cudaDev 0 nvmlDev 0 busId 10000 {parent} - Init COMPLETE"


def test_splits_that_are_logged_without_an_id_are_joined(tmp_path: Path) -> None:
    logs = [said(40 + rank, *created(rank), split(rank, 5, f"0xbb{rank}0")) for rank in range(2)]
    [first, second] = [sample.communicators for batch in read(tmp_path, *logs).batches[:1] for sample in batch.samples]
    assert [one.hash for one in first] == [one.hash for one in second] and len({one.hash for one in first}) == 2


def test_splits_of_two_colours_are_two(tmp_path: Path) -> None:
    logs = [said(40 + rank, *created(rank), split(0, rank, f"0xbb{rank}0")) for rank in range(2)]
    samples = read(tmp_path, *logs).batches[0].samples
    assert samples[0].communicators[1].hash != samples[1].communicators[1].hash


def test_a_destroyed_communicator_is_gone_and_its_address_may_be_used_again(tmp_path: Path) -> None:
    gone = "comm 0xaaa0 rank 0 nranks 2 cudaDev 0 busId 10000 - Destroy COMPLETE"
    log = said(40, *created(0), call(0), call(1), gone, *created(0, comm_id="0x99"), call(0))
    [own] = read(tmp_path, log).batches[0].samples[0].communicators
    assert (own.hash, own.sequence_numbers["AllReduce"]) == (0x99, 1)


def test_who_has_aborted_is_told(tmp_path: Path) -> None:
    gone = "comm 0xaaa0 rank 0 nranks 2 cudaDev 0 busId 10000 - Abort COMPLETE"
    job = read(tmp_path, said(40, *created(0), gone), said(41, *created(1)))
    assert any("pid 40 on node has aborted communicator 0000000000000077" in note for note in job.notes)


def test_older_calls_than_are_kept_still_count(tmp_path: Path) -> None:
    logs = [said(40 + rank, *created(rank), *map(call, range(KEPT_CALLS + 50 - rank))) for rank in range(2)]
    verdict = verdict_of(read(tmp_path, *logs))
    assert (verdict.verdict_class, [culprit.rank for culprit in verdict.culprits]) == (VerdictClass.NOT_ENTERED, [1])


def test_rings_are_those_of_the_communicator_in_creation() -> None:
    [started, complete] = created(0, nranks=4)
    reader = LogReader()
    reader.take(
        (said(40, started, "Ring 00 : 3 -> 0 -> 1", "Ring 01 : 9 -> 0 -> 1", complete, "Ring 02 : 3 -> 0 -> 1"))
        .encode()
        .splitlines(True)
    )
    [process] = reader.processes.values()
    assert [(ring.channel, ring.prev, ring.next) for ring in process.alive[0xAAA0].rings] == [(0, 3, 1)]


# --- damaged ------------------------------------------------------------------------------------------------------------------


def test_a_file_without_a_line_of_nccl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IngestError, match=r"no line of NCCL"):
        read(tmp_path, "nothing\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda log: log.replace("nranks 4", "nranks 999999999"),
        lambda log: log.replace("rank 1 nranks", "rank 7 nranks"),
        lambda log: log.replace("opCount ", "opCount " + "f" * 40),
        lambda log: log.replace("\n", "x" * 20_000 + "\n", 3),
        lambda log: log.replace("node:", "n\u00f6de:"),
    ],
)
def test_absurd_lines_do_no_harm(change: Callable[[str], str], tmp_path: Path) -> None:
    assert read(tmp_path, change(STUCK)).batches


def test_who_has_no_communicator_may_be_who_is_waited_for(tmp_path: Path) -> None:
    [started, _] = created(0)
    verdict = verdict_of(read(tmp_path, said(40, started), said(41, "cudaDriverVersion 12040")))
    assert any("perhaps among those: pid 41 on node" in line for line in verdict.evidence)


def test_beside_an_answer_of_ras_it_still_says_what_nobody_knows(tmp_path: Path) -> None:
    """What one format is blind for another may have seen; whether the job moves neither has."""
    (tmp_path / "all.log").write_text(STUCK)
    (tmp_path / "ras.json").write_bytes((FIXTURES / "2.29.2-stuck.json").read_bytes())
    [judged], _ = judge_found(find([tmp_path]))
    assert sorted(judged.formats) == ["nccl-log", "ras"]
    assert UNTOLD in judged.verdicts[0].unobserved
    assert any("the same rank is named by" in line for line in judged.verdicts[0].evidence)


def without_ids(log: str) -> str:
    """As before 2.18: no line gives a communicator an id, and only its completion is logged."""
    lines = [line for line in log.splitlines(keepends=True) if "Init START" not in line]
    return re.sub(r" commId 0x[0-9a-f]+", "", "".join(lines))


@pytest.mark.parametrize("bus", [True, False])
def test_logs_of_releases_that_give_no_ids_are_joined_by_size_and_order(tmp_path: Path, bus: bool) -> None:
    log = without_ids(STUCK) if bus else re.sub(r"busId [0-9a-f]+ ", "", without_ids(STUCK))
    verdict = verdict_of(read(tmp_path, log))
    assert (verdict.verdict_class, [culprit.rank for culprit in verdict.culprits]) == (VerdictClass.NOT_ENTERED, [1])
    assert verdict.communicator is not None and verdict.communicator.nranks == 4


def test_communicators_without_an_id_are_left_out_where_a_rank_would_be_there_twice(tmp_path: Path) -> None:
    """Two jobs, or two groups of one size: which processes belong together is not in the log."""
    log = without_ids(STUCK)
    other = log.replace("node:", "other:")
    job = read(tmp_path, log, other)
    assert "left out: 8 communicators without an id" in job.problems
    assert not verdict_of(job).verdict_class.accuses


@pytest.mark.parametrize("before", ["[1,0]<stdout>:", "(RayTrainWorker pid=615, ip=10.72.7.6) ", " 2025-02-18 12:54 ", "3: "])
def test_what_others_put_before_a_line_does_not_matter(tmp_path: Path, before: str) -> None:
    verdict = verdict_of(read(tmp_path, "".join(before + line for line in STUCK.splitlines(keepends=True))))
    assert [culprit.rank for culprit in verdict.culprits] == [1]


def test_lines_that_a_container_engine_has_put_into_json_are_read(tmp_path: Path) -> None:
    log = "".join(json.dumps({"log": line, "stream": "stdout"}) + "\n" for line in STUCK.splitlines(keepends=True))
    verdict = verdict_of(read(tmp_path, log))
    assert (verdict.verdict_class, [culprit.rank for culprit in verdict.culprits]) == (VerdictClass.NOT_ENTERED, [1])


def test_a_line_that_another_process_wrote_into_costs_that_process_its_calls(tmp_path: Path) -> None:
    """Seen in logs of launchers that gather standard output: who is named then may have called what was written over."""
    lines = STUCK.splitlines(keepends=True)
    calls = [at for at, line in enumerate(lines) if "AllReduce: opCount" in line]
    last = calls[-1]
    other = next(lines[at] for at in reversed(calls) if lines[at].split()[0] != lines[last].split()[0])
    torn = lines[last][: lines[last].index("opCount")] + other
    job = read(tmp_path, "".join([*lines[:last], torn]))
    assert any("has a line that ends in the middle" in problem for problem in job.problems)
    hosts = {sample.process.host for batch in job.batches for sample in batch.samples}
    assert hosts == {"node"}


def test_calls_as_rccl_logs_them_are_read(tmp_path: Path) -> None:
    log = re.sub(r"(recvbuff \S+) count", r"\1 acc (nil) count", STUCK)
    verdict = verdict_of(read(tmp_path, log))
    assert (verdict.verdict_class, [culprit.rank for culprit in verdict.culprits]) == (VerdictClass.NOT_ENTERED, [1])


def test_a_log_without_its_beginning_that_has_the_first_calls_says_who_is_behind(tmp_path: Path) -> None:
    log = "".join(line for line in STUCK.splitlines(keepends=True) if "Init START" not in line)
    assert "opCount 0 " in log
    verdict = verdict_of(read(tmp_path, log))
    assert (verdict.verdict_class, [culprit.rank for culprit in verdict.culprits]) == (VerdictClass.NOT_ENTERED, [1])


def test_calls_on_communicators_of_unknown_creation_tell_who_has_called_less(tmp_path: Path) -> None:
    """An excerpt of a log, as people pass it on."""
    log = "".join(line for line in STUCK.splitlines(keepends=True) if "opCount" in line)
    verdict = verdict_of(read(tmp_path, log))
    assert not verdict.verdict_class.accuses
    calls = Counter(re.findall(r"^node:(\d+):", log, re.MULTILINE))
    assert any(f"but pid {min(calls, key=lambda pid: calls[pid])} on node (opCount" in line for line in verdict.evidence)
