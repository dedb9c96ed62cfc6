"""``attach --json``: one object a line, each with a ``type``; a line is complete when it is written, and written at once.

Types: ``attached`` (first line), ``rank`` (one per process and sample), ``call`` (with ``--calls``), ``verdict`` (when one
begins to stand, or changes), ``answer`` (a verdict somebody asked for), ``recovery`` (it stands no longer), ``unsolved`` (a
standstill of which nobody can be named lasts, or is over), ``process`` (started, ended, replaced, unreadable), ``loss``,
``nic`` (a NIC at every sample: one that the job uses or that counted errors, others when they change), ``link-event`` (a link
went up or down), ``flow`` (a connection over a network that is in trouble), ``work`` (a window of work requests or of a
socket: of a connection, a port or a peer of a rank), ``kernel-log`` (a line about GPUs or NICs), ``note`` (something in
words), ``overhead`` (every ten seconds), ``end`` (last line). Times are seconds since the epoch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ncclwatch import __version__
from ncclwatch.cli.flows_text import flow_json
from ncclwatch.cli.output import emit_json, flush, plain
from ncclwatch.cli.unsolved import Unsolved
from ncclwatch.collect.functions import function
from ncclwatch.collect.windows import RankWindow
from ncclwatch.model.events import Flag, Kind
from ncclwatch.model.network import NicKey
from ncclwatch.model.work import FlowWindow, WorkWindow

if TYPE_CHECKING:
    from ncclwatch.cli.live import Session
    from ncclwatch.engine.session import Update

SCHEMA_NAME = "ncclwatch.attach/1"
OVERHEAD_EVERY_S = 10.0


class JsonSurface:
    """Writes the session to standard output."""

    def __init__(self, *, calls: bool = False) -> None:
        self._calls = calls
        self._records = 0
        self._next_overhead = 0.0
        self._nics: dict[NicKey, bool] = {}
        self._unsolved = Unsolved()

    def attached(self, session: Session) -> None:
        """Say what is watched, by which planes, and what could not be."""
        planes = {plane.name: {"running": plane.running, "reason": plane.reason} for plane in session.planes}
        processes = [plain(info) | {"pid": info.pid} for info in session.infos]
        problems = [{"pid": p.pid, "error": p.error.message, "hint": p.error.hint} for p in session.problems]
        self._write("attached", schema=SCHEMA_NAME, version=__version__, planes=planes, processes=processes, errors=problems)
        flush()

    def update(self, session: Session, update: Update) -> None:
        """Write what one step brought."""
        for change in update.changes:
            rank = change.info.rank if change.info else None
            self._write("process", change=change.change, pid=change.pid, rank=rank, detail=change.detail)
        for batch in update.events:
            self._records += len(batch)
            if self._calls:
                for row in batch:
                    self._write("call", **call_json(row))
        for text in update.notes:
            self._write("note", text=text)
        self._network(update)
        if update.newly_lost:
            self._write("loss", lost=update.newly_lost, total=update.lost)
        for window in update.windows or ():
            self._write("rank", **window_json(window))
        self._verdicts(update)
        now = time.monotonic()
        if update.windows is not None and now >= self._next_overhead:
            self._next_overhead = now + OVERHEAD_EVERY_S
            overhead = session.overhead()
            if overhead is not None:
                self._write("overhead", **plain(overhead))
        flush()

    def _verdicts(self, update: Update) -> None:
        for verdict in update.told:
            self._write("verdict", verdict=verdict.to_json())
        for verdict in update.answers:
            self._write("answer", verdict=verdict.to_json())
        if (found := self._unsolved.take(update)) is not None:
            self._write("unsolved", duration_s=found.seconds, over=found.over, verdict=found.verdict.to_json())
        for recovery in update.recoveries:
            self._write("recovery", id=recovery.verdict.id, duration_s=recovery.duration_s, verdict=recovery.verdict.to_json())

    def _network(self, update: Update) -> None:
        for link in update.links:
            self._write("link-event", **plain(link))
        for line in update.kernel:
            self._write("kernel-log", **plain(line))
        for nic in update.nics:
            if nic.used_by or nic.errors or self._nics.get(nic.key) != nic.up:
                self._write("nic", **plain(nic))
            self._nics[nic.key] = nic.up
        for flow in update.flows:
            if flow.state.is_trouble:
                self._write("flow", **flow_json(flow))

        for window in update.work:
            self._write("work", **work_json(window))

    def end(self, session: Session, reason: str) -> None:
        """Say why it ended and what stands."""
        standing = session.verdict if session.verdict and session.verdict.verdict_class.accuses else None
        self._write(
            "end",
            reason=reason or "interrupted",
            records=self._records,
            lost=session.lost,
            verdict=standing.to_json() if standing else None,
        )
        flush()

    @staticmethod
    def _write(kind: str, /, **fields: Any) -> None:
        emit_json({"type": kind, "time": round(time.time(), 6), **fields}, indent=None)


def window_json(window: RankWindow) -> dict[str, Any]:
    """A window without the parts of the process's identity that ``attached`` and ``process`` have told."""
    data: dict[str, Any] = plain(window)
    process = window.process
    if window.work is not None:
        data["work"] |= derived_json(window.work)
    data["process"] = None
    del data["process"], data["time_ns"]
    return {"pid": process.pid, "host": plain(process.host), **data}


def derived_json(work: WorkWindow) -> dict[str, Any]:
    """What follows from the fields of a window."""
    return {
        "coverage": round(work.coverage, 9),
        "bytes_per_s": work.bytes_per_s,
        "received_per_s": work.received_per_s,
    }


def work_json(window: FlowWindow) -> dict[str, Any]:
    """A window of work as JSON, what follows from its counts beside them."""
    data: dict[str, Any] = plain(window)
    data["work"] |= derived_json(window.work)
    return data


def call_json(row: Any) -> dict[str, Any]:
    """One call record, a row in the layout of ``struct nw_event``. ``monotonic_ns`` is the kernel's time of the call."""
    number = int(row["function"])
    try:
        kind = Kind(int(row["kind"])).name.lower()
    except ValueError:
        kind = str(int(row["kind"]))
    read = bool(int(row["flags"]) & Flag.COMM_READ)
    return {
        "kind": kind,
        "function": function(number).name,
        "monotonic_ns": int(row["time_ns"]),
        "pid": int(row["pid"]),
        "tid": int(row["tid"]),
        "comm_hash": f"{int(row['comm_hash']):016x}" if read else None,
        "comm_rank": int(row["rank"]) if read else None,
        "nranks": int(row["nranks"]) if read else None,
        "op_count": int(row["op_count"]) if read else None,
        "count": int(row["count"]),
        "datatype": int(row["datatype"]),
        "redop": int(row["redop"]),
        "peer": int(row["peer"]),
        "stream": f"{int(row['stream']):016x}",
        "result": int(row["result"]) if kind == "leave" else None,
    }
