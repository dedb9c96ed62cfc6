"""Formats are told by content, files that nobody knows are left alone, and several formats of one job are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ncclwatch.cli.foreign import joined
from ncclwatch.ingest import folders
from ncclwatch.ingest.base import Format, Ingested, IngestError
from ncclwatch.ingest.flight_recorder import FlightRecorder, rank_of
from ncclwatch.ingest.folders import Record, find, read
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from unit.ingest.dumps import Dumps


class Words(Format):
    """A made-up format: text that begins with its name."""

    name, what = "words", "list of words"

    def recognises(self, head: bytes, path: Path) -> bool:
        return head.startswith(b"words")

    def read(self, files: Sequence[Path]) -> Sequence[Ingested]:
        if any(file.read_text() == "words bad" for file in files):
            raise IngestError("words bad: nothing in it")
        return [Ingested(problems=["line 3 makes no sense"])]


FORMATS = (Words(), FlightRecorder())


def culprit(rank: int) -> Culprit:
    return Culprit(rank, None, "", None, None)


def test_formats_are_told_by_content_whatever_the_names(tmp_path: Path) -> None:
    job = Dumps(2)
    job.all_call(times=3)
    job.write(tmp_path / "deep" / "er", prefix="x.log.")
    job.write(tmp_path, prefix="y", form="json")
    (tmp_path / "fr_3").write_text("words")
    (tmp_path / "notes").write_text("version 2, pg_config, entries")
    (tmp_path / ".hidden").write_text("words")
    found = find([tmp_path], FORMATS)
    assert {name: len(files) for name, files in found.files.items()} == {"words": 1, "flight-recorder": 4}
    assert found.unknown == [tmp_path / "notes"]


def test_what_one_format_cannot_read_leaves_the_others(tmp_path: Path) -> None:
    job = Dumps(2)
    job.all_call(times=3)
    job.write(tmp_path)
    (tmp_path / "a").write_text("words bad")
    records, problems = read(find([tmp_path], FORMATS), FORMATS)
    assert [record.format.name for record in records] == ["flight-recorder"]
    assert problems == ["words bad: nothing in it"]
    with pytest.raises(IngestError, match="nothing in it"):
        read(find([tmp_path / "a"], FORMATS), FORMATS)


def test_folders_without_end_are_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST_FILES", 3)
    for number in range(5):
        (tmp_path / str(number)).write_text("x")
    with pytest.raises(IngestError, match="more than 3 files"):
        find([tmp_path])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nccl_trace_rank_12", ("nccl_trace_rank_*", 12)),
        ("fr_rank_3.json", ("fr_rank_*.json", 3)),
        ("node7-dump4.pickle", ("node7-dump*.pickle", 4)),
        ("rank5_of_8_attempt2", ("rank*_of_8_attempt2", 5)),
        ("dump", None),
    ],
)
def test_the_rank_stands_in_the_name(name: str, told: tuple[str, int] | None) -> None:
    assert rank_of(Path("/x") / name) == told


def test_the_worst_and_surest_of_several_formats_stands_and_the_others_are_told() -> None:
    hang = Verdict(
        VerdictClass.NOT_ENTERED, "rank 2 is behind", (culprit(2),), confidence=0.9, unobserved=("a", "b"), planes=("x",)
    )
    slow = Verdict(
        VerdictClass.SLOW_COMPUTATION, "rank 2 is slow", (culprit(2),), confidence=0.9, unobserved=("b",), planes=("y",)
    )
    told = [(Record(FORMATS[0], Ingested()), [slow]), (Record(FORMATS[1], Ingested(job="j")), [hang])]
    [one] = joined(told)
    assert (one.job, one.formats, one.verdicts[0].summary) == ("j", ("flight-recorder", "words"), "rank 2 is behind")
    assert one.verdicts[0].evidence == ("by the list of words: rank 2 is slow", "the same rank is named by list of words")
    assert one.verdicts[0].unobserved == ("b",)
    assert one.verdicts[0].planes == ("x", "y")
    other = replace(slow, culprits=(culprit(1),))
    [one] = joined([(told[0][0], [other]), told[1]])
    assert one.verdicts[0].evidence == ("by the list of words: rank 2 is slow",)


def test_jobs_of_a_format_that_tells_of_several_are_not_joined() -> None:
    said = Verdict(VerdictClass.IDLE, "nothing")
    records = [Record(FORMATS[0], Ingested(job="a")), Record(FORMATS[0], Ingested(job="b")), Record(FORMATS[1], Ingested())]
    assert len(list(joined([(record, [said]) for record in records]))) == 3
