"""Records of other tools, judged: each job as each format tells it, and the formats of one job joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.cli.verdicts import print_verdicts
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.cadence import Cadences
from ncclwatch.collect.ledger import Ledger
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.engine.slow.watch import SlowWatch
from ncclwatch.engine.topology.namer import StageNamer
from ncclwatch.engine.verdict import severity
from ncclwatch.errors import ExitStatus, TargetError, UsageError
from ncclwatch.gc_pause import collector_at_rest
from ncclwatch.ingest.base import Ingested, View
from ncclwatch.ingest.folders import Found, Record, find, read
from ncclwatch.ingest.joined import completed
from ncclwatch.model.job import Job
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.side_by_side import beside
from ncclwatch.slow_modes import SlowRule
from ncclwatch.text import clean

JUDGE_NS = 200_000_000
"""Batches within this time of each other are judged together."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One job of other tools' records: what stands, worst first, and what told of it."""

    job: str
    verdicts: Sequence[Verdict]
    formats: tuple[str, ...]
    notes: tuple[str, ...] = ()


def foreign_among(paths: Sequence[Path], *, alone: bool) -> Found | None:
    """What of the named paths is of other tools; ``None`` where nothing is. It is judged by itself."""
    if not paths or not all(path.exists() for path in paths):
        return None
    found = find(paths)
    folders = [path for path in paths if path.is_dir()]
    if not found.files:
        if folders:
            for line in found.problems:
                note(line)
            where = clean(str(folders[0]), 160)
            if found.problems:
                raise TargetError(f"{where} holds nothing that could be read", "see the lines above")
            raise UsageError(f"{where} holds no record of a tool that is known", "docs/ingest.md lists the formats")
        return None
    strange = [path for path in paths if path in found.unknown]
    if not alone or strange:
        raise UsageError("records of other tools are judged by themselves", "leave out the pids and the other files")
    return found


def judge_foreign(
    found: Found, *, as_json: bool, exit_code: bool, slow: SlowRule | None = None, why: bool = False
) -> int:  # fmt: skip
    """Print what stands of every job; returns the exit status."""
    judged, problems = judge_found(found, slow)
    verdicts = [verdict for one in judged for verdict in one.verdicts]
    if as_json:
        jobs = [
            {"job": one.job, "formats": list(one.formats), "verdicts": [verdict.to_json() for verdict in one.verdicts]}
            for one in judged
        ]
        emit_json({**verdicts[0].to_json(), "jobs": jobs})
    else:
        for number, one in enumerate(judged):
            if number:
                emit()
            if len(judged) > 1:
                emit(f"{one.job or 'job'} ({', '.join(one.formats)})")
            print_verdicts(one.verdicts, why=why)
        for line in dict.fromkeys(line for one in judged for line in one.notes):
            note(line)
    for line in problems:
        note(line)
    return ExitStatus.VERDICT if exit_code and any(verdict.verdict_class.accuses for verdict in verdicts) else ExitStatus.OK


def judge_found(found: Found, slow: SlowRule | None = None) -> tuple[list[Judged], list[str]]:
    """Every job, worst first, and what could not be read. Raises ``IngestError`` when nothing could."""
    records, problems = read(found)
    records = completed(records)
    # The collector would walk the records of all ranks, over and over.
    with collector_at_rest():
        told = [(record, judge_ingested(record.ingested, slow)) for record in records]
    return sorted(joined(told), key=lambda one: severity(one.verdicts[0])), problems


def judge_ingested(ingested: Ingested, slow: SlowRule | None = None) -> list[Verdict]:
    """What stands of one job, worst first: by its batches, else by the first further view that names somebody."""
    views, judge = (View(ingested.batches, ingested.amend), *ingested.views), partial(_judge_view, ingested, slow)
    with closing(beside(judge, views, alone=not ingested.large)) as told:
        said = next(told)
        for view in views[1:]:
            if said[0].verdict_class.accuses and not view.over(said[0]):
                break
            found = next(told)
            if any(verdict.verdict_class.accuses for verdict in found):
                said = found
    blind = ingested.blind
    said = [ingested.finish(verdict) for verdict in said]
    return [replace(verdict, unobserved=tuple(dict.fromkeys((*verdict.unobserved, *blind)))) for verdict in said]


