"""Round trips of links, by what hosts measure of their connections."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.engine.case import Case
from ncclwatch.engine.evidence.base import FactKind, Measure
from ncclwatch.engine.evidence.round_trips import Link, RoundTrips, round_trips
from ncclwatch.engine.network import NetworkMemory
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, NetworkLook, RdmaCounts, SocketFacts
from ncclwatch.model.state import Direction
from unit.engine.evidence.said import case_of
from unit.synthetic import SECOND, WORLD, frozen_ring, looks

FLOW = FlowRecord(
    1001, FlowKind.SOCKET, "Socket", "eth0", 0, FlowState.ACTIVE, "", 1, WORLD, 1, 0, 2, Direction.SEND, role="data",
    socket=SocketFacts(1, "a", "b", rtt_us=2500),
)  # fmt: skip


def measured(*flows: FlowRecord, host: str = "node1") -> Case:
    memory = NetworkMemory()
    memory.feed(host, NetworkLook(flows=flows), 7 * SECOND)
    return case_of(looks(frozen_ring()), network=memory)


def test_the_longest_of_the_connections_of_a_link_is_its_round_trip() -> None:
    case = measured(FLOW, replace(FLOW, channel=1, socket=SocketFacts(1, "a", "b", rtt_us=4000)))
    assert round_trips(case) == {Link(1, 2): (7.0, 0.004)}
    (fact,) = (fact for fact in case.facts.of(FactKind.SLOWED, Measure) if fact.source == RoundTrips.name)
    assert fact.interval == (7.0, 7.0) and fact.quantity.unit == "s"
    assert fact.text.startswith("from rank 1 (node1, pid 1001) to rank 2 (node2, pid 1002)") and fact.text.endswith("4.0 ms")
    coverage = RoundTrips().coverage(case)
    assert (coverage.seen, coverage.wanted) == (1, 4)


def test_a_nics_completion_times_are_round_trips_as_well() -> None:
    rdma = replace(FLOW, kind=FlowKind.RDMA, socket=None, rdma=RdmaCounts(1, 2, 2, 0, True, latency_p50_ns=50_000.0))
    assert round_trips(measured(rdma)) == {Link(1, 2): (7.0, 50e-6)}


@pytest.mark.parametrize(
    "change",
    [
        {"direction": Direction.RECV}, {"role": "control"}, {"comm_hash": None}, {"comm_hash": 0xDEAD}, {"peer": 9}, {"pid": 7},
        {"socket": SocketFacts(1, "a", "b")},
    ],
)  # fmt: skip
def test_what_does_not_send_data_of_this_job_is_left_out(change: dict[str, object]) -> None:
    assert round_trips(measured(replace(FLOW, **change))) == {}  # type: ignore[arg-type]
    assert round_trips(measured(FLOW, host="node7")) == {}, "a process of that number on another host"
