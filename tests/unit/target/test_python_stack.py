"""py-spy that is missing, slow, lying, or too old: a line, in bounded time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ncclwatch import bounded
from ncclwatch.target import python_stack
from ncclwatch.target.python_stack import Frame, main_thread, read, short
from unit.fake_proc import FakeProcess, write_proc

RECORDED = Path(__file__).parents[2] / "fixtures" / "stacks" / "gil-held.json"


def _spy(tmp_path: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "py-spy"
    file.write_text("#!/bin/sh\n" + body)
    file.chmod(0o755)
    monkeypatch.setattr(python_stack, "program", lambda: str(file))
    monkeypatch.setattr(bounded, "GRACE_S", 0.3)


def test_what_py_spy_said_of_a_real_process_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _spy(tmp_path, f'echo "$@" >{tmp_path}/asked; cat {RECORDED}', monkeypatch)
    found = read(os.getpid())
    assert found.problem == ""
    assert "--nonblocking" in (tmp_path / "asked").read_text()
    (holder,) = [one for one in found.threads if one.owns_gil]
    assert holder.frames[0] == Frame("hold", "/home/user/gil.py", 5)
    main = main_thread(found, 1)
    assert main is not None
    assert main.name == "MainThread"


def test_native_frames_only_where_a_pause_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _spy(tmp_path, f"echo \"$@\" >{tmp_path}/asked; echo '[]'", monkeypatch)
    read(os.getpid(), pause=True)
    asked = (tmp_path / "asked").read_text()
    assert "--native" in asked
    assert "--nonblocking" not in asked


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("sleep 600", "took too long"),
        ("yes '[{\"frames\": []},'", "wrote more than"),
        ('echo \'{"not": "a list"}\'', "makes no sense"),
        ("printf '\\377\\376'", "makes no sense"),
        ("printf '[%.0s' $(seq 10000)", "makes no sense"),
        ('echo \'[{"frames": [{"line": "x"}]}]\'', "makes no sense"),
        ("echo 'Error: Permission denied' >&2; exit 1", "failed with status 1"),
        ("kill -9 $$", "failed with status -9"),
    ],
)
def test_one_that_hangs_lies_or_fails_is_a_line(body: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _spy(tmp_path, body, monkeypatch)
    began = time.monotonic()
    found = read(os.getpid(), timeout_s=1.0 if "took" in says else 60.0)
    assert says in found.problem
    assert found.threads == ()
    assert time.monotonic() - began < 60.0


def test_texts_are_cleaned_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = {"name": "\x1b[2Jx" * 100, "filename": "f" * 1000, "line": 1}
    said = [{"frames": [frame] * (python_stack.MAX_FRAMES + 50), "thread_name": "\n"}, *[{}] * 200]
    (tmp_path / "said").write_text(json.dumps(said))
    _spy(tmp_path, f"cat {tmp_path}/said", monkeypatch)
    found = read(os.getpid(), timeout_s=60.0)
    assert len(found.threads) == python_stack.MAX_THREADS
    assert len(found.threads[0].frames) == python_stack.MAX_FRAMES
    assert found.threads[0].frames[0].name.isprintable()
    assert len(found.threads[0].frames[0].file) <= 300


@pytest.mark.parametrize(("library", "says"), [("libpython3.99.so.1.0", "newer than py-spy reads"), ("libfoo.so", "")])
def test_a_newer_python_and_none_are_said(library: str, says: str, tmp_path: Path) -> None:
    (tmp_path / library).write_bytes(b"x")
    (tmp_path / "proc").mkdir()
    proc = write_proc(tmp_path / "proc", [FakeProcess(7, libraries=[tmp_path / library])])
    found = read(7, proc=proc)
    assert says in found.problem
    assert bool(found.problem) is bool(found.version) is bool(says)


def test_a_frame_is_shown_alike_in_every_process() -> None:
    assert Frame("0x7f37f0a2a24a", "/usr/lib/libc.so.6", 0).text == Frame("0x7f11f0a2a24a", "/usr/lib/libc.so.6", 0).text
    assert Frame("step", "/home/user/train/loop.py", 7).text == "step (train/loop.py:7)"


def test_files_are_shown_short() -> None:
    assert short("/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py") == "torch/utils/data/dataloader.py"
    assert short("/usr/lib/python3.11/threading.py") == "threading.py"
    assert short("/home/user/train/loop.py") == "train/loop.py"
