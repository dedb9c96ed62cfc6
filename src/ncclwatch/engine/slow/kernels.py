"""Which operation each rank's GPU is at: an operation that is queued is not one that has begun.

A sender that may write and has written nothing has not begun; anything written or consumed says it has. A receive alone shows
nothing, but the order of calls says which of the unfinished operations comes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable

from ncclwatch.engine.connections import CONNECTION_SLOTS
from ncclwatch.engine.edges import Wait
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.slow.order import CallOrder, Place
from ncclwatch.model.state import Communicator, Direction, OpPhase, PendingOperation, ProxyOperation

OrderOf = Callable[[str, int], CallOrder | None]
"""(host, pid) → the order of a process's calls, where the calls plane saw them."""


class Kernels:
    """For every process its unfinished operations, joined to the kernels they belong to, and whether those have begun."""

    def __init__(self, job: Job, order_of: OrderOf | None = None) -> None:
        self._kernel: dict[tuple[int, int], Hashable] = {}
        """(index of the member, address of the operation) → its kernel"""
        self._begun: dict[tuple[int, Hashable], bool] = {}
        """(index, kernel) → whether it has begun, where that is known"""
        self._first: dict[int, Hashable] = {}
        """Index of the member → the kernel that comes first, where the order is known"""
        self._place: dict[int, tuple[int, int]] = {}
        """Index → communicator of that kernel, if it is a collective, and how many calls were made on it since"""
        for member in job.members:
            if member.last.operations or member.last.pending:
                self._read(job, member, order_of(member.info.host, member.info.pid) if order_of is not None else None)

    def waits(self, wait: Wait) -> bool:
        """Whether the kernel of a wait may be under way: one that has not begun does not wait, the rank still computes."""
        if wait.end is None:
            return True
        index = wait.end.member.index
        kernel = self._kernel.get((index, wait.end.operation.address))
        first = self._first.get(index)
        if first is not None and kernel is not None and kernel != first:
            return False
        return self._begun.get((index, kernel), True)

    def current(self, member: Member) -> bool | None:
        """Whether a rank is inside an operation (True), before one (False); ``None`` where neither shows or nothing is open."""
        first = self._first.get(member.index)
        if first is not None:
            return self._begun.get((member.index, first))
        known = [begun for (index, _), begun in self._begun.items() if index == member.index] if self._begun else []
        if True in known:
            return True
        return False if known else None

    def place(self, member: Member) -> tuple[int, int] | None:
        """The operation a rank is in or before: address of its communicator, and how many calls were made on it since.

        (0, −1) where nothing is open: the call it has yet to make. ``None`` where that is not known.
        """
        if not member.last.operations and not member.last.pending:
            return (0, -1)
        return self._place.get(member.index)

    def _read(self, job: Job, member: Member, order: CallOrder | None) -> None:
        index = member.index
        everything: list[ProxyOperation | PendingOperation] = [*member.last.operations, *member.last.pending]
        operations = [(operation, _places(job, member, operation)) for operation in everything]
        positions = _positions(operations, order, member.last.time_ns)
        for number, (operation, _) in enumerate(operations):
            if not isinstance(operation, ProxyOperation):
                continue
            if positions is not None:
                kernel: Hashable = positions[number]
            else:
                way = operation.direction if operation.is_point_to_point else None
                kernel = (operation.comm_address, operation.comm_hash, operation.op_count, way)
            self._kernel[index, operation.address] = kernel
            begun = _has_begun(operation)
            if begun is None and operation.algorithm == "Ring" and _leaves_unread(job, member, operation):
                begun = False
            if begun is not None:
                self._begun[index, kernel] = self._begun.get((index, kernel), False) or begun
        if positions:
            self._first[index] = first = min(positions)
            places = next(found for (_, found), position in zip(operations, positions, strict=True) if position == first)
            # Of one communicator all that was called since is unfinished too.
            since = {o.op_count for o, found in operations if set(found) & set(places)}
            if len(places) == 1 and places[0][1] is None:
                self._place[index] = (places[0][0], len(since) - 1)


def _has_begun(operation: ProxyOperation) -> bool | None:
    """What an operation's own counters say; ``None`` where they say nothing."""
    if operation.phase is not OpPhase.PROGRESS:
        return None
    if operation.direction is Direction.RECV:
        return True if any(sub.done > 0 for sub in operation.subs) else None
    if any(sub.gpu_ready or sub.transmitted for sub in operation.subs):
        return True
    return False if any(sub.gpu_ready is not None and sub.posted > 0 for sub in operation.subs) else None


def _leaves_unread(job: Job, member: Member, operation: ProxyOperation) -> bool:
    """Whether a ring's data has been delivered to a rank which reads none of it, though there is room for what it writes first to
    the next in shared memory: then its kernel has not begun.
    """
    delivered = [sub for sub in operation.subs if sub.transmitted]
    if not delivered or operation.direction is not Direction.RECV or any(sub.done for sub in operation.subs):
        return False
    own = _communicator(job, member, operation)
    if own is None:
        return False
    rings = {ring.channel: (ring.prev, ring.next) for ring in own.rings}
    room = {
        (conn.channel, conn.peer): conn.tail - conn.head < CONNECTION_SLOTS // 2
        for conn in own.host_connections
        if conn.direction is Direction.SEND and conn.connection_index == 0 and conn.head is not None and conn.tail is not None
    }
    for sub in delivered:
        before, after = rings.get(sub.channel, (None, -1))
        if sub.peer == before and room.get((sub.channel, after), False):
            return True
    return False


def _communicator(job: Job, member: Member, operation: ProxyOperation | PendingOperation) -> Communicator | None:
    """The communicator of an operation, if it is known."""
    number = job.find_group(member, operation.comm_address, operation.comm_hash)
    return next((c for c in member.last.communicators if job.group_of[member.index, c.address] == number), None)


def _places(job: Job, member: Member, operation: ProxyOperation | PendingOperation) -> list[Place]:
    """The places in the order of calls that an operation fills; empty where its communicator is not known."""
    own = _communicator(job, member, operation)
    if own is None:
        return []
    if not operation.op_count & 1:
        return [(own.address, None)]
    peers = {sub.peer for sub in (operation.subs if isinstance(operation, ProxyOperation) else (operation,))}
    return [(own.address, (operation.direction is Direction.SEND, peer)) for peer in sorted(peers)]


def _positions(
    operations: list[tuple[ProxyOperation | PendingOperation, list[Place]]], order: CallOrder | None, until_ns: int
) -> list[int] | None:
    """The position of each operation in the order of calls; ``None`` where that cannot be told of all of them."""
    if order is None or not all(places for _, places in operations):
        return None
    counts: dict[Place, set[int]] = defaultdict(set)
    for operation, places in operations:
        for place in places:
            counts[place].add(operation.op_count)
    located = order.locate({place: len(found) for place, found in counts.items()}, until_ns)
    if located is None:
        return None
    at = {place: dict(zip(sorted(counts[place]), positions, strict=True)) for place, positions in located.items()}
    return [min(at[place][operation.op_count] for place in places) for operation, places in operations]
