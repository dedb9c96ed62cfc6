"""What one connection of an unfinished operation waits for, in words, from the steps its proxy has counted.

The question is always where the first step that is not done has got to. What the counters mean: NCCL ``src/transport/net.cc``,
``sendProxyProgress`` and ``recvProxyProgress``. This is what one end sees; a verdict compares both ends.
"""

from __future__ import annotations

from ncclwatch.model.state import Direction, HostConnection, OpPhase, ProxyOperation, ProxySub

# Slots of a connection's buffer (NCCL_STEPS, src/include/device.h); the sender may be that many steps ahead of the receiver.
CONNECTION_STEPS = 8


def operation_name(operation: ProxyOperation) -> str:
    """``AllReduce #14`` or ``Send``."""
    if operation.is_point_to_point:
        return "Send" if operation.direction is Direction.SEND else "Recv"
    return f"{operation.collective.removeprefix('ncclFunc') or 'operation'} #{operation.sequence}"


def waits_for(operation: ProxyOperation, sub: ProxySub) -> str:
    """What the first unfinished step of this transfer waits for, as this end of the connection sees it."""
    if operation.queued_behind:
        return f"{operation.queued_behind} earlier operation{'s' if operation.queued_behind > 1 else ''} on this connection"
    if operation.phase is not OpPhase.PROGRESS:
        return "its turn: not started"
    if sub.done >= sub.nsteps:
        return "nothing: all steps done"
    return _send(sub) if operation.direction is Direction.SEND else _recv(sub)


def _send(sub: ProxySub) -> str:
    if sub.transmitted > sub.done:
        return f"the network to complete step {sub.done + 1}"
    step = sub.transmitted + 1
    if sub.gpu_ready is None:
        return f"this GPU to produce, or rank {sub.peer} to accept, step {step}"
    if sub.gpu_ready > sub.transmitted:
        return f"rank {sub.peer} to accept step {step}"
    return f"this GPU to produce step {step}"


def _recv(sub: ProxySub) -> str:
    if sub.transmitted > sub.done:
        return f"this GPU to consume step {sub.done + 1}"
    if sub.received > sub.transmitted:
        return f"step {sub.transmitted + 1} to be flushed to this GPU"
    if sub.posted > sub.received:
        return f"step {sub.received + 1} from rank {sub.peer}"
    return f"a receive for step {sub.posted + 1} to be posted"


def host_waits_for(end: HostConnection) -> str:
    """What one end of a shared-memory connection waits for, as far as head and tail tell; empty when they tell nothing."""
    if end.head is None or end.tail is None:
        return ""
    if end.direction is Direction.SEND and end.tail - end.head >= CONNECTION_STEPS:
        return f"rank {end.peer} to consume (buffer full)"
    if end.direction is Direction.RECV and end.tail > end.head:
        return f"this GPU to consume {end.tail - end.head} step{'s' if end.tail - end.head > 1 else ''}"
    return ""
