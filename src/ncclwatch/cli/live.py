"""The live session behind ``attach``: wakes a few times a second, looks at memory once a second, and tells what changed.

It knows nothing of terminals: ``step`` returns an ``Update`` for whoever shows it.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclwatch.cli.calls_plane import CallsPlane
from ncclwatch.cli.sampling import Problem, Readable, Watched, nothing_read, sees_every_process
from ncclwatch.collect.aggregate import Aggregator
from ncclwatch.collect.windows import RankWindow
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.errors import NcclwatchError, TargetGoneError
from ncclwatch.model.events import Flag
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.model.verdict import Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The ring holds many times what a quarter of a second brings; waking more often costs the node and shows a person nothing.
WAKE_S = 0.25
# Every so often --all looks for processes that came; a process that loads NCCL late is found on a later round.
RESCAN_S = 2.0
# A process that could not be read is tried again, for it may just have been loading.
RETRY_S = 30.0


class Change(StrEnum):
    """What happened to a process."""

    STARTED = "started"
    EXITED = "exited"
    REPLACED = "replaced"
    UNREADABLE = "unreadable"
    READABLE = "readable"


@dataclass(frozen=True, slots=True)
class ProcessChange:
    """Something that happened to one process, in words."""

    change: Change
    pid: int
    info: ProcessInfo | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A verdict that no longer stands because the job went on, and for how long it stood."""

    verdict: Verdict
    duration_s: float


@dataclass(frozen=True, slots=True)
class Overhead:
    """What watching costs: probe hits and their estimated cost as a share of one core; our own CPU share and memory."""

    hits_per_s: float | None
    probe_share: float | None
    own_share: float
    rss_bytes: int


@dataclass(slots=True)
class Update:
    """What one step of the session brought. ``windows`` and ``verdict`` are there when memory was looked at."""

    now_ns: int
    changes: list[ProcessChange] = field(default_factory=list)
    events: list[NDArray[Any]] = field(default_factory=list)
    windows: list[RankWindow] | None = None
    verdict: Verdict | None = None
    verdict_changed: bool = False
    recoveries: list[Recovery] = field(default_factory=list)
    lost: int = 0
    newly_lost: int = 0
    notes: list[str] = field(default_factory=list)
    finished: str = ""
    """Why the session is over; empty while it goes on."""


