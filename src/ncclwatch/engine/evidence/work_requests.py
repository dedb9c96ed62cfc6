"""What work requests show: of a job that stands, whether anything was posted, completed and asked for; of one that runs, links
that carry less, or later, than they did under load.

Counts are of moments (:mod:`ncclwatch.model.work`): a flow that was not seen since the job stands says nothing. What NCCL has
handed to the network and not got back is read from its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import nan
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from ncclwatch.engine.evidence.base import Fact, FactKind, LinkNode, Source, Strength
from ncclwatch.model.job import Group, Job, Member
from ncclwatch.model.network import FlowRecord, FlowState
from ncclwatch.model.state import Direction, OpPhase, ProxySub, Transport
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow, added
from ncclwatch.text import compressed

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

SEEN_S = 0.01
"""Unit: s; of a flow that was seen for less since the job stands nothing is said. From: a completion over RDMA takes microseconds
to a few milliseconds, and a proxy that runs asks for it thousands of times in so long.
"""
DROP = 0.2
"""Fact: MegaTrace, III-C and IV: m, the part of a flow's own throughput by which a larger drop is the network's."""
LATER_TIMES = 2.0
"""Unit: times a flow's own time from post to completion. From: as wire/socket_flows takes a round trip for a second witness."""
RECENT, PAST = 4, 8
"""Bound: windows whose median is what a flow does now, and the fewest before them that say what it used to do."""


class Shows(StrEnum):
    """What the counts of a flow come to, as the clause that ends its line."""

    NOTHING_POSTED = "nothing is posted, and nothing is there to post: it waits for something before the network"
    NO_RECEIVES = "nothing is posted, for the other end has no receive open"
    NOT_POSTED = "nothing is posted although data and a receive are there"
    NOT_COMPLETED = "what was posted does not complete: the network, or the adapter at the other end"
    NOT_TAKEN = "nobody asks for the completions of what was posted: its proxy thread"
    NOTHING_RECEIVED = "receives are posted, and nothing arrives"
    NOT_RECEIVED = "receives are posted, and nobody asks for what has arrived: its proxy thread"
    FAILED = "requests ended with an error"
    SLOWED = "it carries less than it did under load"
    LATER = "what is posted completes later than it did"
    ALIVE = "the path is alive"
    PEER = "the path is alive, and the process at its end does not receive"
    NO_PATH = "the path is dead: the network, or the adapter at the other end"


