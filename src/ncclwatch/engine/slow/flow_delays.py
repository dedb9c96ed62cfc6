"""C4D's delay matrix of a running job, from what the wire says of its connections: completion times of work requests (RDMA),
round trips (TCP). Evidence beside a verdict of slowness; it accuses nobody by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from ncclwatch.engine.slow.delay_matrix import SlowPart, Where, matrix_of, slow_parts
from ncclwatch.model.network import FlowKind, FlowRecord
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Verdict

MAX_RANKS = 1024
"""Larger communicators are left out: the matrix is dense."""
MAX_LINES = 3
TIMES = 3.0
"""A delay this many times the usual is told."""

_CALLED = {FlowKind.RDMA: "completion of work requests", FlowKind.SOCKET: "TCP round trip"}


def delay_lines(flows: Iterable[FlowRecord], verdict: Verdict) -> list[str]:
    """What stands out in the matrices of the communicators that culprits belong to, worst first."""
    culprits = {culprit.rank for culprit in verdict.culprits if culprit.rank is not None}
    found = [
        (part.times, line)
        for (comm, kind), part, names, cells in _slow(flows)
        if culprits & _named(part, names)
        for line in [_line(comm, kind, part, names, cells)]
    ]
    return [line for _, line in sorted(found, reverse=True)[:MAX_LINES]]


def _slow(flows: Iterable[FlowRecord]) -> Iterator[tuple[tuple[int, FlowKind], SlowPart, dict[int, int | None], int]]:
    transfers: dict[tuple[int, FlowKind], list[tuple[int, int, float]]] = defaultdict(list)
    names: dict[int, dict[int, int | None]] = defaultdict(dict)
    for flow in flows:
        if flow.comm_hash is None or flow.rank is None or flow.peer is None:
            continue
        names[flow.comm_hash][flow.rank] = flow.global_rank
        delay = delay_us(flow) if is_sending(flow) else None
        if delay is not None:
            transfers[flow.comm_hash, flow.kind].append((flow.rank, flow.peer, delay))
    for key, seen in transfers.items():
        size = 1 + max(max(source, destination) for source, destination, _ in seen)
        if size <= MAX_RANKS:
            matrix = matrix_of(size, seen)
            for part in slow_parts(matrix, TIMES):
                yield key, part, names[key[0]], int(np.isfinite(matrix).sum())


def is_sending(flow: FlowRecord) -> bool:
    """Whether a connection is one that sends the data of transfers."""
    return flow.direction is Direction.SEND and flow.role in ("", "data")


def delay_us(flow: FlowRecord) -> float | None:
    """How long what a connection sends takes to be acknowledged, µs: work requests, or TCP's round trip; ``None``: unknown."""
    if flow.rdma is not None and flow.rdma.latency_p50_ns:
        return flow.rdma.latency_p50_ns / 1e3
    if flow.socket is not None and flow.socket.rtt_us:
        return float(flow.socket.rtt_us)
    return None


def _named(part: SlowPart, names: dict[int, int | None]) -> set[int]:
    """Global ranks that a part names."""
    ends = (part.source, part.destination)
    return {rank for end in ends if end >= 0 and (rank := names.get(end)) is not None}


def _line(comm: int, kind: FlowKind, part: SlowPart, names: dict[int, int | None], cells: int) -> str:
    def name(rank: int) -> str:
        known = names.get(rank)
        return f"rank {known}" if known is not None else f"rank {rank} of the communicator"

    what = {
        Where.SENDER: f"all that {name(part.source)} sends",
        Where.RECEIVER: f"all that {name(part.destination)} receives",
        Where.LINK: f"from {name(part.source)} to {name(part.destination)}",
    }[part.where]
    called = _CALLED.get(kind, "delay")
    return (
        f"delay matrix of communicator {comm:016x} ({called}, {cells} pairs): {what} takes {part.delay:.0f} µs, "
        f"{part.times:.1f} times the usual"
    )
