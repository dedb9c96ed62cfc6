"""The step engine: conservation of steps, bounded slots, causes before effects, and what counters show when something stops."""

from __future__ import annotations

import math

import pytest

from ncclwatch.simulate.disturbance import Disturbance, Factor, LinkEffect, advance, live, stretched
from ncclwatch.simulate.geometry import NCCL_STEPS, Paths, binary_tree, cut, double_tree
from ncclwatch.simulate.scenario import Layout, Network
from ncclwatch.simulate.steps import StepNetwork, Trace, counters, run_group

LAYOUT = Layout(dp=16, ranks_per_node=2)


def _run(
    function: str,
    n: int,
    nbytes: int,
    *,
    disturbance: Disturbance | None = None,
    started: list[float] | None = None,
    **network: object,
) -> Trace:
    net = Network(intra_node="net", **network)  # type: ignore[arg-type]
    steps = StepNetwork(Paths(LAYOUT, net), disturbance or Disturbance(), 1, 2e-6)
    times = started or [0.0] * n
    return run_group(steps, function, list(range(n)), cut(net, function, n, nbytes), times, times)


def test_steps_are_those_of_nccl() -> None:
    """64 MiB AllReduce over 4 ranks, 2 channels of 4 MiB: 64 / (2·4·2) = 4 loops of 2·3 chunks of 4 steps; measured 96 on one
    of 1 loop less.
    """
    net = Network(channels=2)
    assert cut(net, "AllReduce", 4, 64 << 20).steps == 4 * 6 * 4
    assert cut(net, "AllGather", 4, 64 << 20).steps == 4 * 3 * 4
    assert cut(net, "AllReduce", 4, 8).steps == 6 * 4
    assert cut(net, "SendRecv", 2, 1 << 20).steps == 4
    assert cut(Network(protocol="LL"), "AllReduce", 4, 8).slice_steps == 1


@pytest.mark.parametrize("algorithm", ["Ring", "Tree"])
@pytest.mark.parametrize("function", ["AllReduce", "AllGather", "ReduceScatter", "AlltoAll"])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_steps_are_conserved(function: str, n: int, algorithm: str) -> None:
    trace = _run(function, n, 40 << 20, algorithm=algorithm)
    assert all(math.isfinite(t) for t in trace.finished)
    for ends in trace.ends:
        for end in ends:
            link = end.connection
            counts = {len(x) for x in (link.produced, link.transmitted, link.received, link.consumed, link.acknowledged)}
            assert counts == {end.count}


@pytest.mark.parametrize("function", ["AllReduce", "AlltoAll"])
def test_causes_come_before_effects_and_slots_are_bounded(function: str) -> None:
    trace = _run(function, 4, 64 << 20, started=[0.0, 0.01, 0.02, 0.5])
    for end in (e for ends in trace.ends for e in ends if e.send):
        link = end.connection
        for m in range(end.count):
            assert link.produced[m] <= link.transmitted[m] <= link.received[m] <= link.consumed[m]
            if m >= link.slots:
                assert link.acknowledged[m - link.slots] <= link.produced[m]
                assert link.consumed[m - link.slots] <= link.transmitted[m]
    assert min(trace.finished) > 0.5


def test_a_rank_that_does_not_start_stops_the_ring() -> None:
    trace = _run("AllReduce", 4, 64 << 20, started=[0.0, 0.0, math.inf, 0.0])
    assert not any(math.isfinite(t) for t in trace.finished)
    at = [[counters(end, 2, 0.0, 9.0) for end in ends] for ends in trace.ends]
    send3, receive3 = at[3]
    assert receive3.received == 0
    assert send3.gpu_ready == 4, "rank 3 sends its own first chunk and then waits for rank 2's"
    send0, receive0 = at[0]
    assert receive0.received == receive0.done == 4
    assert send0.gpu_ready == 8, "its own chunk and the one from rank 3"
    send1, _ = at[1]
    # Rank 2 has not launched either: no receive is posted there, so nothing leaves rank 1.
    assert send1.transmitted == send1.done == 0
    assert send1.gpu_ready == NCCL_STEPS
    assert send1.posted == NCCL_STEPS


