"""Who waits for whom at one moment of a job that runs: a sampling profile of what the job is held up by.

Over many looks, the share of them in which a rank or link holds others up is the share of time it costs (Mycroft Table 4, applied
to the sampled state). The wait-for graph is that of the hang diagnosis; one thing is added: a rank whose kernel has not begun an
operation that is queued does not wait in it, it still computes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.case import Case
from ncclwatch.engine.connections import amid_rings, laggards
from ncclwatch.engine.edges import PROXY_STALLS, Wait, Why
from ncclwatch.engine.evidence.base import AbsentNode, HiddenNode, LinkNode, Node, RankNode
from ncclwatch.engine.graph import Sink, Waits, victims_of
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.slow.order import Kernels, OrderOf, awaited_inside, read_kernels
from ncclwatch.engine.topology.model import Stage, pass_text
from ncclwatch.gc_pause import collector_at_rest
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Direction, OpPhase, ProcessSample, Transport

NEAR_SHARE = 0.03
"""Samples that are nearer together than this share of an iteration are taken for one moment. Unit: share. From: chosen; less than
the least slow-down.
"""
NEAR_S = 0.02
"""The same where iterations are not known. Unit: seconds. From: chosen."""


class Part(StrEnum):
    """Which part of a rank, or what between ranks, the others wait for."""

    GPU = "computes: its GPU has not begun the operation that is queued"
    HOST = "its host has not called the operation"
    KERNEL = "its communication kernel does not move data that it could"
    PROXY = "its proxy thread does not move data that is ready"
    LINK = "data is under way in the network"
    UNSEEN = "not seen"


@dataclass(frozen=True, slots=True)
class LinkPlace:
    """A link by communicator (``group`` of the job, its hash and size) and communicator ranks, and the processes at its ends."""

    group: int
    comm_hash: int
    nranks: int
    source: int
    destination: int
    sender: ProcessKey | None
    receiver: ProcessKey | None
    channels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Hold:
    """One end of the waits: who or what, and ``weight``, the share of all ranks that it blocks (shared with other ends)."""

    part: Part
    weight: float
    process: ProcessKey | None = None
    link: LinkPlace | None = None
    operation: str = ""
    group: int = 0


class Activity(StrEnum):
    """What a rank does at the moment of a look, as far as its own counters and its peers' say."""

    COMPUTES = "computes"
    """An operation is queued and its kernel has not begun."""
    CALLS_NOTHING = "host"
    """Nothing is queued: the host has not called."""
    WAITS = "waits"
    """Its kernel runs and needs another rank."""
    TRANSFERS = "transfers"
    """Its kernel runs and data is under way, or it moves data itself."""
    UNKNOWN = "unknown"


class CpuTimes(NamedTuple):
    """How long the threads of a process have waited for a CPU and run up to the moment ``at``, seconds, and what a CPU limit has
    done to them (:class:`CpuLimit`); NaN: not known.
    """

    at: float = math.nan
    waited: float = math.nan
    ran: float = math.nan
    periods: float = math.nan
    throttled: float = math.nan
    group: float = math.nan


COLUMNS = ("activity", "inferred", *CpuTimes._fields)
"""Of a process at a look: number of the activity, whether it is inferred, and what CPUs and their limit did."""
_CODES = {activity: float(number) for number, activity in enumerate(Activity)}


@dataclass(frozen=True)
class Look:
    """One look at a job: wall time in seconds, number of ranks looked at, the holds, and what each rank does."""

    time: float
    ranks: int
    holds: tuple[Hold, ...]
    activities: dict[ProcessKey, Activity]
    cpu_times: dict[ProcessKey, CpuTimes] = field(default_factory=dict)
    """Of the processes of which it is known at this look."""
    passes: dict[ProcessKey, str] = field(default_factory=dict)
    """Where it is known, in which pass of the iteration those are who hold others up (``backward of micro-batch 5``)."""
    inferred: frozenset[ProcessKey] = frozenset()
    """Of whose kernels nothing shows: only that others wait for them, or they for others, says what they do."""

    @cached_property
    def columns(self) -> tuple[tuple[ProcessKey, ...], NDArray[np.float64]]:
        """What is known of each process: the processes, and ``COLUMNS`` of each, of shape (columns, processes)."""
        keys, unknown = tuple(dict.fromkeys((*self.activities, *self.cpu_times))), CpuTimes()
        known = [
            (_CODES[self.activities.get(key, Activity.UNKNOWN)], key in self.inferred, *self.cpu_times.get(key, unknown))
            for key in keys
        ]
        return keys, np.array(known, np.float64).reshape(-1, len(COLUMNS)).T


StageOf = Callable[[str, int, int, int], Stage | None]
"""(host, pid, communicator's address or 0, calls made since) → where in the iteration that call stands."""


