"""The device plane in the engine: connections inside a node put together from two frames, kernels that have begun or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.engine.evidence.base import FactKind, RankNode
from ncclwatch.engine.evidence.device import DeviceShim, gpu_state
from ncclwatch.model.device import ConnectionCounter, DeviceCommunicator, DeviceOperation, DeviceSample, KernelState
from ncclwatch.model.progress import progressed
from ncclwatch.model.state import Transport
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.engine.evidence.said import case_of
from unit.synthetic import SECOND, WORLD, Rank, address_of, communicator, frozen_ring, looks


def counter(rank: int, peer: int, is_send: bool, value: int | None, **more: object) -> ConnectionCounter:
    what = "head" if is_send else "tail"
    return ConnectionCounter(address_of(WORLD), 0, peer, is_send, 0, what, value, 99 * SECOND, **more)  # type: ignore[arg-type]


def operation(ordinal: int, started: int, finished: int, launched_s: int = 60) -> DeviceOperation:
    return DeviceOperation(
        ordinal, "AllReduce", False, ordinal - 1, 1024, None, 2, started, finished, True, launched_s * SECOND,
        started_ns=launched_s * SECOND if started else None,
    )  # fmt: skip


def sample(*counters: ConnectionCounter, operations: tuple[DeviceOperation, ...] = (), rank: int = 0) -> DeviceSample:
    own = DeviceCommunicator(
        WORLD, address_of(WORLD) + 64, rank, 4, False, len(operations), len(operations), 0, recent=operations
    )
    return DeviceSample("plugin", 6, "running", 99 * SECOND, (own,), (), counters)


def nvlink_ring(late: int = 2, world: int = 4, *, shim: bool = True, kernels: bool = True, **more: object) -> list[Rank]:
    """All ranks of one node over P2P: no proxy, no counter that the host can read. One rank leaves data unread; ``kernels``: the
    shim says too that its GPU has not begun what the others are in.
    """
    ranks = []
    for rank in range(world):
        following, previous = (rank + 1) % world, (rank - 1) % world
        counters = (
            counter(rank, following, True, 40, **more),
            counter(rank, previous, False, 44 if rank == late else 40, **more),
        )
        own = communicator(rank, world, transport=Transport.P2P)
        operations = (operation(7, 0 if rank == late else 2, 0),) if kernels else ()
        device = sample(*counters, operations=operations, rank=rank)
        ranks.append(Rank(rank, world, (own,), host="node0", extra={"device": device} if shim else {}))
    return ranks


def named(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


def test_counters_of_both_ends_name_the_rank_that_leaves_data_unread() -> None:
    verdict = diagnose(looks(nvlink_ring()))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED, verdict.summary
    assert named(verdict) == [2]
    assert {0, 3} <= set(verdict.victims)
    assert "device" in verdict.planes
    assert any("P2P (GPU memory)" in line for line in verdict.evidence), verdict.evidence
    assert not any("shared memory" in line for line in (*verdict.evidence, *verdict.unobserved)), verdict.evidence
    assert any("its GPU has not begun AllReduce #6" in line and "41 s ago" in line for line in verdict.evidence), verdict.evidence
    assert not any("NVLink" in line for line in verdict.unobserved), "all of it was seen"


def with_operations(ranks: list[Rank], rank: int, *operations: DeviceOperation) -> list[Rank]:
    device = ranks[rank].extra["device"]
    assert isinstance(device, DeviceSample)
    own = replace(device.communicators[0], recent=operations)
    ranks[rank] = replace(ranks[rank], extra={"device": replace(device, communicators=(own,))})
    return ranks


def test_a_gpu_that_stands_in_the_kernel_is_hardware() -> None:
    verdict = diagnose(looks(with_operations(nvlink_ring(), 2, operation(6, 2, 2), operation(7, 2, 0))))
    assert verdict.verdict_class is VerdictClass.HARDWARE and named(verdict) == [2]
    assert "does not go on" in verdict.culprits[0].reason
    assert any("its GPU has been in AllReduce #6" in line for line in verdict.evidence), verdict.evidence


def test_a_gpu_that_has_not_begun_what_was_launched_is_said_so() -> None:
    verdict = diagnose(looks(with_operations(nvlink_ring(), 2, operation(6, 2, 2), operation(7, 0, 0))))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED and named(verdict) == [2]
    assert "its GPU has not begun it" in verdict.culprits[0].reason
    assert any("nvidia-smi" in step for step in verdict.next_steps) and not any(
        "data loading" in step for step in verdict.next_steps
    )


def test_a_gpu_that_is_done_with_all_it_was_given_has_not_been_given_this_one() -> None:
    verdict = diagnose(looks(with_operations(nvlink_ring(), 2, operation(5, 2, 1), operation(6, 2, 2))))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED and named(verdict) == [2]
    assert "does not take part" in verdict.culprits[0].reason, "an end that was not told of is not a kernel that stands"


def test_without_the_shim_nobody_is_accused_and_the_gap_is_named() -> None:
    verdict = diagnose(looks(nvlink_ring(shim=False)))
    assert not verdict.culprits
    assert any("NVLink" in line for line in verdict.unobserved)
    assert "device" not in verdict.planes


@pytest.mark.parametrize("change", [{"stale": True}, {"problem": "the copy has not come back"}])
def test_counters_that_are_not_of_now_prove_nothing(change: dict[str, Any]) -> None:
    verdict = diagnose(looks(nvlink_ring(kernels=False, **change)))
    assert not verdict.culprits


def test_kernels_alone_name_the_rank_whose_gpu_has_not_begun_what_others_are_in() -> None:
    """LL and LL128 count nothing that lies unread; on a real GPU nothing was said of this (H200, NCCL 2.32.3, P2P)."""
    verdict = diagnose(looks(nvlink_ring(stale=True)))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED and named(verdict) == [2], verdict.summary
    assert "its GPU has not begun it" in verdict.culprits[0].reason
    assert any("waits for rank 2, whose GPU has not begun it: AllReduce #6" in line for line in verdict.evidence)


@pytest.mark.parametrize("launched", [(), (operation(8, 0, 0),), (operation(7, 2, 0),)], ids=["nothing", "another", "begun"])
def test_kernels_name_nobody_who_has_not_launched_the_same_operation(launched: tuple[DeviceOperation, ...]) -> None:
    assert not diagnose(looks(with_operations(nvlink_ring(stale=True), 2, *launched))).culprits


def test_one_end_alone_proves_nothing() -> None:
    ranks = nvlink_ring(kernels=False)
    ranks[1] = replace(ranks[1], extra={})  # the sender into rank 2 has no shim
    assert not diagnose(looks(ranks)).culprits


def test_counters_of_another_communicator_are_not_mixed_in() -> None:
    ranks = nvlink_ring(kernels=False)
    for rank in ranks:
        device = rank.extra["device"]
        assert isinstance(device, DeviceSample)
        rank.extra["device"] = replace(device, counters=tuple(replace(c, comm_address=0xBAD0) for c in device.counters))
    assert not diagnose(looks(ranks)).culprits


def test_a_counter_that_moves_is_progress_and_one_that_vanishes_is_not() -> None:
    before = nvlink_ring()[0].looks(1)[0]
    assert before.device is not None
    first, *rest = before.device.counters
    moved = replace(before.device, counters=(replace(first, value=42), *rest))
    gone = replace(before.device, counters=(replace(first, value=None, problem="another reader"), *rest))
    assert progressed(before, replace(before, device=moved))
    assert not progressed(before, replace(before, device=gone)), "another reader's request must not look like a running job"
    assert not progressed(before, replace(before, device=replace(before.device, copy_pending_ns=5, events=before.device.events)))


def test_a_kernel_that_finishes_is_progress() -> None:
    before = replace(nvlink_ring()[0].looks(1)[0], device=sample(operations=(operation(7, 2, 1),)))
    assert progressed(before, replace(before, device=sample(operations=(operation(7, 2, 2),))))


def test_a_stopped_process_is_not_said_to_be_in_a_kernel() -> None:
    ranks = frozen_ring(victim=2)
    ranks[2] = replace(ranks[2], extra={"device": sample(operations=(operation(7, 2, 0),))})
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.STOPPED
    assert not any("its GPU has been in" in line for line in verdict.evidence)


def test_a_silent_copy_engine_is_evidence() -> None:
    ranks = nvlink_ring()
    device = ranks[2].extra["device"]
    assert isinstance(device, DeviceSample)
    ranks[2] = replace(ranks[2], extra={"device": replace(device, copy_pending_ns=12 * SECOND)})
    verdict = diagnose(looks(ranks))
    assert any("copy engine does not respond" in line and "12 s" in line for line in verdict.evidence), verdict.evidence


def test_states_of_an_operation() -> None:
    assert operation(1, 0, 0).state is KernelState.NOT_STARTED
    assert operation(1, 2, 1).state is KernelState.RUNNING
    assert operation(1, 1, 1).state is KernelState.RUNNING, "one of two channels"
    assert operation(1, 2, 2).state is KernelState.FINISHED
    assert replace(operation(1, 1, 1), channels=None).state is KernelState.FINISHED
    assert replace(operation(1, 2, 2), observed=False).state is KernelState.UNOBSERVED


# --- as facts ------------------------------------------------------------------------------------------------------------


def test_where_each_gpu_is_with_a_communicator_is_a_fact() -> None:
    case = case_of(looks(nvlink_ring()))
    states = {member.index: gpu_state(case.job, member, WORLD) for member in case.job.members}
    assert states == {rank: None if rank == 2 else KernelState.RUNNING for rank in range(4)}, "rank 2 has begun nothing so far"
    (waiting,) = case.facts.about(FactKind.GPU_UNFINISHED, RankNode(2))
    assert "its GPU has not begun AllReduce #" in waiting.text and waiting.text.endswith("launched 41 s ago")
    blind = case_of(looks(nvlink_ring(shim=False)))
    assert [line.partition(":")[0] for line in DeviceShim().coverage(blind)] == ["P2P/NVLink connections"]
    assert blind.facts.of(FactKind.GPU_UNFINISHED) == ()
