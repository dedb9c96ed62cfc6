"""Python frames of a process by py-spy, as a bounded subprocess that does not stop the target.

``py-spy dump --nonblocking --json``: it reads the interpreter's memory as it runs, so a frame may be torn. Only with ``pause`` it
stops the target, and shows native frames too.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from ncclwatch import bounded
from ncclwatch.target.maps import PROC
from ncclwatch.target.traits import python_version
from ncclwatch.text import clean

NEWEST = (3, 14)
"""Python up to which py-spy 0.4.3 reads frames; tried here up to 3.13."""
TIMEOUT_S = 5.0
MAX_OUTPUT = 4 << 20
MAX_THREADS, MAX_FRAMES = 128, 200
GET = "install it beside ncclwatch: pip install 'ncclwatch[stacks]'"


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: function, file as the interpreter names it, line (0: not known)."""

    name: str
    file: str
    line: int

    @property
    def text(self) -> str:
        """``_next_data (torch/utils/data/dataloader.py:628)``; of a native function without a name the library alone: its address
        differs from process to process.
        """
        name = "?" if self.name.startswith("0x") else self.name
        return f"{name} ({short(self.file)}{f':{self.line}' if self.line > 0 else ''})"


@dataclass(frozen=True, slots=True)
class PythonThread:
    """A thread of Python, the innermost frame first. ``tid`` is the kernel's, ``None`` where Python does not keep it."""

    tid: int | None
    name: str
    owns_gil: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class PythonStacks:
    """What was read at ``time`` (seconds since the epoch) within ``seconds``; ``problem`` says why nothing was, and is empty of a
    process without Python. ``version`` is that of its Python, empty for none.
    """

    threads: tuple[PythonThread, ...] = ()
    problem: str = ""
    time: float = field(default_factory=time.time)
    seconds: float = 0.0
    version: str = ""


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0


class _Thread(msgspec.Struct):
    frames: list[_Frame] = []
    thread_name: str | None = None
    os_thread_id: int | None = None
    owns_gil: bool = False


_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[_Thread])


def program() -> str | None:
    """Where py-spy is: beside this Python, else on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def read(pid: int, *, pause: bool = False, proc: Path = PROC, timeout_s: float = TIMEOUT_S) -> PythonStacks:
    """The Python threads of a process, or why there are none. Never raises, takes ``timeout_s`` and two seconds at most."""
    version = python_version(proc, pid)
    if not version:
        return PythonStacks()
    return replace(_read(pid, version, pause=pause, timeout_s=timeout_s), version=version)


def _read(pid: int, version: str, *, pause: bool, timeout_s: float) -> PythonStacks:
    number = tuple(int(part) for part in version.split("."))
    if number > NEWEST:
        newest = ".".join(map(str, NEWEST))
        return PythonStacks(
            problem=f"Python {version} is newer than py-spy reads ({newest}): only the kernel tells of its threads"
        )
    spy = program()
    if spy is None:
        return PythonStacks(problem=f"py-spy is not there: {GET}")
    how = ["--native"] if pause else ["--nonblocking"]
    done = bounded.run(
        [spy, "dump", "--json", *how, "--pid", str(pid)], timeout_s=timeout_s, keep=MAX_OUTPUT, flood=MAX_OUTPUT, errors=False
    )
    if done.why or done.status != 0:
        return PythonStacks(problem=f"py-spy: {done.why or f'it failed with status {done.status}'}", seconds=done.seconds)
    try:
        found = _decoder.decode(done.output)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PythonStacks(problem="py-spy: what it said makes no sense", seconds=done.seconds)
    return PythonStacks(tuple(map(_thread, found[:MAX_THREADS])), seconds=done.seconds)


def _thread(found: _Thread) -> PythonThread:
    frames = tuple(Frame(clean(one.name, 120), clean(one.filename, 300), one.line) for one in found.frames[:MAX_FRAMES])
    return PythonThread(found.os_thread_id, clean(found.thread_name or "", 60), found.owns_gil, frames)


def main_thread(stacks: PythonStacks, pid: int) -> PythonThread | None:
    """The thread that runs the program: that of the process's id, else the one of that name, else the last that is listed."""
    found = stacks.threads
    by_id = [one for one in found if one.tid == pid]
    by_name = [one for one in found if one.name == "MainThread"]
    return next(iter([*by_id, *by_name, *reversed(found)]), None)


def short(file: str) -> str:
    """``torch/utils/data/dataloader.py`` of a file below site-packages or the standard library, else its last two parts."""
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in file:
            return file.rpartition(mark)[2]
    parts = file.split("/")
    for at, part in enumerate(parts):
        if part.startswith("python3.") and at + 1 < len(parts):
            return "/".join(parts[at + 1 :])
    return "/".join(parts[-2:])