BY_PROXY = frozenset({Shows.NOT_TAKEN, Shows.NOT_RECEIVED})
"""That the proxy thread of the flow's own rank stands still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFact(Fact):
    """What flows of a rank (``owner``) with a ``peer``, indices of processes, show; ``value``: times what it was."""

    kind: FactKind = FactKind.WORK
    shows: Shows
    owner: int | None = None
    peer: int | None = None
    global_rank: int | None = None


class WorkRequests(Source):
    """Work requests of RDMA, counted at the verbs; of sockets what they carried under load."""

    kinds = frozenset({FactKind.WORK})

    def facts(self, case: Case) -> Iterator[WorkFact]:
        """Of a job that stands what its flows and probes show since; without one, flows that have become slow. O(windows)."""
        hosts = [(host, known.work) for host, known in sorted(case.known.network.hosts.items()) if known.work]
        if not case.job.members:
            for _, work in hosts:
                yield from _slowed(work.values())
        elif case.still:
            yield from _probed(case)
            for host, work in hosts:
                found: dict[tuple[int, int, int, Direction], tuple[_Way, list[FlowWindow]]] = {}
                for kept in work.values():
                    # Of a socket the kernel counts no requests, and a port or peer has several queue pairs.
                    counted = kept[-1].scope is Scope.FLOW and kept[-1].work.counting is not Counting.TCP
                    way = _way(case.job, host, kept[-1]) if counted else None
                    since = [window for window in kept if way is not None and _is_since(case, way.member, window)]
                    if way is not None and since:
                        # How often the process asks for completions is mostly known of an order alone.
                        newest = max(since, key=lambda one: (one.work.errors, one.work.polls is not None, one.work.end_ns))
                        key = way.group.id, way.member.index, way.peer, way.direction
                        found.setdefault(key, (way, []))[1].append(newest)
                for way, windows in found.values():
                    yield from _standing(case.job, way, windows)

    def coverage(self, case: Case) -> Iterator[str]:
        """Processes whose flows were not counted since the job stands, where those of others were."""
        counted, missing = 0, 0
        hosts = {host: [kept[-1] for kept in known.work.values()] for host, known in case.known.network.hosts.items()}
        for member in case.job.members if case.still and any(hosts.values()) else ():
            newest = hosts.get(member.info.host, ())
            seen = any(one.pid == member.info.pid and _is_since(case, member, one) for one in newest)
            uses = any(transport is Transport.NET for own in member.last.communicators for *_, transport in own.transports)
            counted, missing = counted + seen, missing + (uses and not seen)
        if counted and missing:
            yield f"work requests of {missing} process{'es' if missing != 1 else ''} since the job stands: they were not counted"


# --- a job that stands -------------------------------------------------------------------------------------------------


class _Way(NamedTuple):
    """The flows of a rank to a peer of its communicator, or from it."""

    group: Group
    member: Member
    own: int
    peer: int
    direction: Direction

    @property
    def sends(self) -> bool:
        return self.direction is Direction.SEND

    def fact(self, shows: Shows, strength: Strength, ends: tuple[int, int], describe: Callable[[], str]) -> WorkFact:
        far = self.group.holder(self.peer)
        return WorkFact(
            subject=LinkNode(self.group.id, *ends), shows=shows, strength=strength, owner=self.member.index,
            peer=far.index if far is not None else None, global_rank=self.member.rank, describe=describe,
        )  # fmt: skip


def _way(job: Job, host: str, flow: FlowWindow | FlowRecord) -> _Way | None:
    if flow.comm_hash is None or flow.rank is None or flow.peer is None or flow.direction is None:
        return None
    group = next(job.of_rank(flow.comm_hash, flow.rank, (host, flow.pid)), None)
    return _Way(group, group.members[flow.rank][0], flow.rank, flow.peer, flow.direction) if group is not None else None


def _probed(case: Case) -> Iterator[WorkFact]:
    """What probes found on paths that stand still; on one that is alive, with a full window, the peer does not receive."""
    told: set[tuple[object, ...]] = set()
    for host, flow, answer in case.known.network.probes(case.job, case.still):
        way = _way(case.job, host, flow)
        key = (way.group.id, way.own, way.peer, answer.alive) if way is not None else ()
        if way is None or key in told:
            continue
        told.add(key)
        shows = Shows.NO_PATH if not answer.alive else Shows.PEER if flow.state is FlowState.BLOCKED else Shows.ALIVE
        strength = Strength.PROVEN if answer.alive else Strength.LIKELY
        trip = f", {answer.round_trip_us:,.0f} µs" if answer.round_trip_us is not None else ""
        by = "zero-payload writes" if answer.kind == "rdma" else "TCP"
        path = f"{way.member.label} to {case.job.rank_name(way.group.id, way.peer)}"
        text = f"{path}: a probe of ours ({by}{trip}) says {answer.answer}: {answer.detail}: {shows}"
        yield way.fact(shows, strength, (way.own, way.peer), partial(str, text))


def _is_since(case: Case, member: Member, window: FlowWindow) -> bool:
    """Whether all that was seen of a window lies in the standstill: both times are of the member's own clock."""
    work = window.work
    began_ns = member.last.time_ns - int(case.still * 1e9)
    return work.seen_s >= SEEN_S and work.end_ns - int(work.seen_s * 1e9) >= began_ns


def _standing(job: Job, way: _Way, windows: Sequence[FlowWindow]) -> Iterator[WorkFact]:
    work = added(window.work for window in windows)
    shows = _shows(job, way, work) if work is not None else None
    if work is not None and shows is not None:
        ends = (way.own, way.peer) if way.sends else (way.peer, way.own)
        # That nobody of a process asks is certain; who of it does is not known: another communicator's proxy may.
        strength = Strength.PROVEN if work.counting is Counting.EXACT or shows in BY_PROXY else Strength.LIKELY
        yield way.fact(shows, strength, ends, partial(_text, job, way, windows, work, shows))


