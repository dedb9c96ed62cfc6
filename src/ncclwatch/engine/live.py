"""Diagnosis that goes on: feed it a round of samples at a time; it keeps what it needs and says what stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.case import Known
from ncclwatch.engine.conflicts import ConflictWatch
from ncclwatch.engine.diagnose import judge_jobs
from ncclwatch.engine.evidence.base import Source
from ncclwatch.engine.evidence.registry import SOURCES
from ncclwatch.engine.job import Job
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.engine.network import NetworkMemory
from ncclwatch.engine.patience import Patience
from ncclwatch.engine.slow.watch import SlowWatch
from ncclwatch.engine.topology.labels import Stage
from ncclwatch.engine.topology.namer import StageNamer
from ncclwatch.engine.topology.naming import name_stages
from ncclwatch.engine.verdict import severity
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.progress import progressed
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass

NOTHING_OBSERVED = Verdict(VerdictClass.UNKNOWN, "no NCCL process is observed")


@dataclass(slots=True)
class _Series:
    """What must be kept of one process: the last two samples, and the first of a standstill."""

    samples: list[ProcessSample] = field(default_factory=list)

    def add(self, sample: ProcessSample) -> None:
        kept = self.samples
        if kept and kept[-1].time_ns == sample.time_ns:
            # Nodes say what they see at their own times: what was judged before is no second look.
            return
        if (kept and progressed(kept[-1], sample)) or (len(kept) >= 2 and progressed(kept[-2], kept[-1])):
            self.samples = [kept[-1], sample]
        else:
            self.samples = [*kept[:1], *kept[-1:], sample] if len(kept) > 1 else [*kept, sample]


@dataclass(slots=True)
class LiveDiagnosis:
    """Standing verdict of a job, from rounds of samples.

    ``patience`` says for how long nothing must move before waits alone accuse a rank. Memory is bounded: three samples a process.
    """

    patience: Patience = field(default_factory=Patience)
    complete_hosts: Collection[str] = field(default_factory=frozenset)
    silent: Collection[tuple[int, int]] = field(default_factory=frozenset)
    """(communicator's hash, rank in it) of ranks whose node has fallen silent."""
    network: NetworkMemory = field(default_factory=NetworkMemory)
    """What the nodes last said of their network."""
    sources: Sequence[Source] = SOURCES
    """Where facts come from."""
    ledger: Ledger = field(default_factory=Ledger)
    slow: SlowWatch = field(default_factory=SlowWatch)
    """Judges the jobs that run: whether they run as fast as they should."""
    conflicts: ConflictWatch = field(default_factory=ConflictWatch)
    """Compares what the ranks of running jobs call."""
    namer: StageNamer = field(default_factory=StageNamer)
    """Learns roles of groups and the pattern of an iteration from the calls; names stages."""
    closed: list[tuple[Verdict, float]] = field(default_factory=list)
    """Verdicts that ended because the job went on, each with its duration in seconds; the caller takes them out."""
    answers: list[Verdict] = field(default_factory=list)
    """To :meth:`ask`: one verdict for each job, worst first; the caller takes them out."""
    verdicts: list[Verdict] = field(default_factory=list)
    """Of the last round: one verdict for each job on the observed processes, worst first."""
    judged: list[tuple[Job, Verdict]] = field(default_factory=list)
    """Of the last round: the jobs, each with its verdict."""
    _series: dict[ProcessKey, _Series] = field(default_factory=dict)
    _standing: Verdict | None = None
    _asked: bool = False
    _previous: list[ProcessSample] = field(default_factory=list)
    _calls_seen: Counter[int] = field(default_factory=Counter)
    _totals: dict[Place, tuple[int, int]] = field(default_factory=dict)

    def add_calls(self, events: NDArray[Any], lost: int = 0, source: str = "") -> None:
        """Take records of the calls plane (``EVENT_DTYPE``, by time), and the number lost since the last batch.

        ``source`` is the host they come from (as in ``ProcessInfo.host``); empty where there is only one.
        """
        self.ledger.add_calls(events, lost, source)
        self.namer.observe(events, host=source)
        self.slow.add_calls(events, lost, source)
        if lost:
            self.conflicts.lose(source)
            self._totals = {place: known for place, known in self._totals.items() if not self.ledger.is_from(place, source)}
        pids, numbers = np.unique(events["pid"], return_counts=True)
        processes = [self.ledger.place(source, pid, 0)[0] for pid in pids.tolist()]
        self._calls_seen.update(dict(zip(processes, numbers.tolist(), strict=True)))

    def update(self, samples: Sequence[ProcessSample]) -> Verdict:
        """Take one sample of every process that is observed now and return the verdict that stands, worst job first.

        A process that is missing from ``samples`` is forgotten: report an ended one by a sample with run state ``X``.
        """
        present = {sample.process.key for sample in samples}
        for key in [key for key in self._series if key not in present]:
            self._forget(self._series.pop(key).samples[-1].process, samples)
        for sample in samples:
            process = self._place(sample, 0)[0]
            seen = self._calls_seen[process] if self._calls_seen else None
            self._series.setdefault(sample.process.key, _Series()).add(replace(sample, calls_seen=seen))
        self.namer.note_samples(samples)
        for sample in self._previous:
            self._note_totals(sample)
        self._previous = list(samples)
        known = Known(
            self.patience, complete_hosts=self.complete_hosts, silent=self.silent, network=self.network, sources=self.sources,
            conflicts=self.conflicts, stage_of=self._stage_of,
        )  # fmt: skip
        if self.ledger.rows:
            known.ledger, known.totals, known.orders = self.ledger, self._totals, self.slow.cadences.orders
        looks = [series.samples for series in self._series.values()]
        judged = judge_jobs(looks, known)
        if self._asked:
            self._asked = False
            at_once = judge_jobs(looks, replace(known, patience=None, creation_patience_s=0.0))
            self.answers += sorted((self._named(job, verdict) for job, verdict in at_once), key=severity)
        self.slow.forget(present)
        self.conflicts.forget({number for job, _ in judged for number in job.groups})
        topologies = [learned.topology for learned in self.namer.jobs]
        if self.ledger.rows:
            self.slow.ledger, self.slow.totals = self.ledger, self._totals
        found = [(job, self.slow.judge(job, verdict, topologies, self._stage_of)) for job, verdict in judged]
        self.judged = found
        self.verdicts = sorted((self._named(job, verdict) for job, verdict in found), key=severity)
        self.patience.end_round()
        return self._stand(self.verdicts[0] if self.verdicts else NOTHING_OBSERVED)

    def ask(self) -> None:
        """Put into ``answers`` what the next round says without any patience: somebody who knows that the job hangs has asked.

        Progress between two looks still means that nobody is accused. What stands is not changed by being asked.
        """
        self._asked = True

    def _named(self, job: Job, verdict: Verdict) -> Verdict:
        if verdict.culprits:
            self.namer.fall_back(series.samples[-1] for series in self._series.values())
        return name_stages(verdict, job, self.namer, self.ledger)

    def _stage_of(self, host: str, pid: int, comm: int, ago: int) -> Stage | None:
        return self.namer.stage_of(host, pid, comm, calls_ago=ago)

    def _place(self, sample: ProcessSample, address: int) -> Place:
        return self.ledger.place(sample.process.host, sample.process.pid, address)

    def _forget(self, info: ProcessInfo, present: Sequence[ProcessSample]) -> None:
        """A process is watched no longer; its pid may be another's by now."""
        if any(sample.process.pid == info.pid and sample.process.host == info.host for sample in present):
            return
        process = self.ledger.place(info.host, info.pid, 0)[0]
        self.ledger.forget_process(info.host, info.pid)
        self.slow.cadences.forget(info.host, info.pid)
        self._calls_seen.pop(process, None)
        self._totals = {place: known for place, known in self._totals.items() if place[0] != process}

    def _note_totals(self, sample: ProcessSample) -> None:
        """Remember how far NCCL's own count of collectives runs ahead of the ledger's.

        The count is raised when a plan is launched, after the call is recorded: so it is at most what was called until the sample
        was complete, and the largest difference ever seen is the true one. Done a round late: by then the records are in.
        """
        end_ns = sample.time_ns + sample.duration_ns
        for communicator in sample.communicators:
            place = self._place(sample, communicator.address)
            row = self.ledger.rows.get(place)
            if row is None or not communicator.sequence_numbers:
                continue
            newer = self.ledger.newer_than(row, end_ns)
            if newer is None:
                continue
            counted, ordinal = sum(communicator.sequence_numbers.values()), int(self.ledger.called[row]) - newer
            known = self._totals.get(place)
            if known is None or counted - ordinal > known[0] - known[1]:
                self._totals[place] = (counted, ordinal)

    def _stand(self, verdict: Verdict) -> Verdict:
        standing = self._standing
        if verdict.verdict_class.accuses:
            began = verdict.since if verdict.since is not None else self._since()
            since = standing.since if standing is not None and standing.id == verdict.id else began
            verdict = replace(verdict, since=since)
            self._standing = verdict
        elif standing is not None:
            if verdict.verdict_class is VerdictClass.UNKNOWN and self._nothing_moves():
                # Not a recovery: those it names are out of sight, or have come back into it and were looked at once.
                newcomers = any(len(series.samples) < 2 for series in self._series.values())
                return replace(standing, time=verdict.time) if newcomers else verdict
            if standing.since is not None and verdict.time is not None:
                self.closed.append((standing, max(0.0, verdict.time - standing.since)))
            self._standing = None
        return verdict

    def _nothing_moves(self) -> bool:
        """Whether there are processes that were looked at more than once, and none of them has moved."""
        settled = [series.samples for series in self._series.values() if len(series.samples) > 1]
        return bool(settled) and not any(progressed(*samples[-2:]) for samples in settled)

    def _since(self) -> float | None:
        """When NCCL last moved anywhere: the newest of the first samples of each standstill."""
        starts = [series.samples[0].wall_ns for series in self._series.values() if series.samples]
        return max(starts) / 1e9 if starts else None
