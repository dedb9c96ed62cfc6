"""Diagnosis that goes on: feed it a round of samples at a time; it keeps what it needs and says what stands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from ncclwatch.engine.diagnose import Outlook, diagnose_jobs
from ncclwatch.engine.progress import progressed
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass

HANG_FLOOR_S = 5.0
"""Nothing moves for this long before waits alone accuse a rank."""

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

    ``floor_s`` is the time nothing must move before waits alone accuse a rank. Memory is bounded: three samples a process.
    """

    floor_s: float = HANG_FLOOR_S
    complete_hosts: Collection[str] = field(default_factory=frozenset)
    closed: list[tuple[Verdict, float]] = field(default_factory=list)
    """Verdicts that ended because the job went on, each with its duration in seconds; the caller takes them out."""
    _series: dict[ProcessKey, _Series] = field(default_factory=dict)
    _standing: Verdict | None = None

    def update(self, samples: Sequence[ProcessSample]) -> Verdict:
        """Take one sample of every process that is observed now and return the verdict that stands, worst job first.

        A process that is missing from ``samples`` is forgotten: report an ended one by a sample with run state ``X``.
        """
        present = {sample.process.key for sample in samples}
        for key in [key for key in self._series if key not in present]:
            del self._series[key]
        for sample in samples:
            self._series.setdefault(sample.process.key, _Series()).add(sample)
        verdicts = diagnose_jobs(
            [list(series.samples) for series in self._series.values()],
            Outlook(patience_s=self.floor_s, complete_hosts=self.complete_hosts),
        )
        verdict = verdicts[0] if verdicts else NOTHING_OBSERVED
        return self._stand(verdict)

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
