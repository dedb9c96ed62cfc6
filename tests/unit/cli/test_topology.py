"""``ncclwatch topology`` on recordings and on wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclwatch.cli.main import run
from ncclwatch.errors import ExitStatus

FIXTURES = Path(__file__).resolve().parent.parent.parent / "fixtures"


def recordings() -> list[Path]:
    return sorted(FIXTURES.glob("*.recording"))


@pytest.mark.parametrize("recording", recordings(), ids=lambda path: path.stem)
def test_a_recording_is_inferred_from_and_nothing_is_claimed_that_was_not_seen(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["topology", str(recording), "--json"]) == ExitStatus.OK
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "ncclwatch.topology/1"
    for job in said["jobs"]:
        assert job["groups"]
        assert all(len(group["ranks"]) >= 1 for group in job["groups"])
        sizes = [size for size in job["layout"].values() if size is not None]
        assert not sizes or job["world"] % max(sizes) == 0
    assert run(["topology", str(recording)]) == ExitStatus.OK
    text = capsys.readouterr().out
    assert "ranks" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pid", "1", "--config", "/nonexistent.json"], "no such file"),
        (["/nonexistent.recording"], "no such file"),
        ([], "nothing to look at"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topology", *arguments]) == ExitStatus.USAGE
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
