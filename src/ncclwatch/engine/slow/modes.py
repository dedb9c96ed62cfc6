"""By which rule jobs that run are judged: ncclwatch's own (``watch``), or CCL-D's as published (4.2, equations 1-4).

CCL-D's is for those who want what the paper describes. T_base is the administrator's until the first min(100 rounds, two
minutes) have been seen, then the mean of their longest times. Each minute the round with the largest range between ranks is
judged. R above theta is slow, and repeated before anybody is named. P says whether computation is slow (the rank with the
shortest time in the operation came last) or communication (the rank with the lowest send or receive rate). Its figures are the
paper's.

A round is a collective as the GPUs of all its ranks timed it. Where no shim does, the hosts' calls stand for it, as far as a host
waits for its GPU: an iteration's last operation, from the call to the first call of the next iteration. The two are never mixed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.slow.cadence import Cadence
from ncclwatch.engine.slow.gpu_times import Round, Rounds, numbering
from ncclwatch.engine.slow.snapshot import StageOf
from ncclwatch.engine.slow.watch import SlowWatch
from ncclwatch.engine.topology.model import Topology
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.verdict import CommunicatorRef, Culprit, OperationRef, Verdict, VerdictClass

THETA = 3.0
"""Fact: CCL-D, section 4.2.2: R above this is slow ("usually close to 3")."""
ALPHA, BETA = 0.4, 0.6
"""Fact: CCL-D, section 4.2.2, below equation 4: P below the first is communication, above the second computation."""
WINDOW_S = 60.0
"""Fact: CCL-D, section 5: slow anomalies are detected within a minute."""
LEARNED_ROUNDS, LEARNED_S = 100, 120.0
"""Fact: CCL-D, section 4.2.2: of the first 100 rounds, or of those in two minutes where these are fewer, the base is the mean."""
REPEATED = 2
"""Unit: windows. From: CCL-D, section 4.2.2: a slow-down must recur before anybody is named (how often it does not say): twice is
the least that is a recurrence.
"""
KEPT_ROUNDS = 4096
"""Bound: rounds of a communicator that are kept of a window."""
HOST = -1
"""Bound: no group: that of rounds that are made of the hosts' calls: all ranks of the job."""

CLASSES = {
    "S1": VerdictClass.SLOW_COMPUTATION,
    "S2": VerdictClass.SLOW_COMMUNICATION,
    "S3": VerdictClass.SLOW_MIXED,
}


def _range(done: Round) -> float:
    return max(done.durations.values()) - min(done.durations.values())


@dataclass(frozen=True, slots=True)
class CcldResult:
    """What the equations say of one window, by the round with the largest range of it; durations in seconds."""

    chosen: Round
    t_base: float
    static: bool
    """The base is the administrator's: the slowness is there from the start."""

    @property
    def t_max(self) -> float:
        """The longest time of a rank in the round."""
        return max(self.chosen.durations.values())

    @property
    def ratio(self) -> float:
        """R, equation 3."""
        return (self.t_max - self.t_base) / self.t_base

    @property
    def share(self) -> float:
        """P, equation 4: 1 pure computation, 0 pure communication; nan where nothing is slow."""
        return _range(self.chosen) / (self.t_max - self.t_base) if self.t_max > self.t_base else math.nan

    @property
    def kind(self) -> str:
        """S1, S2 or S3 by P."""
        if self.share > BETA:
            return "S1"
        return "S2" if self.share < ALPHA else "S3"


@dataclass(slots=True)
class Ccld:
    """The rule for one communicator: ``initial`` is the administrator's T_base. Barriers are the caller's to leave out."""

    initial: float
    theta: float = THETA
    window: deque[Round] = field(default_factory=lambda: deque(maxlen=KEPT_ROUNDS))
    ends: float | None = None
    """When the window ends, wall time."""
    since: float | None = None
    found: CcldResult | None = None
    """Of the last window, if it was slow and that had repeated."""
    _learned: list[float] = field(default_factory=list)
    _first: float | None = None
    _complete: bool = False
    _slow: int = 0

    def close(self) -> CcldResult | None:
        """The window is over: judge it (equations 1-4), and begin the next."""
        window = list(self.window)
        self.window.clear()
        self.found = None
        if not window:
            return None
        base = float(np.mean(self._learned)) if self._complete else self.initial
        result = CcldResult(max(window, key=_range), base, not self._complete)
        for done in window:
            self._first = done.time if self._first is None else self._first
            self._complete = self._complete or len(self._learned) >= LEARNED_ROUNDS or done.time - self._first > LEARNED_S
            if not self._complete:
                self._learned.append(max(done.durations.values()))
        slow = result.ratio > self.theta
        self._slow += slow
        self.since = (self.since if self.since is not None else window[0].time) if slow else None
        self.found = result if slow and self._slow >= REPEATED else None
        return result


