"""Watch running jobs for slowness: keeps iteration times and samples, and says who is to blame once that has repeated."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.job import Job
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.engine.network import NetworkMemory
from ncclwatch.engine.slow import explain
from ncclwatch.engine.slow.attribute import find
from ncclwatch.engine.slow.cadence import Cadence, Cadences, Iteration, mean_profile
from ncclwatch.engine.slow.critical_path import Paths
from ncclwatch.engine.slow.detect import IterationWatch, SlowDown
from ncclwatch.engine.slow.findings import Context, Finding, equals, hidden_together, hosts, nodes
from ncclwatch.engine.slow.gpu_operations import Start, numbering
from ncclwatch.engine.slow.lateness import Lateness, Skew, measure, measure_skew, slope, without_partners
from ncclwatch.engine.slow.profile import Profile, Shares, add_up
from ncclwatch.engine.slow.round_trips import FlowPlace, RoundTrips
from ncclwatch.engine.slow.snapshot import Look, StageOf, near, take_look
from ncclwatch.engine.topology.model import Topology
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.verdict import Verdict, VerdictClass

KEPT_SAMPLES = 240
"""Bound: samples of a job that are kept: four minutes of one a second."""
WINDOW_SAMPLES = 120
"""Bound: the newest of a slow-down that are judged; who is at fault may change."""
PENDING_SAMPLES = 10
"""Bound: samples since the job last made progress that are kept until it goes on."""
CHEAP_RANKS = 512
"""Bound: above this many ranks a sample is taken only every so many rounds that they cost no more than at this size."""
SPREAD_S, SPREAD_SHARE = 0.1, 0.1
"""Seconds, and share of an iteration: samples of different hosts further apart in time are none of one moment.
Unit: as said. From: chosen.
"""
CONFIRMED = 2
"""Judgements in a row that must name the same before it is reported: one may rest on a single odd sample. Unit: judgements. From:
calibration judges by it, so that the false-alarm rate holds with it.
"""
FROM_START = 5
"""Judgements in a row that must agree where nothing is slower than before: each follows progress of its own, so that one long
standstill does not name whoever it stands at. Unit: judgements. From: of four equals all stand at the same by chance in 1 of 256
jobs.
"""
WITHDRAWN = 5
"""Judgements without a culprit after which it is named no longer while the job is still slow. Unit: judgements, one a second.
From: chosen, as long as a hang's floor: a culprit may be missed by a few samples.
"""
MEANWHILE_S, MEANWHILE_MOST_S = 5.0, 60.0
"""So long after its last progress (an iteration's length, where that is more, and the second at most) a job that is slow is still
said to be: then it may hang, or have come to its end. Unit: seconds. From: the floor of a hang, and a minute of rest.
"""


@dataclass(slots=True)
class Judgement:
    """What is behind a verdict of slowness."""

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
    """What is kept of one job. Memory: ``KEPT_SAMPLES`` samples and the healthy iterations."""

    iterations: IterationWatch = field(default_factory=IterationWatch)
    reference: tuple[str, int] | None = None
    generation: int = 0
    offset_s: float = 0.0
    """Wall clock minus monotonic clock of the reference's node."""
    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    pending: deque[Look] = field(default_factory=lambda: deque(maxlen=PENDING_SAMPLES))
    """Samples since the job last made progress."""
    idle: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    """From when to when nothing was open on any rank, between two samples each; wall time."""
    judged_s: float = 0.0
    """Wall time of the verdict before; ``begun_s``: of the first."""
    begun_s: float = 0.0
    ran_s: float = 0.0
    """Wall time of the last verdict that it runs."""
    looked_ns: int = 0
    """Time of the oldest part of the last sample."""
    rounds: int = 0
    named: frozenset[object] = frozenset()
    repeated: int = 0
    missing: int = 0
    slow_since: float | None = None
    """Wall time; ``None`` while the job is not slow."""
    usual: dict[ProcessKey, float] = field(default_factory=dict)
    """When each process usually begins an iteration, as of :class:`Lateness`, from before the job was slow."""
    standing: Judgement | None = None
    paths: Paths = field(default_factory=Paths)
    round_trips: RoundTrips = field(default_factory=RoundTrips)
    numbered: tuple[ProcessKey, ...] = ()
    """The members, as ``paths`` numbers them."""

    def idle_share(self, since: float, lost: float) -> float:
        """Part of the lost time since a moment (wall) in which nothing was open on any rank, 0 to 1."""
        since = max(since, self.begun_s)
        idle_s = sum(end - begin for begin, end in self.idle if begin >= since)
        lost_s = lost * max(0.0, self.judged_s - since)
        return min(1.0, idle_s / lost_s) if lost_s > 0 else 0.0


Observer = Callable[[Job, Sequence[Look], Profile, Context], None]
"""(job, all samples that are kept of it, what is weighed) is told before it is."""


class SlowWatch:
    """Slowness of every job among the observed processes. A pure function of what it is fed; no clock is read."""

    def __init__(self) -> None:
        self.cadences = Cadences()
        self.ledger: Ledger | None = None
        """What was called, lined up across ranks; without it nothing is told of what NVLink joins."""
        self.totals: Mapping[Place, tuple[int, int]] = {}
        self.delays: Mapping[str, tuple[int, Mapping[FlowPlace, float]]] = {}
        """What the wire says of connections, as of :meth:`NetworkMemory.delays`."""
        self.network: NetworkMemory | None = None
        """What the nodes last said of their network, for a rule that judges by it."""
        self.observer: Observer | None = None
        """Told of everything that is weighed, for calibration; it changes nothing."""
        self._jobs: dict[ProcessKey, _JobWatch] = {}

    def add_calls(self, events: NDArray[Any], lost: int = 0, source: str = "") -> None:
        """Take a batch of call records of one node."""
        self.cadences.add_calls(events, lost, source)

    def judge(
        self, job: Job, verdict: Verdict, topologies: Sequence[Topology] = (), stage_of: StageOf | None = None
    ) -> Verdict:  # fmt: skip
        """Take the newest samples of a job and the verdict on whether it hangs; a job that runs may be slow instead.

        A sample between two steps of progress counts once the job goes on; what is seen of a hang teaches nothing. ``topologies``
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
        due = self._take_samples(job, watch, stage_of)
        if verdict.verdict_class is not VerdictClass.RUNNING:
            return self._meanwhile(job, watch, verdict, topology)
        watch.ran_s = watch.judged_s
        slow = watch.iterations.slow_down()
        if due:
            watch.looks.extend(watch.pending)
            watch.pending.clear()
            self._judge(job, watch, slow, topology)
        if watch.standing is not None and not explain.holds(job, watch.standing):
            watch.standing = None
        if watch.standing is None:
            return verdict if slow is None else explain.unlocated(job, verdict, slow)
        return explain.verdict(job, watch.standing, topology)

    def _take_samples(self, job: Job, watch: _JobWatch, stage_of: StageOf | None) -> bool:
        """Take what the newest samples show of a job's iterations, links, GPUs and waits; whether it is to be judged."""
        watch.rounds += 1
        self._follow_iterations(job, watch)
        if len(job.members) <= CHEAP_RANKS:
            watch.round_trips.take(job, self.delays)
            numbered = numbering(job)
            if numbered != watch.numbered:
                watch.paths, watch.numbered = Paths(), numbered
            cadences = [self.cadences.find(member.info.host, member.info.pid) for member in job.members]
            watch.paths.take(job, cadences, watch.iterations.limit())
        every = -(-len(job.members) // CHEAP_RANKS)
        slow = watch.iterations.slow is not None
        due = watch.rounds % every == 0 or (slow and watch.rounds % max(1, every // 4) == 0)
        due = due and self._shows_one_moment(job, watch)
        if due:
            watch.pending.append(take_look(job, self.cadences.orders.find, near(watch.iterations.duration), stage_of))
        return due

    @staticmethod
    def _meanwhile(job: Job, watch: _JobWatch, verdict: Verdict, topology: Topology | None) -> Verdict:
        """What was said of a slow job, for a moment in which it does not move and does not hang: it pauses in every iteration."""
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
        """Whether the hosts were sampled together, and after the last sample.

        Who waits for whom is read off counters of two processes: where one was read later, it seems to be ahead, and what it has
        sent seems to be under way. (What lies between the samples of one round on a host is ``moments``' business.)
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
        """Attribute what the samples show; what has repeated is reported."""
        since = slow.since + watch.offset_s if slow is not None else None
        if watch.slow_since is not None and since is None:
            # What was seen while the job was slow is no picture of it now; what was seen before is.
            kept = [look for look in watch.looks if look.time < watch.slow_since]
            watch.looks.clear()
            watch.looks.extend(kept)
            watch.standing, watch.repeated, watch.missing, watch.slow_since = None, 0, 0, None
            watch.usual.clear()
            return
        watch.slow_since = since
        processes = [member.info.key for member in job.members]
        looks = [look for look in watch.looks if since is None or look.time >= since]
        before = None
        if since is not None:
            began = (watch.iterations.began() or 0.0) + watch.offset_s
            before = add_up([look for look in watch.looks if began <= look.time < since], processes)
        profile = add_up(looks[-WINDOW_SAMPLES:], processes)
        factors, extras = self._factors(job, slow)
        context = self._context(job, watch, slow, topology, before, factors)
        if self.observer is not None:
            self.observer(job, watch.looks, profile, context)
        findings = find(profile, context)
        self._report(job, watch, findings, Judgement(
            findings, profile, context, slow, since if since is not None else (looks[0].time if looks else watch.judged_s),
            slow.mean_s if slow is not None else watch.iterations.duration, factors, extras,
        ), topology)  # fmt: skip

    def _report(
        self, job: Job, watch: _JobWatch, findings: Sequence[Finding], judgement: Judgement, topology: Topology | None
    ) -> None:
        """Keep what was found often enough in a row as what is said; withdraw what was not found for a while."""
        named = frozenset((finding.kind.computes, finding.members) for finding in findings)
        said = frozenset((f.kind.computes, f.members) for f in watch.standing.findings) if watch.standing else frozenset()
        watch.repeated = watch.repeated + 1 if findings and named == watch.named else 1 if findings else 0
        watch.named = named
        enough = CONFIRMED if judgement.slow is not None or watch.standing is not None else FROM_START
        # A culprit beside another may be missed by a few samples.
        if watch.repeated >= enough and not (named < said and watch.missing < WITHDRAWN - 1):
            watch.missing = 0
            gpus = watch.paths.gpus
            judgement.starts = {job.members[at].info.key: start for at, start in gpus.starts(job, judgement.since).items()}
            judgement.timed, judgement.clocks = bool(len(gpus.rows)), watch.paths.analysis.clocks.text()
            judgement.paths = tuple(watch.paths.lines(job, judgement.since, topology))
            judgement.path_costs, judgement.no_path = watch.paths.costs(judgement.since), watch.paths.problem
            if watch.standing is not None:
                judgement.since = watch.standing.since
            watch.standing = judgement
        elif watch.standing is not None:
            watch.missing = 0 if said <= named else watch.missing + 1
            if watch.missing >= WITHDRAWN:
                watch.standing, watch.missing = None, 0

    def _context(
        self, job: Job, watch: _JobWatch, slow: SlowDown | None, topology: Topology | None, before: Profile | None,
        factors: Shares,
    ) -> Context:  # fmt: skip
        """What is known of a job besides the samples since it is slow."""
        equal = equals(job, topology, self.cadences)
        context = Context(
            equal, hosts(job), lost=None, node=nodes(job), hidden=hidden_together(job),
        )  # fmt: skip
        if slow is None:
            return context
        alike = equals(job, topology, self.cadences, by_means=False)
        late, skew = self._lateness(job, watch, slow, alike), self._skew(job, watch, slow)
        if skew is not None and self.ledger is not None:
            skew = without_partners(job, self.ledger, skew, late, slow.lost_share)
        since = slow.since + watch.offset_s
        return replace(
            context, lost=slow.lost_share, before=before, alike=alike, factor=factors,
            late=skew.joined(late) if skew is not None else late,
            unseen=skew.waits if skew is not None else None,
            delayed=watch.round_trips.delayed(since),
            idle=watch.idle_share(since, slow.lost_share),
        )  # fmt: skip

    def _lateness(self, job: Job, watch: _JobWatch, slow: SlowDown, equal: NDArray[np.int64]) -> Lateness:
        """Host threads that begin iterations late since the job is slow."""
        cadences = [self.cadences.find(member.info.host, member.info.pid) for member in job.members]
        keys = [member.info.key for member in job.members]
        usual = np.array([watch.usual.get(key, math.nan) for key in keys]) if watch.usual else None
        found = measure(cadences, _on_own_clocks(job, slow.since + watch.offset_s), slow.normal_s, equal, usual)
        if found.usual is not None:
            watch.usual = dict(zip(keys, found.usual.tolist(), strict=True))
        return found

    def _skew(self, job: Job, watch: _JobWatch, slow: SlowDown) -> Skew | None:
        """Host threads that call later than their peers on the node since the job is slow.

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


def _on_own_clocks(job: Job, wall_s: float) -> list[float]:
    """A moment of the wall clock as seconds on the clock of each process's records."""
    return [wall_s - (member.last.wall_ns - member.last.time_ns) / 1e9 for member in job.members]


def _at_hand(cadence: Cadence, job: Job, host: str) -> Iteration | None:
    """The iteration that a process is in. Calls are known until the first sample of a round: they are taken just before it."""
    since = cadence.open_since
    until = min((m.last.time_ns for m in job.members if m.info.host == host and not m.gone), default=0) / 1e9
    return None if since is None or until <= since else Iteration(since, until, 0)
