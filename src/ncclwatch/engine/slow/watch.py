"""Watch running jobs for slowness: keeps iteration times and looks, and says who is to blame once that has repeated."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.job import Job
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.engine.slow import explain
from ncclwatch.engine.slow.baselines import MEGATRACE_GATE, slope
from ncclwatch.engine.slow.blame import find
from ncclwatch.engine.slow.cadence import Cadence, Cadences, Iteration, mean_profile
from ncclwatch.engine.slow.equals import equals, hosts, nodes, replicas
from ncclwatch.engine.slow.findings import Context, Finding
from ncclwatch.engine.slow.gpu_times import GpuTimes, Start, numbering
from ncclwatch.engine.slow.lateness import Lateness, measure
from ncclwatch.engine.slow.looks import Look, StageOf, only_network, take_look
from ncclwatch.engine.slow.moments import near
from ncclwatch.engine.slow.paths import Paths
from ncclwatch.engine.slow.profile import Profile, Shares, add_up
from ncclwatch.engine.slow.round_trips import FlowPlace, RoundTrips
from ncclwatch.engine.slow.skew import Skew, measure_skew, without_partners
from ncclwatch.engine.slow.windows import NOISE_SIGMAS, SLOW_SHARE, IterationWatch, SlowDown
from ncclwatch.engine.topology.model import Topology
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.verdict import Verdict, VerdictClass

KEPT_LOOKS = 240
WINDOW_LOOKS = 120
PENDING_LOOKS = 10
CHEAP_RANKS = 512
"""Above this many ranks a look is taken only every so many rounds that looks cost no more than at this size."""
SPREAD_S, SPREAD_SHARE = 0.1, 0.1
"""Samples of different processes further apart in time, and more than this share of an iteration, are no look at one moment."""
CONFIRMED = 2
"""Judgements in a row that must name the same before it is reported."""
FORGIVEN = 5
"""Judgements without a finding after which what stood is withdrawn (or that part of it), while the job is still slow."""
MEANWHILE_S, MEANWHILE_MOST_S = 5.0, 60.0
"""So long after its last progress (for an iteration's length, where that is more, and the second at most) a job that is slow is
still said to be: then it may hang, or have come to its end."""
IDLE_EXPLAINS = 0.5
"""A job that pauses as a whole, nothing open on any rank, for this share of what iterations lose is held up by nobody in it."""


@dataclass(slots=True)
class Judgement:
    """What stands behind a verdict of slowness."""

    findings: list[Finding]
    profile: Profile
    context: Context
    slow: SlowDown | None
    since: float
    iteration_s: float | None
    factors: Shares
    extras: Shares
    starts: dict[ProcessKey, Start] = field(default_factory=dict)
    """Whose GPU comes to collectives late."""
    timed: bool = False
    """Whether GPUs tell when they begin and end operations."""
    clocks: str = ""
    """How well the hosts' clocks can be compared, in words."""
    paths: tuple[str, ...] = ()
    """What the critical paths of iterations say, where GPUs have timed whole ones."""
    path_costs: dict[int, float] = field(default_factory=dict)
    """By place in ``profile.processes``: what a rank's work costs an iteration by them, seconds."""
    no_path: str = ""
    """Why there are none, where GPUs tell their times."""


@dataclass(slots=True)
class _JobWatch:
    """What is kept of one job. Memory: ``KEPT_LOOKS`` looks and one baseline."""

    iterations: IterationWatch = field(default_factory=IterationWatch)
    reference: tuple[str, int] | None = None
    generation: int = 0
    offset_s: float = 0.0
    """Wall clock minus monotonic clock of the reference's node."""
    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=KEPT_LOOKS))
    pending: deque[Look] = field(default_factory=lambda: deque(maxlen=PENDING_LOOKS))
    """Looks since the job last made progress."""
    idle: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_LOOKS))
    """From when to when nothing was open on any rank, between two looks each; wall time."""
    judged_s: float = 0.0
    """Wall time of the verdict before; ``begun_s``: of the first."""
    begun_s: float = 0.0
    ran_s: float = 0.0
    """Wall time of the last verdict that it runs."""
    looked_ns: int = 0
    """Time of the oldest sample of the last look."""
    rounds: int = 0
    named: frozenset[object] = frozenset()
    repeated: int = 0
    missing: int = 0
    was_slow: bool = False
    slow_since: float = 0.0
    """Wall time."""
    usual: dict[ProcessKey, float] = field(default_factory=dict)
    """When each process usually begins an iteration, as of :class:`Lateness`, from before the job was slow."""
    standing: Judgement | None = None
    gpus: GpuTimes = field(default_factory=GpuTimes)
    paths: Paths = field(default_factory=Paths)
    round_trips: RoundTrips = field(default_factory=RoundTrips)
    numbered: tuple[tuple[int, ProcessKey], ...] = ()
    """The members, as ``gpus`` and ``paths`` number them."""


