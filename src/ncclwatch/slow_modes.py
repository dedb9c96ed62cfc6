"""By which rule jobs that run are judged: ncclwatch's own (``watch``), or another as published, for those who want what it says.

**CCL-D** (4.2, equations 1-4): each minute the round with the largest range between ranks is judged; docs/slowdowns.md has the
rule. A round is a collective as the GPUs of all its ranks timed it; where no shim does, an iteration's last operation, from its
call to the first call of the next. The two are never mixed.

**MegaTrace**'s check of the network (III-B 2 and III-C): throughput of a flow over its last w = 64 completions (equation 1), of
sockets while there was something to send. More than m = 20 % below its running average flags the network at once. Requests in
flight while nothing completes are a hang of the network.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import NamedTuple

import numpy as np

from ncclwatch.collect.cadence import Cadence
from ncclwatch.engine.evidence.work_requests import DROP
from ncclwatch.engine.slow.gpu_operations import GpuOperations
from ncclwatch.engine.slow.watch import SlowWatch
from ncclwatch.model.job import Group, Job, Member
from ncclwatch.model.verdict import Culprit, LinkRef, OperationRef, Verdict, VerdictClass
from ncclwatch.model.work import Counting, FlowWindow, Scope

THETA = 3.0
"""Fact: CCL-D, section 4.2.2: R above this is slow ("usually close to 3")."""
ALPHA, BETA = 0.4, 0.6
"""Fact: CCL-D, section 4.2.2, below equation 4: P below the first is communication, above the second computation."""
WINDOW_S = 60.0
"""Fact: CCL-D, section 5: slow anomalies are detected within a minute."""
LEARNED_ROUNDS, LEARNED_S = 100, 120.0
"""Fact: CCL-D, section 4.2.2: of the first 100 rounds, or of those in two minutes where these are fewer, the base is the mean."""
KEPT_ROUNDS = 4096
"""Bound: rounds of a communicator that are kept of a window."""
HOST = -1
"""Bound: no group: that of rounds that are made of the hosts' calls: all ranks of the job."""
HOSTS_CALLS = "the end of the iteration, by the hosts' calls"
CLASSES = {"S1": VerdictClass.SLOW_COMPUTATION, "S2": VerdictClass.SLOW_COMMUNICATION, "S3": VerdictClass.SLOW_MIXED}

STALL_S = 0.5
"""Fact: MegaTrace, IV: the guardband of a timeout, 500 ms."""
WARM_UP = 8
"""Bound: windows of a flow before it is judged: the running average leaves out the first iterations, some number (III-C)."""
TOLD = 8
"""Bound: flagged flows that are told, a line each."""


# --- CCL-D -------------------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """A collective that all ranks have told: when it ended (wall time), and for each rank how long it lasted there, seconds."""

    group: int
    name: str
    time: float
    durations: dict[int, float]


class CcldResult(NamedTuple):
    """One window by its round with the largest range, seconds; ``static``: the base is the administrator's."""

    chosen: Round
    t_base: float
    longest: float
    shortest: float
    static: bool

    @property
    def ratio(self) -> float:
        """R, equation 3."""
        return (self.longest - self.t_base) / self.t_base

    @property
    def share(self) -> float:
        """P, equation 4: 1 pure computation, 0 pure communication; nan where nothing is slow."""
        return (self.longest - self.shortest) / (self.longest - self.t_base) if self.longest > self.t_base else math.nan

    @property
    def kind(self) -> str:
        """S1, S2 or S3 by P."""
        if self.share > BETA:
            return "S1"
        return "S2" if self.share < ALPHA else "S3"


