"""Windows from accounts made by hand: what is counted, what is not, and what is not known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ncclwatch.model.state import Direction
from ncclwatch.model.work import Counting, FlowWindow, Scope
from ncclwatch.wire import layouts
from ncclwatch.wire.accounts import QueuePairAccount
from ncclwatch.wire.orders import Owner
from ncclwatch.wire.windows import WorkWindows, uncertainty

MS, SIZE = 1_000_000, 1 << 20
DEVICES = {(100, 0xC0): ("mlx5_0", 1)}


def account(number: int, posted: int, completed: int, *, begin_ns: int = 0, received: int = 0, write: int = SIZE) -> Any:
    """A queue pair that posted and completed so many requests since it was first seen, one completion a millisecond."""
    record: Any = np.zeros(1, layouts.QP)[0]
    record["posted"] = record["signalled"] = record["tail"] = posted
    record["posted_bytes"], record["retired_bytes"] = posted * write, completed * write
    record["completed"] = record["samples"] = record["head"] = completed
    record["received"], record["received_bytes"] = received, received * SIZE
    record["receives_posted"] = received
    record["opcode_count"][0], record["opcode_bytes"][0] = posted, posted * write
    for index in range(completed):
        record["window"][index % layouts.WINDOW] = (begin_ns + index * MS, (index + 1) * write)
    for index in range(completed, posted):
        record["pending"][index % layouts.PENDING]["time_ns"] = begin_ns + 500 * MS
    record["latency"][40] = completed
    return QueuePairAccount(100, 0xC0, number, record)


def owner(number: int, direction: Direction, peer: int, rank: int = 0) -> Owner:
    return Owner(100, 0xC0, number, 0xABC, rank, 3, peer, direction, global_rank=8 + rank)


SEND, TAKE = owner(1, Direction.SEND, 1), owner(2, Direction.RECV, 7)
OWNERS = {one.key: one for one in (SEND, TAKE)}


def one(found: list[FlowWindow], scope: Scope, **fields: object) -> FlowWindow:
    (window,) = [w for w in found if w.scope is scope and all(getattr(w, name) == value for name, value in fields.items())]
    return window


def take(windows: WorkWindows, accounts: list[Any], began_ms: int, ended_ms: int, **more: Any) -> list[FlowWindow]:
    options = {"pids": {100}, "counting": Counting.BURSTS} | more
    return windows.take(accounts, OWNERS, DEVICES, began_ns=began_ms * MS, ended_ns=ended_ms * MS, **options)


def test_counts_are_those_between_two_readings() -> None:
    windows = WorkWindows()
    taking = account(2, 50, 50, received=40, write=64)
    take(windows, [account(1, 100, 90), taking], 0, 100)
    found = take(windows, [account(1, 130, 120), account(2, 60, 60, received=60, write=64)], 990, 1000)
    work = one(found, Scope.FLOW, queue_pair=1).work
    assert (work.begin_ns, work.end_ns, work.seen_s) == (100 * MS, 1000 * MS, 0.01)
    assert (work.posted, work.posted_bytes, work.completed, work.completed_bytes) == (30, 30 * SIZE, 30, 30 * SIZE)
    assert work.throughput == pytest.approx(SIZE / 0.001)
    assert work.bytes_per_s == pytest.approx(30 * SIZE / 0.01)
    taken = one(found, Scope.FLOW, queue_pair=2)
    assert (taken.role, taken.work.received, taken.work.received_bytes) == ("control", 20, 20 * SIZE)


def test_a_port_adds_up_the_data_that_is_sent_and_all_that_is_received() -> None:
    """Clear-to-send writes are no data: what receives posts is not among what the port sends."""
    found = take(WorkWindows(), [account(1, 30, 28), account(2, 10, 10, received=20, write=64)], 990, 1000)
    port = one(found, Scope.PORT)
    assert (port.device, port.port, port.global_rank) == ("mlx5_0", 1, 8)
    assert (port.work.posted, port.work.posted_bytes, port.work.received_bytes) == (30, 30 * SIZE, 20 * SIZE)
    assert port.work.in_flight == 2 and port.work.oldest_s == pytest.approx(0.5)
    peers = {window.peer: window.work for window in found if window.scope is Scope.PEER}
    assert peers.keys() == {1, 7}
    assert (peers[1].posted, peers[1].received, peers[7].received_bytes) == (30, 0, 20 * SIZE)


def test_a_queue_pair_that_did_nothing_is_seen_to_have_done_nothing() -> None:
    found = take(WorkWindows(), [], 990, 1000)
    work = one(found, Scope.FLOW, queue_pair=1).work
    assert (work.posted, work.completed, work.in_flight, work.throughput, work.latency_p50_ns) == (0, 0, 0, None, None)
    assert work.coverage == 1.0
    assert one(found, Scope.PORT).work.posted == 0


def test_what_an_earlier_burst_left_in_flight_is_not_in_flight_now() -> None:
    windows = WorkWindows()
    first = take(windows, [account(1, 30, 28)], 0, 10)
    assert one(first, Scope.FLOW, queue_pair=1).work.in_flight == 2
    later = take(windows, [account(1, 30, 28)], 990, 1000)
    work = one(later, Scope.FLOW, queue_pair=1).work
    assert (work.posted, work.in_flight, work.oldest_s, work.throughput) == (0, 0, None, None)
    # Counting everything, it is: nothing could complete unseen.
    exact = WorkWindows()
    take(exact, [account(1, 30, 28)], 0, 10, counting=Counting.EXACT)
    work = one(take(exact, [account(1, 30, 28)], 10, 1000, counting=Counting.EXACT), Scope.FLOW, queue_pair=1).work
    assert (work.in_flight, work.coverage, work.uncertainty) == (2, 1.0, 0.0)
    assert work.oldest_s == pytest.approx(0.5)


def test_processes_without_probes_say_nothing_at_all() -> None:
    assert take(WorkWindows(), [account(1, 30, 28)], 0, 10, pids=set()) == []


def test_traffic_of_nobody_we_know_is_listed_but_belongs_to_no_rank() -> None:
    found = take(WorkWindows(), [account(9, 5, 5)], 0, 10)
    stranger = one(found, Scope.FLOW, queue_pair=9)
    assert (stranger.comm_hash, stranger.work.posted) == (None, 5)
    assert one(found, Scope.PORT).work.posted == 0
    assert not any(w.queue_pair == 9 for w in take(WorkWindows(), [account(9, 0, 0)], 0, 10))


def test_uncertainty_is_the_spread_of_the_mean() -> None:
    assert uncertainty([5.0, 5.0]) is None
    assert uncertainty([5.0] * 4) == 0.0
    assert uncertainty([0.0] * 4) is None
    assert uncertainty([8.0, 12.0, 8.0, 12.0]) == pytest.approx(0.1155, abs=1e-3)
    windows, posted = WorkWindows(), 0
    for burst in range(6):
        posted += 10 + 4 * (burst % 2)
        found = take(windows, [account(1, posted, posted)], 1000 * burst, 1000 * burst + 10)
    seen = one(found, Scope.FLOW, queue_pair=1).work.uncertainty
    assert seen is not None and 0.05 < seen < 0.15


def test_a_process_that_is_gone_is_forgotten() -> None:
    windows = WorkWindows()
    take(windows, [account(1, 30, 28)], 0, 10)
    windows.forget(100)
    assert not windows._totals and not windows._rates
