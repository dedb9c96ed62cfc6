"""What one rank has open in one communicator, by channel and peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.style import Style

from ncclwatch.dashboard import rows
from ncclwatch.dashboard.lines import DIM, Line, plain
from ncclwatch.dashboard.page import (
    PLAIN,
    Page,
    fact,
    operations_in,
    rank_name,
    steps_done,
)
from ncclwatch.dashboard.stack_page import StackPage
from ncclwatch.dashboard.table import Column
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator, Direction, HostConnection, ProcessSample, ProxyOperation, ProxySub
from ncclwatch.view.frame import CommunicatorKey, View, communicator_key
from ncclwatch.view.steps import host_waits_for, operation_name, waits_for


class Transfer(NamedTuple):
    """One channel with one peer: a transfer by the proxy, or one end of a connection in shared memory."""

    operation: ProxyOperation | None
    sub: ProxySub | None
    host: HostConnection | None


def _channel(row: Transfer) -> int:
    return row.sub.channel if row.sub else row.host.channel if row.host else -1


def _peer(row: Transfer) -> int:
    return row.sub.peer if row.sub else row.host.peer if row.host else -1


def _way(row: Transfer) -> str:
    direction = row.operation.direction if row.operation else row.host.direction if row.host else Direction.SEND
    return str(direction)


def _progress(row: Transfer) -> float | None:
    return row.sub.done / max(row.sub.nsteps, 1) if row.sub else None


def _steps(row: Transfer) -> str:
    if row.sub:
        return f"{row.sub.done}/{row.sub.nsteps}"
    if row.host is None or row.host.head is None or row.host.tail is None:
        return ""
    return f"{row.host.tail - row.host.head} unread"


def _waits(row: Transfer) -> str:
    if row.operation is not None and row.sub is not None:
        return waits_for(row.operation, row.sub)
    return host_waits_for(row.host) if row.host else ""


class OperationPage(Page):
    """What one rank has open in one communicator, by channel and peer: how far each step has got, and what it waits for."""

    empty = "no transfer is open here: this rank has not started, or has finished, what the others wait in"
    hint = "k: threads"
    columns: Sequence[Column[Transfer]] = (
        Column("CH", 3, lambda r: str(_channel(r)), _channel, right=True),
        Column("WAY", 4, _way, _way),
        Column("PEER", 5, lambda r: str(_peer(r)), _peer, right=True),
        Column(
            "OPERATION",
            12,
            lambda r: operation_name(r.operation) if r.operation else "(shared memory)",
            from_width=96,
            flexible=True,
        ),
        Column("DONE", 10, _steps, _progress, right=True),
        Column("", rows.BAR_CELLS, lambda r: rows.bar(r.sub.done, r.sub.nsteps) if r.sub else "", from_width=74),
        Column(
            "POST/RECV/SENT",
            15,
            lambda r: f"{r.sub.posted}/{r.sub.received}/{r.sub.transmitted}" if r.sub else "",
            from_width=110,
        ),
        Column("DEVICE", 8, lambda r: (r.sub.net_device_name if r.sub else "shm") or "", from_width=120),
        Column("WAITS FOR", 20, _waits, flexible=True),
    )

    def __init__(self, process: ProcessKey, communicator: CommunicatorKey) -> None:
        self.process = process
        self.communicator = communicator

    def title(self, view: View) -> str:
        """``rank 2: channels and steps``."""
        window = view.window_of(self.process) if self.process else None
        return f"{rank_name(window) if window else 'rank ?'}: channels and steps"

    def _sample(self, view: View) -> tuple[ProcessSample, Communicator] | None:
        sample = view.frame.samples.get(self.process) if self.process else None
        if sample is None:
            return None
        found = next((c for c in sample.communicators if communicator_key(c) == self.communicator), None)
        return (sample, found) if found is not None else None

    def facts(self, view: View) -> list[Line]:
        """Which operation, and how far."""
        found = self._sample(view)
        if found is None:
            return [plain(" no sample of this moment is kept", DIM)]
        sample, communicator = found
        operations = operations_in(sample, communicator)
        done, total = steps_done(operations)
        how = sorted({"/".join(p for p in (o.algorithm, o.protocol) if p) for o in operations})
        names = sorted({operation_name(o) for o in operations})
        pending = sum(p.comm_hash == communicator.hash for p in sample.pending)
        lines = [
            fact("operation", f"{', '.join(names) or 'none open'}" + (f" ({', '.join(how)})" if how else "")),
            fact("steps", f"{done} of {total} done" if total else "no proxy steps: see the peers, or the transport hides them"),
        ]
        if pending:
            lines.append(fact("queued", f"{pending} transfers not yet taken by the proxy thread"))
        hidden = sorted({str(t[3]) for t in communicator.transports if str(t[3]) in ("p2p", "nvls", "collnet")})
        if hidden:
            lines.append(fact("not seen", f"{', '.join(hidden)} connections have no proxy: their progress cannot be seen", DIM))
        return lines

    def rows(self, view: View) -> Sequence[Transfer]:
        """Transfers that are behind come first."""
        found = self._sample(view)
        if found is None:
            return ()
        sample, communicator = found
        transfers = [Transfer(o, sub, None) for o in operations_in(sample, communicator) for sub in o.subs]
        transfers += [Transfer(None, None, end) for end in communicator.host_connections if host_waits_for(end)]
        return sorted(transfers, key=lambda t: (t.sub is not None and t.sub.done >= t.sub.nsteps, _channel(t), _way(t), _peer(t)))

    def identity(self, row: Transfer) -> object:
        """Channel, way, peer and counter."""
        return (_channel(row), _way(row), _peer(row), row.operation.op_count if row.operation else None)

    def style(self, row: Transfer) -> Style:
        """What is done is dim."""
        return DIM if row.sub is not None and row.sub.done >= row.sub.nsteps else PLAIN

    def open(self, view: View, row: Transfer) -> Page | None:
        """The threads of the process."""
        return StackPage(self.process) if self.process else None
