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

from ncclwatch.engine.connections import is_seen
from ncclwatch.engine.evidence.base import Fact, FactKind, RankNode, Source
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.model.device import DeviceCommunicator, DeviceOperation, DeviceSample, KernelState
from ncclwatch.model.state import Communicator, Direction, HostConnection, Transport
from ncclwatch.model.verdict import OperationRef

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "device shim"

HIDDEN = {
    Transport.P2P: "P2P/NVLink connections: their counters lie in GPU memory; only launches are seen without the shim",
    Transport.NVLS: "NVLS: the switch adds up inside the fabric; no host-visible counters, only launches are seen",
}
_Place = tuple[int, int, int, int]
"""Channel, source, destination, connection index."""


class DeviceShim(Source):
    """The shim's frames."""

    name = NAME
    plane = "device"
    kinds = frozenset({FactKind.GPU_UNFINISHED, FactKind.GPU_SILENT})

    def complete(self, job: Job) -> None:
        """Give the communicators the connections whose two counters the shim has read; without a shim nothing changes."""
        for group in job.groups.values():
            connections = _connections(group)
            if not connections:
                continue
            for rank, (member, own) in group.members.items():
                seen = tuple(_ends(rank, connections))
                if seen:
                    group.members[rank] = (member, replace(own, host_connections=(*own.host_connections, *seen)))

    def facts(self, case: Case) -> Iterator[Fact]:
        """What each GPU has not ended, and copies that do not come back. O(operations)."""
        for member in case.job.members:
            device = member.last.device
            if device is None:
                continue
            yield from _unfinished(member, device)
            if device.copy_engine_silent and device.copy_pending_ns is not None:
                seconds = device.copy_pending_ns / 1e9
                text = partial(_silent_text, member, seconds)
                yield Fact(FactKind.GPU_SILENT, RankNode(member.index), NAME, value=seconds, describe=text)

    def coverage(self, case: Case) -> Iterator[str]:
        """What joins ranks that nothing but a shim could look into, and it did not."""
        joined = case.job.joined.transports
        if Transport.P2P in joined and sees_everything(case.job):
            joined -= {Transport.P2P}
        yield from (text for transport, text in HIDDEN.items() if transport in joined)
        if case.job.joined.multi_node:
            yield "NVLink between nodes (MNNVL): connections to other nodes are P2P as well; only launches are seen"


# --- connections -------------------------------------------------------------------------------------------------------


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


# --- kernels -----------------------------------------------------------------------------------------------------------


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
        if communicator.finished or not _is_same(communicator, own):
            continue
        begun = [operation for operation in communicator.recent if operation.observed and operation.started]
        if not begun:
            return None
        if begun[-1].state is KernelState.RUNNING:
            return KernelState.RUNNING
        waiting = any(operation.state is KernelState.NOT_STARTED for operation in communicator.recent)
        return KernelState.NOT_STARTED if waiting else KernelState.FINISHED
    return None


def _is_same(seen: DeviceCommunicator, own: Communicator) -> bool:
    """Whether a communicator of the shim is one of the state plane."""
    return (seen.hash, seen.rank) == (own.hash, own.rank) or seen.inside_address == own.address


def _silent_text(member: Member, seconds: float) -> str:
    return f"{member.label}: the GPU's copy engine does not respond: a copy of a few bytes is under way for {seconds:.0f} s"


def _unfinished(member: Member, device: DeviceSample) -> Iterator[Fact]:
    """Unfinished operations on this rank's GPU, by communicator; a stopped process cannot have seen their end."""
    if member.stopped:
        return
    by_state: dict[tuple[str, KernelState], list[DeviceOperation]] = defaultdict(list)
    for communicator in device.communicators:
        if communicator.finished:
            continue
        for operation in communicator.recent:
            by_state[_of(communicator.hash, communicator.rank), operation.state].append(operation)
    for (where, state), operations in by_state.items():
        if state not in (KernelState.NOT_STARTED, KernelState.RUNNING):
            continue
        first = operations[0]
        begun_ns = first.launched_ns if state is KernelState.NOT_STARTED else first.started_ns or first.launched_ns
        age = max(0.0, (member.last.time_ns - begun_ns) / 1e9)
        yield Fact(
            FactKind.GPU_UNFINISHED, RankNode(member.index), NAME, value=age,
            operation=OperationRef(first.function, first.sequence if first.sequence is not None else first.ordinal),
            describe=partial(_unfinished_text, member, where, state, tuple(operations), age),
        )  # fmt: skip


def _unfinished_text(
    member: Member, where: str, state: KernelState, operations: tuple[DeviceOperation, ...], age: float
) -> str:  # fmt: skip
    first = operations[0]
    name = f"{first.function or 'operation'} #{first.sequence if first.sequence is not None else first.ordinal}"
    if state is KernelState.NOT_STARTED:
        more = f" and {len(operations) - 1} after it" if len(operations) > 1 else ""
        return f"{member.label}: its GPU has not begun {name}{more} of {where}, launched {age:.0f} s ago"
    channels = f"{first.finished} of {max(first.channels or 0, first.started)} channels done"
    return f"{member.label}: its GPU has been in {name} of {where} for {age:.0f} s, {channels}"


def _of(comm_hash: int | None, rank: int | None) -> str:
    if comm_hash is None:
        return "its communicator"
    return f"communicator {comm_hash:016x}" + (f" as rank {rank}" if rank is not None else "")
