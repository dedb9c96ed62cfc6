"""Network connections of a job and the two ends of their transfers, in absolute steps, so that they can be compared.

Counters of a proxy operation are relative to its base; base + counter is the step of the connection and means the same at both
ends (NCCL ``src/transport/net.cc``: both ends round the same running step). Nothing else lines two ranks up without proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ncclwatch.engine.job import Member
from ncclwatch.model.state import Communicator, ProxyOperation, ProxySub, Transport

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

    @property
    def last_step(self) -> int:
        """The connection's step at which this transfer ends."""
        return self.sub.base + self.sub.nsteps


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
