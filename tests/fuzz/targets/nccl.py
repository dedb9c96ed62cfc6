"""What NCCL itself says of a job, kept in files: answers of RAS, debug logs, files of the Inspector."""

from __future__ import annotations

import lzma
import random
import re
from functools import partial
from pathlib import Path

from fuzz.harness import Target, scratch_file
from fuzz.mutate import of_json, of_lines
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.ingest.base import Format, Ingested
from ncclwatch.ingest.inspector import Inspector
from ncclwatch.ingest.nccl_log import NcclLog
from ncclwatch.ingest.ras import Ras
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.ingest.made_watchdog import NEVER_JOINED, OLDER, OLDEST, REPORT, STUCK, answer, differ, status, timed_out

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
            700,
        ),
        Target(
            "ras-text",
            "an answer of RAS as text, judged",
            partial(_kept, "*.txt"),
            partial(_judged, Ras()),
            of_lines,
            1 << 12,
            700,
        ),
        Target("nccl-log", "debug logs of NCCL, judged", _logs, partial(_judged, NcclLog()), of_lines, 1 << 14, 170),
        Target("torch-watchdog", "lines of PyTorch's watchdog, judged", _watchdogs, _said, of_lines, 1 << 13, 450),
        Target(
            "inspector", "files of NCCL's Inspector, judged", _inspected, partial(_judged, Inspector()), _of_line, 1 << 14, 55
        ),
    ]


def _inspected() -> list[bytes]:
    lines = lzma.decompress((FIXTURES / "inspector-2.29.2-slow.xz").read_bytes()).splitlines(keepends=True)
    return [b"".join(lines[at :: len(lines) // 6])[: 1 << 14] for at in (0, 50, 99)]


def _of_line(data: bytes, source: random.Random) -> bytes:
    """One line changed as JSON, or the lines as lines."""
    lines = data.splitlines(keepends=True)
    if not lines or source.random() < 0.3:
        return of_lines(data, source)
    at = source.randrange(len(lines))
    return b"".join([*lines[:at], of_json(lines[at].rstrip(), source), b"\n", *lines[at + 1 :]])


def _logs() -> list[bytes]:
    """What a seed must have and little more: creation and calls of every rank."""
    logs = (lzma.decompress(path.read_bytes()) for path in sorted(FIXTURES.glob("*.log.xz")))
    wanted = re.compile(rb"^.*(?: - Init |: opCount [0-3] |Ring 00|WARN).*\n", re.MULTILINE)
    return [b"".join(wanted.findall(log))[: 1 << 14] for log in logs]


def _watchdogs() -> list[bytes]:
    waits = [line for rank in (0, 1) for line in (timed_out(rank, 79), status(rank, 79, 80))]
    logs = ([*waits, answer(2, 78)], [*REPORT, NEVER_JOINED], [OLDER, OLDEST, STUCK])
    return ["\n".join(lines).encode() for lines in (*logs, [differ(0, ("ALLREDUCE", 8), 1, ("BROADCAST", 9))])]


def _said(data: bytes) -> None:
    """Such lines alone make no record: what is said of them is all that is made of them."""
    with scratch_file(data) as path:
        NcclLog().recognises(data[:4096], path)
        for job in NcclLog().read([path]):
            job.amend(Verdict(VerdictClass.UNKNOWN, "")).to_json()


def _kept(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(FIXTURES.glob(pattern))]


def _judged(form: Format, data: bytes) -> None:
    with scratch_file(data) as path:
        form.recognises(data[:4096], path)
        for job in form.read([path]):
            _judge(job)


def _judge(job: Ingested) -> None:
    session = DiagnosisSession()
    # Wild times make very many looks, which differ in nothing.
    for batch in [*job.batches[:6], *job.batches[-6:]]:
        session.feed(batch)
        session.judge(batch.time_ns)
    for verdict in session.verdicts:
        job.amend(verdict).to_json()
