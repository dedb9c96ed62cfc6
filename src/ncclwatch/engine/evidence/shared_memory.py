"""What connections whose head and tail can be seen show by themselves: shared memory, and P2P where the device shim reads it.

Head and tail count the same steps at both ends; only the protocol Simple moves the tail.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ncclwatch.engine.connections import CONNECTION_SLOTS, ConnectionKey, memory_of, steps_unread
from ncclwatch.engine.edges import Stall, StallMark, Wait, Why
from ncclwatch.engine.evidence.base import FactKind, Source
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.nodes import AbsentNode, RankNode, node_of
from ncclwatch.model.state import Direction, HostConnection, Transport

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "shared memory"


class SharedMemory(Source):
    """Connections inside the nodes."""

    name = NAME
    plane = "state"
    kinds = frozenset({FactKind.WAITS_FOR, FactKind.STANDS})

    def facts(self, case: Case) -> Iterator[Wait | StallMark]:
        """Waits for readers that leave a full connection, and ranks that leave data unread. O(connections)."""
        for group in case.job.groups.values() if case.job.joined.seen else ():
            for rank, (member, own) in group.members.items():
                for conn in own.host_connections:
                    unread = steps_unread(conn)
                    if unread is None:
                        continue
                    if conn.direction is Direction.SEND and unread >= CONNECTION_SLOTS:
                        yield _full(case.job, group, rank, member, conn)
                    elif conn.direction is Direction.RECV and 0 < unread <= CONNECTION_SLOTS:
                        yield _unread(case.job, group, rank, member, conn)

    def coverage(self, case: Case) -> Iterator[str]:
        """That steps are all it sees."""
        if Transport.SHM in case.job.joined.transports:
            yield "shared-memory connections: steps are seen, the operation they belong to is not"


def _full(job: Job, group: Group, rank: int, member: Member, conn: HostConnection) -> Wait:
    target = node_of(job, group.id, conn.peer)
    key = ConnectionKey(group.id, conn.channel, rank, conn.peer, conn.connection_index > 0)
    why = Why.UNOBSERVED if isinstance(target, AbsentNode) else Why.FULL

    def describe() -> str:
        where = f"{memory_of(conn)}, channel {conn.channel}, {steps_unread(conn)} steps lie unread"
        return f"{member.label} waits for {job.rank_name(group.id, conn.peer)}, {why}: {where}"

    return Wait(subject=RankNode(member.index), source=NAME, object=target, why=why, key=key, describe=describe)


def _unread(job: Job, group: Group, rank: int, member: Member, conn: HostConnection) -> StallMark:
    key = ConnectionKey(group.id, conn.channel, conn.peer, rank, conn.connection_index > 0)
    stall = Stall.GPU_NOT_CONSUMING

    def describe() -> str:
        where = f"{memory_of(conn)} from {job.rank_name(group.id, conn.peer)}, channel {conn.channel}"
        return f"{member.label}: {stall}: {where}, {steps_unread(conn)} steps lie unread"

    return StallMark(subject=RankNode(member.index), source=NAME, member=member, stall=stall, key=key, describe=describe)
