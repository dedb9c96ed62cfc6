"""The numpy mirror of ``bpftrace_probes/verbs_maps.h``; ``tests/unit/wire/test_abi.py`` compares it with what gcc makes of
the header."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

PENDING: Final = 256
WINDOW: Final = 128
OPCODES: Final = 16
STATUSES: Final = 32
BUCKETS: Final = 128

QP_KEY: Final = np.dtype([("context", "<u8"), ("pid", "<u4"), ("qp_num", "<u4")])

PENDING_REQUEST: Final = np.dtype([("wr_id", "<u8"), ("time_ns", "<u8"), ("posted", "<u8"), ("bytes", "<u8")])

SAMPLE: Final = np.dtype([("time_ns", "<u8"), ("bytes", "<u8")])

_QP_WORDS: Final = (
    "generation",
    "address",
    "send_cq",
    "recv_cq",
    "first_ns",
    "last_post_ns",
    "last_completion_ns",
    "posted",
    "posted_bytes",
    "signalled",
    "inlined",
    "refused",
    "completed",
    "retired",
    "retired_bytes",
    "received",
    "received_bytes",
    "receives_posted",
    "errors",
    "unmatched",
    "skipped",
    "overwritten",
    "truncated",
    "sig_all",
    "last_opcode",
    "batch_posted",
    "batch_bytes",
    "batch_signalled",
    "batch_tail",
    "head",
    "tail",
    "samples",
)

_QP_FIELDS: list[Any] = [(name, "<u8") for name in _QP_WORDS]
_QP_FIELDS += [
    ("opcode_count", "<u8", (OPCODES,)),
    ("opcode_bytes", "<u8", (OPCODES,)),
    ("status_count", "<u8", (STATUSES,)),
    ("latency", "<u8", (BUCKETS,)),
    ("pending", PENDING_REQUEST, (PENDING,)),
    ("window", SAMPLE, (WINDOW,)),
]
QP: Final = np.dtype(_QP_FIELDS)

THREAD: Final = np.dtype(
    [
        ("posts", "<u8"),
        ("polls", "<u8"),
        ("extended_posts", "<u8"),
        ("extended_polls", "<u8"),
        ("polls_empty", "<u8"),
        ("takes", "<u8"),
        ("requests_seen", "<u8"),
        ("completions_seen", "<u8"),
        ("cq", "<u8"),
        ("completions", "<u8"),
        ("qp", "<u8"),
        ("requests", "<u8"),
        ("bad_request", "<u8"),
        ("open_cq", "<u8"),
        ("open_wr_id", "<u8"),
        ("open_status", "<u4"),
        ("open_wanted", "<u4"),
        ("armed", "<u4"),
        ("reserved", "<u4"),
        ("poll_ns", "<u8"),
        ("found", "<u4"),
        ("index", "<u4"),
    ]
)

CONFIG: Final = np.dtype([("generation", "<u8"), ("paused", "<u8")])

CONTROL: Final = np.dtype(
    [
        ("time_ns", "<u8"),
        ("context", "<u8"),
        ("qp", "<u8"),
        ("send_cq", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("kind", "<u4"),
        ("qp_num", "<u4"),
        ("state", "<i4"),
        ("sig_all", "<u4"),
    ]
)

COUNTERS: Final = ("qps-full", "control-lost", "unreadable", "unattributed", "poll-truncated")
"""Names of ``enum nwv_counter`` in order."""
COUNTER_SLOTS: Final = 8

LOWEST_OCTAVE: Final = 5
"""The first bucket of the latency histogram begins at 2^5 ns."""


def bucket_bounds() -> npt.NDArray[np.float64]:
    """Lower bound in ns of each latency bucket, and the upper bound of the last: four buckets to an octave, linear inside it."""
    index = np.arange(BUCKETS + 1)
    return np.asarray(2.0 ** (LOWEST_OCTAVE + index // 4) * (1 + (index % 4) / 4), dtype=np.float64)
