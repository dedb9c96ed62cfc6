"""The flow map: two ends of a connection become one flow each way, with what is known of it and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, NicRecord, QueuePairEnds, SocketFacts, StepRate
from ncclwatch.model.paths import FiveTuple, NicPort, NodeView, Origin, Protocol
from ncclwatch.model.state import Direction
from ncclwatch.paths.flow_map import endpoint, flow_map, measured_flows, to_capture

SEND = FlowRecord(
    pid=11, kind=FlowKind.SOCKET, network="Socket", device="eth0", port=0, state=FlowState.ACTIVE, global_rank=8, comm_hash=0xABC,
    rank=0, channel=0, peer=1, direction=Direction.SEND, connection_index=0, role="data", bandwidth=3e9,
    steps=StepRate(10, 30.0, 5, 6, 1.0), socket=SocketFacts(1, "10.0.0.1:50000", "10.0.0.2:40000"),
)  # fmt: skip
RECV = replace(
    SEND, pid=12, global_rank=9, rank=1, peer=0, direction=Direction.RECV, bandwidth=2e9,
    socket=SocketFacts(1, "10.0.0.2:40000", "10.0.0.1:50000"),
)  # fmt: skip
ROCE = replace(
    SEND, kind=FlowKind.RDMA, network="IB", device="mlx5_0", port=1, socket=None, ends=QueuePairEnds(17, 0, "10.0.0.2")
)
ROCE_RECV = replace(ROCE, pid=12, global_rank=9, rank=1, peer=0, direction=Direction.RECV, ends=QueuePairEnds(18, 0, "10.0.0.1"))
ETH0 = NicRecord("a", "eth0", "netdev", True, "up", rate_gbps=100.0)
MLX5 = NicRecord(
    "a", "mlx5_0:1", "rdma", True, "active", rate_gbps=400.0, link_layer="Ethernet", driver="mlx5_core", kernel="6.1.0-56-amd64"
)


def test_a_socket_seen_from_both_ends_is_one_flow() -> None:
    (one,) = flow_map([NodeView("a", [SEND], [ETH0]), NodeView("b", [RECV])])
    flow = one.flow
    assert flow.tuple == FiveTuple(Protocol.TCP, "10.0.0.1", 50000, "10.0.0.2", 40000)
    assert (flow.origin, flow.source, flow.destination) == (Origin.SEEN, NicPort("a", "eth0"), NicPort("b", "eth0"))
    assert (flow.rank, flow.peer, one.global_rank, one.global_peer) == (0, 1, 8, 9)
    assert (flow.rate, flow.share, flow.job, one.rate_gbps, one.missing) == (3e9, 1.0, f"{0xABC:016x}", 100.0, ())


def test_what_the_receiver_alone_tells_is_turned_round() -> None:
    (one,) = flow_map([NodeView("b", [RECV])])
    assert one.flow.tuple == FiveTuple(Protocol.TCP, "10.0.0.1", 50000, "10.0.0.2", 40000)
    assert one.flow.source == NicPort("10.0.0.1", "") and one.flow.rate == 2e9
    assert one.missing == ("the sending process was not looked at",)


def test_both_ends_of_a_queue_pair_give_its_port() -> None:
    back, there = replace(ROCE, channel=1), replace(ROCE_RECV, channel=1)
    flows = flow_map([NodeView("a", [ROCE, back], [MLX5]), NodeView("b", [there, ROCE_RECV])])
    for one in flows:
        assert one.flow.tuple == FiveTuple(Protocol.UDP, "10.0.0.1", 0xC132, "10.0.0.2", 4791)
        assert (one.flow.origin, one.rule, one.flow.queue_pair, one.missing) == (Origin.PREDICTED, "both-queue-pairs", 17, ())
        assert one.flow.source == NicPort("a", "mlx5_0:1") and one.flow.share == 0.5


@pytest.mark.parametrize(
    ("views", "said"),
    [
        ([NodeView("a", [ROCE], [MLX5])], "the other end was not looked at"),
        ([NodeView("a", [ROCE]), NodeView("b", [ROCE_RECV])], "the driver of the NIC is not known"),
        ([NodeView("a", [ROCE], [replace(MLX5, driver="bnxt_en")]), NodeView("b", [ROCE_RECV])], "no rule is known"),
        ([NodeView("a", [ROCE], [replace(MLX5, link_layer="InfiniBand")])], "LIDs"),
        ([NodeView("a", [replace(ROCE, ends=None)], [MLX5]), NodeView("b", [ROCE_RECV])], "queue pair is not known"),
        ([NodeView("a", [replace(ROCE, ends=QueuePairEnds(17))], [MLX5]), NodeView("b", [ROCE_RECV])], "address it sends to"),
        ([NodeView("a", [replace(SEND, kind=FlowKind.OTHER, network="FasTrak")])], "FasTrak"),
        ([NodeView("a", [replace(SEND, socket=None)])], "told apart"),
    ],
)
def test_what_is_missing_is_said_and_no_port_made_up(views: list[NodeView], said: str) -> None:
    (one,) = flow_map(views)
    assert one.flow.tuple is None and any(said in text for text in one.missing), one.missing


def test_several_queue_pairs_are_joined_by_their_place_and_share_evenly() -> None:
    second, answer = (
        replace(ROCE, ends=QueuePairEnds(0x123, 1, "10.0.0.2")),
        replace(ROCE_RECV, ends=QueuePairEnds(0x456, 1, "10.0.0.1")),
    )
    flows = flow_map([NodeView("a", [ROCE, second], [MLX5]), NodeView("b", [answer, ROCE_RECV])])
    assert [one.flow.tuple.source_port for one in flows if one.flow.tuple] == [0xC132, 0xEDD1]
    assert [one.flow.share for one in flows] == [0.5, 0.5]


def test_shares_follow_steps_then_rates_and_are_unknown_without_either() -> None:
    slow = replace(SEND, channel=1, steps=StepRate(10, 10.0, 5, 6, 1.0), bandwidth=1e9)
    assert [one.flow.share for one in flow_map([NodeView("a", [SEND, slow])])] == [0.75, 0.25]
    idle = replace(SEND, channel=2, steps=None, bandwidth=None)
    assert [one.flow.share for one in flow_map([NodeView("a", [SEND, slow, idle])])] == [0.75, 0.25, 0.0]
    still = [replace(SEND, steps=None), replace(slow, steps=None)]
    assert [one.flow.share for one in flow_map([NodeView("a", still)])] == [0.75, 0.25]
    dumb = [replace(one, bandwidth=None) for one in still]
    assert [one.flow.share for one in flow_map([NodeView("a", dumb)])] == [None, None]


def test_communicators_of_one_process_are_one_job_and_others_are_not() -> None:
    other = replace(SEND, comm_hash=0xDEF, rank=0, peer=1)
    stranger = replace(SEND, pid=99, comm_hash=0x111)
    flows = flow_map([NodeView("a", [SEND, other, stranger]), NodeView("b", [RECV])])
    assert {one.comm_hash: one.flow.job for one in flows} == {
        0xABC: f"{0xABC:016x}", 0xDEF: f"{0xABC:016x}", 0x111: f"{0x111:016x}"
    }  # fmt: skip


def test_a_bond_whose_port_is_hashed_is_not_guessed() -> None:
    bond = replace(ETH0, name="bond0", bond=("eth0", "eth1"))
    record = replace(SEND, device="bond0")
    (one,) = flow_map([NodeView("a", [record], [bond])])
    assert one.bond == ("eth0", "eth1") and not one.link_known and "which of 2 ports" in one.missing[0]
    (one,) = flow_map([NodeView("a", [record], [replace(bond, bond_active="eth1")])])
    assert one.link_known and one.flow.source == NicPort("a", "bond0", 1) and not one.missing


def test_a_flow_of_a_job_set_up_for_adaptive_routing_has_a_port_and_no_path() -> None:
    (one,) = flow_map([NodeView("a", [replace(ROCE, adaptive=True)], [MLX5]), NodeView("b", [ROCE_RECV])])
    assert one.flow.adaptive and one.flow.tuple is not None and "NCCL_IB_ADAPTIVE_ROUTING is on" in one.missing[0]
    assert [flow.adaptive for flow in measured_flows([one])] == [True]


def test_containers_with_an_eth0_each_are_told_apart() -> None:
    nics = [replace(ETH0, namespace=7, rate_gbps=10.0), replace(ETH0, namespace=8, rate_gbps=25.0)]
    (one,) = flow_map([NodeView("a", [SEND], nics, {11: 8})])
    assert one.rate_gbps == 25.0 and one.flow.source == NicPort("a", "eth0 (netns 8)")
    (one,) = flow_map([NodeView("a", [SEND], nics)])
    assert one.rate_gbps is None


def test_what_carries_no_data_is_no_flow() -> None:
    assert flow_map([NodeView("a", [replace(SEND, role="flush"), replace(SEND, comm_hash=None)])]) == []


@pytest.mark.parametrize(
    "text", ["", ":", "10.0.0.1", "10.0.0.1:", "10.0.0.1:65536", "10.0.0.1:-1", "x:1²", "10.0.0.1:999999999999"]
)
def test_what_is_no_endpoint(text: str) -> None:
    assert endpoint(text) is None


def test_endpoints() -> None:
    assert endpoint("10.0.0.1:80") == ("10.0.0.1", 80) and endpoint("[fe80::1]:65535") == ("fe80::1", 65535)


def test_a_captured_port_is_seen_and_stands_before_the_rule() -> None:
    views = [NodeView("a", [ROCE], [MLX5]), NodeView("b", [ROCE_RECV])]
    (same,) = flow_map(views, {("10.0.0.1", 18): {0xC132}})
    assert same.flow.tuple == FiveTuple(Protocol.UDP, "10.0.0.1", 0xC132, "10.0.0.2", 4791)
    assert (same.flow.origin, same.missing) == (Origin.SEEN, ())
    (other,) = flow_map(views, {("10.0.0.1", 18): {50001}})
    assert other.flow.tuple is not None and other.flow.tuple.source_port == 50001
    assert other.missing == (f"the rule both-queue-pairs has port {0xC132}",)
    (none,) = flow_map(views, {("10.0.0.1", 17): {50001}, ("10.0.0.1", 18): {1, 2}})
    assert none.flow.origin is Origin.PREDICTED, "packets to another queue pair, or by two ports, tell nothing"


def test_what_is_captured_are_packets_that_arrive_at_our_queue_pairs() -> None:
    nic = replace(MLX5, netdev="eth7")
    assert to_capture([NodeView("b", [ROCE_RECV, SEND], [nic, ETH0])]) == ({("10.0.0.1", 18)}, {"eth7"})
    assert to_capture([NodeView("a", [ROCE], [nic])]) == (set(), {"eth7"})
