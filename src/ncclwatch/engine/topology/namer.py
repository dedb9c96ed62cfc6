"""Learn a job from its calls while it runs, say where in an iteration a rank or a call is, and put that into a verdict."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.call_order import MARKS, bounds_of, by_process
from ncclwatch.collect.ledger import POINT_TO_POINT, Ledger
from ncclwatch.collect.specimens import Recorder
from ncclwatch.engine.topology.iteration import ENOUGH, Track, collapse
from ncclwatch.engine.topology.job_map import JobMap, KnownJob, choose_specimens, from_samples
from ncclwatch.engine.topology.patterns import ROLES, Encoding, encode, learn_patterns
from ncclwatch.engine.topology.roles import infer
from ncclwatch.model.events import Function
from ncclwatch.model.job import Held, Job, Member
from ncclwatch.model.state import Communicator, ProcessSample
from ncclwatch.model.topology import FUNCTION_NAMES, Learned, Role, Stage
from ncclwatch.model.verdict import CommunicatorRef, Culprit, OperationRef, Verdict, VerdictClass, places, stands_in
from ncclwatch.text import compressed

GROWTH = 1.35
"""Bound: learn again when so many times as many operations were seen: all learning together costs four times the last."""
SETTLED_GROWTH = 2.0
"""Bound: the same once a pattern was confirmed: all learning together costs no more than twice the last."""
EARLY = 1_000_000
"""Bound: records kept until the first samples say whose they are."""
SHOWN = 3
"""Bound: lines on where victims are."""
LATEST = 4
"""Bound: calls on one communicator that are looked at: gather, scatter, sum and a barrier may take turns; memory names one."""
ASKED = 16
"""Bound: members of a communicator that are asked where an operation is: they call alike, so more would tell no more."""


@dataclass(slots=True)
class Followed:
    """One job with what was learned of it, and a pointer into its pattern for every process."""

    job: KnownJob
    learned: Learned
    encoding: Encoding
    tracks: dict[int, Track] = field(default_factory=dict)
    """process → pointer"""


class StageNamer:
    """Feed it samples and calls; memory is bounded. ``jobs``: what is known of each, ``learned`` of the largest."""

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
        of = {self._map.process.get((sample.process.host, sample.process.pid)): sample for sample in samples}
        return [(job.learned, [of[process] for process in job.job.processes if process in of]) for job in self._jobs]

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
        self._next = max(1, ENOUGH * max(1, len(specimens)))
        early, self._early = self._early, []
        for events, host in early:
            self.observe(events, host=host)

    def observe(self, events: NDArray[Any], *, host: str = "") -> None:
        """Take ``EVENT_DTYPE`` records by time; ``host`` is needed only where hosts may have equal pids."""
        if not self._map.jobs and sum(len(e) for e, _ in self._early) < EARLY:
            self._early.append((events.copy(), host))
        calls, _ = by_process(events)
        process, row = self._map.find_calls(calls, host)
        kept = (process >= 0) & ((row >= 0) | np.isin(calls["function"], MARKS))
        if kept.any():
            calls, process, row = calls[kept], process[kept], row[kept]
            self._follow(calls, process, row)
            self._recorder.add(calls, process, row)
            # Counted over everybody, of whom the specimens are a part.
            share = len(self._recorder.specimens) / len(self._map.places)
            if self._recorder.taken * share >= self._next:
                self._learn()

    def _learn(self, *, by_counts: bool = False) -> None:
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
        job = Followed(known, learned, encoding)
        if learned.confirmed:
            stage_of, rank = learned.pattern_of, self._map.rank
            job.tracks = {p: Track(learned.patterns[stage_of[rank[p]]]) for p in known.processes if rank[p] in stage_of}
            # The pointers of the specimens run over what was recorded.
            for process in set(self._recorder.specimens) & job.tracks.keys():
                history = collapse(self._recorder.history(process), np.flatnonzero(encoding.all_to_all))
                job.tracks[process].follow(encoding.tokens(history, history["row"])[0])
        return job

    def _follow(self, calls: NDArray[Any], process: NDArray[np.int64], row: NDArray[np.int64]) -> None:
        before = np.where(np.r_[True, process[1:] != process[:-1]], self._last_row[process], np.r_[-1, row[:-1]])
        self._last_row[process] = row  # of each process the last
        for job in (job for job in self._jobs if job.tracks):
            # A grouped exchange is one operation: its first part.
            exchange = job.encoding.all_to_all[row] & np.isin(calls["function"], POINT_TO_POINT)
            chosen = (row >= 0) & ~(exchange & (before == row))
            own, numbers = calls[chosen], process[chosen]
            own["function"][exchange[chosen]], own["peer"][exchange[chosen]] = Function.ALL_TO_ALL, -1
            tokens, _ = job.encoding.tokens(own, row[chosen])
            for start, end in pairwise(bounds_of(numbers)):
                if (track := job.tracks.get(int(numbers[start]))) is not None:
                    track.follow(tokens[start:end])

    def role_of(self, host: str, pid: int, comm: int) -> Role:
        """The role of a communicator (by its address in the process)."""
        found = self._find(host, pid, comm)
        return Role.UNSURE if found is None else ROLES[found[1].encoding.role[found[2]]]

    def place_of(self, host: str, pid: int | None, rank: int | None) -> Stage | None:
        """Place in pipeline and tensor group alone, also of an unobserved rank of the only job; ``None``: not known."""
        job = self._jobs[0] if len(self._jobs) == 1 else None
        if pid is not None:
            found = self._find(host, pid, 0)
            job, rank = (found[1], self._map.rank[found[0]]) if found is not None else (None, None)
        stage = job.learned.topology.placed_by_role(Role.UNSURE, rank) if job is not None and rank is not None else None
        return stage if stage is not None and max(stage.pipeline_stage, stage.tensor_index) >= 0 else None

    def stage_of(self, host: str, pid: int, comm: int = 0, calls_ago: int = 0) -> Stage | None:
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
        topology, rank, role = job.learned.topology, self._map.rank[process], ROLES[job.encoding.role[row]]
        track = job.tracks.get(process)
        if track is not None and track.position >= 0 and (at := self._step(track, row, role, calls_ago)) is not None:
            return track.position - at, topology.placed(track.pattern.steps[at % len(track.pattern)], rank)
        return None if role in (Role.UNSURE, Role.UNUSED) else (0, topology.placed_by_role(role, rank))

    def _find(self, host: str, pid: int, comm: int) -> tuple[int, Followed, int] | None:
        """Process, job and row (−1: of no communicator)."""
        process = self._map.find(host, pid)
        if process < 0 or self._map.job_of[process] >= len(self._jobs):
            return None
        row = self._map.rows.get((process, comm), -1)
        return (process, self._jobs[self._map.job_of[process]], row) if row >= 0 or not comm else None

    def _step(self, track: Track, row: int, role: Role, calls_ago: int) -> int | None:
        """Index (to be taken modulo length) of the step ``calls_ago`` calls on this row before the pointer, or after it."""
        if row < 0:
            return track.position - calls_ago
        # A grouped exchange is one operation.
        used = {"AllToAll", *(FUNCTION_NAMES[function] for function in np.flatnonzero(self._recorder.calls[row]).tolist())}
        steps, way = track.pattern.steps, -1 if calls_ago >= 0 else 1
        begin, number = (track.position, calls_ago) if calls_ago >= 0 else (track.position + 1, -calls_ago - 1)
        along = range(begin, begin + way * len(steps), way)
        places = (at for at in along if (step := steps[at % len(steps)]).role is role and step.function in used)
        return next(itertools.islice(places, number, None), None)


def _same(one: Learned, other: Learned) -> bool:
    """Whether pointers into the patterns of one are valid in the other."""
    return (
        one.pattern_of == other.pattern_of
        and one.topology.groups == other.topology.groups
        and all(np.array_equal(one.patterns[n].tokens, p.tokens) for n, p in other.patterns.items())
    )


# --- in a verdict --------------------------------------------------------------------------------------------------------------

HALTED = (VerdictClass.STOPPED, VerdictClass.DEAD)
"""Classes of jobs that go on: where their ranks are at this moment says nothing."""


def name_stages(verdict: Verdict, job: Job, namer: StageNamer, ledger: Ledger) -> Verdict:
    """The verdict with roles and stages, as far as they are known; unchanged where nothing is."""
    if not verdict.culprits or namer.learned is None:
        return verdict
    naming = _Naming(job, namer, ledger, verdict.verdict_class)
    culprits = tuple(naming.named(culprit) for culprit in verdict.culprits)
    # Where all places are known already, what was found lies back or goes on: where the others are now says nothing of it.
    past = verdict.verdict_class.slow or namer.by_counts or all(culprit.stage for culprit in verdict.culprits)
    known = {culprit.communicator.hash: culprit.communicator for culprit in reversed(culprits) if culprit.communicator}
    return replace(
        verdict,
        culprits=culprits,
        communicator=known.get(verdict.communicator.hash, verdict.communicator) if verdict.communicator else None,
        stage=verdict.stage or next((c.stage for c in culprits if c.stage), culprits[0].stage),
        evidence=(*verdict.evidence, *(() if past else naming.victim_lines(verdict))),
    )


def name_places(judged: Sequence[tuple[Job, Verdict]]) -> list[Verdict]:
    """Verdicts from memory alone, with the roles and places in the layout that NCCL's counts tell."""
    if not any(verdict.culprits for _, verdict in judged):
        return [verdict for _, verdict in judged]
    namer = StageNamer()
    namer.everything([member.last for job, _ in judged for member in job.members])
    return [name_stages(verdict, job, namer, Ledger()) for job, verdict in judged]