def _judge_view(ingested: Ingested, slow: SlowRule | None, view: View) -> list[Verdict]:
    watch = (slow or SlowRule()).watch() if ingested.slowness else _NoPace(in_order=view.in_order)
    namer = StageNamer() if ingested.stages else _NoStages()
    diagnosis = LiveDiagnosis(ledger=Ledger(depth=ingested.depth), slow=watch, namer=namer)
    return [view.amend(verdict) for verdict in _stand(view.batches, diagnosis)]


class _NoStages(StageNamer):
    """Learns nothing."""

    def note_samples(self, samples: Sequence[ProcessSample]) -> None:
        """Not needed."""

    def observe(self, events: NDArray[Any], *, host: str = "") -> None:
        """Not needed."""

    def fall_back(self, samples: Iterable[ProcessSample]) -> None:
        """Not needed."""


class _NoPace(SlowWatch):
    """Takes the order of calls, where that is known, and no times: nobody is slow by these."""

    def __init__(self, *, in_order: bool) -> None:
        super().__init__()
        self.cadences = Cadences(ordered=in_order, timed=False)

    def judge(self, job: Job, verdict: Verdict, *_: Any, **__: Any) -> Verdict:
        """Not needed."""
        return verdict


def _stand(batches: Iterable[NodeBatch], diagnosis: LiveDiagnosis) -> list[Verdict]:
    session = DiagnosisSession(diagnosis)
    for now_ns, together in _moments(batches):
        for batch in together:
            session.feed(batch, now_ns)
        if session.is_due(now_ns):
            session.judge(now_ns)
    if session.verdicts:
        return list(session.verdicts)
    return [Verdict(VerdictClass.UNKNOWN, "these records hold nothing that could be judged")]


def _moments(batches: Iterable[NodeBatch]) -> Iterator[tuple[int, list[NodeBatch]]]:
    """Batches that are judged together, with the time of the first of them: no two looks at one host are."""
    together: list[NodeBatch] = []
    hosts: set[str] = set()
    for batch in batches:
        if together and (batch.time_ns - together[0].time_ns > JUDGE_NS or (batch.looked and batch.host in hosts)):
            yield together[0].time_ns, together
            together, hosts = [], set()
        together.append(batch)
        hosts |= {batch.host} if batch.looked else set()
    if together:
        yield together[0].time_ns, together


# --- several formats of one job ------------------------------------------------------------------------------------------


def joined(told: Sequence[tuple[Record, Sequence[Verdict]]]) -> Iterator[Judged]:
    """Jobs: where no format tells of several, all tell of one."""
    per_format = Counter(record.format.name for record, _ in told)
    if len(per_format) > 1 and max(per_format.values()) == 1:
        yield _as_one(told)
        return
    for record, verdicts in told:
        yield Judged(record.ingested.job, verdicts, (record.format.name,), tuple(record.ingested.notes))


def _as_one(told: Sequence[tuple[Record, Sequence[Verdict]]]) -> Judged:
    """What stands by the format that says the worst, and of that the surest; the others are told beside it."""
    ranked = sorted(told, key=lambda one: (severity(one[1][0]), -one[1][0].confidence))
    (record, verdicts), others = ranked[0], ranked[1:]
    first, beside = verdicts[0], [f"by the {one.format.what}: {said[0].summary}" for one, said in others]
    named = {culprit.rank for culprit in first.culprits}
    agree = [one.format.what for one, said in others if named and {culprit.rank for culprit in said[0].culprits} & named]
    if agree:
        beside.append(f"the same rank is named by {', '.join(agree)}")
    # What one format is blind for another may have seen: what all are blind for is left.
    blind = [set(said[0].unobserved) for _, said in told]
    unobserved = tuple(line for line in first.unobserved if all(line in lines for lines in blind)) or first.unobserved
    planes = tuple(dict.fromkeys(plane for _, said in ranked for plane in said[0].planes))
    joined = replace(first, evidence=(*first.evidence, *beside), unobserved=unobserved, planes=planes)
    notes = tuple(line for one, _ in ranked for line in one.ingested.notes)
    names = tuple(one.format.name for one, _ in ranked)
    return Judged(record.ingested.job, [joined, *verdicts[1:]], names, notes)
