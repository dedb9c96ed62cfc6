"""The columns of each table of the dashboard."""

from __future__ import annotations

from datetime import datetime

from rich.style import Style

from ncclwatch.collect.windows import RankWindow
from ncclwatch.dashboard import rows
from ncclwatch.dashboard.history import spark
from ncclwatch.dashboard.table import Column
from ncclwatch.text import clean, duration, ranges, rate, share, size, time_text
from ncclwatch.view.frame import CommunicatorRow, FlowRow, LogEntry, NicRow, OperationRow
from ncclwatch.view.ranks import RankRow
from ncclwatch.view.states import BY_LETTER, URGENCY

PLAIN = Style()
DIM = Style(dim=True)
ROW_STYLES = {
    "X": Style.parse("bold white on #c01c28"),
    "D": Style.parse("bold #dc8add"),
    "T": Style.parse("bold #f66151"),
    "?": Style.parse("#c0bfbc"),
    "s": Style.parse("#ffa348"),
    "w": Style.parse("#f5c211"),
    ".": DIM,
    "i": PLAIN,
    "r": PLAIN,
}


def rank_identity(row: RankRow) -> object:
    """The process."""
    return row.window.process.key


def rank_style(row: RankRow) -> Style:
    """Colour by state."""
    return ROW_STYLES[row.letter]


def _steps(window: RankWindow) -> str:
    operation = window.operation
    return f"{operation.steps_done}/{operation.steps_total}" if operation and operation.steps_total else ""


def _bar(window: RankWindow) -> str:
    operation = window.operation
    return rows.bar(operation.steps_done, operation.steps_total) if operation and operation.steps_total else ""


def _state_word(row: RankRow) -> str:
    return f"{row.letter} {BY_LETTER[row.letter].word}"


RANKS: list[Column[RankRow]] = [
    Column("RANK", 5, lambda r: "?" if r.window.rank is None else str(r.window.rank), lambda r: r.window.rank, right=True),
    Column("STATE", 10, _state_word, lambda r: URGENCY[r.letter]),
    Column("OPERATION", 17, lambda r: rows.operation_text(r.window), lambda r: rows.operation_text(r.window), flexible=True),
    Column(
        "AGE", 6, lambda r: rows.age(r.window), lambda r: r.window.operation.age_s if r.window.operation else None, right=True
    ),
    Column("STEPS", 9, lambda r: _steps(r.window), lambda r: r.window.operation and r.window.operation.steps_done, right=True),
    Column("", rows.BAR_CELLS, lambda r: _bar(r.window), from_width=110),
    Column(
        "OPS/S",
        6,
        lambda r: "-" if r.window.operations_per_s is None else rate(r.window.operations_per_s),
        lambda r: r.window.operations_per_s,
        right=True,
    ),
    Column(
        "DATA/S",
        8,
        lambda r: "-" if r.window.bytes_per_s is None else size(r.window.bytes_per_s),
        lambda r: r.window.bytes_per_s,
        right=True,
        from_width=100,
    ),
    Column(
        "SIZE",
        8,
        lambda r: size(r.window.operation.nbytes) if r.window.operation and r.window.operation.nbytes is not None else "",
        lambda r: r.window.operation.nbytes if r.window.operation else None,
        right=True,
        from_width=118,
    ),
    Column("PID", 7, lambda r: str(r.window.process.pid), lambda r: r.window.process.pid, right=True),
    Column("GPU", 3, lambda r: "-" if r.window.gpu is None else str(r.window.gpu), lambda r: r.window.gpu, right=True),
    Column("HOST", 8, lambda r: r.window.process.host, lambda r: r.window.process.host, flexible=True),
    Column(
        "COMM",
        8,
        lambda r: f"{r.window.operation.comm_hash:016x}"[:8] if r.window.operation and r.window.operation.comm_hash else "",
        lambda r: r.window.operation.comm_hash if r.window.operation else None,
        from_width=130,
    ),
    Column(
        "PROTO",
        12,
        lambda r: (
            "/".join(p for p in (r.window.operation.algorithm, r.window.operation.protocol) if p) if r.window.operation else ""
        ),
        from_width=140,
    ),
]

COMMUNICATORS: list[Column[CommunicatorRow]] = [
    Column("COMMUNICATOR", 16, lambda r: f"{r.hash:016x}", lambda r: r.hash),
    Column("ROLE", 6, lambda r: r.role or "-", lambda r: r.role, flexible=True),
    Column("SIZE", 6, lambda r: str(r.nranks), lambda r: r.nranks, right=True),
    Column("SEEN", 6, lambda r: str(len(r.members)), lambda r: len(r.members), right=True),
    Column("IN AN OP", 8, lambda r: str(r.open_on), lambda r: r.open_on, right=True),
    Column("OPERATIONS", 12, lambda r: ", ".join(r.operations) or "-", lambda r: r.operations, flexible=True),
]


def communicator_style(row: CommunicatorRow) -> Style:
    """Those in use stand out."""
    return PLAIN if row.open_on else DIM


def operation_name(row: OperationRow) -> str:
    """``AllReduce #14``."""
    return row.name if row.sequence is None else f"{row.name} #{row.sequence}"


def _progress(row: OperationRow) -> str:
    if not row.steps_total:
        return ""
    done = str(row.least_done) if row.least_done == row.most_done else f"{row.least_done}-{row.most_done}"
    return f"{done}/{row.steps_total}"


