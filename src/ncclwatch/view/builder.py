"""From what a session says to views: the same for a live job, a recording, and many nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ncclwatch.collect.batch import Change, Overhead, PlaneState
from ncclwatch.collect.windows import RankWindow
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.network import FlowRecord, NicKey
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict
from ncclwatch.model.work import FlowWindow, Scope, WorkWindow
from ncclwatch.text import clean, duration
from ncclwatch.view.frame import Cost, FlowRow, Frame, LogEntry, NicRow, Plane, View

if TYPE_CHECKING:
    from ncclwatch.engine.session import Update

MAX_LOG = 1000
MAX_FLOWS = 2048
"""Flows shown at most: those in trouble are kept."""
MAX_WORK = 1 << 16
"""Windows of work kept at most."""
STALE_NS = 60_000_000_000
"""A window that ended so long before the newest of its host is of something that is gone."""
SPARK = 40
"""Samples a sparkline remembers."""


class Told(Protocol):
    """What is asked of a session for a view."""

    @property
    def verdicts(self) -> Sequence[Verdict]:
        """One a job, worst first."""

    @property
    def windows(self) -> Sequence[RankWindow]:
        """The newest window of every process."""

    @property
    def samples(self) -> Mapping[ProcessKey, ProcessSample]:
        """The newest sample of every process."""

    @property
    def planes(self) -> Sequence[PlaneState]:
        """Which planes see the job."""

    @property
    def lost(self) -> int:
        """Call records lost."""

    def overhead(self) -> Overhead | None:
        """What watching costs."""


class ViewBuilder:
    """Makes a view of every round of samples, and keeps the log of what happened."""

    def __init__(self) -> None:
        self.log: deque[LogEntry] = deque(maxlen=MAX_LOG)
        self._number = 0
        self._by_connection: dict[object, WorkWindow] = {}
        self._nics: dict[NicKey, NicRow] | None = None
        self._flows: dict[object, FlowRow] | None = None
        self._work: dict[object, FlowWindow] | None = None
        self._time = 0.0
        self._shown_log: tuple[LogEntry, ...] = ()

    def tell(self, time: float, kind: str, text: str) -> None:
        """Add a line to the log."""
        self.log.append(LogEntry(time, kind, clean(text, 500)))

    def begin(self, session: Told, time: float) -> View:
        """The first view, before anything was judged twice."""
        return self._view(session, time)

    def feed(self, session: Told, update: Update, time: float) -> View | None:
        """Take an update; ``time`` is seconds since the epoch. A view comes back when memory was looked at."""
        self._time = time
        self._log(update, time)
        self._network(update)
        return None if update.windows is None else self._view(session, time)

    def _log(self, update: Update, time: float) -> None:
        for change in update.changes:
            rank = f"rank {change.info.rank}, " if change.info and change.info.rank is not None else ""
            word = {Change.STARTED: "watching", Change.READABLE: "readable again"}.get(change.change, str(change.change))
            host = f" on {change.host}" if change.host else ""
            self.tell(time, "process", f"{word}: {rank}pid {change.pid}{host}" + (f" ({change.detail})" if change.detail else ""))
        for text in update.notes:
            self.tell(time, "note", text)
        if update.newly_lost:
            self.tell(time, "loss", f"{update.newly_lost} call records lost: rates of this moment are too low")
        for recovery in update.recoveries:
            self.tell(time, "recovery", f"moves again after {duration(recovery.duration_s)}; it was: {recovery.verdict.summary}")
        for verdict in update.told:
            self.tell(time, "verdict", verdict.summary)

    def _network(self, update: Update) -> None:
        for link in update.links:
            self.tell(link.wall_ns / 1e9, "link", f"{link.host}: {link.label} is {'up' if link.up else 'DOWN'} ({link.detail})")
        for line in update.kernel:
            self.tell(self._time, "kernel", f"{line.host}: {line.text}")
        if update.nics:
            self._nics = self._nics or {}
            for nic in update.nics:
                known = self._nics.get(nic.key)
                both = [rate for rate in (nic.receive_rate, nic.send_rate) if rate is not None]
                rates = (*(known.rates if known else ()), sum(both) if both else None)[-SPARK:]
                self._nics[nic.key] = NicRow(nic, rates)
        if update.work:
            self._take_work(update)
        if update.flows:
            before, self._flows = self._flows or {}, {}
            for flow in sorted(update.flows, key=lambda flow: not flow.state.is_trouble)[:MAX_FLOWS]:
                key = (
                    flow.pid,
                    flow.comm_hash,
                    flow.rank,
                    flow.channel,
                    flow.peer,
                    flow.direction,
                    flow.connection_index,
                    flow.role,
                )
                now = flow.bandwidth if flow.bandwidth is not None else flow.steps.per_second if flow.steps else None
                known_flow = before.get(key)
                rates = (*(known_flow.rates if known_flow else ()), now)[-SPARK:]
                self._flows[key] = FlowRow("", flow, rates, self._work_of(flow))

    def _take_work(self, update: Update) -> None:
        """Keep the newest window of everything; what has ended, or was not seen for long, goes."""
        known = self._work or {}
        for window in update.work:
            known.pop(window.place, None)
            known[window.place] = window
        while len(known) > MAX_WORK:
            del known[next(iter(known))]
        newest: dict[str, int] = {}
        for window in known.values():
            newest[window.host] = max(newest.get(window.host, 0), window.work.end_ns)
        self._work = {k: window for k, window in known.items() if window.work.end_ns > newest[window.host] - STALE_NS}
        self._by_connection = {
            (w.pid, w.comm_hash, w.rank, w.channel, w.peer, w.direction, w.connection_index): w.work
            for w in reversed(self._work.values())
            if w.scope is Scope.FLOW
        }

    def _work_of(self, flow: FlowRecord) -> WorkWindow | None:
        place = (flow.pid, flow.comm_hash, flow.rank, flow.channel, flow.peer, flow.direction, flow.connection_index)
        return self._by_connection.get(place)

    def _view(self, session: Told, time: float) -> View:
        if len(self.log) != len(self._shown_log) or (self.log and self.log[-1] is not self._shown_log[-1]):
            self._shown_log = tuple(self.log)
        self._number += 1
        return View(
            Frame(
                time=time,
                number=self._number,
                windows=session.windows,
                samples=session.samples,
                verdicts=tuple(session.verdicts),
                planes=tuple(Plane(p.name, p.running, p.reason) for p in session.planes),
                lost=session.lost,
                cost=_cost(session.overhead()),
                log=self._shown_log,
                nics=None if self._nics is None else tuple(self._nics.values()),
                flows=None if self._flows is None else tuple(self._flows.values()),
                work=None if self._work is None else tuple(self._work.values()),
                roles=getattr(session, "roles", {}),
                layout=getattr(session, "layout", ""),
                iterations=getattr(session, "iterations", ()),
                stacks=getattr(session, "seen_stacks", ()),
            )
        )


def _cost(spent: Overhead | None) -> Cost:
    if spent is None:
        return Cost()
    wire = (spent.wire_share, spent.wire_budget)
    return Cost(spent.hits_per_s, spent.probe_share, spent.own_share, spent.rss_bytes, *wire)
