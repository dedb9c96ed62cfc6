"""Ranks joined by shared memory: nothing that is queued shows, so what the rings say is all there is to know of who works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ncclwatch.collect.cadence import Cadence
from ncclwatch.collect.call_order import RECORD, CallOrder
from ncclwatch.engine.case import Case
from ncclwatch.engine.edges import Wait, laggards
from ncclwatch.engine.evidence.base import RankNode
from ncclwatch.engine.slow.findings import equals
from ncclwatch.engine.slow.kernels import OrderOf, read_kernels, waits_inside
from ncclwatch.engine.slow.snapshot import Activity, take_look
from ncclwatch.engine.slow.watch import SlowWatch
from ncclwatch.model.events import Function
from ncclwatch.model.job import Job, assemble
from ncclwatch.model.rings import rings_inside
from ncclwatch.model.state import Communicator, Direction, OpPhase, ProxyOperation, Transport
from unit.synthetic import Rank, communicator, recv, send, shared

WORLD = 4


OVER_NETWORK = 0xB2


def job_of(
    written: list[int], communicators: list[Communicator] | None = None, queued: dict[int, ProxyOperation] | None = None
) -> Job:
    """A ring in one host; each rank has written so many steps to the next and consumed all there was.

    ``queued`` are operations of another communicator of the same ranks, over the network, by rank.
    """
    ranks = []
    for rank, tail in enumerate(written):
        own = communicators[rank] if communicators else communicator(rank, WORLD, transport=Transport.SHM)
        came = written[(rank - 1) % WORLD]
        ends = (
            shared(Direction.SEND, (rank + 1) % WORLD, tail, tail),
            shared(Direction.RECV, (rank - 1) % WORLD, came, came),
        )
        both = (replace(own, host_connections=ends), *([communicator(rank, WORLD, comm_hash=OVER_NETWORK)] if queued else []))
        operations = (queued[rank],) if queued and rank in queued else ()
        ranks.append(Rank(rank, WORLD, both, operations, host="node"))
    (job,) = assemble([rank.looks(1) for rank in ranks])
    return job


def ring(*written: tuple[int, int]) -> Job:
    """A ring in one host; of each rank's connection to the next (steps that one has read, steps it has written)."""
    ranks = []
    for rank, ends in enumerate(written):
        own = communicator(rank, WORLD, transport=Transport.SHM)
        both = (shared(Direction.SEND, (rank + 1) % WORLD, *ends), shared(Direction.RECV, (rank - 1) % WORLD, *written[rank - 1]))
        ranks.append(Rank(rank, WORLD, (replace(own, host_connections=both),), host="node"))
    (job,) = assemble([rank.looks(1) for rank in ranks])
    return job


def lagging(job: Job) -> Iterable[Wait]:
    return laggards(job, Case(job).rings)


def ends_of_waits(waits: Iterable[Wait]) -> set[tuple[int, int]]:
    """(who waits, for whom), by rank."""
    return {
        (wait.subject.index, wait.object.index)
        for wait in waits
        if isinstance(wait.subject, RankNode) and isinstance(wait.object, RankNode)
    }


def activities(job: Job) -> list[Activity]:
    found = take_look(job).activities
    return [found[member.info.key] for member in job.members]


def test_who_is_behind_in_a_ring_works_and_the_others_wait() -> None:
    assert activities(job_of([8, 8, 4, 8])) == [Activity.WAITS, Activity.WAITS, Activity.COMPUTES, Activity.WAITS]


def test_who_waits_in_the_ring_waits_though_something_is_queued_for_the_network() -> None:
    """Called ahead and not begun: the GPU is in the ring before that, and not at work."""
    ahead = {rank: send((rank + 1) % WORLD, sent=0, done=0, produced=0, comm_hash=OVER_NETWORK) for rank in range(WORLD)}
    found = activities(job_of([8, 8, 4, 8], queued=ahead))
    assert found == [Activity.WAITS, Activity.WAITS, Activity.COMPUTES, Activity.WAITS]


def test_who_is_waited_for_and_waits_for_nobody_works_though_its_receive_says_nothing() -> None:
    silent = recv(1, posted=8, received=0, delivered=0, consumed=0, comm_hash=OVER_NETWORK, phase=OpPhase.READY)
    assert activities(job_of([8, 8, 4, 8], queued={2: silent}))[2] is Activity.COMPUTES
    assert set(activities(job_of([8, 8, 8, 8], queued={2: silent}))) == {Activity.UNKNOWN}


def test_where_nobody_waits_nothing_is_known_of_anybody() -> None:
    assert set(activities(job_of([8, 8, 8, 8]))) == {Activity.UNKNOWN}


