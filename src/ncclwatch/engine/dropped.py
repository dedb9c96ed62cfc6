"""Ranks that show nothing of what holds them up: perhaps an operation with a rank that has ended, which NCCL has dropped.

A proxy drops an operation whose transport reports an error, and from v2.22 on mostly tells nobody (``progressOps``,
``src/proxy.cc``). In a ring of two nothing of it is left then: the GPU waits for ever in a kernel of which memory shows no trace,
and what was called after it lies there as if its GPU did not begin it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial

from ncclwatch.engine import explain
from ncclwatch.engine.connections import ConnectionKey, unseen_peers
from ncclwatch.engine.device import gpu_state
from ncclwatch.engine.edges import AbsentNode, HiddenNode, Node, RankNode, Stall, StallMark, Wait, Waits, Why
from ncclwatch.engine.halted import Census
from ncclwatch.engine.inside_waits import node_of
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.locate import Sink
from ncclwatch.engine.ring_positions import ring_positions
from ncclwatch.engine.waits import RING_ENDS_RECEIVING
from ncclwatch.model.device import KernelState
from ncclwatch.model.state import Communicator, Transport


def follow_dropped(job: Job, waits: Waits, sinks: Sequence[Sink], complete_hosts: Collection[str]) -> bool:
    """Draw the waits of ranks that stand still before they have begun, for fellows that have ended; whether there were any.

    A rank that has called an operation its GPU has not begun stands in something before it: without a trace of that, a neighbour
    nobody observed may be what it waits for as well. One that has not called is followed only to a fellow that is known to
    have ended. O(ranks that are waited for x their communicators).
    """
    gone = [member for member in job.members if member.gone]
    # Made once, and only where somebody is missing: it goes through all communicators of the job.
    census = cache(lambda: Census.of(job, complete_hosts))
    added = False
    for sink in sinks:
        member = sink.member(job)
        if member is None or member.halted or not all(not_begun(job, member, mark) for mark in sink.stalls):
            continue
        if sink.stalls:
            added |= _add_inside(job, waits, member)
        for group, rank, target in _fellows(job, member, gone, census, unseen_too=bool(sink.stalls)):
            key = ConnectionKey(group.id, 0, rank, group.ranks[member.index], False)
            text = partial(_text, job, member, group, rank)
            waits.added.append(Wait(RankNode(member.index), target, Why.DROPPED, key, text))
            added = True
    return added


def not_begun(job: Job, member: Member, mark: StallMark) -> bool:
    """Whether a stall is that of a GPU that may not have come to the operation yet."""
    if mark.stall not in (Stall.GPU_NOT_PRODUCING, Stall.GPU_NOT_CONSUMING):
        return False
    if gpu_state(job, member, mark.key.group) is KernelState.RUNNING:
        return False
    return mark.end is None or (mark.end.sub.done == 0 and not mark.end.sub.gpu_ready)


def _fellows(
    job: Job, member: Member, gone: Sequence[Member], census: Callable[[], Census], *, unseen_too: bool
) -> Iterator[tuple[Group, int, Node]]:
    """Whom a rank may wait for without a trace: (communicator, rank in it, node)."""
    failed = {own.address for own, _ in explain.errors_of(member)}
    for own in member.last.communicators:
        group = job.groups[job.group_of[member.index, own.address]]
        if group.rank_of(member) is None:
            continue
        for other in gone:
            if (rank := group.rank_of(other)) is not None:
                yield group, rank, RankNode(other.index)
        for rank in sorted(_neighbours(own) - group.members.keys()):
            runs = census().runs(group, rank)
            if runs is False or (runs is None and (unseen_too or own.address in failed)):
                yield group, rank, AbsentNode(group.id, rank)
        for rank in sorted(unseen_peers(own) - group.members.keys()):
            if census().runs(group, rank) is False:
                yield group, rank, AbsentNode(group.id, rank)


def _add_inside(job: Job, waits: Waits, member: Member) -> bool:
    """Draw the waits of a rank for predecessors in rings through shared memory from which it has read less than it has written.

    AllReduce, AllGather and ReduceScatter write and read as much on each ring: who is between is in such an operation. Broadcasts
    and the like do not, and older releases do not tell whether there were any: then it is no more than a possibility.
    """
    added = False
    for own in member.last.communicators:
        group = job.groups[job.group_of[member.index, own.address]]
        names = set(own.sequence_numbers)
        if group.rank_of(member) is None or not names <= RING_ENDS_RECEIVING:
            continue
        for position in ring_positions(own):
            if position.unread or not position.between:
                continue
            target: Node = node_of(job, group.id, position.prev) if names else HiddenNode(group.id, position.prev)
            key = ConnectionKey(group.id, position.channel, position.prev, own.rank, False)
            text = partial(_inside_text, job, member, group, position.prev, position.written, position.read)
            waits.added.append(Wait(RankNode(member.index), target, Why.EMPTY, key, text))
            added = True
    return added


def _inside_text(job: Job, member: Member, group: Group, rank: int, written: int, read: int) -> str:
    peer = job.rank_name(group.id, rank)
    return f"{member.label} waits for {peer}, {Why.EMPTY}: it has written {written} steps of the ring itself, and read {read}"


def _neighbours(own: Communicator) -> set[int]:
    """The neighbours in rings that are joined by the network: within a node nothing is dropped."""
    joined = {peer for _, peer, _, transport in own.transports if transport is Transport.NET}
    return joined & {neighbour for ring in own.rings for neighbour in (ring.prev, ring.next)}


def _text(job: Job, member: Member, group: Group, rank: int) -> str:
    return f"{member.label} may wait for {job.rank_name(group.id, rank)} on communicator {group.hash:016x}, {Why.DROPPED}"
