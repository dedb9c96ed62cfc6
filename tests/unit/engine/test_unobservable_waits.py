"""Ranks with nothing open that are joined to others by NVLink: whom they wait for, and when nothing can be said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.state import Communicator, Transport
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.synthetic import Rank, communicator, looks, recv, send

TENSOR, DATA, PIPE = 0xB0, 0xD0, 0xE0


def tensor(rank: int, called: int | None) -> Communicator:
    """A rank's place in a tensor group of two, joined by NVLink, with so many AllReduces counted."""
    own = communicator(rank, 2, comm_hash=TENSOR, transport=Transport.P2P)
    return replace(own, sequence_numbers={} if called is None else {"AllReduce": called})


def job(called: tuple[int | None, int | None], *, cut: bool) -> list[Rank]:
    """Ranks 0 and 1 are a tensor group. Rank 2 waits for rank 1, which has nothing open; with ``cut`` rank 0 waits for data that
    rank 3 has sent and that does not arrive.
    """
    data = [communicator(rank, 2, comm_hash=DATA) for rank in (0, 1)]
    pipe = [communicator(rank, 2, comm_hash=PIPE) for rank in (0, 1)]
    held = (recv(1, posted=8, received=4, delivered=4, consumed=4, comm_hash=DATA),)
    other = (send(0, sent=8, done=4, produced=8, comm_hash=DATA),)
    waits = (recv(0, posted=8, received=0, delivered=0, consumed=0, comm_hash=PIPE),)
    return [
        Rank(0, 4, (tensor(0, called[0]), data[0]), held if cut else ()),
        Rank(1, 4, (tensor(1, called[1]), pipe[0])),
        Rank(2, 4, (pipe[1],), waits),
        Rank(3, 4, (data[1],), other if cut else ()),
    ]


def said(called: tuple[int | None, int | None], *, cut: bool) -> Verdict:
    return diagnose(looks(job(called, cut=cut), 8))


def test_a_rank_that_has_called_what_its_peer_has_not_waits_for_the_peer() -> None:
    """Rank 0 stands idle elsewhere: it has called less, so it is named and not rank 1."""
    verdict = said((5, 6), cut=False)
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED and [c.rank for c in verdict.culprits] == [0]
    assert set(verdict.victims) == {1, 2}
    assert any("6 calls there, 5 by that one" in line for line in verdict.evidence)


@pytest.mark.parametrize("called", [(5, 6), (5, 5), (None, None)], ids=["behind", "level", "not counted"])
def test_a_rank_whose_peer_is_held_up_by_a_link_is_not_accused(called: tuple[int | None, int | None]) -> None:
    verdict = said(called, cut=True)
    assert verdict.verdict_class is VerdictClass.HARDWARE, verdict.summary
    assert verdict.link is not None and {c.rank for c in verdict.culprits} == {0, 3}


@pytest.mark.parametrize("called", [(5, 5), (6, 5), (None, None)])
def test_a_rank_whose_peer_does_not_wait_is_named(called: tuple[int | None, int | None]) -> None:
    verdict = said(called, cut=False)
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED and [c.rank for c in verdict.culprits] == [1]


def test_a_rank_that_is_behind_its_peer_is_named_although_the_peer_waits_too() -> None:
    """The cut link explains rank 0's wait, not that rank 1 has not called what rank 0 has."""
    verdict = said((6, 5), cut=True)
    assert 1 in {c.rank for c in verdict.culprits}


def two_nodes(called: tuple[int, int]) -> list[Rank]:
    """Two nodes of two ranks. Rank 0 waits for rank 2 across the network; ranks 1 and 3, beside them by NVLink, have called an
    operation across it too that neither GPU has begun. ``called``: AllReduces that ranks 2 and 3 have called on one of their
    communicators inside the node; on another they have called as many.
    """
    open_ = {"posted": 8, "received": 0, "delivered": 0, "consumed": 0}
    data = [communicator(rank, 2, comm_hash=DATA) for rank in (0, 1)]
    other = [communicator(rank, 2, comm_hash=PIPE) for rank in (0, 1)]
    inside = [replace(tensor(rank, count), hash=TENSOR + 1) for rank, count in zip((0, 1), called, strict=True)]
    level = [replace(tensor(rank, 9), hash=TENSOR + 2, address=TENSOR + 2) for rank in (0, 1)]
    unbegun = [(send(peer, sent=0, done=0, produced=0, comm_hash=PIPE), recv(peer, comm_hash=PIPE, **open_)) for peer in (1, 0)]
    begun = (send(1, sent=4, done=4, produced=4, comm_hash=DATA), recv(1, comm_hash=DATA, **open_))
    return [
        Rank(0, 4, (tensor(0, 6), data[0]), begun),
        Rank(1, 4, (tensor(1, 6), other[0]), unbegun[0]),
        Rank(2, 4, (level[0], inside[0], data[1])),
        Rank(3, 4, (level[1], inside[1], other[1]), unbegun[1]),
    ]


def test_an_operation_that_nobody_has_begun_is_no_cycle() -> None:
    """Ranks 1 and 3 wait for each other in it, and for others before it: rank 3 for rank 2, which has called less than it."""
    verdict = diagnose(looks(two_nodes((5, 6)), 8))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [2]


def test_an_operation_called_ahead_hides_no_gpu_that_stands_in_another() -> None:
    """Nothing tells whom ranks 1 and 3 wait for; rank 2's GPU has stopped amid what rank 0 waits for."""
    ranks = two_nodes((6, 6))
    arrived = {"posted": 8, "received": 8, "delivered": 8, "consumed": 4}
    stopped = (send(0, sent=4, done=4, produced=4, comm_hash=DATA), recv(0, comm_hash=DATA, **arrived))
    verdict = diagnose(looks([*ranks[:2], replace(ranks[2], operations=stopped), ranks[3]], 8))
    assert verdict.verdict_class is VerdictClass.HARDWARE, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [2]


def test_ranks_that_have_called_as_much_are_not_told_apart_by_it() -> None:
    verdict = diagnose(looks(two_nodes((6, 6)), 8))
    assert not {1, 3} & {culprit.rank for culprit in verdict.culprits}, verdict.summary


@pytest.mark.parametrize(("made", "named"), [(None, []), ((3,), []), ((), [2])], ids=["unread", "connected", "none"])
def test_a_rank_without_connections_for_messages_waits_for_none(made: tuple[int, ...] | None, named: list[int]) -> None:
    """The communicator of all ranks has its rings and was never used: only where rank 2 has connections for a Send or Recv with
    rank 3 on it, it may wait there.
    """
    ranks = two_nodes((5, 6))
    made_by_rank = [communicator(rank, 4, transport=Transport.P2P) for rank in range(4)]
    whole = [replace(own, sequence_numbers={"AllReduce": 0}, message_peers=made) for own in made_by_rank]
    verdict = diagnose(looks([replace(one, communicators=(*one.communicators, whole[one.rank])) for one in ranks], 8))
    assert [culprit.rank for culprit in verdict.culprits] == named, verdict.summary
