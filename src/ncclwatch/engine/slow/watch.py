"""Watch running jobs for slowness: keeps iteration times and samples, and says who is to blame once that has repeated."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ncclwatch.collect.cadence import Cadences, Iteration
from ncclwatch.collect.ledger import Ledger
from ncclwatch.collect.network_memory import Measured, NetworkMemory
from ncclwatch.engine.conflicts import StageOf
from ncclwatch.engine.patience import HANG_FLOOR_S
from ncclwatch.engine.slow import explain
from ncclwatch.engine.slow.attribute import find
from ncclwatch.engine.slow.classify import Judgement
from ncclwatch.engine.slow.critical_path import Paths
from ncclwatch.engine.slow.detect import IterationWatch, SlowDown
from ncclwatch.engine.slow.findings import CONFIRMED, Context, RoundTrips, context_of, equals
from ncclwatch.engine.slow.lateness import measure, with_calls
from ncclwatch.engine.slow.profile import Profile, add_up
from ncclwatch.engine.slow.snapshot import Look, at_rest, near, take_look
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.job import Job
from ncclwatch.model.joined import ONE_MOMENT_S
from ncclwatch.model.topology import Topology
from ncclwatch.model.verdict import Verdict, VerdictClass

KEPT_SAMPLES = 240
"""Bound: samples of a job that are kept: four minutes of one a second."""
SETTLED_SAMPLES = 60
"""Bound: samples of a healthy job, after which they are taken seldom; a straggler is named by ten that are slow."""
BRIEF_S = 5.0
"""Bound: seconds of slow iterations without more samples: on full cores these would make iterations slow for longer."""
WINDOW_SAMPLES = 120
"""Bound: the newest of a slow-down that are judged; who is at fault may change."""
SEARCHING_SAMPLES = 60
"""Bound: samples of a slow-down after which more are not asked for: the culprit does not show."""
PENDING_SAMPLES = 30
"""Bound: samples since the job last made progress that are kept until it goes on."""
CHEAP_RANKS = 512
"""Bound: above this many ranks a sample is taken only every so many rounds that they cost no more than at this size."""
PERSISTENT = 5
"""Where nothing is slower than before, samples in which a culprit must hold others up, and judgements in a row that must agree;
and judgements without a culprit after which it is named no longer. Unit: samples, judgements. From: of four equals all stand at
the same by chance in 1 of 256 jobs; a healthy job whose first two samples of three stood at one link (85 %).
"""
RESTS_S = 60.0
"""So long after its last progress a job rests: it may have come to its end. Unit: seconds. From: chosen."""


@dataclass(slots=True)
class _JobWatch:
    """What is kept of one job; ``reference``: the process (host, pid) by whose iterations it is judged."""

    iterations: IterationWatch = field(default_factory=IterationWatch)
    reference: tuple[str, int] | None = None
    generation: int = 0
    offset_s: float = 0.0
    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    pending: deque[Look] = field(default_factory=lambda: deque(maxlen=PENDING_SAMPLES))
    """Samples since the job last made progress."""
    idle: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    """From when to when nothing was open on any rank, between two samples each; wall time."""
    begun_s: float = 0.0
    """Wall time of the first verdict, of the last, and of the last that it runs."""
    judged_s: float = 0.0
    ran_s: float = 0.0
    looked_ns: int = 0
    """Time of the oldest part of the last sample."""
    rounds: int = 0
    slow_since: float | None = None
    """Wall time; ``None`` while the job is not slow."""
    usual: dict[ProcessKey, float] = field(default_factory=dict)
    """When each process usually begins an iteration, as of :class:`Lateness`, from before the job was slow."""
    named: frozenset[object] = frozenset()
    """By the last judgement, which ``repeated`` judgements in a row did; ``missing`` did not name all who stand."""
    repeated: int = 0
    missing: int = 0
    standing: Judgement | None = None
    """What is said."""
    paths: Paths = field(default_factory=Paths)
    round_trips: RoundTrips = field(default_factory=RoundTrips)
    rule: Any = None
    """What judges it, where that is another rule than ours (:mod:`ncclwatch.slow_modes`)."""

    def idle_share(self, since: float, lost: float) -> float:
        """Part of the lost time since a moment (wall) in which nothing was open on any rank, 0 to 1."""
        since = max(since, self.begun_s)
        idle_s = sum(end - begin for begin, end in self.idle if begin >= since)
        lost_s = lost * max(0.0, self.judged_s - since)
        return min(1.0, idle_s / lost_s) if lost_s > 0 else 0.0


Observer = Callable[[Job, Sequence[Look], Profile, Context, RoundTrips], None]
"""Is told what is weighed: the job, all samples that are kept of it, what follows, and what its connections were measured at."""


class SlowWatch:
    """Slowness of every job among the observed processes."""

    def __init__(self) -> None:
        self.cadences = Cadences()
        self.ledger: Ledger | None = None
        """Without it nothing is told of what NVLink joins."""
        self.delays: Mapping[str, Measured] = {}
        """What the wire says of connections, as of :meth:`NetworkMemory.delays`."""
        self.network: NetworkMemory | None = None
        self.observer: Observer | None = None
        """For calibration; it changes nothing."""
        self._jobs: dict[ProcessKey, _JobWatch] = {}

    def judge(self, job: Job, verdict: Verdict, topologies: Sequence[Topology] = (), stage_of: StageOf | None = None) -> Verdict:
        """Take the newest samples of a job and the verdict on whether it hangs; a job that runs may be slow instead.

        A sample between two steps of progress counts once the job goes on; what is seen of a hang teaches nothing. ``topologies``
        (of all jobs) name stages and say who does equal work, ``stage_of`` says of a call in which pass it is.
        """
        own = [known for known in topologies if known.by_id.keys() & job.groups.keys()]
        topology = max(own, key=lambda known: len(known.by_id.keys() & job.groups.keys()), default=None)
        watch, idle = self._watch_of(job), verdict.verdict_class is VerdictClass.IDLE
        before_s, watch.judged_s = watch.judged_s, verdict.time or 0.0
        watch.begun_s = watch.begun_s or watch.judged_s
        rests = idle or at_rest(job)
        if rests and before_s:
            watch.idle.append((before_s, watch.judged_s))
        hangs = verdict.verdict_class.accuses and not verdict.verdict_class.slow
        if hangs or idle:
            watch.pending.clear()
            return verdict if hangs else self._meanwhile(job, watch, verdict, topology)
        # While nothing is open nobody is waited for: that says nothing of a straggler.
        due = self._take_samples(job, watch, stage_of) if not rests else False
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
            watch.paths.take(job, self.cadences.of_members(job), watch.iterations.limit())
        every = -(-len(job.members) // CHEAP_RANKS)
        if watch.iterations.slow is not None and watch.rounds % every:
            every = max(1, every // 4)
        due = watch.rounds % every == 0 and self._shows_one_moment(job, watch)
        if due:
            watch.pending.append(take_look(job, self.cadences.orders.find, near(watch.iterations.duration), stage_of))
        return due

    @staticmethod
    def _meanwhile(job: Job, watch: _JobWatch, verdict: Verdict, topology: Topology | None) -> Verdict:
        """What was said of a slow job, for a moment in which it does not move and does not hang: it pauses in every iteration."""
        pause_s = min(max(HANG_FLOOR_S, watch.iterations.duration or 0.0), RESTS_S)
        rests = not verdict.verdict_class.accuses and watch.judged_s - watch.ran_s > pause_s
        if rests or watch.standing is None or not explain.holds(job, watch.standing):
            return verdict
        return explain.verdict(job, watch.standing, topology)

    def pace(self, job: Job) -> tuple[float | None, float | None]:
        """Seconds of an iteration of a job, and the part of it that is lost; ``None`` where not known."""
        iterations = self._watch_of(job).iterations
        slow = iterations.slow_down()
        return (slow.mean_s, slow.lost_share) if slow is not None else (iterations.duration, None)

    def settles(self, job: Job, verdict: Verdict, heard_s: Mapping[str, float]) -> bool:
        """Whether few samples do: the job runs as ever, by calls up to ``heard_s`` (by host) and enough samples, or rests."""
        watch = self._watch_of(job)
        if verdict.verdict_class is VerdictClass.IDLE:
            return watch.judged_s - max(watch.ran_s, watch.begun_s) > RESTS_S
        if verdict.verdict_class is not VerdictClass.RUNNING:
            return False
        self._follow_iterations(job, watch, heard_s)
        iterations, enough = watch.iterations, len(watch.looks) + len(watch.idle) >= SETTLED_SAMPLES
        return enough and iterations.known and iterations.slow_s < BRIEF_S and iterations.far_longer() is None

    def searches(self, job: Job, cost: Mapping[str, float]) -> bool:
        """Whether more samples are wanted: a job is slow, and nobody is named, or who is may not be the only one (a network). Not
        where they take as much of all CPUs of a host (``cost``, 0 to 1) as the job loses: they would keep it slow.
        """
        watch, lost, network = self._watch_of(job), self.pace(job)[1], VerdictClass.SLOW_COMMUNICATION
        told = (said := watch.standing) is not None and said.verdict_class is not network and not said.may_grow
        if (since := watch.slow_since) is None or told or len(job.members) > CHEAP_RANKS or lost is None:
            return False
        looks = sum(look.time >= since for look in watch.looks)
        return looks < SEARCHING_SAMPLES and all(cost.get(member.info.host, 0.0) < lost for member in job.members)

    def forget(self, present: Collection[ProcessKey]) -> None:
        """Forget jobs and processes that are watched no longer."""
        known = set(present)
        self._jobs = {key: watch for key, watch in self._jobs.items() if key in known}

    def _watch_of(self, job: Job) -> _JobWatch:
        keys = [member.info.key for member in job.members]
        return self._jobs.setdefault(next((key for key in keys if key in self._jobs), keys[0]), _JobWatch())

    @staticmethod
    def _shows_one_moment(job: Job, watch: _JobWatch) -> bool:
        """Whether hosts were sampled together, and anew: of two processes the one read later seems to be ahead."""
        begun: dict[str, int] = {}
        for member in job.members:
            if not member.gone:
                begun[member.info.host] = min(member.last.wall_ns, begun.get(member.info.host, member.last.wall_ns))
        first, last = min(begun.values(), default=0), max(begun.values(), default=0)
        # The same share of iterations that take longer than a second.
        allowed_s = ONE_MOMENT_S * max(1.0, watch.iterations.duration or 0.0)
        if first <= watch.looked_ns or last - first > allowed_s * 1e9:
            return False
        watch.looked_ns = first
        return True

    def _follow_iterations(self, job: Job, watch: _JobWatch, heard_s: Mapping[str, float] | None = None) -> None:
        members = {(m.info.host, m.info.pid): m for m in job.members}
        cadence = self.cadences.of.find(*watch.reference) if watch.reference in members else None
        if cadence is None or not cadence.iterations:
            known = ((place, found) for place in members if (found := self.cadences.of.find(*place)) is not None)
            begun = (one for one in known if len(one[1].iterations) >= 2)
            watch.reference, cadence = next(begun, (watch.reference, cadence))
        if cadence is None or watch.reference is None:
            return
        if cadence.generation != watch.generation:
            watch.iterations, watch.generation = IterationWatch(), cadence.generation
        sample = members[watch.reference].last
        watch.offset_s = (sample.wall_ns - sample.time_ns) / 1e9
        # Where nothing else is known, calls are until the first sample of a round: they are taken just before it.
        host = watch.reference[0]
        sampled = min((m.last.time_ns for m in job.members if m.info.host == host and not m.gone), default=0) / 1e9
        since, until = cadence.open_since, (heard_s or {}).get(host, sampled)
        at_hand = Iteration(since, until, 0) if since is not None and until > since else None
        if not cadence.is_inner(until):
            watch.iterations.feed(list(cadence.iterations), at_hand)

    def _judge(self, job: Job, watch: _JobWatch, slow: SlowDown | None, topology: Topology | None) -> None:
        """Attribute what the samples show; what has repeated is reported."""
        standing, long = watch.standing, watch.iterations.far_longer() if slow is None else None
        was_slow = standing is not None and standing.slow is not None
        if long is not None:
            # A rank that does something else for once (a checkpoint) makes one iteration long, too; no network does.
            judgement = self._weigh(job, watch, long, topology)
            judgement.findings = [finding for finding in judgement.findings if not finding.kind.computes]
            if judgement.findings or was_slow:
                self._report(job, watch, judgement, topology)
                return
        if slow is None and (watch.slow_since is not None or was_slow):
            watch.standing, watch.repeated, watch.missing = None, 0, 0
            if watch.iterations.may_go_on is None:
                # What was seen while the job was slow is no picture of it now; what was seen before is.
                watch.looks = deque((look for look in watch.looks if look.time < (watch.slow_since or math.inf)), KEPT_SAMPLES)
                watch.slow_since, watch.usual = None, {}
            return
        watch.slow_since = slow.since + watch.offset_s if slow is not None else None
        if lull := watch.iterations.lull:
            looks = (look for look in watch.looks if not lull[0] <= look.time - watch.offset_s < lull[1])
            watch.looks = deque(looks, KEPT_SAMPLES)
        judgement = self._weigh(job, watch, slow, topology)
        if slow is None:
            judgement.findings = [finding for finding in judgement.findings if finding.looks >= PERSISTENT]
        self._report(job, watch, judgement, topology)

    def _weigh(self, job: Job, watch: _JobWatch, slow: SlowDown | None, topology: Topology | None) -> Judgement:
        """Who may hold the job up, by the samples since it is slow."""
        since = slow.since + watch.offset_s if slow is not None else None
        processes = [member.info.key for member in job.members]
        looks = [look for look in watch.looks if since is None or look.time >= since]
        before = None
        if since is not None:
            began = next((iteration.begin for iteration in watch.iterations.healthy), 0.0) + watch.offset_s
            before = add_up(_before(watch.looks, began, since), processes)
        profile = add_up(looks[-WINDOW_SAMPLES:], processes)
        context = self._context(job, watch, slow, topology, before)
        # Weights are fitted to what is a slow-down for certain; so is what is usual.
        if self.observer is not None and (slow is None or not slow.alone):
            self.observer(job, watch.looks, profile, context, watch.round_trips)
        began_s = since if since is not None else looks[0].time if looks else watch.judged_s
        duration_s = slow.mean_s if slow is not None else watch.iterations.duration
        return Judgement(find(profile, context), profile, context, slow, began_s, duration_s)

    @staticmethod
    def _report(job: Job, watch: _JobWatch, judgement: Judgement, topology: Topology | None) -> None:
        """Keep what was found often enough in a row as what is said; withdraw what was not found for a while."""
        findings, named = judgement.findings, judgement.named
        said = watch.standing.named if watch.standing is not None else frozenset()
        watch.repeated = watch.repeated + 1 if findings and named == watch.named else 1 if findings else 0
        watch.named = named
        enough = CONFIRMED if judgement.slow is not None or watch.standing is not None else PERSISTENT
        # A culprit beside another may be missed by a few samples.
        if watch.repeated >= enough and not (named < said and watch.missing < PERSISTENT - 1):
            watch.missing = 0
            judgement.gpus = watch.paths.told(job, judgement.since, topology)
            if watch.standing is not None:
                judgement.since = watch.standing.since
            watch.standing = judgement
        elif watch.standing is not None:
            watch.missing = 0 if said <= named else watch.missing + 1
            if watch.missing >= PERSISTENT:
                watch.standing, watch.missing = None, 0

    def _context(
        self, job: Job, watch: _JobWatch, slow: SlowDown | None, topology: Topology | None, before: Profile | None
    ) -> Context:
        """What is known of a job besides the samples since it is slow."""
        context = context_of(job, topology, self.cadences)
        if slow is None:
            return context
        alike, since = equals(job, topology, self.cadences, by_means=False), slow.since + watch.offset_s
        # That moment on the clock of each process's records.
        clocks = [since - (member.last.wall_ns - member.last.time_ns) / 1e9 for member in job.members]
        keys, unseen = [member.info.key for member in job.members], None
        usual = np.array([watch.usual.get(key, math.nan) for key in keys]) if watch.usual else None
        late = measure(self.cadences.of_members(job), clocks, slow.normal_s, alike, usual)
        if late.usual is not None and not slow.alone:
            watch.usual = dict(zip(keys, late.usual.tolist(), strict=True))
        # Not in large jobs: of each rank the ledger then keeps less than three iterations.
        if self.ledger is not None and len(job.members) <= CHEAP_RANKS:
            late, unseen = with_calls(late, job, self.ledger, clocks, slow)
        return replace(
            context, lost=slow.lost_share, before=before, alike=alike, late=late, unseen=unseen,
            delayed=watch.round_trips.delayed(since), idle=watch.idle_share(slow.newest + watch.offset_s, slow.lost_share),
        )  # fmt: skip


def _before(looks: Iterable[Look], began: float, since: float) -> list[Look]:
    """Samples of the healthy job between two moments; where they were taken seldom also older ones."""
    earlier = [look for look in looks if look.time < since]
    within, steady = sum(look.time >= began for look in earlier), int(since - began)
    return earlier[len(earlier) - within :] if 2 * within >= steady else earlier[-steady:]
