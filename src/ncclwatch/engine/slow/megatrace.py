"""MegaTrace's check of the network, as published (III-B 2 and III-C): what work requests say of a job's flows, and nothing else.

A flow's throughput is the slope of its cumulative bytes over its last w = 64 completions (equation 1); a drop of more than
m = 20 % below its running average flags the network at once. Requests in flight while nothing completes are a hang of the
network. Computation, which the paper finds by critical paths, is not judged: this mode tells what the wire plane alone tells.

Windows come by bursts, orders or exact counts (:mod:`ncclwatch.model.work`). Of sockets the bytes that a connection carried over
the time in which it had something to send stand for the slope. What no window shows says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ncclwatch.engine.job import Group, Job
from ncclwatch.engine.slow.mode import Mode, Sample
from ncclwatch.model.verdict import Culprit, LinkRef, Verdict, VerdictClass
from ncclwatch.model.work import Counting, FlowWindow, Scope

DROP = 0.2
"""Fact: MegaTrace, III-C: m, the drop of bandwidth below what is expected that flags the network."""
STALL_S = 0.5
"""Fact: MegaTrace, IV: the guardband of a timeout, 500 ms."""
WARM_UP = 8
"""Bound: windows of a flow before it is judged: the running average leaves out the first iterations (III-C), and does not say how
many.
"""
TOLD = 8
"""Bound: flagged flows that are told, a line each."""


@dataclass(slots=True)
class _Flow:
    """What one rank sends to one peer: its running average, and how far below it the newest window is."""

    newest: FlowWindow
    seen_ns: int = 0
    windows: int = 0
    average: float = 0.0
    drop: float = 0.0
    stalled_s: float = 0.0
    since: float | None = None
    """Wall time since which it is flagged."""

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


class _Path(NamedTuple):
    """A flow that is flagged, and between which ranks of the group it is."""

    flow: _Flow
    group: Group
    rank: int
    peer: int

    def text(self, job: Job) -> str:
        """What flags it."""
        flow, work = self.flow, self.flow.newest.work
        ends = f"{job.rank_name(self.group.id, self.rank)} to {job.rank_name(self.group.id, self.peer)}"
        if flow.drop:
            now, usual = (work.throughput or 0.0) / 1e6, flow.average / 1e6
            return f"{ends}: {now:,.1f} MB/s over the last completions, {usual:,.1f} on average"
        return f"{ends}: {work.in_flight} in flight, none completed in {work.seen_s:.2g} s, the oldest for {flow.stalled_s:.1f} s"


@dataclass(slots=True)
class MegaTrace(Mode):
    """The check for one job."""

    _flows: dict[tuple[object, ...], _Flow] = field(default_factory=dict)

    def judge(self, sample: Sample) -> Verdict | None:
        """Take the windows that are new and say what is flagged; ``None`` where nothing is. O(windows of the job's hosts)."""
        job, now = sample.job, sample.time
        groups: dict[int, list[Group]] = {}
        for group in job.groups.values():
            groups.setdefault(group.hash, []).append(group)
        flagged = []
        for host in sorted({member.info.host for member in job.members}):
            known = sample.network.hosts.get(host) if sample.network is not None else None
            for place, kept in known.work.items() if known is not None else ():
                ends = _ends(groups, host, kept[-1])
                if ends is None:
                    continue
                flow = self._flows.setdefault(place, _Flow(kept[-1]))
                for window in kept:
                    if window.work.end_ns > flow.seen_ns:
                        flow.take(window, now)
                if flow.flagged:
                    flagged.append(_Path(flow, *ends))
        return _verdict(job, flagged, now) if flagged else None


def _ends(groups: Mapping[int, Sequence[Group]], host: str, window: FlowWindow) -> tuple[Group, int, int] | None:
    """The communicator of this job whose flow it is, its rank there and its peer; a port's windows are of no flow."""
    if window.scope is not Scope.PEER or window.comm_hash is None or window.rank is None or window.peer is None:
        return None
    for group in groups.get(window.comm_hash, ()):
        member = group.holder(window.rank)
        if member is not None and (member.info.host, member.info.pid) == (host, window.pid):
            return group, window.rank, window.peer
    return None


def _verdict(job: Job, flagged: Sequence[_Path], now: float) -> Verdict:
    """The faulty paths that the paper reports to its manager: who has an end of most of them is named, of one path both ends."""
    worst = max(flagged, key=lambda path: (path.flow.stalled_s, path.flow.drop))
    group = worst.group
    ends = Counter(rank for path in flagged if path.group is group for rank in (path.rank, path.peer))
    named = sorted(rank for rank, count in ends.items() if count == max(ends.values()))
    culprits = []
    for rank in named:
        member, reason = group.holder(rank), f"an end of {ends[rank]} of {len(flagged)} flagged paths"
        if member is not None:
            place = member.rank, rank, member.info.host, member.info.pid
            culprits.append(Culprit(*place, None, communicator=group.reference(), reason=reason))
        else:
            culprits.append(Culprit(None, rank, "", None, None, communicator=group.reference(), reason=reason, observed=False))
    what = f"throughput {worst.flow.drop:.0%} below its average" if worst.flow.drop else "requests in flight and none completes"
    return Verdict(
        verdict_class=VerdictClass.SLOW_COMMUNICATION,
        summary=f"MegaTrace: the network at {', '.join(job.rank_name(group.id, rank) for rank in named)}: {what}",
        culprits=tuple(culprits),
        communicator=group.reference(),
        link=LinkRef(worst.rank, worst.peer, "net"),
        since=min(path.flow.since or now for path in flagged),
        time=now,
        confidence=0.5,
        evidence=tuple(path.text(job) for path in flagged[:TOLD]),
        unobserved=("computation: this rule looks at the network alone",),
        planes=("wire",),
    )
