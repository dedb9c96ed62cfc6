"""NCCL RAS: what real answers say (scripts/record_ras_answers.py made them: rank 1 is the culprit), and damaged ones."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.errors import NcclwatchError
from ncclwatch.ingest.base import HEAD_BYTES, Ingested, IngestError
from ncclwatch.ingest.moment import CONFIDENCE, UNTOLD
from ncclwatch.ingest.ras import Ras, parse_answer
from ncclwatch.model.verdict import VerdictClass
from unit.ingest.judged import verdict_of

FIXTURES = Path(__file__).parents[2] / "fixtures" / "nccl"
ANSWERS = sorted(path for path in FIXTURES.iterdir() if path.suffix in (".json", ".txt"))
JSON = [path for path in ANSWERS if path.suffix == ".json"]
SAID = {
    "frozen": VerdictClass.STOPPED,
    "killed": VerdictClass.DEAD,
    "dead": VerdictClass.DEAD,
    "stuck": VerdictClass.NOT_ENTERED,
}


def name(path: Path) -> str:
    return path.name


def fault(path: Path) -> str:
    return path.stem.rpartition("-")[2]


def read(*files: Path) -> Ingested:
    [job] = Ras().read(files)
    return job


def changed(path: Path, change: Callable[[Any], object], to: Path) -> Path:
    """An answer in JSON after a change."""
    data = json.loads(path.read_bytes())
    change(data)
    to.write_text(json.dumps(data, indent=2))
    return to


@pytest.mark.parametrize("path", [path for path in ANSWERS if fault(path) in SAID], ids=name)
def test_rank_and_class_of_real_answers(path: Path) -> None:
    verdict = verdict_of(read(path))
    # In the job of 2.27.5 no peer of the process that was killed reported it (proxies drop what fails).
    said = VerdictClass.STOPPED if path.stem == "2.27.5-killed" else SAID[fault(path)]
    assert (verdict.verdict_class, [culprit.rank for culprit in verdict.culprits]) == (said, [1])
    assert verdict.planes == ("ras",)
    assert verdict.culprits[0].pid


@pytest.mark.parametrize("path", ANSWERS, ids=name)
def test_an_answer_is_known_by_its_beginning(path: Path) -> None:
    assert Ras().recognises(path.read_bytes()[:HEAD_BYTES], path)


@pytest.mark.parametrize(
    "head", [b"", b'{"nccl_version": "2.29.2"}', b"NCCL version 2.27.5+cuda12.9", b"node:1:1 [0] NCCL INFO x"]
)
def test_other_files_are_not_taken_for_one(head: bytes) -> None:
    assert not Ras().recognises(head, Path("x"))


@pytest.mark.parametrize("path", [path for path in JSON if fault(path) == "healthy"], ids=name)
def test_nobody_is_accused_in_a_healthy_job(path: Path) -> None:
    assert not verdict_of(read(path)).verdict_class.accuses


def test_text_of_a_healthy_job_names_no_rank_and_says_so() -> None:
    job = read(FIXTURES / "2.27.5-healthy.txt")
    assert not job.batches[0].samples
    assert "RAS: 1 communicator of 4 ranks: RUNNING, OK: its text names no rank of them" in job.notes


def test_json_and_text_say_the_same_of_counts() -> None:
    by_json, by_text = (parse_answer((FIXTURES / f"2.29.2-stuck.{end}").read_bytes(), end, 0.0) for end in ("json", "txt"))
    counts = [
        {rank.rank: (rank.counts or {})["AllReduce"] for rank in answer.communicators[0].ranks} for answer in (by_json, by_text)
    ]
    assert counts == [{0: 21, 1: 20, 2: 21, 3: 21}] * 2
    assert by_json.version == by_text.version == (2, 29, 2)


# --- time --------------------------------------------------------------------------------------------------------------------


def later(data: Any) -> None:
    data["timestamp"] = re.sub(r"\d\d$", "59", data["timestamp"])


def later_and_moved(data: Any) -> None:
    later(data)
    data["communicators"][0]["ranks"][0]["collective_counts"]["AllReduce"] += 1


def test_one_answer_does_not_show_whether_the_job_moves() -> None:
    verdict = verdict_of(read(FIXTURES / "2.29.2-stuck.json"))
    assert verdict.confidence <= CONFIDENCE and UNTOLD in verdict.unobserved


def test_a_second_answer_shows_that_nothing_moves(tmp_path: Path) -> None:
    first = FIXTURES / "2.29.2-stuck.json"
    verdict = verdict_of(read(changed(first, later, tmp_path / "later.json"), first))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED and verdict.confidence > CONFIDENCE
    assert UNTOLD not in verdict.unobserved


@pytest.mark.parametrize("case", ["stuck", "frozen"])
def test_a_job_that_moved_between_two_answers_accuses_nobody(case: str, tmp_path: Path) -> None:
    first = FIXTURES / f"2.29.2-{case}.json"
    assert verdict_of(read(first, changed(first, later_and_moved, tmp_path / "2"))).verdict_class is VerdictClass.RUNNING


def test_text_has_no_time_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "ras.txt"
    file.write_bytes((FIXTURES / "2.27.5-stuck.txt").read_bytes())
    os.utime(file, (1_700_000_000, 1_700_000_000))
    assert read(file).batches[0].wall_ns == 1_700_000_000 * 10**9


def test_answers_of_two_jobs_are_told_apart() -> None:
    jobs = Ras().read([FIXTURES / "2.29.2-stuck.json", FIXTURES / "2.29.2-frozen.json"])
    assert {verdict_of(job).verdict_class for job in jobs} == {VerdictClass.NOT_ENTERED, VerdictClass.STOPPED}


# --- who does not answer ------------------------------------------------------------------------------------------------


def without_comma(data: bytes) -> bytes:
    """As 2.28.7 and 2.28.9 write it (``jsonWriteMissingRank``)."""
    head, _, missing = data.partition(b'"missing_ranks"')
    return head + b'"missing_ranks"' + re.sub(rb'("nvml_dev": \d+),', rb"\1", missing)


def test_the_missing_comma_of_2_28_is_put_in(tmp_path: Path) -> None:
    whole = (FIXTURES / "2.29.2-dead.json").read_bytes()
    file = tmp_path / "old.json"
    file.write_bytes(without_comma(whole))
    with pytest.raises(json.JSONDecodeError):
        json.loads(file.read_bytes())
    assert verdict_of(read(file)).verdict_class is VerdictClass.DEAD


def test_who_has_called_less_may_wait_for_who_does_not_answer(tmp_path: Path) -> None:
    def behind(data: Any) -> None:
        data["communicators"][0]["ranks"][1]["collective_counts"]["AllReduce"] -= 1

    verdict = verdict_of(read(changed(FIXTURES / "2.29.2-frozen.json", behind, tmp_path / "x")))
    assert [culprit.rank for culprit in verdict.culprits] == [1]


def test_errors_of_the_others_do_not_hide_who_does_not_answer() -> None:
    data = json.loads((FIXTURES / "2.29.2-killed.json").read_bytes())
    assert any(rank["status"]["async_error"] for rank in data["communicators"][0]["ranks"])
    verdict = verdict_of(read(FIXTURES / "2.29.2-killed.json"))
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert any("stopped, has ended, or is cut off" in line for line in verdict.unobserved)


def test_a_minority_that_answers_accuses_nobody(tmp_path: Path) -> None:
    def most_silent(data: Any) -> None:
        communicator = data["communicators"][0]
        gone = [communicator["ranks"].pop() for _ in range(2)]
        communicator["missing_ranks"] += [{**rank, "status": {"unresponsive": True, "considered_dead": False}} for rank in gone]

    job = read(changed(FIXTURES / "2.29.2-frozen.json", most_silent, tmp_path / "x"))
    assert not verdict_of(job).verdict_class.accuses
    assert any("may be the one that is cut off" in note for note in job.notes)


def test_who_answers_and_does_not_hold_the_communicator_is_told(tmp_path: Path) -> None:
    def left(data: Any) -> None:
        data["communicators"][0]["missing_ranks"][0]["status"] = {"unresponsive": False, "considered_dead": False}

    job = read(changed(FIXTURES / "2.29.2-frozen.json", left, tmp_path / "x"))
    assert not verdict_of(job).verdict_class.accuses
    assert any("does not hold it" in note for note in job.notes)


def test_an_error_of_nccl_is_named_where_all_answer(tmp_path: Path) -> None:
    def fails(data: Any) -> None:
        data["communicators"][0]["ranks"][2]["status"]["async_error"] = 2

    verdict = verdict_of(read(changed(FIXTURES / "2.29.2-healthy.json", fails, tmp_path / "x")))
    assert (verdict.verdict_class, verdict.culprits[0].rank) == (VerdictClass.ERROR, 2)
    assert "ncclSystemError" in verdict.culprits[0].reason


def test_a_communicator_in_creation_is_seen(tmp_path: Path) -> None:
    def creating(data: Any) -> None:
        for rank in data["communicators"][0]["ranks"]:
            rank["status"]["init_state"] = 7

    verdict = verdict_of(read(changed(FIXTURES / "2.29.2-healthy.json", creating, tmp_path / "x")))
    assert "creation of communicator" in verdict.summary


def test_devices_of_one_process_are_ranks_by_themselves(tmp_path: Path) -> None:
    def one_process(data: Any) -> None:
        for number, rank in enumerate(data["communicators"][0]["ranks"]):
            rank["pid"], rank["cuda_dev"] = 77, number

    verdict = verdict_of(read(changed(FIXTURES / "2.29.2-stuck.json", one_process, tmp_path / "x")))
    assert [(culprit.rank, culprit.gpu, culprit.pid) for culprit in verdict.culprits] == [(1, 1, 77)]


# --- text ---------------------------------------------------------------------------------------------------------------

OLD = """\
NCCL version 2.24.3 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2       4-8         8         8   RUNNING  MISMATCH
    1         3         1         2         2         6   RUNNING      OK

