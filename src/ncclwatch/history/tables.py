"""The tables of a history: their columns, and values made to fit them, wherever they are from.

Times are UTC without a zone, to the microsecond. A rate is a second's. ``None`` is not known. Every row carries the life of the
writer that wrote it and its number in that life, counted over all tables: a number that is missing is a row that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

TEXT, DOCUMENT, REAL, WHOLE, FLAG, TIME, TEXTS, WHOLES = "text", "document", "real", "whole", "flag", "time", "texts", "wholes"
"""Kinds of columns. A document is a long text; a time is given in nanoseconds since the epoch."""
MAX_TEXT, MAX_DOCUMENT, MAX_ITEMS = 1024, 1 << 20, 4096
"""Bound: characters of a text and of a document, items of a list."""
MAX_WHOLE = (1 << 63) - 1
MAX_TIME_NS = MAX_WHOLE // 1000 * 1000

COMMON = {"time": TIME, "job": TEXT, "run": TEXT}
"""What every row begins with: when it was so, and of which run of which job; both texts are empty for what is of none."""
NUMBERED = {"life": TEXT, "n": WHOLE}
"""What a writer adds."""

TABLES: Mapping[str, Mapping[str, str]] = {
    # A verdict that began to stand (kind verdict), or stands no longer because the job went on (kind recovery).
    "verdicts": {
        "id": TEXT, "kind": TEXT, "verdict_id": TEXT, "class": TEXT, "summary": TEXT, "confidence": REAL, "since": TIME,
        "duration_s": REAL, "nodes": TEXTS, "ranks": WHOLES, "gpus": TEXTS, "causes": TEXTS, "operation": TEXT,
        "communicator": TEXT, "victims": WHOLE, "document": DOCUMENT,
    },
    # A run of a job was first seen (begin), or its last process has ended (end), or its watcher ended before (seen).
    "runs": {
        "kind": TEXT, "ranks": WHOLE, "world_size": WHOLE, "nodes": TEXTS, "nccl": TEXT, "command": TEXT, "detail": TEXT,
    },
    # Iterations of the one rank by which a job is paced; beside each the newest ones of all ranks.
    "iterations": {
        "duration_s": REAL, "number": WHOLE, "rank": WHOLE, "node": TEXT, "ranks": WHOLE, "median_s": REAL, "slowest_s": REAL,
        "slowest_rank": WHOLE,
    },
    # A rank at one moment, once a minute, with the newest window of its work requests.
    "rates": {
        "rank": WHOLE, "node": TEXT, "pid": WHOLE, "gpu": WHOLE, "state": TEXT, "operation": TEXT, "operations_per_s": REAL,
        "bytes_per_s": REAL, "steps_per_s": REAL, "still_s": REAL, "sent_per_s": REAL, "received_per_s": REAL,
        "throughput": REAL, "latency_p50_us": REAL, "latency_p99_us": REAL, "in_flight": WHOLE, "errors": WHOLE,
        "coverage": REAL, "counting": TEXT,
    },
    # A connection whose state changed, and once a minute each that is in trouble.
    "flows": {
        "rank": WHOLE, "node": TEXT, "pid": WHOLE, "peer": WHOLE, "channel": WHOLE, "direction": TEXT, "device": TEXT,
        "port": WHOLE, "kind": TEXT, "role": TEXT, "state": TEXT, "reason": TEXT, "bandwidth": REAL, "expected": REAL,
        "retries": WHOLE, "delay_us": REAL,
    },
    # A NIC: when it changes, and every ten minutes one that the job uses. event: seen, up, down.
    "nics": {
        "node": TEXT, "nic": TEXT, "kind": TEXT, "event": TEXT, "up": FLAG, "state": TEXT, "rate_gbps": REAL,
        "receive_per_s": REAL, "send_per_s": REAL, "errors": TEXT, "congestion": WHOLE, "ranks": WHOLES,
    },
    # A GPU: what its driver says every ten minutes (source nvml), and lines of the kernel's log (source kernel).
    "gpus": {
        "node": TEXT, "gpu": WHOLE, "bus": TEXT, "uuid": TEXT, "model": TEXT, "source": TEXT, "troubles": TEXTS, "detail": TEXT,
        "code": WHOLE, "sm_clock": WHOLE, "power": REAL, "temperature": WHOLE, "ecc_uncorrected": WHOLE,
    },
    # What is missing: rows that were dropped, a writer that was killed, a journal that is damaged.
    "gaps": {"kind": TEXT, "since": TIME, "until": TIME, "rows": WHOLE, "detail": TEXT},
    # Writers: when each began and ended.
    "lives": {"kind": TEXT, "host": TEXT, "command": TEXT, "version": TEXT},
}  # fmt: skip
"""By name the columns of each table that are its own."""


class Row(NamedTuple):
    """One row before it has a number: ``values`` are of the table's own columns, by name; what is not given is ``None``."""

    table: str
    time_ns: int
    job: str
    run: str
    values: Mapping[str, Any]


def columns(table: str) -> dict[str, str]:
    """Every column of a table with its kind, in order."""
    return {**COMMON, **TABLES[table], **NUMBERED}


def fitted(row: Row) -> list[Any]:
    """The values of a row in the order of its columns (without life and number), each as its kind or ``None``."""
    given = {"time": row.time_ns, "job": row.job, "run": row.run, **row.values}
    return [fit(kind, given.get(name)) for name, kind in (*COMMON.items(), *TABLES[row.table].items())]


def fit(kind: str, value: Any) -> Any:
    """A value as its kind; ``None`` where it is none of it. Texts are cut, and hold what UTF-8 can."""
    if value is None:
        return None
    if kind in (TEXT, DOCUMENT):
        return _text(value, MAX_TEXT if kind == TEXT else MAX_DOCUMENT)
    if kind == FLAG:
        return value if isinstance(value, bool) else None
    if kind in (TEXTS, WHOLES):
        items = value[:MAX_ITEMS] if isinstance(value, (list, tuple)) else ()
        return [fitted for item in items if (fitted := fit(TEXT if kind == TEXTS else WHOLE, item)) is not None]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if kind == REAL:
        # NaN, infinities, and whole numbers beyond a double are not known.
        return float(value) if abs(value) < 1e300 and not math.isnan(value) else None
    whole = isinstance(value, int) and -MAX_WHOLE <= value <= MAX_WHOLE
    return value if whole and (kind != TIME or 0 <= value <= MAX_TIME_NS) else None


def _text(value: Any, limit: int) -> str | None:
    return value[:limit].encode("utf-8", "replace").decode() if isinstance(value, str) else None


def arrow_schema(table: str) -> pa.Schema:
    """The table as it stands in Parquet."""
    import pyarrow as pa

    types = {
        TEXT: pa.string(), DOCUMENT: pa.string(), REAL: pa.float64(), WHOLE: pa.int64(), FLAG: pa.bool_(),
        TIME: pa.timestamp("us"), TEXTS: pa.list_(pa.string()), WHOLES: pa.list_(pa.int64()),
    }  # fmt: skip
    return pa.schema([(name, types[kind]) for name, kind in columns(table).items()])


def arrow_table(table: str, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """Rows of fitted values, life and number at their end, as an Arrow table."""
    import pyarrow as pa

    schema = arrow_schema(table)
    kinds = list(columns(table).values())
    given = zip(*rows, strict=True) if rows else ([] for _ in kinds)
    arrays = []
    for field, kind, values in zip(schema, kinds, given, strict=True):
        plain = [None if value is None else value // 1000 for value in values] if kind == TIME else list(values)
        arrays.append(pa.array(plain, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)
