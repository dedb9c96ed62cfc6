"""What a session shows, handed to a history: what is new at once, rates once a minute, each of a run of a job.

Called by whoever judges, so it takes references and leaves the work to the writer's thread.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from ncclwatch.collect.batch import Change
from ncclwatch.history import rows
from ncclwatch.history.rows import NOBODY, Paced, Run
from ncclwatch.history.tables import Row
from ncclwatch.history.writer import Made
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProcessInfo

if TYPE_CHECKING:
    from ncclwatch.collect.windows import RankWindow
    from ncclwatch.engine.session import DiagnosisSession, Update
    from ncclwatch.model.job import Job
    from ncclwatch.model.network import FlowRecord, NicKey, NicRecord
    from ncclwatch.model.verdict import Verdict

RATES_NS = 60 * 10**9
"""Between two rows of a rank's rates."""
ITERATIONS_NS = RUNS_NS = 5 * 10**9
"""Between two looks at what iterations there are, and at which processes belong to which run."""
NICS_NS = 600 * 10**9
"""Between two rows of a NIC that does not change."""
MAX_FLOWS = 4096
"""Bound: flows of a look that are kept; their states are remembered of as many times 16."""

MAX_NICS = 65536
"""Bound: NICs whose state is remembered."""
Put = Callable[[int, Made], None]
_GONE = frozenset("XZ")
_ENDINGS = (Change.EXITED, Change.REPLACED)


@dataclass(slots=True)
class _Seen:
    """What is known of a run: when it was last seen alive (ns since the epoch), how many processes, its newest iteration."""

    alive_ns: int
    members: int = 0
    iteration: float = float("-inf")
    exited: bool = False
    """Whether a process of it is known to have ended."""


@dataclass(slots=True)
class _Standing:
    of: Run
    verdict: Verdict
    began_ns: int


