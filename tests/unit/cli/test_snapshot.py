"""snapshot: what can be read is recorded, what cannot is a line, and a file that cannot be written is one clear error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ncclwatch.cli import main
from ncclwatch.errors import TargetGoneError
from ncclwatch.model.state import ProcessInfo
from unit.synthetic import process

Recorder = Callable[..., None]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int, float]]:
    """Calls of the recorder, which writes a file of 2 KiB; only even pids exist."""
    calls: list[tuple[list[int], int, float]] = []

    def inspect(pid: int) -> ProcessInfo:
        if pid % 2:
            raise TargetGoneError(f"there is no process {pid}", "look again")
        return process(0, 4)

    def record(pids: Sequence[int], path: Path, samples: int, interval: float) -> None:
        calls.append((list(pids), samples, interval))
        path.write_bytes(bytes(2048))

    monkeypatch.setattr("ncclwatch.target.discover.inspect_process", inspect)
    monkeypatch.setattr("ncclwatch.target.image.record_snapshot", record)
    return calls


def test_what_exists_is_recorded_and_the_rest_is_a_line(
    capsys: pytest.CaptureFixture[str], recorded: list[tuple[list[int], int, float]], tmp_path: Path
) -> None:
    file = tmp_path / "a.snap"
    assert main.run(["snapshot", "--pid", "2,3", "4", "-o", str(file), "--samples", "3", "--interval", "0.5"]) == 0
    assert recorded == [([2, 4], 3, 0.5)]
    out, err = capsys.readouterr()
    assert out == f"{file}: 2 processes, 3 samples each, 2 KiB: read it with 'ncclwatch diagnose {file}'\n"
    assert err == "ncclwatch: pid 3: there is no process 3: look again\n"


def test_nothing_to_record_writes_nothing(
    capsys: pytest.CaptureFixture[str], recorded: list[tuple[list[int], int, float]], tmp_path: Path
) -> None:
    assert main.run(["snapshot", "--pid", "3", "-o", str(tmp_path / "a.snap")]) == 3
    assert recorded == []
    assert capsys.readouterr().err == "ncclwatch: error: there is no process 3: look again\n"


def test_a_full_disk_is_one_line(
    capsys: pytest.CaptureFixture[str],
    recorded: list[tuple[list[int], int, float]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ncclwatch.target.image.record_snapshot", full)
    assert main.run(["snapshot", "--pid", "2", "-o", str(tmp_path / "a.snap")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "No space left on device" in err


def test_one_look_is_not_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.run(["snapshot", "--pid", "2", "-o", str(tmp_path / "a.snap"), "--samples", "1"]) == 2
    assert "--samples" in capsys.readouterr().err
