"""What the threads of a process are doing, as the kernel tells it; the target is neither stopped nor entered.

``/proc/PID/task/*/{comm,stat,wchan,syscall,status}`` name each thread, its state, the kernel function it sleeps in, its system
call, and how often it has given up the CPU.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ncclwatch.target.machine import Machine, this_machine
from ncclwatch.target.maps import PROC
from ncclwatch.text import clean

MAX_THREADS = 512

_OF_X86_64 = {
    0: "read", 1: "write", 3: "close", 7: "poll", 9: "mmap", 11: "munmap", 16: "ioctl", 23: "select", 24: "sched_yield",
    34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg",
    61: "wait4", 74: "fsync", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 270: "pselect6",
    271: "ppoll", 281: "epoll_pwait", 288: "accept4",
}  # fmt: skip
_OF_AARCH64 = {
    22: "epoll_pwait", 29: "ioctl", 57: "close", 63: "read", 64: "write", 72: "pselect6", 73: "ppoll", 82: "fsync", 95: "waitid",
    98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 124: "sched_yield", 202: "accept", 203: "connect", 206: "sendto",
    207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 215: "munmap", 222: "mmap", 242: "accept4", 260: "wait4",
}  # fmt: skip
_OF_BOTH = {426: "io_uring_enter", 441: "epoll_pwait2", 449: "futex_waitv"}
SYSTEM_CALLS = (_OF_AARCH64 if this_machine() is Machine.AARCH64 else _OF_X86_64) | _OF_BOTH
"""System calls in which threads of a training job usually wait, by number (arch/x86/entry/syscalls/syscall_64.tbl;
include/uapi/asm-generic/unistd.h).
"""

STATES = {"R": "running", "S": "sleeping", "D": "disk sleep", "T": "stopped", "t": "traced", "Z": "ended", "X": "ended"}

GIL_WAIT_S = 0.2
GIL_WAKES = 8
"""Times in :data:`GIL_WAIT_S` that a thread wakes at least, and goes on waiting, while it wants the GIL. CPython waits for it in
turns of 5 ms (``INTERVAL``, Python/ceval_gil.c), which would be 40. Seen on CPython 3.6 to 3.13, on a crowded machine: 13 to 36.
One that waits for anything else sleeps until it has it: 0.
"""
_OWN_TID = re.compile(r"^NSpid:[\t 0-9]*?(\d+)$", re.MULTILINE)
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ThreadRow:
    """One thread. ``wchan`` is the kernel function it sleeps in, ``call`` its system call, both empty where not told."""

    tid: int
    name: str
    state: str
    wchan: str
    call: str


def threads(pid: int, proc: Path = PROC) -> list[ThreadRow]:
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
        STATES.get(state[0], clean(state[0], 8)) if state else "?",
        clean(wchan, 48) if wchan != "0" else "",
        system_call(_read(folder / "syscall")),
    )


def own_tid(pid: int, tid: int, proc: Path = PROC) -> int:
    """The id by which a thread knows itself: in the innermost pid namespace that it is in."""
    found = _OWN_TID.search(_read(proc / str(pid) / "task" / str(tid) / "status"))
    return int(found[1]) if found else tid


def settled(pid: int, row: ThreadRow, proc: Path = PROC) -> ThreadRow:
    """A row as it is now, where it was in disk sleep: threads that use a GPU are for a moment, now and then (seen on an H200)."""
    again = _thread(proc / str(pid) / "task" / str(row.tid), row.tid) if row.state == "disk sleep" else None
    return again or row


def system_call(text: str) -> str:
    """``futex`` of the first word of ``/proc/PID/task/TID/syscall``; ``user code`` while it runs."""
    word = text.partition(" ")[0]
    if word == "running":
        return "user code"
    if word == "-1":
        return "kernel, no call"
    return SYSTEM_CALLS.get(int(word), f"call {word}") if word.isdigit() else ""


def wants_gil(pid: int, tid: int, proc: Path = PROC, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Whether a thread of CPython 3 waits for the GIL: it wakes every few milliseconds and waits on. Takes :data:`GIL_WAIT_S`.

    One that computes or prints may wake as often; so it must be asleep in a futex, or between two of them, at both ends.
    """
    folder = proc / str(pid) / "task" / str(tid)
    before, first = _switches(folder), _waits(folder)
    sleep(GIL_WAIT_S)
    after, last = _switches(folder), _waits(folder)
    return first and last and before is not None and after is not None and after - before >= GIL_WAKES


def _waits(folder: Path) -> bool:
    # While it goes from one turn of waiting to the next the kernel says "running"; four looks meet it asleep.
    return any(system_call(_read(folder / "syscall")) == "futex" for _ in range(4))


def _switches(folder: Path) -> int | None:
    found = _SWITCHES.search(_read(folder / "status"))
    return int(found[1]) if found else None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(4096).decode("utf-8", "replace").strip()
    except OSError:
        return ""
