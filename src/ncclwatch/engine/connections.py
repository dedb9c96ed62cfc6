"""Network connections of a job and the two ends of their transfers, in absolute steps, so that they can be compared.

Counters of a proxy operation are relative to its base; base + counter is the step of the connection and means the same at both
ends (NCCL ``src/transport/net.cc``: both ends round the same running step). Nothing else lines two ranks up without proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ncclwatch.engine.job import Group, Member
from ncclwatch.model.state import ChannelRing, Communicator, HostConnection, ProcessSample, ProxyOperation, ProxySub, Transport

CONNECTION_SLOTS = 8
"""Fact: NCCL_STEPS, buffers of a connection, a sender is at most so many steps ahead (all tags, ``src/include/device.h``)."""


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

    @property
    def last_step(self) -> int:
        """The connection's step at which this transfer ends."""
        return self.sub.base + self.sub.nsteps


def ring_of(communicator: Communicator, channel: int) -> ChannelRing | None:
    """The neighbours of a rank in the ring of a channel."""
    return next((ring for ring in communicator.rings if ring.channel == channel), None)


def steps_unread(connection: HostConnection) -> int | None:
    """Steps that were written into a connection inside a node and not read; ``None`` where that is not seen."""
    if connection.head is None or connection.tail is None:
        return None
    return max(0, connection.tail - connection.head)


def memory_of(connection: HostConnection) -> str:
    """Where the buffers of a connection inside a node lie."""
    return "shared memory" if connection.transport is Transport.SHM else "P2P (GPU memory)"


INVISIBLE = frozenset({Transport.P2P, Transport.NVLS, Transport.COLLNET, Transport.UNKNOWN})
"""Transports whose progress the host cannot see (NVLink and the like)."""


def is_hidden(communicator: Communicator) -> bool:
    """Whether a transport whose progress the host cannot see joins this rank to any other."""
    return any(transport in INVISIBLE for _, _, _, transport in communicator.transports)


def unseen_peers(communicator: Communicator) -> set[int]:
    """Peers joined to this rank by such a transport on any channel."""
    return {peer for _, peer, _, transport in communicator.transports if transport in INVISIBLE}


def hidden_peers(communicator: Communicator, channel: int) -> list[int]:
    """Peers joined to this rank on a channel by a transport whose progress the host cannot see."""
    return sorted({peer for c, peer, _, transport in communicator.transports if c == channel and transport in INVISIBLE})


RELIABLE = "IB"
"""How the names of NCCL's own InfiniBand transport and of its SHARP plugin begin (``IB``, ``IBext_v8``)."""
CLOCKS_S = 0.1
"""Unit: s. From: NTP keeps the clocks of hosts within tens of ms: samples of two hosts are ordered by them only where
they are further apart.
"""


def acknowledges(operation: ProxyOperation) -> bool:
    """Whether a send over the transport of an operation is complete only when the receiver's adapter has all of it.

    A send of NET/IB is (reliable connections; ``ncclIbTest``, ``src/transport/net_ib.cc``): it lies in the receiver's memory
    then, and only the receiver's own proxy, which has to poll its completion queue, is left to move. Over sockets a send
    completes once the kernel has taken it, which proves nothing.
    """
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
