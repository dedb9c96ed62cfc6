"""``dump`` for people: one block a process, tables aligned, the first thing to look at first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime

from ncclwatch.cli import labels
from ncclwatch.model.state import Communicator, Direction, OpPhase, ProcessSample, ProxyOperation, ProxySub
from ncclwatch.text import Style, bus_text, clean, columns, ranges, size
from ncclwatch.view.steps import host_waits_for, waits_for

# Rows of one table; a process with more unfinished transfers is told apart by --json.
MAX_ROWS = 200

_COMMUNICATOR_HEADER = (
    "COMMUNICATOR", "NAME", "RANK", "NODE", "GPU", "BUS", "OPS", "CALLS BY KIND", "RESULT", "FLAGS", "RING", "TRANSPORT",
    "FOUND BY",
)  # fmt: skip
_OPERATION_HEADER = (
    "OPERATION", "COMM", "VIA", "ALGO", "WAY", "PEER", "CH", "STEPS", "POSTED", "GPU-READY", "RECEIVED", "TRANSMITTED", "DONE",
    "BYTES", "NIC", "WAITS FOR",
)  # fmt: skip
_HOST_HEADER = ("COMM", "WAY", "PEER", "CHANNELS", "TAIL", "HEAD", "WAITS FOR")


def process_lines(sample: ProcessSample, style: Style) -> Iterator[str]:
    """All lines of one process's block."""
    yield _title(sample, style)
    yield f"  command  {labels.command(sample.process, 160)}"
    yield f"  library  {clean(sample.process.library, 200)}"
    wall = datetime.fromtimestamp(sample.wall_ns / 1e9)
    yield f"  read at  {wall:%H:%M:%S}.{wall.microsecond // 1000:03d} in {sample.duration_ns / 1e6:.1f} ms"
    for line in _caveats(sample):
        yield f"  {style.warn('note')}     {line}"
    if not sample.communicators:
        yield "  no communicator found"
    else:
        yield from _table(style, _COMMUNICATOR_HEADER, [_communicator_row(c) for c in sample.communicators], right=(6,))
    yield from _operations(sample, style)
    yield from _pending(sample)
    yield from _host_connections(sample, style)


def _title(sample: ProcessSample, style: Style) -> str:
    info = sample.process
    rank = f"rank {labels.rank(info)}" if info.rank is not None else "rank unknown"
    state = labels.run_state(sample.run_state)
    state = style.bad(state) if sample.run_state in "TtZX" else state
    container = f"  container {clean(info.container_id, 12).rstrip('…')}" if info.container_id else ""
    how = f" (layout by {info.version_source})"
    return (
        f"{style.bold(rank)}  pid {info.pid}  {state}  host {clean(info.host, 64)}{container}  NCCL {labels.version(info)}{how}"
    )


def _caveats(sample: ProcessSample) -> Iterator[str]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for signal, reason in sample.unavailable.items():
        by_reason[reason].append(signal)
    for reason, signals in by_reason.items():
        yield f"not available: {clean(', '.join(signals), 120)}: {clean(reason, 200)}"
    if sample.torn:
        yield f"{sample.torn} structure{'s' if sample.torn > 1 else ''} changed while being read and left out"
    for bound in sample.truncated:
        yield f"cut short: {clean(bound, 200)}"


def _table(style: Style, header: tuple[str, ...], rows: list[tuple[str, ...]], *, right: tuple[int, ...]) -> Iterator[str]:
    lines = columns(header, rows[:MAX_ROWS], right=right)
    yield "  " + style.dim(lines[0])
    for line in lines[1:]:
        yield "  " + line
    if len(rows) > MAX_ROWS:
        yield f"  … and {len(rows) - MAX_ROWS} more (all of them with --json)"


def _flags(c: Communicator) -> Iterator[tuple[str, bool | None]]:
    yield from (("aborted", c.aborted), ("finalizing", c.finalize_called), ("destroyed", c.destroyed), ("revoked", c.revoked))
    yield "no free proxy slot", c.proxy_pool_full


def _communicator_row(c: Communicator) -> tuple[str, ...]:
    calls = ", ".join(f"{clean(name, 24)} {count}" for name, count in c.sequence_numbers.items() if count)
    flags = [word for word, on in _flags(c) if on]
    if c.init_state not in (None, "", "ncclSuccess"):
        flags.append(f"init {clean(c.init_state or '', 32)}")
    return (
        f"{c.hash:016x}",
        clean(c.name, 24),
        f"{c.rank}/{c.nranks}",
        "" if c.node is None else f"{c.node}/{c.nnodes}" if c.nnodes is not None else str(c.node),
        "" if c.device is None else str(c.device),
        bus(c.bus_id),
        "" if c.op_count is None else str(c.op_count),
        calls,
        "" if c.async_result is None else clean(c.async_result, 32).removeprefix("nccl").lower() or "?",
        ", ".join(flags),
        _ring(c),
        _transports(c),
        clean(c.finder, 20),
    )


