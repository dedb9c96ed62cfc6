"""``ncclwatch compare`` on files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclwatch.cli import compare as command
from ncclwatch.cli.main import run
from ncclwatch.errors import ExitStatus
from ncclwatch.knowledge.compare import Difference, Who

FIXTURES = Path(__file__).parents[2] / "fixtures"
FILES = [str(FIXTURES / f"hung-{version}-socket-rank2.ncclwatch") for version in ("2.21.5", "2.27.5")]


def test_snapshots_of_two_releases_differ_in_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", *FILES, "--json"]) == ExitStatus.OK
    told = json.loads(capsys.readouterr().out)
    assert told["processes"] == told["without_traits"] == 8
    release = next(one for one in told["differences"] if one["what"] == "NCCL")
    assert sorted(one["value"] for one in release["values"]) == ["2.21.5", "2.27.5"]


def test_a_recording_of_equal_ranks_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", str(FIXTURES / "stopped-8-ranks.recording")]) == ExitStatus.OK
    text = capsys.readouterr().out
    assert "8 processes on" in text
    assert "all that is known of them is the same" in text
    assert "of 8 only NCCL's release is known" in text


def test_the_table_names_the_few_and_counts_the_many() -> None:
    ranks = [Who(n, "node1", n) for n in range(8)]
    one = Difference("NIC rate", (("400", tuple(ranks[:7])), ("200\x1b[2J", (ranks[7],))))
    half = Difference("kernel", (("6.1", tuple(ranks[:4])), ("6.8", tuple(ranks[4:]))))
    text = "\n".join(command.lines([one, half], [], 0))
    assert "400 (7)" in text
    assert "rank 7: 200" in text
    assert "\x1b" not in text
    assert "ranks 0-3: 6.1" in text
    assert "ranks 4-7: 6.8" in text


def test_files_and_processes_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", FILES[0], "--all"]) == ExitStatus.USAGE
    assert capsys.readouterr().err.count("\n") == 1