@dataclass(slots=True)
class JobRounds:
    """The rounds of one job, from whichever plane tells them, and what the equations made of them by communicator."""

    plane: Literal["device", "calls", ""] = ""
    rounds: Rounds = field(default_factory=Rounds)
    groups: dict[int, Ccld] = field(default_factory=dict)
    numbered: tuple[tuple[int, ProcessKey], ...] = ()
    _calls_until: float = 0.0

    def take(self, job: Job, cadences: Sequence[Cadence | None]) -> list[Round]:
        """The rounds that have become complete. ``cadences`` are the members' own, in their order.

        Where the processes are numbered in another way than before, rounds are forgotten; what was learned stays.
        """
        numbered = numbering(job)
        if numbered != self.numbered:
            self.numbered, self.rounds, self.plane, self._calls_until = numbered, Rounds(), "", 0.0
            for rule in self.groups.values():
                rule.window.clear()
                rule.found = None
        if self.plane == "device" or any(_times_kernels(member) for member in job.members):
            self.plane = "device"
            return self.rounds.take(job)
        found = self._from_calls(job, cadences)
        self.plane = "calls" if found else self.plane
        return found

    def _from_calls(self, job: Job, cadences: Sequence[Cadence | None]) -> list[Round]:
        """The last operation of each iteration, by the host's calls; ranks are matched by when their iterations end."""
        ends: dict[int, NDArray[np.float64]] = {}
        lasted: dict[int, list[float]] = {}
        length = math.inf
        for member, cadence in zip(job.members, cadences, strict=True):
            if cadence is None or not cadence.profiles:
                return []
            offset = (member.last.wall_ns - member.last.time_ns) / 1e9
            iterations = list(cadence.iterations)[-len(cadence.profiles) :]
            ends[member.index] = np.array([iteration.end + offset for iteration in iterations])
            lasted[member.index] = [float(profile[-1] - profile[-2]) if len(profile) > 1 else 0.0 for profile in cadence.profiles]
            length = min(length, iterations[-1].duration)
        found = []
        for end in ends[job.members[0].index].tolist():
            near = {at: int(np.argmin(np.abs(times - end))) for at, times in ends.items()}
            if end > self._calls_until and all(abs(ends[at][place] - end) <= length / 2 for at, place in near.items()):
                durations = {at: lasted[at][place] for at, place in near.items()}
                begins = {at: float(ends[at][place]) - durations[at] for at, place in near.items()}
                found.append(Round(HOST, "end of the iteration", end, durations, begins))
        self._calls_until = max((done.time for done in found), default=self._calls_until)
        return found


def _times_kernels(member: Member) -> bool:
    communicators = member.last.device.communicators if member.last.device is not None else ()
    return any(operation.observed and operation.finished_ns is not None for c in communicators for operation in c.recent)