Warnings
========

#0-0 (0123456789abcdef) MISMATCH
  Communicator ranks have different collective operation counts
  7 ranks have launched up to operation 31
  Rank 5 has launched up to operation 30 -- GPU 1 (NVML 5) managed by process 42 on node 10.0.0.2
"""
"""As 2.24.3 writes it (``src/ras/client_support.cc``): one count for all collectives."""


def test_text_of_2_24_has_one_count(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(OLD)
    job = read(tmp_path / "x")
    verdict = verdict_of(job)
    assert (verdict.verdict_class, verdict.culprits[0].rank, verdict.culprits[0].host) == (
        VerdictClass.NOT_ENTERED,
        5,
        "10.0.0.2",
    )
    assert "RAS: 3 communicators of 2 ranks: RUNNING, OK: its text names no rank of them" in job.notes


def test_counts_of_ranks_that_text_does_not_name_stay_unknown(tmp_path: Path) -> None:
    two = OLD.replace("  7 ranks have", "  4 ranks have launched up to operation 32\n  3 ranks have")
    (tmp_path / "x").write_text(two)
    job = read(tmp_path / "x")
    counted = [sample.communicators[0].rank for sample in job.batches[0].samples if sample.communicators[0].sequence_numbers]
    assert counted == [5]
    assert any("does not tell which of 7 ranks" in problem for problem in job.problems)


@pytest.mark.parametrize("status", ["ABORT", "FINALIZE", "INIT"])
def test_status_in_text(status: str) -> None:
    said = f"  Rank 5 has status {status} -- GPU 1 managed by process 42 on node 10.0.0.2\n"
    answer = parse_answer((OLD + "\n  Communicator ranks have different status\n" + said).encode(), "x", 0.0)
    [rank] = [rank for rank in answer.communicators[0].ranks if rank.rank == 5]
    assert {"ABORT": rank.aborted, "FINALIZE": rank.finalize_called, "INIT": rank.init_state}[status]


# --- damaged ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
def test_what_is_cut_off_is_refused_in_one_line(keep: float, tmp_path: Path) -> None:
    whole = (FIXTURES / "2.29.2-stuck.json").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(IngestError) as caught:
        Ras().read([tmp_path / "cut"])
    assert str(tmp_path / "cut") in str(caught.value) and "\n" not in str(caught.value)


def test_one_bad_file_among_good_ones_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(b'{"nccl_version": "2.29.2", "communicators": [')
    job = read(tmp_path / "cut", FIXTURES / "2.29.2-stuck.json")
    assert verdict_of(job).verdict_class is VerdictClass.NOT_ENTERED
    assert [str(tmp_path / "cut") in problem for problem in job.problems] == [True]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["communicators"][0].update(size=10**30),
        lambda data: data["communicators"][0]["ranks"][0].update(pid=-(10**20)),
        lambda data: data["communicators"][0]["ranks"][0]["collective_counts"].update(AllReduce=-1),
        lambda data: data.update(communicators=5),
    ],
)
def test_absurd_numbers_are_refused(change: Callable[[Any], object], tmp_path: Path) -> None:
    with pytest.raises(NcclwatchError):
        read(changed(FIXTURES / "2.29.2-stuck.json", change, tmp_path / "x"))


def test_a_rank_outside_its_communicator_is_left_out(tmp_path: Path) -> None:
    def outside(data: Any) -> None:
        data["communicators"][0]["ranks"][3]["rank"] = 99

    job = read(changed(FIXTURES / "2.29.2-stuck.json", outside, tmp_path / "x"))
    assert any("rank 99 of 4" in problem for problem in job.problems)
    assert len(job.batches[0].samples) == 3


def test_what_the_connection_said_before_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"SERVER PROTOCOL 2\nOK\nOK\n" + (FIXTURES / "2.29.2-stuck.json").read_bytes())
    assert verdict_of(read(tmp_path / "x")).verdict_class is VerdictClass.NOT_ENTERED


def test_text_that_names_nobody_is_a_look_at_the_same_job(tmp_path: Path) -> None:
    """A job that runs: its ranks differ by a call in one answer and not in the other."""
    files = [tmp_path / "1", tmp_path / "2"]
    for file, name in zip(files, ("2.27.5-stuck.txt", "2.27.5-healthy.txt"), strict=True):
        file.write_bytes((FIXTURES / name).read_bytes())
    os.utime(files[1], (files[0].stat().st_atime, files[0].stat().st_mtime + 9))
    for order in (files, files[::-1]):
        assert not verdict_of(read(*order)).verdict_class.accuses


def test_who_is_ahead_in_one_collective_and_behind_in_another_called_something_else(tmp_path: Path) -> None:
    """Ranks are counted one after the other, which explains a call more or less, and never both."""

    def other(data: Any) -> None:
        counts = data["communicators"][0]["ranks"][1]["collective_counts"]
        counts["AllGather"], counts["AllReduce"] = 1, counts["AllReduce"] - 1

    verdict = verdict_of(read(changed(FIXTURES / "2.29.2-healthy.json", other, tmp_path / "x")))
    assert verdict.verdict_class is VerdictClass.INCONSISTENT
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert any("has called AllGather once" in line for line in verdict.evidence)


# --- text as people pass it on -----------------------------------------------------------------------------------------------

TABLE = """Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  {}

