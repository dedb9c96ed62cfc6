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
