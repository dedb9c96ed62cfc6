"""Learn a job from its calls while it runs, and say where in an iteration a rank or a call stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.answers import as_stage, by_role
from ncclwatch.engine.topology.followed import Followed
from ncclwatch.engine.topology.infer import infer
from ncclwatch.engine.topology.jobmap import JobFacts, JobMap, from_samples
from ncclwatch.engine.topology.lookup import Lookup
from ncclwatch.engine.topology.model import Learned, Placed, Role, Stage, Step, Topology
from ncclwatch.engine.topology.patterns import encode, learn_patterns, pattern_of_ranks, tokens_of
from ncclwatch.engine.topology.record import FUNCTIONS, Recorder, chosen_specimens
from ncclwatch.engine.topology.specimen import POINT_TO_POINT, collapse
from ncclwatch.engine.topology.tracker import Track, unique_tokens
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


class StageNamer:
    """Feed it samples (who is which rank, which communicators) and calls (what is done on them); memory is bounded.

    Jobs on the same processes' hosts are kept apart; ``jobs`` holds what is known of each, ``learned`` of the largest.
    """

    def __init__(self) -> None:
        self._map: JobMap | None = None
        self._known: set[tuple[str, int, int]] = set()
        self._recorder: Recorder | None = None
        self._jobs: list[Followed] = []
        self._next = 0
        self._rows = Lookup()
        self._last_row: NDArray[np.int64] = np.zeros(0, np.int64)
        self._ranks: NDArray[np.int32] = np.zeros(0, np.int32)
        self._followed = self._strayed = 0
        self._early: list[tuple[NDArray[Any], str]] = []
        self.lost = 0
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
        if self._map is None:
            return []
        self._map.note_counts(samples)
        self._learn(np.zeros(0, np.int64))
        by_place = {(sample.process.host, sample.process.pid): sample for sample in samples}
        return [
            (job.learned, [by_place[place] for p in job.facts.processes if (place := self._map.places[p]) in by_place])
            for job in self._jobs
        ]

    def fall_back(self, samples: Iterable[ProcessSample]) -> None:
        """Where calls have told nothing of any job yet, learn what NCCL's counts tell; once for the communicators there are."""
        if self._map is None or self._jobs:
            return
        self._map.note_counts(samples)
        nothing = np.zeros(0, np.int64)
        self._jobs = [self._learn_job(facts, None, nothing, by_counts=True) for facts in self._map.jobs]
        self.by_counts = True

    # --- taking in -------------------------------------------------------------------------------------------------------

    def note_samples(self, samples: Sequence[ProcessSample]) -> None:
        """Take who is which rank and what communicators there are. Processes and communicators that go are remembered."""
        present = {(s.process.host, s.process.pid, c.address) for s in samples for c in s.communicators}
        if present <= self._known:
            return
        self._known = present
        old_map, old = self._map, self._recorder
        self._map = from_samples(samples)
        places = self._map.places
        specimens = [
            job.processes[i]
            for job in self._map.jobs
            for i in chosen_specimens([self._map.rank[process] for process in job.processes])
        ]
        self._recorder = Recorder(specimens, len(self._map.row_process))
        if old_map is not None and old is not None:
            processes = {n: self._map.process[place] for n, place in enumerate(old_map.places) if place in self._map.process}
            rows = np.full(max(1, len(old_map.row_process)), -1, np.int64)
            for (process, address), row in old_map.rows.items():
                if process in processes:
                    rows[row] = self._map.rows.get((processes[process], address), -1)
            self._recorder.inherit(old, processes, rows)
        self._rows = Lookup(self._map)
        self._last_row = np.full(len(places), -1, np.int64)
        self._ranks = np.array(self._map.rank, np.int32)
        self._jobs, self.by_counts = [], False
        self._next = max(1, FIRST_LOOK * max(1, len(specimens)))
        early, self._early = self._early, []
        for events, host in early:
            self.observe(events, host=host)

    def observe(self, events: NDArray[Any], lost: int = 0, *, host: str = "") -> Placed:
        """Take a batch of ``EVENT_DTYPE`` records in the order of their times and say where they stand, as far as is learned.

        ``host`` is needed only where processes of several hosts may have equal pids.
        """
        self.lost += lost
        if self._map is None or self._recorder is None or not len(events):
            if self._map is None and len(events) and sum(len(e) for e, _ in self._early) < EARLY:
                self._early.append((events.copy(), host))
            return _nothing()
        function = events["function"]
        wanted = (events["kind"] == Kind.ENTER) & (((function > 0) & (function < FUNCTIONS)) | np.isin(function, _GROUPS))
        at = np.flatnonzero(wanted)
        part = events[at]
        process, row = self._rows.find(part, host)
        group = np.isin(part["function"], _GROUPS)
        keep = (process >= 0) & (group | (row >= 0))
        row = np.where(group, -1, row)
        if not keep.all():
            at, part, process, row = at[keep], part[keep], process[keep], row[keep]
        if not len(at):
            return _nothing()
        self._recorder.add(part, process, row)
        # The pointers read the batch that taught them as well: nothing of it is lost.
        if self._due():
            self._learn(process[row >= 0])
        return self._place(part, at, process, row)

    def _due(self) -> bool:
        if self._recorder is None or self._map is None:
            return False
        if self._followed > 4096 and self._strayed > STRAY * self._followed:
            self._followed = self._strayed = 0
            return True
        # Counted over everybody, of whom the specimens are a part.
        everybody = max(1, len(self._map.places))
        return self._recorder.taken * max(1, len(self._recorder.specimens)) >= self._next * everybody

    def _learn(self, newest: NDArray[np.int64]) -> None:
        """Infer everything anew; ``newest`` are the processes of the operations that are recorded and still have to be placed."""
        if self._map is None or self._recorder is None:
            return
        settled = bool(self._jobs) and all(job.learned.confirmed for job in self._jobs)
        self._next = int(max(self._next, 1) * (SETTLED_GROWTH if settled else GROWTH)) + 1
        before = dict(enumerate(self._jobs)) if not self.by_counts else {}
        self.by_counts = not self._recorder.taken
        self._jobs = [self._learn_job(facts, before.get(number), newest) for number, facts in enumerate(self._map.jobs)]

    def _learn_job(
        self, facts: JobFacts, before: Followed | None, newest: NDArray[np.int64], *, by_counts: bool = False
    ) -> Followed:
        if self._map is None or self._recorder is None:
            raise RuntimeError("nothing is known of any process")
        inference = infer(self._map, facts, self._recorder, by_counts=by_counts)
        encoding = encode(self._map, inference)
        patterns = learn_patterns(self._map, inference, encoding)
        learned = Learned(inference.topology, patterns, pattern_of_ranks(inference.topology, patterns))
        # Sizes that do not fit together speak against what seems to be an iteration.
        confirmed = before is not None and _same(before.learned, learned) and inference.topology.layout.pp is not None
        learned.confirmed = confirmed or (bool(patterns) and all(pattern.complete for pattern in patterns.values()))
        if before is not None and confirmed and before.learned.confirmed:
            before.learned = learned
            for track in before.tracks.values():
                track.pattern = patterns[track.pattern.id]
            return before
        job = Followed(facts, learned, encoding)
        if not learned.confirmed:
            return job
        shared = {number: unique_tokens(pattern) for number, pattern in patterns.items()}
        for process in facts.processes:
            number = learned.pattern_of.get(self._map.rank[process])
            if number is not None:
                job.tracks[process] = Track(patterns[number], shared[number])
        self._replay(job, newest)
        return job

    def _replay(self, job: Followed, newest: NDArray[np.int64]) -> None:
        """Let the pointers of the specimens run over what was recorded before the latest batch."""
        if self._recorder is None or self._map is None:
            return
        exchanges = set(np.flatnonzero(job.encoding.all_to_all()).tolist())
        for process in self._recorder.specimens:
            if process not in job.tracks:
                continue
            history = self._recorder.history(process)
            history = collapse(history[: len(history) - int(np.count_nonzero(newest == process))], exchanges)
            row = history["row"].astype(np.int64)
            columns = (history[name] for name in ("function", "count", "datatype", "peer"))
            tokens, _ = tokens_of(job.encoding, self._map, job.learned.topology, row, *columns)
            job.follow(process, job.tracks[process], tokens, history["time_ns"])

    # --- places ------------------------------------------------------------------------------------------------------------

    def _place(self, part: NDArray[Any], at: NDArray[np.int64], process: NDArray[np.int64], row: NDArray[np.int64]) -> Placed:
        if self._map is None or not any(job.tracks for job in self._jobs):
            return _nothing()
        order = np.argsort(process, kind="stable")
        part, at, process, row = part[order], at[order], process[order], row[order]
        found = [self._place_job(job, part, at, process, row) for job in self._jobs if job.tracks]
        self._remember_rows(process, row)
        joined = [np.concatenate(columns) for columns in zip(*found, strict=True)] if found else []
        return Placed(*joined) if joined else _nothing()

    def _remember_rows(self, process: NDArray[np.int64], row: NDArray[np.int64]) -> None:
        last = np.flatnonzero(np.r_[process[1:] != process[:-1], True])
        self._last_row[process[last]] = row[last]

    def _place_job(
        self, job: Followed, part: NDArray[Any], at: NDArray[np.int64], process: NDArray[np.int64], row: NDArray[np.int64]
    ) -> tuple[NDArray[Any], ...]:
        if self._map is None:
            raise RuntimeError("nothing is known of any process")
        tracked = job.tracked(len(self._map.places))
        all_to_all = job.exchange()[row] & np.isin(part["function"], POINT_TO_POINT)
        before = np.r_[-1, row[:-1]]
        first = np.r_[True, process[1:] != process[:-1]]
        before[first] = self._last_row[process[first]]
        again = all_to_all & (before == row)
        operation = np.flatnonzero(tracked[process] & (row >= 0) & ~again)
        if not len(operation):
            return _nothing_columns()
        own, rows = part[operation], row[operation]
        exchange = all_to_all[operation]
        tokens, _ = tokens_of(
            job.encoding,
            self._map,
            job.learned.topology,
            rows,
            np.where(exchange, np.uint16(Function.ALL_TO_ALL), own["function"]),
            own["count"],
            own["datatype"],
            np.where(exchange, -1, own["peer"]),
        )
        numbers = process[operation]
        bounds = np.r_[0, np.flatnonzero(np.diff(numbers)) + 1, len(numbers)]
        positions, iterations = np.empty(len(numbers), np.int32), np.empty(len(numbers), np.int64)
        exact, patterns = np.empty(len(numbers), np.bool_), np.empty(len(numbers), np.int32)
        pieces = [(int(numbers[a]), slice(a, b)) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
        # The reference goes first: others take the number of the iteration from it when they find their place.
        pieces.sort(key=lambda piece: piece[0] != job.reference)
        for number, piece in pieces:
            track = job.tracks[number]
            results = job.follow(number, track, tokens[piece], own["time_ns"][piece])
            positions[piece], iterations[piece], exact[piece] = results
            patterns[piece] = track.pattern.id
        self._followed += len(positions)
        self._strayed += int(np.count_nonzero(positions < 0))
        rank = self._ranks[numbers]
        return at[operation], rank, patterns, positions, iterations, exact

    # --- asking ------------------------------------------------------------------------------------------------------------

    def role_of(self, host: str, pid: int, comm: int) -> Role:
        """The role of a communicator (by its address in the process)."""
        found = self._find(host, pid, comm)
        return Role.UNSURE if found is None else list(Role)[int(found[1].encoding.role[found[2]])]

    def place_of(self, host: str, pid: int) -> Stage | None:
        """A process's place in pipeline and tensor group alone; ``None`` where neither is known."""
        found = self._find(host, pid, 0)
        return _place_in(found[1].learned.topology, self._map.rank[found[0]]) if found is not None and self._map else None

    def place_of_rank(self, rank: int | None) -> Stage | None:
        """The same of a rank that nobody observes, where there is one job."""
        return _place_in(self._jobs[0].learned.topology, rank) if rank is not None and len(self._jobs) == 1 else None

    def stage_of(self, host: str, pid: int, comm: int = 0, *, calls_ago: int = 0) -> Stage | None:
        """Where a call of a process stands, counted back on the communicator at address ``comm`` (0: over all of them).

        ``calls_ago`` 0 is the latest call, 1 the one before, −1 the one it has yet to make. ``None`` where nothing is known of
        the process; where it has no place in a pattern, only what its communicator's role says.
        """
        found = self.call_of(host, pid, comm, calls_ago=calls_ago)
        return found[1] if found is not None else None

    def call_of(self, host: str, pid: int, comm: int = 0, *, calls_ago: int = 0) -> tuple[int, Stage] | None:
        """As :meth:`stage_of`, with how many operations of any communicator were called after it."""
        found = self._find(host, pid, comm)
        if found is None or self._map is None:
            return None
        process, job, row = found
        topology = job.learned.topology
        rank = self._map.rank[process]
        track = job.tracks.get(process)
        role = list(Role)[int(job.encoding.role[row])] if row >= 0 else Role.UNSURE
        at = self._step(track, row, role, calls_ago) if track is not None and track.position >= 0 else None
        if at is None or track is None:
            return (0, by_role(role, topology, rank)) if row >= 0 and role not in (Role.UNSURE, Role.UNUSED) else None
        step = track.pattern.steps[at % len(track.pattern)]
        confidence = step.confidence * track.pattern.confidence * (1.0 if track.exact else 0.6)
        return track.position - at, as_stage(step, topology, rank, round(confidence, 3), certain=track.exact)

    def _find(self, host: str, pid: int, comm: int) -> tuple[int, Followed, int] | None:
        if self._map is None:
            return None
        process = self._map.find(host, pid)
        if process < 0 or self._map.job_of[process] >= len(self._jobs):
            return None
        row = self._map.rows.get((process, comm), -1)
        if comm and row < 0:
            return None
        return process, self._jobs[self._map.job_of[process]], row

    def _step(self, track: Track, row: int, role: Role, calls_ago: int) -> int | None:
        """Index (to be taken modulo length) of the step ``calls_ago`` calls on this row before the pointer, or after it."""
        steps = track.pattern.steps
        length = len(steps)
        if row < 0:
            return track.position - calls_ago
        if self._recorder is None:
            return None
        used = self._recorder.calls[row] > 0

        def ours(step: Step) -> bool:
            return step.role is role and (step.function == Function.ALL_TO_ALL or bool(used[step.function]))

        direction, left = (1, -calls_ago - 1) if calls_ago < 0 else (-1, calls_ago)
        at = track.position + (1 if calls_ago < 0 else 0)
        for _ in range(length):
            if ours(steps[at % length]):
                if left == 0:
                    return at
                left -= 1
            at += direction
        return None


def _place_in(topology: Topology, rank: int) -> Stage | None:
    stage = by_role(Role.UNSURE, topology, rank)
    return stage if max(stage.pipeline_stage, stage.tensor_index) >= 0 else None


def _nothing_columns() -> tuple[NDArray[Any], ...]:
    wide, narrow = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return wide, narrow, narrow, narrow, wide, np.zeros(0, np.bool_)


def _nothing() -> Placed:
    return Placed(*_nothing_columns())


def _same(one: Learned, other: Learned) -> bool:
    """Whether pointers into the patterns of one are valid in the other."""
    return (
        one.pattern_of == other.pattern_of
        and one.topology.groups == other.topology.groups
        and all(np.array_equal(one.patterns[n].tokens, p.tokens) for n, p in other.patterns.items())
    )
