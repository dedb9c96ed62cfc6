"""NCCL RAS: answers of its service, kept in files (``ncclras``, or ``VERBOSE STATUS`` said to port 28028)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ncclwatch.ingest.base import Format, Ingested, IngestError, changed_ns
from ncclwatch.ingest.ras_answer import MAX_BYTES, RasAnswer
from ncclwatch.ingest.ras_json import parse_json
from ncclwatch.ingest.ras_records import jobs_of
from ncclwatch.ingest.ras_text import parse_text

_TEXT = re.compile(
    rb"^(?:Job summary|Communicators\.\.\.|Group +Comms +Nodes +Ranks |RAS Monitor Mode| ?\[[\d :-]{19}\] PEER_)", re.M
)
"""Of what an answer begins with, people mostly leave out the lines above these when they pass it on."""
NEAR_BYTES = 1024
"""Bound: so near to the beginning: a page about RAS quotes answers further down."""
_JSON_MARKS = (b'"nccl_version"', b'"communicators"')


class Ras(Format):
    """Answers of NCCL's RAS, as text and as JSON."""

    name = "ras"
    what = "answer of NCCL's RAS"

    def recognises(self, head: bytes, path: Path) -> bool:
        """By what every answer has near its beginning."""
        return is_json(head) or _TEXT.search(head, 0, NEAR_BYTES) is not None

    def read(self, files: Sequence[Path]) -> Sequence[Ingested]:
        """The jobs that the answers are of; several answers of one job are looks at it, in the order of their times."""
        answers: list[RasAnswer] = []
        failed: list[IngestError] = []
        for path in files:
            try:
                answers.append(parse_answer(_bytes_of(path), str(path), changed_ns(path.stat()) / 1e9))
            except IngestError as error:
                failed.append(error)
        if failed and not answers:
            raise failed[0]
        jobs = jobs_of(answers)
        if failed and jobs:
            jobs[0] = replace(jobs[0], problems=[*jobs[0].problems, *map(str, failed)])
        return jobs


def is_json(head: bytes) -> bool:
    """Whether this is the beginning of an answer in JSON; a connection may have said some lines before it."""
    brace = head.find(b"{")
    return 0 <= brace < 256 and b"NCCL" not in head[:brace] and all(mark in head for mark in _JSON_MARKS)


def parse_answer(data: bytes, source: str, written_s: float) -> RasAnswer:
    """One answer, of whichever form. Raises :class:`IngestError`."""
    if is_json(data[:4096]):
        return parse_json(data, source, written_s)
    return parse_text(data, source, written_s)


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise IngestError(f"{path}: {error.strerror or error}", "name a file that can be read") from None
    if len(data) > MAX_BYTES:
        raise IngestError(f"{path}: larger than {MAX_BYTES >> 20} MiB", "no answer of RAS is")
    return data
