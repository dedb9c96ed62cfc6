"""Transfers that one end has finished and the other has not: what was handed to the network is not the sender's fault."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.state import Direction, NetStep
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.synthetic import Rank, communicator, looks, recv, send

BEGIN, STEPS = 960, 96


def tail_of_a_ring(sent_by_0: int) -> list[Rank]:
    """The end of a ring of three. Rank 0 has nothing open towards rank 1, to whom the last steps have not come; ``sent_by_0`` is
    the step that rank 0's connection to it has come to.
    """
    communicators = [communicator(rank, 3) for rank in range(3)]
    communicators[0] = replace(communicators[0], net_steps=(NetStep(0, 1, Direction.SEND, 0, sent_by_0),))
    waits = {"delivered": 90, "consumed": 90}
    return [
        Rank(0, 3, (communicators[0],), (recv(2, posted=96, received=90, **waits),)),
        Rank(1, 3, (communicators[1],), (recv(0, posted=96, received=90, **waits), send(2, sent=92, done=92, produced=92))),
        Rank(2, 3, (communicators[2],), (recv(1, posted=96, received=92, delivered=92, consumed=92),
                                         send(0, sent=90, done=90, produced=90))),
    ]  # fmt: skip


def ends(verdict: Verdict) -> tuple[int, int] | None:
    return (verdict.link.source, verdict.link.destination) if verdict.link else None


def test_steps_that_were_sent_and_have_not_come_are_the_links() -> None:
    verdict = diagnose(looks(tail_of_a_ring(BEGIN + STEPS)))
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert ends(verdict) == (0, 1)
    assert any("finished this transfer" in line for line in verdict.evidence)


def test_a_rank_whose_connection_has_not_come_that_far_has_sent_nothing() -> None:
    """The same picture, but the transfer was never begun: no word of the link."""
    for step in (BEGIN, BEGIN - STEPS):
        verdict = diagnose(looks(tail_of_a_ring(step)))
        assert verdict.link is None
        assert verdict.verdict_class is not VerdictClass.HARDWARE


def test_a_receiver_that_is_through_waits_for_nobody_although_the_sender_was_not_told() -> None:
    """InfiniBand completes a send when it is acknowledged: without the acknowledgement the sender waits, for the network."""
    sender = communicator(0, 2)
    receiver = replace(communicator(1, 2), net_steps=(NetStep(0, 0, Direction.RECV, 0, BEGIN + STEPS),))
    ranks = [
        Rank(0, 2, (sender,), (send(1, sent=96, done=92, produced=96),)),
        Rank(1, 2, (receiver,), ()),
    ]
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert ends(verdict) == (0, 1)
