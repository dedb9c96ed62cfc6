"""Who waits for whom at one moment of a job that runs: a sampling profile of what holds it up (Mycroft, table 4).

The wait-for graph is that of the hang diagnosis, but a rank whose kernel has not begun what is queued still computes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.case import Case
from ncclwatch.engine.conflicts import StageOf
from ncclwatch.engine.edges import PROXY_STALLS, Wait, Why, laggards
from ncclwatch.engine.evidence.base import AbsentNode, Fact, FactColumns, FactKind, HiddenNode, LinkNode, Node, RankNode
from ncclwatch.engine.graph import Waits
from ncclwatch.engine.slow.kernels import Kernels, OrderOf, before_alike, read_kernels, waits_inside
from ncclwatch.gc_pause import collector_at_rest
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.job import Job, Member
from ncclwatch.model.state import Direction, OpPhase, ProcessSample, Transport
from ncclwatch.model.topology import pass_text

NEAR_SHARE, NEAR_S = 0.03, 0.02
"""Samples are of one moment that are nearer together than the first of an iteration, or the second where iterations are not
known. Unit: share, seconds. From: chosen; less than the least slow-down.
"""


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
    """A link by communicator (``group`` of the job) and communicator ranks, and the processes at its ends."""

    group: int
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
    among: int = 1
    """Of how many it is one: their weights add up to what one of them holds up."""


class Activity(IntEnum):
    """What a rank does at the moment of a look, as far as its own counters and its peers' say."""

    COMPUTES = 0  # an operation is queued and its kernel has not begun
    CALLS_NOTHING = 1  # nothing is queued: the host has not called
    WAITS = 2  # its kernel runs and needs another rank
    TRANSFERS = 3  # its kernel runs and data is under way, or it moves data itself
    UNKNOWN = 4


class CpuTimes(NamedTuple):
    """Seconds a process waited for CPUs and ran, up to ``at``; and what a :class:`CpuLimit` did. NaN: not known."""

    at: float = math.nan
    waited: float = math.nan
    ran: float = math.nan
    periods: float = math.nan
    throttled: float = math.nan
    group: float = math.nan


COLUMNS = ("activity", "inferred", *CpuTimes._fields)
"""Of a process at a look: its activity, whether that is inferred, and what CPUs and their limit did."""


@dataclass(frozen=True)
class Look:
    """One look at a job: wall time in seconds, number of ranks looked at, the holds, and what each rank does."""

    time: float
    ranks: int
    holds: tuple[Hold, ...]
    activities: dict[ProcessKey, Activity]
    cpu_times: dict[ProcessKey, CpuTimes] = field(default_factory=dict)
    passes: dict[ProcessKey, str] = field(default_factory=dict)
    """Where it is known, in which pass of the iteration those are who hold others up (``backward of micro-batch 5``)."""
    inferred: frozenset[ProcessKey] = frozenset()
    """Of whose kernels nothing shows: only that others wait for them, or they for others, says what they do."""

    @cached_property
    def columns(self) -> tuple[tuple[ProcessKey, ...], NDArray[np.float64]]:
        """What is known of each process: the processes, and ``COLUMNS`` of each, of shape (columns, processes)."""
        keys = tuple(dict.fromkeys((*self.activities, *self.cpu_times)))
        does, times = self.activities, self.cpu_times
        known = [(does.get(key, Activity.UNKNOWN), key in self.inferred, *times.get(key, CpuTimes())) for key in keys]
        return keys, np.array(known, np.float64).reshape(-1, len(COLUMNS)).T


@collector_at_rest()
def take_look(job: Job, order_of: OrderOf | None = None, near_s: float = math.inf, stage_of: StageOf | None = None) -> Look:
    """Read off the newest samples who holds whom up. O(operations); the same cost as one diagnosis of a hang.

    ``near_s``: samples of two processes less than that apart are of one moment.
    """
    case = Case(job)
    orders = (order_of(m.info.host, m.info.pid) if order_of is not None else None for m in job.members)
    kernels = {member.index: read_kernels(job, member, order) for member, order in zip(job.members, orders, strict=True)}
    edges, doubtful = _proven(case, kernels, near_s)
    edges += waits_inside(job, kernels)
    waits, inside = Waits(job, case.facts.nodes, edges, case.facts.parts(FactKind.STANDS)), case.amid
    # Ranks in a cycle hold each other up.
    sinks = [
        (sink, waits.victims([sink]) | {node.index for node in sink.nodes if sink.is_cycle and isinstance(node, RankNode)})
        for sink in waits.sinks if sink.waits or sink.inside
    ]  # fmt: skip
    together, waiting = before_alike(job, kernels, near_s), set(waits.waits.subject.tolist())
    reached = Counter(rank for _, ranks in sinks for rank in ranks)
    holds, unseen = list[Hold](), set[int]()
    for sink, ranks in sinks:
        weight = sum(1.0 / reached[rank] for rank in ranks) / len(job.members) / len(sink.nodes)
        stalled, among = {RankNode(mark.member.index) for mark in sink.stalls if mark.stall in PROXY_STALLS}, defaultdict(list)
        for wait in (*sink.waits, *sink.inside):
            among[wait.object].append(wait)
        rest = sink.waits or sink.inside
        veil, ends = sorted(waits.veiled(sink)), [node for node in sink.nodes if node not in doubtful]
        unseen.update(veil)
        for at in veil:
            holds.append(Hold(Part.GPU, weight / len(veil), job.member(at).info.key, group=rest[0].key.group, among=len(veil)))
        for node in ends if not veil else ():
            hold = _hold(job, node, among[node] or rest, weight, stalled, inside)
            also = [m for m in together.get(node, ()) if m.index not in waiting] if hold.part is Part.GPU else []
            holds += [replace(hold, weight=weight / len(also), process=m.info.key) for m in also] or [hold]
    time, size = job.time, len(job.members)
    cpu_times = {member.info.key: times for member in job.members if (times := _cpu_times(member.last)) is not None}
    activities, inferred = _activities(job, waits, kernels, doubtful, inside, unseen)
    return Look(time, size, tuple(holds), activities, cpu_times, _passes(job, kernels, holds, stage_of), inferred)


