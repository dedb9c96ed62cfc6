"""Diagnosis that goes on: feed it a round of samples at a time; it keeps what it needs and says what stands."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from numpy.typing import NDArray

from ncclwatch.collect.ledger import Ledger, Place, Process
from ncclwatch.engine.beside import add_paths
from ncclwatch.engine.case import Case, Known
from ncclwatch.engine.diagnose import NOTHING_OBSERVED, judge_jobs
from ncclwatch.engine.patience import Patience
from ncclwatch.engine.slow.watch import SlowWatch
from ncclwatch.engine.topology.namer import StageNamer, name_stages
from ncclwatch.engine.verdict import severity
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.job import Job
from ncclwatch.model.progress import progressed
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass

UNSEEN_ROUNDS = 60
"""Bound: rounds; calls are forgotten of whom was not seen twice, so far apart: they are heard before a process is first seen."""


class Recovery(NamedTuple):
    """A verdict that no longer stands because the job went on, and for how long it stood."""

    verdict: Verdict
    duration_s: float


def _followed(kept: Sequence[ProcessSample], sample: ProcessSample) -> Sequence[ProcessSample]:
    """What must be kept of one process: the last two samples, and the first of a standstill."""
    if kept and kept[-1].time_ns == sample.time_ns:
        # Nodes say what they see at their own times: what was judged before is no second look.
        return kept
    if len(kept) < 2 or progressed(kept[-1], sample) or progressed(*kept[-2:]):
        return [*kept[-1:], sample]
    return [kept[0], kept[-1], sample]


@dataclass(slots=True)
class LiveDiagnosis:
    """Standing verdict of a job, from rounds of samples. Memory is bounded: three samples a process.

    ``known``: how patient it is, and what its caller knows besides. ``slow`` judges whether the jobs that run are as fast as
    they should be, ``namer`` learns roles of groups and the pattern of an iteration. The caller takes out ``closed`` (verdicts
    that ended because the job went on) and ``answers`` (to :meth:`ask`: one for each job, worst first). ``verdicts`` (worst
    first) and ``judged`` are of the last round, one for each job.
    """

    known: Known = field(default_factory=lambda: Known(Patience()))
    ledger: Ledger = field(default_factory=Ledger)
    slow: SlowWatch = field(default_factory=SlowWatch)
    namer: StageNamer = field(default_factory=StageNamer)
    closed: list[Recovery] = field(default_factory=list)
    answers: list[Verdict] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    judged: list[tuple[Job, Verdict]] = field(default_factory=list)
    _series: dict[ProcessKey, Sequence[ProcessSample]] = field(default_factory=dict)
    _standing: Verdict | None = None
    _asked: bool = False
    _previous: Sequence[ProcessSample] = ()
    _unseen: set[Process | Place] = field(default_factory=set)
    """Processes and communicators of which calls are known that were not there when last looked for."""
    _rounds: int = 0

    def add_calls(self, events: NDArray[Any], lost: int = 0, source: str = "") -> None:
        """Take records of the calls plane, by time, and how many were lost; ``source``: their host (empty: the only one)."""
        self.ledger.add_calls(events, lost, source)
        self.namer.observe(events, host=source)
        self.slow.cadences.add_calls(events, lost, source)

    def update(self, samples: Sequence[ProcessSample]) -> Verdict:
        """Take a sample of every process there is; the verdict that stands. One that has ended is a sample with state ``X``."""
        present = {sample.process.key for sample in samples}
        ended = [self._series.pop(key)[-1].process for key in self._series.keys() - present]
        for key in self.known.prepared.keys() - present:
            del self.known.prepared[key]
        # A pid may be another's by now.
        self._forget({self._process(info) for info in ended} - {self._process(sample.process) for sample in samples})
        self._forget_unseen(samples)
        records = self.ledger.records
        for sample in samples:
            seen = records[self._process(sample.process)] if records else None
            counted = sample if sample.calls_seen == seen else replace(sample, calls_seen=seen)
            kept = self._series.get(sample.process.key, ())
            if kept and sample.communicators and not kept[-1].communicators:
                self.known.prepared[sample.process.key] = (sample.time_ns - kept[0].time_ns) / 1e9
            self._series[sample.process.key] = _followed(kept, counted)
        self.namer.note_samples(samples)
        self._note_counts(self._previous)
        self._previous = list(samples)
        known = self.known
        known.stage_of, known.ledger, known.orders = self.namer.stage_of, None, None
        if self.ledger.rows:
            known.ledger = self.slow.ledger = self.ledger
            known.orders = self.slow.cadences.orders
        looks = list(self._series.values())
        judged = judge_jobs(looks, known)
        self.slow.forget(present)
        known.conflicts.forget({number for job, _ in judged for number in job.groups})
        topologies = [learned.topology for learned in self.namer.jobs]
        each = ((job, self.slow.judge(job, verdict, topologies, self.namer.stage_of)) for job, verdict in judged)
        self.judged = [(job, add_paths(Case(job, known), verdict, self.slow.pace)) for job, verdict in each]
        self.verdicts = self._named(self.judged)
        if self._asked:
            self._asked = False
            # Of a job that is not stuck, what stands.
            paced = {member.info.key: verdict for job, verdict in self.judged for member in job.members}
            asked = judge_jobs(looks, replace(known, patience=None, creation_patience_s=0.0))
            said = [(job, one if one.verdict_class.accuses else paced.get(job.members[0].info.key, one)) for job, one in asked]
            self.answers += self._named(said)
        if known.patience is not None:
            known.patience.end_round()
        return self._stand(self.verdicts[0] if self.verdicts else NOTHING_OBSERVED)

    def ask(self) -> None:
        """Put what the next round says without patience into ``answers``: somebody has asked. What stands is not changed."""
        self._asked = True

    def _named(self, judged: Sequence[tuple[Job, Verdict]]) -> list[Verdict]:
        if any(verdict.culprits for _, verdict in judged):
            self.namer.fall_back(samples[-1] for samples in self._series.values())
        return sorted((name_stages(verdict, job, self.namer, self.ledger) for job, verdict in judged), key=severity)

    def _process(self, info: ProcessInfo) -> Process:
        return self.ledger.process(info.host, info.pid)

    def _forget(self, gone: Set[Process | Place]) -> None:
        """Drop the calls of processes that are watched no longer, and of communicators that are gone."""
        self.ledger.forget(gone)
        for host, pid in (one for one in gone if len(one) == 2):
            self.slow.cadences.forget(host, pid)

    def _forget_unseen(self, samples: Sequence[ProcessSample]) -> None:
        """Now and then forget calls of processes never looked at, and on communicators that were destroyed."""
        self._rounds += 1
        if self._rounds % UNSEEN_ROUNDS:
            return
        there = {self._process(sample.process) for sample in samples}
        held = {(*self._process(sample.process), own.address) for sample in samples for own in sample.communicators}
        # Where memory shows no communicator, it may be that it cannot be read.
        read = {place[:2] for place in held}
        unseen: set[Process | Place] = {place for place in self.ledger.places if place[:2] in read and place not in held}
        unseen |= self.ledger.records.keys() - there
        self._forget(unseen & self._unseen)
        self._unseen = unseen - self._unseen

    def forget_host(self, host: str) -> None:
        """A host will not be heard again."""
        self._forget({process for process in self.ledger.records if process[0] == host})
        self.ledger.lossy.discard(host)
        self.known.network.hosts.pop(host, None)

    def _note_counts(self, samples: Sequence[ProcessSample]) -> None:
        """Line the ledger up with NCCL's own counts. Done a round late: by then the records are in."""
        for sample in samples:
            for own in sample.communicators:
                if own.sequence_numbers and not own.captured_plans and (row := self.ledger.row(sample.process, own)) is not None:
                    self.ledger.note_count(row, sum(own.sequence_numbers.values()), sample.time_ns + sample.duration_ns)

    def _stand(self, verdict: Verdict) -> Verdict:
        standing, series = self._standing, self._series.values()
        if verdict.verdict_class.accuses:
            since = verdict.since
            if standing is not None and standing.id == verdict.id:
                since = standing.since
            elif since is None:
                # When NCCL last moved anywhere: the newest of the first samples of each standstill.
                since = max((samples[0].wall_ns / 1e9 for samples in series), default=None)
            self._standing = replace(verdict, since=since)
            return self._standing
        if standing is None:
            return verdict
        settled = [samples[-2:] for samples in series if len(samples) > 1]
        nothing_moves = bool(settled) and not any(progressed(*last) for last in settled)
        if verdict.verdict_class is VerdictClass.UNKNOWN and nothing_moves:
            # Not a recovery: those it names are out of sight, or have come back into it and were looked at once.
            return replace(standing, time=verdict.time) if len(settled) < len(series) else verdict
        if standing.since is not None and verdict.time is not None:
            self.closed.append(Recovery(standing, max(0.0, verdict.time - standing.since)))
        self._standing = None
        return verdict
