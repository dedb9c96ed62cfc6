"""The calls of a process: operations count when they are launched, groups at their end, blocked calls until they return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ncclwatch.collect.aggregate import Aggregator
from ncclwatch.collect.calls import MAX_BYTES, MAX_THREADS, CallTracker, communicators_named, creating
from ncclwatch.collect.functions import algorithm_bytes, algorithm_sizes, type_name
from ncclwatch.collect.rates import BUCKET_NS, WINDOW_NS, RateWindow
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from unit.synthetic import SECOND, Rank, communicator, process

FLOAT = 7


def record(function: Function, time_s: float, *, kind: Kind = Kind.ENTER, tid: int = 1, **fields: int) -> dict[str, int]:
    row = dict.fromkeys(EVENT_DTYPE.names or (), 0)
    row |= {"rank": 0, "nranks": 4, "datatype": FLOAT, "redop": 0, "peer": -1, "result": -1, "color": -1}
    row |= {"time_ns": int(time_s * SECOND), "pid": 1000, "tid": tid, "function": function, "kind": kind, "flags": Flag.COMM_READ}
    return {**row, "comm_hash": 0xA1, "count": 1024, **fields}


GROUP_AND_SPLIT = (record(Function.GROUP_START, 1), record(Function.SEND, 1), record(Function.COMM_SPLIT, 1, tid=2))
"""A group that is open in one thread while another makes a communicator."""


def feed(tracker: CallTracker, *records: dict[str, int]) -> CallTracker:
    found = np.zeros(len(records), EVENT_DTYPE)
    for at, row in enumerate(records):
        for name, value in row.items():
            found[at][name] = value % (1 << 32) if name == "tid" else value
    tracker.feed(found)
    return tracker


def test_an_operation_outside_a_group_is_launched_by_its_call() -> None:
    tracker = feed(CallTracker(0), *(record(Function.ALL_REDUCE, t / 10) for t in range(23)))
    assert (tracker.totals.calls, tracker.totals.operations, tracker.totals.nbytes) == (23, 23, 23 * 4096)
    assert tracker.last is not None and tracker.last.time_ns == 2.2 * SECOND


def test_operations_in_a_group_are_launched_at_its_outermost_end() -> None:
    tracker = feed(
        CallTracker(0),
        record(Function.GROUP_START, 1),
        record(Function.SEND, 1.1),
        record(Function.GROUP_START, 1.2),
        record(Function.RECV, 1.3),
        record(Function.GROUP_END, 1.4),
    )
    assert tracker.totals.operations == 0
    assert tracker.last is None
    feed(tracker, record(Function.GROUP_END, 2))
    assert (tracker.totals.calls, tracker.totals.operations, tracker.totals.nbytes) == (6, 2, 8192)
    assert tracker.last is not None and tracker.last.name == "Recv"
    # Both count at the time of the end, two seconds in.
    assert tracker.per_second(2 * SECOND)[0] == pytest.approx(1.0)


def test_groups_of_two_threads_do_not_mix() -> None:
    tracker = feed(
        CallTracker(0),
        record(Function.GROUP_START, 1, tid=1),
        record(Function.SEND, 1.1, tid=1),
        record(Function.ALL_REDUCE, 1.2, tid=2),
    )
    assert tracker.totals.operations == 1
    feed(tracker, record(Function.GROUP_END, 1.3, tid=2))
    assert tracker.totals.operations == 1


def test_a_group_that_began_before_the_probes_does_no_harm() -> None:
    tracker = feed(CallTracker(0), record(Function.GROUP_END, 1), record(Function.ALL_REDUCE, 2))
    assert tracker.totals.operations == 1


def test_a_simulated_group_launches_nothing() -> None:
    tracker = feed(
        CallTracker(0), record(Function.GROUP_START, 1), record(Function.SEND, 1), record(Function.GROUP_SIMULATE_END, 1)
    )
    assert tracker.totals.operations == 0
    feed(tracker, record(Function.ALL_REDUCE, 2))
    assert tracker.totals.operations == 1


def test_after_lost_records_no_group_stays_open_and_nothing_stays_blocked() -> None:
    tracker = feed(
        CallTracker(0), record(Function.GROUP_START, 1), record(Function.SEND, 1), record(Function.COMM_SPLIT, 1, tid=2)
    )
    tracker.records_lost()
    assert tracker.totals.operations == 1
    assert not tracker.blocked
    feed(tracker, record(Function.ALL_REDUCE, 2))
    assert tracker.totals.operations == 2


def test_a_call_that_has_not_returned_is_blocked_until_it_does() -> None:
    tracker = feed(CallTracker(0), record(Function.COMM_INIT_RANK_CONFIG, 1))
    assert [call.name for call in tracker.blocked.values()] == ["CommInitRankConfig"]
    feed(tracker, record(Function.COMM_INIT_RANK_CONFIG, 2, kind=Kind.LEAVE))
    assert not tracker.blocked


def test_a_thread_that_makes_another_call_has_left_the_one_before() -> None:
    tracker = feed(CallTracker(0), record(Function.COMM_SPLIT, 1), record(Function.ALL_REDUCE, 2))
    assert not tracker.blocked


def test_a_collective_whose_leave_is_not_probed_is_never_called_blocked() -> None:
    assert not feed(CallTracker(0), record(Function.ALL_REDUCE, 1)).blocked


@pytest.mark.parametrize("kind", [Kind.EXEC, Kind.EXIT])
def test_exec_and_exit_end_what_threads_were_in(kind: Kind) -> None:
    tracker = feed(
        CallTracker(0), record(Function.GROUP_START, 1), record(Function.SEND, 1), record(Function.COMM_SPLIT, 1, tid=2)
    )
    feed(tracker, record(Function.NONE, 2, kind=kind))
    feed(tracker, record(Function.GROUP_END, 3))
    assert tracker.totals.operations == 0
    assert not [call for call in tracker.blocked.values() if call.name == "CommSplit"]


def test_what_a_process_can_make_us_hold_is_bounded() -> None:
    tracker = CallTracker(0)
    for tid in range(3 * MAX_THREADS):
        feed(tracker, record(Function.COMM_SPLIT, 1, tid=tid), record(Function.GROUP_START, 1, tid=-tid - 1))
        feed(tracker, record(Function.ALL_REDUCE, 1, tid=tid + 10 * MAX_THREADS, comm_hash=tid))
    assert len(tracker.blocked) <= MAX_THREADS
    assert len(tracker._groups) <= MAX_THREADS
    assert len(tracker._last_on) <= MAX_THREADS


def test_types_that_are_not_known_or_not_told_have_a_name() -> None:
    assert [type_name(number) for number in (7, 99, -1)] == ["float32", "type 99", "unknown type"]


def test_algorithm_bytes_as_nccl_tests_counts_them() -> None:
    assert algorithm_bytes(Function.ALL_REDUCE, 1000, FLOAT, 4) == 4000
    assert algorithm_bytes(Function.ALL_GATHER, 1000, FLOAT, 4) == 16000
    assert algorithm_bytes(Function.REDUCE_SCATTER, 1000, 9, 4) == 8000
    assert algorithm_bytes(Function.SEND, 1000, 8, 4) == 8000
    assert algorithm_bytes(Function.ALL_GATHER, 1000, FLOAT, -1) is None
    assert algorithm_bytes(Function.ALL_REDUCE, 1000, 99, 4) is None
    assert algorithm_bytes(Function.GROUP_END, 1000, FLOAT, 4) == 0


def test_algorithm_bytes_of_many_calls_are_those_of_each() -> None:
    source, number = np.random.default_rng(4), 3000
    functions = source.choice([0, *Function, 9999], number)
    counts = source.choice(np.array([0, 1, 5, 1 << 20, 1 << 43, 1 << 50, (1 << 64) - 1], np.uint64), number)
    datatypes, nranks = source.choice([-1, 0, 1, FLOAT, 11, 12, 99], number), source.choice([-1, 0, 1, 8, 1 << 30], number)
    known = [algorithm_bytes(*map(int, what)) for what in zip(functions, counts, datatypes, nranks, strict=True)]
    nbytes, unknown = algorithm_sizes(functions.astype(np.uint16), counts, datatypes, nranks, MAX_BYTES)
    assert unknown == known.count(None) > 0
    assert nbytes.tolist() == [min(size or 0, MAX_BYTES) for size in known]


def test_operations_of_unknown_size_are_counted_as_such() -> None:
    tracker = feed(CallTracker(0), record(Function.ALL_REDUCE, 1, datatype=99))
    assert (tracker.totals.operations, tracker.totals.nbytes, tracker.totals.unsized) == (1, 0, 1)


def test_rates_are_over_a_sliding_window_and_stay_bounded() -> None:
    rates = RateWindow(1, 0)
    for tenth in range(10_000):
        rates.add(tenth * SECOND // 10, 1.0)
    assert rates.per_second(1000 * SECOND)[0] == pytest.approx(10, rel=0.05)
    assert len(rates._buckets) <= WINDOW_NS // BUCKET_NS + 1
    assert rates.per_second(1010 * SECOND) == (0.0,)


def test_rates_before_a_window_has_passed_are_over_the_time_there_was() -> None:
    rates = RateWindow(2, 100 * SECOND)
    rates.add(100 * SECOND + 1, 10, 4096)
    assert rates.per_second(101 * SECOND) == (10.0, 4096.0)
    # A late record counts where it belongs; one that is older than the window does not.
    rates.add(100 * SECOND + 2, 10, 0)
    rates.add(10 * SECOND, 1000, 0)
    assert rates.per_second(102 * SECOND)[0] == pytest.approx(10.0)


def events(*records: dict[str, int]) -> np.ndarray[Any, Any]:
    array = np.zeros(len(records), EVENT_DTYPE)
    for i, row in enumerate(records):
        for name, value in row.items():
            array[name][i] = value
    return array


def watching(*ranks: int) -> Aggregator:
    aggregator = Aggregator()
    for rank in ranks:
        aggregator.add_process(process(rank, 4), 0)
    return aggregator


def test_records_go_to_the_process_that_made_them() -> None:
    aggregator = watching(0, 1)
    aggregator.feed_events(events(*(record(Function.ALL_REDUCE, t / 10, pid=1000 + t % 2) for t in range(23))))
    first, second = aggregator.windows(3 * SECOND)
    assert (first.operations, second.operations) == (12, 11)
    assert first.bytes_per_s == pytest.approx(12 * 4096 / 3)
    assert first.last_call is not None and first.last_call.age_s == pytest.approx(0.8)


def test_records_of_strangers_are_counted_and_their_pids_told_once() -> None:
    aggregator = watching(0)
    aggregator.feed_events(events(record(Function.ALL_REDUCE, 1, pid=77)))
    assert aggregator.strangers.records == 1
    assert aggregator.strangers.take() == {77}
    assert aggregator.strangers.take() == set()


def test_a_number_of_another_pid_namespace_is_no_pid_of_ours() -> None:
    aggregator = watching(0)
    aggregator.feed_events(events(record(Function.ALL_REDUCE, 1, flags=Flag.UNKNOWN_PROCESS, pid_namespace=1)))
    assert aggregator.windows(SECOND)[0].calls == 0
    assert aggregator.strangers.take() == set()


def test_a_reused_pid_is_another_process() -> None:
    aggregator = watching(0)
    aggregator.feed_events(events(record(Function.ALL_REDUCE, 1)))
    same_pid = process(0, 4)
    aggregator.add_process(replace(same_pid, key=replace(same_pid.key, start_time=6)), 2 * SECOND)
    [window] = aggregator.windows(3 * SECOND)
    assert window.calls == 0
    assert len(aggregator) == 1


def test_a_blocked_call_is_the_current_operation_when_no_step_is_open() -> None:
    aggregator = watching(0)
    aggregator.feed_events(events(record(Function.COMM_SPLIT, 1)))
    [window] = aggregator.windows(31 * SECOND)
    assert window.operation is not None
    assert (window.operation.name, window.operation.plane, window.operation.age_s) == ("CommSplit", "calls", 30.0)


def test_without_the_calls_plane_rates_come_from_nccls_own_counters() -> None:
    aggregator = Aggregator(calls_plane=False)
    comm = communicator(0, 4)
    samples = Rank(0, 4, (comm,)).looks(2)
    aggregator.add_process(samples[0].process, samples[0].time_ns)
    for count, sample in zip((100, 150), samples, strict=True):
        aggregator.feed_sample(replace(sample, communicators=(replace(comm, op_count=count),)))
    [window] = aggregator.windows(samples[1].time_ns)
    assert window.rate_plane == "state"
    assert window.operations_per_s == pytest.approx(50)
    assert window.bytes_per_s is None


def test_who_makes_a_communicator_is_told_by_its_calls() -> None:
    rows = [
        (11, Function.COMM_INIT_RANK_CONFIG, Kind.ENTER, -1),
        (12, Function.COMM_SPLIT, Kind.ENTER, 0),
        (13, Function.COMM_SPLIT, Kind.ENTER, -1),
        (14, Function.COMM_INIT_RANK, Kind.LEAVE, -1),
        (15, Function.ALL_REDUCE, Kind.ENTER, -1),
    ]
    events = np.zeros(len(rows), EVENT_DTYPE)
    for place, (pid, function, kind, color) in enumerate(rows):
        events[place]["pid"], events[place]["function"] = pid, function
        events[place]["kind"], events[place]["color"] = kind, color
    assert creating(events) == {11, 12}
    assert creating(events[:0]) == set()


def test_communicators_are_known_from_the_calls_that_name_them() -> None:
    rows = [
        (11, Function.COMM_INIT_RANK, Kind.ENTER, 0),
        (11, Function.COMM_INIT_RANK, Kind.LEAVE, 0x1000),
        (12, Function.ALL_REDUCE, Kind.ENTER, 0x2000),
        (12, Function.ALL_REDUCE, Kind.ENTER, 0x2000),
        (13, Function.COMM_DESTROY, Kind.LEAVE, 0x3000),
    ]
    events = np.zeros(len(rows), EVENT_DTYPE)
    for place, (pid, function, kind, comm) in enumerate(rows):
        events[place]["pid"], events[place]["function"] = pid, function
        events[place]["kind"], events[place]["comm"] = kind, comm
    assert communicators_named(events) == {(11, 0x1000), (12, 0x2000)}
    assert communicators_named(events[:0]) == set()