def test_ends_of_a_ring_with_fewer_connections_do_equal_work() -> None:
    more = (0, 0, Direction.SEND, Transport.SHM)
    made = [communicator(rank, WORLD, transport=Transport.SHM) for rank in range(WORLD)]
    made[1:3] = [replace(one, transports=(*one.transports, more)) for one in made[1:3]]
    job, watch = job_of([8] * WORLD, made), SlowWatch()
    for member in job.members:
        watch.cadences.of[member.info.host, member.info.pid] = Cadence(program=7)
    assert equals(job, None, watch.cadences).tolist() == [0, 0, 0, 0]
    over_the_network = [communicator(rank, WORLD, transport=Transport.NET if rank else Transport.SHM) for rank in range(WORLD)]
    assert equals(job_of([8] * WORLD, over_the_network), None, watch.cadences).tolist() == [-1, 0, 0, 0], "seen by other means"


def waits_in(job: Job, order_of: OrderOf) -> list[Wait]:
    orders = {member.index: order_of(member.info.host, member.info.pid) for member in job.members}
    return list(waits_inside(job, {member.index: read_kernels(job, member, orders[member.index]) for member in job.members}))


def test_who_has_written_its_part_and_finds_nothing_to_read_waits_for_the_one_before() -> None:
    """Rank 2 has not begun: it has written nothing, 1 finds its buffer full, and 3 and 0 have passed on what they had."""
    job = ring((12, 16), (8, 16), (8, 8), (12, 12))
    assert activities(job) == [Activity.WAITS, Activity.WAITS, Activity.COMPUTES, Activity.WAITS]
    assert {(3, 2), (0, 3)} <= ends_of_waits(lagging(job)), "as their own counters say"


def test_who_is_amid_an_operation_and_has_something_to_read_moves_data() -> None:
    assert activities(ring((12, 12), (8, 12), (12, 12), (12, 12)))[2] is Activity.TRANSFERS


def test_a_ring_in_which_somebody_has_read_more_than_it_wrote_says_nothing() -> None:
    """A Broadcast leaves its root having written more, and the last one less."""
    job = ring((12, 12), (12, 12), (12, 12), (8, 8))
    (group,) = job.groups.values()
    assert not any(ring.amid for ring in rings_inside(group).values()) and Activity.TRANSFERS not in activities(job)
    (group,) = ring((12, 12), (12, 12), (12, 12), (12, 12)).groups.values()
    assert not any(ring.amid for ring in rings_inside(group).values())
    (group,) = ring((8, 12), (8, 8), (8, 8), (8, 8)).groups.values()
    assert {channel: set(ring.amid) for channel, ring in rings_inside(group).items()} == {0: {0}}


def test_nobody_waits_for_one_without_whom_it_could_not_have_come_so_far() -> None:
    """A rank is ahead of the one before by one chunk at most: more than that was read at another moment."""
    found = ends_of_waits(lagging(job_of([20, 8, 8, 8])))
    assert (0, 1) in found and (0, 2) not in found and (0, 3) not in found
    assert (0, 3) in ends_of_waits(lagging(job_of([12, 8, 8, 8])))


@pytest.mark.parametrize(
    ("shown", "expected", "why"),
    [
        ({}, {Activity.COMPUTES}, "its kernel writes its own part first, and has not"),
        ({"delivered": 8}, {Activity.COMPUTES}, "nor has it read what was delivered"),
        ({"written": 4}, {Activity.WAITS}, "it has written its part and waits for data"),
        ({"consumed": 4, "delivered": 8}, {Activity.WAITS, Activity.TRANSFERS}, "it has read"),
        ({"unread": 8}, {Activity.WAITS}, "it may be in the operation, and wait for room"),
        ({"written": -4}, {Activity.WAITS}, "the connection counts what other operations did"),
        ({"written": 400}, {Activity.WAITS}, "the connection counts what other operations did"),
        ({"protocol": "LL"}, {Activity.WAITS}, "LL does not move the tail"),
        ({"collective": "Broadcast"}, {Activity.WAITS}, "only a root begins with a send"),
    ],
)
def test_who_has_written_nothing_to_the_next_in_a_ring_has_not_begun(
    shown: dict[str, Any], expected: set[Activity], why: str
) -> None:
    """Data comes over the network and goes on through shared memory, as at the edge of a node; both count the same steps."""
    transports = ((0, WORLD - 1, Direction.RECV, Transport.NET), (0, 1, Direction.SEND, Transport.SHM))
    written, unread, delivered = (shown.get(name, 0) for name in ("written", "unread", "delivered"))
    tail = 960 + written
    ends = (shared(Direction.SEND, 1, tail - unread, tail),)
    own = replace(communicator(0, WORLD), host_connections=ends, transports=transports)
    got = recv(WORLD - 1, posted=8, received=delivered, delivered=delivered, consumed=shown.get("consumed", 0), base=960)
    got = replace(got, **{name: shown[name] for name in ("protocol", "collective") if name in shown})
    sends = send(0, sent=0, done=0, produced=0)
    rest = [Rank(rank, WORLD, (communicator(rank, WORLD),), (sends,) if rank == WORLD - 1 else ()) for rank in range(1, WORLD)]
    (job,) = assemble([rank.looks(1) for rank in (Rank(0, WORLD, (own,), (got,)), *rest)])
    assert take_look(job).activities[job.members[0].info.key] in expected, why


