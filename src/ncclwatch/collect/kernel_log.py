"""The kernel's log as a running collector follows it: lines that matter to the processes it watches, some of before it came.

Who attaches to a job that already hangs finds there the Xid, or the want of memory, that ended one of its ranks.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from ncclwatch.model.network import KernelLogLine
from ncclwatch.model.state import ProcessSample
from ncclwatch.nic.kmsg import KernelEvent, KernelLog

MAX_WAITING = 1000
"""Lines kept between two looks."""
MAX_EARLIER = 16
"""Lines of before the collector came that are told, the newest."""
SLACK_NS = 60_000_000_000
"""The log's clock, which nobody corrects, and that of a process's start differ by less than this for weeks."""
THREADS_EVERY_S = 10.0
"""A crash names a thread, of which nothing is left a moment later: threads are listed before."""
MAX_THREADS = 4096
"""Threads of a process that are told apart."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class KernelNews:
    """Lines of the log that matter here. Raises as :class:`KernelLog` does. ``listen`` may be called by another thread."""

    def __init__(self, host: str, proc: Path = Path("/proc")) -> None:
        self._host = host
        self._proc = proc
        self._log = KernelLog()
        self._came_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._waiting: deque[tuple[KernelEvent, int]] = deque(maxlen=MAX_WAITING)
        """Each with when it was heard of, CLOCK_REALTIME: the log's own clock, which nobody corrects, may be seconds off."""
        self._earlier: deque[KernelEvent] = deque(maxlen=MAX_EARLIER)
        self._started_ns: int | None = None
        self._threads: dict[int, int] = {}
        self._next_threads = 0.0

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def fileno(self) -> int:
        """Readable when there is something new."""
        return self._log.fileno()

    def listen(self) -> None:
        """Take in what came. Raises :class:`NcclwatchError`, OSError and ValueError."""
        events, wall_ns = self._log.events(), time.time_ns()
        self._waiting.extend((event, wall_ns) for event in events)

    @property
    def waiting(self) -> bool:
        """Whether something came since the lines were last asked for."""
        return bool(self._waiting)

    def watch(self, samples: Iterable[ProcessSample]) -> None:
        """Learn which processes are watched, and since when: what the log held before is nobody's business.

        O(threads) once in ten seconds.
        """
        keys = {sample.process.key for sample in samples}
        if self._started_ns is None and keys:
            self._started_ns = min(key.start_time for key in keys) * 1_000_000_000 // TICKS_PER_S - SLACK_NS
        if time.monotonic() >= self._next_threads:
            self._next_threads = time.monotonic() + THREADS_EVERY_S
            # Who is gone by now may have crashed: its line may still come.
            pids = {key.pid for key in keys}
            kept = {tid: pid for tid, pid in self._threads.items() if pid in pids}
            self._threads = kept | {tid: pid for pid in pids for tid in self._threads_of(pid)}

    def lines(self) -> tuple[KernelLogLine, ...]:
        """What came since the last call, and once processes are watched, what the log held since their start.

        A crash is told of watched processes alone.
        """
        fresh: list[tuple[KernelEvent, int | None]] = []
        while self._waiting:
            event, wall_ns = self._waiting.popleft()
            if event.time_ns >= self._came_ns:
                fresh.append((event, wall_ns))
            else:
                self._earlier.append(event)
        if self._started_ns is not None and self._earlier:
            fresh = [*((event, None) for event in self._earlier if event.time_ns >= self._started_ns), *fresh]
            self._earlier.clear()
        return tuple(self._line(*told) for told in fresh if told[0].kind != "crash" or told[0].pid in self._threads)

    def _threads_of(self, pid: int) -> list[int]:
        try:
            with os.scandir(self._proc / str(pid) / "task") as entries:
                return [int(entry.name) for entry in islice(entries, MAX_THREADS)]
        except (OSError, ValueError):
            return []

    def _line(self, event: KernelEvent, heard_ns: int | None) -> KernelLogLine:
        pid = self._threads.get(event.pid, event.pid) if event.kind == "crash" and event.pid is not None else event.pid
        logged_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_MONOTONIC) + event.time_ns
        wall_ns = logged_ns if heard_ns is None else heard_ns
        return KernelLogLine(
            self._host, event.kind, event.device, event.text, event.time_ns, event.severity, event.code, pid, wall_ns
        )
