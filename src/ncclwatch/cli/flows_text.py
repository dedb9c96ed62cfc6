"""``flows`` for people: a table as wide as the terminal, and below it, in words, what is wrong and what could not be seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ncclwatch.cli.output import plain
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState
from ncclwatch.model.state import Direction
from ncclwatch.text import Style, clean, columns, fit, rate, size, time_text, wrap

if TYPE_CHECKING:
    from ncclwatch.collect.flows import FlowCollector
    from ncclwatch.wire.session import WireSession

MAX_ROWS = 256
"""Rows of the table; those in trouble come first when there are more flows."""
MAX_REASONS = 24

_ALWAYS = ("RANK", "CH", "WAY", "PEER", "NIC", "STATE", "DATA/S", "STEPS/S", "LATENCY", "RETRIES")
_FROM_WIDTH = {
    "COMM": 96, "EXPECTED": 96, "P99": 108, "POSTED": 116, "DONE": 116, "FLIGHT": 116, "QP/SOCKETS": 132, "RATE": 148,
}  # fmt: skip
_ORDER = (
    "RANK", "COMM", "CH", "WAY", "PEER", "NIC", "QP/SOCKETS", "STATE", "DATA/S", "EXPECTED", "STEPS/S", "RATE", "LATENCY", "P99",
    "POSTED", "DONE", "FLIGHT", "RETRIES",
)  # fmt: skip
_RIGHT = frozenset(_ORDER) - {"COMM", "WAY", "NIC", "QP/SOCKETS", "STATE"}
_NIC_CELLS = 14


def screen(
    records: Sequence[FlowRecord], collector: FlowCollector, wire: WireSession, report: str, *, width: int, style: Style
) -> Iterator[str]:
    """All lines, each of at most ``width`` cells."""
    if records:
        yield from table(records, width, style)
    for line in explanations(records):
        yield from wrap(line, width)
    if not records:
        yield from wrap("no connection over a network: these ranks are joined inside the node, or have not connected yet", width)
    for line in sources(records, collector, wire, report):
        yield from wrap(line, width)


def table(records: Sequence[FlowRecord], width: int, style: Style) -> Iterator[str]:
    """Heading and one row a flow, aligned; columns come with the width."""
    several = len({(r.comm_hash, r.rank) for r in records}) > len({r.pid for r in records})
    names = [n for n in _ORDER if (n in _ALWAYS or width >= _FROM_WIDTH[n]) and (n != "COMM" or several)]
    shown = choose(records)
    rows = [tuple(cells(record)[name] for name in names) for record in shown]
    lines = columns(names, rows, right=[i for i, name in enumerate(names) if name in _RIGHT], gap=1 if width < 90 else 2)
    yield style.dim(fit(lines[0], width))
    for record, line in zip(shown, lines[1:], strict=True):
        text = fit(line, width)
        yield style.bad(text) if record.state.is_trouble else style.warn(text) if record.state is FlowState.BLOCKED else text
    if len(shown) < len(records):
        yield f"… and {len(records) - len(shown)} more flows, none of them in trouble (all of them with --json)"


def choose(records: Sequence[FlowRecord]) -> list[FlowRecord]:
    """At most ``MAX_ROWS`` records in their order: troubled ones first."""
    if len(records) <= MAX_ROWS:
        return list(records)
    urgent = sorted(records, key=lambda r: (not r.state.is_trouble, r.state is not FlowState.BLOCKED, r.role != "data"))
    kept = {id(record) for record in urgent[:MAX_ROWS]}
    return [record for record in records if id(record) in kept]


def cells(record: FlowRecord) -> dict[str, str]:
    """What stands in each column."""
    rdma, socket, steps = record.rdma, record.socket, record.steps
    pair = rdma.queue_pair if rdma else record.ends.queue_pair if record.ends else None
    arrow = {Direction.SEND: "send", Direction.RECV: "recv", None: ""}[record.direction]
    latency = rdma.latency_p50_ns if rdma else None if socket is None or socket.rtt_us is None else socket.rtt_us * 1000.0
    device = clean(record.device, 40) + (f":{record.port}" if record.port else "")
    return {
        "RANK": str(record.global_rank) if record.global_rank is not None else "?",
        "COMM": "" if record.comm_hash is None else f"{record.comm_hash:016x}"[:8] + f":{record.rank}",
        "CH": ""
        if record.channel is None
        else f"{record.channel}" + (f"/{record.connection_index}" if record.connection_index else ""),
        "WAY": arrow if record.role in ("data", "") or not arrow else f"{arrow}*",
        "PEER": "" if record.peer is None else str(record.peer),
        "NIC": fit(device or "?", _NIC_CELLS),
        "QP/SOCKETS": f"qp {pair}" if pair is not None else "" if socket is None else _sockets(socket.remote, socket.sockets),
        "STATE": str(record.state),
        "DATA/S": "-" if record.bandwidth is None else size(record.bandwidth),
        "EXPECTED": "-" if record.expected is None else size(record.expected),
        "STEPS/S": "-" if steps is None else rate(steps.per_second),
        "RATE": "-" if steps is None or steps.rate is None else f"1/{steps.changes}",
        "LATENCY": time_text(latency),
        "P99": time_text(rdma.latency_p99_ns if rdma else None),
        "POSTED": "" if rdma is None else str(rdma.posted),
        "DONE": "" if rdma is None else str(rdma.completed),
        "FLIGHT": "" if rdma is None else str(rdma.in_flight),
        "RETRIES": "-" if record.retries is None else str(record.retries),
    }


def _sockets(remote: str, number: int) -> str:
    return clean(remote, 48) + (f" +{number - 1}" if number > 1 else "")


def explanations(records: Sequence[FlowRecord]) -> Iterator[str]:
    """What is wrong, one line for all flows of which the same is said."""
    told: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.reason and (record.state.is_trouble or record.state in (FlowState.BLOCKED, FlowState.UNKNOWN)):
            told.setdefault((str(record.state), record.reason), []).append(name(record))
    for (state, reason), who in list(told.items())[:MAX_REASONS]:
        more = f" and {len(who) - 1} more" if len(who) > 1 else ""
        yield f"{state}: {who[0]}{more}: {clean(reason, 300)}"
    if len(told) > MAX_REASONS:
        yield f"… and {len(told) - MAX_REASONS} more (all of them with --json)"


def name(record: FlowRecord) -> str:
    """``rank 0 ch 1 → rank 3 over mlx5_0:1``."""
    rank = f"rank {record.global_rank}" if record.global_rank is not None else f"pid {record.pid}"
    if record.peer is None:
        qp = f" qp {record.rdma.queue_pair}" if record.rdma else ""
        return f"{rank}{qp} over {clean(record.device, 40)} (no connection of NCCL's)"
    arrow = "→" if record.direction is Direction.SEND else "←"
    port = f":{record.port}" if record.port else ""
    return f"{rank} ch {record.channel} {arrow} rank {record.peer} over {clean(record.device, 40) or '?'}{port}"


def sources(records: Sequence[FlowRecord], collector: FlowCollector, wire: WireSession, report: str) -> Iterator[str]:
    """Where the figures come from, what could not be seen and why, and what looking cost the job."""
    kinds = {record.kind for record in records}
    parts = ["steps from NCCL's memory"]
    if FlowKind.SOCKET in kinds:
        parts.append("of sockets DATA/S (sent: while there was something to send), round trip and RETRIES from the kernel")
    if wire.running:
        how = "every request counted" if any(r.rdma and r.rdma.exact for r in records) else "bursts of probes"
        parts.append(f"RDMA requests by {how}")
    yield f"sources: {'; '.join(parts)}"
    if any(record.role not in ("data", "") for record in records):
        yield "send*, recv*: clear-to-send and flush requests, which carry no data"
    if any(record.connection_index for record in records):
        yield "CH n/1: the connection for point-to-point operations on that channel"
    reasons = Counter(reason for reason in wire.reasons.values() if reason)
    if wire.reason and FlowKind.RDMA in kinds:
        reasons[wire.reason] += 0
    for reason, number in reasons.most_common(4):
        which = f" ({number} processes)" if number > 1 else ""
        yield f"wire plane unavailable{which}: {clean(reason, 300)}"
    plugins = sorted({n for names in collector.networks().values() for n in names} - {"IB", "Socket", ""})
    if plugins:
        yield f"external network: {clean(', '.join(plugins), 120)}; its devices are known by number only"
    if report:
        yield f"cost to the job: {report}"


def flow_json(record: FlowRecord) -> dict[str, Any]:
    """A flow as JSON: its fields, and CCL-D's rate beside the counts it is made of."""
    data: dict[str, Any] = plain(record)
    if record.steps is not None:
        data["steps"]["rate"] = record.steps.rate
    return data
