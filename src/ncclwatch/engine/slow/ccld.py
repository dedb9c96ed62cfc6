"""CCL-D's rule for slow jobs (4.2, equations 1-4) as a mode of its own, beside ncclwatch's.

For those who want what the paper describes: T_base is the administrator's until the first min(100 rounds, two minutes) have been
seen, then their mean; each minute the round with the largest range between ranks is judged; R above theta is slow, and repeated
before anybody is named; P says whether computation (the rank with the shortest time in the operation came last) or communication
(the rank with the lowest send or receive rate) is slow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.slow.baselines import Ccld, CcldResult
from ncclwatch.engine.slow.looks import StageOf
from ncclwatch.engine.slow.rounds import HOST, Round, Rounds, numbering
from ncclwatch.engine.slow.watch import SlowWatch
from ncclwatch.engine.topology.model import Topology
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.verdict import CommunicatorRef, Culprit, OperationRef, Verdict, VerdictClass

WINDOW_S = 60.0
KEPT_ROUNDS = 4096

CLASSES = {
    "S1": VerdictClass.SLOW_COMPUTATION,
    "S2": VerdictClass.SLOW_COMMUNICATION,
    "S3": VerdictClass.SLOW_MIXED,
}


@dataclass(slots=True)
class _GroupWatch:
    rule: Ccld
    window: deque[Round] = field(default_factory=lambda: deque(maxlen=KEPT_ROUNDS))
    ends: float | None = None
    """When the window ends, wall time."""
    since: float | None = None
    found: tuple[CcldResult, Round] | None = None
    """Of the last window, if it was slow and that had repeated."""


@dataclass(slots=True)
class _JobRounds:
    rounds: Rounds = field(default_factory=Rounds)
    groups: dict[int, _GroupWatch] = field(default_factory=dict)
    numbered: tuple[tuple[int, ProcessKey], ...] = ()

    def number(self, job: Job) -> None:
        """Forget rounds that number the processes in another way; what was learned stays."""
        numbered = numbering(job)
        if numbered != self.numbered:
            self.numbered, self.rounds = numbered, Rounds()
            for watch in self.groups.values():
                watch.window.clear()
                watch.found = None


class CcldWatch(SlowWatch):
    """Judges jobs that run by CCL-D's equations. ``t_base_s`` is T_base(init): without, nothing is slow before it was learned."""

    def __init__(self, *, t_base_s: float | None = None, theta: float = 3.0, window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._initial = t_base_s if t_base_s is not None else math.inf
        self._theta, self._window_s = theta, window_s
        self._rounds: dict[ProcessKey, _JobRounds] = {}

    def judge(
        self, job: Job, verdict: Verdict, topologies: Sequence[Topology] = (), stage_of: StageOf | None = None
    ) -> Verdict:  # fmt: skip
        """Take the newest samples of a job; what stands of it is the last window's."""
        del topologies, stage_of
        keys = [member.info.key for member in job.members]
        known = next((self._rounds[key] for key in keys if key in self._rounds), None)
        if known is None:
            known = self._rounds.setdefault(keys[0], _JobRounds())
        known.number(job)
        cadences = [self.cadences.find(member.info.host, member.info.pid) for member in job.members]
        for done in known.rounds.take(job, cadences):
            self._take(known, done)
        now = max(member.last.wall_ns for member in job.members) / 1e9
        for watch in known.groups.values():
            if watch.ends is not None and now >= watch.ends:
                self._close(watch, now)
        found = [(watch.found, watch.since) for watch in known.groups.values() if watch.found is not None]
        if verdict.verdict_class is not VerdictClass.RUNNING or not found:
            return verdict
        (result, chosen), since = max(found, key=lambda item: item[0][0].ratio)
        return _verdict(job, result, chosen, since, known.rounds.plane)

    def forget(self, present: Collection[ProcessKey]) -> None:
        """Forget jobs that are watched no longer."""
        super().forget(present)
        kept = set(present)
        for key in [key for key in self._rounds if key not in kept]:
            del self._rounds[key]

    def _take(self, known: _JobRounds, done: Round) -> None:
        watch = known.groups.setdefault(done.group, _GroupWatch(Ccld(self._initial, theta=self._theta, window_s=self._window_s)))
        if watch.ends is None:
            watch.ends = done.time + self._window_s
        watch.window.append(done)

    def _close(self, watch: _GroupWatch, now: float) -> None:
        """The window is over: judge it, and begin the next."""
        window = list(watch.window)
        watch.window.clear()
        watch.ends = now + self._window_s
        watch.found = None
        if not window:
            return
        rows = [list(done.durations.values()) for done in window]
        result = watch.rule.window([done.time for done in window], rows)
        if not result.ratio > self._theta:
            watch.since = None
            return
        chosen = max(window, key=lambda done: max(done.durations.values()) - min(done.durations.values()))
        watch.since = watch.since if watch.since is not None else window[0].time
        if watch.rule.confirmed:
            watch.found = (result, chosen)


def _verdict(job: Job, result: CcldResult, chosen: Round, since: float | None, plane: str) -> Verdict:
    kind = Ccld(result.t_base).kind(result.share)
    members = {member.index: member for member in job.members}
    group = job.groups.get(chosen.group)
    shortest = members.get(min(chosen.durations, key=lambda at: chosen.durations[at]))
    slowest = _lowest_rate(job, group) if kind != "S1" else None
    named = [member for member in ([shortest] if kind != "S2" else []) + [slowest] if member is not None]
    reference = CommunicatorRef(f"{group.hash:016x}", group.nranks) if group is not None else None
    culprits = tuple(_culprit(member, group, reference, chosen, "came last" if member is shortest else "has the lowest rate")
                     for member in named)  # fmt: skip
    who = ", ".join(f"rank {member.rank}" if member.rank is not None else member.label for member in named)
    where = f"{chosen.name} of {group.nranks} ranks" if group is not None else "the end of the iteration, by the hosts' calls"
    base = "the administrator's" if result.static else "learned"
    return Verdict(
        verdict_class=CLASSES[kind],
        summary=f"CCL-D: {kind} in {where}: {who or 'no rank can be told'}; R = {result.ratio:.2f}, P = {result.share:.2f}",
        culprits=culprits,
        communicator=reference,
        since=since,
        time=max(member.last.wall_ns for member in job.members) / 1e9,
        confidence=0.5,
        evidence=(
            f"T_base {result.t_base:.4f} s ({base}); in the round with the largest range of the window: "
            f"T_max {result.t_max:.4f} s, T_min {result.t_min:.4f} s",
            f"R = (T_max - T_base) / T_base = {result.ratio:.2f}, P = (T_max - T_min) / (T_max - T_base) = {result.share:.2f}",
        ),
        unobserved=_unobserved(plane, kind, slowest),
        planes=("device",) if plane == "device" else ("calls",),
    )


def _culprit(member: Member, group: Group | None, reference: CommunicatorRef | None, chosen: Round, why: str) -> Culprit:
    return Culprit(
        rank=member.rank,
        comm_rank=group.rank_of(member) if group is not None else None,
        host=member.info.host,
        pid=member.info.pid,
        gpu=None,
        communicator=reference,
        operation=OperationRef(chosen.name) if chosen.group != HOST else None,
        reason=f"{why}: {chosen.durations.get(member.index, math.nan):.4f} s in the operation",
    )


def _lowest_rate(job: Job, group: Group | None) -> Member | None:
    """The rank with the lowest SendRate or RecvRate (steps a second), where the shim reads counters of at least two ranks."""
    rates: dict[int, float] = {}
    for member in job.members:
        if member.last.device is None or (group is not None and group.rank_of(member) is None):
            continue
        own = [c.steps_per_s for c in member.last.device.counters if c.steps_per_s is not None and not c.stale and not c.problem]
        if own:
            rates[member.index] = min(own)
    if len(rates) < 2:
        return None
    lowest = min(rates, key=lambda at: rates[at])
    return next(member for member in job.members if member.index == lowest)


def _unobserved(plane: str, kind: str, slowest: Member | None) -> tuple[str, ...]:
    lines = []
    if plane != "device":
        lines.append("GPU times are not known without the shim: a host's wait at the end of an iteration stands for them")
    if kind != "S1" and slowest is None:
        lines.append("send and receive rates need the shim's counters: which rank communicates slowly is not known")
    return tuple(lines)
