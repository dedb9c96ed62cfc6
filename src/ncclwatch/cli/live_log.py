"""``attach`` into a file or pipe: a line when something changes, and a short summary once a minute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from ncclwatch.cli import labels
from ncclwatch.cli.flows_text import name as flow_name
from ncclwatch.cli.network_text import kernel_line, link_line, nic_line, worth_showing
from ncclwatch.cli.output import emit, flush
from ncclwatch.cli.unsolved import Unsolved
from ncclwatch.collect.batch import Change
from ncclwatch.model.network import FlowRecord, FlowState, NicKey, NicRecord
from ncclwatch.text import Style, clean, duration, ranges, rate, size
from ncclwatch.view.verdict_text import verdict_lines

if TYPE_CHECKING:
    from ncclwatch.cli.live import Session
    from ncclwatch.collect.windows import RankWindow
    from ncclwatch.engine.session import Update
    from ncclwatch.model.verdict import Verdict

SUMMARY_EVERY_S = 60.0
MAX_FLOW_LINES = 8


class LogSurface:
    """Writes lines with the time of day in front."""

    def __init__(self) -> None:
        self._style = Style()
        self._next_summary = 0.0
        self._nics: dict[NicKey, NicRecord] = {}
        self._errors: dict[NicKey, int] = {}
        self._flows: dict[str, FlowState] = {}
        self._unsolved = Unsolved()

    def attached(self, session: Session) -> None:
        """Say what is watched."""
        infos = session.infos
        known = [window.rank for window in session.windows if window.rank is not None]
        ranks = f", ranks {ranges(known)}" if known else ""
        versions = sorted({labels.version(info) for info in infos})
        number = len({(info.host, info.pid) for info in infos})
        count = f"{number} process{'es' if number != 1 else ''}"
        self._line(f"attached to {count}{ranks}, NCCL {', '.join(versions)}; planes: {labels.planes_line(session.planes)}")
        for problem in session.problems:
            self._line(f"not watched: {problem.line}")
        flush()

    def update(self, session: Session, update: Update) -> None:
        """Write what changed."""
        for change in update.changes:
            rank = f"rank {change.info.rank}, " if change.info and change.info.rank is not None else ""
            word = {Change.STARTED: "watching", Change.READABLE: "readable again"}.get(change.change, str(change.change))
            self._line(f"{word}: {rank}pid {change.pid}" + (f" ({clean(change.detail, 300)})" if change.detail else ""))
        for text in update.notes:
            self._line(clean(text, 300))
        self._nics |= {nic.key: nic for nic in update.nics}
        known = list(self._nics.values())
        for link in update.links:
            self._line(link_line(link, known))
        for entry in update.kernel:
            self._line(kernel_line(entry))
        for nic in update.nics:
            self._tell_errors(nic)
        self._tell_flows(update.flows)
        if update.newly_lost:
            self._line(f"{update.newly_lost} call records lost: rates and groups of this moment are too low")
        for recovery in update.recoveries:
            was = clean(recovery.verdict.summary, 300)
            self._line(f"RECOVERED: NCCL moves again after {duration(recovery.duration_s)}; it was: {was}")
        for verdict in update.told:
            self._verdict(verdict)
        self._tell_unsolved(update)
        for verdict in update.answers:
            self._verdict(verdict, "asked: ")
        if update.windows and time.monotonic() >= self._next_summary:
            self._next_summary = time.monotonic() + SUMMARY_EVERY_S
            self._line(summary(update.windows))
            for nic in worth_showing(known):
                self._line(f"nic {nic_line(nic, host=len({one.host for one in known}) > 1)}")
        flush()

    def end(self, session: Session, reason: str) -> None:
        """Say why it ended and what stands."""
        stands = session.verdict if session.verdict and session.verdict.verdict_class.accuses else None
        verdict = f"verdict stands: {clean(stands.summary, 300)}" if stands else "no verdict stands"
        self._line(f"end: {reason or 'interrupted'}; {verdict}")
        flush()

    def _tell_unsolved(self, update: Update) -> None:
        """Say that the job stands and nobody is named, and that this is over."""
        if (found := self._unsolved.take(update)) is None:
            return
        if found.over:
            self._line(f"the standstill in which nobody was named is over after {duration(found.seconds)}")
        else:
            self._verdict(found.verdict)

    def _verdict(self, verdict: Verdict, before: str = "") -> None:
        for i, line in enumerate(verdict_lines(verdict, self._style)):
            self._line(before + line) if i == 0 else emit(f"         {line}")

    def _tell_flows(self, flows: Sequence[FlowRecord]) -> None:
        """Say which connections got into trouble or out of it since they were listed last."""
        if not flows:
            return
        troubled = {flow_name(flow): flow for flow in flows if flow.state.is_trouble}
        fresh = [(name, flow) for name, flow in troubled.items() if self._flows.get(name) != flow.state]
        for name, flow in fresh[:MAX_FLOW_LINES]:
            self._line(f"flow {name} is {flow.state}: {clean(flow.reason, 200)}")
        if len(fresh) > MAX_FLOW_LINES:
            self._line(f"… and {len(fresh) - MAX_FLOW_LINES} more flows in trouble: ncclwatch flows lists them")
        for name in [name for name in self._flows if name not in troubled][:MAX_FLOW_LINES]:
            self._line(f"flow {name} is well again")
        self._flows = {name: flow.state for name, flow in troubled.items()}

    def _tell_errors(self, nic: NicRecord) -> None:
        """Say that a NIC counts errors when it begins to, and again at every doubling."""
        total, told = sum(nic.errors.values()), self._errors.get(nic.key, 0)
        if total >= max(2 * told, 1):
            self._errors[nic.key] = total
            self._line(f"nic {nic_line(nic)}")

    @staticmethod
    def _line(text: str) -> None:
        emit(f"{datetime.now():%H:%M:%S} {text}")


def summary(windows: Sequence[RankWindow]) -> str:
    """All ranks in one line: how many do what, and how fast."""
    states: dict[str, list[int]] = {}
    for window in windows:
        states.setdefault(labels.run_state(window.run_state), []).append(window.rank if window.rank is not None else -1)
    what = ", ".join(f"{len(ranks)} {state}" for state, ranks in sorted(states.items()))
    per_second = sum(w.operations_per_s or 0.0 for w in windows) / max(len(windows), 1)
    nbytes = [w.bytes_per_s for w in windows if w.bytes_per_s is not None]
    data = f", {size(sum(nbytes) / len(nbytes))}/s" if nbytes else ""
    return f"{len(windows)} ranks: {what}; {rate(per_second)} operations/s{data} a rank"
