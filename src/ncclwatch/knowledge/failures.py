"""What failed first in a job that comes down, over all its hosts: kept after its processes are gone, in the order of time.

Sources are the ends of processes with their status, lines of the kernels' logs (killed for want of memory, Xids), and what NCCL
itself reports. Two things on one host are in the order in which its kernel told them. Of two hosts the order is told only as far
as their clocks allow: each batch carries by how much its node's clock is off at most.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine.stated import HEALTHY
from ncclwatch.model.failure import Failure, FailureKind, Place, ProcessEnd, signal_name
from ncclwatch.model.network import KernelLogLine
from ncclwatch.model.state import ProcessSample
from ncclwatch.text import bus_text

Life = tuple[str, int, int, int]
"""(host, pid, start time, part) of a rank's process."""

MOST_PROCESSES = 65536
"""Processes that are remembered; of more the oldest are forgotten."""
MOST_TOLD = 64
"""Failures that a verdict carries, the first ones."""
MOST_LINES = 4096
"""Lines of kernels' logs that are remembered."""
KEPT_S = 3600.0
"""A job that came down is forgotten after so long, or when its hosts have another one."""
LOG_S = 0.05
"""By how much the time at which a line of a kernel's log was heard of may be off."""
XID_BEFORE_S = 60.0
"""An Xid so long before the first end, or later, belongs to it."""
TOGETHER_S = 0.5
"""All processes of a job that are killed by one signal within this time are killed by somebody from outside."""
NO_FAILURE = frozenset({45, 63, 92})
"""Xids that follow the end of a process (45) or only inform: a remapped row (63), many corrected errors (92); NVIDIA's list of
Xids."""
FROM_OUTSIDE = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals by which launchers, schedulers and people end a process."""
SETTLE_S = 4.0
"""How a process ended may be heard so long after it was found gone."""
UNSEEN = "ended, nobody saw how"
OF_PEERS = frozenset({FailureKind.NCCL_ERROR, FailureKind.ABORT})
"""What NCCL shows once a peer is gone: seen at looks, it comes before an end of another process only where it surely does."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at ``time`` (s, the engine's clock), known to ``own_s`` on its host and ``clock_s`` among hosts
    (``inf``: nobody has compared them). ``order``: its place among the ends on its host. ``life``: whose it is, if anybody's.
    """

    kind: FailureKind
    words: str
    host: str
    time: float
    own_s: float
    clock_s: float
    life: Life | None = None
    rank: int | None = None
    pid: int | None = None
    code: int | None = None
    order: int | None = None

    @property
    def failed(self) -> bool:
        """Whether it is a failure by itself."""
        return self.kind is not FailureKind.ENDED

    def slack(self, other: Event) -> float:
        """By how much the distance between two may be off, s."""
        return self.own_s + other.own_s + (0.0 if self.host == other.host else self.clock_s + other.clock_s)

    def surely_before(self, other: Event) -> bool:
        """Whether it came first, whatever the clocks are off by."""
        if self.host == other.host and self.order is not None and other.order is not None:
            return self.order < other.order
        return self.time + self.slack(other) < other.time


@dataclass(slots=True)
class Known:
    """A rank's process: its newest look while it lived and had communicators, and what happened to it."""

    life: Life
    sample: ProcessSample
    begun: float
    seen: float
    """When it was first and last seen alive, s, the engine's clock."""
    events: list[Event] = field(default_factory=list)
    ended: bool = False
    gone: float = 0.0
    """When it was first found gone, s, the engine's clock."""

    @property
    def end(self) -> Event | None:
        """How it ended, where that was heard of."""
        return next((event for event in self.events if event.kind not in OF_PEERS), None)

    def is_over(self, now: float) -> bool:
        """Whether it has ended, and how is known or will not be heard any more."""
        return self.ended and (self.gone == 0.0 or now - self.gone > SETTLE_S or any(e.words != UNSEEN for e in self._ends()))

    def _ends(self) -> Iterator[Event]:
        return (event for event in self.events if event.kind not in OF_PEERS)


