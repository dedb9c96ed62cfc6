"""Name the ranks a hypothesis suspects: who, where, in which communicator and operation the others wait, and who those are."""

from __future__ import annotations

from collections.abc import Sequence

from ncclwatch.engine.case import Cause, Suspect
from ncclwatch.engine.edges import End, OnConnection, StallMark, Wait
from ncclwatch.engine.evidence.base import AbsentNode
from ncclwatch.engine.graph import Sink
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.model.verdict import Culprit, LinkRef, OperationRef

POINT_TO_POINT = frozenset({"", "Send", "Recv", "SendRecv"})
"""Names of operations that the rest of a communicator does not take part in."""


def observed(
    job: Job, member: Member, waits: Sequence[Wait], stalls: Sequence[StallMark], cause: Cause, detail: str = "",
    *, link: LinkRef | None = None,
) -> Suspect:  # fmt: skip
    """An observed process, placed by the first of the waits that lead to it or of its own stalls: of those in an operation that
    has begun, where there are any. What is called ahead waits as well.
    """
    found = sorted((*waits, *stalls), key=lambda one: not _under_way(one.end))
    communicators = member.last.communicators
    largest = max(communicators, key=lambda c: c.nranks, default=None)
    group_id = found[0].key.group if found else job.group_of[member.index, largest.address] if largest else -1
    own = next((c for c in communicators if job.group_of[member.index, c.address] == group_id), None)
    place = Culprit(
        member.rank, own.rank if own else None, member.info.host, member.info.pid, own.device if own else None,
        job.groups[group_id].reference() if group_id in job.groups else None, _operation(found), link=link,
    )  # fmt: skip
    return Suspect(place, cause, detail, member.index, group_id)


def absent(job: Job, sink: Sink, cause: Cause) -> Suspect:
    """A rank of a communicator that no observed process holds."""
    node = sink.nodes[0]
    if not isinstance(node, AbsentNode):
        raise TypeError(f"not an absent rank: {node}")
    rank, reference = job.global_rank(node.group_id, node.comm_rank), job.groups[node.group_id].reference()
    place = Culprit(rank, node.comm_rank, "", None, None, reference, _operation(sink.waits), observed=False)
    return Suspect(place, cause, group=node.group_id)


def caller(group: Group, rank: int, member: Member, operation: OperationRef, cause: Cause, detail: str = "") -> Suspect:
    """A rank of a communicator that is named for what it called, or has not called."""
    device = group.members[rank][1].device
    place = Culprit(member.rank, rank, member.info.host, member.info.pid, device, group.reference(), operation)
    return Suspect(place, cause, detail, member.index, group.id)


def _operation(found: Sequence[OnConnection]) -> OperationRef | None:
    """The operation of the first transfer that has one."""
    one = next((one.end.operation for one in found if one.end is not None), None)
    if one is None:
        return next((one.operation for one in found if one.operation is not None), None)
    return OperationRef(one.collective, one.sequence, one.protocol, one.algorithm)


def one_of_each(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Each rank once: one that nobody observed may be missing in several communicators."""
    kept: list[Suspect] = []
    unobserved: set[int] = set()
    for suspect in suspects:
        place = suspect.place
        if place.observed or place.rank not in unobserved:
            kept.append(suspect)
        if not place.observed and place.rank is not None:
            unobserved.add(place.rank)
    return kept


def peers(job: Job, suspects: Sequence[Suspect]) -> set[int]:
    """Members that share a suspect's communicator: a collective that one rank does not finish, no rank finishes."""
    collectives = (one for one in suspects if one.place.operation and one.place.operation.name not in POINT_TO_POINT)
    return {index for one in collectives if one.group in job.groups for index in job.groups[one.group].ranks}


def _under_way(end: End | None) -> bool:
    """Whether some of a transfer has been done already."""
    return end is not None and max(end.sub.done, end.sub.received, end.sub.transmitted) > 0
