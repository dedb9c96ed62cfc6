"""The wire plane on real verbs: what perftest posts and completes is counted to the request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ncclwatch.wire.accounts import QueuePairAccount
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.plane import WirePlane
from vm.fabric import Fabric
from vm.perftest import Processes, run_perftest, run_pingpong

pytestmark = pytest.mark.vm


@pytest.fixture
def plane(verbs_kernel: WireKernel) -> Iterator[WirePlane]:
    with WirePlane(verbs_kernel, exact=True, always=True) as wire:
        yield wire


def watch_both(plane: WirePlane, processes: Processes) -> None:
    """Take both in while they wait; what they make afterwards is heard of on the control path."""
    for pid in (processes.server, processes.client):
        if pid not in plane.processes:
            plane.watch(pid)
    plane.handle_events()


def of(plane: WirePlane, pid: int) -> QueuePairAccount:
    (account,) = [account for account in plane.accounts() if account.pid == pid]
    return account


def test_writes_are_counted_exactly(plane: WirePlane, soft_roce: Fabric) -> None:
    result = run_perftest(
        "ib_write_bw", soft_roce, iterations=503, size=65536, options=("-Q", "100"), held=lambda both: watch_both(plane, both)
    )
    account = of(plane, result.processes.client)
    assert account.opcodes == {"rdma-write": (503, 503 * 65536)}
    # -Q 100: a completion for every hundredth request and for the last one.
    assert (account.signalled, account.completed) == (6, 6)
    assert (account.retired, account.retired_bytes) == (503, 503 * 65536)
    assert account.in_flight == 0
    assert (account.errors, account.unmatched, account.skipped) == (0, 0, 0)
    assert plane.device_of(account) == soft_roce.a.device
    # The target of a write posts nothing and completes nothing.
    assert [other for other in plane.accounts() if other.pid == result.processes.server] == []


LOADS = {"ib_write_bw": ("rdma-write", 701), "ib_send_bw": ("send", 307), "ib_read_bw": ("rdma-read", 311)}


@pytest.mark.parametrize("program", LOADS)
def test_counts_are_exact_and_throughput_is_what_perftest_prints(program: str, plane: WirePlane, soft_roce: Fabric) -> None:
    opcode, iterations = LOADS[program]
    result = run_perftest(
        program, soft_roce, iterations=iterations, size=65536, options=("-Q", "1"), held=lambda both: watch_both(plane, both)
    )
    account = of(plane, result.processes.client)
    assert account.opcodes == {opcode: (iterations, iterations * 65536)}
    assert account.completed == account.signalled == account.retired == iterations
    assert (account.in_flight, account.errors, account.unmatched) == (0, 0, 0)
    mean = account.mean_bandwidth()
    assert mean == pytest.approx(result.average, rel=0.05)
    # The window holds the last 64 completions; the whole run is what it is measured against elsewhere.
    assert len(account.window) == 128
    assert account.bandwidth(64) is not None
    assert account.record["latency"].sum() == iterations
    receivers = [other for other in plane.accounts() if other.pid == result.processes.server]
    if program != "ib_send_bw":
        # The target of a write or a read posts nothing and completes nothing.
        assert receivers == []
        return
    (receiver,) = receivers
    assert (receiver.received, receiver.received_bytes) == (iterations, iterations * 65536)
    assert (receiver.posted, receiver.in_flight) == (0, 0)


def test_pingpong_is_counted_on_both_sides(plane: WirePlane, soft_roce: Fabric) -> None:
    processes = run_pingpong(soft_roce, iterations=101, size=1024, held=lambda both: watch_both(plane, both))
    for pid in (processes.client, processes.server):
        account = of(plane, pid)
        assert account.opcodes == {"send": (101, 101 * 1024)}
        assert (account.signalled, account.completed, account.in_flight) == (101, 101, 0)
        assert account.received == 101


def test_a_process_that_opens_its_device_later_is_taken_in(plane: WirePlane, soft_roce: Fabric) -> None:
    """Nothing but libibverbs' exported functions tells of it."""
    plane.follow_everyone()
    result = run_perftest("ib_write_bw", soft_roce, iterations=107, size=8192, held=lambda _: drain(plane))
    account = of(plane, result.processes.client)
    assert account.opcodes == {"rdma-write": (107, 107 * 8192)}
    assert account.in_flight == 0


def drain(plane: WirePlane) -> None:
    while plane.handle_events():
        pass
