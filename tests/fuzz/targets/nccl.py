"""What NCCL itself says of a job, kept in files: answers of RAS."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fuzz.harness import Target, scratch_file
from fuzz.mutate import of_json, of_lines
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.ingest.base import Format, Ingested
from ncclwatch.ingest.ras import Ras

FIXTURES = Path(__file__).parents[2] / "fixtures" / "nccl"


def targets() -> list[Target]:
    """All of this module."""
    return [
        Target(
            "ras-json",
            "an answer of RAS in JSON, judged",
            partial(_kept, "*.json"),
            partial(_judged, Ras()),
            of_json,
            1 << 13,
            60,
        ),
        Target(
            "ras-text",
            "an answer of RAS as text, judged",
            partial(_kept, "*.txt"),
            partial(_judged, Ras()),
            of_lines,
            1 << 12,
            60,
        ),
    ]


def _kept(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(FIXTURES.glob(pattern))]


def _judged(form: Format, data: bytes) -> None:
    with scratch_file(data) as path:
        form.recognises(data[:4096], path)
        for job in form.read([path]):
            _judge(job)


def _judge(job: Ingested) -> None:
    session = DiagnosisSession()
    for batch in job.batches:
        session.feed(batch)
        session.judge(batch.time_ns)
    for verdict in session.verdicts:
        job.amend(verdict).to_json()
