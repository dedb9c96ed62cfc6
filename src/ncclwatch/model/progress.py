"""Progress between two looks at a process: any counter of NCCL that moved, any operation that came or went."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from operator import attrgetter

from ncclwatch.model.device import ConnectionCounter, DeviceSample
from ncclwatch.model.state import OpPhase, ProcessSample
from ncclwatch.model.steps import Steps

_STEPS: Callable[[ProcessSample], Steps] = attrgetter("operations.steps")
_COUNTED = attrgetter("hash", "rank", "op_count", "init_state", "sequence_numbers", "host_connections")
"""What of a communicator moves."""


def progressed(before: ProcessSample, after: ProcessSample) -> bool:
    """Whether NCCL did anything in this process between the two samples.

    Only what NCCL counts is compared, never CPU time: the threads of a hung rank spin. That a process has ended, that its memory
    could not be read, and what an abort of its communicators drops (a watchdog's, of a job that hangs) is nothing NCCL did.
    """
    if before is after or after.run_state == "X" or before.unread or after.unread:
        return False
    if before.calls_seen == after.calls_seen and _equal(before, after):
        return False
    if given_up := _given_up(before, after):
        before, after = _without(before, given_up), _without(after, given_up)
    if before.calls_seen != after.calls_seen:
        return True
    # What moves in nearly every iteration first: of a job that goes on nothing else need be looked at.
    moved = any(set(marks(before)) != set(marks(after)) for marks in (_communicator_marks, _operation_marks, _other_marks))
    return moved or _counters_moved(before.device, after.device)


def _given_up(before: ProcessSample, after: ProcessSample) -> set[tuple[int, int]]:
    """Hash and rank of communicators that were aborted, or that are there no longer."""
    if before.communicators is after.communicators and not any(own.aborted for own in after.communicators):
        return set()
    kept = {(own.hash, own.rank) for own in after.communicators if not own.aborted}
    return {(own.hash, own.rank) for own in (*before.communicators, *after.communicators)} - kept


def _without(sample: ProcessSample, given_up: set[tuple[int, int]]) -> ProcessSample:
    """What a sample says of the other communicators; calls and the GPU do not say which they are of."""
    hashes = {number for number, _ in given_up}
    return replace(
        sample,
        communicators=tuple(own for own in sample.communicators if (own.hash, own.rank) not in given_up),
        operations=tuple(one for one in sample.operations if one.comm_hash not in hashes),
        pending=tuple(one for one in sample.pending if one.comm_hash not in hashes),
        calls_seen=None,
        device=None,
    )


def _equal(before: ProcessSample, after: ProcessSample) -> bool:
    """Whether all that counts is the same, in the same order: quick, and what most processes of a hung job show."""
    if before.pending != after.pending or before.device != after.device:
        return False
    if before.operations is not after.operations:
        steps = _STEPS(after)
        if not steps.exact or _STEPS(before) != steps:
            return False
    earlier, later = before.communicators, after.communicators
    if earlier is later:
        return True
    if len(earlier) != len(later):
        return False
    for one, other in zip(earlier, later, strict=True):  # noqa: SIM110 - a generator for each process would cost a tenth of location
        if one is not other and _COUNTED(one) != _COUNTED(other):
            return False
    return True


def _communicator_marks(sample: ProcessSample) -> Iterator[Hashable]:
    """Everything in the communicators of a sample that moves when NCCL works, or when the process calls it."""
    for communicator in sample.communicators:
        key = (communicator.hash, communicator.rank)
        yield ("op_count", key, communicator.op_count)
        yield ("sequence", key, tuple(sorted(communicator.sequence_numbers.items())))
        yield ("init", key, communicator.init_state)
        for end in communicator.host_connections:
            place = (end.channel, end.peer, end.direction, end.connection_index)
            yield ("host", key, place, end.head, end.tail)


def _operation_marks(sample: ProcessSample) -> Iterator[Hashable]:
    """The same of the operations of its proxies."""
    for operation in sample.operations:
        for sub in operation.subs:
            place = (operation.comm_hash, operation.direction, operation.op_count, sub.channel, sub.peer, sub.connection_index)
            if operation.phase is OpPhase.PROGRESS:
                yield ("step", place, sub.base, sub.posted, sub.received, sub.transmitted, sub.done, sub.gpu_ready)
            else:
                # Counters of an operation that has not begun are left over from its pool slot's last use.
                yield ("queued", place, operation.phase)


def _other_marks(sample: ProcessSample) -> Iterator[Hashable]:
    """The same of its GPU, and of what waits for its proxies."""
    if sample.device is not None:
        yield from _device_marks(sample.device)
    for pending in sample.pending:
        yield ("pending", pending.comm_hash, pending.direction, pending.op_count, pending.channel, pending.peer)


def _counters_moved(before: DeviceSample | None, after: DeviceSample | None) -> bool:
    """Whether a counter that was read at both looks has changed; one that was not read this time says nothing."""
    if before is None or after is None:
        return False
    known = {_counter_place(counter): counter.value for counter in before.counters if counter.value is not None}
    return any(
        counter.value is not None and known.get(_counter_place(counter), counter.value) != counter.value
        for counter in after.counters
    )


def _counter_place(counter: ConnectionCounter) -> Hashable:
    return (counter.comm_address, counter.channel, counter.peer, counter.is_send, counter.connection_index)


def _device_marks(device: DeviceSample) -> Iterator[Hashable]:
    """What moves on the GPU; nothing of what only our own copying moves."""
    for communicator in device.communicators:
        key = ("device", communicator.hash, communicator.inside_address)
        yield (*key, communicator.operations)
        for channel in communicator.channels:
            yield (*key, channel.channel, channel.started, channel.finished)
        for operation in communicator.recent:
            yield (*key, "operation", operation.ordinal, operation.started, operation.finished)
    for transfer in device.transfers:
        place = (transfer.hash, transfer.channel, transfer.peer, transfer.is_send, transfer.begun_ns)
        yield ("transfer", place, transfer.steps_begun, transfer.steps_finished)
