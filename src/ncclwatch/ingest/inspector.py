"""NCCL's Inspector (a profiler plugin, 2.28.3 and later): JSON lines, one for each operation that has ended, as records.

Only what has ended is in it, of what is larger than 8 KiB, and the newest 1,024 between two dumps: what is not there proves
nothing. So the records end with the newest operation, and no job is ever taken to stand still. Operations say how long each GPU
was in them; lines of NCCL_INSPECTOR_DUMP_VERBOSE=1 also say when, and when the host called. Source:
``plugins/profiler/inspector/inspector_json.cc`` (v2.30.7; ``ext-profiler/inspector`` before), output format v4.0. From v4.1 on
each dump of a communicator begins with a line ``dump_stats`` of what was overwritten; v4.2 adds ``coll_algo`` and
``coll_proto``; from v4.3 on the lines below ``dump_stats`` may have no header of their own. Lines of proxies and of API calls
(``proxy_trace``, ``coll_api``, …) are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ncclwatch.ingest.base import Format, Ingested, IngestError
from ncclwatch.ingest.inspector_lines import InspectorReader, read_lines
from ncclwatch.ingest.inspector_records import batches_of
from ncclwatch.model.verdict import Verdict, VerdictClass

MARKS = (b'"inspector_output_format_version"', b'"header"', b'"metadata"')
BLIND = (
    "the Inspector records operations that have ended: whether any is open or was never called is not in its files",
    "operations below NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES (8 KiB) are not recorded, and of more than 1,024 between two dumps the "
    "oldest are lost",
)
NO_TIMES = "when hosts called and GPUs began: only lines of NCCL_INSPECTOR_DUMP_VERBOSE=1 say that"
SUPPORTED = frozenset((VerdictClass.RUNNING, *(one for one in VerdictClass if one.slow)))
SHOWN = 4


class Inspector(Format):
    """Files of NCCL's Inspector: one of each process."""

    name = "inspector"
    what = "log of NCCL's Inspector"

    def recognises(self, head: bytes, path: Path) -> bool:
        """By the keys with which each line begins."""
        first = head.lstrip()
        return first.startswith(b"{") and all(mark in first[:2048] for mark in MARKS)

    def read(self, files: Sequence[Path]) -> Sequence[Ingested]:
        """All files together: the processes of a job."""
        reader = InspectorReader()
        problems: list[str] = []
        for path in files:
            try:
                with path.open("rb") as file:
                    read_lines(file, str(path), reader)
            except OSError as error:
                problems.append(f"{path}: {error.strerror or error}")
        problems += reader.problems
        if not reader.ranks:
            raise IngestError(
                problems[0] if problems else f"{files[0]}: no operation in it", "the Inspector writes what has ended"
            )
        blind = BLIND if reader.timed else (*BLIND, NO_TIMES)
        return [
            Ingested(
                batches_of(reader), problems, blind, list(_notes(reader)), str(files[0].parent), amend=partial(_amend, reader)
            )
        ]


def _notes(reader: InspectorReader) -> Iterator[str]:
    operations = sum(len(rank.operations) for rank in reader.ranks.values())
    yield f"the Inspector's files: {operations} operations of {len(reader.processes)} processes"
    if reader.dropped:
        yield f"{reader.dropped} older operations are not looked at"
    if reader.gaps:
        yield f"{reader.gaps} operations are missing between others: they were small, or came too fast"
    if reader.overwritten:
        yield f"{reader.overwritten} operations were overwritten before the Inspector wrote them: raise its ring's size"
    if not reader.timed:
        yield f"not in these files: {NO_TIMES}"


def _amend(reader: InspectorReader, verdict: Verdict) -> Verdict:
    """A verdict as files of the Inspector support it: that something is slow, or nothing; never that something does not come."""
    lines = tuple(reader.shortest()[:SHOWN])
    if verdict.verdict_class in SUPPORTED:
        return replace(verdict, evidence=(*verdict.evidence, *lines), planes=("inspector",))
    summary = f"{len(reader.processes)} processes: their operations ended; what came after is not in these files"
    return Verdict(
        VerdictClass.RUNNING, summary, time=verdict.time, confidence=0.5, evidence=lines, unobserved=verdict.unobserved,
        planes=("inspector",),
    )  # fmt: skip
