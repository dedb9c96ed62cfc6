"""Reads below ``/proc`` that may never come back: of a process one of whose threads sleeps and holds its memory map.

The kernel answers ``environ``, ``cmdline`` and (before 6.18) ``maps`` under the target's mmap lock, and reads its memory so.
A thread that waits for a disk or a driver with that lock held keeps every reader waiting, ``ps`` among them, until it goes on:
nothing but SIGKILL frees a reader. So another thread reads. It is left behind if it must be, and the process is not asked again
before that one has come back.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from ncclwatch.errors import TargetError

FILES = frozenset({"maps", "environ", "cmdline"})
"""Names of the files that are read under the lock."""
LOOK_S = 0.25
MOMENT_S = 0.1
"""So long a process whose memory could be read is not asked again whether it can be."""
PATIENCE = 8
"""Looks in a row at which the reader sleeps in the kernel (state D). One that waits for a CPU does not, however long it takes."""


WHY = "for one of its threads sleeps and holds its memory map (ps hangs on it as well)"


class HeldError(TargetError):
    """The memory map of a process is held by one of its own threads."""

    def __init__(self, pid: int) -> None:
        super().__init__(
            f"process {pid} cannot be looked into, {WHY}",
            f"see where it sleeps: `cat /proc/{pid}/task/*/wchan`; mostly in a file system or a driver",
        )


class _Reader:
    """A thread that reads for others, one thing at a time."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[Callable[[], bytes] | None] = SimpleQueue()
        self.answers: SimpleQueue[bytes | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="ncclwatch-proc")
        self._thread.start()

    def _run(self) -> None:
        while (read := self.asked.get()) is not None:
            try:
                self.answers.put(read())
            except BaseException as error:
                self.answers.put(error)

    def end(self) -> None:
        """Let the thread end, and wait for it."""
        self.asked.put(None)
        self._thread.join()

    @property
    def sleeps(self) -> bool:
        """Whether it sleeps in the kernel and cannot be woken by a signal."""
        try:
            text = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_bytes()
        except OSError:
            return False
        return text.rpartition(b")")[2].split()[:1] == [b"D"]


_idle: list[_Reader] = []
_left: dict[int, _Reader] = {}
"""Readers that were left behind, by the process they read of."""
_let: dict[int, float] = {}
"""When the memory of a process could be read last, CLOCK_MONOTONIC."""
MOST_LET = 1024
"""Bound: processes of which that is kept."""


def _forget() -> None:
    """In a child of ours no such thread runs."""
    _idle.clear()
    _left.clear()
    _let.clear()


os.register_at_fork(after_in_child=_forget)


def dismiss() -> None:
    """End all threads that wait for something to read: who gives up privileges must have none that keep them."""
    while _idle:
        _idle.pop().end()


def check(pid: int) -> None:
    """Raise :class:`HeldError` where the memory of a process cannot be read now; what else is wrong with it is not told here.

    Asked once a moment.
    """
    if time.monotonic() - _let.get(pid, -MOMENT_S) <= MOMENT_S:
        return
    with suppress(OSError):
        within(pid, lambda: read_first(pid))
    _note([pid])


def check_all(pids: Iterable[int]) -> None:
    """Ask of several processes what :func:`check` asks of one, in one exchange with the thread that reads.

    Raises nothing: who cannot be read is told when it is asked alone.
    """
    asked, came = [pid for pid in pids if pid not in _left], list[int]()

    def read() -> bytes:
        for pid in asked:
            with suppress(OSError):
                read_first(pid)
            came.append(pid)
        return b""

    if asked:
        with suppress(HeldError):
            _ask(read, lambda: asked[min(len(came), len(asked) - 1)])
        _note(came)


def _note(pids: Iterable[int]) -> None:
    if len(_let) > MOST_LET:
        _let.clear()
    _let.update(dict.fromkeys(pids, time.monotonic()))


def read_first(pid: int) -> bytes:
    """A byte of the process's memory, by way of its environment."""
    file = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 1)
    finally:
        os.close(file)


def within(pid: int, read: Callable[[], bytes]) -> bytes:
    """What ``read`` returns or raises; :class:`HeldError` where it does not come back."""
    if (left := _left.get(pid)) is not None:
        if left.answers.empty():
            raise HeldError(pid)
        # It may have been begun with privileges that this process has given up since: it is not asked again.
        _left.pop(pid, None)
        left.end()
    return _ask(read, lambda: pid)


def _ask(read: Callable[[], bytes], whom: Callable[[], int]) -> bytes:
    """What ``read`` returns or raises. Where it does not come back, its thread is left behind and the process that it reads of by
    then (``whom``) is held.
    """
    try:
        reader = _idle.pop()
    except IndexError:
        reader = _Reader()
    reader.asked.put(read)
    asleep = 0
    while True:
        try:
            answer = reader.answers.get(timeout=LOOK_S)
            break
        except Empty:
            asleep = asleep + 1 if reader.sleeps else 0
        if asleep >= PATIENCE:
            pid = whom()
            _left[pid] = reader
            raise HeldError(pid)
    _idle.append(reader)
    if isinstance(answer, BaseException):
        raise answer
    return answer