class LiveSession:
    """Watches processes until they end, the duration is over, or ``stop`` is set."""

    def __init__(self, *, every: bool, interval_s: float = 1.0, stop: threading.Event | None = None) -> None:
        self.every = every
        self.interval_s = interval_s
        self.stop = stop or threading.Event()
        self.calls = CallsPlane(every=every)
        self.aggregator = Aggregator()
        self.diagnosis = LiveDiagnosis()
        self.watched: dict[int, Watched] = {}
        self.problems: list[Problem] = []
        self.verdict: Verdict | None = None
        self.begun_ns = time.monotonic_ns()
        self._unreadable: set[int] = set()
        self._given_up: dict[int, float] = {}
        self._next_look = 0.0
        self._last_rescan = time.monotonic()
        self._next_rescan = self._last_rescan + RESCAN_S
        self._told: str | None = None
        self._cpu_ns = time.process_time_ns()
        self._cpu_at_ns = self.begun_ns

    # --- beginning and end ---------------------------------------------------------------------------------------------

    def start(self, pids: Sequence[int], *, calls: bool = True) -> None:
        """Open every process, read each once, and only then load the probes. Raises when no process at all can be read."""
        if calls:
            self.calls.prepare()
        for pid in pids:
            self._open(pid)
        for watched in list(self.watched.values()):
            error = watched.look()
            if watched.last is None:
                self.problems.append(Problem(f"pid {watched.pid}", watched.pid, error or TargetGoneError("it ended")))
                self._drop(watched)
        if not self.watched:
            raise nothing_read(self.problems)
        infos = [watched.target.info for watched in self.watched.values()]
        if self.every and not self.problems and sees_every_process():
            self.diagnosis.complete_hosts = frozenset(info.host for info in infos)
        if calls:
            self.calls.start(infos)
        self.aggregator.calls_plane = self.calls.running
        now_ns = time.monotonic_ns()
        for watched in self.watched.values():
            self.aggregator.add_process(watched.target.info, now_ns)
            if watched.last is not None:
                self.aggregator.feed_sample(watched.last)
        # The first samples count: the second look, an interval later, already tells running from standing still.
        self._judge(self._samples())
        self._next_look = time.monotonic() + self.interval_s

    def close(self) -> None:
        """Detach the probes and let go of every process."""
        self.calls.stop()
        for watched in self.watched.values():
            watched.target.close()

    # --- one step ------------------------------------------------------------------------------------------------------

    def step(self, *, until: float | None = None) -> Update:
        """Sleep at most ``WAKE_S``, take what the probes recorded, and look at memory when it is time.

        ``until`` is the time of ``time.monotonic`` at which the session ends.
        """
        now = time.monotonic()
        sleep = min(WAKE_S, max(self._next_look - now, 0.0))
        if until is not None:
            sleep = min(sleep, max(until - now, 0.0))
        self.stop.wait(sleep)
        update = Update(now_ns=time.monotonic_ns())
        self._drain(update)
        now = time.monotonic()
        if now >= self._next_look:
            # Looks that were missed (the agent was stopped, the node is overloaded) are not made up for.
            on_time = self._next_look + self.interval_s
            self._next_look = on_time if on_time > now else now + self.interval_s
            self._look(update)
        strangers = self.aggregator.strangers.take()
        if self.every and strangers:
            # Calls of a process that is not watched yet: look at once what it is.
            self._next_rescan = min(self._next_rescan, self._last_rescan + WAKE_S)
        if self.every and now >= self._next_rescan:
            self._last_rescan = now
            self._next_rescan = now + RESCAN_S
            self._rescan(update)
        if self.stop.is_set():
            update.finished = "interrupted"
        elif until is not None and time.monotonic() >= until:
            update.finished = "duration over"
        elif not self.every and not self._alive():
            update.finished = "every watched process has ended"
        return update

    def overhead(self) -> Overhead:
        """Costs since the last time this was asked."""
        now_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        own = (cpu_ns - self._cpu_ns) / max(now_ns - self._cpu_at_ns, 1)
        self._cpu_ns, self._cpu_at_ns = cpu_ns, now_ns
        hits, share = self.calls.cost()
        return Overhead(hits, share, own, resident_bytes())

    # --- parts of a step -----------------------------------------------------------------------------------------------

    def _drain(self, update: Update) -> None:
        events = self.calls.poll()
        if events is not None and len(events):
            self.aggregator.feed_events(events)
            update.events.append(events)
        lost = self.calls.lost()
        update.newly_lost = max(lost - self.aggregator.lost, 0)
        update.lost = lost
        if events is not None and (len(events) or update.newly_lost):
            self.diagnosis.add_calls(_of_known_pids(events), update.newly_lost)
        update.notes, self.calls.problems = self.calls.problems, []
        self.aggregator.calls_plane = self.calls.running
        self.aggregator.feed_losses(lost)

    def _look(self, update: Update) -> None:
        for watched in list(self.watched.values()):
            was_gone = watched.gone is not None
            error = watched.look(keep=2)
            key = watched.target.info.key
            if error is not None:
                self.aggregator.feed_problem(key, str(error))
                if watched.pid not in self._unreadable:
                    self._unreadable.add(watched.pid)
                    update.changes.append(ProcessChange(Change.UNREADABLE, watched.pid, watched.target.info, str(error)))
                continue
            if watched.last is not None:
                self.aggregator.feed_sample(watched.last)
            if watched.pid in self._unreadable:
                self._unreadable.discard(watched.pid)
                update.changes.append(ProcessChange(Change.READABLE, watched.pid, watched.target.info))
            if watched.gone is not None and not was_gone:
                update.changes.append(self._went(watched))
        self._forget_ended_jobs()
        self._judge(self._samples())
        update.windows = self.aggregator.windows(update.now_ns)
        update.verdict = self.verdict
        current = self.verdict.id if self.verdict and self.verdict.verdict_class.accuses else None
        update.verdict_changed = current is not None and current != self._told
        self._told = current
        update.recoveries = [Recovery(verdict, seconds) for verdict, seconds in self.diagnosis.closed]
        self.diagnosis.closed.clear()

    def _went(self, watched: Watched) -> ProcessChange:
        """A process ended, or became another program; the latter is looked at anew."""
        info = watched.target.info
        self.calls.remove_process(info)
        if _lives_on(info):
            return ProcessChange(Change.REPLACED, watched.pid, info, "it runs another program now")
        return ProcessChange(Change.EXITED, watched.pid, info)

    def _samples(self) -> list[ProcessSample]:
        """The newest look at every process, of one that ended its last state with run state ``X``."""
        return [watched.last for watched in self.watched.values() if watched.last is not None]

    def _judge(self, samples: Sequence[ProcessSample]) -> None:
        if samples and self._alive():
            self.verdict = self.diagnosis.update(samples)

    def _forget_ended_jobs(self) -> None:
        """A process that ended is kept while a live one shares a communicator with it: it may be whom that one waits for."""
        alive = {c.hash for w in self._alive() if w.last for c in w.last.communicators}
        for watched in list(self.watched.values()):
            if watched.gone is None or watched.last is None:
                continue
            if alive.isdisjoint(c.hash for c in watched.last.communicators):
                self._drop(watched)

    def _rescan(self, update: Update) -> None:
        from ncclwatch.target.discover import find_processes

        try:
            found = find_processes()
        except NcclwatchError as error:
            update.notes.append(f"cannot look for new processes: {error}")
            return
        for info in found:
            held = self.watched.get(info.pid)
            if held is not None and held.gone is None:
                continue
            if held is not None:
                # Another process has the pid now, or the same one runs another program.
                self._drop(held)
            elif time.monotonic() < self._given_up.get(info.pid, 0.0):
                continue
            self._take_up(info, update)

    def _take_up(self, info: ProcessInfo, update: Update) -> None:
        watched = self._open(info.pid)
        error = watched.look() if watched is not None else self.problems[-1].error
        if watched is None or watched.last is None:
            if watched is not None:
                self._drop(watched)
            if not isinstance(error, TargetGoneError):
                if info.pid not in self._given_up:
                    update.changes.append(ProcessChange(Change.UNREADABLE, info.pid, info, str(error)))
                self._given_up = {p: t for p, t in self._given_up.items() if t > time.monotonic()}
                self._given_up[info.pid] = time.monotonic() + RETRY_S
            return
        self.calls.add_process(watched.target.info)
        self.aggregator.add_process(watched.target.info, time.monotonic_ns())
        self.aggregator.feed_sample(watched.last)
        update.changes.append(ProcessChange(Change.STARTED, info.pid, watched.target.info))

    # --- processes -----------------------------------------------------------------------------------------------------

    def _open(self, pid: int) -> Watched | None:
        from ncclwatch.target.session import TargetProcess

        try:
            target: Readable = TargetProcess.open(pid)
        except NcclwatchError as error:
            self.problems = [*self.problems[-99:], Problem(f"pid {pid}", pid, error)]
            return None
        self.watched[pid] = Watched(target)
        return self.watched[pid]

    def _drop(self, watched: Watched) -> None:
        watched.target.close()
        self.watched.pop(watched.pid, None)
        self._unreadable.discard(watched.pid)
        self.aggregator.remove_process(watched.target.info.key)

    def _alive(self) -> list[Watched]:
        return [watched for watched in self.watched.values() if watched.gone is None]


def _of_known_pids(events: NDArray[Any]) -> NDArray[Any]:
    """Records whose pid is one in our pid namespace: a process nobody watches yet comes with the number of its own."""
    foreign = (events["flags"] & Flag.UNKNOWN_PROCESS != 0) & (events["pid_namespace"] != 0)
    return events[~foreign] if foreign.any() else events


def resident_bytes() -> int:
    """Resident memory of this process now."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def _lives_on(info: ProcessInfo) -> bool:
    """Whether the process itself is still there, so that it must have become another program."""
    from ncclwatch.target.process import read_stat

    try:
        stat = read_stat(info.pid)
    except NcclwatchError:
        return False
    return stat.start_time == info.key.start_time and stat.state not in "ZX"


def verdict_stands(verdict: Verdict | None) -> bool:
    """Whether a verdict accuses somebody."""
    return verdict is not None and verdict.verdict_class.accuses


def planes_line(session: LiveSession) -> str:
    """Which planes see the job, and why the others do not."""
    calls = "calls" if session.calls.running else f"no calls ({session.calls.reason})"
    return f"state, {calls}"
