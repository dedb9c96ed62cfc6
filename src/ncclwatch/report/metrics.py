"""What a session says as metrics.

Names, units and labels: ``docs/metrics.md``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ncclwatch import __version__
from ncclwatch.model.metric import Labels, Metric
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.report.exposition import metric, text_of
from ncclwatch.text import clean
from ncclwatch.view.builder import Told, ViewBuilder
from ncclwatch.view.frame import View
from ncclwatch.view.states import STATES, Accused, is_accused
from ncclwatch.view.verdict_text import culprit_name

if TYPE_CHECKING:
    from ncclwatch.engine.session import Update

BUILD_INFO = "ncclwatch_build_info"
GONE_S = 300.0
"""A job that nothing was said of for so long has no metrics any more."""
MAX_RANKS = 4096
"""Ranks with metrics of their own; of more only the sums are told."""


@dataclass(slots=True)
class Counts:
    """What is counted over the life of a session."""

    samples: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    recoveries: Counter[str] = field(default_factory=Counter)

    def told(self, verdicts: Iterable[Verdict]) -> None:
        """Verdicts that began to stand."""
        self.verdicts.update(verdict.verdict_class.value for verdict in verdicts)

    def recovered(self, verdicts: Iterable[Verdict]) -> None:
        """Verdicts that stand no longer."""
        self.recoveries.update(verdict.verdict_class.value for verdict in verdicts)


class Watched:
    """The newest view of a session, and what was counted of it; told by one thread, read by any."""

    def __init__(self) -> None:
        self.view: View | None = None
        self.counts = Counts()
        self._builder = ViewBuilder()

    def begin(self, session: Told) -> None:
        """The first view."""
        self.view = self._builder.begin(session, time.time())

    def update(self, session: Told, update: Update) -> None:
        """Keep the newest view, and count."""
        self.counts.told(update.told)
        self.counts.recovered(recovery.verdict for recovery in update.recoveries)
        view = self._builder.feed(session, update, time.time())
        if view is not None:
            self.counts.samples += 1
            self.view = view


class WatchedJobs:
    """Sessions by job; one that stands for itself has the name ''. Told by one thread, read by any."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[Watched, float]] = {}

    def of(self, job: str) -> Watched:
        """A job of which something is to be told now."""
        watched = self._jobs[job][0] if job in self._jobs else Watched()
        self._jobs[job] = watched, time.monotonic()
        return watched

    def current(self) -> list[tuple[str, Watched]]:
        """All jobs but those that nothing was told of for long."""
        found = []
        for job, (watched, heard) in list(self._jobs.items()):
            if time.monotonic() - heard > GONE_S and len(self._jobs) > 1:
                self._jobs.pop(job, None)
            else:
                found.append((job, watched))
        return found


def metrics(jobs: Sequence[tuple[str, Watched]]) -> str:
    """The whole page: of every job the same metrics, told apart by the label ``nccl_job`` where the job has a name."""
    found: dict[str, Metric] = {}
    for job, watched in jobs or [("", Watched())]:
        for one in families(watched.view, watched.counts):
            samples = one.samples
            if job and one.name != BUILD_INFO:
                samples = tuple(({"nccl_job": job, **labels}, value) for labels, value in samples)
            known = found.get(one.name)
            if known is None or one.name != BUILD_INFO:
                found[one.name] = replace(one, samples=(*(known.samples if known is not None else ()), *samples))
    return "".join(map(text_of, found.values()))


def families(view: View | None, counts: Counts) -> Iterator[Metric]:
    """Every metric that has a value."""
    yield from metric(BUILD_INFO, "gauge", "Version of ncclwatch.", [({"version": __version__}, 1)])
    yield from metric("ncclwatch_samples_total", "counter", "Rounds of samples of the processes' memory.", [({}, counts.samples)])
    accusing = [kind for kind in VerdictClass if kind.accuses]
    yield from metric(
        "ncclwatch_verdicts_total", "counter", "Verdicts that began to stand, by class.",
        [({"class": kind.value}, counts.verdicts[kind.value]) for kind in accusing],
    )  # fmt: skip
    yield from metric(
        "ncclwatch_recoveries_total", "counter", "Verdicts that ended because the job went on, by class.",
        [({"class": kind.value}, counts.recoveries[kind.value]) for kind in accusing],
    )  # fmt: skip
    if view is None:
        return
    yield from _job(view)
    yield from _verdicts(view)
    yield from _ranks(view)
    yield from _work(view)
    yield from _network(view)


