"""What a process stands in: run state, threads by the kernel, Python frames by py-spy, each with when it was read."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ncclwatch.target import python_stack
from ncclwatch.target.process import run_state
from ncclwatch.target.python_stack import PythonStacks, PythonThread, main_thread
from ncclwatch.target.threads import ThreadRow, own_tid, settled, threads, wants_gil

ALTOGETHER_S = 30.0
"""For reading many processes; those that are left then are said not to be read."""


@dataclass(frozen=True, slots=True)
class ProcessStack:
    """One process at one moment. ``state`` is the letter of ``/proc/PID/stat``; ``time`` in seconds since the epoch.
    ``gil_held``: another thread holds the GIL, and the main thread wants it. ``proxies``: NCCL's progress threads that were asked
    for, ``None`` for one that is gone. ``problem``: why it was not read at all.
    """

    pid: int
    state: str
    rows: tuple[ThreadRow, ...] = ()
    python: PythonStacks = field(default_factory=PythonStacks)
    gil_held: bool = False
    proxies: tuple[ThreadRow | None, ...] = ()
    time: float = field(default_factory=time.time)
    problem: str = ""

    @property
    def main(self) -> PythonThread | None:
        """The thread that runs the program, as Python sees it."""
        return main_thread(self.python, self.pid)

    @property
    def main_row(self) -> ThreadRow | None:
        """The same as the kernel sees it."""
        return next((row for row in self.rows if row.tid == self.pid), None)

    @property
    def holder(self) -> PythonThread | None:
        """The thread that holds the GIL, as far as py-spy tells."""
        return next((one for one in self.python.threads if one.owns_gil), None)

    @property
    def frames(self) -> tuple[tuple[str, str], ...]:
        """(function, file) of the main thread, the innermost first."""
        return tuple((frame.name, frame.file) for frame in self.main.frames) if self.main is not None else ()


Reader = Callable[[int], PythonStacks]


def read_stack(pid: int, *, pause: bool = False, python: Reader | None = None, proxies: Collection[int] = ()) -> ProcessStack:
    """Look at one process. Never raises; takes some seconds at most, without ``pause`` the process goes on. ``proxies``: ids of
    NCCL's progress threads, by the process's own pid namespace (``Communicator.proxy_thread``).
    """
    state = run_state(pid)
    if state in "ZX":
        return ProcessStack(pid, state, problem="it has ended")
    # Of a process that is stopped for good py-spy would wait for nothing when it has to stop it itself.
    pause = pause and state not in "Tt"
    rows = tuple(threads(pid))
    own = {own_tid(pid, row.tid): row for row in rows} if proxies else {}
    found = python(pid) if python is not None else python_stack.read(pid, pause=pause)
    main, holder = main_thread(found, pid), next((one for one in found.threads if one.owns_gil), None)
    # Who holds it now may let go of it in a moment: only a main thread that goes on waiting makes it a reason.
    held = holder is not None and holder is not main and state not in "Tt" and wants_gil(pid, pid)
    if state == "D":
        state = run_state(pid)
    rows = tuple(settled(pid, row) for row in rows)
    return ProcessStack(pid, state, rows, found, held, tuple(own.get(tid) for tid in sorted(proxies)))


def read_stacks(
    pids: Iterable[int],
    *,
    pause: bool = False,
    within_s: float = ALTOGETHER_S,
    proxies: Mapping[int, Collection[int]] | None = None,
) -> Iterator[ProcessStack]:
    """Look at many, one after the other: the machine may have nothing to spare. What comes after ``within_s`` is not read.
    ``proxies``: of each process, see :func:`read_stack`.
    """
    until = time.monotonic() + within_s
    for pid in pids:
        if time.monotonic() > until:
            yield ProcessStack(pid, run_state(pid), problem=f"not read: the {within_s:.0f} s for all of them are over")
        else:
            yield read_stack(pid, pause=pause, proxies=(proxies or {}).get(pid, ()))


def python_lines(pid: int) -> list[str]:
    """Python frames of every thread as lines; one that says why there are none."""
    found = python_stack.read(pid)
    if not found.version:
        return ["Python frames: the process has no Python"]
    if found.problem:
        return [f"Python frames: {found.problem}"]
    lines = []
    for thread in found.threads:
        lines.append(f'thread {thread.tid or "?"} "{thread.name}"' + (" (holds the GIL)" if thread.owns_gil else ""))
        lines += [f"    {frame.text}" for frame in thread.frames]
    return lines[:400]