def _proven(case: Case, kernels: Mapping[int, Kernels], near_s: float) -> tuple[list[Fact | FactColumns[Any]], set[Node]]:
    """The waits that were, and who may wait in others: such a one is no end of the waits. Few become objects."""
    job, near_ns, edges, doubtful = case.job, near_s * 1e9, list[Fact | FactColumns[Any]](), set[Node]()
    begun, ended = times = np.zeros((2, 1 + max(kernels)), np.int64)
    times[:, list(kernels)] = np.transpose([(m.last.wall_ns, m.last.wall_ns + m.last.duration_ns) for m in job.members])
    mixed = [index for index, own in kernels.items() if not all(map(own.waits, own.of))]

    def counts(wait: Wait) -> bool:
        # Nobody is held up in a ring through shared memory of which nothing shows that it has begun it.
        end = wait.end
        seen = not wait.weak if end is None else kernels[end.member.index].waits(end.operation.address)
        if seen and not is_proven(job, wait, near_s):
            doubtful.add(wait.subject)
            return False
        return seen

    for part in case.facts.parts(FactKind.WAITS_FOR):
        if isinstance(part, FactColumns):
            known = (part.object >= 0) & ~np.isin(part.subject, mixed)
            known[known] = ended[part.subject[known]] - begun[part.object[known]] <= near_ns
            known[~known] = [isinstance(one := part.make(at), Wait) and counts(one) for at in np.flatnonzero(~known).tolist()]
            edges.append(part.some(np.flatnonzero(known)))
        else:
            edges += [part] if isinstance(part, Wait) and counts(part) else []
    edges += [wait for wait in laggards(job, case.rings) if counts(wait)]
    return edges, doubtful


def _cpu_times(sample: ProcessSample) -> CpuTimes | None:
    if sample.run_queue_wait_ns is None or sample.cpu_time_ns is None:
        return None
    limit = () if (own := sample.cpu_limit) is None else (own.periods, own.throttled, own.group)
    return CpuTimes(sample.time_ns / 1e9, sample.run_queue_wait_ns / 1e9, sample.cpu_time_ns / 1e9, *limit)


def _activities(
    job: Job, waits: Waits, kernels: Mapping[int, Kernels], doubtful: Collection[Node], inside: Collection[int],
    unseen: Collection[int],
) -> tuple[dict[ProcessKey, Activity], frozenset[ProcessKey]]:  # fmt: skip
    """What each rank does, and for whom that is only inferred. One of those who are ``unseen`` works."""
    waiting: dict[int, set[bool]] = defaultdict(set)  # for ranks (False), links (True)
    subjects, objects = waits.waits.subject.tolist(), waits.waits.object.tolist()
    awaited = set(objects)
    links = {number for number in awaited if number < 0 and isinstance(waits.nodes.node(number), LinkNode)}
    for subject, number in zip(subjects, objects, strict=True):
        waiting[subject].add(number in links)
    found: dict[ProcessKey, Activity] = {}
    inferred: set[ProcessKey] = set()
    for member in job.members:
        at, within, activity = member.index, kernels[member.index].current, Activity.UNKNOWN
        unsure = not waiting[at] and RankNode(at) in doubtful
        if at in unseen and not within:
            activity = Activity.COMPUTES
        elif within is not None:
            # What is queued for the network and has not begun may come after an operation of shared memory.
            activity = Activity.WAITS if False in waiting[at] else Activity.TRANSFERS if within else Activity.COMPUTES
        elif _is_idle(member) and only_network(member):
            activity = Activity.CALLS_NOTHING
        elif waiting[at] or at in inside:
            activity = Activity.WAITS if waiting[at] else Activity.TRANSFERS
        elif at in awaited:
            # What is queued for shared memory does not show, nor whether a receive has begun: who holds others up and waits for
            # nobody is at work, of the rest nothing is known.
            activity = Activity.COMPUTES
        found[member.info.key] = Activity.UNKNOWN if unsure else activity
        # It may be in an operation of shared memory, or behind NVLink, which does not show.
        if not (unsure or within or (only_network(member) and at not in unseen)):
            inferred.add(member.info.key)
    return found, frozenset(inferred)