def exchange(*, unread: int, to_read: int, together: bool = True) -> tuple[Job, OrderOf]:
    """Two ranks that send to and receive from each other through shared memory: of what rank 0 has written so much is unread, and
    so much lies ready for it.
    """
    ranks, orders = [], {}
    for rank, (mine, theirs) in enumerate(((unread, to_read), (to_read, unread))):
        own = communicator(rank, 2, transport=Transport.SHM)
        ends = (shared(Direction.SEND, 1 - rank, 8 - mine, 8), shared(Direction.RECV, 1 - rank, 8 - theirs, 8))
        own = replace(own, host_connections=tuple(replace(end, connection_index=1) for end in ends))
        ranks.append(Rank(rank, 2, (own,), host="node"))
        calls = np.zeros(4, RECORD)
        called = [Function.GROUP_START, Function.SEND, Function.RECV, Function.GROUP_END]
        calls["function"] = called if together else [Function.SEND, Function.RECV] * 2
        calls["comm"], calls["peer"] = own.address, 1 - rank
        orders[rank] = CallOrder()
        orders[rank].add(calls)
    (job,) = assemble([rank.looks(1) for rank in ranks])
    pids = {member.info.pid: orders[member.rank or 0] for member in job.members}
    return job, lambda host, pid: pids[pid]


def inside(job: Job, order_of: OrderOf) -> list[Wait]:
    orders = {member.index: order_of(member.info.host, member.info.pid) for member in job.members}
    return list(waits_inside(job, {member.index: read_kernels(job, member, orders[member.index]) for member in job.members}))


def test_who_has_written_its_part_of_an_exchange_waits_for_the_one_who_reads_nothing() -> None:
    job, order_of = exchange(unread=1, to_read=0)
    assert ends_of_waits(inside(job, order_of)) == {(0, 1)}
    assert take_look(job, order_of).activities[job.members[0].info.key] is Activity.WAITS
    for left in (0, 1):
        assert not list(inside(*exchange(unread=left, to_read=left)))


def test_who_sends_by_itself_may_go_on_when_it_has_written() -> None:
    assert not list(inside(*exchange(unread=1, to_read=0, together=False)))


def begun_by(*inside: int, apart_s: float = 0.0) -> Counter[int]:
    """Thousandths of the waits that end at each rank, of a ring between hosts in which only ``inside`` have begun; rank 2 was
    sampled so much later than the others.
    """
    ranks, orders = [], {}
    for rank in range(WORLD):
        own = communicator(rank, WORLD)
        done = 4 if rank in inside else 0
        sends = send((rank + 1) % WORLD, sent=done, done=done, produced=done)
        came = 4 if (rank - 1) % WORLD in inside else 0
        receives = recv((rank - 1) % WORLD, posted=8, received=came, delivered=came, consumed=came if rank in inside else 0)
        ranks.append(Rank(rank, WORLD, (own,), (sends, receives)))
        calls = np.zeros(1, RECORD)
        calls["function"], calls["comm"] = Function.ALL_REDUCE, own.address
        orders[rank] = CallOrder()
        orders[rank].add(calls)
    samples = [rank.looks(1) for rank in ranks]
    samples[2] = [replace(one, wall_ns=one.wall_ns + int(apart_s * 1e9)) for one in samples[2]]
    (job,) = assemble(samples)
    of = {member.info.pid: member.rank or 0 for member in job.members}
    rank_of = {member.info.key: member.rank or 0 for member in job.members}
    look = take_look(job, lambda host, pid: orders[of[pid]], near_s=0.02)
    found = Counter[int]()
    for hold in look.holds:
        if hold.process is not None:
            found[rank_of[hold.process]] += round(1000 * hold.weight)
    return found


def test_two_that_have_not_begun_the_same_operation_hold_the_others_up_together() -> None:
    """The waits of a ring end at the last of them; it would wait for the other, had it begun."""
    assert begun_by(0, 1, 2) == {3: 750}
    assert begun_by(0, 1) == {2: 250, 3: 250}


def test_what_was_sampled_at_another_moment_holds_nobody_up_beside() -> None:
    assert begun_by(0, 1, apart_s=1.0) == {3: 500}