@dataclass(frozen=True, slots=True)
class Incident:
    """What happened to one job. ``first``: who may have failed first; one where that is sure. ``outside``: why nobody of it is
    to blame, empty where somebody may be. ``over``: every process that was known of it has ended.
    """

    processes: tuple[Known, ...]
    events: tuple[Event, ...]
    first: tuple[Event, ...]
    over: bool
    outside: str = ""

    @property
    def key(self) -> Life:
        """What no other incident has."""
        return min(one.life for one in self.processes)

    @property
    def hashes(self) -> frozenset[str]:
        """Its communicators, as verdicts name them."""
        return frozenset(f"{own.hash:016x}" for one in self.processes for own in one.sample.communicators)

    def failures(self) -> tuple[Failure, ...]:
        """In the order of time, the first :data:`MOST_TOLD`."""
        start = min(self.first, key=lambda event: event.time)
        return tuple(self._failure(event, start) for event in self.events[:MOST_TOLD])

    def _failure(self, event: Event, start: Event) -> Failure:
        first = Place.FIRST if len(self.first) == 1 else Place.PERHAPS
        before = not event.failed and all(event.surely_before(one) for one in self.first)
        place = first if event in self.first else Place.BEFORE if before else Place.FOLLOWED
        slack = 0.0 if event is start else event.slack(start)
        return Failure(
            event.kind, place, event.words, event.host, event.rank, event.pid, event.code, event.time,
            event.time - start.time, None if slack == inf else slack,
        )  # fmt: skip


class FailureLog:
    """Takes the batches of all nodes, and says what failed in which job. ``version`` rises with every failure."""

    def __init__(self) -> None:
        self.version = 0
        self._known: dict[str, dict[Life, Known]] = {}
        """By host."""
        self._number = 0
        self._latest = 0.0
        """The newest time that was heard, s, the engine's clock."""
        self._lines: list[tuple[KernelLogLine, float, float]] = []
        """Each with its time and the bound of its host's clock, s."""
        self._failed = False
        self._found: tuple[object, tuple[Incident, ...]] = (None, ())

    def feed(self, batch: NodeBatch) -> None:
        """Take a batch. O(samples) where nothing has happened."""
        offset = (batch.clock_offset_ns or 0) / 1e9
        clock = inf if batch.clock_error_ns is None else max(batch.clock_error_ns, 0) / 1e9
        if 0 < batch.wall_ns < 1 << 62:
            self._latest = max(self._latest, batch.wall_ns / 1e9 + offset)
        for end in batch.ends:
            self._end(end, end.wall_ns / 1e9 + offset, clock)
        for sample in batch.samples:
            self._see(sample, sample.wall_ns / 1e9 + offset, clock)
        for line in batch.network.kernel if batch.network is not None else ():
            if line.kind in ("xid", "memory") and 0 < line.wall_ns < 1 << 62 and len(self._lines) < MOST_LINES:
                self._lines.append((line, line.wall_ns / 1e9 + offset, clock))
                self.version += 1
        if batch.complete and batch.looked:
            self._forget_gone(batch)

    def _see(self, sample: ProcessSample, time: float, clock: float) -> None:
        life = _life(sample)
        known = self._known.get(life[0], {}).get(life)
        if sample.run_state == "X":
            if known is not None and not known.ended and known.end is None:
                gap = max(time - known.seen, 0.0) / 2
                self._add(known, FailureKind.ENDED, UNSEEN, time - gap, gap, clock)
            if known is not None:
                known.ended, known.gone = True, known.gone or time
            return
        if known is None:
            if self._number >= MOST_PROCESSES:
                return
            self._number += 1
            known = self._known.setdefault(life[0], {})[life] = Known(life, sample, time, time)
        elif known.sample.communicators is not sample.communicators:
            gap = max(time - known.seen, 0.0) / 2
            for kind, words in _new_of_nccl(known, sample):
                self._add(known, kind, words, time - gap, gap, clock)
        known.seen = time
        if sample.communicators or not known.sample.communicators:
            # One whose communicators are torn down is still of its job.
            known.sample = sample

    def _end(self, end: ProcessEnd, time: float, clock: float) -> None:
        known = self._known.get(end.host, {}).get((end.host, end.key.pid, end.key.start_time, end.key.part))
        if known is None or (known.end is not None and known.end.words != UNSEEN):
            return
        # A look may have found it gone before its end was heard of.
        known.events = [event for event in known.events if event.words != UNSEEN]
        known.ended = True
        kind = FailureKind.SIGNAL if end.signal is not None else FailureKind.EXIT if end.status else FailureKind.ENDED
        late = max(end.late_ns, 0) / 2e9
        self._add(known, kind, end.words, time - late, late, clock, end.signal or end.status, end.order)

    def _add(
        self, known: Known, kind: FailureKind, words: str, time: float, own_s: float, clock: float,
        code: int | None = None, order: int | None = None,
    ) -> None:  # fmt: skip
        host, pid, _, _ = known.life
        known.events.append(Event(kind, words, host, time, own_s, clock, known.life, known.sample.rank, pid, code, order))
        self.version += 1
        self._failed |= kind is not FailureKind.ENDED

    def _forget_gone(self, batch: NodeBatch) -> None:
        """Of processes of a host that are not there any more those are forgotten that nothing happened to."""
        there = {_life(sample) for sample in batch.samples}
        known = self._known.get(batch.host, {})
        for life in [life for life in known if life not in there]:
            known[life].ended = True
            if not self._failed:
                self._forget(life)

    def _forget(self, life: Life) -> None:
        self._number -= self._known.get(life[0], {}).pop(life, None) is not None

    def incidents(self, silent: Collection[str] = ()) -> tuple[Incident, ...]:
        """One for each job of which anything has failed; of ``silent`` hosts nothing more will be heard."""
        if not self._failed:
            return ()
        every = [one for known in self._known.values() for one in known.values()]
        over = sum(one.is_over(self._latest) for one in every)
        state = self.version, len(every), over, frozenset(silent)
        if self._found[0] != state:
            found = [
                incident for job in _jobs(every) if (incident := _incident(job, self._lines, silent, self._latest)) is not None
            ]  # fmt: skip
            kept = [incident for incident in found if not self._is_past(incident, every)]
            for incident in found if len(kept) < len(found) else ():
                for one in incident.processes if incident not in kept else ():
                    self._forget(one.life)
            self._failed = bool(kept)
            self._found = state, tuple(kept)
        return self._found[1]

    @staticmethod
    def _is_past(incident: Incident, every: Iterable[Known]) -> bool:
        """Whether a job came down long ago, or another one runs where it ran."""
        ended, hosts = max(event.time for event in incident.events), {one.life[0] for one in incident.processes}
        return incident.over and any(
            not one.ended and (one.seen > ended + KEPT_S or (one.life[0] in hosts and one.begun > ended)) for one in every
        )


