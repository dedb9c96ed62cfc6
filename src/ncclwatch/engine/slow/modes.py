"""By which rule jobs that run are judged: ncclwatch's own (``watch``), or another as published, for those who want what it says.

A :class:`Mode` takes what each sample shows of one job and says what stands. CCL-D's (4.2, equations 1-4): T_base is the
administrator's until the first min(100 rounds, two minutes) have been seen, then the mean of their longest times. Each minute the
round with the largest range between ranks is judged. R above theta is slow, and repeated before anybody is named. P says whether
computation is slow (the rank with the shortest time in the operation came last) or communication (the rank with the lowest send
or receive rate). Its figures are the paper's.

A round is a collective as the GPUs of all its ranks timed it. Where no shim does, the hosts' calls stand for it, as far as a host
waits for its GPU: an iteration's last operation, from the call to the first call of the next iteration. The two are never mixed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import NamedTuple

import numpy as np

from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.slow.gpu_operations import GpuOperations, Round, numbering
from ncclwatch.engine.slow.megatrace import MegaTrace
from ncclwatch.engine.slow.mode import Mode, ModeWatch, Sample
from ncclwatch.engine.slow.watch import SlowWatch
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.verdict import Culprit, OperationRef, Verdict, VerdictClass

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
HOSTS_CALLS = "the end of the iteration, by the hosts' calls"

CLASSES = {
    "S1": VerdictClass.SLOW_COMPUTATION,
    "S2": VerdictClass.SLOW_COMMUNICATION,
    "S3": VerdictClass.SLOW_MIXED,
}


# --- CCL-D -------------------------------------------------------------------------------------------------------------------


class CcldResult(NamedTuple):
    """What the equations say of one window, by the round with the largest range of it; durations in seconds.

    ``static``: the base is the administrator's, so the slowness is there from the start.
    """

    chosen: Round
    t_base: float
    static: bool

    @property
    def ratio(self) -> float:
        """R, equation 3."""
        return (self.chosen.longest - self.t_base) / self.t_base

    @property
    def share(self) -> float:
        """P, equation 4: 1 pure computation, 0 pure communication; nan where nothing is slow."""
        longest = self.chosen.longest
        return (longest - self.chosen.shortest) / (longest - self.t_base) if longest > self.t_base else math.nan

    @property
    def kind(self) -> str:
        """S1, S2 or S3 by P."""
        if self.share > BETA:
            return "S1"
        return "S2" if self.share < ALPHA else "S3"


@dataclass(slots=True)
class CcldRule:
    """The equations for one communicator: ``initial`` is the administrator's T_base."""

    initial: float
    theta: float = THETA
    window: deque[Round] = field(default_factory=lambda: deque(maxlen=KEPT_ROUNDS))
    since: float | None = None
    found: CcldResult | None = None
    """Of the last window, if it was slow and that had repeated."""
    _learned: list[Round] = field(default_factory=list)
    _complete: bool = False
    _slow: int = 0

    def close(self) -> CcldResult | None:
        """The window is over: judge it (equations 1-4), and begin the next."""
        window = list(self.window)
        self.window.clear()
        self.found = None
        if not window:
            return None
        base = float(np.mean([done.longest for done in self._learned])) if self._complete else self.initial
        result = CcldResult(max(window, key=lambda done: done.longest - done.shortest), base, not self._complete)
        for done in window:
            since = self._learned[0].time if self._learned else done.time
            self._complete = self._complete or len(self._learned) >= LEARNED_ROUNDS or done.time - since > LEARNED_S
            if not self._complete:
                self._learned.append(done)
        slow = result.ratio > self.theta
        self._slow += slow
        self.since = (self.since if self.since is not None else window[0].time) if slow else None
        self.found = result if slow and self._slow >= REPEATED else None
        return result


