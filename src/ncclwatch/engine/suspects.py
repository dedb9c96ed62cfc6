"""Name the ranks a hypothesis suspects: who, where, in which communicator and operation the others wait, and who those are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ncclwatch.engine.case import Cause, Suspect
from ncclwatch.engine.connections import End
from ncclwatch.engine.edges import StallMark, Wait
from ncclwatch.engine.graph import Sink
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.nodes import AbsentNode
from ncclwatch.model.verdict import Culprit, LinkRef, OperationRef, places, stands_in

POINT_TO_POINT = frozenset({"", "Send", "Recv", "SendRecv"})
"""Names of operations that the rest of a communicator does not take part in."""


def observed(
    job: Job, member: Member, waits: Sequence[Wait], stalls: Sequence[StallMark], cause: Cause, detail: str = "",
    *, link: LinkRef | None = None,
) -> Suspect:  # fmt: skip
    """An observed process, placed by the first of the waits that lead to it or of its own stalls: of those in an operation that
    has begun, where there are any. What is called ahead waits as well.
    """
    found = [(wait.key, wait.end) for wait in waits] + [(mark.key, mark.end) for mark in stalls]
    found.sort(key=lambda place: not _under_way(place[1]))
    keys, ends = [key for key, _ in found], [end for _, end in found]
    communicators = member.last.communicators
    largest = max(communicators, key=lambda c: c.nranks, default=None)
    group_id = keys[0].group if keys else job.group_of[member.index, largest.address] if largest else None
    own = next((c for c in communicators if job.group_of[member.index, c.address] == group_id), None)
    place = Culprit(
        rank=member.rank,
        comm_rank=own.rank if own else None,
        host=member.info.host,
        pid=member.info.pid,
        gpu=own.device if own else None,
        communicator=job.groups[group_id].reference() if group_id in job.groups else None,
        operation=operation_reference(ends) or next((wait.operation for wait in waits if wait.operation), None),
        link=link,
    )
    return Suspect(place, cause, detail)


def absent(job: Job, sink: Sink, cause: Cause) -> Suspect:
    """A rank of a communicator that no observed process holds."""
    node = sink.nodes[0]
    if not isinstance(node, AbsentNode):
        raise TypeError(f"not an absent rank: {node}")
    place = Culprit(
        rank=job.global_rank(node.group_id, node.comm_rank),
        comm_rank=node.comm_rank,
        host="",
        pid=None,
        gpu=None,
        communicator=job.groups[node.group_id].reference(),
        operation=operation_reference([wait.end for wait in sink.waits]),
        observed=False,
    )
    return Suspect(place, cause)


def caller(group: Group, rank: int, member: Member, operation: OperationRef, cause: Cause, detail: str = "") -> Suspect:
    """A rank of a communicator that is named for what it called, or has not called."""
    place = Culprit(
        rank=member.rank,
        comm_rank=rank,
        host=member.info.host,
        pid=member.info.pid,
        gpu=group.members[rank][1].device,
        communicator=group.reference(),
        operation=operation,
    )
    return Suspect(place, cause, detail)


def operation_reference(ends: Sequence[End | None]) -> OperationRef | None:
    """The operation of the first transfer that has one."""
    operation = next((end.operation for end in ends if end is not None), None)
    if operation is None:
        return None
    return OperationRef(operation.collective, operation.sequence, operation.protocol, operation.algorithm)


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


def peers(job: Job, culprits: Sequence[Culprit]) -> set[int]:
    """Members that share a culprit's communicator: a collective that one rank does not finish, no rank finishes."""
    groups: dict[str, list[Group]] = defaultdict(list)
    for group in job.groups.values():
        groups[f"{group.hash:016x}"].append(group)
    hit: dict[int, Group] = {}
    for culprit in culprits:
        if culprit.communicator is None or culprit.operation is None or culprit.operation.name in POINT_TO_POINT:
            continue
        for group in groups.get(culprit.communicator.hash, ()):
            holder = group.holder(culprit.comm_rank) if culprit.comm_rank is not None else None
            if culprit.pid is None or (holder is not None and names([culprit], holder)):
                hit[group.id] = group
    return {member.index for group in hit.values() for member, _ in group.members.values()}


def other_peers(job: Job, suspects: Sequence[Suspect]) -> set[int]:
    """The peers that are not suspects themselves."""
    culprits = [suspect.place for suspect in suspects]
    return peers(job, culprits) - accused(job, culprits)


def names(culprits: Iterable[Culprit], member: Member) -> bool:
    """Whether a member is among the culprits."""
    return any(culprit.is_at(member.info.host, member.info.pid, member.rank) for culprit in culprits)


def group_of(job: Job, culprit: Culprit) -> Group | None:
    """The communicator a culprit is accused in."""
    if culprit.communicator is None or culprit.comm_rank is None:
        return None
    for group in job.groups.values():
        if group.reference() == culprit.communicator:
            holder = group.holder(culprit.comm_rank)
            if holder is None or names([culprit], holder):
                return group
    return None


def accused(job: Job, culprits: Iterable[Culprit]) -> set[int]:
    """Members that are among the culprits."""
    found = places(culprits)
    pids = {pid for _, pid, _ in found}
    near = (member for member in job.members if member.last.process.pid in pids)
    return {member.index for member in near if stands_in(found, member.info.host, member.info.pid, member.rank)}


def _under_way(end: End | None) -> bool:
    """Whether some of a transfer has been done already."""
    return end is not None and max(end.sub.done, end.sub.received, end.sub.transmitted) > 0
