"""Name the ranks a verdict accuses: who, where, and in which communicator and operation the others wait for them."""

from __future__ import annotations

from collections.abc import Sequence

from ncclwatch.engine.connections import End
from ncclwatch.engine.edges import AbsentNode, StallMark, Wait
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.locate import Sink
from ncclwatch.model.verdict import Culprit, LinkRef, OperationRef


def observed_culprit(
    job: Job, member: Member, waits: Sequence[Wait], stalls: Sequence[StallMark], reason: str, *, link: LinkRef | None = None
) -> Culprit:
    """An observed process, placed by the first of the waits that lead to it or of its own stalls: of those in an operation that
    has begun, where there are any. What is called ahead waits as well.
    """
    places = [(wait.key, wait.end) for wait in waits] + [(mark.key, mark.end) for mark in stalls]
    places.sort(key=lambda place: not _under_way(place[1]))
    keys, ends = [key for key, _ in places], [end for _, end in places]
    communicators = member.last.communicators
    largest = max(communicators, key=lambda c: c.nranks, default=None)
    group_id = keys[0].group if keys else job.group_of[member.index, largest.address] if largest else None
    own = next((c for c in communicators if job.group_of[member.index, c.address] == group_id), None)
    return Culprit(
        rank=member.rank,
        comm_rank=own.rank if own else None,
        host=member.info.host,
        pid=member.info.pid,
        gpu=own.device if own else None,
        communicator=job.groups[group_id].reference() if group_id in job.groups else None,
        operation=operation_reference(ends) or next((wait.operation for wait in waits if wait.operation), None),
        link=link,
        reason=reason,
    )


def _under_way(end: End | None) -> bool:
    """Whether some of a transfer has been done already."""
    return end is not None and max(end.sub.done, end.sub.received, end.sub.transmitted) > 0


def absent_culprit(job: Job, sink: Sink, reason: str) -> Culprit:
    """A rank of a communicator that no observed process holds."""
    node = sink.nodes[0]
    if not isinstance(node, AbsentNode):
        raise TypeError(f"not an absent rank: {node}")
    return Culprit(
        rank=job.global_rank(node.group_id, node.comm_rank),
        comm_rank=node.comm_rank,
        host="",
        pid=None,
        gpu=None,
        communicator=job.groups[node.group_id].reference(),
        operation=operation_reference([wait.end for wait in sink.waits]),
        reason=reason,
        observed=False,
    )


def one_of_each(culprits: Sequence[Culprit]) -> list[Culprit]:
    """Each rank once: one that nobody observed may be missing in several communicators."""
    kept: list[Culprit] = []
    unobserved: set[int] = set()
    for culprit in culprits:
        if culprit.observed or culprit.rank not in unobserved:
            kept.append(culprit)
        if not culprit.observed and culprit.rank is not None:
            unobserved.add(culprit.rank)
    return kept


def operation_reference(ends: Sequence[End | None]) -> OperationRef | None:
    """The operation of the first transfer that has one."""
    operation = next((end.operation for end in ends if end is not None), None)
    if operation is None:
        return None
    return OperationRef(operation.collective, operation.sequence, operation.protocol, operation.algorithm)
