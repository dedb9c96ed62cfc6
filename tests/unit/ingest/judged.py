"""Judges what a format made of files, as ``ncclwatch diagnose`` does."""

from __future__ import annotations

from ncclwatch.cli.foreign import judge_ingested
from ncclwatch.ingest.base import Ingested
from ncclwatch.model.verdict import Verdict


def verdict_of(job: Ingested) -> Verdict:
    """The worst verdict of the job."""
    return judge_ingested(job)[0]
