"""What joins ranks and how far it can be looked into: transports, what a completed send proves, and the rings inside nodes.

Head and tail of such a connection count the same steps; only the protocol Simple moves the tail. In a ring each rank writes and
reads as much (``src/device/``): who has written more than it has read is amid an operation, who less than its peers is behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile

from ncclwatch.engine.edges import Wait, Why, waits_for
from ncclwatch.model.job import Group, Job, Member
from ncclwatch.model.rings import CHUNK_STEPS, Ring
from ncclwatch.model.state import Communicator, ProcessSample, ProxyOperation, Transport

# --- transports ---------------------------------------------------------------------------------------------------------

INVISIBLE = frozenset({Transport.P2P, Transport.NVLS, Transport.COLLNET, Transport.UNKNOWN})
"""Transports whose progress the host cannot see (NVLink and the like)."""


def is_hidden(communicator: Communicator) -> bool:
    """Whether a transport whose progress the host cannot see joins this rank to any other."""
    return any(transport in INVISIBLE for _, _, _, transport in communicator.transports)


def unseen_peers(communicator: Communicator) -> set[int]:
    """Peers joined to this rank by such a transport."""
    return {peer for _, peer, _, transport in communicator.transports if transport in INVISIBLE}


def beside_unobserved(job: Job, member: Member) -> bool:
    """Whether a transport nobody can look into joins a process to a rank that was not observed: it may wait for that one."""
    return any(unseen_peers(own) - group.members.keys() for group, own in job.held_by(member))


def hidden_on(communicator: Communicator, channel: int) -> set[int]:
    """Peers joined to this rank by such a transport on a channel, of which the device shim has not read all."""
    links = communicator.transports
    peers = {peer for on, peer, _, transport in links if transport in INVISIBLE and on == channel}
    return {peer for peer in peers if not is_seen(communicator, channel, peer)}


def neighbours(communicator: Communicator) -> set[int]:
    """Those beside this rank in any of its rings."""
    return {neighbour for ring in communicator.rings for neighbour in (ring.prev, ring.next)}


RELIABLE = "IB"
"""How the names of NCCL's own InfiniBand transport and of its SHARP plugin begin (``IB``, ``IBext_v8``)."""
ONE_MOMENT_S = 0.1
"""Unit: s. Samples of two hosts that are nearer are of one moment: nobody knows which was first. From: NTP keeps the clocks of
hosts within tens of ms.
"""


def has_arrived(operation: ProxyOperation, group: Group, sender: Member, receiver: Member) -> bool:
    """Whether what the sender has completed of an operation lay in the receiver's memory when that was read, so that only its own
    proxy is left to move: with NET/IB (reliable connections; ``ncclIbTest``, ``src/transport/net_ib.cc``). Over sockets a send
    completes once the kernel has taken it, which proves nothing.
    """
    return operation.net_name.startswith(RELIABLE) and was_before(group, sender, receiver)


def was_before(group: Group, sender: Member, receiver: Member) -> bool:
    """Whether the sender had come to where it is, by this sample or one that shows the same, before the receiver was read."""
    read_ns = receiver.last.wall_ns - (int(ONE_MOMENT_S * 1e9) if sender.info.host != receiver.info.host else 0)
    shown = _transfers_of(group, sender.last)
    alike = takewhile(lambda sample: _transfers_of(group, sample) == shown, reversed(sender.samples))
    return any(sample.wall_ns + sample.duration_ns <= read_ns for sample in alike)


def _transfers_of(group: Group, sample: ProcessSample) -> object:
    steps = [own.net_steps for own in sample.communicators if own.hash == group.hash]
    return [operation for operation in sample.operations if operation.comm_hash == group.hash], steps


# --- connections inside nodes ---------------------------------------------------------------------------------------------


def is_seen(communicator: Communicator, channel: int, peer: int) -> bool:
    """Whether all that joins this rank to a peer on a channel by P2P was read by the device shim."""
    wanted = {str(d) for c, p, d, transport in communicator.transports if (c, p, transport) == (channel, peer, Transport.P2P)}
    seen = {str(conn.direction) for conn in communicator.host_connections if (conn.channel, conn.peer) == (channel, peer)}
    return bool(wanted) and wanted <= seen


def laggards(job: Job, rings: Mapping[int, Mapping[int, Ring]]) -> Iterator[Wait]:
    """Waits for ranks that lag in a ring of shared memory; ``rings``: as of :attr:`Case.rings`. O(connections).

    A rank whose own counters say that it waits waits for the one before. Who has written less than all others of its ring has
    not come as far, and nobody ends a collective before the last has contributed. For one that waits itself no other is said to
    wait, nor who is further ahead than it can be without it: they were read at different moments.
    """
    for group in job.groups.values():
        for channel, ring in rings[group.id].items() if group.nranks > 1 else ():
            waiting = {rank: at.ring.prev for rank, at in ring.amid.items() if not at.unread}
            for rank, prev in waiting.items():
                if prev in group.members:
                    yield _lags(job, group, channel, rank, prev, "all that was written into shared memory is read")
            written = ring.written
            least = min(written.values(), default=0)
            if len(written) < group.nranks or least == max(written.values()):
                continue
            for other in [rank for rank, steps in written.items() if steps == least and rank not in waiting]:
                hops = ring.hops(other)
                for rank, steps in written.items():
                    if 0 < steps - least <= CHUNK_STEPS * hops.get(rank, 0):
                        yield _lags(job, group, channel, rank, other, f"{steps - least} steps behind in shared memory")


def _lags(job: Job, group: Group, channel: int, reader: int, writer: int, how: str) -> Wait:
    return waits_for(job, group, group.members[reader][0], writer, Why.EMPTY, f"channel {channel}, {how}", channel=channel)
