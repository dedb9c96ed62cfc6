"""The newest look at one process's memory, compared with those before: the current operation, its age, its steps, their rate."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from ncclwatch.collect.rates import RateWindow
from ncclwatch.model.state import Direction, OpPhase, ProcessSample, ProxyOperation, ProxySub

_Connection = tuple[int, Direction, int, int, int | None, bool]
"""Communicator, direction, channel, peer, connection index, whether it carries point-to-point operations."""


@dataclass(frozen=True, slots=True)
class OpenOperation:
    """One unfinished operation of a process, over all its channels, peers and directions.

    ``steps_done`` of ``steps_total`` steps are complete. ``since_ns`` is when it was first seen; with ``since_before`` it was
    open then already, and is older. Point-to-point operations of a communicator, which NCCL counts by channel,
    are taken together: ``sequence`` is ``None``.
    """

    name: str
    comm_hash: int
    comm_rank: int | None
    nranks: int | None
    sequence: int | None
    protocol: str
    algorithm: str
    steps_done: int
    steps_total: int
    begun: bool
    since_ns: int
    since_before: bool


class StateTracker:
    """What successive samples of one process say; bounded by what one sample may hold."""

    def __init__(self, begun_ns: int) -> None:
        self.sample: ProcessSample | None = None
        self.open: tuple[OpenOperation, ...] = ()
        """Oldest first."""
        self.moved_ns: int | None = None
        """When a counter of NCCL was last seen to have moved."""
        self._rates = RateWindow(2, begun_ns)
        self._first_seen: dict[Hashable, tuple[int, bool]] = {}
        self._marks: frozenset[Hashable] = frozenset()
        self._done: dict[_Connection, int] = {}
        self._counts: dict[tuple[int, int], int] = {}
        self._looks = 0

    def feed(self, sample: ProcessSample) -> None:
        """Take the next sample, in time order."""
        first = self._looks == 0
        self._looks += 1
        marks = frozenset(_marks(sample))
        if first or marks != self._marks:
            self.moved_ns = None if first else sample.time_ns
        self._marks = marks
        self._count_steps(sample, first)
        seen: dict[Hashable, tuple[int, bool]] = {}
        found = []
        for key, operations in _by_operation(sample.operations).items():
            # A point-to-point batch is the same one as long as any of its transfers is; the oldest of them gives the age.
            ids = [_transfer_id(operation, sub) for operation in operations for sub in operation.subs] or [key]
            known = [self._first_seen[i] for i in ids if i in self._first_seen]
            since, before = min(known, default=(sample.time_ns, first))
            seen.update((i, self._first_seen.get(i, (since, before))) for i in ids)
            found.append(_open(sample, operations, since, before))
        self._first_seen = seen
        self.open = tuple(sorted(found, key=lambda o: (not o.begun, o.since_ns, o.sequence if o.sequence is not None else 0)))
        self.sample = sample

    def per_second(self, now_ns: int) -> tuple[float, float]:
        """(launches by NCCL's own counters, proxy steps) per second, over the last seconds."""
        launches, steps = self._rates.per_second(now_ns)
        return launches, steps

    def _count_steps(self, sample: ProcessSample, first: bool) -> None:
        done: dict[_Connection, int] = {}
        for operation in sample.operations:
            if operation.phase is OpPhase.PROGRESS:
                for sub in operation.subs:
                    place = _connection(operation, sub)
                    done[place] = max(done.get(place, 0), sub.base + sub.done)
        counts = {(c.hash, c.rank): _launches(c.op_count, c.sequence_numbers) for c in sample.communicators}
        if not first:
            # A connection's step is absolute: the difference counts also the operations that came and went between two looks.
            steps = sum(max(step - self._done[place], 0) for place, step in done.items() if place in self._done)
            launches = sum(max(n - self._counts[key], 0) for key, n in counts.items() if key in self._counts)
            self._rates.add(sample.time_ns, launches, steps)
        alive = {c.hash for c in sample.communicators}
        self._done = {**{place: step for place, step in self._done.items() if place[0] in alive}, **done}
        self._counts = counts


def _launches(op_count: int | None, sequence_numbers: dict[str, int]) -> int:
    """The larger of NCCL's two counters of one rank: some versions count launches only where this rank's plan has proxy work."""
    return max(op_count or 0, sum(sequence_numbers.values()))


def _marks(sample: ProcessSample) -> Iterator[Hashable]:
    """Whatever moves when NCCL works."""
    for c in sample.communicators:
        yield (c.hash, c.rank, c.op_count, tuple(sorted(c.sequence_numbers.items())))
        for end in c.host_connections:
            yield (c.hash, end.channel, end.peer, end.direction, end.connection_index, end.head, end.tail)
    for operation in sample.operations:
        for sub in operation.subs:
            counters = (sub.base, sub.posted, sub.received, sub.transmitted, sub.done, sub.gpu_ready)
            yield (_transfer_id(operation, sub), operation.phase, counters if operation.phase is OpPhase.PROGRESS else None)
    for pending in sample.pending:
        yield ("pending", pending.comm_hash, pending.direction, pending.op_count, pending.channel, pending.peer)


def _connection(operation: ProxyOperation, sub: ProxySub) -> _Connection:
    point_to_point = operation.is_point_to_point
    return (operation.comm_hash, operation.direction, sub.channel, sub.peer, sub.connection_index, point_to_point)


def _transfer_id(operation: ProxyOperation, sub: ProxySub) -> Hashable:
    return (*_connection(operation, sub), operation.op_count)


def _by_operation(operations: Iterable[ProxyOperation]) -> dict[Hashable, list[ProxyOperation]]:
    grouped: dict[Hashable, list[ProxyOperation]] = {}
    for operation in operations:
        number = None if operation.is_point_to_point else operation.sequence
        grouped.setdefault((operation.comm_hash, number), []).append(operation)
    return grouped


def _open(sample: ProcessSample, operations: list[ProxyOperation], since_ns: int, before: bool) -> OpenOperation:
    head = operations[0]
    communicator = next((c for c in sample.communicators if c.hash == head.comm_hash), None)
    progress = [o for o in operations if o.phase is OpPhase.PROGRESS]
    directions = {o.direction for o in operations}
    if head.is_point_to_point:
        name = "/".join(word for word, way in (("Send", Direction.SEND), ("Recv", Direction.RECV)) if way in directions)
    else:
        name = head.collective.removeprefix("ncclFunc") or "operation"
    return OpenOperation(
        name=name,
        comm_hash=head.comm_hash,
        comm_rank=communicator.rank if communicator else None,
        nranks=communicator.nranks if communicator else None,
        sequence=None if head.is_point_to_point else head.sequence,
        protocol=head.protocol,
        algorithm=head.algorithm,
        # Counters of what has not begun are stale; its steps still count towards the total.
        steps_done=sum(min(max(sub.done, 0), sub.nsteps) for o in progress for sub in o.subs),
        steps_total=sum(sub.nsteps for o in operations for sub in o.subs),
        begun=bool(progress),
        since_ns=since_ns,
        since_before=before,
    )
