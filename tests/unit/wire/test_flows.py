"""What is said about a flow, from accounts made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from ncclwatch.model.state import Direction
from ncclwatch.wire import layouts
from ncclwatch.wire.accounts import QueuePairAccount, merged_bandwidth
from ncclwatch.wire.contexts import QueuePair
from ncclwatch.wire.flows import LEARNING, FlowState, FlowWatch, owners_by_key
from ncclwatch.wire.nccl_queues import QueueOwner
from ncclwatch.wire.session import WireSession

MS = 1_000_000


def account(
    *,
    completions: list[int],
    size: int = 1 << 20,
    pending: tuple[int, ...] = (),
    number: int = 17,
    latency_ns: int = 2 * MS,
    **counts: int,
) -> QueuePairAccount:
    """A queue pair whose requests of ``size`` bytes completed at these times, and some that still wait."""
    record: Any = np.zeros(1, layouts.QP)[0]
    done = len(completions)
    for index, time_ns in enumerate(completions):
        record["window"][index % layouts.WINDOW] = (time_ns, (index + 1) * size)
    for index, time_ns in enumerate(pending):
        record["pending"][(done + index) % layouts.PENDING]["time_ns"] = time_ns
    record["samples"] = record["completed"] = record["retired"] = record["head"] = done
    record["tail"] = record["posted"] = record["signalled"] = done + len(pending)
    record["retired_bytes"] = done * size
    record["last_completion_ns"] = completions[-1] if completions else 0
    bucket = int(np.searchsorted(layouts.bucket_bounds(), latency_ns, side="right")) - 1
    record["latency"][bucket] = done
    for name, value in counts.items():
        record[name] = value
    return QueuePairAccount(100, 0xC0, number, record)


def steady(start: int, count: int, gap: int) -> list[int]:
    return [start + index * gap for index in range(count)]


def test_flows_of_a_process_that_is_let_go_are_forgotten() -> None:
    session = WireSession()
    session._watch.look([account(completions=steady(0, 3, MS), number=number) for number in range(9)], 10 * MS, exact=True)
    assert len(session._watch._histories) == 9
    session.drop(101)
    assert len(session._watch._histories) == 9, "another process"
    session.drop(100)
    assert session._watch._histories == {}


def test_sliding_window_throughput() -> None:
    # 1 MiB a millisecond for 100 completions, then 1 MiB every 2 ms for 28.
    times = steady(0, 100, MS)
    times += steady(times[-1] + 2 * MS, 28, 2 * MS)
    found = account(completions=times)
    assert found.bandwidth(28) == (1 << 20) / 0.002
    assert found.bandwidth(1) == (1 << 20) / 0.002
    both = found.bandwidth(64)
    assert both is not None and (1 << 20) / 0.002 < both < (1 << 20) / 0.001
    assert account(completions=[5]).bandwidth() is None


def test_window_wraps_around() -> None:
    found = account(completions=steady(1000, 1000, MS))
    assert len(found.window) == layouts.WINDOW
    assert found.window["time_ns"][-1] == 1000 + 999 * MS
    assert found.bandwidth(64) == (1 << 20) / 0.001


def test_throughput_of_a_port_is_the_sum_of_its_queue_pairs() -> None:
    pairs = [account(completions=steady(offset, 100, MS), number=offset) for offset in (1, 250_001, 500_001, 750_001)]
    rate = merged_bandwidth(pairs, 100)
    assert rate is not None
    assert abs(rate / ((1 << 20) / 0.00025) - 1) < 0.02
    assert merged_bandwidth([]) is None


def test_work_in_flight_without_completions_is_a_stall() -> None:
    watch = FlowWatch()
    times = steady(0, 50, MS)
    now = times[-1]
    (flow,) = watch.look([account(completions=times, pending=(now, now))], now + MS, exact=True)
    assert flow.state is FlowState.ACTIVE
    (flow,) = watch.look([account(completions=times, pending=(now, now))], now + 400 * MS, exact=True)
    assert flow.state is FlowState.ACTIVE
    (flow,) = watch.look([account(completions=times, pending=(now, now))], now + 501 * MS, exact=True)
    assert flow.state is FlowState.STALLED
    assert flow.in_flight == 2
    assert "no completion for 501 ms" in flow.reason


def test_a_flow_that_always_takes_long_is_no_stall() -> None:
    watch = FlowWatch()
    times = steady(0, 20, 100 * MS)
    watch.look([account(completions=times, pending=(times[-1],))], times[-1] + MS, exact=True)
    (flow,) = watch.look([account(completions=times, pending=(times[-1],))], times[-1] + 900 * MS, exact=True)
    assert flow.state is FlowState.ACTIVE
    (flow,) = watch.look([account(completions=times, pending=(times[-1],))], times[-1] + 2100 * MS, exact=True)
    assert flow.state is FlowState.STALLED


def test_a_sender_that_fills_its_queue_before_it_asks_is_no_stall() -> None:
    """As ``ib_write_bw`` on a slow machine: a post every 5 ms, no completion asked for before the queue is full."""
    watch = FlowWatch()
    posted = tuple(steady(0, 120, 5 * MS))
    (flow,) = watch.look([account(completions=[], pending=posted)], 600 * MS, exact=True)
    assert flow.state is FlowState.ACTIVE
    (flow,) = watch.look([account(completions=[], pending=posted)], posted[-1] + 501 * MS, exact=True)
    assert flow.state is FlowState.STALLED, "nothing more is posted"
    (flow,) = FlowWatch().look([account(completions=[], pending=(0, *steady(9_900 * MS, 9, 10 * MS)))], 10_001 * MS, exact=True)
    assert flow.state is FlowState.STALLED, "ten seconds are too long for any queue"
    (flow,) = FlowWatch().look([account(completions=[1], pending=posted)], 600 * MS, exact=True)
    assert flow.state is FlowState.STALLED, "completions were taken before"


def test_receives_that_wait_are_idle() -> None:
    watch = FlowWatch()
    waiting = account(completions=[], receives_posted=32)
    for now in (MS, 10_000 * MS):
        (flow,) = watch.look([waiting], now, exact=True)
        assert flow.state is FlowState.IDLE
    assert waiting.receives_waiting == 32


def drive(watch: FlowWatch, gap: int, looks: int, start: int = 0, completed: int = 0) -> tuple[FlowState, int, int]:
    """A flow that always has something in flight: 100 completions between looks."""
    state = FlowState.UNKNOWN
    times: list[int] = steady(start, 130, gap)
    for _ in range(looks):
        times += steady(times[-1] + gap, 100, gap)
        made = account(completions=times[-130:], pending=(times[-1],), latency_ns=2 * gap)
        completed += 100
        made.record["completed"] = completed
        (flow,) = watch.look([made], times[-1], exact=True)
        state = flow.state
    return state, times[-1], completed


def test_a_wire_that_becomes_slow_is_told_and_stays_slow() -> None:
    watch = FlowWatch()
    state, now, completed = drive(watch, MS, LEARNING + 2)
    assert state is FlowState.ACTIVE
    state, now, completed = drive(watch, 11 * MS // 10, 5, now, completed)
    assert state is FlowState.ACTIVE, "10 % is within what is tolerated"
    state, now, completed = drive(watch, 2 * MS, 50, now, completed)
    assert state is FlowState.SLOW
    state, _, _ = drive(watch, MS, 3, now, completed)
    assert state is FlowState.ACTIVE


def test_a_sender_that_pauses_is_not_a_slow_wire() -> None:
    watch = FlowWatch()
    _, now, completed = drive(watch, MS, LEARNING + 2)
    times = steady(now + 5000 * MS, 60, MS)
    times += steady(times[-1] + 500 * MS, 70, MS)
    made = account(completions=times, latency_ns=2 * MS)
    made.record["completed"] = completed + 130
    (flow,) = watch.look([made], times[-1], exact=True)
    assert flow.state is FlowState.ACTIVE


def test_errors_are_told_once() -> None:
    watch = FlowWatch()
    broken = account(completions=[MS], errors=3)
    broken.record["status_count"][12] = 3
    (flow,) = watch.look([broken], 2 * MS, exact=True)
    assert flow.state is FlowState.ERROR
    assert flow.errors == {"retry-exc-err": 3}
    (flow,) = watch.look([broken], 3 * MS, exact=True)
    assert flow.state is not FlowState.ERROR


def test_a_flow_is_joined_with_its_channel_and_peer_and_others_are_not_the_jobs() -> None:
    pair = QueuePair(0x1000, 0xC0, 17, 0x2000, 0x2000, 2)
    owner = QueueOwner(0xABC, 1, 3, 2, Direction.SEND, 0, pair)
    ours, foreign = account(completions=[MS]), account(completions=[MS], number=18)
    flows = FlowWatch().look(
        [ours, foreign],
        2 * MS,
        exact=True,
        owners=owners_by_key(100, [owner]),
        devices={(100, 0xC0): ("mlx5_0", 1)},
        retries={"mlx5_0": 4},
        step_rates={(100, 0xABC, 3, 2, Direction.SEND): 12.5},
    )
    assert (flows[0].rank, flows[0].channel, flows[0].peer, flows[0].device, flows[0].port) == (1, 3, 2, "mlx5_0", 1)
    assert flows[0].steps_per_second == 12.5
    assert flows[0].retries == 4
    assert [flow.belongs_to_job for flow in flows] == [True, False]


def test_roles_by_what_was_posted() -> None:
    def made(opcode: int, count: int, size: int, receives_posted: int = 0) -> QueuePairAccount:
        found = account(completions=[], receives_posted=receives_posted)
        found.record["posted"] = found.record["opcode_count"][opcode] = count
        found.record["opcode_bytes"][opcode] = count * size
        return found

    assert made(1, 10, 1 << 20).role() == "data"
    assert made(0, 10, 64, receives_posted=5).role() == "control"
    assert made(0, 10, 1 << 16, receives_posted=5).role() == "data"
    assert made(4, 10, 4).role() == "flush"
    assert made(4, 10, 4096).role() == "data"
    assert account(completions=[]).role() == ""


def test_what_a_burst_left_in_flight_is_not_a_stall() -> None:
    """Its completions came while nobody looked."""
    watch = FlowWatch()
    left = account(completions=[], pending=(1000 * MS,))
    for now in (1000 * MS, 2000 * MS, 20_000 * MS):
        (flow,) = watch.look([left], now, exact=False)
        assert flow.state is FlowState.IDLE
    (flow,) = watch.look([left], 20_000 * MS, exact=True)
    assert flow.state is FlowState.STALLED
