"""Snapshot files of a whole cluster: the same whether one process reads them or several, and what fails is said file by file."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest

from ncclwatch.cli import sampling
from ncclwatch.errors import TargetError
from ncclwatch.target.layout import MissingMemberError

FIXTURE = Path(__file__).parents[2] / "fixtures" / "hung-2.27.5-socket-rank2.ncclwatch"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """As many as are read side by side; one is cut off, one is missing."""
    paths = [tmp_path / f"node{number:02d}" for number in range(sampling.MANY_FILES)]
    for path in paths:
        shutil.copy(FIXTURE, path)
    os.truncate(paths[3], 5000)
    paths[7].unlink()
    return paths


def test_several_processes_read_what_one_reads(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    side_by_side, problems = sampling.load_files(files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    alone, told = sampling.load_files(files)
    assert side_by_side == alone
    assert len(alone) == 4 * (len(files) - 2)
    assert [problem.line for problem in problems] == [problem.line for problem in told]
    assert [problem.error.message for problem in problems] == [
        f"{files[3]} is damaged or incomplete",
        f"cannot read {files[7]} (No such file or directory)",
    ]


def test_an_error_of_another_process_is_the_same_error() -> None:
    for error in (TargetError("what", "do"), MissingMemberError("ncclComm.rank", (2, 27, 5), "ncclComm.rank")):
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
        assert (type(again), again.message, again.hint, str(again)) == (type(error), error.message, error.hint, str(error))
