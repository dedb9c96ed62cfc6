"""Who waits for whom at a sample, from each rank's own proxy counters and shared-memory connections; added up, the delay matrix.

One entry is (waiting rank, rank it waits for): a receive whose next step has not arrived waits for the sender, a send whose data
lies ready, or is under way, for the receiver (NCCL ``src/transport/net.cc``). A share of samples is a share of time. This shows
what every end says by itself; a verdict compares both ends. C4 (section 4.2) draws the same matrix from transfer times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator, Direction, HostConnection, OpPhase, ProcessSample, ProxyOperation, ProxySub
from ncclwatch.model.work import FlowWindow, Scope

CONNECTION_STEPS = 8
"""Slots of a connection's buffer (NCCL_STEPS, ``src/include/device.h``)."""

Pair = tuple[int, int]
"""(waiting rank, rank waited for), global ranks."""


@dataclass(frozen=True, slots=True)
class WaitMatrix:
    """Shares of samples in which one rank waited for another. ``share`` is by (waiting, waited for); ``ranks`` in order."""

    ranks: tuple[int, ...]
    share: Mapping[Pair, float]
    samples: int


def pairs(samples: Mapping[ProcessKey, ProcessSample], victims: Collection[int] = ()) -> set[Pair]:
    """All waits of one sample between ranks whose global ranks are known.

    ``victims`` are ranks that a verdict says are held up: of them an empty shared-memory ring connection is a wait too. Of others
    it may only be idle.
    """
    return {pair for pair in _pairs(samples, victims) if pair[0] != pair[1]}


def matrix(waits: Iterable[set[Pair]], ranks: Iterable[int]) -> WaitMatrix:
    """The waits of many samples added up."""
    counted: Counter[Pair] = Counter()
    number = 0
    for each in waits:
        number += 1
        counted.update(each)
    share = {pair: count / number for pair, count in counted.items()} if number else {}
    return WaitMatrix(tuple(sorted(set(ranks))), share, number)


def paths_to(culprits: set[int], waiting: set[Pair], most: int = 60) -> dict[int, tuple[int, int]]:
    """For each rank that waits, directly or through others, for a culprit: (the rank it waits for on the shortest way, how far).

    At most ``most`` ranks, the nearest first.
    """
    waited_for: dict[int, list[int]] = {}
    for waiter, other in sorted(waiting):
        waited_for.setdefault(other, []).append(waiter)
    found: dict[int, tuple[int, int]] = {}
    current, depth = sorted(culprits), 1
    while current and len(found) < most:
        following = []
        for waiter, rank in [(waiter, at) for at in current for waiter in waited_for.get(at, ())]:
            if waiter not in culprits and waiter not in found and len(found) < most:
                found[waiter] = (rank, depth)
                following.append(waiter)
        current, depth = following, depth + 1
    return found


def _pairs(samples: Mapping[ProcessKey, ProcessSample], victims: Collection[int]) -> Iterator[Pair]:
    places = _global_ranks(samples.values())
    for sample in samples.values():
        if sample.run_state in "TtZX":
            # What a halted process would be waiting for says nothing.
            continue
        by_address = {c.address: c for c in sample.communicators}
        by_hash = {c.hash: c for c in sample.communicators}
        for operation in sample.operations:
            communicator = by_address.get(operation.comm_address) or by_hash.get(operation.comm_hash)
            if communicator is None or operation.phase is not OpPhase.PROGRESS or operation.queued_behind:
                continue
            for sub in operation.subs:
                if waits(operation, sub):
                    yield from _resolve(places, communicator, sub.rank if sub.rank is not None else communicator.rank, sub.peer)
        for communicator in sample.communicators:
            for end in communicator.host_connections:
                if host_waits(end) or (
                    _is_empty(communicator, end) and places.get((_group(communicator), communicator.rank)) in victims
                ):
                    yield from _resolve(places, communicator, communicator.rank, end.peer)


def latencies(work: Iterable[FlowWindow], samples: Mapping[ProcessKey, ProcessSample]) -> dict[Pair, float]:
    """(rank that sends, rank that receives) → the median time from post to completion, ns, where both are known: C4's matrix."""
    places = _global_ranks(samples.values())
    own = {(s.process.host, s.process.pid, c.hash): c for s in samples.values() for c in s.communicators}
    found: dict[Pair, float] = {}
    for window in work:
        communicator = own.get((window.host, window.pid, window.comm_hash or 0))
        took = window.work.latency_p50_ns
        if window.scope is not Scope.PEER or communicator is None or took is None or window.peer is None:
            continue
        for pair in _resolve(places, communicator, window.rank or 0, window.peer):
            found[pair] = max(found.get(pair, 0.0), took)
    return found


def waits(operation: ProxyOperation, sub: ProxySub) -> bool:
    """Whether the next step of a transfer has to come from, or be taken by, the peer."""
    if sub.done >= sub.nsteps:
        return False
    if operation.direction is Direction.RECV:
        return sub.posted > sub.received and sub.received == sub.done
    if sub.transmitted > sub.done:
        return True
    return sub.gpu_ready is not None and sub.gpu_ready > sub.transmitted


def host_waits(end: HostConnection) -> bool:
    """Whether a sender through shared memory has filled the buffer."""
    if end.head is None or end.tail is None:
        return False
    return end.direction is Direction.SEND and end.tail - end.head >= CONNECTION_STEPS


def _is_empty(communicator: Communicator, end: HostConnection) -> bool:
    """Whether everything that came from the rank before in the ring has been read."""
    ring = communicator.ring(end.channel)
    from_ring = ring is not None and ring.prev == end.peer
    return end.direction is Direction.RECV and end.head is not None and end.head == end.tail and from_ring


def _group(communicator: Communicator) -> tuple[int, int, int]:
    """What tells communicators apart on every member alike."""
    first = next((peer.comm_address for peer in communicator.peers if peer.rank == 0), None)
    return communicator.hash, communicator.nranks, first or 0


def _global_ranks(samples: Iterable[ProcessSample]) -> dict[tuple[tuple[int, int, int], int], int]:
    """(communicator, rank in it) → rank in the job."""
    places = {}
    for sample in samples:
        largest = max(sample.communicators, key=lambda c: c.nranks, default=None)
        rank = sample.process.rank if sample.process.rank is not None else largest.rank if largest else None
        if rank is not None:
            for communicator in sample.communicators:
                places[_group(communicator), communicator.rank] = rank
    return places


def _resolve(
    places: Mapping[tuple[tuple[int, int, int], int], int], communicator: Communicator, rank: int, peer: int
) -> Iterator[Pair]:
    group = _group(communicator)
    waiting, other = places.get((group, rank)), places.get((group, peer))
    if other is None and communicator.nranks == max((key[0][1] for key in places), default=0):
        # Of the job's largest communicator the ranks are those of the job as far as the observed ones are.
        same = all(place == key[1] for key, place in places.items() if key[0] == group)
        other = peer if same else None
    if waiting is not None and other is not None:
        yield waiting, other