def _job(view: View) -> Iterator[Metric]:
    frame = view.frame
    yield from metric(
        "ncclwatch_last_sample_timestamp_seconds",
        "gauge",
        "When memory was last looked at, seconds since the epoch.",
        [({}, frame.time)],
    )
    census = view.census
    yield from metric(
        "ncclwatch_ranks", "gauge", "Ranks by state.", [({"state": state.word}, census.get(state.letter, 0)) for state in STATES]
    )
    yield from metric("ncclwatch_lost_records_total", "counter", "Call records lost.", [({}, frame.lost)])
    planes = [({"plane": plane.name}, int(plane.running)) for plane in frame.planes]
    yield from metric("ncclwatch_plane_up", "gauge", "Whether a plane sees the job.", planes)
    cost = frame.cost
    for name, text, value in (
        ("ncclwatch_agent_cpu_ratio", "Share of one core that ncclwatch itself uses.", cost.own_share),
        ("ncclwatch_agent_resident_bytes", "Resident memory of ncclwatch.", cost.rss_bytes),
        ("ncclwatch_probe_hits_per_second", "Probe hits in the watched processes.", cost.hits_per_s),
        (
            "ncclwatch_probe_cpu_ratio",
            "Estimated time of probes in the watched processes, as a share of one core.",
            cost.probe_share,
        ),
        (
            "ncclwatch_wire_thread_ratio",
            "Largest share of its time that a thread has paid for bursts of probes on work requests.",
            cost.wire_share,
        ),
        ("ncclwatch_wire_budget_ratio", "What that share may be.", cost.wire_budget),
    ):
        yield from metric(name, "gauge", text, [({}, value)])


def _verdicts(view: View) -> Iterator[Metric]:
    standing = [verdict for verdict in view.frame.verdicts if verdict.verdict_class.accuses]
    labelled = [
        (
            {
                "class": verdict.verdict_class.value,
                "id": verdict.id,
                "culprits": "; ".join(culprit_name(culprit) for culprit in verdict.culprits[:8]),
                "summary": clean(verdict.summary, 300),
                "next_step": clean(verdict.next_steps[0], 300) if verdict.next_steps else "",
            },
            verdict,
        )
        for verdict in standing
    ]
    yield from metric(
        "ncclwatch_verdict",
        "gauge",
        "1 for every verdict that accuses somebody and stands.",
        [(labels, 1) for labels, _ in labelled],
    )
    yield from metric(
        "ncclwatch_verdict_since_timestamp_seconds", "gauge", "Since when a verdict stands.",
        [({"class": v.verdict_class.value, "id": v.id}, v.since) for v in standing],
    )  # fmt: skip
    yield from metric(
        "ncclwatch_verdict_confidence_ratio", "gauge", "How sure a verdict is.",
        [({"class": v.verdict_class.value, "id": v.id}, v.confidence) for v in standing],
    )  # fmt: skip
    yield from metric(
        "ncclwatch_verdict_victims", "gauge", "Ranks that a verdict says wait.",
        [({"class": v.verdict_class.value, "id": v.id}, len(set(v.victims))) for v in standing],
    )  # fmt: skip