def _life(sample: ProcessSample) -> Life:
    key = sample.process.key
    return sample.process.host, key.pid, key.start_time, key.part


def _new_of_nccl(known: Known, sample: ProcessSample) -> Iterator[tuple[FailureKind, str]]:
    """What NCCL reports in a process for the first time."""
    had = {event.kind for event in known.events}
    errors = {own.async_result for own in sample.communicators if own.async_result and own.async_result not in HEALTHY}
    if errors and FailureKind.NCCL_ERROR not in had:
        yield FailureKind.NCCL_ERROR, f"NCCL reports {', '.join(sorted(errors))}"
    if any(own.aborted for own in sample.communicators) and FailureKind.ABORT not in had:
        yield FailureKind.ABORT, "its communicators are aborted"


def _jobs(processes: Iterable[Known]) -> list[list[Known]]:
    """Processes that share communicators, directly or through others; one without is a job of its own."""
    part_of: dict[int, list[Known]] = {}
    parts: dict[int, list[Known]] = {}
    for one in processes:
        joined = [one]
        hashes = {own.hash for own in one.sample.communicators}
        for part in {id(part_of[number]): part_of[number] for number in hashes if number in part_of}.values():
            small, large = sorted((joined, part), key=len)
            large.extend(small)
            parts.pop(id(small), None)
            for other in small:
                part_of.update((own.hash, large) for own in other.sample.communicators)
            joined = large
        parts[id(joined)] = joined
        part_of.update(dict.fromkeys(hashes, joined))
    return list(parts.values())


def _incident(
    job: Sequence[Known], lines: Iterable[tuple[KernelLogLine, float, float]], silent: Collection[str], now: float
) -> Incident | None:
    """What happened to a job; ``None`` where nothing has failed."""
    own = [event for one in job for event in one.events]
    ends = [event for event in own if event.failed]
    if not ends:
        return None
    begun = min(event.time for event in ends)
    events = sorted(_with_log(job, own, lines, begun), key=lambda event: (event.time, event.order or 0))
    first = _first([event for event in events if event.failed and event.life is not None])
    over = all(one.is_over(now) or one.life[0] in silent for one in job) and any(one.ended for one in job)
    return Incident(tuple(job), tuple(events), tuple(first), over, _from_outside(job, first) if over else "")