@dataclass(slots=True)
class CcldRule:
    """The equations for one communicator; ``found``: the last window's result if it and the one before were slow."""

    initial: float
    theta: float = THETA
    window: deque[Round] = field(default_factory=lambda: deque(maxlen=KEPT_ROUNDS))
    since: float | None = None
    found: CcldResult | None = None
    _learned: list[tuple[float, float]] = field(default_factory=list)
    """(wall time, longest time of a rank) of the first rounds."""
    _complete: bool = False

    def close(self) -> CcldResult | None:
        """The window is over: judge it (equations 1-4), and begin the next."""
        window = [(done, max(done.durations.values()), min(done.durations.values())) for done in self.window]
        self.window.clear()
        self.found = None
        if not window:
            return None
        base = float(np.mean([longest for _, longest in self._learned])) if self._complete else self.initial
        chosen, longest, shortest = max(window, key=lambda one: one[1] - one[2])
        result = CcldResult(chosen, base, longest, shortest, not self._complete)
        for done, most, _ in window:
            began = self._learned[0][0] if self._learned else done.time
            self._complete = self._complete or len(self._learned) >= LEARNED_ROUNDS or done.time - began > LEARNED_S
            if not self._complete:
                self._learned.append((done.time, most))
        if not result.ratio > self.theta:  # or nothing was learned yet
            self.since = None
        elif self.since is None:
            self.since = window[0][0].time
        else:  # A slow-down must recur before anybody is named (4.2.2).
            self.found = result
        return result


class Ccld:
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
        self._calls_until = 0.0

    def judge(self, job: Job, watch: SlowWatch) -> Verdict | None:
        """Take the rounds of a sample; what stands is the last window's."""
        time = job.time
        for done in self.rounds(job, watch.cadences.of_members(job)):
            self._rules.setdefault(done.group, self._new_rule()).window.append(done)
            self._ends = min(self._ends, done.time + self._window_s)
        if time >= self._ends:
            for rule in self._rules.values():
                rule.close()
            self._ends = time + self._window_s
        found = [(rule.found, rule.since) for rule in self._rules.values() if rule.found is not None]
        return _verdict(job, *max(found, key=lambda one: one[0].ratio), self.by_gpus) if found else None

    def rounds(self, job: Job, cadences: Sequence[Cadence | None]) -> list[Round]:
        """The rounds that have become complete; forgotten where processes are numbered anew, but not what was learned."""
        if not self._gpus.take(job):
            self.by_gpus, self._calls_until = False, 0.0
            for rule in self._rules.values():
                rule.window.clear()
                rule.found = None
        self.by_gpus = self.by_gpus or bool(np.isfinite(self._gpus.rows["end"]).any())
        return self._from_gpus(job) if self.by_gpus else self._from_calls(job, cadences)

    def _from_gpus(self, job: Job) -> list[Round]:
        """The collectives that all ranks have told; what was handed out is not kept."""
        places, key, ended = self._gpus.complete(job)
        found: dict[int, Round] = {}
        names = list(self._gpus.functions)
        for row, at in zip(self._gpus.rows[places], key.tolist(), strict=True):
            done = found.setdefault(at, Round(int(row["group"]), names[row["function"]], float(ended[at]), {}))
            done.durations[int(row["rank"])] = float(row["lasted"])
        self._gpus.rows = np.delete(self._gpus.rows, places)
        return sorted(found.values(), key=lambda done: done.time)

    def _from_calls(self, job: Job, cadences: Sequence[Cadence | None]) -> list[Round]:
        """The last operation of each iteration, by the host's calls; ranks are matched by when their iterations end."""
        ends, lasted, length = [], [], math.inf
        for member, cadence in zip(job.members, cadences, strict=True):
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


