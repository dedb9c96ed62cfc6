"""What sockets say: paths without an answer, losses that TCP repairs, and which rank is at the other end of a connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ncclwatch.collect.network_memory import NetworkMemory, Way
from ncclwatch.engine.beside import far_end
from ncclwatch.engine.evidence.base import FactKind
from ncclwatch.engine.evidence.nics import DeadPath, FlowFact, dead_path
from ncclwatch.model.network import (
    FlowKind,
    FlowRecord,
    FlowState,
    NetworkLook,
    SocketFacts,
)
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import CommunicatorRef, Culprit
from unit.engine.evidence.said import of_network
from unit.synthetic import WORLD


def test_which_flows_are_dead_paths() -> None:
    facts = SocketFacts(1, "10.0.0.1:4711", "10.0.0.2:4712", unacknowledged=13, timeouts=6)
    send, state = Direction.SEND, FlowState.STALLED
    flow = FlowRecord(4711, FlowKind.SOCKET, "Socket", "eth0", 0, state, "no answer", 1, WORLD, 1, 0, 2, send, socket=facts)
    memory = NetworkMemory()

    def dead(flow: FlowRecord) -> list[DeadPath]:
        memory.feed("node1", NetworkLook(flows=(flow,)), 1)
        return list(of_network(memory).facts.of(FactKind.PATH_DEAD, DeadPath))

    assert dead(flow) == [dead_path(Way(WORLD, 1, 2), "10.0.0.1", "10.0.0.2", global_rank=1, timeouts=6)]
    assert dead(replace(flow, socket=replace(facts, timeouts=4))) == [], "TCP tries again"
    lossy = replace(flow, retries=90)
    assert dead(lossy) == [], "what loses much may still come through"
    assert dead(replace(lossy, socket=replace(facts, timeouts=7))) != []
    memory = NetworkMemory()
    assert dead(replace(flow, socket=replace(facts, unacknowledged=0))) == [], "nothing is under way"
    assert dead(replace(flow, state=FlowState.ACTIVE)) == []
    assert dead(replace(flow, comm_hash=None)) == [], "nobody knows whose it is"


SECOND = 1_000_000_000


def remembering(*looks: NetworkLook, host: str = "node1") -> NetworkMemory:
    memory = NetworkMemory()
    for number, look in enumerate(looks):
        memory.feed(host, look, number * SECOND)
    return memory


def trying(timeouts: int | None, unacknowledged: int = 3, peer: int = 2, retries: int = 0) -> FlowRecord:
    """A connection whose sockets have not been answered ``timeouts`` times in a row."""
    return FlowRecord(
        1, FlowKind.SOCKET, "Socket", "eth0", 0, FlowState.ACTIVE, "", 0, 0xA, 1, 0, peer, Direction.SEND, retries=retries,
        socket=SocketFacts(1, "a", "b", timeouts=timeouts, unacknowledged=unacknowledged),
    )  # fmt: skip


def retrying(memory: NetworkMemory) -> dict[Way, float | None]:
    facts = of_network(memory).facts.of(FactKind.RETRYING)
    return {fact.subject: fact.value for fact in facts if isinstance(fact.subject, Way)}


def test_sockets_that_try_again_are_told_until_they_have_tried_often() -> None:
    def told(*flows: FlowRecord) -> dict[int, float | None]:
        return {way.peer: worth for way, worth in retrying(remembering(NetworkLook(flows=flows))).items()}

    assert told(trying(1), trying(4, peer=3), trying(None, peer=4)) == {2: 7, 3: 7}
    assert told(trying(5), trying(2, peer=3, unacknowledged=0), trying(0, peer=4, unacknowledged=0)) == {}
    assert told(trying(0)) == {2: 30}, "something has come through since it was lost"
    assert told(trying(4, retries=14), trying(6, peer=3, retries=16), trying(7, peer=4, retries=90)) == {2: 60, 3: 60}
    assert told(trying(4, retries=13)) == {2: 7}, "of these it waits for four now"
    assert told(trying(1), trying(0), trying(5)) == {2: 30}, "two connections on one way"


def test_a_connection_that_lost_much_is_known_for_it_while_it_stands_still() -> None:
    """What its sockets sent again is counted over 30 s: of a standstill's second half no loss before it can be seen."""

    def told(seconds: int, timeouts: int, retries: int) -> list[float | None]:
        memory.feed("node1", NetworkLook(flows=(trying(timeouts, retries=retries),)), seconds * 1_000_000_000)
        return list(retrying(memory).values())

    memory = NetworkMemory()
    assert told(1000, 0, 12) == [60]
    assert told(1035, 2, 2) == [60]
    assert told(1119, 3, 3) == [60]
    assert told(1121, 3, 3) == [7], "long ago"


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
