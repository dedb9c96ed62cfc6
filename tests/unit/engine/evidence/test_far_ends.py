"""Which rank of the job is at the other end of a connection."""

from __future__ import annotations

from collections.abc import Sequence

from ncclwatch.engine.evidence.base import FactKind
from ncclwatch.engine.evidence.sockets import FlowFact
from ncclwatch.engine.flow_lines import far_end
from ncclwatch.engine.network import NetworkMemory
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, NetworkLook, SocketFacts
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import CommunicatorRef, Culprit
from unit.engine.evidence.said import of_network

HASH = 0xABC


def flow(rank: int, comm_rank: int, peer: int, ends: tuple[str, str] | None = None) -> FlowRecord:
    facts = SocketFacts(1, *ends) if ends else None
    kind = FlowKind.SOCKET if ends else FlowKind.RDMA
    return FlowRecord(
        100 + rank, kind, "", "nic", 0, FlowState.STALLED, "dead", rank, HASH, comm_rank, 0, peer, Direction.SEND, socket=facts
    )


def culprit(rank: int, comm_rank: int) -> Culprit:
    return Culprit(rank, comm_rank, "h", 1, 0, CommunicatorRef(f"{HASH:016x}", 4), None)


def found(flows: list[FlowRecord], culprits: Sequence[Culprit]) -> int | None:
    """Who is at the other end of the first of these connections."""
    memory = NetworkMemory()
    memory.feed("h", NetworkLook(flows=tuple(flows)), 1)
    facts = of_network(memory).facts.of(FactKind.FLOW_TROUBLE, FlowFact)
    return far_end(next(fact for fact in facts if fact.flow is flows[0]), culprits)


def test_a_socket_ends_at_the_one_with_the_addresses_changed_over() -> None:
    here, there = flow(5, 1, 0, ("a:1", "b:2")), flow(4, 0, 1, ("b:2", "a:1"))
    assert found([here, there], ()) == 4


def test_without_a_socket_the_communicator_tells() -> None:
    here, there = flow(5, 1, 0), flow(4, 0, 1)
    assert found([here, there], ()) == 4


def test_a_culprit_that_nobody_watches_is_known_by_its_verdict() -> None:
    here = flow(5, 1, 0, ("a:1", "b:2"))
    assert found([here], ()) is None
    assert found([here], [culprit(4, 0)]) == 4


def test_equal_hashes_of_two_communicators_leave_it_open() -> None:
    here = flow(5, 1, 0)
    assert found([here, flow(4, 0, 1), flow(8, 0, 1)], ()) is None
