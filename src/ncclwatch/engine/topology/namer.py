"""Learn a job from its calls while it runs, and say where in an iteration a rank or a call is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.labels import Stage, stage_of_role, stage_of_step
from ncclwatch.engine.topology.layout import infer
from ncclwatch.engine.topology.model import Learned, Placed, Role, Step
from ncclwatch.engine.topology.patterns import ROLES, encode, learn_patterns
from ncclwatch.engine.topology.record import (
    FUNCTIONS,
    POINT_TO_POINT,
    JobMap,
    KnownJob,
    Recorder,
    chosen_specimens,
    from_samples,
)
from ncclwatch.engine.topology.specimen import collapse
from ncclwatch.engine.topology.tracker import Followed, Track
from ncclwatch.model.events import Function, Kind
from ncclwatch.model.state import ProcessSample

FIRST_LOOK = 24
"""Operations a process (on average over the specimens) before the first attempt to infer anything."""
GROWTH = 1.35
"""Learn again when so many times as many operations were seen: early on, a part of an iteration looks like one."""
SETTLED_GROWTH = 4.0
STRAY = 0.3
"""Share of calls out of the pattern above which the pattern is learned anew."""
EARLY = 1_000_000
"""Records kept until the first samples say whose they are."""

_GROUPS = (int(Function.GROUP_START), int(Function.GROUP_END))
_NOBODY: NDArray[np.int64] = np.zeros(0, np.int64)


class StageNamer:
    """Feed it samples (who is which rank, which communicators) and calls (what is done on them); memory is bounded.

    Jobs on the same processes' hosts are kept apart; ``jobs`` holds what is known of each, ``learned`` of the largest.
    """

    def __init__(self) -> None:
        self._map = JobMap()
        self._recorder = Recorder([], 0)
        self._known: set[tuple[str, int, int]] | None = None
        """Communicators of the map, ``None`` before the first samples."""
        self._jobs: list[Followed] = []
        self._next = 0
        self._last_row = _NOBODY
        self._ranks: NDArray[np.int32] = np.zeros(0, np.int32)
        self._followed = self._strayed = 0
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
        self._learn(_NOBODY)
        by_place = {(sample.process.host, sample.process.pid): sample for sample in samples}
        places = self._map.places
        return [
            (job.learned, [by_place[place] for p in job.job.processes if (place := places[p]) in by_place]) for job in self._jobs
        ]

    def fall_back(self, samples: Iterable[ProcessSample]) -> None:
        """Where calls have told nothing of any job yet, learn what NCCL's counts tell; once for the communicators there are."""
        if self._known is None or self._jobs:
            return
        self._map.note_counts(samples)
        self._jobs = [self._learn_job(job, None, _NOBODY, by_counts=True) for job in self._map.jobs]
        self.by_counts = True

    # --- taking in -------------------------------------------------------------------------------------------------------------

    def note_samples(self, samples: Sequence[ProcessSample]) -> None:
        """Take who is which rank and what communicators there are. Processes and communicators that go are remembered."""
        present = {(s.process.host, s.process.pid, c.address) for s in samples for c in s.communicators}
        if present <= (self._known or set()):
            return
        self._known = present
        old_map, old = self._map, self._recorder
        self._map = from_samples(samples)
        specimens = [
            job.processes[i]
            for job in self._map.jobs
            for i in chosen_specimens([self._map.rank[process] for process in job.processes])
        ]
        self._recorder = Recorder(specimens, len(self._map.row_process))
        processes = {n: self._map.process[place] for n, place in enumerate(old_map.places) if place in self._map.process}
        rows = np.full(len(old_map.row_process), -1, np.int64)
        for (process, address), row in old_map.rows.items():
            rows[row] = self._map.rows.get((processes.get(process, -1), address), -1)
        self._recorder.inherit(old, processes, rows)
        self._last_row = np.full(len(self._map.places), -1, np.int64)
        self._ranks = np.array(self._map.rank, np.int32)
        self._jobs, self.by_counts = [], False
        self._next = max(1, FIRST_LOOK * max(1, len(specimens)))
        early, self._early = self._early, []
        for events, host in early:
            self.observe(events, host=host)

    def observe(self, events: NDArray[Any], *, host: str = "") -> Placed:
        """Take a batch of ``EVENT_DTYPE`` records in the order of their times and say where they are, as far as is learned.

        ``host`` is needed only where processes of several hosts may have equal pids.
        """
        if self._known is None and sum(len(e) for e, _ in self._early) < EARLY:
            self._early.append((events.copy(), host))
        function = events["function"]
        group = np.isin(function, _GROUPS)
        at = np.flatnonzero((events["kind"] == Kind.ENTER) & (((function > 0) & (function < FUNCTIONS)) | group))
        process, row = self._map.find_calls(events[at], host)
        row = np.where(group[at], -1, row)
        keep = (process >= 0) & (group[at] | (row >= 0))
        at, process, row = at[keep], process[keep], row[keep]
        if not len(at):
            return _nothing()
        part = events[at]
        self._recorder.add(part, process, row)
        # The pointers read the batch that taught them as well: nothing of it is lost.
        if self._due():
            self._learn(process[row >= 0])
        return self._place(part, at, process, row)

    def _due(self) -> bool:
        if self._followed > 4096 and self._strayed > STRAY * self._followed:
            self._followed = self._strayed = 0
            return True
        # Counted over everybody, of whom the specimens are a part.
        return self._recorder.taken * max(1, len(self._recorder.specimens)) >= self._next * max(1, len(self._map.places))

    def _learn(self, newest: NDArray[np.int64]) -> None:
        """Infer everything anew; ``newest`` are the processes of the operations that are recorded and still have to be placed."""
        settled = bool(self._jobs) and all(job.learned.confirmed for job in self._jobs)
        self._next = int(max(self._next, 1) * (SETTLED_GROWTH if settled else GROWTH)) + 1
        before = dict(enumerate(self._jobs)) if not self.by_counts else {}
        self.by_counts = not self._recorder.taken
        self._jobs = [self._learn_job(job, before.get(number), newest) for number, job in enumerate(self._map.jobs)]

    def _learn_job(
        self, known: KnownJob, before: Followed | None, newest: NDArray[np.int64], *, by_counts: bool = False
    ) -> Followed:
        topology, specimens = infer(self._map, known, self._recorder, by_counts=by_counts)
        encoding = encode(self._map, topology, specimens)
        patterns = learn_patterns(specimens, encoding)
        learned = Learned(topology, patterns)
        # Sizes that do not fit together speak against what seems to be an iteration.
        confirmed = before is not None and _same(before.learned, learned) and topology.layout.pp is not None
        learned.confirmed = confirmed or (bool(patterns) and all(pattern.complete for pattern in patterns.values()))
        if before is not None and confirmed and before.learned.confirmed:
            before.learned = learned
            for track in before.tracks.values():
                track.pattern = patterns[track.pattern.stage]
            return before
        job = Followed(known, learned, encoding)
        if learned.confirmed:
            stage_of = learned.pattern_of
            ranks = ((process, self._map.rank[process]) for process in known.processes)
            job.tracks = {process: Track(patterns[stage_of[rank]]) for process, rank in ranks if rank in stage_of}
            job.tracked = np.zeros(len(self._map.places), np.bool_)
            job.tracked[list(job.tracks)] = True
            self._replay(job, newest)
        return job

    def _replay(self, job: Followed, newest: NDArray[np.int64]) -> None:
        """Let the pointers of the specimens run over what was recorded before the latest batch."""
        exchanges = set(np.flatnonzero(job.encoding.all_to_all).tolist())
        for process in self._recorder.specimens:
            if process in job.tracks:
                history = self._recorder.history(process)
                history = collapse(history[: len(history) - int(np.count_nonzero(newest == process))], exchanges)
                tokens, _ = job.encoding.tokens(history, history["row"])
                job.follow(process, tokens, history["time_ns"])

    # --- places ----------------------------------------------------------------------------------------------------------------

    def _place(self, part: NDArray[Any], at: NDArray[np.int64], process: NDArray[np.int64], row: NDArray[np.int64]) -> Placed:
        jobs = [job for job in self._jobs if job.tracks]
        if not jobs:
            return _nothing()
        order = np.argsort(process, kind="stable")
        part, at, process, row = part[order], at[order], process[order], row[order]
        before = np.r_[-1, row[:-1]]
        first = np.r_[True, process[1:] != process[:-1]]
        before[first] = self._last_row[process[first]]
        last = np.r_[first[1:], True]
        self._last_row[process[last]] = row[last]
        found = [self._place_job(job, part, at, process, row, before) for job in jobs]
        return Placed(*(np.concatenate(columns) for columns in zip(*found, strict=True)))

    def _place_job(
        self,
        job: Followed,
        part: NDArray[Any],
        at: NDArray[np.int64],
        process: NDArray[np.int64],
        row: NDArray[np.int64],
        before: NDArray[np.int64],
    ) -> tuple[NDArray[Any], ...]:
        """The columns of ``Placed``; ``before`` is the row of the call before each."""
        # A grouped exchange is one operation: its first part.
        exchange = job.encoding.all_to_all[row] & np.isin(part["function"], POINT_TO_POINT)
        chosen = (row >= 0) & ~(exchange & (before == row)) & job.tracked[process]
        own, rows, numbers, exchange = part[chosen], row[chosen], process[chosen], exchange[chosen]
        own["function"][exchange], own["peer"][exchange] = Function.ALL_TO_ALL, -1
        tokens, _ = job.encoding.tokens(own, rows)
        bounds = np.r_[0, np.flatnonzero(np.diff(numbers)) + 1, len(numbers)]
        positions, iterations = np.empty(len(numbers), np.int32), np.empty(len(numbers), np.int64)
        exact, stages = np.empty(len(numbers), np.bool_), np.empty(len(numbers), np.int32)
        pieces = [(int(numbers[a]), slice(a, b)) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True) if b > a]
        # The reference goes first: others take the number of the iteration from it when they find their place.
        pieces.sort(key=lambda piece: piece[0] != job.reference)
        for number, piece in pieces:
            positions[piece], iterations[piece], exact[piece] = job.follow(number, tokens[piece], own["time_ns"][piece])
            stages[piece] = job.tracks[number].pattern.stage
        self._followed += len(positions)
        self._strayed += int(np.count_nonzero(positions < 0))
        return at[chosen], self._ranks[numbers], stages, positions, iterations, exact

    # --- asking ----------------------------------------------------------------------------------------------------------------

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
        confidence = round(step.confidence * track.pattern.confidence * (1.0 if track.exact else 0.6), 3)
        return track.position - at, stage_of_step(step, job.learned.topology, rank, confidence, certain=track.exact)

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


def _nothing() -> Placed:
    wide, narrow = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return Placed(wide, narrow, narrow, narrow, wide, np.zeros(0, np.bool_))


def _same(one: Learned, other: Learned) -> bool:
    """Whether pointers into the patterns of one are valid in the other."""
    return (
        one.pattern_of == other.pattern_of
        and one.topology.groups == other.topology.groups
        and all(np.array_equal(one.patterns[n].tokens, p.tokens) for n, p in other.patterns.items())
    )
