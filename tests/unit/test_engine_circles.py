"""Waits in operations that a GPU has not begun make no circle, and shared memory may hold what comes before them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.state import Communicator, Direction, ProxyOperation, Transport
from ncclwatch.model.verdict import Verdict, VerdictClass
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


def test_a_rank_that_stands_before_two_operations_waits_in_neither() -> None:
    verdict = said(ahead(begun=True))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert [c.rank for c in verdict.culprits] == [1]


def test_where_nobody_has_begun_anything_there_is_no_circle_either() -> None:
    """Long computation of all, with two operations called ahead."""
    verdict = said(ahead(begun=False))
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert not verdict.culprits


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
