"""Which rank of the job is at the other end of a connection."""

from __future__ import annotations

from ncclwatch.engine.far_ends import FarEnds
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, SocketFacts
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import CommunicatorRef, Culprit

HASH = 0xABC


def flow(rank: int, comm_rank: int, peer: int, ends: tuple[str, str] | None = None) -> FlowRecord:
    facts = SocketFacts(1, *ends) if ends else None
    kind = FlowKind.SOCKET if ends else FlowKind.RDMA
    return FlowRecord(
        100 + rank, kind, "", "nic", 0, FlowState.STALLED, "", rank, HASH, comm_rank, 0, peer, Direction.SEND, socket=facts
    )


def culprit(rank: int, comm_rank: int) -> Culprit:
    return Culprit(rank, comm_rank, "h", 1, 0, CommunicatorRef(f"{HASH:016x}", 4), None)


def test_a_socket_ends_at_the_one_with_the_addresses_changed_over() -> None:
    here, there = flow(5, 1, 0, ("a:1", "b:2")), flow(4, 0, 1, ("b:2", "a:1"))
    assert FarEnds([here, there], ()).rank_of(here) == 4


def test_without_a_socket_the_communicator_tells() -> None:
    here, there = flow(5, 1, 0), flow(4, 0, 1)
    assert FarEnds([here, there], ()).rank_of(here) == 4


def test_a_culprit_that_nobody_watches_is_known_by_its_verdict() -> None:
    here = flow(5, 1, 0, ("a:1", "b:2"))
    assert FarEnds([here], ()).rank_of(here) is None
    assert FarEnds([here], [culprit(4, 0)]).rank_of(here) == 4


def test_equal_hashes_of_two_communicators_leave_it_open() -> None:
    here = flow(5, 1, 0)
    assert FarEnds([here, flow(4, 0, 1), flow(8, 0, 1)], ()).rank_of(here) is None
