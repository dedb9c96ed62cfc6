"""Judges what a format made of files, as ``ncclwatch diagnose`` does."""

from __future__ import annotations

from collections.abc import Sequence

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.ingest.base import Ingested
from ncclwatch.model.verdict import Verdict


def verdict_of(job: Ingested) -> Verdict:
    """The worst verdict of the job, of its first view that names somebody."""
    told = job.amend(_judge(job.batches))
    for view in job.views:
        if not told.verdict_class.accuses:
            told = view.amend(_judge(view.batches))
    return told


def _judge(batches: Sequence[NodeBatch]) -> Verdict:
    session = DiagnosisSession()
    for batch in batches:
        session.feed(batch)
        session.judge(batch.time_ns)
    return session.verdicts[0]