def _verdict(job: Job, result: CcldResult, since: float | None, by_gpus: bool) -> Verdict:
    kind, durations, members = result.kind, result.chosen.durations, job.members
    group = job.groups.get(result.chosen.group)
    last = min(durations, key=lambda at: durations[at]) if kind != "S2" else None
    slowest = _lowest_rate(job, group) if kind != "S1" else None
    culprits = []
    for at, why in ((last, "came last"), (slowest, "has the lowest rate")):
        if at is not None:
            rank = group.ranks.get(members[at].index) if group is not None else None
            reason = f"{why}: {durations.get(at, math.nan):.4f} s in the operation"
            culprits.append(_culprit(members[at], rank, group, reason, result.chosen.name))
    who = ", ".join(f"rank {one.rank}" if one.rank is not None else f"pid {one.pid} on {one.host}" for one in culprits)
    where = result.chosen.name + (f" of {group.nranks} ranks" if group is not None else "")
    unobserved = []
    if not by_gpus:
        unobserved.append("GPU times are not known without the shim: a host's wait at the end of an iteration stands for them")
    if kind != "S1" and slowest is None:
        unobserved.append("send and receive rates need the shim's counters: which rank communicates slowly is not known")
    base, share = "the administrator's" if result.static else "learned", f"{result.share:.2f}"
    return Verdict(
        CLASSES[kind],
        summary=f"CCL-D: {kind} in {where}: {who or 'no rank can be told'}; R = {result.ratio:.2f}, P = {share}",
        culprits=tuple(culprits), communicator=group.reference() if group is not None else None, since=since, time=job.time,
        confidence=0.5,
        evidence=(
            f"T_base {result.t_base:.4f} s ({base}); in the round with the largest range of the window: "
            f"T_max {result.longest:.4f} s, T_min {result.shortest:.4f} s",
            f"R = (T_max - T_base) / T_base = {result.ratio:.2f}, P = (T_max - T_min) / (T_max - T_base) = {share}",
        ),
        unobserved=tuple(unobserved), planes=("device",) if by_gpus else ("calls",),
    )  # fmt: skip


def _lowest_rate(job: Job, group: Group | None) -> int | None:
    """Whose SendRate or RecvRate (steps a second) is lowest, where the shim reads counters of at least two ranks."""
    rates = [
        (one.steps_per_s, at)
        for at, member in enumerate(job.members) if group is None or group.ranks.get(member.index) is not None
        for one in (member.last.device.counters if member.last.device is not None else ())
        if not one.stale and not one.problem and one.steps_per_s is not None
    ]  # fmt: skip
    return min(rates)[1] if len({at for _, at in rates}) > 1 else None


# --- MegaTrace ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Flow:
    """What one rank sends to another: its running average, how far below the newest window is, since when it is flagged."""

    group: Group
    newest: FlowWindow
    ends: tuple[int, int]
    seen_ns: int = 0
    windows: int = 0
    average: float = 0.0
    drop: float = 0.0
    stalled_s: float = 0.0
    since: float | None = None

    def take(self, window: FlowWindow, now: float) -> None:
        """A newer window. One that is flagged teaches nothing."""
        work = window.work
        self.newest, self.seen_ns = window, work.end_ns
        counted = work.counting in (Counting.EXACT, Counting.ORDER)
        self.stalled_s = (work.oldest_s or 0.0) if counted and work.in_flight and not work.completed else 0.0
        rate = work.throughput if work.posted_bytes else None
        if rate is not None:
            judged = self.windows >= WARM_UP
            self.drop = 1 - rate / self.average if judged and rate < (1 - DROP) * self.average else 0.0
            if not self.drop:
                self.windows += 1
                self.average += (rate - self.average) / self.windows
        self.since = (self.since or now) if self.flagged else None

    @property
    def flagged(self) -> bool:
        return self.drop > 0 or self.stalled_s >= STALL_S

    def text(self, job: Job) -> str:
        """What flags it."""
        work, ends = self.newest.work, " to ".join(job.rank_name(self.group.id, end) for end in self.ends)
        if self.drop:
            now, usual = (work.throughput or 0.0) / 1e6, self.average / 1e6
            return f"{ends}: {now:,.1f} MB/s over the last completions, {usual:,.1f} on average"
        return f"{ends}: {work.in_flight} in flight, none completed in {work.seen_s:.2g} s, the oldest for {self.stalled_s:.1f} s"