"""
AHEAD = """Warnings
========

#0-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  30 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 managed by process 323032 on node 10.0.0.4
  Rank 13 -- GPU 5 managed by process 323033 on node 10.0.0.4
"""
MISSING = """Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 10.0.0.3 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21
"""


def passed_on(folder: Path, *answers: str) -> Ingested:
    """Answers from their summary on, a minute apart."""
    files = []
    for number, answer in enumerate(answers):
        files.append(folder / f"{number}.txt")
        files[-1].write_text(answer)
        os.utime(files[-1], (1_800_000_000 + 60 * number,) * 2)
        assert Ras().recognises(files[-1].read_bytes()[:HEAD_BYTES], files[-1])
    [job] = Ras().read(files)
    return job


def test_one_look_at_most_ranks_behind_a_few_accuses_nobody(tmp_path: Path) -> None:
    verdict = verdict_of(passed_on(tmp_path, TABLE.format("MISMATCH") + AHEAD))
    assert verdict.verdict_class is VerdictClass.UNKNOWN and not verdict.culprits
    assert verdict.summary.startswith("ranks 12-13 have launched more than the other 30 of 32")


BEHIND = """Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  29 ranks have launched up to operation {}
  3 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 10.0.0.1
  Rank 2 -- GPU 2 managed by process 483074 on node 10.0.0.1
  Rank 3 -- GPU 3 managed by process 483075 on node 10.0.0.1