@dataclass(slots=True)
class Feed:
    """Of one session. ``name``: of its job, where it has one; without, jobs are named by what runs them. ``noted`` is told every
    verdict that begins to stand."""

    put: Put
    name: str = ""
    noted: Callable[[Verdict], None] | None = None
    _run_of: dict[ProcessKey, Run] = field(default_factory=dict)
    _runs: dict[Run, _Seen] = field(default_factory=dict)
    _standing: dict[str, _Standing] = field(default_factory=dict)
    _flows: dict[tuple[object, ...], str] = field(default_factory=dict)
    _nics: dict[NicKey, tuple[int, bool, int]] = field(default_factory=dict)
    _next: dict[str, int] = field(default_factory=dict)

    def take(self, session: DiagnosisSession, update: Update, wall_ns: int | None = None) -> None:
        """Take what one step brought; ``wall_ns``: CLOCK_REALTIME of it, by default now."""
        now = time.time_ns() if wall_ns is None else wall_ns
        judged = session.diagnosis.judged
        for change in update.changes:
            of = self._run_of.get(change.info.key, NOBODY) if change.info is not None else NOBODY
            if change.change in _ENDINGS and of in self._runs:
                self._runs[of].exited = True
        if update.windows is not None:
            if self._is_due("runs", RUNS_NS, now) or update.changes or update.told:
                self._follow_runs(judged, update.windows, now)
            self._verdicts(judged, update, now)
            if self._is_due("rates", RATES_NS, now) or update.told:
                windows, run_of = update.windows, dict(self._run_of)
                self.put(now, lambda: rows.rate_rows(now, windows, run_of))
            if self._is_due("iterations", ITERATIONS_NS, now):
                self._iterations(session, now)
        self._network(update, session.windows, now)

    def close(self) -> None:
        """It ends: up to when each run was seen."""
        for of, seen in self._runs.items():
            row = Row("runs", seen.alive_ns, of.job, of.run, {"kind": "seen", "ranks": seen.members})
            self.put(seen.alive_ns, lambda row=row: [row])  # type: ignore[misc]

    def _is_due(self, what: str, every_ns: int, now: int) -> bool:
        # A clock that was set back must not silence it.
        if abs(now - self._next.get(what, 0)) < every_ns:
            return False
        self._next[what] = now
        return True

    # --- which run a process belongs to --------------------------------------------------------------------------------

    def _follow_runs(self, judged: Sequence[tuple[Job, Verdict]], windows: Sequence[RankWindow], now: int) -> None:
        for job, _ in judged:
            infos = [member.info for member in job.members]
            known = next((run for info in infos if (run := self._run_of.get(info.key)) is not None), None)
            of = known or self._named(infos)
            self._run_of.update((info.key, of) for info in infos)
            seen = self._runs.get(of)
            if seen is None or len(infos) > seen.members:
                # More of its processes than were known: it began, or another node is heard.
                self._runs[of] = replace(seen, members=len(infos)) if seen is not None else _Seen(now, len(infos))
                self.put(now, lambda of=of, infos=infos: [_run_row("begin", of, infos, now)])  # type: ignore[misc]
        alive = {self._run_of.get(window.process.key, NOBODY) for window in windows if window.run_state not in _GONE}
        for window in windows:
            if window.run_state in _GONE and (gone := self._runs.get(self._run_of.get(window.process.key, NOBODY))) is not None:
                gone.exited = True
        for of in list(self._runs):
            if of in alive:
                self._runs[of].alive_ns = now
            elif now - self._runs[of].alive_ns > RUNS_NS:
                seen = self._runs.pop(of)
                self._run_of = {key: run for key, run in self._run_of.items() if run != of}
                # Of a node that is heard no longer nobody knows whether its processes go on.
                kind = "end" if seen.exited else "seen"
                ended = Row("runs", seen.alive_ns, of.job, of.run, {"kind": kind, "ranks": seen.members})
                self.put(now, lambda ended=ended: [ended])  # type: ignore[misc]

    def _named(self, infos: Sequence[ProcessInfo]) -> Run:
        first = min(infos, key=lambda info: (info.rank is None, info.rank or 0, info.host, info.pid))
        identity = f"{first.host} {first.key.boot_id} {first.key.pid} {first.key.start_time}"
        return Run(self.name or job_name(first), hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:10])

    def _of(self, judged: Sequence[tuple[Job, Verdict]], verdict: Verdict) -> Run:
        """The run that a verdict is of."""
        places = {(culprit.host, culprit.pid) for culprit in verdict.culprits}
        communicator = verdict.communicator.hash if verdict.communicator is not None else ""
        for job, _ in judged:
            members = job.members
            named = any((member.info.host, member.info.pid) in places for member in members)
            if named or len(judged) == 1 or any(f"{group.hash:016x}" == communicator for group in job.groups.values()):
                return next((run for member in members if (run := self._run_of.get(member.info.key)) is not None), NOBODY)
        return NOBODY

    # --- what is new ---------------------------------------------------------------------------------------------------

    def _verdicts(self, judged: Sequence[tuple[Job, Verdict]], update: Update, now: int) -> None:
        for verdict in update.told:
            of = self._of(judged, verdict)
            self._standing[verdict.id] = _Standing(of, verdict, rows.nanoseconds(verdict.since) or now)
            self.put(now, lambda of=of, verdict=verdict: [rows.verdict_row(of, now, "verdict", verdict.to_json())])  # type: ignore[misc]
            if self.noted is not None:
                self.noted(verdict)
        recovered = {recovery.verdict.id: recovery.duration_s for recovery in update.recoveries}
        accusing = {verdict.id for verdict in update.verdicts}
        for number in [number for number in self._standing if number not in accusing]:
            one = self._standing.pop(number)
            kind, lasted = "recovery" if number in recovered else "over", recovered.get(number, max(0, now - one.began_ns) / 1e9)
            row = (one.of, now, kind, one.verdict, lasted)
            self.put(now, lambda row=row: [rows.verdict_row(row[0], row[1], row[2], row[3].to_json(), row[4])])  # type: ignore[misc]

    def _iterations(self, session: DiagnosisSession, now: int) -> None:
        cadences = session.diagnosis.slow.cadences
        for job, _ in session.diagnosis.judged:
            every = zip(job.members, cadences.of_members(job), strict=True)
            begun = [(member, cadence) for member, cadence in every if cadence is not None and cadence.iterations]
            known = [(member, cadence) for member, cadence in begun if not cadence.is_inner(member.last.time_ns / 1e9)]
            of = next((run for member, _ in known if (run := self._run_of.get(member.info.key)) is not None), None)
            seen = self._runs.get(of) if of is not None else None
            if of is None or seen is None:
                continue
            pacing, cadence = min(known, key=lambda one: (one[0].rank is None, one[0].rank or 0, one[0].info.host))
            newest = [(kept.iterations[-1].duration, member.rank) for member, kept in known]
            slowest = max(newest, key=lambda one: one[0])
            offset = pacing.last.wall_ns - pacing.last.time_ns
            found = [
                Paced(int(one.begin * 1e9) + offset, one.duration, one.number, pacing.rank, pacing.info.host, len(newest),
                      median(duration for duration, _ in newest), *slowest)
                for one in cadence.iterations if one.begin > seen.iteration
            ]  # fmt: skip
            if found:
                seen.iteration = cadence.iterations[-1].begin
                self.put(now, lambda of=of, found=found: rows.iteration_rows(of, found))  # type: ignore[misc]

    def _network(self, update: Update, windows: Sequence[RankWindow], now: int) -> None:
        flows = [flow for flow in update.flows[: 16 * MAX_FLOWS] if self._is_new(flow, now)][:MAX_FLOWS]
        nics = [nic for nic in update.nics if self._is_told(nic, now)]
        links, kernel = list(update.links), list(update.kernel)
        if not (flows or nics or links or kernel):
            return
        # Flows and NICs are of nodes and ranks: where there is one run only they are of that.
        of = next(iter(self._runs)) if len(self._runs) == 1 else NOBODY
        run_of = self._run_of

        def make() -> Iterator[Row]:
            nodes = {(window.process.pid, window.rank): window.process for window in windows} if flows else {}
            for flow in flows:
                process = nodes.get((flow.pid, flow.global_rank))
                yield rows.flow_row(now, run_of.get(process.key, of) if process else of, flow, process.host if process else "")
            yield from (rows.nic_row(now, of, nic) for nic in nics)
            yield from (rows.link_row(of, link) for link in links)
            yield from (rows.kernel_row(now, of, line) for line in kernel)

        self.put(now, make)

    def _is_new(self, flow: FlowRecord, now: int) -> bool:
        place = (flow.pid, flow.global_rank, flow.comm_hash, flow.peer, flow.channel, flow.direction, flow.connection_index)
        state = f"{flow.state} {now // RATES_NS if flow.state.is_trouble else ''}"
        if self._flows.get(place) == state or (len(self._flows) >= 16 * MAX_FLOWS and place not in self._flows):
            return False
        # Idle and active alternate by themselves.
        known = self._flows.get(place, "").partition(" ")[0]
        self._flows[place] = state
        return flow.state.is_trouble or known not in ("", "idle", "active")

    def _is_told(self, nic: NicRecord, now: int) -> bool:
        state = (nic.up, sum(nic.errors.values()))
        known = self._nics.get(nic.key)
        if known is not None and known[1:] == state and (not nic.used_by or abs(now - known[0]) < NICS_NS):
            return False
        if len(self._nics) >= MAX_NICS:
            # Told once more.
            self._nics.clear()
        self._nics[nic.key] = (now, *state)
        return True


def _run_row(kind: str, of: Run, infos: Sequence[ProcessInfo], now: int) -> Row:
    first = infos[0]
    return Row("runs", now, of.job, of.run, {
        "kind": kind, "ranks": len(infos), "world_size": first.world_size, "nodes": sorted({info.host for info in infos}),
        "nccl": ".".join(map(str, first.version)) if first.version else None, "command": " ".join(first.command),
    })  # fmt: skip


def job_name(info: ProcessInfo) -> str:
    """What a job is called that nobody has named: its number in Slurm, else the script or program that runs."""
    if info.traits is not None and info.traits.job:
        return f"slurm-{info.traits.job}"
    words = [word for word in info.command if word]
    module = next((words[place + 1] for place, word in enumerate(words[:-1]) if word == "-m"), "")
    script = next((word for word in words if word.endswith(".py")), "")
    return (script or module or next(iter(words), "") or info.name or "unnamed").rpartition("/")[2]
