"""Who waits for whom at one moment of a job that runs: a sampling profile of what the job is held up by.

A single look proves nothing, since in a healthy job somebody computes while somebody waits. Over many looks, the share of them in
which a rank or link holds others up is the share of time it costs (Mycroft Table 4, applied to the sampled state). The
wait-for graph is that of the hang diagnosis; one thing is added: a rank whose kernel has not begun an operation that is queued
does not wait in it, it still computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ncclwatch.engine.edges import PROXY_STALLS, AbsentNode, HiddenNode, LinkNode, Node, RankNode, StallMark, Wait, Waits, Why
from ncclwatch.engine.graph import reaching
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.locate import Sink, find_sinks
from ncclwatch.engine.waits import find_waits
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Direction, OpPhase


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


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a job: wall time in seconds, number of ranks looked at, the holds, and what each rank does."""

    time: float
    ranks: int
    holds: tuple[Hold, ...]
    activities: dict[ProcessKey, Activity]


def take_look(job: Job) -> Look:
    """Read off the newest samples who holds whom up. O(operations); the same cost as one diagnosis of a hang."""
    everything = find_waits(job)
    begun = _begun(everything)
    waits = _really_waiting(everything, begun)
    sinks = [sink for sink in find_sinks(job, waits) if sink.waits or sink.inside]
    blocked = [_blocked(sink) for sink in sinks]
    reached: dict[int, int] = defaultdict(int)
    for ranks in blocked:
        for rank in ranks:
            reached[rank] += 1
    total = max(1, len(job.members))
    holds: list[Hold] = []
    for sink, ranks in zip(sinks, blocked, strict=True):
        weight = sum(1.0 / reached[rank] for rank in ranks) / total
        nodes = sink.nodes
        for node in nodes:
            holds += _holds(job, sink, node, weight / len(nodes))
    time = max(member.last.wall_ns for member in job.members) / 1e9
    return Look(time, len(job.members), tuple(holds), _activities(job, waits, begun))


def _activities(job: Job, waits: Waits, begun: Mapping[tuple[int, int, int], bool]) -> dict[ProcessKey, Activity]:
    within = {index for (index, _, _), does in begun.items() if does}
    outside = {index for (index, _, _), does in begun.items() if not does}
    waiting: dict[int, set[bool]] = defaultdict(set)
    for wait in waits.edges:
        if isinstance(wait.waiter, RankNode):
            waiting[wait.waiter.index].add(isinstance(wait.target, LinkNode))
    found: dict[ProcessKey, Activity] = {}
    for member in job.members:
        index = member.index
        if index in within:
            targets = waiting.get(index, set())
            activity = Activity.WAITS if False in targets else Activity.TRANSFERS
        elif index in outside:
            activity = Activity.COMPUTES
        elif member.last.operations or member.last.pending:
            activity = Activity.WAITS if index in waiting else Activity.UNKNOWN
        else:
            activity = Activity.CALLS_NOTHING
        found[member.info.key] = activity
    return found


def _blocked(sink: Sink) -> set[int]:
    ends = set(sink.nodes)
    found = {node.index for node in reaching(ends, sink.preceding) - ends if isinstance(node, RankNode)}
    if sink.is_cycle:
        # Ranks in a circle hold each other up.
        found |= {node.index for node in sink.nodes if isinstance(node, RankNode)}
    return found


def _really_waiting(waits: Waits, begun: Mapping[tuple[int, int, int], bool]) -> Waits:
    """Leave out waits of ranks whose kernel has not begun the operation: they are not held up there, they compute."""

    def waits_in_it(wait: Wait) -> bool:
        return wait.end is None or begun.get(_operation(wait.end.member, wait), True)

    return Waits([w for w in waits.edges if waits_in_it(w)], waits.stalls, waits.mismatches)


def _operation(member: Member, mark: Wait) -> tuple[int, int, int]:
    end = mark.end
    return (member.index, mark.key.group, end.operation.op_count if end is not None else -1)


def _begun(waits: Waits) -> dict[tuple[int, int, int], bool]:
    """Whether a rank's kernel has begun an operation, where its own counters say: a sender that may write and has written nothing
    has not begun; anything written or consumed says it has.
    """
    begun: dict[tuple[int, int, int], bool] = {}
    marks: list[Wait | StallMark] = [*waits.edges, *waits.stalls]
    for mark in marks:
        end = mark.end
        if end is None or end.operation.phase is not OpPhase.PROGRESS:
            continue
        key = (end.member.index, mark.key.group, end.operation.op_count)
        sub = end.sub
        if end.operation.direction is Direction.SEND:
            if sub.gpu_ready is None and not sub.transmitted:
                continue
            written = bool(sub.gpu_ready or sub.transmitted)
            begun[key] = begun.get(key, False) or written
        elif sub.done > 0:
            begun[key] = True
    return begun


def _holds(job: Job, sink: Sink, node: Node, weight: float) -> Iterable[Hold]:
    waits = [wait for wait in (*sink.waits, *sink.inside) if wait.target == node] or sink.waits or sink.inside
    first = waits[0]
    operation = next((w.end.operation.collective for w in waits if w.end is not None), "")
    group = job.groups[first.key.group]
    if isinstance(node, LinkNode):
        ends = [group.members.get(rank) for rank in (node.source, node.destination)]
        keys = [found[0].info.key if found else None for found in ends]
        channels = tuple(sorted({w.key.channel for w in waits}))
        link = LinkPlace(group.id, group.hash, group.nranks, node.source, node.destination, keys[0], keys[1], channels)
        yield Hold(Part.LINK, weight, None, link, operation, group.id)
    elif isinstance(node, (AbsentNode, HiddenNode)):
        found = group.members.get(node.comm_rank)
        yield Hold(Part.UNSEEN, weight, found[0].info.key if found else None, None, operation, group.id)
    else:
        member = next(m for m in job.members if m.index == node.index)
        yield Hold(_part(member, sink, waits), weight, member.info.key, None, operation, group.id)


def _part(member: Member, sink: Sink, waits: list[Wait]) -> Part:
    stalls = {mark.stall for mark in sink.stalls if mark.member is member}
    if stalls & PROXY_STALLS or any(w.why is Why.NOT_TRANSMITTED or w.why is Why.NOT_BEGUN for w in waits):
        return Part.PROXY
    if not member.last.operations and not member.last.pending:
        # With shared memory alone nothing tells a host that has not called from a GPU that has not begun.
        hidden = any(w.end is None for w in waits)
        return Part.UNSEEN if hidden and not _has_network(member) else Part.HOST
    working = [op for op in member.last.operations if op.phase is OpPhase.PROGRESS]
    for operation in working:
        for sub in operation.subs:
            if operation.direction is Direction.SEND and (sub.gpu_ready or sub.transmitted) and sub.done < sub.nsteps:
                return Part.KERNEL
            if operation.direction is Direction.RECV and 0 < sub.done < sub.nsteps:
                return Part.KERNEL
    return Part.GPU


def _has_network(member: Member) -> bool:
    return any(transport == "net" for c in member.last.communicators for _, _, _, transport in c.transports)
