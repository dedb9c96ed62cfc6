"""The device plane in the engine: connections inside a node that the host cannot see become seen, and the GPU says where it is.

Both ends of such a connection hold one of its two counters (the sender the head, the receiver the tail), so it is put together
from the frames of two processes. What then stands there is read by the same rules as shared memory (``waits``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.model.device import DeviceOperation, DeviceSample, KernelState
from ncclwatch.model.state import Communicator, Direction, HostConnection, Transport
from ncclwatch.model.verdict import Verdict, places, stands_in

LINES = 4
"""Lines of evidence from the device plane for one rank."""

_Place = tuple[int, int, int, int]
"""Channel, source, destination, connection index."""


def observe_hidden(job: Job) -> None:
    """Give the communicators of a job the connections whose two counters the shim has read; without a shim nothing changes."""
    for group in job.groups.values():
        connections = _connections(group)
        if not connections:
            continue
        for rank, (member, own) in group.members.items():
            seen = tuple(_ends(rank, connections))
            if seen:
                group.members[rank] = (member, replace(own, host_connections=(*own.host_connections, *seen)))


def _connections(group: Group) -> dict[_Place, tuple[int, int]]:
    """Place → (head, tail), where both were read and are not from before the standstill."""
    heads: dict[_Place, int] = {}
    tails: dict[_Place, int] = {}
    for rank, (member, own) in group.members.items():
        device = member.last.device
        if device is None:
            continue
        for counter in device.counters:
            if counter.comm_address != own.address or counter.value is None or counter.stale or counter.problem:
                continue
            source, destination = (rank, counter.peer) if counter.is_send else (counter.peer, rank)
            side = heads if counter.is_send else tails
            side[counter.channel, source, destination, counter.connection_index] = counter.value
    return {place: (head, tails[place]) for place, head in heads.items() if place in tails}


def _ends(rank: int, connections: dict[_Place, tuple[int, int]]) -> Iterator[HostConnection]:
    for (channel, source, destination, index), (head, tail) in sorted(connections.items()):
        if rank == source:
            yield HostConnection(channel, destination, Direction.SEND, index, head, tail, Transport.P2P)
        if rank == destination:
            yield HostConnection(channel, source, Direction.RECV, index, head, tail, Transport.P2P)


def is_seen(communicator: Communicator, channel: int, peer: int) -> bool:
    """Whether all that joins this rank to a peer on a channel inside the node was read by the shim."""
    wanted = {d for c, p, d, transport in communicator.transports if (c, p, transport) == (channel, peer, Transport.P2P)}
    seen = {str(conn.direction) for conn in communicator.host_connections if (conn.channel, conn.peer) == (channel, peer)}
    return bool(wanted) and {str(direction) for direction in wanted} <= seen


def sees_everything(job: Job) -> bool:
    """Whether the shim has read every P2P connection of the job."""
    joined = [
        (own, channel, peer)
        for group in job.groups.values()
        for _, own in group.members.values()
        for channel, peer, _, transport in own.transports
        if transport is Transport.P2P
    ]
    return bool(joined) and all(is_seen(own, channel, peer) for own, channel, peer in joined)


def gpu_state(job: Job, member: Member, group_id: int) -> KernelState | None:
    """Where a rank's GPU is with the newest operations of a communicator: in one, before one, or done with all; ``None`` unknown.

    A stopped process has not seen what its GPU did since.
    """
    group, device = job.groups.get(group_id), member.last.device
    rank = group.rank_of(member) if group is not None else None
    if group is None or device is None or rank is None or member.stopped:
        return None
    own = group.members[rank][1]
    for communicator in device.communicators:
        same = (communicator.hash, communicator.rank) == (own.hash, own.rank)
        if communicator.finished or not (same or communicator.inside_address == own.address):
            continue
        begun = [operation for operation in communicator.recent if operation.observed and operation.started]
        if not begun:
            return None
        if begun[-1].state is KernelState.RUNNING:
            return KernelState.RUNNING
        waiting = any(operation.state is KernelState.NOT_STARTED for operation in communicator.recent)
        return KernelState.NOT_STARTED if waiting else KernelState.FINISHED
    return None


def add_device_evidence(job: Job, verdict: Verdict) -> Verdict:
    """The verdict with what the GPUs of its culprits say of themselves, where their processes have the shim."""
    if not any(member.last.device is not None for member in job.members):
        return verdict
    named = places(verdict.culprits)
    lines: list[str] = []
    for member in job.members:
        if stands_in(named, member.info.host, member.info.pid, member.rank):
            lines += list(_lines(member))[:LINES]
    silent = [f"{m.label}: {line}" for m in job.members if m.last.device and (line := silent_copy_engine(m.last.device))]
    evidence = (*verdict.evidence, *lines, *silent) if verdict.verdict_class.accuses else verdict.evidence
    planes = verdict.planes if "device" in verdict.planes else (*verdict.planes, "device")
    unobserved = verdict.unobserved if verdict.verdict_class.accuses else (*verdict.unobserved, *silent)
    return replace(verdict, evidence=tuple(dict.fromkeys(evidence)), unobserved=unobserved, planes=planes)


def silent_copy_engine(device: DeviceSample) -> str:
    """What to say where copies from the GPU do not come back; empty where they do, and where none are made."""
    if not device.copy_engine_silent or device.copy_pending_ns is None:
        return ""
    return f"the GPU's copy engine does not respond: a copy of a few bytes is under way for {device.copy_pending_ns / 1e9:.0f} s"


def _lines(member: Member) -> Iterator[str]:
    """Unfinished operations on this rank's GPU, by communicator; a stopped process cannot have seen their end."""
    device = member.last.device
    if device is None or member.stopped:
        return
    by_state: dict[tuple[str, KernelState], list[DeviceOperation]] = defaultdict(list)
    for communicator in device.communicators:
        if communicator.finished:
            continue
        for operation in communicator.recent:
            by_state[_of(communicator.hash, communicator.rank), operation.state].append(operation)
    for (where, state), operations in by_state.items():
        first = operations[0]
        name = f"{first.function or 'operation'} #{first.sequence if first.sequence is not None else first.ordinal}"
        more = f" and {len(operations) - 1} after it" if len(operations) > 1 else ""
        if state is KernelState.NOT_STARTED:
            age = max(0.0, (member.last.time_ns - first.launched_ns) / 1e9)
            yield f"{member.label}: its GPU has not begun {name}{more} of {where}, launched {age:.0f} s ago"
        elif state is KernelState.RUNNING:
            age = max(0.0, (member.last.time_ns - (first.started_ns or first.launched_ns)) / 1e9)
            channels = f"{first.finished} of {max(first.channels or 0, first.started)} channels done"
            yield f"{member.label}: its GPU has been in {name} of {where} for {age:.0f} s, {channels}"


def _of(comm_hash: int | None, rank: int | None) -> str:
    if comm_hash is None:
        return "its communicator"
    return f"communicator {comm_hash:016x}" + (f" as rank {rank}" if rank is not None else "")
