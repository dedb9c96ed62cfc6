"""``ncclwatch explain``."""

from __future__ import annotations

import json

import pytest

from ncclwatch.cli.explain import row_lines
from ncclwatch.cli.main import run
from ncclwatch.errors import ExitStatus
from ncclwatch.knowledge.rows import rows
from ncclwatch.text import Style


def test_without_an_argument_every_row_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain"]) == ExitStatus.OK
    words = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}
    assert {row.id for row in rows()} <= words


def test_a_row_is_told_in_full_with_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "proxy-slots-leak"]) == ExitStatus.OK
    text = capsys.readouterr().out
    assert "before 2.29.3" in text
    assert "issue:NVIDIA/nccl#2353" in text
    assert "aarch64" in text
    assert "{pid}" not in text


def test_a_cause_and_a_class_find_their_rows(capsys: pytest.CaptureFixture[str]) -> None:
    for word, row in (("left-out", "left-out"), ("gpu-stopped", "gpu-not-begun"), ("init-hang", "rendezvous")):
        assert run(["explain", word, "--json"]) == ExitStatus.OK
        assert row in [found["id"] for found in json.loads(capsys.readouterr().out)]


def test_defects_of_a_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "--release", "2.29.3", "--json"]) == ExitStatus.OK
    found = [row["id"] for row in json.loads(capsys.readouterr().out)]
    assert "wrong-interface" in found
    assert "proxy-slots-leak" not in found


@pytest.mark.parametrize("words", [["explain", "warp-drive"], ["explain", "--release", "two"]])
def test_what_nobody_knows_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == ExitStatus.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_all_that_a_row_asks_for_is_told_and_no_placeholder_is_left() -> None:
    for row in rows():
        told = list(row_lines(row, Style(enabled=False)))
        (fits,) = (line for line in told if line.startswith("  fits "))
        assert all(f"{key} " in fits for key in row.when.lists), fits
        assert not any("{pid}" in line or "{host}" in line for line in told), row.id
