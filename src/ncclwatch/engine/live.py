"""Diagnosis that goes on: feed it a round of samples at a time; it keeps what it needs and says what stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.diagnose import Outlook, diagnose_jobs
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.engine.progress import progressed
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass

HANG_FLOOR_S = 5.0
"""Nothing moves for this long before waits alone accuse a rank."""

PAUSE_FACTOR = 2.0
LONGEST_PATIENCE_S = 600.0
"""A job that was seen to pause and go on (a checkpoint, an evaluation) is given this many times its longest pause, bounded."""

HALTED = frozenset({VerdictClass.STOPPED, VerdictClass.DEAD})

NOTHING_OBSERVED = Verdict(VerdictClass.UNKNOWN, "no NCCL process is observed")


@dataclass(slots=True)
class _Series:
    """What must be kept of one process: the last two samples, and the first of a standstill."""

    samples: list[ProcessSample] = field(default_factory=list)

    def add(self, sample: ProcessSample) -> None:
        kept = self.samples
        if (kept and progressed(kept[-1], sample)) or (len(kept) >= 2 and progressed(kept[-2], kept[-1])):
            self.samples = [kept[-1], sample]
        else:
            self.samples = [*kept[:1], *kept[-1:], sample] if len(kept) > 1 else [*kept, sample]


@dataclass(slots=True)
class LiveDiagnosis:
    """Standing verdict of a job, from rounds of samples.

    ``floor_s`` is the time nothing must move before waits alone accuse a rank; it grows with the pauses that the job was seen to
    end by itself. Memory is bounded: three samples a process.
    """

    floor_s: float = HANG_FLOOR_S
    complete_hosts: Collection[str] = field(default_factory=frozenset)
    ledger: Ledger = field(default_factory=Ledger)
    closed: list[tuple[Verdict, float]] = field(default_factory=list)
    """Verdicts that ended because the job went on, each with its duration in seconds; the caller takes them out."""
    verdicts: list[Verdict] = field(default_factory=list)
    """Of the last round: one verdict for each job on the observed processes, worst first."""
    _series: dict[ProcessKey, _Series] = field(default_factory=dict)
    _standing: Verdict | None = None
    _pause: float | None = None
    _longest_pause_s: float = 0.0
    _previous: list[ProcessSample] = field(default_factory=list)
    _calls_seen: Counter[int] = field(default_factory=Counter)
    _totals: dict[Place, tuple[int, int]] = field(default_factory=dict)

    def add_calls(self, events: NDArray[Any], lost: int = 0, source: str = "") -> None:
        """Take records of the calls plane (``EVENT_DTYPE``, by time), and the number lost since the last batch.

        ``source`` is the host they come from (as in ``ProcessInfo.host``); empty where there is only one.
        """
        self.ledger.add_calls(events, lost, source)
        if lost:
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
        for sample in self._previous:
            self._note_totals(sample)
        self._previous = list(samples)
        outlook = Outlook(patience_s=self.patience_s, complete_hosts=self.complete_hosts)
        if self.ledger.rows:
            outlook.ledger, outlook.totals = self.ledger, self._totals
        self.verdicts = diagnose_jobs([series.samples for series in self._series.values()], outlook)
        verdict = self.verdicts[0] if self.verdicts else NOTHING_OBSERVED
        self._learn_pauses(verdict)
        return self._stand(verdict)

    def _place(self, sample: ProcessSample, address: int) -> Place:
        return self.ledger.place(sample.process.host, sample.process.pid, address)

    def _forget(self, info: ProcessInfo, present: Sequence[ProcessSample]) -> None:
        """A process is watched no longer; its pid may be another's by now."""
        if any(sample.process.pid == info.pid and sample.process.host == info.host for sample in present):
            return
        process = self.ledger.place(info.host, info.pid, 0)[0]
        self.ledger.forget_process(info.host, info.pid)
        self._calls_seen.pop(process, None)
        self._totals = {place: known for place, known in self._totals.items() if place[0] != process}

    @property
    def patience_s(self) -> float:
        """How long nothing must move, by what was learned so far."""
        return max(self.floor_s, min(LONGEST_PATIENCE_S, PAUSE_FACTOR * self._longest_pause_s))

    def _learn_pauses(self, verdict: Verdict) -> None:
        """A standstill that ends by itself was no hang; one that a stopped process caused teaches nothing."""
        began = self._since()
        if verdict.verdict_class is VerdictClass.RUNNING:
            if self._pause is not None and verdict.time is not None:
                self._longest_pause_s = max(self._longest_pause_s, verdict.time - self._pause)
            self._pause = None
        elif verdict.verdict_class in HALTED or verdict.verdict_class is VerdictClass.IDLE:
            self._pause = None
        elif self._pause is None:
            self._pause = began

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
            _, operations = self.ledger.history(row)
            newer = int(np.count_nonzero(operations["time_ns"] > end_ns))
            if newer == len(operations):
                continue
            counted, ordinal = sum(communicator.sequence_numbers.values()), int(self.ledger.called[row]) - newer
            known = self._totals.get(place)
            if known is None or counted - ordinal > known[0] - known[1]:
                self._totals[place] = (counted, ordinal)

    def _stand(self, verdict: Verdict) -> Verdict:
        standing = self._standing
        if verdict.verdict_class.accuses:
            since = standing.since if standing is not None and standing.id == verdict.id else self._since()
            verdict = replace(verdict, since=since)
            self._standing = verdict
        elif standing is not None:
            if standing.since is not None and verdict.time is not None:
                self.closed.append((standing, max(0.0, verdict.time - standing.since)))
            self._standing = None
        return verdict

    def _since(self) -> float | None:
        """When NCCL last moved anywhere: the newest of the first samples of each standstill."""
        starts = [series.samples[0].wall_ns for series in self._series.values() if series.samples]
        return max(starts) / 1e9 if starts else None