def bus(bus_id: int | None) -> str:
    """A bus id as ``0000:1b:00.0``; empty where it is not known."""
    return "" if bus_id is None else bus_text(bus_id)


def _ring(c: Communicator) -> str:
    neighbours = Counter((ring.prev, ring.next) for ring in c.rings)
    if not neighbours:
        return ""
    (prev, following), _ = neighbours.most_common(1)[0]
    more = f" +{len(neighbours) - 1}" if len(neighbours) > 1 else ""
    return f"{prev}>{c.rank}>{following}{more}"


def _transports(c: Communicator) -> str:
    counted = Counter(str(transport) for _, _, _, transport in c.transports)
    return " ".join(f"{name}:{count}" for name, count in sorted(counted.items()))


def _operations(sample: ProcessSample, style: Style) -> Iterator[str]:
    if not sample.operations:
        if sample.communicators:
            yield "  no unfinished operation in the proxy"
        return
    ordered = sorted(sample.operations, key=lambda o: (o.comm_hash, o.op_count, o.direction))
    count = len(ordered)
    yield f"  {count} unfinished operation{'s' if count > 1 else ''} in the proxy"
    several = len({c.hash for c in sample.communicators}) > 1
    rows = _operation_rows([operation for operation in ordered if not operation.queued_behind], several)
    yield from _table(style, _OPERATION_HEADER, rows, right=(5, 7, 8, 9, 10, 11, 12, 13, 14))
    queued = [operation for operation in ordered if operation.queued_behind]
    if queued:
        kinds = Counter(clean(operation.collective, 24) or "?" for operation in queued)
        what = ", ".join(f"{name} x{number}" for name, number in kinds.most_common(8))
        longest = max(operation.queued_behind for operation in queued)
        yield f"  {len(queued)} more wait for their turn on these connections, at most {longest} on one: {what}"


def _operation_rows(operations: list[ProxyOperation], several: bool) -> list[tuple[str, ...]]:
    """One row for all channels on which an operation stands at the same steps with the same peer."""
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for operation in operations:
        first = (
            operation_name(operation),
            f"{operation.comm_hash:016x}" if several and operation.comm_hash else "?" if several else "",
            " ".join(part for part in (str(operation.transport), clean(operation.net_name, 16)) if part),
            "/".join(clean(part, 12) for part in (operation.algorithm, operation.protocol) if part),
            str(operation.direction),
        )
        for sub in sorted(operation.subs, key=lambda sub: (sub.peer, sub.channel)):
            alike[*first, str(sub.peer), *_step_cells(operation, sub)].append(sub.channel)
    return [(*row[:6], ranges(channels), *row[6:]) for row, channels in alike.items()]


def _step_cells(operation: ProxyOperation, sub: ProxySub) -> tuple[str, ...]:
    # Counters of an operation that has not started are left over from its slot's last use and mean nothing.
    valid = operation.phase is OpPhase.PROGRESS
    send = operation.direction is Direction.SEND
    return (
        str(sub.nsteps),
        str(sub.posted) if valid else "-",
        "" if not send else "-" if not valid or sub.gpu_ready is None else str(sub.gpu_ready),
        "" if send else str(sub.received) if valid else "-",
        str(sub.transmitted) if valid else "-",
        str(sub.done) if valid else "-",
        "" if sub.nbytes is None else size(sub.nbytes),
        "" if sub.net_device is None else str(sub.net_device),
        waits_for(operation, sub),
    )


def operation_name(operation: ProxyOperation) -> str:
    """``AllReduce #14``; the number is NCCL's own counter, which ranks need not share."""
    return f"{clean(operation.collective, 24) or '?'} #{operation.sequence}"


def _pending(sample: ProcessSample) -> Iterator[str]:
    if not sample.pending:
        return
    counted = Counter((p.collective, p.op_count >> 1, str(p.direction)) for p in sample.pending)
    shown = [f"{clean(name, 24)} #{number} {way} x{n}" for (name, number, way), n in sorted(counted.items())]
    more = f", and {len(shown) - 8} more" if len(shown) > 8 else ""
    yield f"  {len(sample.pending)} posted by the main thread, not yet taken by the proxy: {', '.join(shown[:8])}{more}"


def _host_connections(sample: ProcessSample, style: Style) -> Iterator[str]:
    several = len({c.hash for c in sample.communicators}) > 1
    grouped: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for c in sample.communicators:
        for end in c.host_connections:
            key = (
                f"{c.hash:016x}" if several else "",
                str(end.direction),
                str(end.peer),
                "?" if end.tail is None else str(end.tail),
                "?" if end.head is None else str(end.head),
                host_waits_for(end),
            )
            grouped[key].append(end.channel)
    if not grouped:
        return
    yield "  shared-memory connections (steps since the connection was made)"
    rows = [(k[0], k[1], k[2], ranges(channels), k[3], k[4], k[5]) for k, channels in grouped.items()]
    yield from _table(style, _HOST_HEADER, sorted(rows), right=(2, 4, 5))