def test_a_dead_link_leaves_data_in_the_network() -> None:
    down = Disturbance()
    down.links[0, 1].append(LinkEffect(0.0, math.inf, down=True))
    trace = _run("AllReduce", 4, 64 << 20, disturbance=down)
    send = counters(trace.ends[0][0], 2, 0.0, 5.0)
    receive = counters(trace.ends[1][1], 2, 0.0, 5.0)
    assert send.transmitted > send.done == 0
    assert (receive.posted, receive.received) == (NCCL_STEPS, 0)


def test_a_stalled_gpu_does_not_consume() -> None:
    stalled = Disturbance()
    stalled.gpu[2].append((1e-4, math.inf))
    trace = _run("AllReduce", 4, 64 << 20, disturbance=stalled)
    receive = counters(trace.ends[2][1], 2, 0.0, 5.0)
    assert receive.transmitted > receive.done


def test_a_stalled_proxy_does_not_take_what_has_arrived() -> None:
    stalled = Disturbance()
    stalled.proxy[1].append((1e-4, math.inf))
    trace = _run("AllReduce", 4, 64 << 20, disturbance=stalled)
    sent = counters(trace.ends[0][0], 2, 0.0, 5.0)
    received = counters(trace.ends[1][1], 2, 0.0, 5.0)
    assert sent.done > received.received, "the network has delivered what rank 1's proxy never saw"


def test_a_slow_link_slows_the_whole_ring_in_proportion() -> None:
    slow = Disturbance()
    slow.links[0, 1].append(LinkEffect(0.0, math.inf, factor=5.0))
    calm, slowed = _run("AllReduce", 4, 256 << 20), _run("AllReduce", 4, 256 << 20, disturbance=slow)
    ratio = max(slowed.finished) / max(calm.finished)
    assert 4.0 < ratio < 5.5


def test_counters_never_fall() -> None:
    trace = _run("AllReduce", 3, 64 << 20)
    last = max(trace.finished)
    for end in (e for ends in trace.ends for e in ends):
        before = (0, 0, 0, 0)
        for i in range(50):
            c = counters(end, 2, 0.0, last * i / 49)
            now = (c.posted, c.received, c.transmitted, c.done)
            assert all(b <= a for b, a in zip(before, now, strict=True))
            assert c.done <= c.transmitted <= c.posted
            before = now


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 13, 64])
def test_trees_reach_everybody_once(n: int) -> None:
    for tree in double_tree(n):
        children = [c for _, cs in tree for c in cs]
        roots = [r for r, (p, _) in enumerate(tree) if p < 0]
        assert len(roots) == 1
        assert sorted(children) == sorted(set(range(n)) - set(roots))
        for r, (_, cs) in enumerate(tree):
            assert all(tree[c][0] == r for c in cs)
    assert binary_tree(14)[0] == (-1, (8,))


def test_windows() -> None:
    pauses = [(1.0, 2.0), (5.0, math.inf)]
    assert live(pauses, 0.5) == 0.5
    assert live(pauses, 1.5) == 2.0
    assert live(pauses, 6.0) == math.inf
    assert advance(pauses, 0.0, 1.5) == 2.5
    assert advance(pauses, 4.5, 1.0) == math.inf
    assert advance(None, 4.5, 1.0) == 5.5
    assert stretched([Factor(1.0, 2.0, 2.0)], 0.0, 2.0) == pytest.approx(2.5)
    assert stretched([Factor(1.0, 2.0, math.inf)], 0.0, 2.0) == pytest.approx(3.0)
    assert stretched([Factor(0.0, 2.0, 1.0, 0.3)], 0.0, 1.0) == pytest.approx(1.3)
