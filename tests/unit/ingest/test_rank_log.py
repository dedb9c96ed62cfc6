"""Rank logs judged: who hangs, who is slow, what is missing, and what the ends of logs do not prove."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ncclwatch.errors import ExitStatus
from ncclwatch.ingest.base import HEAD_BYTES, IngestError
from ncclwatch.ingest.rank_log import RankLogs
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.simulate.rank_logs import write_rank_logs
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import load
from unit.ingest.made_rank_logs import bare, judged, line, replicated_job, tensor_job, write

FORMAT = RankLogs()
SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


def config(folder: Path, tp: int, pp: int, world: int) -> None:
    (folder / "config.yaml").write_text(f"TP: {tp}\nPP: {pp}\nworld_size: {world}\n")


def last_of(files: list[Path]) -> Verdict:
    """What stands at the end, of a job of four tensor groups."""
    config(files[0].parent, 2, 1, 8)
    return list(judged(FORMAT.read(files)[0], ask=False))[-1]


def test_a_rank_that_calls_no_more_is_named_by_the_calls_of_its_peers(tmp_path: Path) -> None:
    files = write(tmp_path, tensor_job(stops={5: 197}))
    config(tmp_path, 2, 1, 6)
    job = FORMAT.read(files)[0]
    last = list(judged(job))[-1]
    assert last.verdict_class is VerdictClass.NOT_ENTERED
    assert [culprit.rank for culprit in last.culprits] == [5]
    assert last.culprits[0].pid is None
    assert "pid" not in " ".join((last.summary, *last.evidence, *last.next_steps))


def test_without_a_division_the_logs_tell_it_themselves(tmp_path: Path) -> None:
    files = write(tmp_path, tensor_job(stops={5: 197}))
    job = FORMAT.read(files)[0]
    assert any("TP 2 x PP 1 x DP 3 (from the logs themselves)" in note for note in job.notes)
    assert [culprit.rank for culprit in list(judged(job))[-1].culprits] == [5]


def test_hashes_of_groups_need_no_division(tmp_path: Path) -> None:
    files = write(tmp_path, tensor_job(stops={5: 197}, group=True))
    assert [culprit.rank for culprit in list(judged(FORMAT.read(files)[0]))[-1].culprits] == [5]


def test_a_job_that_called_the_same_everywhere_accuses_nobody(tmp_path: Path) -> None:
    job = FORMAT.read(write(tmp_path, tensor_job()))[0]
    assert not any(verdict.verdict_class.accuses for verdict in judged(job))


def test_who_becomes_slow_is_named_with_the_stretch_and_recovers(tmp_path: Path) -> None:
    lines = tensor_job(iterations=30, slow=(2, 15))
    job = FORMAT.read(write(tmp_path, lines))[0]
    said = [verdict for verdict in judged(job, ask=False) if verdict.verdict_class.accuses]
    assert said
    assert {verdict.verdict_class for verdict in said} == {VerdictClass.SLOW_COMPUTATION}
    assert {culprit.rank for verdict in said for culprit in verdict.culprits} == {2}
    assert any("rank 2 calls last in its tensor group (ranks 2, 3)" in note for note in job.notes)


def test_who_was_late_from_the_beginning_is_told_by_other_groups_of_the_kind(tmp_path: Path) -> None:
    files = write(tmp_path, replicated_job(late=5))
    verdict = last_of(files)
    assert (verdict.verdict_class, [one.rank for one in verdict.culprits]) == (VerdictClass.SLOW_COMPUTATION, [5])
    assert "in other groups of that kind 0%" in "".join(verdict.evidence)


def test_a_tensor_group_that_takes_longer_than_those_that_do_the_same_is_told_and_nobody_accused(tmp_path: Path) -> None:
    files = write(tmp_path, replicated_job(slow=1))
    verdict = last_of(files)
    assert (verdict.verdict_class, [one.rank for one in verdict.culprits]) == (VerdictClass.UNKNOWN, [2, 3])
    assert "3.0 times as long" in verdict.evidence[0]


def test_who_stood_still_once_amid_its_layers_is_told_also_by_older_lines(tmp_path: Path) -> None:
    files = write(tmp_path, bare(replicated_job(pauses=4)))
    verdict = last_of(files)
    assert (verdict.verdict_class, [one.rank for one in verdict.culprits]) == (VerdictClass.SLOW_COMPUTATION, [4])
    assert "for 2.0 s" in verdict.summary


def test_replicas_that_are_alike_name_nobody(tmp_path: Path) -> None:
    files = write(tmp_path, replicated_job())
    assert not last_of(files).culprits


def test_lines_that_were_overwritten_are_a_gap_and_no_missing_calls(tmp_path: Path) -> None:
    """The ring keeps the newest lines before a save: a rank that lacks many in the middle has called them all the same."""
    lines = tensor_job(iterations=20)
    cut = [one for number, one in enumerate(lines[4]) if not 100 <= number < 400]
    lines[4] = [one.replace("save_count 1]", "save_count 2]") if number >= 100 else one for number, one in enumerate(cut)]
    job = FORMAT.read(write(tmp_path, lines))[0]
    assert not any(verdict.verdict_class.accuses for verdict in judged(job))
    assert max(batch.lost for batch in job.batches if batch.host == "rank_4.log") == 300
    called = [batch for batch in job.batches if batch.events is not None and len(batch.events)]
    # Ranks that lack none are looked at together; this one by itself.
    assert {batch.host for batch in called} == {"", "rank_4.log"}
    assert len([batch for batch in job.batches if batch.looked and not batch.host]) == len(
        {batch.time_ns for batch in job.batches}
    )


def test_a_log_that_was_not_saved_to_the_end_accuses_nobody(tmp_path: Path) -> None:
    lines = tensor_job(iterations=40, calls=12)
    lines[3] = lines[3][: len(lines[3]) // 3]
    job = FORMAT.read(write(tmp_path, lines))[0]
    assert any("rank_3.log: its log ends while its peers go on" in note for note in job.notes)
    assert not any(verdict.verdict_class.accuses for verdict in judged(job))


def test_one_line_that_one_log_lacks_at_the_very_end_is_told_and_accuses_nobody(tmp_path: Path) -> None:
    lines = tensor_job()
    for rank, own in lines.items():
        own[-1] = own[-1].replace("[175", "[175")
        last = float(own[-1].split("[")[2].split("]")[0]) - 1_755_590_100
        if rank != 5:
            own.append(line(last + 0.0005, rank, "AllReduce", 1 << 20, 0x5010 + rank * 0x100, 12))
    job = FORMAT.read(write(tmp_path, lines))[0]
    assert any("those of ranks 5 lack the last call" in note for note in job.notes)
    assert not any(verdict.verdict_class.accuses for verdict in judged(job))


def test_files_that_were_copied_just_then_prove_no_standstill(tmp_path: Path) -> None:
    """The times of the files say until when nothing more was written; a copy that keeps them says no more than that."""
    lines = tensor_job(stops={5: 197})
    files = write(tmp_path, lines)
    end = 1_755_590_100 + 6
    for file in files:
        os.utime(file, (end, end))
    job = FORMAT.read(files)[0]
    assert not any(verdict.verdict_class.accuses for verdict in judged(job, ask=False))
    assert [culprit.rank for culprit in list(judged(job))[-1].culprits] == [5]


def test_a_division_that_does_not_fit_is_one_line_with_file_and_exit_3(tmp_path: Path) -> None:
    files = write(tmp_path, tensor_job(ranks=4, iterations=2))
    config(tmp_path, 3, 1, 8)
    with pytest.raises(IngestError, match=r"config\.yaml: TP 3 x PP 1 does not divide a world of 8") as told:
        FORMAT.read(files)
    assert told.value.status == ExitStatus.TARGET
    (tmp_path / "config.yaml").write_text("TP: 0\nworld_size: 8\n")
    with pytest.raises(IngestError, match=r"config\.yaml:1: tp is 0"):
        FORMAT.read(files)


def test_what_cannot_be_read_is_told_with_file_and_line(tmp_path: Path) -> None:
    lines = tensor_job(ranks=4, iterations=4)
    lines[1].insert(6, "not a line\n")
    files = write(tmp_path, lines)
    job = FORMAT.read([*files, tmp_path / "rank_9.log"])[0]
    assert any("rank_1.log: 1 of" in problem and "line 7" in problem for problem in job.problems)
    assert any("rank_9.log: No such file" in problem for problem in job.problems)
    empty = tmp_path / "other" / "rank_0.log"
    empty.parent.mkdir()
    empty.write_bytes(b"\0" * 10_000)
    with pytest.raises(IngestError, match=r"other/rank_0\.log: 1 of 1 lines are no calls"):
        FORMAT.read([empty])


def test_a_huge_file_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write(tmp_path, tensor_job(ranks=4, iterations=20))
    monkeypatch.setattr("ncclwatch.ingest.rank_log.MOST_BYTES", 4 * 20_000)
    job = FORMAT.read(files)[0]
    assert sum("were not read" in problem for problem in job.problems) == 4
    assert job.batches


def test_the_format_is_told_by_content(tmp_path: Path) -> None:
    head = "".join(tensor_job(ranks=2, iterations=1)[0]).encode()[:HEAD_BYTES]
    assert FORMAT.recognises(head, tmp_path / "anything")
    assert not FORMAT.recognises(b"[save_count 2] hello\n", tmp_path / "rank_0.log")
    assert not FORMAT.recognises(b"", tmp_path / "rank_0.log")


@pytest.mark.parametrize("hashed", [False, True])
def test_simulated_logs_of_a_pipeline_name_its_rank_with_peers_of_messages(tmp_path: Path, hashed: bool) -> None:
    """SIMULATED: who exchanges with whom follows from the schedule, so that stages that wait for messages are not accused."""
    scenario = load(SCENARIOS / "quick-never-enters-pipeline.toml")
    timeline = simulate(scenario)
    files = write_rank_logs(timeline, tmp_path, until_s=timeline.end + 20, group_hash=hashed, config=not hashed, sensitive_s=0.0)
    job = FORMAT.read(files)[0]
    assert not any("do not tell peers" in line for line in job.blind)
    last = list(judged(job))[-1]
    assert last.verdict_class is VerdictClass.NOT_ENTERED
    assert {culprit.rank for culprit in last.culprits} == set(scenario.expect.ranks)


@pytest.mark.parametrize("costs", [False, True])
def test_who_calls_late_for_a_while_has_slowed_a_job_only_where_fewer_calls_were_made(tmp_path: Path, costs: bool) -> None:
    """A host that calls ahead of its GPU may call late at no cost."""
    lines: dict[int, list[str]] = {0: [], 1: []}
    time = 1.0
    for number in range(600):
        late = 0.04 if 200 <= number < 400 else 0.0
        time += 0.1 + (late if costs else 0.0)
        for rank in (0, 1):
            lines[rank].append(line(time + (late if rank else 0.0), rank, "AllReduce", 4096, 0x5000, number, group=500))
    job = FORMAT.read(write(tmp_path, lines))[0]
    last = list(judged(job, ask=False))[-1]
    assert [culprit.rank for culprit in last.culprits] == ([1] if costs else [])