OPERATIONS: list[Column[OperationRow]] = [
    Column("AGE", 7, lambda r: (">" if r.at_least else "") + duration(r.age_s), lambda r: r.age_s, right=True),
    Column("OPERATION", 18, operation_name, operation_name, flexible=True),
    Column("COMM", 16, lambda r: f"{r.comm_hash:016x}" if r.comm_hash else "?", lambda r: r.comm_hash),
    Column(
        "RANKS IN IT",
        11,
        lambda r: f"{len(r.windows)} of {'?' if r.nranks is None else r.nranks}",
        lambda r: len(r.windows),
        right=True,
    ),
    Column("STEPS DONE", 14, _progress, lambda r: r.least_done, right=True),
]

NIC_CELLS, FLOW_CELLS = 24, 16


def _per_second(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{size(nbytes)}/s"


NICS: list[Column[NicRow]] = [
    Column("NIC", 14, lambda r: r.record.name, lambda r: r.record.name),
    Column("HOST", 8, lambda r: r.record.host, lambda r: r.record.host, flexible=True),
    Column("NETNS", 10, lambda r: str(r.record.namespace or "-"), lambda r: r.record.namespace, from_width=130),
    Column("STATE", 8, lambda r: r.record.state if r.record.up else "DOWN", lambda r: r.record.up),
    Column("GBIT/S", 6, lambda r: "-" if r.record.rate_gbps is None else f"{r.record.rate_gbps:g}", right=True),
    Column("RECEIVES", 10, lambda r: _per_second(r.record.receive_rate), lambda r: r.record.receive_rate, right=True),
    Column("SENDS", 10, lambda r: _per_second(r.record.send_rate), lambda r: r.record.send_rate, right=True),
    Column("THROUGHPUT", NIC_CELLS, lambda r: spark(r.rates, NIC_CELLS), from_width=100),
    Column("ERRORS", 8, lambda r: ", ".join(f"{k} {v}" for k, v in r.record.errors.items()) or "-", flexible=True),
    Column("RANKS", 6, lambda r: ranges(r.record.used_by) or "-", from_width=90),
]


def nic_style(row: NicRow) -> Style:
    """What is down or errs stands out; an unused device may be down for good reason."""
    if not row.record.up:
        return ROW_STYLES["T"] if row.record.used_by else DIM
    return ROW_STYLES["s"] if row.record.errors else PLAIN


def _flow_rate(row: FlowRow) -> str:
    record = row.record
    if record.bandwidth is not None:
        return _per_second(record.bandwidth)
    return f"{rate(record.steps.per_second)} st/s" if record.steps else "-"


def _flow_latency(row: FlowRow) -> str:
    return time_text(None if row.record.delay_us is None else row.record.delay_us * 1e3)


def _flow_p99(row: FlowRow) -> str:
    return time_text(row.work.latency_p99_ns if row.work else None)


def _flow_flight(row: FlowRow) -> str:
    return "-" if row.work is None or row.work.in_flight is None else str(row.work.in_flight)


def _flow_seen(row: FlowRow) -> str:
    return "-" if row.work is None else share(row.work.coverage)


FLOWS: list[Column[FlowRow]] = [
    Column(
        "RANK",
        5,
        lambda r: "?" if r.record.global_rank is None else str(r.record.global_rank),
        lambda r: r.record.global_rank,
        right=True,
    ),
    Column("WAY", 4, lambda r: str(r.record.direction or "?"), lambda r: str(r.record.direction)),
    Column("PEER", 5, lambda r: "?" if r.record.peer is None else str(r.record.peer), lambda r: r.record.peer, right=True),
    Column("CH", 3, lambda r: "-" if r.record.channel is None else str(r.record.channel), lambda r: r.record.channel, right=True),
    Column("OVER", 7, lambda r: r.record.network or str(r.record.kind), lambda r: r.record.network),
    Column("DEVICE", 9, lambda r: r.record.device or "-", lambda r: r.record.device),
    Column("STATE", 8, lambda r: str(r.record.state), lambda r: not r.record.state.is_trouble),
    Column("RATE", 11, _flow_rate, lambda r: r.record.bandwidth, right=True),
    Column("THROUGHPUT", FLOW_CELLS, lambda r: spark(r.rates, FLOW_CELLS), from_width=90),
    Column("LATENCY", 8, _flow_latency, lambda r: r.record.delay_us, right=True, from_width=130),
    Column("P99", 8, _flow_p99, lambda r: r.work.latency_p99_ns if r.work else None, right=True, from_width=150),
    Column("FLIGHT", 6, _flow_flight, lambda r: r.work.in_flight if r.work else None, right=True, from_width=150),
    Column("SEEN", 6, _flow_seen, lambda r: r.work.coverage if r.work else None, right=True, from_width=130),
    Column(
        "RETRIES", 7, lambda r: "-" if r.record.retries is None else str(r.record.retries), lambda r: r.record.retries, right=True
    ),
    Column("WHY", 8, lambda r: r.record.reason, flexible=True),
]


def flow_style(row: FlowRow) -> Style:
    """Trouble stands out; what is idle does not."""
    state = row.record.state
    return ROW_STYLES["T"] if state.is_trouble else DIM if state == "idle" else PLAIN


LOG: list[Column[LogEntry]] = [
    Column("TIME", 8, lambda e: f"{datetime.fromtimestamp(e.time):%H:%M:%S}", lambda e: e.time),
    Column("WHAT", 8, lambda e: e.kind, lambda e: e.kind),
    Column("", 40, lambda e: clean(e.text, 500), None, flexible=True),
]

LOG_STYLES = {
    "verdict": Style.parse("bold #f66151"),
    "recovery": Style.parse("bold #33d17a"),
    "loss": Style.parse("#f5c211"),
    "link": Style.parse("#ffa348"),
    "kernel": Style.parse("#ffa348"),
}


def log_style(entry: LogEntry) -> Style:
    """Verdicts and recoveries stand out."""
    return LOG_STYLES.get(entry.kind, PLAIN)
