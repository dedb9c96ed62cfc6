"""What NCCL itself says of a job, kept in files: answers of RAS, debug logs."""

from __future__ import annotations

import lzma
import re
from functools import partial
from pathlib import Path

from fuzz.harness import Target, scratch_file
from fuzz.mutate import of_json, of_lines
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.ingest.base import Format, Ingested
from ncclwatch.ingest.nccl_log import NcclLog
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
        Target("nccl-log", "debug logs of NCCL, judged", _logs, partial(_judged, NcclLog()), of_lines, 1 << 14, 40),
    ]


def _logs() -> list[bytes]:
    """What a seed must have and little more: creation and calls of every rank."""
    logs = (lzma.decompress(path.read_bytes()) for path in sorted(FIXTURES.glob("*.log.xz")))
    wanted = re.compile(rb"^.*(?: - Init |: opCount [0-3] |Ring 00|WARN).*\n", re.MULTILINE)
    return [b"".join(wanted.findall(log))[: 1 << 14] for log in logs]


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
