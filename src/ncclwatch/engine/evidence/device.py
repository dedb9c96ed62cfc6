"""What the counter shim in a process says of its GPU: connections that the host cannot see, and where the GPU is with operations.

Each end of a connection through GPU memory holds one of its two counters (the sender the head, the receiver the tail), so it is
put together from the frames of two processes. It is read by the same rules as shared memory from then on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ncclwatch.engine.edges import Wait, Why, waits_for
from ncclwatch.engine.evidence.base import Fact, FactKind, RankNode, Source
from ncclwatch.model.device import DeviceCommunicator, DeviceOperation, DeviceSample, KernelState
from ncclwatch.model.job import Group, Job, Member
from ncclwatch.model.joined import is_seen, unseen_peers
from ncclwatch.model.state import Communicator, Direction, HostConnection, Transport

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

HIDDEN = {
    Transport.P2P: "P2P/NVLink connections: their counters lie in GPU memory; only launches are seen without the shim",
    Transport.NVLS: "NVLS: the switch adds up inside the fabric; no host-visible counters, only launches are seen",
}


class DeviceShim(Source):
    """The shim's frames."""

    kinds = frozenset({FactKind.GPU_UNFINISHED, FactKind.GPU_SILENT, FactKind.WAITS_FOR})

    def complete(self, job: Job) -> None:
        """Give the communicators the connections whose two counters the shim has read; without a shim nothing changes."""
        for group in job.groups.values() if job.shims else ():
            for rank, ends in _connections(group).items():
                member, own = group.members[rank]
                group.members[rank] = (member, replace(own, host_connections=(*own.host_connections, *ends)))

    def facts(self, case: Case) -> Iterator[Fact]:
        """What each GPU has not ended, who waits for one that has not begun, and copies that do not come back. O(operations)."""
        for group in case.job.groups.values() if case.job.shims else ():
            yield from _waits(case.job, group)
        for member, device in case.job.shims:
            for text in _unfinished(member, device) if not member.stopped else ():
                yield Fact(FactKind.GPU_UNFINISHED, RankNode(member.index), describe=partial(str, f"{member.label}: {text}"))
            if device.copy_engine_silent and device.copy_pending_ns is not None:
                seconds = device.copy_pending_ns / 1e9
                text = f"the GPU's copy engine does not respond: a copy of a few bytes is under way for {seconds:.0f} s"
                yield Fact(FactKind.GPU_SILENT, RankNode(member.index), describe=partial(str, f"{member.label}: {text}"))

    def coverage(self, case: Case) -> Iterator[str]:
        """What joins ranks that nothing but a shim could look into, and it did not."""
        joined = case.job.transports
        if Transport.P2P in joined and sees_everything(case.job):
            joined -= {Transport.P2P}
        yield from (text for transport, text in HIDDEN.items() if transport in joined)
        if any(own.multi_node_nvlink for own in case.job.views):
            yield "NVLink between nodes (MNNVL): connections to other nodes are P2P as well; only launches are seen"


# --- connections -------------------------------------------------------------------------------------------------------


def _connections(group: Group) -> dict[int, list[HostConnection]]:
    """The ends of each rank's connections of which both counters were read since the standstill."""
    read: dict[tuple[int, int, int, int], dict[bool, int]] = defaultdict(dict)
    for rank, (member, own) in group.members.items():
        for counter in member.last.device.counters if member.last.device is not None else ():
            if counter.comm_address != own.address or counter.value is None or counter.stale or counter.problem:
                continue
            source, destination = (rank, counter.peer) if counter.is_send else (counter.peer, rank)
            read[counter.channel, source, destination, counter.connection_index][counter.is_send] = counter.value
    found: dict[int, list[HostConnection]] = defaultdict(list)
    for (channel, source, destination, index), values in sorted(read.items()):
        if values.keys() == {True, False}:
            steps = (index, values[True], values[False], Transport.P2P)
            found[source].append(HostConnection(channel, destination, Direction.SEND, *steps))
            found[destination].append(HostConnection(channel, source, Direction.RECV, *steps))
    return found


