"""Scenarios that are drawn, and what some of them have found (SIMULATED)."""

from __future__ import annotations

import pytest

from ncclwatch.model.verdict import VerdictClass
from ncclwatch.simulate.scenario import (
    Expectation,
    Fault,
    FaultKind,
    Layout,
    Network,
    Observation,
    Scenario,
    ScoreClass,
    Workload,
    _check,
)
from score.drawn import draw
from score.simulated import score_one


def test_what_is_drawn_is_valid_varied_and_the_same_again() -> None:
    drawn = [draw(3, number) for number in range(120)]
    for scenario in drawn:
        _check(scenario, scenario.name)
    assert drawn == [draw(3, number) for number in range(120)] and drawn != [draw(4, number) for number in range(120)]
    assert {scenario.expect.score_class for scenario in drawn} == set(ScoreClass) - {
        ScoreClass.S3, ScoreClass.DEADLOCK, ScoreClass.UNSEEN,
    }  # fmt: skip


def test_slow_jobs_are_drawn_of_every_kind_and_are_others() -> None:
    drawn = [draw(3, number, slow=True) for number in range(120)]
    for one in drawn:
        _check(one, one.name)
    assert {one.expect.score_class for one in drawn} == {ScoreClass.S1, ScoreClass.S2}
    kinds = {fault.kind for one in drawn for fault in one.faults}
    assert kinds >= {
        FaultKind.LOSSY_LINK, FaultKind.NIC_LIMIT, FaultKind.BACKGROUND_TRAFFIC, FaultKind.FEW_CPUS, FaultKind.HOST_LOAD,
        FaultKind.CPU_LIMIT, FaultKind.SLOW_COPY, FaultKind.PROXY_SLEEP,
    }  # fmt: skip
    assert not {one.name for one in drawn} & {draw(3, number).name for number in range(120)}


def scenario(
    layout: Layout, workload: Workload, network: Network, fault: Fault, expect: Expectation, *planes: str
) -> Scenario:  # fmt: skip
    observe = Observation(planes=planes or ("calls", "state"))
    return Scenario("found", "found", 7, expect, layout, workload, network, observe, (fault,))


FOUND = {
    # Called ahead: a ring that no GPU has begun seemed to close a circle with the one before, and eight ranks were accused.
    "gpu stall below an operation that was called ahead": scenario(
        Layout(dp=4, ranks_per_node=2),
        Workload(micro_batches=2, iterations=40, gather_communicator=True, dp_bytes=32 << 20),
        Network(net="ib", intra_node="shm", nic_rate=10.0),
        Fault(FaultKind.GPU_STALL, 3, iteration=12, role="dp", offset_ms=1.0),
        Expectation(ScoreClass.H3, (VerdictClass.HARDWARE,), (3,)),
    ),
    # Who waits inside the node in the one before was named: its GPU has not begun what was called ahead.
    "left out of a ring through shared memory": scenario(
        Layout(dp=4, ranks_per_node=2),
        Workload(micro_batches=2, iterations=14, gather_communicator=True, dp_bytes=32 << 20),
        Network(nccl="2.32.3", net="socket", intra_node="shm", nic_rate=10.0),
        Fault(FaultKind.SKIP, 2, iteration=12, role="dp"),
        Expectation(ScoreClass.H1, (VerdictClass.NOT_ENTERED,), (2,)),
        "state",
    ),
    # Everything that hosts had called ahead seemed to wait in one circle of all ranks.
    "gpu stall in a ring of shared memory, with all else called ahead": scenario(
        Layout(tp=2, pp=2, dp=4, ranks_per_node=4),
        Workload(micro_batches=2, layers=1, iterations=14, gather_communicator=True, grad_norm=True, host_ahead=64),
        Network(nccl="2.32.3", net="socket", intra_node="shm", nic_rate=2.0),
        Fault(FaultKind.GPU_STALL, 1, iteration=12, role="tp", offset_ms=1.0),
        Expectation(ScoreClass.H3, (VerdictClass.HARDWARE, VerdictClass.NOT_ENTERED), (1,)),
        "state",
    ),
    # Its fellow seemed to be at work: what NVLink joins waits in GPU memory.
    "slow loader of a rank that NVLink joins to another": scenario(
        Layout(tp=2, pp=2, cp=2, ranks_per_node=2),
        Workload(micro_batches=2, layers=1, iterations=60, grad_norm=True),
        Network(net="ib", intra_node="p2p", nic_rate=10.0),
        Fault(FaultKind.SLOW_LOADER, 6, start_s=6.0, strength=0.6),
        Expectation(ScoreClass.S1, (VerdictClass.SLOW_COMPUTATION,), (6,)),
    ),
    # Of two ranks that call AllGather and ReduceScatter by turns neither call is unheard of.
    "another operation of one of a pair": scenario(
        Layout(tp=2, dp=2, ranks_per_node=4),
        Workload(micro_batches=2, iterations=80, sequence_parallel=True),
        Network(net="ib", intra_node="net", nic_rate=40.0),
        Fault(FaultKind.OTHER_OPERATION, 2, iteration=12, role="tp"),
        Expectation(ScoreClass.H2, (VerdictClass.INCONSISTENT,), (2,)),
    ),
    # Ten ranks whose trees wait inside nodes were accused of a deadlock beside the one that has not called.
    "never enters, and all others stand in trees": scenario(
        Layout(tp=4, pp=2, dp=2, ranks_per_node=4),
        Workload(micro_batches=2, layers=1, iterations=20, grad_norm=True, gather_communicator=True, dp_bytes=32 << 20),
        Network(nccl="2.32.3", algorithm="Tree", net="socket", intra_node="shm", nic_rate=10.0),
        Fault(FaultKind.NEVER_ENTERS, 9, iteration=12, role="dp"),
        Expectation(ScoreClass.H1, (VerdictClass.NOT_ENTERED,), (9,)),
    ),
    # The fellow that waits for it over NVLink, with a receive called ahead, was named as well.
    "never enters beside a fellow that NVLink joins to it": draw(77, 0),
    # The stage before it is as late at its gradients, since it waits for messages nobody sees: both were left unnamed.
    "slow loader of a stage behind NVLink": draw(228, 24),
    # One call short in all that follows, 82 calls back: a rank two stages away was named.
    "left out of tensor parallelism behind NVLink, long ago": draw(310, 18),
    # Who waits for it inside the node was named: its GPU has not begun what was called ahead.
    "another operation, below which all else is called ahead": draw(702, 20),
    # Three iterations of a quarter of a minute, in which nobody called anything for most of the time: a rank was blamed for them.
    "a job that pauses three times": draw(713, 16),
    # Parts of an interleaved schedule of several lengths were iterations, and the long ones slow.
    "a checkpoint of an interleaved pipeline": draw(502, 36),
}


@pytest.mark.parametrize("found", FOUND.values(), ids=list(FOUND))
def test_what_was_found_by_drawing_is_right(found: Scenario) -> None:
    _check(found, found.name)
    (result,) = score_one(found, with_baselines=False)
    assert result.right and not result.false_alarm, f"{result.said} {result.named} {result.summary}"
