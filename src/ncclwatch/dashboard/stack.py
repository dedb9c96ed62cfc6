"""What the threads of a rank are doing, as the kernel tells it; the target is neither stopped nor entered.

``/proc/PID/task/*/{comm,stat,wchan,syscall}`` name each thread, its state, the kernel function it sleeps in and its system call.
Python frames come from py-spy where it is installed, told not to stop the process (``--nonblocking``).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ncclwatch.text import clean

MAX_THREADS = 512
PY_SPY_S = 10.0

# x86-64 system calls in which threads of a training job usually wait (arch/x86/entry/syscalls/syscall_64.tbl).
SYSTEM_CALLS = {
    0: "read", 1: "write", 3: "close", 7: "poll", 9: "mmap", 11: "munmap", 16: "ioctl", 23: "select", 24: "sched_yield",
    34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg",
    61: "wait4", 74: "fsync", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 270: "pselect6",
    271: "ppoll", 281: "epoll_pwait", 288: "accept4", 426: "io_uring_enter", 441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip

STATES = {"R": "running", "S": "sleeping", "D": "disk sleep", "T": "stopped", "t": "traced", "Z": "ended", "X": "ended"}


@dataclass(frozen=True, slots=True)
class ThreadRow:
    """One thread. ``wchan`` is the kernel function it sleeps in, ``call`` its system call, both empty where not told."""

    tid: int
    name: str
    state: str
    wchan: str
    call: str


def threads(pid: int, proc: Path = Path("/proc")) -> list[ThreadRow]:
    """The threads of a process, the main thread first; empty when it is gone or closed to us."""
    try:
        tids = sorted(int(entry.name) for entry in (proc / str(pid) / "task").iterdir() if entry.name.isdigit())
    except OSError:
        return []
    return [row for tid in tids[:MAX_THREADS] if (row := _thread(proc / str(pid) / "task" / str(tid), tid)) is not None]


def _thread(folder: Path, tid: int) -> ThreadRow | None:
    stat = _read(folder / "stat")
    if not stat:
        return None
    # The name stands in parentheses and may hold some itself.
    state = stat.rpartition(")")[2].split()[:1]
    wchan = _read(folder / "wchan")
    return ThreadRow(
        tid,
        clean(_read(folder / "comm"), 32),
        STATES.get(state[0], state[0]) if state else "?",
        clean(wchan, 48) if wchan != "0" else "",
        system_call(_read(folder / "syscall")),
    )


def system_call(text: str) -> str:
    """``futex`` of the first word of ``/proc/PID/task/TID/syscall``; ``(user code)`` while it runs."""
    word = text.partition(" ")[0]
    if word == "running":
        return "(user code)"
    if word == "-1":
        return "(kernel, no call)"
    return SYSTEM_CALLS.get(int(word), f"call {word}") if word.isdigit() else ""


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(4096).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def python_stack(pid: int) -> list[str]:
    """Python frames by py-spy, without stopping the process; a line that says why there are none."""
    program = shutil.which("py-spy")
    if program is None:
        return ["Python frames: install py-spy (pip install py-spy) to see them here"]
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=PY_SPY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"py-spy: {clean(str(error), 200)}"]
    lines = done.stdout.splitlines() if done.returncode == 0 else list(_complaint(done.stderr))
    return [clean(line.expandtabs(4), 300) for line in lines[:400]]


def _complaint(text: str) -> Iterator[str]:
    lines = [re.sub(r"\s+", " ", line) for line in text.splitlines() if line.strip()]
    yield "py-spy: " + (lines[0] if lines else "it said nothing")
