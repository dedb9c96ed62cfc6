"""Which of a rank's unfinished operations its GPU is at, by the order of its calls and by what each operation's counters show.

A sender that may write and has written nothing has not begun its operation; anything written or consumed says it has. A receive
alone shows nothing, but the order of calls says which comes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from ncclwatch.collect.call_order import CallOrder
from ncclwatch.collect.message_steps import Place
from ncclwatch.collect.standing import exchanges_held_up, find_standing
from ncclwatch.engine.edges import Wait, Why, waits_for
from ncclwatch.model.job import Job, Member
from ncclwatch.model.rings import CHUNK_STEPS, CONNECTION_SLOTS, RING_ENDS_RECEIVING, ring_places, steps_unread
from ncclwatch.model.state import Communicator, Direction, OpPhase, PendingOperation, ProxyOperation

OrderOf = Callable[[str, int], CallOrder | None]
"""(host, pid) → the order of a process's calls, where the calls plane saw them."""
_Operation = ProxyOperation | PendingOperation


@dataclass(slots=True)
class Kernels:
    """A rank's unfinished operations (by address) with their kernels: which have begun, and which is first, if known."""

    of: dict[int, Hashable] = field(default_factory=dict)
    begun: dict[Hashable, bool] = field(default_factory=dict)
    first: Hashable | None = None
    place: tuple[int, int] | None = None
    """The collective the rank is in or before: address of its communicator, and how many calls were made on it since; (0, −1)
    where nothing is open: the call it has yet to make.
    """
    awaits: list[Place] = field(default_factory=list)
    """Messages inside its node that cannot go on for the peer's sake."""

    def waits(self, address: int) -> bool:
        """Whether the kernel of an operation may be under way: one that has not begun does not wait, the rank still computes."""
        kernel = self.of.get(address)
        comes_later = self.first is not None and kernel is not None and kernel != self.first
        return not comes_later and self.begun.get(kernel, True)

    @property
    def current(self) -> bool | None:
        """Whether the rank is inside an operation (True), before one (False); ``None`` where neither shows or nothing is open."""
        if self.first is not None:
            return self.begun.get(self.first)
        return any(self.begun.values()) if self.begun else None


def waits_inside(job: Job, kernels: Mapping[int, Kernels]) -> Iterator[Wait]:
    """Waits in messages inside a node, for a peer that has not sent, or not received. O(ranks)."""
    for member in job.members:
        for group, own in job.held_by(member) if kernels[member.index].awaits else ():
            for address, way in kernels[member.index].awaits:
                if address == own.address and way is not None and way[1] in group.members:
                    why, detail = Why.FULL if way[0] else Why.EMPTY, "by the steps of messages in shared memory"
                    yield waits_for(job, group, member, way[1], why, detail, sends=way[0], point_to_point=True)


def read_kernels(job: Job, member: Member, order: CallOrder | None) -> Kernels:
    """The kernels of a rank, with the order of its calls where that is known. O(operations)."""
    operations: list[_Operation] = [*member.last.operations, *member.last.pending]
    found, at_address = Kernels(), {own.address: own for own in member.last.communicators}
    known = [at_address.get(one.comm_address) or _by_hash(job, member, one) for one in operations]
    located, places, unfinished = None, list[list[Place]](), defaultdict[Place, set[int]](set)
    if order is not None:
        places = [_places(communicator, one) for communicator, one in zip(known, operations, strict=True)]
        for operation, filled in zip(operations, places, strict=True):
            for place in filled:
                unfinished[place].add(operation.op_count)
        located = order.locate(unfinished, member.last.time_ns) if all(places) else None
    kernels: list[Hashable] = [
        (o.comm_address, o.comm_hash, o.op_count, o.direction if o.op_count & 1 else None) for o in operations
    ]
    if located:
        kernels = [min(located[at, one.op_count] for at in filled) for one, filled in zip(operations, places, strict=True)]
        found.first = min(located.values())
        filled = places[kernels.index(found.first)]
        if len(filled) == 1 and filled[0][1] is None:
            # Of one communicator all that was called since is unfinished too.
            found.place = filled[0][0], len(unfinished[filled[0]]) - 1
    standing = find_standing(order, member.last, unfinished) if order is not None and located is not None else None
    if standing is not None:
        found.first, found.place, found.awaits = standing.position, None, standing.awaits
        found.begun |= {standing.position: standing.begun} if standing.begun is not None else {}
    elif order is not None:
        found.awaits = exchanges_held_up(order, member.last)
    if not operations and (standing is None or standing.position > 0):
        found.place = 0, -1
    for communicator, operation, kernel in zip(known, operations, kernels, strict=True):
        if isinstance(operation, ProxyOperation):
            found.of[operation.address] = kernel
            if (begun := _has_begun(communicator, operation)) is not None:
                found.begun[kernel] = found.begun.get(kernel, False) or begun
    return found


def _by_hash(job: Job, member: Member, operation: _Operation) -> Communicator | None:
    number = job.find_group(member, operation.comm_address, operation.comm_hash)
    return next((own for own in member.last.communicators if job.number(member.index, own) == number), None)


def _has_begun(own: Communicator | None, operation: ProxyOperation) -> bool | None:
    """What an operation's own counters say; ``None`` where they say nothing."""
    if operation.phase is not OpPhase.PROGRESS:
        return None
    receives = operation.direction is Direction.RECV
    for sub in operation.subs:
        if sub.done > 0 if receives else sub.gpu_ready or sub.transmitted:
            return True
    if receives:
        return _has_written(own, operation) if own is not None and operation.algorithm == "Ring" else None
    # In a tree all but a leaf receive first (``runTreeUpDown``, src/device/all_reduce.h): whom they wait for tells.
    free = operation.algorithm != "Tree" and any(sub.gpu_ready is not None and sub.posted > 0 for sub in operation.subs)
    return False if free else None


def _has_written(own: Communicator, operation: ProxyOperation) -> bool | None:
    """Whether a rank that receives a ring's data from the network has written to the next in shared memory, which its kernel does
    first, or could have and has not; ``None`` where that does not show.

    A connection of the ring that stands at the step where the operation begins was not written to. Where other algorithms used
    it too its count means nothing: then who reads nothing of what was delivered tells.
    """
    sinks = {at.ring.channel: at.sink for at in ring_places(own)}
    counts = operation.protocol == "Simple" and operation.collective in RING_ENDS_RECEIVING
    known: list[bool] = []
    for sub in operation.subs:
        sink = sinks.get(sub.channel)
        if sink is None or sink.tail is None or (unread := steps_unread(sink)) is None or unread > CONNECTION_SLOTS:
            continue
        written = sink.tail - sub.base
        if counts and 0 < written <= sub.nsteps:
            known.append(True)
        elif unread < CHUNK_STEPS and (sub.transmitted or (counts and written == 0)):
            known.append(False)
    return any(known) if known else None


def _places(own: Communicator | None, operation: _Operation) -> list[Place]:
    """The places in the order of calls that an operation fills; empty where its communicator is not known."""
    if own is None:
        return []
    if not operation.op_count & 1:
        return [(own.address, None)]
    peers = {sub.peer for sub in (operation.subs if isinstance(operation, ProxyOperation) else (operation,))}
    return [(own.address, (operation.direction is Direction.SEND, peer)) for peer in sorted(peers)]
