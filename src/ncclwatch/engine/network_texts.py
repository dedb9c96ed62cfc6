"""Waits and stalls of network transfers as lines of evidence, with the counters that prove them."""

from __future__ import annotations

from ncclwatch.engine.connections import End
from ncclwatch.engine.edges import Stall, Why
from ncclwatch.engine.job import Job
from ncclwatch.model.state import Direction


def operation(end: End) -> str:
    """``AllReduce #13 sending``."""
    one = end.operation
    name = one.collective or ("point-to-point" if one.is_point_to_point else "operation")
    return f"{name} #{one.sequence} {'sending' if one.direction is Direction.SEND else 'receiving'}"


def wait(job: Job, end: End, other: End | None, why: Why, *, link: bool) -> str:
    """Who waits for whom, or which link does not do its part; ``other`` is the far end of the transfer where it is open."""
    key, sends = end.key, end.operation.direction is Direction.SEND
    numbers = _sender(end, other, why) if sends else _receiver(end, other, why)
    where = f"{operation(end)}, channel {key.channel}, {numbers}"
    if link:
        return f"{job.rank_name(key.group, key.source)} → {job.rank_name(key.group, key.destination)}: {why}: {where}"
    return f"{end.member.label} waits for {job.rank_name(key.group, key.destination if sends else key.source)}, {why}: {where}"


def _sender(end: End, other: End | None, why: Why) -> str:
    sub = end.sub
    under_way = sub.done < sub.transmitted
    if under_way:
        text = f"{sub.transmitted - sub.done} steps sent and not completed (completed {sub.done} of {sub.nsteps})"
    elif sub.gpu_ready is not None:
        text = f"produced {sub.gpu_ready}, sent {sub.transmitted} of {sub.nsteps} steps"
    else:
        text = f"sent {sub.transmitted} of {sub.nsteps} steps"
    if why is Why.UNCONFIRMED:
        return f"{text}; the receiver has finished this transfer"
    if other is None:
        return text
    received = f", received {other.sub.received}" if under_way and why in (Why.NO_BUFFER, Why.NOT_TAKEN) else ""
    return f"{text}; receiver posted {other.sub.posted}{received}"


def _receiver(end: End, other: End | None, why: Why) -> str:
    text = f"received {end.sub.received} of {end.sub.nsteps} steps"
    if other is None:
        return f"{text}; the sender has finished this transfer" if why is Why.IN_NETWORK else text
    sub = other.sub
    if why is Why.IN_NETWORK:
        return f"{text}; sender sent {sub.transmitted}, completed {sub.done}"
    if why is Why.NOT_TRANSMITTED:
        return f"{text}; sender produced {sub.gpu_ready}, sent {sub.transmitted}"
    return f"{text}; sender has sent {sub.transmitted}"


def stall(end: End, other: End | None, what: Stall) -> str:
    """What a rank could do and does not do."""
    return f"{end.member.label}: {what}: {operation(end)}, channel {end.key.channel}, {_standing(end, other, what)}"


def _standing(end: End, other: End | None, what: Stall) -> str:
    sub = end.sub
    if what is Stall.PROXY_NOT_SENDING:
        there = f"; receiver posted {other.sub.posted}" if other is not None else ""
        return f"produced {sub.gpu_ready}, sent {sub.transmitted}, completed {sub.done} of {sub.nsteps} steps{there}"
    if what is Stall.PROXY_NOT_TAKING:
        there = f"the network has confirmed {other.sub.done} to the sender" if other is not None else "the sender has finished"
        return f"received {sub.received} of {sub.nsteps} steps; {there}"
    if what is Stall.PROXY_NOT_OPENING:
        return f"opened {sub.posted}, completed {sub.done} of {sub.nsteps} steps"
    if what is Stall.GPU_NOT_PRODUCING and other is not None:
        return f"sent {sub.transmitted} of {sub.nsteps} steps, receiver posted {other.sub.posted}"
    if what is Stall.GPU_NOT_PRODUCING:
        return f"produced {sub.gpu_ready} of {sub.nsteps} steps"
    if what is Stall.GPU_NOT_CONSUMING:
        return f"delivered {sub.transmitted}, consumed {sub.done} of {sub.nsteps} steps"
    if what is Stall.FLUSH:
        return f"received {sub.received}, flushed {sub.transmitted} of {sub.nsteps} steps"
    if what is Stall.PROXY_NOT_POSTING:
        return f"posted {sub.posted} of {sub.nsteps} steps, all of them consumed"
    return f"{sub.nsteps} steps queued"
