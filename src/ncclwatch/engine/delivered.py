"""Data that InfiniBand has delivered: what a completed send proves of the receiver.

A send of NET/IB completes once the receiver's adapter has acknowledged all of it (reliable connections; ``ncclIbTest``,
``src/transport/net_ib.cc``). It lies in the receiver's memory then, and only the receiver's own proxy, which has to poll its
completion queue, is left to move. Over sockets a send completes once the kernel has taken it, which proves nothing.
"""

from __future__ import annotations

from ncclwatch.engine.job import Group, Member
from ncclwatch.model.state import ProcessSample, ProxyOperation

RELIABLE = "IB"
"""How the names of NCCL's own InfiniBand transport and of its SHARP plugin begin (``IB``, ``IBext_v8``)."""
CLOCKS_S = 0.1
"""Samples of two hosts are ordered by their clocks only where they are further apart."""


def acknowledges(operation: ProxyOperation) -> bool:
    """Whether a send over the transport of an operation is complete only when the receiver's adapter has all of it."""
    return operation.net_name.startswith(RELIABLE)


def was_before(group: Group, sender: Member, receiver: Member) -> bool:
    """Whether the sender had come to where it is now before the receiver was read: it may have got there only since.

    Of the sender its newest sample counts, or one before that shows the same of its transfers on this communicator.
    """
    read_ns = receiver.last.wall_ns
    if sender.info.host != receiver.info.host:
        read_ns -= int(CLOCKS_S * 1e9)
    now = sender.last
    for sample in reversed(sender.samples):
        if sample is not now and not _same_transfers(group, sample, now):
            return False
        if sample.wall_ns + sample.duration_ns <= read_ns:
            return True
    return False


def _same_transfers(group: Group, sample: ProcessSample, now: ProcessSample) -> bool:
    def shown(one: ProcessSample) -> tuple[object, object]:
        steps = [c.net_steps for c in one.communicators if c.hash == group.hash]
        return [op for op in one.operations if op.comm_hash == group.hash], steps

    return shown(sample) == shown(now)
