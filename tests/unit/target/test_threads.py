"""Threads of a rank as the kernel tells them: of a real process of ours, of a made-up one, of one that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ncclwatch.dashboard.source import read_stack
from ncclwatch.model.identity import ProcessKey
from ncclwatch.target import python_stack
from ncclwatch.target.stacks import python_lines
from ncclwatch.target.stacks import read_stack as read_process
from ncclwatch.target.threads import own_tid, settled, system_call, threads, wants_gil


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


def test_a_disk_sleep_that_is_over_at_a_second_look_is_none(tmp_path: Path) -> None:
    proc = fake(tmp_path, stat="7 (x) D 1", wchan="down_read")
    [row] = threads(7, proc)
    assert settled(7, row, proc) == row, "it still is"
    (proc / "7/task/7/stat").write_text("7 (x) R 1")
    assert settled(7, row, proc).state == "running"
    assert settled(8, row, proc) == row, "a thread that is gone is shown as it was"


@pytest.mark.parametrize(("status", "own"), [("NSpid:\t7\n", 7), ("Name:\tx\nNSpid:\t7\t41\t3\nNSpgid:\t7\n", 3), ("", 7)])
def test_a_thread_knows_itself_by_its_id_in_the_innermost_namespace(tmp_path: Path, status: str, own: int) -> None:
    assert own_tid(7, 7, fake(tmp_path, status=status)) == own


@pytest.mark.parametrize(
    ("text", "said"),
    [("running", "user code"), ("-1 0x7 0x8", "kernel, no call"), ("16 0x3", "ioctl"), ("999 1", "call 999"), ("", "")],
)
def test_system_calls(text: str, said: str) -> None:
    assert system_call(text) == said


def test_another_process_with_the_pid_is_not_shown() -> None:
    key = ProcessKey("boot", os.getpid(), 1, "ab")
    assert "has ended" in str(read_stack(key, lambda _pid: 2))


def test_without_py_spy_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_stack, "program", lambda: None)
    assert "pip install" in python_lines(os.getpid())[0]
    assert "no Python" in python_lines(0)[0]


HOLDS_THE_GIL = """
import ctypes, threading, time
held = ctypes.PyDLL(None)  # calls through it keep the GIL
def hold():
    print(flush=True)
    held.sleep(600)
thread = threading.Thread(target=hold, name="holder", daemon=True)
{wait}
"""
WANTS_IT = "thread.start()\nwhile True:\n    time.sleep(0.001)"
WAITS_FOR_A_LOCK = "print(flush=True)\nthreading.Event().wait()"


def _python(wait: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", HOLDS_THE_GIL.format(wait=wait)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    return child


@pytest.mark.parametrize(("wait", "wants"), [(WANTS_IT, True), (WAITS_FOR_A_LOCK, False)])
def test_who_waits_for_the_gil_wakes_again_and_again(wait: str, wants: bool) -> None:
    child = _python(wait)
    try:
        # The machine may be crowded: one look in several must see it, and none what is not so.
        looks = [wants_gil(child.pid, child.pid) for _ in range(8 if wants else 3)]
        assert any(looks) is wants
    finally:
        child.kill()
        child.wait()


def test_a_thread_that_holds_the_gil_is_shown() -> None:
    if python_stack.program() is None:
        pytest.skip("py-spy is not installed: whoever holds the GIL is not known")
    child = _python(WANTS_IT)
    try:
        found = next(one for _ in range(8) if (one := read_process(child.pid)).gil_held)
        assert found.holder is not None
        assert "hold" in [frame.name for frame in found.holder.frames]
        assert found.main is not None
        assert found.main.tid == child.pid
    finally:
        child.kill()
        child.wait()


def _said(holder: str) -> python_stack.PythonStacks:
    threads = tuple(python_stack.PythonThread(None, name, name == holder, ()) for name in ("MainThread", "holder"))
    return python_stack.PythonStacks(threads, version="3.11")


@pytest.mark.parametrize(
    ("wait", "holder", "held"),
    [(WANTS_IT, "holder", True), (WANTS_IT, "MainThread", False), (WANTS_IT, "", False), (WAITS_FOR_A_LOCK, "holder", False)],
)
def test_the_gil_is_held_where_another_thread_has_it_and_the_main_thread_goes_on_wanting_it(
    wait: str, holder: str, held: bool
) -> None:
    child = _python(wait)
    try:
        looks = [
            read_process(child.pid, python=lambda _pid: _said(holder)).gil_held
            for _ in range(2 if wait == WAITS_FOR_A_LOCK else 8)
        ]
        assert any(looks) is held
    finally:
        child.kill()
        child.wait()


def test_what_has_ended_is_said() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        pass
    assert read_process(child.pid).state == "Z"
    child.wait()
    assert (read_process(child.pid).state, read_process(child.pid).problem) == ("X", "it has ended")
