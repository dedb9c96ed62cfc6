"""Waits in operations that a GPU has not begun make no cycle, and shared memory may hold what comes before them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.state import Communicator, Direction, HostConnection, ProxyOperation, Transport
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.simulate.records import Observer
from ncclwatch.simulate.run import simulate
from score.diagnosers import Ncclwatch
from score.drawn import draw_healthy
from unit.synthetic import Rank, communicator, looks, recv, send, shared

SCATTER, GATHER, TENSOR = 0xC1, 0xC2, 0xC3
STEPS = 4


def called(peer: int, comm_hash: int, collective: str, *, produced: int = 0, arrived: int = 0) -> tuple[ProxyOperation, ...]:
    """Both sides of an operation of which the GPU has produced so much; a rank that has produced all shows no send any more."""
    more = {"nsteps": STEPS, "op_count": 80, "collective": collective, "comm_hash": comm_hash}
    waiting = recv(peer, posted=STEPS, received=arrived, delivered=arrived, consumed=0, **more)
    if produced == STEPS:
        return (waiting,)
    return (waiting, send(peer, sent=produced, done=produced, produced=produced, **more))


def ahead(*, begun: bool, inside: Communicator | None = None) -> list[Rank]:
    """Two hosts that have called ReduceScatter and AllGather. Rank 0's GPU is in the former (``begun``), rank 1's in neither."""
    comms = [tuple(communicator(rank, 2, comm_hash=one) for one in (SCATTER, GATHER)) for rank in range(2)]
    first = called(1, SCATTER, "ReduceScatter", produced=STEPS if begun else 0)
    second = called(0, SCATTER, "ReduceScatter", arrived=STEPS if begun else 0)
    later = [called(1 - rank, GATHER, "AllGather") for rank in range(2)]
    return [
        Rank(0, 3, comms[0], (*first, *later[0])),
        Rank(1, 3, (*comms[1], *([inside] if inside else [])), (*second, *later[1])),
    ]


def said(ranks: list[Rank]) -> Verdict:
    return diagnose(looks(ranks, count=8))


def test_a_rank_that_is_at_two_operations_waits_in_neither() -> None:
    verdict = said(ahead(begun=True))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert [c.rank for c in verdict.culprits] == [1]


def test_where_nobody_has_begun_anything_there_is_no_cycle_either() -> None:
    """Long computation of all, with two operations called ahead."""
    verdict = said(ahead(begun=False))
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert not verdict.culprits
    assert verdict.rules == ("cycle",) and "does not single one out" in verdict.summary


PIPES = (0xD0, 0xD1)


def before_a_pipeline(*, peer_has_receive: bool = True, sender_in_it: bool = False) -> list[Rank]:
    """Ranks 0 and 1 are a tensor group, and receive from 2 and 3. Rank 0's GPU has not begun the group's AllReduce, in which rank
    1 is; 2 and 3 receive from 0 and 1 in turn. ``sender_in_it``: rank 2 is of the group as well, and waits in it for rank 0.
    """
    tensor = (0, 1, 2) if sender_in_it else (0, 1)

    def comms(rank: int) -> tuple[Communicator, ...]:
        pipe = communicator(rank // 2, 2, comm_hash=PIPES[rank % 2])
        group = (communicator(tensor.index(rank), len(tensor), comm_hash=TENSOR),) if rank in tensor else ()
        return (communicator(rank, 4), pipe, *group)

    def message(rank: int, number: int) -> ProxyOperation:
        more = {"nsteps": 2, "op_count": number, "collective": "Recv", "comm_hash": PIPES[rank % 2]}
        return recv(1 - rank // 2, posted=2, received=0, delivered=0, consumed=0, **more)

    beside = (message(1, 491),) if peer_has_receive else ()
    turned = called(0, TENSOR, "AllReduce", produced=STEPS) if sender_in_it else ()
    return [
        Rank(0, 4, comms(0), (*called(1, TENSOR, "AllReduce"), message(0, 491))),
        Rank(1, 4, comms(1), (*called(0, TENSOR, "AllReduce", produced=STEPS), *beside)),
        Rank(2, 4, comms(2), (message(2, 487), *turned)),
        Rank(3, 4, comms(3), (message(3, 487),)),
    ]


def test_a_pipeline_whose_first_gpu_still_computes_is_no_cycle() -> None:
    """Hosts that run ahead have opened the receives of the way back as well: by their calls, those come after what stands."""
    job = draw_healthy(67, 19, 300.0)
    assert job.layout.pp == 4
    work = replace(job.workload, forward_ms=30_000.0, iterations=1, host_ahead=64)
    timeline = simulate(replace(job, workload=work, lookalikes=()))
    *_, (_, verdict) = Ncclwatch().said(Observer(timeline, [0.7 + n for n in range(9)]).until(9.0))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert [culprit.rank for culprit in verdict.culprits] == [0]


def test_a_receive_that_did_not_hold_up_a_peer_comes_later() -> None:
    verdict = said(before_a_pipeline())
    assert verdict.verdict_class in (VerdictClass.HARDWARE, VerdictClass.NOT_ENTERED)
    assert [c.rank for c in verdict.culprits] == [0]


@pytest.mark.parametrize("known", [{"peer_has_receive": False}, {"sender_in_it": True}])
def test_a_receive_that_may_come_first_makes_a_cycle(known: dict[str, bool]) -> None:
    verdict = said(before_a_pipeline(**known))
    assert verdict.verdict_class is VerdictClass.DEADLOCK
    assert {0, 2} <= {c.rank for c in verdict.culprits}


def in_shared_memory(written: int, read: int, counts: dict[str, int]) -> Communicator:
    ends = (shared(Direction.SEND, 1, written, written), shared(Direction.RECV, 1, read, read))
    pair = communicator(0, 2, comm_hash=TENSOR, transport=Transport.SHM)
    return replace(pair, host_connections=ends, sequence_numbers=counts)


@pytest.mark.parametrize(
    ("written", "read", "counts", "accused"),
    [
        (2620, 2616, {}, None),
        (2620, 2620, {}, 1),
        (2616, 2620, {}, 1),
        (2620, 2616, {"AllReduce": 328}, 2),
        (2620, 2616, {"AllReduce": 327, "Broadcast": 1}, 1),
    ],
    ids=["may wait inside", "as much", "more read", "waits inside", "a broadcast is one-sided"],
)
def test_who_has_written_more_of_a_ring_than_read_may_be_in_an_operation_there(
    written: int, read: int, counts: dict[str, int], accused: int | None
) -> None:
    ranks = ahead(begun=True, inside=in_shared_memory(written, read, counts))
    other = replace(in_shared_memory(read, written, counts), rank=1)
    turned = tuple(replace(end, peer=0) for end in other.host_connections)
    rings = tuple(replace(ring, prev=0, next=0) for ring in other.rings)
    ranks.append(Rank(2, 3, (replace(other, host_connections=turned, rings=rings),)))
    verdict = said(ranks)
    assert [c.rank for c in verdict.culprits] == ([] if accused is None else [accused])
    if accused is None:
        assert verdict.verdict_class is VerdictClass.UNKNOWN
        assert any("written 2620 steps" in line for line in verdict.evidence)


@pytest.mark.parametrize(("written", "accused"), [(2620, []), (2616, [0])], ids=["waits inside", "has read as much"])
def test_an_idle_rank_that_waits_in_a_ring_for_one_nobody_observed_is_not_accused(written: int, accused: list[int]) -> None:
    inside = in_shared_memory(written, 2616, {"AllReduce": 328})
    idle = Rank(0, 4, (communicator(0, 2, comm_hash=SCATTER), inside))
    waiting = Rank(2, 4, (communicator(1, 2, comm_hash=SCATTER),), called(0, SCATTER, "ReduceScatter", produced=STEPS))
    verdict = said([idle, waiting])
    assert [c.rank for c in verdict.culprits] == accused, verdict.summary
    assert accused or "which was not observed" in verdict.summary


def test_who_is_in_the_middle_of_one_ring_is_not_in_the_next() -> None:
    """As read from a real job (2.21.5): rank 2's GPU stalled in a ReduceScatter; 0 has ended it, and waits in the AllGather."""
    first = {0: (28, 28), 1: (26, 28), 2: (18, 14), 3: (22, 18)}
    second = {0: (8, 0), 1: (0, 0), 2: (0, 0), 3: (0, 0)}

    def ends(rank: int, written: dict[int, tuple[int, int]]) -> tuple[HostConnection, ...]:
        after, before = (rank + 1) % 4, (rank - 1) % 4
        return (
            shared(Direction.SEND, after, written[after][1], written[rank][0]),
            shared(Direction.RECV, before, written[rank][1], written[before][0]),
        )

    comms = [
        tuple(
            replace(communicator(rank, 4, comm_hash=one, transport=Transport.SHM), host_connections=ends(rank, counts))
            for one, counts in ((SCATTER, first), (GATHER, second))
        )
        for rank in range(4)
    ]
    verdict = said([Rank(rank, 4, comms[rank], host="node") for rank in range(4)])
    assert verdict.verdict_class in (VerdictClass.HARDWARE, VerdictClass.NOT_ENTERED), verdict.summary
    assert [c.rank for c in verdict.culprits] == [2]