"""


def test_one_look_at_several_ranks_behind_by_one_call_accuses_nobody(tmp_path: Path) -> None:
    """NCCL's user guide shows such an answer of a job that runs."""
    verdict = verdict_of(passed_on(tmp_path, TABLE.format("MISMATCH") + BEHIND.format(6650)))
    assert verdict.verdict_class is VerdictClass.UNKNOWN and not verdict.culprits
    assert any("ranks 0, 2, 3 called collective 6649 times" in line for line in verdict.evidence)


def test_several_ranks_behind_are_named_where_they_stay_or_are_far_behind(tmp_path: Path) -> None:
    one = TABLE.format("MISMATCH") + BEHIND.format(6650)
    far = TABLE.format("MISMATCH") + BEHIND.format(6655)
    for folder, answers in ((tmp_path / "stay", (one, one)), (tmp_path / "far", (far,))):
        folder.mkdir()
        verdict = verdict_of(passed_on(folder, *answers))
        assert (verdict.verdict_class, [one.rank for one in verdict.culprits]) == (VerdictClass.NOT_ENTERED, [0, 2, 3])


def test_text_that_begins_at_its_table_is_read(tmp_path: Path) -> None:
    table = TABLE[TABLE.index("Communicators") :]
    verdict = verdict_of(passed_on(tmp_path, table.format("INCOMPLETE") + MISSING))
    assert (verdict.verdict_class, verdict.culprits[0].rank) == (VerdictClass.STOPPED, 21)