class CcldWatch(SlowWatch):
    """Judges jobs that run by CCL-D's equations. ``t_base_s`` is T_base(init): without, nothing is slow before it was learned."""

    def __init__(self, *, t_base_s: float | None = None, theta: float = THETA, window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._initial = t_base_s if t_base_s is not None else math.inf
        self._theta, self._window_s = theta, window_s
        self._rounds: dict[ProcessKey, JobRounds] = {}

    def judge(
        self, job: Job, verdict: Verdict, topologies: Sequence[Topology] = (), stage_of: StageOf | None = None
    ) -> Verdict:  # fmt: skip
        """Take the newest samples of a job; what stands of it is the last window's."""
        del topologies, stage_of
        keys = [member.info.key for member in job.members]
        known = next((self._rounds[key] for key in keys if key in self._rounds), None)
        if known is None:
            known = self._rounds.setdefault(keys[0], JobRounds())
        for done in known.take(job, [self.cadences.find(member.info.host, member.info.pid) for member in job.members]):
            rule = known.groups.setdefault(done.group, Ccld(self._initial, self._theta))
            rule.ends = rule.ends if rule.ends is not None else done.time + self._window_s
            rule.window.append(done)
        now = max(member.last.wall_ns for member in job.members) / 1e9
        for rule in known.groups.values():
            if rule.ends is not None and now >= rule.ends:
                rule.close()
                rule.ends = now + self._window_s
        found = [(rule.found, rule.since) for rule in known.groups.values() if rule.found is not None]
        if verdict.verdict_class is not VerdictClass.RUNNING or not found:
            return verdict
        return _verdict(job, *max(found, key=lambda item: item[0].ratio), known.plane)

    def forget(self, present: Collection[ProcessKey]) -> None:
        """Forget jobs that are watched no longer."""
        super().forget(present)
        kept = set(present)
        self._rounds = {key: known for key, known in self._rounds.items() if key in kept}


def _verdict(job: Job, result: CcldResult, since: float | None, plane: str) -> Verdict:
    kind, durations = result.kind, result.chosen.durations
    members = {member.index: member for member in job.members}
    group = job.groups.get(result.chosen.group)
    last = members.get(min(durations, key=lambda at: durations[at])) if kind != "S2" else None
    slowest = _lowest_rate(job, group) if kind != "S1" else None
    reference = CommunicatorRef(f"{group.hash:016x}", group.nranks) if group is not None else None
    culprits = tuple(
        Culprit(
            rank=member.rank,
            comm_rank=group.rank_of(member) if group is not None else None,
            host=member.info.host,
            pid=member.info.pid,
            gpu=None,
            communicator=reference,
            operation=OperationRef(result.chosen.name) if group is not None else None,
            reason=f"{why}: {durations.get(member.index, math.nan):.4f} s in the operation",
        )
        for member, why in ((last, "came last"), (slowest, "has the lowest rate"))
        if member is not None
    )
    who = ", ".join(f"rank {one.rank}" if one.rank is not None else f"pid {one.pid} on {one.host}" for one in culprits)
    where = (
        f"{result.chosen.name} of {group.nranks} ranks" if group is not None else "the end of the iteration, by the hosts' calls"
    )
    unobserved = []
    if plane != "device":
        unobserved.append("GPU times are not known without the shim: a host's wait at the end of an iteration stands for them")
    if kind != "S1" and slowest is None:
        unobserved.append("send and receive rates need the shim's counters: which rank communicates slowly is not known")
    base, share = "the administrator's" if result.static else "learned", f"{result.share:.2f}"
    return Verdict(
        verdict_class=CLASSES[kind],
        summary=f"CCL-D: {kind} in {where}: {who or 'no rank can be told'}; R = {result.ratio:.2f}, P = {share}",
        culprits=culprits,
        communicator=reference,
        since=since,
        time=max(member.last.wall_ns for member in job.members) / 1e9,
        confidence=0.5,
        evidence=(
            f"T_base {result.t_base:.4f} s ({base}); in the round with the largest range of the window: "
            f"T_max {result.t_max:.4f} s, T_min {min(durations.values()):.4f} s",
            f"R = (T_max - T_base) / T_base = {result.ratio:.2f}, P = (T_max - T_min) / (T_max - T_base) = {share}",
        ),
        unobserved=tuple(unobserved),
        planes=("device",) if plane == "device" else ("calls",),
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


class SlowMode(StrEnum):
    """The rules there are."""

    OWN = "ncclwatch"
    CCL_D = "ccl-d"


@dataclass(frozen=True, slots=True)
class SlowRule:
    """A rule and its settings. ``t_base_s`` is CCL-D's T_base(init), in seconds, ``theta`` its threshold of R."""

    mode: SlowMode = SlowMode.OWN
    t_base_s: float | None = None
    theta: float = THETA

    def watch(self) -> SlowWatch:
        """A watch that judges by it, for one session."""
        if self.mode is SlowMode.CCL_D:
            return CcldWatch(t_base_s=self.t_base_s, theta=self.theta)
        return SlowWatch()