def _with_log(
    job: Sequence[Known], own: Sequence[Event], lines: Iterable[tuple[KernelLogLine, float, float]], begun: float
) -> Iterator[Event]:
    """The events of the processes, with what the kernels' logs say of them, and of their hosts."""
    by_pid = {(one.life[0], one.life[1]): one for one in job}
    hosts = {one.life[0] for one in job}
    killed: set[Life] = set()
    for line, time, clock in lines:
        if line.host not in hosts or time < begun - XID_BEFORE_S:
            continue
        whose = by_pid.get((line.host, line.pid)) if line.pid is not None else None
        if line.kind == "memory" and whose is not None:
            killed.add(whose.life)
        elif line.kind == "memory":
            words = f"process {line.pid} was killed for want of memory"
            yield Event(FailureKind.MEMORY, words, line.host, time, LOG_S, clock, pid=line.pid)
        elif line.code not in NO_FAILURE:
            whose = whose or _on_gpu(job, line)
            event = Event(
                FailureKind.XID, f"Xid {line.code} of GPU {line.device}", line.host, time, LOG_S, clock, pid=line.pid,
                code=line.code,
            )  # fmt: skip
            yield event if whose is None else replace(event, life=whose.life, rank=whose.sample.rank, pid=whose.life[1])
    for event in own:
        if event.life in killed and event.kind is FailureKind.SIGNAL and event.code == signal.SIGKILL:
            yield replace(event, kind=FailureKind.MEMORY, words="killed for want of memory (SIGKILL)")
        else:
            yield event


def _on_gpu(job: Sequence[Known], line: KernelLogLine) -> Known | None:
    """The one process whose GPU an Xid names; its bus id lacks the function's number."""
    found = [
        one for one in job
        if one.life[0] == line.host and line.device
        and any(own.bus_id is not None and bus_text(own.bus_id).startswith(line.device) for own in one.sample.communicators)
    ]  # fmt: skip
    return found[0] if len(found) == 1 else None


def _first(failed: Collection[Event]) -> list[Event]:
    """Who may have failed first: nothing surely came before it. What peers report of others comes behind their ends."""
    found = [event for event in failed if not any(other.surely_before(event) for other in failed if other.life != event.life)]
    ends = [event for event in failed if event.kind not in OF_PEERS]
    found = [
        event for event in found
        if event.kind not in OF_PEERS
        or not any(end.life != event.life and not event.surely_before(end) for end in ends)
    ]  # fmt: skip
    # Of one process the earliest; it may have been aborted and then have ended.
    earliest: dict[Life | None, Event] = {}
    for event in sorted(found, key=lambda event: event.time):
        earliest.setdefault(event.life, event)
    return list(earliest.values()) or [min(failed, key=lambda event: event.time)]


def _unobserved_ranks(job: Sequence[Known]) -> int:
    """How many ranks the communicators have that no known process holds."""
    held = Counter(own.hash for one in job for own in one.sample.communicators)
    sizes = {own.hash: own.nranks for one in job for own in one.sample.communicators}
    return sum(max(size - held[number], 0) for number, size in sizes.items())


def _from_outside(job: Sequence[Known], first: Sequence[Event]) -> str:
    """Why nobody of the job is to blame for its end; empty where somebody may be."""
    ends = [one.end for one in job]
    codes = {event.code for event in first if event.kind is FailureKind.SIGNAL}
    if any(event.kind in OF_PEERS for event in first) and _unobserved_ranks(job):
        return "ranks that were not observed may have failed before what NCCL reports of the others"
    if all(event.kind is FailureKind.SIGNAL and event.code in FROM_OUTSIDE for event in first):
        return f"somebody ended it by {signal_name(min(code for code in codes if code is not None))}"
    same = {(end.kind, end.code) for end in ends if end is not None}
    times = [end.time for end in ends if end is not None]
    if len(job) > 1 and len(same) == 1 and len(times) == len(job) and ends[0] is not None and ends[0].kind is FailureKind.SIGNAL:
        code = ends[0].code or 0
        if code != signal.SIGABRT and max(times) - min(times) < TOGETHER_S:
            return f"somebody killed all of it at once by {signal_name(code)}"
    aborted = {
        event.life for one in job for event in one.events if event.kind is FailureKind.ABORT or event.code == signal.SIGABRT
    }
    # One that calls abort() by itself may be followed by its peers' watchdogs: it alone was first, and not by NCCL's flag.
    by_flag = len(first) > 1 or any(event.kind is FailureKind.ABORT for event in first)
    if by_flag and len(aborted) > 1 and all(event.life in aborted for event in first):
        return "a watchdog, or the program itself, aborted it"
    return ""