@collector_at_rest()
def take_look(
    job: Job, order_of: OrderOf | None = None, near_s: float = math.inf, stage_of: StageOf | None = None
) -> Look:  # fmt: skip
    """Read off the newest samples who holds whom up. O(operations); the same cost as one diagnosis of a hang.

    ``near_s``: samples of two processes less than that apart are of one moment.
    """
    everything = Case(job).waits
    orders = {m.index: order_of(m.info.host, m.info.pid) if order_of is not None else None for m in job.members}
    kernels = {member.index: read_kernels(job, member, orders[member.index]) for member in job.members}
    # Nobody is held up in a ring through shared memory of which nothing shows that it has begun it.
    seen = [
        wait for wait in everything.waits
        if (kernels[wait.end.member.index].waits(wait.end.operation.address) if wait.end is not None else not wait.weak)
    ]  # fmt: skip
    seen += laggards(job)
    proven = [is_proven(job, wait, near_s) for wait in seen]
    edges = [wait for wait, certain in zip(seen, proven, strict=True) if certain]
    edges += awaited_inside(job, order_of) if order_of is not None else ()
    # Whoever may wait for another is no end of the waits.
    doubtful = {wait.waiter for wait, certain in zip(seen, proven, strict=True) if not certain}
    waits = everything.with_edges(edges)
    sinks = [sink for sink in waits.sinks if sink.waits or sink.inside]
    blocked = [_blocked(sink) for sink in sinks]
    reached = Counter(rank for ranks in blocked for rank in ranks)
    total = max(1, len(job.members))
    holds: list[Hold] = []
    inside = amid_rings(job)
    for sink, ranks in zip(sinks, blocked, strict=True):
        weight = sum(1.0 / reached[rank] for rank in ranks) / total
        holds += [_hold(job, sink, node, weight / len(sink.nodes), inside) for node in sink.nodes if node not in doubtful]
    time = max(member.last.wall_ns for member in job.members) / 1e9
    cpu_times = {member.info.key: times for member in job.members if (times := _cpu_times(member.last)) is not None}
    activities, inferred = _activities(job, waits, kernels, doubtful, inside)
    passes = _passes(job, kernels, holds, stage_of)
    return Look(time, len(job.members), tuple(holds), activities, cpu_times, passes, inferred)


def _cpu_times(sample: ProcessSample) -> CpuTimes | None:
    if sample.run_queue_wait_ns is None or sample.cpu_time_ns is None:
        return None
    read = sample.time_ns / 1e9, sample.run_queue_wait_ns / 1e9, sample.cpu_time_ns / 1e9
    limit = sample.cpu_limit
    return CpuTimes(*read, limit.periods, limit.throttled, limit.group) if limit is not None else CpuTimes(*read)


def _activities(
    job: Job, waits: Waits, kernels: Mapping[int, Kernels], doubtful: Collection[Node], inside: Collection[int]
) -> tuple[dict[ProcessKey, Activity], frozenset[ProcessKey]]:
    """What each rank does, and for whom that is only inferred."""
    waiting: dict[int, set[bool]] = defaultdict(set)
    awaited: set[int] = set()
    for wait in waits.waits:
        if isinstance(wait.waiter, RankNode):
            waiting[wait.waiter.index].add(isinstance(wait.target, LinkNode))
        if isinstance(wait.target, RankNode):
            awaited.add(wait.target.index)
    found: dict[ProcessKey, Activity] = {}
    inferred: set[ProcessKey] = set()
    for member in job.members:
        targets = waiting.get(member.index, set())
        if not targets and RankNode(member.index) in doubtful:
            found[member.info.key] = Activity.UNKNOWN
            continue
        within = kernels[member.index].current
        found[member.info.key] = _activity(
            member, targets, within, awaited=member.index in awaited, inside=member.index in inside
        )
        if not within and not only_network(member):  # it may be in an operation of shared memory, of which nothing shows
            inferred.add(member.info.key)
    return found, frozenset(inferred)


def _activity(member: Member, targets: set[bool], within: bool | None, *, awaited: bool, inside: bool) -> Activity:
    """What a rank does that waits for ``targets`` (links: True); its kernel is ``within`` an operation (``None``: unknown)."""
    if within:
        return Activity.WAITS if False in targets else Activity.TRANSFERS
    if within is not None:
        # What is queued for the network has not begun: it may be in an operation of shared memory before that.
        return Activity.WAITS if False in targets else Activity.COMPUTES
    if not member.last.operations and not member.last.pending and only_network(member):
        return Activity.CALLS_NOTHING
    if targets or inside:
        return Activity.WAITS if targets else Activity.TRANSFERS
    # What is queued for shared memory does not show, nor whether a receive has begun: who holds others up and waits for nobody is
    # at work, of the rest nothing is known.
    return Activity.COMPUTES if awaited else Activity.UNKNOWN


def _blocked(sink: Sink) -> set[int]:
    found = victims_of([sink])
    if sink.is_cycle:
        # Ranks in a circle hold each other up.
        found |= {node.index for node in sink.nodes if isinstance(node, RankNode)}
    return found