class MegaTrace:
    """The check for one job."""

    def __init__(self) -> None:
        self._flows: dict[tuple[object, ...], _Flow] = {}

    def judge(self, job: Job, watch: SlowWatch) -> Verdict | None:
        """Take the windows that are new and say what is flagged; ``None`` where nothing is. O(windows of the job's hosts)."""
        hosts = watch.network.hosts if watch.network is not None else {}
        flagged = []
        for host in sorted({member.info.host for member in job.members} & hosts.keys()):
            for place, kept in hosts[host].work.items():
                last = kept[-1]
                if last.scope is not Scope.PEER or last.comm_hash is None or last.rank is None or last.peer is None:
                    continue
                if (group := next(job.of_rank(last.comm_hash, last.rank, (host, last.pid)), None)) is None:
                    continue
                flow = self._flows.setdefault(place, _Flow(group, last, (last.rank, last.peer)))
                flow.group = group
                for window in kept:
                    if window.work.end_ns > flow.seen_ns:
                        flow.take(window, job.time)
                if flow.flagged:
                    flagged.append(flow)
        return _network_verdict(job, flagged) if flagged else None


def _network_verdict(job: Job, flagged: Sequence[_Flow]) -> Verdict:
    """The faulty paths that the paper reports to its manager: who has an end of most of them is named, of one path both ends."""
    worst = max(flagged, key=lambda flow: (flow.stalled_s, flow.drop))
    group = worst.group
    ends = Counter(rank for flow in flagged if flow.group is group for rank in flow.ends)
    named = sorted(rank for rank, count in ends.items() if count == max(ends.values()))
    what = f"throughput {worst.drop:.0%} below its average" if worst.drop else "requests in flight and none completes"
    reasons = {rank: f"an end of {ends[rank]} of {len(flagged)} flagged paths" for rank in named}
    return Verdict(
        VerdictClass.SLOW_COMMUNICATION,
        summary=f"MegaTrace: the network at {', '.join(job.rank_name(group.id, rank) for rank in named)}: {what}",
        culprits=tuple(_culprit(group.holder(rank), rank, group, why) for rank, why in reasons.items()),
        communicator=group.reference(), link=LinkRef(*worst.ends, "net"),
        since=min(flow.since or job.time for flow in flagged), time=job.time, confidence=0.5,
        evidence=tuple(flow.text(job) for flow in flagged[:TOLD]),
        unobserved=("computation: this rule looks at the network alone",), planes=("wire",),
    )  # fmt: skip


def _culprit(member: Member | None, rank: int | None, group: Group | None, reason: str, operation: str = "") -> Culprit:
    """A rank of a communicator as it is named; without a member nobody observes it."""
    reference = group.reference() if group is not None else None
    what = OperationRef(operation) if group is not None and operation else None
    if member is None:
        return Culprit(None, rank, "", None, None, reference, what, reason=reason, observed=False)
    return Culprit(member.rank, rank, member.info.host, member.info.pid, None, reference, what, reason=reason)


# --- which there are ---------------------------------------------------------------------------------------------------------


class ModeWatch(SlowWatch):
    """Judges each job by a mode of its own."""

    def __init__(self, make: Callable[[], Ccld | MegaTrace]) -> None:
        super().__init__()
        self._make = make

    def judge(self, job: Job, verdict: Verdict, *_: object, **__: object) -> Verdict:
        """Take the newest samples of a job; the verdict on whether it hangs stands unless the job runs and is slow."""
        watch = self._watch_of(job)
        watch.rule = watch.rule or self._make()
        found: Verdict | None = watch.rule.judge(job, self)
        return found if found is not None and verdict.verdict_class is VerdictClass.RUNNING else verdict


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
        return ModeWatch(MegaTrace) if self.mode is SlowMode.MEGATRACE else SlowWatch()