class Ccld(Mode):
    """CCL-D's equations, by communicator. ``t_base_s`` is T_base(init): without, nothing is slow before it was learned."""

    def __init__(self, *, t_base_s: float | None = None, theta: float = THETA, window_s: float = WINDOW_S) -> None:
        self.by_gpus = False
        """Whether rounds are what the GPUs timed, rather than the hosts' calls."""
        self._new_rule = partial(CcldRule, t_base_s if t_base_s is not None else math.inf, theta)
        self._rules: dict[int, CcldRule] = {}
        self._window_s = window_s
        self._ends = math.inf
        """When the window ends, wall time."""
        self._gpus = GpuOperations()
        self._numbered: tuple[ProcessKey, ...] = ()
        self._calls_until = 0.0

    def judge(self, sample: Sample) -> Verdict | None:
        """Take the rounds of a sample; what stands is the last window's."""
        for done in self.rounds(sample):
            self._rules.setdefault(done.group, self._new_rule()).window.append(done)
            self._ends = min(self._ends, done.time + self._window_s)
        if sample.time >= self._ends:
            for rule in self._rules.values():
                rule.close()
            self._ends = sample.time + self._window_s
        found = [(rule.found, rule.since) for rule in self._rules.values() if rule.found is not None]
        return _verdict(sample, *max(found, key=lambda one: one[0].ratio), self.by_gpus) if found else None

    def rounds(self, sample: Sample) -> list[Round]:
        """The rounds that have become complete.

        Where the processes are numbered in another way than before, rounds are forgotten; what was learned stays.
        """
        numbered = numbering(sample.job)
        if numbered != self._numbered:
            self._numbered, self._gpus, self.by_gpus, self._calls_until = numbered, GpuOperations(), False, 0.0
            for rule in self._rules.values():
                rule.window.clear()
                rule.found = None
        self._gpus.take(sample.job)
        self.by_gpus = self.by_gpus or bool(np.isfinite(self._gpus.rows["end"]).any())
        return self._gpus.rounds(sample.job) if self.by_gpus else self._from_calls(sample)

    def _from_calls(self, sample: Sample) -> list[Round]:
        """The last operation of each iteration, by the host's calls; ranks are matched by when their iterations end."""
        ends, lasted, length = [], [], math.inf
        for member, cadence in zip(sample.job.members, sample.cadences, strict=True):
            if cadence is None or not cadence.profiles:
                return []
            iterations = list(cadence.iterations)[-len(cadence.profiles) :]
            offset_s = (member.last.wall_ns - member.last.time_ns) / 1e9
            ends.append(np.array([iteration.end for iteration in iterations]) + offset_s)
            lasted.append([float(profile[-1] - profile[-2:][0]) for profile in cadence.profiles])
            length = min(length, iterations[-1].duration)
        found = []
        for end in ends[0][ends[0] > self._calls_until].tolist():
            places = [int(np.argmin(np.abs(times - end))) for times in ends]
            if all(abs(times[place] - end) <= length / 2 for times, place in zip(ends, places, strict=True)):
                durations = {at: lasted[at][place] for at, place in enumerate(places)}
                found.append(Round(HOST, HOSTS_CALLS, end, durations))
                self._calls_until = end
        return found


def _verdict(sample: Sample, result: CcldResult, since: float | None, by_gpus: bool) -> Verdict:
    kind, durations = result.kind, result.chosen.durations
    members = sample.job.members
    group = sample.job.groups.get(result.chosen.group)
    last = members[min(durations, key=lambda at: durations[at])] if kind != "S2" else None
    slowest = _lowest_rate(sample.job, group) if kind != "S1" else None
    reference = group.reference() if group is not None else None
    operation = OperationRef(result.chosen.name) if group is not None else None
    culprits = tuple(
        Culprit(
            member.rank, group.rank_of(member) if group is not None else None, member.info.host, member.info.pid, None, reference,
            operation, reason=f"{why}: {durations.get(members.index(member), math.nan):.4f} s in the operation",
        )
        for member, why in ((last, "came last"), (slowest, "has the lowest rate"))
        if member is not None
    )  # fmt: skip
    who = ", ".join(f"rank {one.rank}" if one.rank is not None else f"pid {one.pid} on {one.host}" for one in culprits)
    where = result.chosen.name + (f" of {group.nranks} ranks" if group is not None else "")
    unobserved = []
    if not by_gpus:
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
        time=sample.time,
        confidence=0.5,
        evidence=(
            f"T_base {result.t_base:.4f} s ({base}); in the round with the largest range of the window: "
            f"T_max {result.chosen.longest:.4f} s, T_min {result.chosen.shortest:.4f} s",
            f"R = (T_max - T_base) / T_base = {result.ratio:.2f}, P = (T_max - T_min) / (T_max - T_base) = {share}",
        ),
        unobserved=tuple(unobserved),
        planes=("device",) if by_gpus else ("calls",),
    )


def _lowest_rate(job: Job, group: Group | None) -> Member | None:
    """The rank with the lowest SendRate or RecvRate (steps a second), where the shim reads counters of at least two ranks."""
    rates: list[tuple[float, int]] = []
    for at, member in enumerate(job.members):
        if member.last.device is not None and (group is None or group.rank_of(member) is not None):
            counters = [one for one in member.last.device.counters if not one.stale and not one.problem]
            rates += [(one.steps_per_s, at) for one in counters if one.steps_per_s is not None]
    return job.members[min(rates)[1]] if len({at for _, at in rates}) > 1 else None


# --- which there are ---------------------------------------------------------------------------------------------------------


class SlowMode(StrEnum):
    """The rules there are."""

    OWN = "ncclwatch"
    CCL_D = "ccl-d"
    MEGATRACE = "megatrace"


@dataclass(frozen=True, slots=True)
class SlowRule:
    """A rule and its settings. ``t_base_s`` is CCL-D's T_base(init), in seconds, ``theta`` its threshold of R."""

    mode: SlowMode = SlowMode.OWN
    t_base_s: float | None = None
    theta: float = THETA

    def watch(self) -> SlowWatch:
        """A watch that judges by it, for one session."""
        if self.mode is SlowMode.CCL_D:
            return ModeWatch(partial(Ccld, t_base_s=self.t_base_s, theta=self.theta))
        if self.mode is SlowMode.MEGATRACE:
            return ModeWatch(MegaTrace)
        return SlowWatch()
