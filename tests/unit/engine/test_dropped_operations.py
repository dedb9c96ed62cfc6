"""Ranks that stand still before an operation their GPU has not begun, where a peer may have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ncclwatch.engine.case import Known
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.state import Communicator, Direction, PeerInfo, ProxyOperation
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.synthetic import Rank, communicator, looks, recv, send, shared

TENSOR, DATA, OTHER = 0xC1, 0xC2, 0xC3


def pair(comm_hash: int, own: int, members: tuple[int, int], *, one_host: bool = False) -> Communicator:
    peers = tuple(PeerInfo(i, host_hash=7 if one_host else 100 + rank, pid_hash=rank) for i, rank in enumerate(members))
    return replace(communicator(own, 2, comm_hash=comm_hash), peers=peers)


def left_by_the_killed(*, one_host: bool = False, called: bool = True, begun: int = 0, error: str | None = None) -> list[Rank]:
    """As read from a real job (2.27.5): rank 1 was killed in an AllReduce with rank 0, of which nothing is left.

    Rank 0 has called the next operation (``called``), with rank 2, which waits there; its GPU has produced ``begun`` steps of it.
    """
    host = "node" if one_host else None
    tensor = replace(pair(TENSOR, 0, (0, 1), one_host=one_host), async_result=error)
    next_one: tuple[ProxyOperation, ...] = ()
    if called:
        next_one = (
            send(1, sent=begun, done=begun, produced=begun, nsteps=4, comm_hash=DATA),
            recv(1, posted=4, received=4, delivered=4, consumed=begun, nsteps=4, comm_hash=DATA),
        )
    starving = (recv(0, posted=4, received=begun, delivered=begun, consumed=begun, nsteps=4, comm_hash=DATA),)
    first, third = (pair(DATA, own, (0, 2), one_host=one_host) for own in (0, 1))
    return [
        Rank(0, 3, (tensor, first), next_one, host=host),
        Rank(2, 3, (third,), starving, host=host),
    ]


def the_killed() -> Rank:
    return Rank(1, 3, (pair(TENSOR, 1, (0, 1)),), (), "X")


def said(ranks: Sequence[Rank], known: Known | None = None) -> tuple[VerdictClass, list[int | None]]:
    verdict: Verdict = diagnose(looks(ranks, count=8), known)
    return verdict.verdict_class, [culprit.rank for culprit in verdict.culprits]


@pytest.mark.parametrize("called", (True, False))
def test_a_rank_beside_one_that_was_seen_to_end_waits_for_it(called: bool) -> None:
    assert said([*left_by_the_killed(called=called), the_killed()]) == (VerdictClass.DEAD, [1])


def test_beside_one_that_was_not_observed_nobody_is_accused() -> None:
    verdict = diagnose(looks(left_by_the_killed(), count=8))
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert not verdict.culprits
    assert "rank 1" in verdict.summary and "not observed" in verdict.summary


@pytest.mark.parametrize("called", (True, False))
def test_one_that_is_missing_on_a_host_that_was_seen_whole_has_ended(called: bool) -> None:
    seen_whole = Known(complete_hosts=frozenset({"node"}))
    ranks = left_by_the_killed(one_host=True, called=called)
    verdict = diagnose(looks(ranks, count=8), seen_whole)
    assert verdict.verdict_class is VerdictClass.DEAD
    assert [(culprit.comm_rank, culprit.observed) for culprit in verdict.culprits] == [(1, False)]
    assert verdict.victims == (0, 2)


def test_who_ended_is_missed_where_waits_end_at_a_rank_that_shares_a_communicator_with_it() -> None:
    """As read from a real job (2.25.1) in shared memory: rank 1 was killed, which rank 3 waits for. That shows nowhere; data of
    rank 2 lies unread for it.
    """
    ends = (shared(Direction.SEND, 1, 48, 52), shared(Direction.RECV, 0, 48, 52))
    between = [replace(pair(DATA, own, (2, 3), one_host=True), host_connections=(ends[own],)) for own in (0, 1)]
    ranks = [
        Rank(2, 4, (between[0],), host="node"),
        Rank(3, 4, (between[1], pair(TENSOR, 1, (1, 3), one_host=True)), host="node"),
    ]
    verdict = diagnose(looks(ranks, count=8), Known(complete_hosts=frozenset({"node"})))
    assert verdict.verdict_class is VerdictClass.DEAD
    assert [(culprit.comm_rank, culprit.observed) for culprit in verdict.culprits] == [(0, False)]
    assert verdict.victims == (3,)
    # Where hosts were not seen whole it may well run.
    assert said(ranks)[0] is not VerdictClass.DEAD


@pytest.mark.parametrize("called", (True, False))
def test_an_error_on_the_communicator_with_it_says_that_it_has_ended(called: bool) -> None:
    ranks = left_by_the_killed(called=called, error="ncclRemoteError")
    assert said(ranks)[0] is VerdictClass.DEAD
    silent = Known(silent=frozenset({(TENSOR, 1)}))
    assert said(ranks, silent)[0] is not VerdictClass.DEAD, "its node has fallen silent, which says nothing of it"


def test_a_gpu_that_has_begun_is_in_the_operation_it_shows() -> None:
    assert said(left_by_the_killed(begun=2)) == (VerdictClass.HARDWARE, [0])


def test_who_has_not_called_is_named_as_long_as_nobody_is_known_to_have_ended() -> None:
    assert said(left_by_the_killed(called=False)) == (VerdictClass.NOT_ENTERED, [0])


def test_a_rank_that_ended_and_has_nothing_in_common_with_who_stands_still_is_not_missed() -> None:
    elsewhere = Rank(3, 4, (pair(OTHER, 1, (2, 3)),), (), "X")
    ranks = left_by_the_killed(called=False)
    ranks[1] = replace(ranks[1], communicators=(*ranks[1].communicators, pair(OTHER, 0, (2, 3))))
    assert said([*ranks, elsewhere]) == (VerdictClass.NOT_ENTERED, [0])


@pytest.mark.parametrize(("failed", "left", "named"), [(False, "X", []), (True, "X", [2, 3]), (False, "S", [2])])
def test_who_ended_with_all_it_was_seen_in_a_collective_with_is_missed_only_if_it_failed(
    failed: bool, left: str, named: list[int]
) -> None:
    """Ranks of a job that is over end one after the other; the last look at some of them was in their last operation."""
    ranks = []
    for rank in range(4):
        beside = pair(OTHER if rank > 1 else TENSOR, rank % 2, (2, 3) if rank > 1 else (0, 1))
        waits = recv(1 - rank % 2, posted=4, received=0, delivered=0, consumed=0, nsteps=4, comm_hash=OTHER)
        state = ("S", "S", "X", left)[rank]
        ranks.append(Rank(rank, 4, (communicator(rank, 4), beside), (waits,) if rank > 1 else (), state))
    keys = {series[0].process.key for series in looks(ranks) if series[0].run_state == "X"}
    assert said(ranks, Known(failed=keys if failed else frozenset()))[1] == named


def test_whose_host_was_seen_whole_by_others_has_ended_too() -> None:
    """Rank 0 is on another host than rank 1, of which rank 3 was seen, in another communicator."""
    ranks = left_by_the_killed()
    peers = (PeerInfo(0, host_hash=100, pid_hash=0), PeerInfo(1, host_hash=9, pid_hash=1))
    ranks[0] = replace(ranks[0], communicators=(replace(ranks[0].communicators[0], peers=peers), ranks[0].communicators[1]))
    ranks[1] = replace(ranks[1], communicators=(*ranks[1].communicators, pair(OTHER, 0, (2, 3))))
    neighbour = pair(OTHER, 1, (2, 3))
    neighbour = replace(neighbour, peers=(neighbour.peers[0], PeerInfo(1, host_hash=9, pid_hash=3)))
    ranks.append(Rank(3, 4, (neighbour,), host="node1"))
    assert said(ranks)[0] is VerdictClass.UNKNOWN
    assert said(ranks, Known(complete_hosts=frozenset({"node1"})))[0] is VerdictClass.DEAD


def test_a_process_that_runs_has_not_ended_although_one_of_its_communicators_was_not_found() -> None:
    """Communicators made while a job runs are found a little later in one process than in another."""
    seen_whole = Known(complete_hosts=frozenset({"node"}))
    world = tuple(PeerInfo(rank, host_hash=7, pid_hash=rank) for rank in range(2))
    everywhere = [replace(communicator(rank, 2), peers=world) for rank in range(2)]
    starving = recv(1, posted=4, received=0, delivered=0, consumed=0, nsteps=4, comm_hash=TENSOR)
    waiting = Rank(0, 2, (everywhere[0], pair(TENSOR, 0, (0, 1), one_host=True)), (starving,), host="node")
    found_in_part = Rank(1, 2, (everywhere[1],), host="node")
    assert said([waiting, found_in_part], seen_whole)[0] is VerdictClass.UNKNOWN
    assert said([waiting, replace(found_in_part, run_state="X")], seen_whole) == (VerdictClass.DEAD, [1])
    broken = replace(waiting, communicators=tuple(replace(c, async_result="ncclRemoteError") for c in waiting.communicators))
    assert said([broken, found_in_part], seen_whole)[0] is not VerdictClass.DEAD
