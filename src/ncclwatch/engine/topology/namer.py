"""Learn a job from its calls while it runs, and say where in an iteration a rank or a call is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.iteration import collapse
from ncclwatch.engine.topology.labels import Stage, stage_of_role, stage_of_step
from ncclwatch.engine.topology.layout import infer
from ncclwatch.engine.topology.model import Learned, Role, Step
from ncclwatch.engine.topology.patterns import ROLES, Encoding, Track, encode, learn_patterns
from ncclwatch.engine.topology.record import FUNCTIONS, POINT_TO_POINT, JobMap, KnownJob, Recorder, choose_specimens, from_samples
from ncclwatch.model.events import Function, Kind
from ncclwatch.model.state import ProcessSample

FIRST_AT = 24
"""Unit: operations a process, on average, before anything is inferred. From: two iterations of the smallest jobs of
``score.topology``, two layers of others; half as many name no layout wrong, four times as many place 11 % fewer calls.
"""
GROWTH = 1.35
"""Bound: learn again when so many times as many operations were seen: all learning together costs four times the last."""
SETTLED_GROWTH = 2.0
"""Bound: the same once a pattern was confirmed: all learning together costs no more than twice the last."""
EARLY = 1_000_000
"""Bound: records kept until the first samples say whose they are."""

_GROUPS = (int(Function.GROUP_START), int(Function.GROUP_END))


@dataclass(slots=True)
class Followed:
    """One job with what was learned of it, and a pointer into its pattern for every process."""

    job: KnownJob
    learned: Learned
    encoding: Encoding
    tracked: NDArray[np.bool_]
    """Whether a process has a pointer, by its number."""
    tracks: dict[int, Track] = field(default_factory=dict)
    """process → pointer"""


class StageNamer:
    """Feed it samples (who is which rank, which communicators) and calls (what is done on them); memory is bounded.

    Jobs on the same processes' hosts are kept apart; ``jobs`` holds what is known of each, ``learned`` of the largest.
    """

    def __init__(self) -> None:
        self._map = JobMap()
        self._recorder = Recorder([], 0)
        self._known: set[tuple[str, int, int]] = set()
        """Communicators of the map."""
        self._jobs: list[Followed] = []
        self._next = 0
        self._last_row: NDArray[np.int64] = np.zeros(0, np.int64)
        """Of each process the row of its latest call."""
        self._early: list[tuple[NDArray[Any], str]] = []
        self.by_counts = False
        """Whether what is known follows from NCCL's counts alone: roles and places, but not the order of calls."""

    @property
    def jobs(self) -> list[Learned]:
        """What is known of each job."""
        return [job.learned for job in self._jobs]

    @property
    def learned(self) -> Learned | None:
        """What is known of the largest job; ``None`` before anything was inferred."""
        return max(self.jobs, key=lambda one: one.topology.world, default=None)

    def everything(self, samples: Sequence[ProcessSample]) -> list[tuple[Learned, list[ProcessSample]]]:
        """Every job with the newest samples of its processes, from all that was recorded; without calls, by NCCL's counts."""
        self.note_samples(samples)
        self._map.note_counts(samples)
        self._learn()
        by_place = {(sample.process.host, sample.process.pid): sample for sample in samples}
        places = self._map.places
        return [
            (job.learned, [by_place[place] for p in job.job.processes if (place := places[p]) in by_place]) for job in self._jobs
        ]

    def fall_back(self, samples: Iterable[ProcessSample]) -> None:
        """Where calls have told nothing of any job yet, learn what NCCL's counts tell; once for the communicators there are."""
        if self._map.jobs and not self._jobs:
            self._map.note_counts(samples)
            self._learn(by_counts=True)

    def note_samples(self, samples: Sequence[ProcessSample]) -> None:
        """Take who is which rank and what communicators there are. Processes and communicators that go are remembered."""
        present = {(s.process.host, s.process.pid, c.address) for s in samples for c in s.communicators}
        if present <= self._known:
            return
        self._known = present
        old_map, old = self._map, self._recorder
        self._map = from_samples(samples)
        specimens = [process for job in self._map.jobs for process in choose_specimens(self._map, job)]
        self._recorder = Recorder(specimens, len(self._map.row_process))
        processes = {n: self._map.process[place] for n, place in enumerate(old_map.places) if place in self._map.process}
        rows = np.full(len(old_map.row_process), -1, np.int64)
        for (process, address), row in old_map.rows.items():
            rows[row] = self._map.rows.get((processes.get(process, -1), address), -1)
        self._recorder.inherit(old, processes, rows)
        self._last_row = np.full(len(self._map.places), -1, np.int64)
        self._jobs, self.by_counts = [], False
        self._next = max(1, FIRST_AT * max(1, len(specimens)))
        early, self._early = self._early, []
        for events, host in early:
            self.observe(events, host=host)

    def observe(self, events: NDArray[Any], *, host: str = "") -> None:
        """Take a batch of ``EVENT_DTYPE`` records in the order of their times.

        ``host`` is needed only where processes of several hosts may have equal pids.
        """
        if not self._map.jobs and sum(len(e) for e, _ in self._early) < EARLY:
            self._early.append((events.copy(), host))
        function = events["function"]
        group = np.isin(function, _GROUPS)
        at = np.flatnonzero((events["kind"] == Kind.ENTER) & (((function > 0) & (function < FUNCTIONS)) | group))
        process, row = self._map.find_calls(events[at], host)
        row = np.where(group[at], -1, row)
        keep = (process >= 0) & (group[at] | (row >= 0))
        if keep.any():
            part, process, row = events[at[keep]], process[keep], row[keep]
            self._follow(part, process, row)
            self._recorder.add(part, process, row)
            # Counted over everybody, of whom the specimens are a part.
            share = len(self._recorder.specimens) / len(self._map.places)
            if self._recorder.taken * share >= self._next:
                self._learn()

    def _learn(self, *, by_counts: bool = False) -> None:
        """Infer everything anew."""
        settled = bool(self._jobs) and all(job.learned.confirmed for job in self._jobs)
        if not by_counts:
            self._next = int(max(self._next, 1) * (SETTLED_GROWTH if settled else GROWTH)) + 1
        before = dict(enumerate(self._jobs)) if not self.by_counts else {}
        self.by_counts = by_counts or not self._recorder.taken
        self._jobs = [self._learn_job(job, before.get(number)) for number, job in enumerate(self._map.jobs)]

    def _learn_job(self, known: KnownJob, before: Followed | None) -> Followed:
        topology, specimens = infer(self._map, known, self._recorder, by_counts=self.by_counts)
        encoding = encode(self._map, topology, specimens)
        learned = Learned(topology, learn_patterns(specimens, encoding))
        # Sizes that do not fit together speak against what seems to be an iteration.
        told = topology.layout.pp is not None and all(one.balanced for one in learned.patterns.values())
        same = before is not None and _same(before.learned, learned) and told
        complete = bool(learned.patterns) and all(pattern.complete for pattern in learned.patterns.values())
        learned.confirmed = same or complete
        if before is not None and same and before.learned.confirmed:
            before.learned = learned
            for track in before.tracks.values():
                track.pattern = learned.patterns[track.pattern.stage]
            return before
        job = Followed(known, learned, encoding, tracked=np.zeros(len(self._map.places), np.bool_))
        if learned.confirmed:
            stage_of = learned.pattern_of
            ranks = ((process, self._map.rank[process]) for process in known.processes)
            job.tracks = {process: Track(learned.patterns[stage_of[rank]]) for process, rank in ranks if rank in stage_of}
            job.tracked[list(job.tracks)] = True
            self._replay(job)
        return job

    def _replay(self, job: Followed) -> None:
        """Let the pointers of the specimens run over what was recorded."""
        exchanges = set(np.flatnonzero(job.encoding.all_to_all).tolist())
        for process in set(self._recorder.specimens) & job.tracks.keys():
            history = collapse(self._recorder.history(process), exchanges)
            tokens, _ = job.encoding.tokens(history, history["row"])
            job.tracks[process].follow(tokens)

    def _follow(self, part: NDArray[Any], process: NDArray[np.int64], row: NDArray[np.int64]) -> None:
        """Let the pointers run over a batch."""
        order = np.argsort(process, kind="stable")
        part, process, row = part[order], process[order], row[order]
        first = np.r_[True, process[1:] != process[:-1]]
        before = np.where(first, self._last_row[process], np.r_[-1, row[:-1]])
        last = np.r_[first[1:], True]
        self._last_row[process[last]] = row[last]
        for job in self._jobs:
            # A grouped exchange is one operation: its first part.
            exchange = job.encoding.all_to_all[row] & np.isin(part["function"], POINT_TO_POINT)
            chosen = np.flatnonzero((row >= 0) & ~(exchange & (before == row)) & job.tracked[process])
            own, numbers, exchange = part[chosen], process[chosen], exchange[chosen]
            own["function"][exchange], own["peer"][exchange] = Function.ALL_TO_ALL, -1
            tokens, _ = job.encoding.tokens(own, row[chosen])
            bounds = np.flatnonzero(np.diff(numbers)) + 1
            for piece in np.split(np.arange(len(numbers)), bounds) if len(numbers) else ():
                job.tracks[int(numbers[piece[0]])].follow(tokens[piece])

    def role_of(self, host: str, pid: int, comm: int) -> Role:
        """The role of a communicator (by its address in the process)."""
        found = self._find(host, pid, comm)
        return Role.UNSURE if found is None else ROLES[found[1].encoding.role[found[2]]]

    def place_of(self, host: str, pid: int) -> Stage | None:
        """A process's place in pipeline and tensor group alone; ``None`` where neither is known."""
        found = self._find(host, pid, 0)
        return _place_in(found[1].learned, self._map.rank[found[0]]) if found is not None else None

    def place_of_rank(self, rank: int | None) -> Stage | None:
        """The same of a rank that nobody observes, where there is one job."""
        return _place_in(self._jobs[0].learned, rank) if rank is not None and len(self._jobs) == 1 else None

    def stage_of(self, host: str, pid: int, comm: int = 0, *, calls_ago: int = 0) -> Stage | None:
        """Where a call of a process is, counted back on the communicator at address ``comm`` (0: over all of them).

        ``calls_ago`` 0 is the latest call, 1 the one before, −1 the one it has yet to make. ``None`` where nothing is known of
        the process; where it has no place in a pattern, only what its communicator's role says.
        """
        found = self.call_of(host, pid, comm, calls_ago=calls_ago)
        return found[1] if found is not None else None

    def call_of(self, host: str, pid: int, comm: int = 0, *, calls_ago: int = 0) -> tuple[int, Stage] | None:
        """As :meth:`stage_of`, with how many operations of any communicator were called after it."""
        found = self._find(host, pid, comm)
        if found is None:
            return None
        process, job, row = found
        rank, track, role = self._map.rank[process], job.tracks.get(process), ROLES[job.encoding.role[row]]
        at = self._step(track, row, role, calls_ago) if track is not None and track.position >= 0 else None
        if at is None or track is None:
            known = role not in (Role.UNSURE, Role.UNUSED)
            return (0, stage_of_role(role, job.learned.topology, rank)) if known else None
        step = track.pattern.steps[at % len(track.pattern)]
        return track.position - at, stage_of_step(step, job.learned.topology, rank)

    def _find(self, host: str, pid: int, comm: int) -> tuple[int, Followed, int] | None:
        """Process, job and row (−1: of no communicator)."""
        process = self._map.find(host, pid)
        if process < 0 or self._map.job_of[process] >= len(self._jobs):
            return None
        row = self._map.rows.get((process, comm), -1)
        return (process, self._jobs[self._map.job_of[process]], row) if row >= 0 or not comm else None

    def _step(self, track: Track, row: int, role: Role, calls_ago: int) -> int | None:
        """Index (to be taken modulo length) of the step ``calls_ago`` calls on this row before the pointer, or after it."""
        steps = track.pattern.steps
        if row < 0:
            return track.position - calls_ago
        used = self._recorder.calls[row] > 0

        def ours(step: Step) -> bool:
            return step.role is role and (step.function == Function.ALL_TO_ALL or bool(used[step.function]))

        begin, way, number = (track.position + 1, 1, -calls_ago - 1) if calls_ago < 0 else (track.position, -1, calls_ago)
        places = (at for at in range(begin, begin + way * len(steps), way) if ours(steps[at % len(steps)]))
        return next(itertools.islice(places, number, None), None)


def _place_in(learned: Learned, rank: int) -> Stage | None:
    stage = stage_of_role(Role.UNSURE, learned.topology, rank)
    return stage if max(stage.pipeline_stage, stage.tensor_index) >= 0 else None


def _same(one: Learned, other: Learned) -> bool:
    """Whether pointers into the patterns of one are valid in the other."""
    return (
        one.pattern_of == other.pattern_of
        and one.topology.groups == other.topology.groups
        and all(np.array_equal(one.patterns[n].tokens, p.tokens) for n, p in other.patterns.items())
    )
