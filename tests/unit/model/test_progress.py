"""Progress between two looks: anything that NCCL counts, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ncclwatch.model.progress import progressed
from ncclwatch.model.state import Communicator, Direction, OpPhase, PendingOperation, ProcessSample, ProxyOperation
from unit.synthetic import Rank, communicator, operation, shared

Change = Callable[[ProcessSample], ProcessSample]


def sample() -> ProcessSample:
    own = replace(
        communicator(0, 2), op_count=7, sequence_numbers={"AllReduce": 7}, host_connections=(shared(Direction.SEND, 1, 3, 4),)
    )
    operations = (operation(Direction.SEND, 1, (8, 0, 4, 2)), operation(Direction.RECV, 1, (8, 4, 4, 2), phase=OpPhase.READY))
    pending = PendingOperation(own.hash, Direction.SEND, 27, 0, 1, 4, "AllReduce", "LL", None)
    return Rank(0, 2, (own,), operations, extra={"pending": (pending,), "calls_seen": 5}).looks(1)[0]


def of_communicator(**changes: object) -> Change:
    return lambda one: replace(one, communicators=(replace(one.communicators[0], **changes),))  # type: ignore[arg-type]


def of_operation(place: int, **changes: object) -> Change:
    def change(one: ProcessSample) -> ProcessSample:
        operations: list[ProxyOperation] = list(one.operations)
        sub = replace(operations[place].subs[0], **changes)  # type: ignore[arg-type]
        operations[place] = replace(operations[place], subs=(sub,))
        return replace(one, operations=tuple(operations))

    return change


MOVES: dict[str, Change] = {
    "a call": lambda one: replace(one, calls_seen=6),
    "a launch": of_communicator(op_count=8),
    "a count of NCCL": of_communicator(sequence_numbers={"AllReduce": 8}),
    "creation": of_communicator(init_state="ncclSuccess"),
    "shared memory": of_communicator(host_connections=(shared(Direction.SEND, 1, 4, 4),)),
    "a step": of_operation(0, done=3),
    "the GPU": of_operation(0, gpu_ready=9),
    "a phase": lambda one: replace(one, operations=(one.operations[0], replace(one.operations[1], phase=OpPhase.PROGRESS))),
    "an operation that has ended": lambda one: replace(one, operations=one.operations[:1]),
    "an operation that is taken": lambda one: replace(one, pending=()),
}
STILL: dict[str, Change] = {
    "time alone": lambda one: replace(one, time_ns=one.time_ns + 1, cpu_time_ns=99),
    "operations in another order": lambda one: replace(one, operations=one.operations[::-1]),
    "counters of what has not begun": of_operation(1, done=4),
    "what NCCL does not count": lambda one: replace(
        one, operations=tuple(replace(operation, idle=True, queued_behind=1) for operation in one.operations)
    ),
    "communicators that say the same": lambda one: replace(one, communicators=tuple(map(_again, one.communicators))),
}


def _again(own: Communicator) -> Communicator:
    return replace(own, sequence_numbers=dict(own.sequence_numbers))


@pytest.mark.parametrize("what", MOVES)
def test_what_nccl_counts_is_progress(what: str) -> None:
    before, after = sample(), MOVES[what](sample())
    assert progressed(before, after)
    assert progressed(after, before)


OTHER = communicator(0, 2, comm_hash=9)


def test_a_new_communicator_is_progress_and_one_that_is_gone_is_none() -> None:
    one, more = sample(), replace(sample(), communicators=(*sample().communicators, OTHER))
    assert progressed(one, more)
    assert not progressed(more, one)


def aborted(one: ProcessSample) -> ProcessSample:
    """A watchdog aborts its communicator: what was under way is dropped, and that was a call."""
    return replace(of_communicator(aborted=True, op_count=8)(one), operations=(), pending=(), calls_seen=6)


AFTERWARDS: dict[str, Change] = {
    "its communicator is aborted": aborted,
    "its communicator is aborted and destroyed": lambda one: replace(aborted(one), communicators=()),
    "it has ended": lambda one: one.ended(one.time_ns + 1, one.wall_ns + 1),
    "its memory cannot be read": lambda one: one.not_read(one.time_ns + 1, one.wall_ns + 1, "S", "held"),
}


@pytest.mark.parametrize("what", AFTERWARDS)
def test_that_it_comes_down_is_no_progress(what: str) -> None:
    before, after = sample(), AFTERWARDS[what](sample())
    assert not progressed(before, after)
    assert not progressed(after, after)


def test_memory_that_can_be_read_again_shows_no_progress_since() -> None:
    one = sample()
    assert not progressed(one.not_read(one.time_ns, one.wall_ns, "S", "held"), one)


def test_who_goes_on_while_another_communicator_is_aborted_makes_progress() -> None:
    both = replace(sample(), communicators=(*sample().communicators, OTHER))
    gone = replace(both, communicators=(both.communicators[0], replace(OTHER, aborted=True)))
    assert not progressed(both, gone)
    assert progressed(both, of_operation(0, done=3)(gone))


@pytest.mark.parametrize("what", STILL)
def test_nothing_else_is(what: str) -> None:
    before = sample()
    assert not progressed(before, STILL[what](before))