@dataclass(slots=True)
class _Naming:
    job: Job
    namer: StageNamer
    ledger: Ledger
    verdict_class: VerdictClass

    def named(self, culprit: Culprit) -> Culprit:
        """The culprit with the role of its communicator and its stage."""
        reference, namer, operation = culprit.communicator, self.namer, culprit.operation
        if reference is None or (culprit.stage and reference.role):
            return culprit
        holders = self._holders(culprit, reference)
        roles = (namer.role_of(member.info.host, member.info.pid, own.address) for member, own in holders)
        role = next((role for role in roles if role is not Role.UNSURE), None)
        if role is None and not namer.by_counts:
            return culprit
        text = culprit.stage
        if not text and not self.verdict_class.slow:
            stage = self._stage(culprit, holders) if not namer.by_counts else None
            if stage is None:
                # Without calls: its place in the layout, and the operation where memory shows that it is in it.
                stage = namer.place_of(culprit.host, culprit.pid, culprit.rank)
                if operation is not None and self.verdict_class not in (VerdictClass.NOT_ENTERED, *HALTED):
                    stage = replace(stage or Stage(), role=role or Role.UNSURE, function=operation.name)
            text = stage.text() if stage is not None else text
        if role not in (None, Role.UNUSED):
            reference = replace(reference, role=str(role))
        return replace(culprit, communicator=reference, stage=text)

    def _holders(self, culprit: Culprit, reference: CommunicatorRef) -> list[Held]:
        """The members of the culprit's communicator, its own process first."""
        for group in self.job.groups.values():
            if f"{group.hash:016x}" == reference.hash and group.nranks == reference.nranks:
                held = group.members.get(culprit.comm_rank) if culprit.comm_rank is not None else None
                if culprit.pid is None or (held is not None and culprit.is_at(held[0].info.host, held[0].info.pid, held[0].rank)):
                    return sorted(group.members.values(), key=lambda pair: pair is not held)
        return []

    def _stage(self, culprit: Culprit, holders: Sequence[Held]) -> Stage | None:
        """Where the culprit is, from its own calls or, without them, where the operation is that others wait in."""
        own = holders[0] if holders and culprit.pid is not None else None
        halted, operation = self.verdict_class in HALTED, culprit.operation
        if own is not None:
            coming = self._call(own[0], calls_ago=-1)
            if self.verdict_class is VerdictClass.NOT_ENTERED:
                return coming
            if halted or (self.verdict_class is VerdictClass.HARDWARE and culprit.link is None):
                # The host runs ahead of its GPU: the oldest operation that is open is where it is.
                oldest = self._oldest_open(own[0])
                if oldest is not None or halted:
                    return oldest or coming
        # What memory says is not going on is found among the calls by NCCL's own count of them.
        asked = holders[:ASKED]
        since = ((held, ago) for held in asked if (ago := self._calls_since(*held, operation)) is not None)
        if (counted := next(since, None)) is not None:
            found = self._call(*counted[0], calls_ago=counted[1])
        else:
            found = next(filter(None, (self._latest(*held, operation) for held in asked)), None)
        # What was read off a peer is at the culprit's own place in pipeline and tensor group.
        mine = self._call(*own) if found is not None and own is not None else None
        return found.at_home_of(mine) if found is not None and mine is not None else found

    def _call(self, member: Member, communicator: Communicator | None = None, *, calls_ago: int = 0) -> Stage | None:
        address = communicator.address if communicator is not None else 0
        return self.namer.stage_of(member.info.host, member.info.pid, address, calls_ago=calls_ago)

    def _latest(self, member: Member, communicator: Communicator, operation: OperationRef | None) -> Stage | None:
        """The latest call on a communicator, of the operation named where one of the last few was."""
        last = [self._call(member, communicator, calls_ago=ago) for ago in range(LATEST)]
        named = (stage for stage in last if stage is not None and operation is not None and stage.function == operation.name)
        return next(named, last[0])

    def _oldest_open(self, member: Member) -> Stage | None:
        """The stage of the first operation, in the order of the calls, that a process has not finished."""
        found: list[tuple[int, Stage]] = []
        held = {group.id: own for group, own in self.job.held_by(member)}
        for operation in member.last.operations:
            own = held.get(self.job.find_group(member, operation.comm_address, operation.comm_hash) or 0)
            reference = OperationRef(operation.collective, operation.sequence, operation.protocol or "?")
            if own is None:
                continue
            ago = 0 if operation.is_point_to_point else self._calls_since(member, own, reference)
            if ago is not None and (call := self.namer.call_of(member.info.host, member.info.pid, own.address, calls_ago=ago)):
                found.append(call)
        # Where no pattern is known (the function is not, then) nothing tells which of them is the oldest.
        return max((call for call in found if call[1].function), key=lambda call: call[0], default=(0, None))[1]

    def _calls_since(self, member: Member, communicator: Communicator, operation: OperationRef | None) -> int | None:
        """Collectives called after NCCL's number ``operation.sequence`` (of the state plane); ``None``: unknown."""
        row = self.ledger.row(member.info, communicator)
        if row is None or operation is None or operation.sequence is None or not operation.protocol:
            return None
        _, history = self.ledger.history(row)
        at = np.flatnonzero(history["op_count"] == operation.sequence)
        return len(history) - 1 - int(at[-1]) if len(at) else None

    def victim_lines(self, verdict: Verdict) -> list[str]:
        """Where the ranks that wait are: those in one place together."""
        accused, wanted = places(verdict.culprits), set(verdict.victims)
        texts: dict[str, list[int]] = defaultdict(list)
        for member in self.job.members:
            rank = member.rank
            if rank is None or rank not in wanted or stands_in(accused, member.info.host, member.info.pid, rank):
                continue
            if (stage := self._call(member)) is not None:
                texts[replace(stage, tensor_index=-1).text()].append(rank)
        lines = sorted(texts.items(), key=lambda item: (-len(item[1]), item[1]))
        shown = [f"latest call of rank{'s' * (len(ranks) > 1)} {compressed(ranks)}: {text}" for text, ranks in lines[:SHOWN]]
        if len(lines) > SHOWN:
            more, elsewhere = sum(len(ranks) for _, ranks in lines[SHOWN:]), len(lines) - SHOWN
            shown.append(f"… and {more} more rank{'s' * (more > 1)} in {elsewhere} other place{'s' * (elsewhere > 1)}")
        return shown