def _ranks(view: View) -> Iterator[Metric]:
    windows = view.frame.windows[:MAX_RANKS]
    accused = Accused.by(view.frame.verdicts)
    labels: list[Labels] = [
        {
            "rank": "" if w.rank is None else w.rank,
            "host": clean(w.process.host, 64),
            "pid": w.process.pid,
            "gpu": "" if w.gpu is None else w.gpu,
        }
        for w in windows
    ]
    columns: tuple[tuple[str, str, list[float | None]], ...] = (
        ("ncclwatch_rank_operations_per_second", "Operations a rank launches.", [w.operations_per_s for w in windows]),
        ("ncclwatch_rank_bytes_per_second", "Algorithm bytes a rank launches.", [w.bytes_per_s for w in windows]),
        ("ncclwatch_rank_steps_per_second", "Proxy steps a rank completes.", [w.steps_per_s for w in windows]),
        ("ncclwatch_rank_still_seconds", "Since when no counter of NCCL has moved on a rank.", [w.still_s for w in windows]),
        (
            "ncclwatch_rank_operation_age_seconds",
            "How long the oldest unfinished operation of a rank is open.",
            [w.operation.age_s if w.operation else None for w in windows],
        ),
        (
            "ncclwatch_rank_culprit",
            "1 where a standing verdict names the rank.",
            [float(is_accused(w, accused)) for w in windows],
        ),
    )
    for name, text, values in columns:
        yield from metric(name, "gauge", text, zip(labels, values, strict=True))


def _work(view: View) -> Iterator[Metric]:
    """What the ports of ranks carried, in their newest windows."""
    windows = view.ports[:MAX_RANKS]
    labels: list[dict[str, object]] = [
        {
            "rank": "" if w.global_rank is None else w.global_rank,
            "host": clean(w.host, 64),
            "pid": w.pid,
            "nic": clean(w.device, 64) + (f":{w.port}" if w.port else ""),
            "counting": str(w.work.counting),
        }
        for w in windows
    ]
    works = [w.work for w in windows]
    columns: Sequence[tuple[str, str, list[float | None]]] = (
        ("ncclwatch_work_sent_bytes_per_second", "Bytes a rank hands to a port.", [w.bytes_per_s for w in works]),
        ("ncclwatch_work_received_bytes_per_second", "Bytes a rank receives from a port.", [w.received_per_s for w in works]),
        (
            "ncclwatch_work_throughput_bytes_per_second",
            "Bytes over time of the last 64 completions; of sockets while there was something to send.",
            [w.throughput for w in works],
        ),
        ("ncclwatch_work_in_flight", "Requests posted and not completed at the end of the window.", [w.in_flight for w in works]),
        ("ncclwatch_work_coverage_ratio", "How much of the window was seen.", [w.coverage for w in works]),
        (
            "ncclwatch_work_uncertainty_ratio",
            "Relative standard error of the bytes sent.",
            [w.uncertainty for w in works],
        ),
    )
    for name, text, values in columns:
        yield from metric(name, "gauge", text, zip(labels, values, strict=True))
    latencies = [
        (label | {"quantile": quantile}, _seconds(ns))
        for label, work in zip(labels, works, strict=True)
        for quantile, ns in (("0.5", work.latency_p50_ns), ("0.99", work.latency_p99_ns))
    ]
    yield from metric("ncclwatch_work_latency_seconds", "gauge", "Time from post to completion.", latencies)


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e9


def _network(view: View) -> Iterator[Metric]:
    nics = [row.record for row in view.frame.nics or ()]
    labels: list[Labels] = [
        {"host": clean(nic.host, 64), "nic": clean(nic.name, 64), "used": str(bool(nic.used_by)).lower()}
        | ({"netns": str(nic.namespace)} if nic.namespace else {})
        for nic in nics
    ]
    columns: Sequence[tuple[str, str, list[float | None]]] = (
        ("ncclwatch_nic_up", "Whether a NIC can carry traffic.", [float(nic.up) for nic in nics]),
        ("ncclwatch_nic_receive_bytes_per_second", "Bytes a NIC receives.", [nic.receive_rate for nic in nics]),
        ("ncclwatch_nic_send_bytes_per_second", "Bytes a NIC sends.", [nic.send_rate for nic in nics]),
        ("ncclwatch_nic_errors", "Errors and signs of loss since watching began.", [float(sum(n.errors.values())) for n in nics]),
    )
    for name, text, values in columns:
        yield from metric(name, "gauge", text, zip(labels, values, strict=True))