def _shows(job: Job, way: _Way, work: WorkWindow) -> Shows | None:
    """What counts show, with the steps that NCCL has handed to the network; ``None`` where they move, or tell nothing."""
    if work.errors:
        return Shows.FAILED
    if work.completed if way.sends else work.received:
        return None
    subs = _subs(job, way.group, way.member, way.peer, way.direction)
    if not way.sends:
        if work.polls is None or not any(sub.posted > (sub.received if work.polls else sub.transmitted) for sub in subs):
            return None
        return Shows.NOTHING_RECEIVED if work.polls else Shows.NOT_RECEIVED
    if work.posted or work.in_flight or any(sub.transmitted > sub.done for sub in subs):
        return None if work.polls is None else Shows.NOT_COMPLETED if work.polls else Shows.NOT_TAKEN
    if not any(sub.gpu_ready is not None and min(sub.gpu_ready, sub.nsteps) > sub.transmitted for sub in subs):
        return Shows.NOTHING_POSTED
    if (far := way.group.holder(way.peer)) is None:
        return None
    open_there = any(sub.posted > sub.received for sub in _subs(job, way.group, far, way.own, Direction.RECV))
    return Shows.NOT_POSTED if open_there else Shows.NO_RECEIVES


def _subs(job: Job, group: Group, member: Member, peer: int, direction: Direction) -> list[ProxySub]:
    kind = Transport.NET, direction, OpPhase.PROGRESS
    running = [one for one in member.last.operations if (one.transport, one.direction, one.phase) == kind]
    of_group = [one for one in running if job.find_group(member, one.comm_address, one.comm_hash) == group.id]
    return [sub for one in of_group for sub in one.subs if sub.peer == peer]


def _text(job: Job, way: _Way, windows: Sequence[FlowWindow], work: WorkWindow, shows: Shows) -> str:
    device = "/".join(sorted({window.device for window in windows} - {""}))
    pairs = compressed(sorted({window.queue_pair for window in windows}))
    where = f"{device} queue pair{'s' if len(windows) > 1 else ''} {pairs}".strip()
    counts = f"{work.posted or 0} posted, {work.completed or 0} completed"
    if not way.sends:
        counts = f"{work.receives_posted or 0} receives posted, {work.received or 0} received"
    flying = f", {work.in_flight} in flight for {work.oldest_s:.1f} s" if work.in_flight and work.oldest_s is not None else ""
    asked = f", asked {work.polls:,} times" if work.polls is not None else ""
    ordered = "ordered, " if work.counting is Counting.ORDER else ""
    other = f"{'to' if way.sends else 'from'} {job.rank_name(way.group.id, way.peer)} ({where})"
    seen = f"in {work.seen_s:.2g} s ({ordered}while the job stands)"
    return f"{way.member.label} {other}: {counts}{flying}{asked} {seen}: {shows}"


# --- a job that runs ---------------------------------------------------------------------------------------------------


def _slowed(flows: Iterable[Sequence[FlowWindow]]) -> Iterator[WorkFact]:
    """Flows with a peer that carry less under load than they did, or whose requests complete later (MegaTrace III-B, IV)."""
    for windows in flows:
        flow = windows[-1]
        loaded = [window.work for window in windows if window.work.posted_bytes and window.work.in_flight != 0]
        if flow.scope is not Scope.PEER or len(loaded) < RECENT + PAST or loaded[-1] is not flow.work:
            continue
        who = f"rank {flow.global_rank}" if flow.global_rank is not None else f"pid {flow.pid}"
        who += f" to rank {flow.peer} of communicator {flow.comm_hash or 0:016x}"
        made = partial(WorkFact, subject=None, strength=Strength.LIKELY, global_rank=flow.global_rank)
        doubt = max((work.uncertainty for work in loaded[-RECENT:] if work.uncertainty is not None), default=0.0)
        now, before = _medians([work.throughput for work in loaded])
        at_most = now * (1 + 2 * doubt)
        if before - at_most > DROP * before:
            text = f"{who}: {Shows.SLOWED}: {now / 1e6:,.0f} MB/s of {before / 1e6:,.0f} MB/s"
            yield made(shows=Shows.SLOWED, value=now / before, describe=partial(str, text))
        now, before = _medians([work.latency_p50_ns for work in loaded])
        if now >= LATER_TIMES * before:
            text = f"{who}: {Shows.LATER}: {now / 1e3:,.0f} µs, {before / 1e3:,.0f} µs before"
            yield made(shows=Shows.LATER, value=now / before, describe=partial(str, text))


def _medians(values: Sequence[float | None]) -> tuple[float, float]:
    """What it is now and what it was; nan for both where too little is known of either."""
    now, before = ([value for value in part if value is not None] for part in (values[-RECENT:], values[:-RECENT]))
    if len(now) < RECENT or len(before) < PAST or not median(before):
        return nan, nan
    return median(now), median(before)
