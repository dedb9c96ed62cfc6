"""The end of a process, heard of at once and with its status, of processes that are not our children.

A process file descriptor (pidfd_open(2), Linux 5.3) is readable when its process has ended, and no reused pid is mistaken for it.
The status is in ``/proc/PID/stat`` (field 52) while the process is a zombie, and from Linux 6.15 on it can be asked of the
descriptor afterwards (``PIDFD_GET_INFO`` with ``PIDFD_INFO_EXIT``, include/uapi/linux/pidfd.h).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ncclwatch.errors import TargetGoneError
from ncclwatch.target.maps import PROC, read_small
from ncclwatch.target.process import read_stat

MAX_WATCHED = 4096
"""Processes that are waited for; each takes a file descriptor."""
WAKE_NS = 20_000_000
"""How late the thread may be though a CPU was there: what it waited for one is added."""
_INFO_BYTES = 64
_GET_INFO = (3 << 30) | (_INFO_BYTES << 16) | (0xFF << 8) | 11
"""``_IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)`` in its first version, of 64 bytes."""
_INFO_EXIT = 1 << 3
_EXIT_CODE = 51
"""Place of ``exit_code`` among the words of ``/proc/PID/stat``, from 0."""


@dataclass(frozen=True, slots=True)
class End:
    """A process has ended: when (CLOCK_MONOTONIC and CLOCK_REALTIME, ns) that was heard of, by how much it may have been earlier,
    its number among the ends heard of, and its status as of wait(2), ``None`` where it could not be read.
    """

    time_ns: int
    wall_ns: int
    late_ns: int
    order: int
    wait_status: int | None


def wait_status(descriptor: int, pid: int, start_time: int, proc: Path = PROC) -> int | None:
    """How the process behind a descriptor ended, as of wait(2); ``None`` while it runs, or where nobody can tell any more."""
    with contextlib.suppress(TargetGoneError, OSError, ValueError, IndexError):
        if (stat := read_stat(pid, proc)).start_time == start_time and stat.state == "Z":
            text = read_small(f"{proc}/{pid}/stat", 4096)
            # It may have been reaped in between, and the pid be another's: then the descriptor knows.
            return int(text[text.rfind(b")") + 2 :].split()[_EXIT_CODE - 2])
    info = bytearray(_INFO_BYTES)
    struct.pack_into("<Q", info, 0, _INFO_EXIT)
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, _GET_INFO, info)
        if struct.unpack_from("<Q", info, 0)[0] & _INFO_EXIT:
            status: int = struct.unpack_from("<i", info, _INFO_BYTES - 4)[0]
            return status
    return None


class Endings:
    """A thread that waits for the ends of processes. ``on_end`` is called by it. Whatever it cannot do it leaves out.

    It begins when ends are first asked for: a thread that is there before keeps the privileges that its process gives up.
    """

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self._on_end = on_end
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[int, int]] = {}
        """Descriptor → (pid, start time)."""
        self._ended: dict[tuple[int, int], End] = {}
        self._count = 0
        self._asked_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._poll = select.epoll()
        self._wake_out, self._wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(self._wake_out, select.EPOLLIN)
        self._thread: threading.Thread | None = None

    def watch(self, pid: int, start_time: int) -> None:
        """Wait for the end of a process; one that is gone already is not waited for."""
        with self._lock:
            if len(self._watched) >= MAX_WATCHED or (pid, start_time) in self._watched.values():
                return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return
        try:
            same = read_stat(pid).start_time == start_time
        except TargetGoneError:
            same = False
        if not same:
            os.close(descriptor)
            return
        with self._lock:
            self._watched[descriptor] = (pid, start_time)
        self._poll.register(descriptor, select.EPOLLIN)

    def forget(self, pid: int, start_time: int) -> None:
        """Wait for it no longer."""
        with self._lock:
            found = [descriptor for descriptor, place in self._watched.items() if place == (pid, start_time)]
            for descriptor in found:
                del self._watched[descriptor]
                self._close(descriptor)

    def waits_for(self, pid: int, start_time: int) -> bool:
        """Whether its end is waited for and was not heard of: a process that cannot be read any more may still be ending."""
        with self._lock:
            return (pid, start_time) in self._watched.values()

    @property
    def has_news(self) -> bool:
        """Whether an end was heard of that nobody has taken."""
        return bool(self._ended)

    def take(self) -> dict[tuple[int, int], End]:
        """The ends since the last time, by (pid, start time)."""
        asked_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ncclwatch-ends", daemon=True)
            self._thread.start()
        else:
            # The thread may wait for a CPU; who is known to be gone has ended.
            self._hear([descriptor for descriptor, _ in self._poll.poll(0)])
        self._asked_ns = asked_ns
        with self._lock:
            found, self._ended = self._ended, {}
        return found

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            os.write(self._wake_in, b".")
            self._thread.join()
        with self._lock:
            for descriptor in self._watched:
                os.close(descriptor)
            self._watched.clear()
        self._poll.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _run(self) -> None:
        waited_ns = _waited_for_a_cpu_ns()
        while True:
            # The kernel's list of what is ready is in the order in which it became so.
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            before_ns, waited_ns = waited_ns, _waited_for_a_cpu_ns()
            if self._wake_out in ready:
                return
            if self._hear(ready, max(waited_ns - before_ns, 0)):
                self._on_end()

    def _hear(self, ready: list[int], waited_ns: int | None = None) -> bool:
        """Take in the ends behind descriptors, by a thread that waited for a CPU for so long; whether nobody else had."""
        now_ns, wall_ns, fresh = time.clock_gettime_ns(time.CLOCK_MONOTONIC), time.time_ns(), False
        # Not earlier than when they were last asked for: then it had not ended.
        late_ns = max(now_ns - self._asked_ns, 0)
        late_ns = late_ns if waited_ns is None else min(late_ns, WAKE_NS + waited_ns)
        with self._lock:
            for descriptor in ready:
                # Another thread may have been quicker, and the number be another process's by now.
                if descriptor not in self._watched or not _readable(descriptor):
                    continue
                place = self._watched.pop(descriptor)
                self._ended[place] = End(now_ns, wall_ns, late_ns, self._count, wait_status(descriptor, *place))
                self._count += 1
                self._close(descriptor)
                fresh = True
        return fresh

    def _close(self, descriptor: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(descriptor)
        os.close(descriptor)


def _readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _waited_for_a_cpu_ns() -> int:
    """How long this thread has been runnable without a CPU so far (schedstat; 0 where the kernel does not keep it)."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