class SlowWatch:
    """Slowness of every job among the observed processes. A pure function of what it is fed; no clock is read."""

    def __init__(self) -> None:
        self.cadences = Cadences()
        self.ledger: Ledger | None = None
        """What was called, lined up across ranks; without it nothing is told of what NVLink joins."""
        self.totals: Mapping[Place, tuple[int, int]] = {}
        self.delays: Mapping[str, tuple[int, Mapping[FlowPlace, float]]] = {}
        """What the wire says of connections, as of :meth:`NetworkMemory.delays`."""
        self._jobs: dict[ProcessKey, _JobWatch] = {}

    def add_calls(self, events: NDArray[Any], lost: int = 0, source: str = "") -> None:
        """Take a batch of call records of one node."""
        self.cadences.add_calls(events, lost, source)

    def judge(
        self, job: Job, verdict: Verdict, topologies: Sequence[Topology] = (), stage_of: StageOf | None = None
    ) -> Verdict:  # fmt: skip
        """Take the newest samples of a job and the verdict on whether it hangs; a job that runs may be slow instead.

        A look between two steps of progress counts once the job goes on; what is seen of a hang teaches nothing. ``topologies``
        are what was learned of the jobs there are: they name stages, and say who does equal work. ``stage_of`` says of a call in
        which pass it is.
        """
        topology = max(topologies, key=lambda known: len(known.by_id.keys() & job.groups.keys()), default=None)
        if topology is not None and not topology.by_id.keys() & job.groups.keys():
            topology = None
        watch = self._watch_of(job)
        before_s, watch.judged_s = watch.judged_s, verdict.time or 0.0
        watch.begun_s = watch.begun_s or watch.judged_s
        if verdict.verdict_class is VerdictClass.IDLE and before_s:
            watch.idle.append((before_s, watch.judged_s))
        hangs = verdict.verdict_class.accuses and not verdict.verdict_class.slow
        if hangs or verdict.verdict_class is VerdictClass.IDLE:
            watch.pending.clear()
            return verdict if hangs else self._meanwhile(job, watch, verdict, topology)
        watch.rounds += 1
        self._follow_iterations(job, watch)
        if len(job.members) <= CHEAP_RANKS:
            watch.round_trips.take(job, self.delays)
            numbered = numbering(job)
            if numbered != watch.numbered:
                watch.gpus, watch.paths, watch.numbered = GpuTimes(), Paths(), numbered
            watch.gpus.take(job)
            baseline = watch.iterations.baseline
            limit = math.inf
            if baseline.known:
                limit = max(baseline.limit(SLOW_SHARE, NOISE_SIGMAS), baseline.normal / MEGATRACE_GATE)
            watch.paths.take(job, [self.cadences.find(member.info.host, member.info.pid) for member in job.members], limit)
        every = -(-len(job.members) // CHEAP_RANKS)
        slow = watch.iterations.slow_down()
        due = watch.rounds % every == 0 or (slow is not None and watch.rounds % max(1, every // 4) == 0)
        due = due and self._shows_one_moment(job, watch)
        if due:
            watch.pending.append(take_look(job, self.cadences.orders.find, near(watch.iterations.duration), stage_of))
        if verdict.verdict_class is not VerdictClass.RUNNING:
            return self._meanwhile(job, watch, verdict, topology)
        watch.ran_s = watch.judged_s
        if due:
            watch.looks.extend(watch.pending)
            watch.pending.clear()
            self._judge(job, watch, slow, topology)
        if watch.standing is not None and not explain.holds(job, watch.standing):
            watch.standing = None
        if watch.standing is None:
            return verdict if slow is None else explain.unlocated(job, verdict, slow)
        return explain.verdict(job, watch.standing, topology)

    @staticmethod
    def _meanwhile(job: Job, watch: _JobWatch, verdict: Verdict, topology: Topology | None) -> Verdict:
        """What stands of a slow job, for a moment in which it does not move and does not hang: it pauses in every iteration."""
        pause_s = min(max(MEANWHILE_S, watch.iterations.duration or 0.0), MEANWHILE_MOST_S)
        rests = not verdict.verdict_class.accuses and watch.judged_s - watch.ran_s > pause_s
        if rests or watch.standing is None or not explain.holds(job, watch.standing):
            return verdict
        return explain.verdict(job, watch.standing, topology)

    def forget(self, present: Collection[ProcessKey]) -> None:
        """Forget jobs and processes that are watched no longer."""
        known = set(present)
        for key in [key for key in self._jobs if key not in known]:
            del self._jobs[key]

    def _watch_of(self, job: Job) -> _JobWatch:
        keys = [member.info.key for member in job.members]
        for key in keys:
            if key in self._jobs:
                return self._jobs[key]
        return self._jobs.setdefault(keys[0], _JobWatch())

    @staticmethod
    def _shows_one_moment(job: Job, watch: _JobWatch) -> bool:
        """Whether the hosts were looked at together, and after the last look.

        Who waits for whom is read off counters of two processes: where one was looked at later, it seems to be ahead, and what it
        has sent seems to be under way. (What lies between the samples of one look at a host is ``moments``' business.)
        """
        begun: dict[str, int] = {}
        for member in job.members:
            if not member.gone:
                begun[member.info.host] = min(member.last.wall_ns, begun.get(member.info.host, member.last.wall_ns))
        times = list(begun.values())
        if not times or min(times) <= watch.looked_ns:
            return False
        allowed_s = max(SPREAD_S, SPREAD_SHARE * (watch.iterations.duration or 0.0))
        if max(times) - min(times) > allowed_s * 1e9:
            return False
        watch.looked_ns = min(times)
        return True

    def _follow_iterations(self, job: Job, watch: _JobWatch) -> None:
        cadence = None
        if watch.reference is not None:
            cadence = self.cadences.find(*watch.reference)
        members = {(m.info.host, m.info.pid): m for m in job.members}
        if cadence is None or not cadence.iterations or watch.reference not in members:
            for place in members:
                found = self.cadences.find(*place)
                if found is not None and len(found.iterations) >= 2:
                    cadence, watch.reference = found, place
                    break
        if cadence is None or cadence.is_beat or watch.reference not in members:
            return
        if cadence.generation != watch.generation:
            watch.iterations, watch.generation = IterationWatch(), cadence.generation
        sample = members[watch.reference].last
        watch.offset_s = (sample.wall_ns - sample.time_ns) / 1e9
        watch.iterations.feed(list(cadence.iterations), _at_hand(cadence, job, watch.reference[0]))

    def _judge(self, job: Job, watch: _JobWatch, slow: SlowDown | None, topology: Topology | None) -> None:
        if slow is None and watch.was_slow:
            # What was seen while the job was slow is no picture of it now; what was seen before is.
            kept = [look for look in watch.looks if look.time < watch.slow_since]
            watch.looks.clear()
            watch.looks.extend(kept)
            watch.pending.clear()
            watch.standing, watch.repeated, watch.missing = None, 0, 0
            watch.was_slow = False
            watch.usual.clear()
            return
        watch.was_slow = slow is not None
        processes = [member.info.key for member in job.members]
        looks = list(watch.looks)
        since = looks[0].time
        before = None
        if slow is not None:
            since = watch.slow_since = slow.since + watch.offset_s
            began = watch.iterations.recent[0][0].begin + watch.offset_s
            earlier = [look for look in looks if began <= look.time < since]
            looks = [look for look in looks if look.time >= since]
            before = add_up(earlier, processes) if len(earlier) >= 4 else None
        profile = add_up(looks[-WINDOW_LOOKS:], processes)
        factors, extras = self._factors(job, slow)
        equal = equals(job, topology, self.cadences)
        alike = equals(job, topology, self.cadences, by_means=False) if slow is not None else None
        lateness = self._lateness(job, watch, slow, alike) if slow is not None and alike is not None else None
        skew = self._skew(job, watch, slow) if slow is not None else None
        if slow is not None and skew is not None and lateness is not None and self.ledger is not None:
            skew = without_partners(job, self.ledger, skew, lateness, slow.lost_share)
        context = Context(
            equal=equal,
            host=hosts(job),
            factor=factors,
            lost=slow.lost_share if slow is not None else None,
            stretch=1.0 + slow.ratio if slow is not None else 1.0,
            before=before,
            noise=watch.iterations.baseline.spread / watch.iterations.baseline.normal if slow is not None else 1.0,
            late=skew.joined(lateness) if lateness is not None and skew is not None else lateness,
            unseen=skew.waits if skew is not None else None,
            node=nodes(job),
            alike=alike,
            replica=replicas(job, topology),
            delayed=watch.round_trips.delayed(since, slow.lost_share * slow.mean_s) if slow is not None else frozenset(),
            exposed=np.array([only_network(member) for member in job.members], np.bool_),
        )
        findings = find(profile, context) if profile.looks and not _pauses(watch, slow) else []
        named = _named(findings)
        stood = _named(watch.standing.findings) if watch.standing is not None else frozenset()
        watch.repeated = watch.repeated + 1 if findings and named == watch.named else 1 if findings else 0
        watch.named = named
        duration = slow.mean_s if slow is not None else watch.iterations.duration
        # A culprit beside another may be missed by a few looks.
        if watch.repeated >= CONFIRMED and not (named < stood and watch.missing < FORGIVEN - 1):
            watch.missing = 0
            stands_since = watch.standing.since if watch.standing is not None else since
            gpus = watch.gpus
            starts = gpus.starts(since)
            late = {member.info.key: starts[member.index] for member in job.members if member.index in starts}
            watch.standing = Judgement(
                findings, profile, context, slow, stands_since, duration, factors, extras,
                late, bool(gpus.kept), gpus.clocks_text(job), tuple(watch.paths.lines(job, since, topology)),
                watch.paths.costs(since), watch.paths.problem,
            )  # fmt: skip
        elif watch.standing is not None:
            watch.missing = 0 if stood <= named else watch.missing + 1
            if watch.missing >= FORGIVEN:
                watch.standing = None
                watch.missing = 0

    def _lateness(self, job: Job, watch: _JobWatch, slow: SlowDown, equal: NDArray[np.int64]) -> Lateness:
        """Hosts that begin iterations late since the job is slow."""
        cadences = [self.cadences.find(member.info.host, member.info.pid) for member in job.members]
        keys = [member.info.key for member in job.members]
        usual = np.array([watch.usual.get(key, math.nan) for key in keys]) if watch.usual else None
        found = measure(cadences, _on_own_clocks(job, slow.since + watch.offset_s), slow.normal_s, equal, usual)
        if found.usual is not None:
            watch.usual = dict(zip(keys, found.usual.tolist(), strict=True))
        return found

    def _skew(self, job: Job, watch: _JobWatch, slow: SlowDown) -> Skew | None:
        """Hosts that call later than their fellows on the node since the job is slow.

        Not in large jobs: of each rank the ledger then keeps less than three iterations.
        """
        if self.ledger is None or len(job.members) > CHEAP_RANKS:
            return None
        since = _on_own_clocks(job, slow.since + watch.offset_s)
        return measure_skew(job, self.ledger, self.totals, since, slow.normal_s, slow.mean_s, slow.lost_share)

    def _factors(self, job: Job, slow: SlowDown | None) -> tuple[Shares, Shares]:
        """How much longer each rank's stretches of work last than in its first iterations, and what is added to each call (s)."""
        size = len(job.members)
        factors, extras = np.full(size, math.nan), np.full(size, math.nan)
        if slow is None:
            return factors, extras
        for at, member in enumerate(job.members):
            cadence = self.cadences.find(member.info.host, member.info.pid)
            if cadence is None or not cadence.baseline or not cadence.profiles:
                continue
            now = [
                p for p, i in zip(reversed(cadence.profiles), reversed(cadence.iterations), strict=False) if i.begin >= slow.since
            ]
            past = [p for p in cadence.baseline if len(p) and p[-1] <= 1.1 * slow.normal_s]
            if len(now) >= 2 and len(past) >= 2:
                factors[at], extras[at] = slope(np.diff(mean_profile(past)), np.diff(mean_profile(now)))
        return factors, extras


def _pauses(watch: _JobWatch, slow: SlowDown | None) -> bool:
    """Whether iterations are long because the whole job does nothing for a while in each: who is seen beside that is not why."""
    if slow is None:
        return False
    since = max(slow.since + watch.offset_s, watch.begun_s)
    idle_s = sum(end - begin for begin, end in watch.idle if begin >= since)
    return idle_s >= IDLE_EXPLAINS * slow.lost_share * max(0.0, watch.judged_s - since) > 0


def _named(findings: Iterable[Finding]) -> frozenset[object]:
    """Whom findings name, and for which side of the work."""
    return frozenset((finding.kind.computes, finding.members) for finding in findings)


def _on_own_clocks(job: Job, wall_s: float) -> list[float]:
    """A moment of the wall clock as seconds on the clock of each process's records."""
    return [wall_s - (member.last.wall_ns - member.last.time_ns) / 1e9 for member in job.members]


def _at_hand(cadence: Cadence, job: Job, host: str) -> Iteration | None:
    """The iteration that a process is in. Calls are known until the first sample of a look: they are taken just before it."""
    since = cadence.open_since
    until = min((m.last.time_ns for m in job.members if m.info.host == host and not m.gone), default=0) / 1e9
    return None if since is None or until <= since else Iteration(since, until, 0)
