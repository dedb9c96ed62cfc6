"""Threads of a rank as the kernel tells them: of a real process of ours, of a made-up one, of one that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ncclwatch.dashboard.source import read_stack
from ncclwatch.dashboard.stack import python_stack, system_call, threads
from ncclwatch.model.identity import ProcessKey


def test_threads_of_a_real_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = threads(child.pid)
        assert [row.tid for row in found] == [child.pid]
        assert found[0].name.startswith("python")
        assert found[0].state in ("sleeping", "running")
        child.communicate(b"\n")
    assert threads(child.pid) == []


def fake(folder: Path, **files: str) -> Path:
    task = folder / "7" / "task" / "7"
    task.mkdir(parents=True)
    for name, text in files.items():
        (task / name).write_text(text)
    return folder


def test_names_are_cleaned_and_parentheses_do_not_confuse(tmp_path: Path) -> None:
    proc = fake(tmp_path, comm="a) R (\x1b[2J\n", stat="7 (a) R (x) D 1 2", wchan="futex_wait", syscall="202 0x1 0x2")
    [row] = threads(7, proc)
    assert (row.state, row.wchan, row.call) == ("disk sleep", "futex_wait", "futex")
    assert row.name.isprintable()


def test_what_the_kernel_does_not_tell_is_empty(tmp_path: Path) -> None:
    [row] = threads(7, fake(tmp_path, stat="7 (x) S 1", wchan="0"))
    assert (row.name, row.wchan, row.call) == ("", "", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [("running", "(user code)"), ("-1 0x7 0x8", "(kernel, no call)"), ("16 0x3", "ioctl"), ("999 1", "call 999"), ("", "")],
)
def test_system_calls(text: str, said: str) -> None:
    assert system_call(text) == said


def test_another_process_with_the_pid_is_not_shown() -> None:
    key = ProcessKey("boot", os.getpid(), 1, "ab")
    assert "has ended" in str(read_stack(key, lambda _pid: 2))


def test_without_py_spy_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    assert "pip install py-spy" in python_stack(1)[0]