def _passes(job: Job, kernels: Mapping[int, Kernels], holds: Iterable[Hold], stage_of: StageOf | None) -> dict[ProcessKey, str]:
    """The passes that those are in who hold others up by their own work: of the operation that their GPU is at or before."""
    held = {hold.process for hold in holds if hold.link is None}
    found: dict[ProcessKey, str] = {}
    for member in job.members if stage_of is not None else ():
        place = kernels[member.index].place if member.info.key in held else None
        stage = stage_of(member.info.host, member.info.pid, *place) if stage_of is not None and place is not None else None
        if stage is not None and (text := pass_text(stage)):
            found[member.info.key] = text
    return found


def _hold(job: Job, node: Node, waits: list[Wait], weight: float, stalled: set[RankNode], inside: Collection[int]) -> Hold:
    operation = next((w.end.operation.collective for w in waits if w.end is not None), "")
    group = job.groups[waits[0].key.group]

    def key_of(rank: int) -> ProcessKey | None:
        return holder.info.key if (holder := group.holder(rank)) is not None else None

    if isinstance(node, LinkNode):
        one, other, channels = node.source, node.destination, tuple(sorted({w.key.channel for w in waits}))
        place = LinkPlace(group.id, one, other, key_of(one), key_of(other), channels)
        return Hold(Part.LINK, weight, None, place, operation, group.id)
    if isinstance(node, (AbsentNode, HiddenNode)):
        return Hold(Part.UNSEEN, weight, key_of(node.comm_rank), None, operation, group.id)
    part = _part(job.member(node.index), waits, stalled=node in stalled, inside=node.index in inside)
    return Hold(part, weight, job.member(node.index).info.key, None, operation, group.id)


def _part(member: Member, waits: list[Wait], *, stalled: bool, inside: bool) -> Part:
    if stalled or any(w.why is Why.NOT_TRANSMITTED or w.why is Why.NOT_BEGUN for w in waits):
        return Part.PROXY
    if inside:
        return Part.KERNEL
    if _is_idle(member):
        # What is queued for shared memory or NVLink does not show, nor what a graph replays until its GPU comes to it.
        return Part.HOST if only_network(member) and not any(c.captured_plans for c in member.last.communicators) else Part.GPU
    amid = (
        sub.done < sub.nsteps and (sub.gpu_ready or sub.transmitted if operation.direction is Direction.SEND else sub.done > 0)
        for operation in member.last.operations if operation.phase is OpPhase.PROGRESS
        for sub in operation.subs
    )  # fmt: skip
    return Part.KERNEL if any(amid) else Part.GPU


def _is_idle(member: Member) -> bool:
    return not member.last.operations and not member.last.pending


def at_rest(job: Job) -> bool:
    """Whether no rank has anything open, and everything that could be open shows."""
    return all(_is_idle(member) and only_network(member) for member in job.members)


def only_network(member: Member) -> bool:
    """Whether everything a rank does with others passes its proxy, so that nothing open means nothing called."""
    return all(transport is Transport.NET for c in member.last.communicators for _, _, _, transport in c.transports)


def near(iteration_s: float | None) -> float:
    """How far apart samples of one moment may be, seconds."""
    return NEAR_SHARE * iteration_s if iteration_s is not None else NEAR_S


def is_proven(job: Job, wait: Wait, near_s: float) -> bool:
    """Whether who is waited for was read late enough to know that it had not come.

    Processes are read one after the other, and the job runs meanwhile. Counters only rise, so who waits for a rank that was read
    later really waited. One that was read earlier may have come in between, unless hardly any time lay between (``near_s``), or
    who waits had already waited at the look before.
    """
    if isinstance(wait.object, LinkNode):
        end = None
        first, then = map(job.groups[wait.object.group_id].holder, wait.object[1:3])
    else:
        nodes, end = (wait.subject, wait.object), wait.end
        first, then = (job.member(node.index) if isinstance(node, RankNode) else None for node in nodes)
    if first is None or then is None or first is then:
        return True

    def is_late_enough(sample: ProcessSample) -> bool:
        return sample.wall_ns + sample.duration_ns - then.last.wall_ns <= near_s * 1e9

    if end is None or is_late_enough(first.last):
        return is_late_enough(first.last)
    own = end.operation.address, end.operation.op_count
    before = [sample for sample in end.member.samples[-2:-1] if is_late_enough(sample)]
    return any((one.address, one.op_count) == own and end.sub in one.subs for sample in before for one in sample.operations)
