"""Which of a rank's unfinished operations its GPU is at, by the order of its calls and by what each operation's counters show.

A sender that may write and has written nothing has not begun its operation; anything written or consumed says it has. A receive
alone shows nothing, but the order of calls says which comes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from ncclwatch.collect.call_order import CallOrder
from ncclwatch.collect.message_steps import Place
from ncclwatch.collect.standing import exchanges_held_up, find_standing, places_of
from ncclwatch.engine.edges import Wait, Why, waits_for
from ncclwatch.engine.evidence.base import Node, RankNode
from ncclwatch.model.job import Job, Member
from ncclwatch.model.rings import has_written
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
    before: tuple[int, int] | None = None
    """The collective that it has not begun, as far as that shows: address of its communicator, and how far that is."""
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
    found, at_address = Kernels(place=None if operations else (0, -1)), {own.address: own for own in member.last.communicators}
    known = [at_address.get(one.comm_address) or _by_hash(job, member, one) for one in operations]
    located, places, unfinished = None, list[list[Place]](), defaultdict[Place, set[int]](set)
    if order is not None:
        places = [places_of(communicator, one) for communicator, one in zip(known, operations, strict=True)]
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
    if order is not None and located is not None:
        _take_inside(found, member, order, unfinished)
    for communicator, operation, kernel in zip(known, operations, kernels, strict=True):
        if isinstance(operation, ProxyOperation):
            found.of[operation.address] = kernel
            if (begun := _has_begun(communicator, operation)) is not None:
                found.begun[kernel] = found.begun.get(kernel, False) or begun
    if found.current is False and found.first in kernels and not (one := operations[kernels.index(found.first)]).op_count & 1:
        found.before = one.comm_address, one.op_count
    return found


def _take_inside(found: Kernels, member: Member, order: CallOrder, unfinished: Mapping[Place, Collection[int]]) -> None:
    """What its messages and collectives inside its node say of where a rank stands."""
    standing = find_standing(order, member.last, unfinished)
    if standing is None:
        found.awaits = exchanges_held_up(order, member.last)
    elif standing.collective is not None:
        found.before = standing.collective
    else:
        found.first, found.place, found.awaits = standing.position, (0, -1) if standing.position > 0 else None, standing.awaits
        found.begun |= {standing.position: standing.begun} if standing.begun is not None else {}


def before_alike(job: Job, kernels: Mapping[int, Kernels], near_s: float) -> dict[Node, list[Member]]:
    """Of each rank that has not begun a collective those that have not either, itself among them, if all are of one moment."""
    together = defaultdict[tuple[int, int], list[Member]](list)
    for member in job.members:
        address, mark = kernels[member.index].before or (0, 0)
        for own in member.last.communicators:
            if own.address == address:
                together[job.number(member.index, own), mark].append(member)
    near = [of for of in together.values() if (at := [m.last.wall_ns for m in of]) and max(at) - min(at) <= near_s * 1e9]
    return {RankNode(member.index): members for members in near for member in members}


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
        return has_written(own, operation) if own is not None and operation.algorithm == "Ring" else None
    # In a tree all but a leaf receive first (``runTreeUpDown``, src/device/all_reduce.h): whom they wait for tells.
    free = operation.algorithm != "Tree" and any(sub.gpu_ready is not None and sub.posted > 0 for sub in operation.subs)
    return False if free else None
