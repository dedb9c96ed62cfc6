"""Completion scripts: what a shell really offers after a word."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ncclwatch.cli import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main.run(["completion", shell]) == 0
    return capsys.readouterr().out


def offered(path: Path, line: str) -> set[str]:
    words = line.split(" ")
    set_up = f"source {path}; COMP_WORDS=({' '.join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}; _ncclwatch; "
    done = subprocess.run(["bash", "-c", set_up + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_bash_offers_commands_options_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "script"
    path.write_text(script("bash", capsys))
    assert {"replay", "report", "record"} <= offered(path, "ncclwatch re")
    assert "attach" not in offered(path, "ncclwatch re")
    assert {"--pid", "--plain", "--probes"} <= offered(path, "ncclwatch attach --p")
    assert "--no-probes" in offered(path, "ncclwatch attach --n")
    assert offered(path, f"ncclwatch replay {tmp_path}/scr") == {str(path)}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_right_for_their_shells(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert "attach" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its script is not checked")
    path = tmp_path / "script"
    path.write_text(text)
    subprocess.run([shell, "-n", str(path)], check=True)
