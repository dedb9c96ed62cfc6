"""NCCL's own counts of calls: the one rank of a cycle that lacks a call, and ranks whose counts contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ncclwatch.engine.case import Case
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.engine.evidence.calls import SequenceCounts
from ncclwatch.model.job import assemble
from ncclwatch.model.state import Communicator, Direction, ProxyOperation, Transport
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.engine.test_net_steps import BEGIN, tail_of_a_ring
from unit.engine.test_net_steps import STEPS as RING_STEPS
from unit.synthetic import Rank, communicator, looks, recv, send, shared

FIRST, SECOND = 0xC1, 0xC2
STEPS = 4

Counts = dict[str, int]


def cycle(*, scattered: tuple[Counts, Counts], launched: tuple[int | None, int | None] = (None, None)) -> list[Rank]:
    """As read from a real job (2.27.5) of which rank 0 left out ReduceScatter #40 on ``SECOND``, where rank 1 waits for it.

    Rank 0 waits in AllGather #40 on ``FIRST``, which rank 1 has called too. ``scattered`` are the counts on ``SECOND``.
    """
    gathered = {"AllGather": 41}

    def comms(rank: int) -> tuple[Communicator, ...]:
        first = replace(communicator(rank, 2, comm_hash=FIRST), sequence_numbers=gathered if scattered[rank] else {}, op_count=41)
        second = replace(communicator(rank, 2, comm_hash=SECOND), sequence_numbers=scattered[rank], op_count=launched[rank])
        return (communicator(rank, 2), first, second)

    def starving(peer: int, collective: str, comm_hash: int, arrived: int = 0) -> ProxyOperation:
        more = {"nsteps": STEPS, "op_count": 80, "collective": collective, "comm_hash": comm_hash}
        return recv(peer, posted=STEPS, received=arrived, delivered=arrived, consumed=0, **more)

    called = (
        send(0, sent=0, done=0, produced=0, nsteps=STEPS, op_count=80, collective="AllGather", comm_hash=FIRST),
        starving(0, "AllGather", FIRST, STEPS),
    )
    return [
        Rank(0, 2, comms(0), (starving(1, "AllGather", FIRST),)),
        Rank(1, 2, comms(1), (starving(0, "ReduceScatter", SECOND), *called)),
    ]


def said(ranks: Sequence[Rank], version: tuple[int, int, int] = (2, 27, 5)) -> Verdict:
    series = looks(ranks, count=8)
    return diagnose([[replace(s, process=replace(s.process, version=version)) for s in samples] for samples in series])


def named(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


def test_the_only_rank_of_a_cycle_that_has_not_called_is_named() -> None:
    verdict = said(cycle(scattered=({"ReduceScatter": 40}, {"ReduceScatter": 41})))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert named(verdict) == [0]
    assert verdict.operation is not None and verdict.operation.name == "ReduceScatter"
    assert verdict.victims == (1,)
    assert any("order of finished calls" in line for line in verdict.unobserved)


def test_the_same_by_the_launches_where_a_release_counts_no_more() -> None:
    verdict = said(cycle(scattered=({}, {}), launched=(40, 41)), (2, 21, 5))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.NOT_ENTERED, [0])
    # As many launches, but not this one: another went in its place.
    verdict = said(cycle(scattered=({}, {}), launched=(41, 41)), (2, 21, 5))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.INCONSISTENT, [0])


def test_who_is_alone_in_what_the_others_ended_as_something_else_is_named() -> None:
    """As read from a real job (2.21.5): rank 1 called AllReduce, the others ReduceScatter, and went on to the AllGather."""

    def comms(rank: int) -> tuple[Communicator, ...]:
        return tuple(replace(communicator(rank, 3, comm_hash=one), op_count=41) for one in (FIRST, SECOND))

    def gather(source: int, arrived: int = 0) -> ProxyOperation:
        more = {"nsteps": STEPS, "op_count": 80, "collective": "AllGather", "comm_hash": FIRST}
        return recv(source, posted=STEPS, received=arrived, delivered=arrived, consumed=arrived % STEPS, **more)

    part = {"nsteps": STEPS, "op_count": 80, "comm_hash": SECOND, "collective": "AllReduce"}
    own = recv(0, posted=STEPS, received=0, delivered=0, consumed=0, **part)

    def gathers(peer: int, produced: int) -> ProxyOperation:
        more = {"nsteps": STEPS, "op_count": 80, "collective": "AllGather", "comm_hash": FIRST}
        return send(peer, sent=produced, done=produced, produced=produced, **more)

    ranks = [
        Rank(0, 3, comms(0), (gather(2, 1),)),
        Rank(1, 3, comms(1), (own, gathers(2, 0), gather(0, STEPS))),
        Rank(2, 3, comms(2), (gather(1), gathers(0, 1))),
    ]
    verdict = said(ranks, (2, 21, 5))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.INCONSISTENT, [1])
    assert "gone on" in verdict.summary


def test_counts_are_compared_behind_a_link_that_seems_to_carry_nothing() -> None:
    counts: list[Counts] = [{"AllReduce": 12, "Broadcast": 1}, {"AllReduce": 13}, {"AllReduce": 13}]
    ranks = tail_of_a_ring(BEGIN + RING_STEPS)
    ranks = [
        replace(rank, communicators=(replace(rank.communicators[0], sequence_numbers=own),))
        for rank, own in zip(ranks, counts, strict=True)
    ]
    verdict = said(ranks)
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.INCONSISTENT, [0])


def test_what_counts_proxy_work_alone_proves_nothing() -> None:
    verdict = said(cycle(scattered=({}, {}), launched=(40, 41)), (2, 27, 5))
    assert verdict.verdict_class is VerdictClass.DEADLOCK


@pytest.mark.parametrize("counts", (({}, {}), ({"ReduceScatter": 41}, {"ReduceScatter": 41})))
def test_a_cycle_is_all_that_is_said_where_the_counts_do_not_tell(counts: tuple[Counts, Counts]) -> None:
    verdict = said(cycle(scattered=counts))
    assert verdict.verdict_class is VerdictClass.DEADLOCK
    assert named(verdict) == [0, 1]
    assert verdict.confidence <= 0.6


def test_what_was_called_in_the_place_of_another_is_named_by_its_count() -> None:
    verdict = said(cycle(scattered=({"ReduceScatter": 40, "Broadcast": 1}, {"ReduceScatter": 41})))
    assert verdict.verdict_class is VerdictClass.INCONSISTENT
    assert named(verdict) == [0]
    assert any("Broadcast once" in line for line in verdict.evidence)
    assert "Broadcast" in verdict.summary


def test_where_both_calls_are_usual_nobody_of_two_is_more_wrong_than_the_other() -> None:
    verdict = said(cycle(scattered=({"ReduceScatter": 40, "Broadcast": 41}, {"ReduceScatter": 41, "Broadcast": 40})))
    assert verdict.verdict_class is VerdictClass.INCONSISTENT
    assert named(verdict) == [0, 1]
    assert verdict.confidence <= 0.5


def disagreeing(*counts: Counts, captured: int = 0) -> list[int]:
    """Of ranks with these counts on one communicator, those to be named."""
    size = len(counts)
    ranks = [
        Rank(rank, size, (replace(communicator(rank, size), sequence_numbers=own, captured_plans=captured),))
        for rank, own in enumerate(counts)
    ]
    (job,) = assemble(looks(ranks))
    return [rank for found in SequenceCounts().facts(Case(job)) for rank in sorted(found.odd)]


def test_one_among_many_is_the_odd_one() -> None:
    usual: Counts = {"AllReduce": 40, "AllGather": 40}
    assert disagreeing(usual, usual, {"AllReduce": 41, "AllGather": 39}, usual) == [2]


def test_a_rank_that_is_behind_or_ahead_does_not_disagree() -> None:
    assert disagreeing({"AllReduce": 40, "AllGather": 40}, {"AllReduce": 41, "AllGather": 40}, {"AllReduce": 39}) == []
    assert disagreeing({}, {"AllReduce": 1}) == []


def test_calls_captured_in_graphs_are_not_counted_everywhere_and_prove_nothing() -> None:
    assert disagreeing({"AllReduce": 41}, {"AllReduce": 40, "Broadcast": 1}, captured=1) == []


def gone_on(written: int, taken: int, *, called: int = 832) -> Verdict:
    """As read from a real job (2.25.1, shared memory): both have called 832 times on ``FIRST``, where rank 1 waits for rank 0.

    Rank 0 waits for rank 1 in an operation of ``SECOND``. Calls of rank 1 have eight steps. ``written`` and ``taken`` are steps
    that rank 0 has written to rank 1, and read.
    """

    # Written and read, of each rank.
    moved = {FIRST: ((written, taken), (6656, written)), SECOND: ((296, 288), (288, 288))}
    counts = {FIRST: (called, 832), SECOND: (13, 13)}

    def comms(rank: int) -> tuple[Communicator, ...]:
        found, peer = [], 1 - rank
        for comm_hash, steps in moved.items():
            (out, taken_in), (there, taken_there) = steps[rank], steps[peer]
            ends = (shared(Direction.SEND, peer, taken_there, out), shared(Direction.RECV, peer, taken_in, there))
            own = communicator(rank, 2, comm_hash=comm_hash, transport=Transport.SHM)
            found.append(replace(own, host_connections=ends, op_count=counts[comm_hash][rank]))
        return tuple(found)

    return said([Rank(rank, 2, comms(rank)) for rank in (0, 1)], (2, 25, 1))


def test_who_has_gone_on_and_written_less_than_its_calls_amount_to_has_called_something_else() -> None:
    verdict = gone_on(6652, 6648)
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.INCONSISTENT, [0]), verdict
    assert "written less than their calls amount to" in verdict.summary
    # It may not have begun the last of them: an order.
    assert gone_on(6648, 6648).verdict_class is VerdictClass.DEADLOCK
    assert gone_on(6652, 6648, called=831).verdict_class is not VerdictClass.INCONSISTENT
