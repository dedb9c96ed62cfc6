"""Every error is one line on standard error that says what to do, with a documented status and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ncclwatch.cli import main
from ncclwatch.errors import NcclwatchError, PrivilegeError, TargetError, UsageError


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main.run(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


def assert_one_line(err: str, *words: str) -> None:
    assert err.startswith("ncclwatch: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert ": " in err.removeprefix("ncclwatch: error: "), "what is wrong, then what to do"
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nonsense"], "nonsense"),
        (["dump"], "--all"),
        (["dump", "--frob"], "ncclwatch dump --help"),
        (["attach", "--pid"], "ncclwatch attach --help"),
        (["attach", "--pid", "12x"], "12x"),
        (["dump", "--pid", "0"], "not a pid"),
        (["dump", "--pid", "99999999999"], "not a pid"),
        (["dump", "--pid", "1", "--all"], "exclude"),
        (["dump", "no-such-file"], "no-such-file"),
        (["diagnose", "--wait", "-1", "--all"], "--wait"),
        (["attach", "--all", "--calls"], "--json"),
        (["attach", "file.snap"], "diagnose"),
        (["snapshot", "--pid", "1"], "--output"),
        (["snapshot", "--pid", "1", "-o", "/no/such/folder/file"], "folder"),
        (["snapshot", "--pid", "1", "-o", "/tmp"], "/tmp"),
    ],
)
def test_usage_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], word: str
) -> None:
    monkeypatch.setattr("ncclwatch.cli.snapshot._usable", lambda pids: pids)
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert_one_line(err, word)


def test_no_arguments_show_the_help_and_end_as_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys)
    assert status == 2
    assert "Usage: ncclwatch" in err


def test_a_process_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    status, _, err = run(capsys, "dump", "--pid", str(gone.pid))
    assert status == 3
    assert_one_line(err, str(gone.pid))


@pytest.mark.parametrize(
    ("error", "status"), [(UsageError("a", "do b"), 2), (TargetError("a", "do b"), 3), (PrivilegeError("a", "do b"), 4)]
)
def test_each_error_has_its_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: NcclwatchError, status: int
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("ncclwatch.target.discover.survey", fail)
    assert run(capsys, "ps") == (status, "", "ncclwatch: error: a: do b\n")


def test_a_bug_is_one_line_that_says_how_to_report_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyError("what\x1b[31m")

    monkeypatch.setattr("ncclwatch.target.discover.survey", fail)
    monkeypatch.delenv("NCCLWATCH_DEBUG", raising=False)
    status, _, err = run(capsys, "ps")
    assert status == 1
    assert_one_line(err, "KeyError", "NCCLWATCH_DEBUG=1", "doctor --json", "test_errors.py:")
    assert "\x1b" not in err


def test_the_traceback_of_a_bug_is_there_on_demand(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("what")

    monkeypatch.setattr("ncclwatch.target.discover.survey", fail)
    monkeypatch.setenv("NCCLWATCH_DEBUG", "1")
    status, _, err = run(capsys, "ps")
    assert status == 1
    assert "Traceback" in err


def test_an_interrupt_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ncclwatch.target.discover.survey", interrupt)
    assert run(capsys, "ps") == (130, "", "")


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "ncclwatch", "version"], stdout=out, stderr=subprocess.PIPE, check=False, timeout=120
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_start_up_imports_nothing_heavy() -> None:
    heavy = {"numpy", "drgn", "bcc", "rich.live", "rich.console", "networkx", "capstone", "zmq", "pyroute2"}
    code = f"import sys; from ncclwatch.cli import main; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for command in ("ps", "dump", "snapshot", "diagnose", "attach", "doctor", "version"):
        assert f"\n  {command} " in out
        assert run(capsys, command, "--help")[0] == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from ncclwatch import __version__

    assert run(capsys, "version") == (0, f"ncclwatch {__version__}\n", "")
    assert run(capsys, "--version") == (0, f"ncclwatch {__version__}\n", "")


def test_output_of_any_encoding() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "ncclwatch", "dump", str(Path("nö-such"))], capture_output=True, env=env, check=False, timeout=120
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
