"""What successive looks say of one process: its current operation, the age of it, its steps and their rate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.collect.aggregate import Aggregator
from ncclwatch.collect.state import StateTracker
from ncclwatch.model.state import Direction, OpPhase, ProcessSample
from unit.synthetic import SECOND, Rank, communicator, recv, send, shared


def sample(at_s: float, *operations: object, op_count: int | None = None, **extra: object) -> ProcessSample:
    comm = replace(communicator(0, 4), op_count=op_count)
    [look] = Rank(0, 4, (comm,), tuple(operations)).looks(1)  # type: ignore[arg-type]
    return replace(look, time_ns=int(at_s * SECOND), **extra)  # type: ignore[arg-type]


def feed(*samples: ProcessSample) -> StateTracker:
    tracker = StateTracker(0)
    for look in samples:
        tracker.feed(look)
    return tracker


def test_an_operation_is_taken_over_all_its_transfers() -> None:
    tracker = feed(
        sample(
            1,
            send(1, sent=60, done=56, produced=60),
            recv(3, posted=64, received=58, delivered=56, consumed=56, channel=1),
        )
    )
    [found] = tracker.open
    assert (found.name, found.sequence, found.comm_rank, found.nranks) == ("AllReduce", 13, 0, 4)
    assert (found.steps_done, found.steps_total) == (112, 192)


def test_age_counts_from_the_first_look_that_saw_the_operation() -> None:
    early = send(1, sent=8, done=4, produced=8, op_count=26)
    later = send(1, sent=8, done=4, produced=8, op_count=28)
    tracker = feed(sample(1, early), sample(2, later), sample(3, later), sample(4, later))
    [found] = tracker.open
    assert found.since_ns == 2 * SECOND
    assert not found.since_before


def test_an_operation_that_was_open_at_the_first_look_is_older_than_we_know() -> None:
    tracker = feed(*(sample(t, send(1, sent=8, done=4, produced=8)) for t in (1, 2, 3)))
    [found] = tracker.open
    assert (found.since_ns, found.since_before) == (SECOND, True)


def test_the_oldest_operation_that_runs_comes_first() -> None:
    running = send(1, sent=8, done=4, produced=8, op_count=26)
    queued = send(1, sent=8, done=4, produced=8, op_count=28, phase=OpPhase.READY, queued_behind=1)
    tracker = feed(sample(1, queued), sample(2, queued, running))
    assert [found.sequence for found in tracker.open] == [13, 14]
    # Counters of what has not begun are left over from the slot's last use.
    assert [found.steps_done for found in tracker.open] == [4, 0]


def test_point_to_point_transfers_of_a_communicator_are_taken_together() -> None:
    first = send(1, sent=2, done=0, produced=2, op_count=3, collective="")
    second = recv(3, posted=8, received=0, delivered=0, consumed=0, op_count=7, collective="")
    tracker = feed(sample(1, first), sample(2, first, second), sample(3, second))
    [found] = tracker.open
    assert (found.name, found.sequence) == ("Recv", None)
    assert found.since_ns == SECOND, "the batch is the same one as long as transfers of it follow each other"
    assert feed(sample(1, first, second)).open[0].name == "Send/Recv"


def test_steps_are_counted_across_operations_by_the_absolute_step_of_the_connection() -> None:
    first = send(1, sent=50, done=48, produced=50, base=0)
    third = send(1, sent=12, done=10, produced=12, base=192, op_count=30)
    tracker = feed(sample(1, first), sample(2, third))
    assert tracker.per_second(2 * SECOND)[1] == pytest.approx((202 - 48) / 2)


def test_a_counter_that_goes_back_is_no_progress_below_zero() -> None:
    tracker = feed(sample(1, op_count=100), sample(2, op_count=5))
    assert tracker.per_second(2 * SECOND)[0] == 0.0


def test_when_nothing_moves_the_time_of_the_last_move_stays() -> None:
    still = sample(3, send(1, sent=8, done=4, produced=8))
    tracker = feed(sample(1), sample(2, send(1, sent=8, done=2, produced=8)), still, replace(still, time_ns=9 * SECOND))
    assert tracker.moved_ns == 3 * SECOND


def test_head_and_tail_in_shared_memory_count_as_movement() -> None:
    def look(at_s: float, head: int) -> ProcessSample:
        comm = replace(communicator(0, 4), host_connections=(shared(Direction.RECV, 3, head, head),))
        return replace(sample(at_s), communicators=(comm,))

    assert feed(look(1, 5), look(2, 6), look(3, 6)).moved_ns == 2 * SECOND


def test_window_of_a_stalled_rank_says_how_long_and_how_far() -> None:
    looks = Rank(2, 4, (communicator(2, 4),), (send(3, sent=92, done=92, produced=92),), "T").looks(5)
    aggregator = Aggregator(calls_plane=False)
    aggregator.add_process(looks[0].process, looks[0].time_ns)
    for look in looks:
        aggregator.feed_sample(look)
    [window] = aggregator.windows(looks[-1].time_ns)
    assert (window.rank, window.run_state, window.gpu) == (2, "T", 0)
    assert window.operation is not None
    assert (window.operation.age_s, window.operation.at_least) == (4.0, True)
    assert (window.operation.steps_done, window.operation.steps_total) == (92, 96)
    assert window.still_s == 4.0
    assert window.operations_per_s == 0.0


def test_a_failed_look_is_told_and_forgotten_after_a_good_one() -> None:
    [look] = Rank(0, 4, (communicator(0, 4),)).looks(1)
    aggregator = Aggregator()
    aggregator.add_process(look.process, 0)
    aggregator.feed_problem(look.process.key, "not now")
    assert aggregator.windows(SECOND)[0].problem == "not now"
    aggregator.feed_sample(look)
    assert aggregator.windows(SECOND)[0].problem == ""


def test_a_window_before_any_look_claims_nothing() -> None:
    [look] = Rank(0, 4, (communicator(0, 4),)).looks(1)
    aggregator = Aggregator(calls_plane=False)
    aggregator.add_process(look.process, 0)
    [window] = aggregator.windows(SECOND)
    assert (window.operation, window.operations_per_s, window.still_s, window.run_state) == (None, None, None, "?")
