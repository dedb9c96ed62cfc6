"""What is advised of links that are not filled, and what is not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ncclwatch.knowledge.tuning import advise, exposed
from ncclwatch.model.tuning import (
    Advice,
    CapacityFrom,
    CommunicatorUse,
    Exposure,
    FlowUse,
    Kind,
    LinkAdvice,
    LinkUse,
    ProcessUse,
    TuningLook,
)

SIMPLE, LL = Kind("AllReduce", "Ring", "Simple"), Kind("AllReduce", "Ring", "LL")
COMM = 7
GIGABYTE = 1e9


def flow(rate: float = 0.1 * GIGABYTE, channel: int = 0, **more: object) -> FlowUse:
    made = FlowUse(COMM, 0, 1, channel, rate, 0.95, sockets=1, rtt_us=100, min_rtt_us=50, resent=0.0, window_limited=0.0)
    return replace(made, **more)  # type: ignore[arg-type]


def look(
    *flows: FlowUse,
    kind: Kind = SIMPLE,
    capacity: float | None = GIGABYTE,
    moving: float = 1.0,
    nranks: int = 2,
    nnodes: int = 2,
    operations: int = 10,
    periods: tuple[tuple[float, float], ...] = (),
    settings: dict[str, str] | None = None,
) -> TuningLook:
    rate = sum(one.rate or 0.0 for one in flows)
    link = LinkUse("node1", 0, "eth0", moving, rate, rate, flows, capacity, CapacityFrom.TOLD if capacity else None)
    use = CommunicatorUse(COMM, nranks, nnodes, (0,), {kind: 1.0}, moving, operations)
    return TuningLook(10.0, 0.01, (link,), (use,), (ProcessUse(1, 0, moving, periods, settings or {}),))


def only(seen: TuningLook) -> LinkAdvice:
    (found,) = advise(seen)
    return found


def one(seen: TuningLook) -> Advice:
    (found,) = only(seen).advice
    return found


def test_connections_that_carry_what_they_can_on_a_link_that_could_carry_more() -> None:
    told = one(look(flow(channel=0), flow(channel=1), settings={"NCCL_NSOCKS_PERTHREAD": "2"}))
    assert told.rule == "connections"
    assert told.faster == pytest.approx((4.75, 4.75))
    assert told.change.startswith("NCCL_NSOCKS_PERTHREAD=10 ")
    assert told.saved == pytest.approx(1 - 1 / 4.75)
    assert "no link further on" in told.provided


def test_what_holds_channels_down_is_let_go_of_first() -> None:
    assert "NCCL_MAX_NCHANNELS=1" in one(look(flow(), settings={"NCCL_MAX_NCHANNELS": "1"})).change


def test_queue_pairs_instead_of_sockets() -> None:
    """Of RDMA the port's counters say what is carried, and looks at steps that something is in the network."""
    seen = look(flow(rate=0.0, sockets=0, rtt_us=None, min_rtt_us=None, resent=None, window_limited=None))
    (link,) = seen.links
    seen = replace(seen, links=(replace(link, send_rate=0.5 * GIGABYTE, flows=(replace(link.flows[0], rate=None),)),))
    told = one(seen)
    assert told.rule == "connections"
    assert told.faster[0] == pytest.approx(1.9)
    assert told.change.startswith("NCCL_IB_QPS_PER_CONNECTION=2")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rate": 0.9 * GIGABYTE}, "full"),
        ({"busy": 0.2}, "nothing to send"),
        ({"resent": 0.02}, "lost"),
        ({"rtt_us": 5000}, "stands in a queue"),
    ],
)
def test_nothing_is_advised_where_more_connections_would_not_help(changed: dict[str, Any], says: str) -> None:
    told = only(look(flow(**changed)))
    assert not told.advice
    assert says in told.says


def test_a_burst_of_segments_is_no_queue() -> None:
    assert one(look(flow(rate=1e6, rtt_us=11_000, min_rtt_us=12), capacity=8e6)).rule == "connections"


def test_a_capacity_that_nobody_knows_is_said_and_no_gain_is_made_up() -> None:
    told = only(look(flow(), capacity=None))
    assert (told.fill, told.advice) == (None, ())
    assert "--link" in told.says


def test_flags_on_a_full_link() -> None:
    """All of the bytes are waited for, and half of them are flags."""
    told = one(look(flow(rate=GIGABYTE), kind=LL, settings={"NCCL_PROTO": "LL"}))
    assert told.rule == "protocol"
    assert told.faster == pytest.approx((2.0, 2.0))
    assert told.change == "unset NCCL_PROTO=LL, or NCCL_PROTO=Simple"