def test_text_that_names_no_rank_says_what_it_found(tmp_path: Path) -> None:
    verdict = verdict_of(passed_on(tmp_path, TABLE.format("OK")))
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert verdict.summary == "RAS names no rank: 1 communicator of 32 ranks: RUNNING, OK"


DEAD_PROCESS = """Communicators... (0.00s)
=============

No communicator data collected!

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3748990 on node node1 managing GPU 3
"""


def test_a_dead_process_that_no_communicator_misses_is_not_accused(tmp_path: Path) -> None:
    """A job that has gone on without it, on communicators that it made anew."""
    verdict = verdict_of(passed_on(tmp_path, TABLE.format("OK") + DEAD_PROCESS[DEAD_PROCESS.index("Errors") :]))
    assert verdict.verdict_class is VerdictClass.UNKNOWN and not verdict.culprits


MONITORED = """RAS Monitor Mode - watching for peer changes (Ctrl+C to exit)...
================================================================

 [2025-12-19 13:07:01] PEER_NEW: Process 11 on node node0 managing GPU 0
 [2025-12-19 13:07:07] PEER_DEAD: Process 3748990 on node node1 managing GPU 3
"""


@pytest.mark.parametrize("answer", [DEAD_PROCESS, MONITORED], ids=["answer", "monitor"])
def test_a_dead_process_is_named_where_no_communicator_is_left(tmp_path: Path, answer: str) -> None:
    verdict = verdict_of(passed_on(tmp_path, answer))
    [culprit] = verdict.culprits
    assert (verdict.verdict_class, culprit.rank) == (VerdictClass.DEAD, None)
    assert (culprit.host, culprit.pid, culprit.gpu) == ("node1", 3748990, 3)
    assert "pid 3748990 on node1 holds up the job" in verdict.summary


def test_ranks_that_the_text_does_not_name_have_no_made_up_host(tmp_path: Path) -> None:
    answer = TABLE.format("MISMATCH") + AHEAD
    verdict = verdict_of(passed_on(tmp_path, answer, answer))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert {(culprit.host, culprit.pid) for culprit in verdict.culprits} == {("", None)}
    assert "unnamed" not in verdict.summary + "".join(verdict.evidence)


def test_a_missing_rank_is_the_one_missing_process(tmp_path: Path) -> None:
    verdict = verdict_of(passed_on(tmp_path, TABLE.format("INCOMPLETE") + MISSING))
    [culprit] = verdict.culprits
    assert (culprit.rank, culprit.pid, culprit.host) == (21, 3487984, "10.0.0.3")
    assert verdict.stage == "" and verdict.communicator is not None and not verdict.communicator.role


def test_an_answer_after_the_end_does_not_hide_what_was_there_before(tmp_path: Path) -> None:
    """A watchdog has taken the job down between two answers."""
    before = tmp_path / "0.json"
    before.write_bytes((FIXTURES / "2.29.2-frozen.json").read_bytes())
    after = json.loads(before.read_text())
    later(after)
    after |= {"communicators": [], "communicators_count": 0}
    (tmp_path / "1.json").write_text(json.dumps(after))
    [job] = Ras().read([before, tmp_path / "1.json"])
    verdict = verdict_of(job)
    assert (verdict.verdict_class, [culprit.rank for culprit in verdict.culprits]) == (VerdictClass.STOPPED, [1])
    assert any("no communicator any more" in note for note in job.notes)