def _passes(job: Job, kernels: Mapping[int, Kernels], holds: Iterable[Hold], stage_of: StageOf | None) -> dict[ProcessKey, str]:
    """The passes that those are in who hold others up by their own work: of the operation that their GPU is at or before."""
    if stage_of is None:
        return {}
    held = {hold.process for hold in holds if hold.process is not None and hold.link is None}
    found: dict[ProcessKey, str] = {}
    for member in job.members if held else ():
        place = kernels[member.index].place if member.info.key in held else None
        stage = stage_of(member.info.host, member.info.pid, *place) if place is not None else None
        if stage is not None and (text := pass_text(stage)):
            found[member.info.key] = text
    return found


def _hold(job: Job, sink: Sink, node: Node, weight: float, inside: Collection[int]) -> Hold:
    waits = [wait for wait in (*sink.waits, *sink.inside) if wait.target == node] or sink.waits or sink.inside
    operation = next((w.end.operation.collective for w in waits if w.end is not None), "")
    group = job.groups[waits[0].key.group]
    if isinstance(node, LinkNode):
        ends = [group.members.get(rank) for rank in (node.source, node.destination)]
        keys = [found[0].info.key if found else None for found in ends]
        channels = tuple(sorted({w.key.channel for w in waits}))
        link = LinkPlace(group.id, group.hash, group.nranks, node.source, node.destination, keys[0], keys[1], channels)
        return Hold(Part.LINK, weight, None, link, operation, group.id)
    if isinstance(node, (AbsentNode, HiddenNode)):
        found = group.members.get(node.comm_rank)
        return Hold(Part.UNSEEN, weight, found[0].info.key if found else None, None, operation, group.id)
    member = job.member(node.index)
    return Hold(_part(member, sink, waits, inside=member.index in inside), weight, member.info.key, None, operation, group.id)


def _part(member: Member, sink: Sink, waits: list[Wait], *, inside: bool) -> Part:
    stalls = {mark.stall for mark in sink.stalls if mark.member is member}
    if stalls & PROXY_STALLS or any(w.why is Why.NOT_TRANSMITTED or w.why is Why.NOT_BEGUN for w in waits):
        return Part.PROXY
    if inside:
        return Part.KERNEL
    if not member.last.operations and not member.last.pending:
        # What is queued for shared memory or NVLink does not show: its host may have called.
        return Part.HOST if only_network(member) else Part.GPU
    working = [op for op in member.last.operations if op.phase is OpPhase.PROGRESS]
    for operation in working:
        for sub in operation.subs:
            if operation.direction is Direction.SEND and (sub.gpu_ready or sub.transmitted) and sub.done < sub.nsteps:
                return Part.KERNEL
            if operation.direction is Direction.RECV and 0 < sub.done < sub.nsteps:
                return Part.KERNEL
    return Part.GPU


def only_network(member: Member) -> bool:
    """Whether everything a rank does with others passes its proxy, so that nothing open means nothing called."""
    return all(transport is Transport.NET for c in member.last.communicators for _, _, _, transport in c.transports)


# --- what samples prove of one another ----------------------------------------------------------------------------------------


def near(iteration_s: float | None) -> float:
    """How far apart samples of one moment may be, seconds."""
    return NEAR_SHARE * iteration_s if iteration_s is not None else NEAR_S


def is_proven(job: Job, wait: Wait, near_s: float) -> bool:
    """Whether who is waited for was read late enough to know that it had not come.

    Processes are read one after the other, and the job runs meanwhile. Counters only rise, so who waits for a rank that was read
    later really waited. A rank that was read earlier may have come in between, and data that was "sent and not received" may have
    been received: that proves nothing, unless hardly any time lay between (``near_s``), or who waits had already waited at the
    look before.
    """
    if isinstance(wait.target, LinkNode):
        group = job.groups.get(wait.target.group_id)
        ends = [group.members.get(rank) if group else None for rank in (wait.target.source, wait.target.destination)]
        first, then = (end[0] if end else None for end in ends)
        waited: Iterable[ProcessSample] = ()
    else:
        first, then = (job.member(node.index) if isinstance(node, RankNode) else None for node in (wait.waiter, wait.target))
        waited = _waited_before(wait)
    if first is None or then is None or first is then:
        return True
    return any(one.wall_ns + one.duration_ns - then.last.wall_ns <= near_s * 1e9 for one in chain([first.last], waited))


def _waited_before(wait: Wait) -> Iterator[ProcessSample]:
    """The look before, if it showed the waiter's end as it stands now."""
    if wait.end is None:
        return
    own, sub = wait.end.operation, wait.end.sub
    for before in wait.end.member.samples[-2:-1]:
        if any((one.address, one.op_count) == (own.address, own.op_count) and sub in one.subs for one in before.operations):
            yield before
