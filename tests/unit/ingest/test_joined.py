"""Formats of one job that know of different ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.cli.foreign import Judged, judge_found
from ncclwatch.ingest.folders import find
from ncclwatch.model.verdict import VerdictClass
from unit.ingest.dumps import BEGAN, SECOND, Dumps

CALLS = 24


def log_of(rank: int, calls: int, *, count: int = 1024, shift_s: float = 0.002) -> str:
    """A rank log of a job whose dumps number its calls from 1, one a second."""
    lines = []
    for number in range(calls):
        seconds, rest = divmod(BEGAN + number * SECOND + int(shift_s * SECOND), SECOND)
        head = f"[save_count 1] [{seconds}.{rest:09d}] [Rank {rank}]"
        lines.append(f"{head} Fun AllReduce Data {count} stream 0x5000 opCount {number}")
    return "\n".join(lines) + "\n"


def judged(folder: Path, log: str) -> Judged:
    """Ranks 0, 1 and 3 wrote dumps and wait in one call more; of rank 2 there is a log."""
    job = Dumps(4)
    job.all_call(times=CALLS)
    for rank in (0, 1, 3):
        job.call(rank, state="scheduled")
    job.write(folder, without=[2])
    (folder / "rank_2.log").write_text(log, "ascii")
    [one], problems = judge_found(find([folder]))
    assert not problems
    return one


def test_who_wrote_no_dump_and_has_called_less_by_its_log_is_named(tmp_path: Path) -> None:
    one = judged(tmp_path, log_of(2, CALLS))
    verdict = one.verdicts[0]
    assert (verdict.verdict_class, [culprit.rank for culprit in verdict.culprits]) == (VerdictClass.NOT_ENTERED, [2])
    assert any("rank 2 wrote no dump; its calls are from its rank log" in note and "opCount +1" in note for note in one.notes)


def test_who_wrote_no_dump_and_has_called_all_by_its_log_is_not_named(tmp_path: Path) -> None:
    verdict = judged(tmp_path, log_of(2, CALLS + 1)).verdicts[0]
    assert (verdict.verdict_class, verdict.culprits) == (VerdictClass.UNKNOWN, ())
    assert "rank 2 wrote no dump" in verdict.summary


@pytest.mark.parametrize("other", [{"count": 77}, {"shift_s": 5000.0}, {"calls": 4}], ids=str)
def test_a_log_that_is_not_of_this_job_is_not_joined(tmp_path: Path, other: dict[str, float]) -> None:
    one = judged(tmp_path, log_of(2, **{"calls": CALLS, **other}))  # type: ignore[arg-type]
    assert not any("its calls are from its rank log" in note for note in one.notes)
    assert [culprit.observed for culprit in one.verdicts[0].culprits] == [False]


def test_who_wrote_no_dump_is_said_to_be_stopped_by_ras_with_what_the_dumps_say_beside(tmp_path: Path) -> None:
    ras = (Path(__file__).resolve().parents[2] / "fixtures/nccl/2.29.2-frozen.json").read_bytes()
    alone = tmp_path / "ras"
    alone.mkdir()
    (alone / "ras.json").write_bytes(ras)
    [by_ras], _ = judge_found(find([alone]))
    [rank] = [culprit.rank for culprit in by_ras.verdicts[0].culprits]
    assert rank is not None
    job = Dumps(4)
    job.all_call(times=CALLS)
    for other in {0, 1, 2, 3} - {rank}:
        job.call(other, state="scheduled")
    both = job.write(tmp_path / "both", without=[rank])
    (both / "ras.json").write_bytes(ras)
    [one], _ = judge_found(find([both]))
    verdict = one.verdicts[0]
    assert (verdict.verdict_class, [culprit.rank for culprit in verdict.culprits]) == (VerdictClass.STOPPED, [rank])
    assert any("of which there is no dump" in line for line in verdict.evidence)
    assert any("the same rank is named by PyTorch Flight Recorder dump" in line for line in verdict.evidence)