def test_flags_on_a_path_whose_capacity_is_not_known_but_which_is_full() -> None:
    told = one(look(flow(rtt_us=5000), kind=LL, capacity=None))
    assert told.rule == "protocol"
    assert told.faster == pytest.approx((1.0, 2.0))
    assert not only(look(flow(rate=1e3), kind=LL, capacity=None)).advice


def test_short_operations_by_ll_are_left_alone() -> None:
    """They wait for the way, not for bytes: half the bytes fewer is nothing."""
    told = only(look(flow(rate=0.01 * GIGABYTE, busy=0.3), kind=LL))
    assert all(advice.faster[0] < 1.01 for advice in told.advice)


def test_a_ring_over_two_hosts_where_a_tree_would_send_less() -> None:
    told = one(look(flow(rate=GIGABYTE), nranks=8))
    assert told.rule == "two-hosts"
    assert told.faster[0] == pytest.approx(1.75)
    assert not only(look(flow(rate=GIGABYTE), nranks=2)).advice
    assert not only(look(flow(rate=GIGABYTE), nranks=8, nnodes=3)).advice
    assert not only(look(flow(rate=GIGABYTE), nranks=8, operations=100_000)).advice, "short: up and down one after the other"


def test_a_ring_that_waits_for_the_way() -> None:
    """16 hosts, 1 ms from one to the next: 30 ms of 40 an operation. A tree goes 8 ways instead of 30."""
    way = flow(rate=0.001 * GIGABYTE, busy=0.3, rtt_us=2100, min_rtt_us=2000)
    told = one(look(way, nranks=16, nnodes=16, operations=250))
    assert told.rule == "latency"
    assert told.faster[0] == pytest.approx(40 / 18)
    assert not only(look(way, nranks=16, nnodes=16, operations=100)).advice, "most of the time goes elsewhere"
    assert not only(look(way, nranks=16, nnodes=16, operations=250, kind=Kind("AllReduce", "Tree", "Simple"))).advice


def play(exposed_share: float, count: int = 60, interval: float = 0.01, jitter: float = 0.3) -> tuple[tuple[float, float], ...]:
    """Operations of 0.1 s, some longer, and 0.2 s of computation, as looks would see them; a part of it waits for them."""
    drawn, at, found = random.Random(3), 0.0, []
    for _ in range(count):
        length = 0.1 * (1 + drawn.uniform(0, jitter * 2))
        seen = [round((moment + drawn.uniform(0, interval)) / interval) * interval for moment in (at, at + length)]
        found.append((seen[0], seen[1] - seen[0]))
        at += 0.3 * (1 + drawn.uniform(0, 0.01)) + exposed_share * (length - 0.1)
    return tuple(found)


@pytest.mark.parametrize(("waits", "expected"), [(0.0, Exposure.HIDDEN), (1.0, Exposure.EXPOSED)])
def test_periods_tell_whether_anything_waits(waits: float, expected: Exposure) -> None:
    seen = look(flow(), moving=0.4, periods=play(waits))
    assert exposed(seen)[0] is expected
    told = only(seen)
    assert bool(told.advice) is (expected is Exposure.EXPOSED)
    for advice in told.advice:
        assert advice.saved is not None
        assert 0 < advice.saved <= 0.4


def test_few_or_equal_periods_tell_nothing() -> None:
    for periods in (play(1.0, count=8), play(0.0, jitter=0.0), ()):
        seen = look(flow(), moving=0.4, periods=periods)
        assert exposed(seen)[0] is Exposure.UNKNOWN
        assert [advice.saved for advice in only(seen).advice] == [None]


def test_a_link_that_carries_another_kind_for_most_of_the_time() -> None:
    """What gains is a quarter of the time: the whole becomes 1.14 times as fast."""
    seen = look(flow(rate=GIGABYTE), kind=LL)
    (use,) = seen.communicators
    other = replace(use, comm_hash=8, kinds={SIMPLE: 1.0})
    quarter = replace(use, moving=0.25)
    (link,) = seen.links
    seen = replace(seen, communicators=(quarter, other), links=(replace(link, flows=(*link.flows, flow(rate=0.0, busy=0.0))),))
    assert one(seen).faster[0] == pytest.approx(1 / (1 - 0.25 / 2))