@pytest.mark.parametrize(
    ("calls", "ended", "accused"),
    [(208, 832, {1}), (208, 828, {0, 1}), (209, 832, {0, 1}), (2, 4, {0, 1}), (0, 832, {0, 1})],
    ids=["as many steps for each call", "one call less", "not as many for each", "by chance", "calls that are not known"],
)
def test_who_has_written_more_than_its_calls_amount_to_called_something_else(calls: int, ended: int, accused: set[int]) -> None:
    """As read from a real job (2.25.1): both called as often; 0 has ended all and waits elsewhere for 1, which asks more."""
    written = {TENSOR: (ended, ended + 4), GATHER: (296, 288)}
    read = {TENSOR: (ended, ended), GATHER: (288, 288)}

    def inside(rank: int, one: int) -> Communicator:
        other = 1 - rank
        ends = (
            shared(Direction.SEND, other, read[one][other], written[one][rank]),
            shared(Direction.RECV, other, read[one][rank], written[one][other]),
        )
        pair = communicator(rank, 2, comm_hash=one, transport=Transport.SHM)
        counts = {"AllReduce": calls} if one == TENSOR and calls else {}
        return replace(pair, host_connections=ends, sequence_numbers=counts)

    verdict = said([Rank(rank, 2, (inside(rank, TENSOR), inside(rank, GATHER)), host="node") for rank in range(2)])
    expected = VerdictClass.INCONSISTENT if accused == {1} else VerdictClass.DEADLOCK
    assert (verdict.verdict_class, {c.rank for c in verdict.culprits}) == (expected, accused), verdict.summary