def sees_everything(job: Job) -> bool:
    """Whether the shim has read every P2P connection of the job."""
    joined = [(own, link) for own in job.views for link in own.transports if link[3] is Transport.P2P]
    return bool(joined) and all(is_seen(own, channel, peer) for own, (channel, peer, *_) in joined)


# --- kernels -----------------------------------------------------------------------------------------------------------


def told_of(member: Member, own: Communicator) -> DeviceCommunicator | None:
    """What the shim in a process tells of one of its communicators; ``None`` for nothing."""
    for told in member.last.device.communicators if member.last.device is not None else ():
        if not told.finished and ((told.hash, told.rank) == (own.hash, own.rank) or told.inside_address == own.address):
            return told
    return None


def gpu_state(job: Job, member: Member, group_id: int) -> KernelState | None:
    """Where a rank's GPU is with the newest operations of a communicator; ``None``: unknown, as of a stopped process."""
    group = job.groups.get(group_id)
    rank = group.ranks.get(member.index) if group is not None else None
    told = told_of(member, group.members[rank][1]) if group is not None and rank is not None and not member.stopped else None
    begun = [operation for operation in told.recent if operation.observed and operation.started] if told is not None else []
    if told is None or not begun:
        return None
    if begun[-1].state is KernelState.RUNNING:
        return KernelState.RUNNING
    waiting = any(operation.state is KernelState.NOT_STARTED for operation in told.recent)
    return KernelState.NOT_STARTED if waiting else KernelState.FINISHED


def _waits(job: Job, group: Group) -> Iterator[Wait]:
    """Who is in a collective waits for each rank whose GPU has launched it and not begun, where connections do not show whom:
    LL and LL128 keep no count of what was written.
    """
    open_in: dict[KernelState, dict[int, tuple[str, int]]] = defaultdict(dict)
    for rank, (member, own) in group.members.items():
        told = told_of(member, own) if unseen_peers(own) and not member.halted else None
        recent = told.recent if told is not None else ()
        first = next((one for one in recent if one.state is not KernelState.FINISHED), None)
        if first is not None and not first.point_to_point and first.sequence is not None:
            open_in[first.state][rank] = first.function, first.sequence
    for rank, operation in open_in[KernelState.RUNNING].items():
        for other in (other for other, same in open_in[KernelState.NOT_STARTED].items() if same == operation):
            what = f"{operation[0]} #{operation[1]}"
            yield waits_for(job, group, group.members[rank][0], other, Why.GPU_NOT_BEGUN, what)


def _unfinished(member: Member, device: DeviceSample) -> Iterator[str]:
    by_state: dict[tuple[str, KernelState], list[DeviceOperation]] = defaultdict(list)
    for told in device.communicators:
        where = f"communicator {told.hash:016x}" if told.hash is not None else "its communicator"
        where += f" as rank {told.rank}" if told.hash is not None and told.rank is not None else ""
        for operation in told.recent if not told.finished else ():
            if operation.state in (KernelState.NOT_STARTED, KernelState.RUNNING):
                by_state[where, operation.state].append(operation)
    for (where, state), operations in by_state.items():
        first, waiting = operations[0], state is KernelState.NOT_STARTED
        begun_ns = first.launched_ns if waiting else first.started_ns or first.launched_ns
        age = max(0.0, (member.last.time_ns - begun_ns) / 1e9)
        number = first.sequence if first.sequence is not None else first.ordinal
        name = f"{first.function or 'operation'} #{number}"
        if waiting:
            more = f" and {len(operations) - 1} after it" if len(operations) > 1 else ""
            yield f"its GPU has not begun {name}{more} of {where}, launched {age:.0f} s ago"
        else:
            channels = f"{first.finished} of {max(first.channels or 0, first.started)} channels done"
            yield f"its GPU has been in {name} of {where} for {age:.0f} s, {channels}"
