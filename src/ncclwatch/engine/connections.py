"""The two ends of every network connection that has an unfinished transfer, in absolute steps, so that they can be compared.

Counters of a proxy operation are relative to its base; base + counter is the step of the connection and means the same at both
ends (NCCL ``src/transport/net.cc``: both ends round the same running step). Nothing else lines two ranks up without proof.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.model.state import Communicator, Direction, OpPhase, PendingOperation, ProxyOperation, ProxySub, Transport

CONNECTION_SLOTS = 8
"""NCCL_STEPS: buffers of a connection, so a sender is at most this many steps ahead (all tags, ``src/include/device.h``)."""


class ConnectionKey(NamedTuple):
    """One direction of one connection; ranks are of the communicator."""

    group: int
    channel: int
    source: int
    destination: int
    point_to_point: bool


@dataclass(slots=True)
class End:
    """One end of a transfer: the operation, its sub-operation, and the process on whose behalf it runs."""

    key: ConnectionKey
    member: Member
    operation: ProxyOperation
    sub: ProxySub
    begun: bool
    """Whether the proxy works on it: only then do its counters mean anything."""

    @property
    def last_step(self) -> int:
        """The connection's step at which this transfer ends."""
        return self.sub.base + self.sub.nsteps

    def covers(self, step: int) -> bool:
        """Whether the connection's step ``step`` belongs to this transfer."""
        return self.begun and self.sub.base <= step < self.last_step

    @property
    def posted(self) -> int:
        """Absolute step up to which buffers are open."""
        return self.sub.base + self.sub.posted

    @property
    def received(self) -> int:
        """Receiver: absolute step up to which data has arrived."""
        return self.sub.base + self.sub.received

    @property
    def transmitted(self) -> int:
        """Sender: handed to the network. Receiver: handed to the GPU."""
        return self.sub.base + self.sub.transmitted

    @property
    def done(self) -> int:
        """Sender: completed by the network. Receiver: consumed by the GPU."""
        return self.sub.base + self.sub.done

    @property
    def produced(self) -> int | None:
        """Sender: absolute step up to which the GPU has filled buffers, where the protocol shows it."""
        return None if self.sub.gpu_ready is None else self.sub.base + self.sub.gpu_ready


@dataclass(slots=True)
class Connections:
    """All network transfers of a job that are not finished, by connection and side."""

    senders: dict[ConnectionKey, list[End]]
    receivers: dict[ConnectionKey, list[End]]
    queued: set[tuple[ConnectionKey, Direction]]
    """Connections with an operation that its proxy thread has not begun or not yet taken from the pool."""

    def unfinished(self, direction: Direction) -> Iterator[End]:
        """Ends whose proxy has begun and not ended its work."""
        ends = self.senders if direction is Direction.SEND else self.receivers
        for group in ends.values():
            yield from (end for end in group if end.begun and end.sub.done < end.sub.nsteps)

    def covering(self, direction: Direction, key: ConnectionKey, step: int) -> End | None:
        """The other side's transfer that holds an absolute step, if its proxy has it open."""
        ends = self.senders if direction is Direction.SEND else self.receivers
        return next((end for end in ends.get(key, ()) if end.covers(step)), None)

    def beyond(self, direction: Direction, key: ConnectionKey, step: int) -> bool:
        """Whether that side works on a later transfer only: it has left ``step`` behind."""
        ends = [e for e in (self.senders if direction is Direction.SEND else self.receivers).get(key, ()) if e.begun]
        return bool(ends) and all(end.sub.base > step for end in ends)


def collect(job: Job) -> Connections:
    """Index the unfinished network transfers in the newest sample of every member. O(operations)."""
    senders: dict[ConnectionKey, list[End]] = defaultdict(list)
    receivers: dict[ConnectionKey, list[End]] = defaultdict(list)
    queued: set[tuple[ConnectionKey, Direction]] = set()
    for member in job.members:
        owners: dict[tuple[int, int], Group | None] = {}
        for operation in member.last.operations:
            if operation.transport is not Transport.NET:
                continue
            group = _owner(job, member, operation, owners)
            if group is None:
                continue
            side = senders if operation.direction is Direction.SEND else receivers
            begun = operation.phase is OpPhase.PROGRESS
            for sub in operation.subs:
                rank = sub.rank if sub.rank is not None else group.ranks.get(member.index)
                if rank is None:
                    continue
                key = _key(group, operation, sub.channel, (rank, sub.peer))
                # With PXN the proxy of one process moves another rank's data: the wait is that rank's, if it is observed.
                owner = group.members.get(rank)
                side[key].append(End(key, owner[0] if owner else member, operation, sub, begun))
                if not begun:
                    queued.add((key, operation.direction))
        for pending in member.last.pending:
            group = _owner(job, member, pending, owners)
            rank = None if group is None else pending.rank if pending.rank is not None else group.rank_of(member)
            if group is not None and rank is not None:
                queued.add((_key(group, pending, pending.channel, (rank, pending.peer)), pending.direction))
    return Connections(dict(senders), dict(receivers), queued)


def _owner(
    job: Job, member: Member, operation: ProxyOperation | PendingOperation, owners: dict[tuple[int, int], Group | None]
) -> Group | None:
    """The group an operation of a process belongs to; ``owners`` remembers those of one process."""
    name = (operation.comm_address, operation.comm_hash)
    if name not in owners:
        number = job.find_group(member, *name)
        owners[name] = None if number is None else job.groups.get(number)
    return owners[name]


def _key(group: Group, operation: ProxyOperation | PendingOperation, channel: int, ends: tuple[int, int]) -> ConnectionKey:
    rank, peer = ends
    source, destination = (rank, peer) if operation.direction is Direction.SEND else (peer, rank)
    return ConnectionKey(group.id, channel, source, destination, bool(operation.op_count & 1))


def hidden_peers(communicator: Communicator, channel: int) -> list[int]:
    """Peers joined to this rank on a channel by a transport whose progress the host cannot see (NVLink and the like)."""
    invisible = (Transport.P2P, Transport.NVLS, Transport.COLLNET, Transport.UNKNOWN)
    return sorted({peer for c, peer, _, transport in communicator.transports if c == channel and transport in invisible})
