"""Histories made for tests: rows written as a writer writes them, without its thread."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ncclwatch.history import files, journal
from ncclwatch.history.rows import Run, verdict_row
from ncclwatch.history.tables import Row, fitted

TODAY = datetime.now(UTC).date()
NOON_NS = int((datetime.combine(TODAY, datetime.min.time(), UTC) - timedelta(days=4.5)).timestamp()) * 10**9
"""Noon, five days ago: what is very old is not kept."""
SECOND_NS, DAY_NS = 10**9, 86_400 * 10**9


def numbered(rows: Sequence[Row], life: str = "made-up") -> list[journal.Numbered]:
    return [(row.table, [*fitted(row), life, number]) for number, row in enumerate(rows, 1)]


def keep(root: Path, rows: Sequence[Row], life: str = "made-up", segment: int = 0) -> None:
    """Write rows into files."""
    journal.folder(root).mkdir(parents=True, exist_ok=True)
    files.convert(root, journal.Read(life, segment, numbered(rows, life)))


def document(node: str, since_ns: int, *, kind: str = "hardware", cause: str = "", number: str = "v1") -> dict[str, Any]:
    """A verdict as JSON, as far as a history looks at it."""
    culprit = {"rank": 3, "host": node, "pid": 7, "reason": cause, "ticket": {"node": node, "gpu_uuid": "GPU-1"}}
    return {"schema": "ncclwatch.verdict/1", "id": number, "class": kind, "summary": f"rank 3 ({node}) holds up the job",
            "confidence": 0.9, "since": since_ns / 1e9, "culprits": [culprit], "victims": [0, 1, 2]}  # fmt: skip


def incident(of: Run, node: str, since_ns: int, *, told_s: float = 5.0, stood_s: float | None = None, **about: Any) -> list[Row]:
    """A verdict that is told ``told_s`` after it began, and after ``stood_s`` (since then too) recovered."""
    told = document(node, since_ns, **about)
    rows = [verdict_row(of, since_ns + int(told_s * 1e9), "verdict", told)]
    if stood_s is not None:
        rows.append(verdict_row(of, since_ns + int(stood_s * 1e9), "recovery", told, stood_s))
    return rows


def run_of(of: Run, begin_ns: int, seconds: int, *, ended: bool = True, iteration_s: float = 1.0, every: int = 10) -> list[Row]:
    """A run of one rank that works all the time."""
    end_ns = begin_ns + seconds * SECOND_NS
    rows = [Row("runs", begin_ns, of.job, of.run, {"kind": "begin", "ranks": 1, "nodes": ["node0"], "nccl": "2.27.5"})]
    for second in range(0, seconds, every):
        time_ns = begin_ns + second * SECOND_NS
        rate = {"rank": 0, "node": "node0", "operations_per_s": 10.0, "bytes_per_s": 1e6, "still_s": 0.0}
        paced = {"duration_s": iteration_s, "number": second, "rank": 0, "median_s": iteration_s, "slowest_s": iteration_s}
        rows += [Row("rates", time_ns, of.job, of.run, rate), Row("iterations", time_ns, of.job, of.run, paced)]
    if ended:
        rows.append(Row("runs", end_ns, of.job, of.run, {"kind": "end", "ranks": 1}))
    return rows
