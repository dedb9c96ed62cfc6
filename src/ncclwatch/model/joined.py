"""What joins a rank to others, how far the host can look into it, and what a completed send proves of who receives."""

from __future__ import annotations

from itertools import takewhile

from ncclwatch.model.job import Group, Job, Member
from ncclwatch.model.state import Communicator, ProcessSample, ProxyOperation, Transport

INVISIBLE = frozenset({Transport.P2P, Transport.NVLS, Transport.COLLNET, Transport.UNKNOWN})
"""Transports whose progress the host cannot see (NVLink and the like)."""


def is_hidden(communicator: Communicator) -> bool:
    """Whether a transport whose progress the host cannot see joins this rank to any other."""
    return any(transport in INVISIBLE for _, _, _, transport in communicator.transports)


def hides(member: Member) -> bool:
    """Whether such a transport joins a process to any other."""
    return any(map(is_hidden, member.last.communicators))


def unseen_peers(communicator: Communicator) -> set[int]:
    """Peers joined to this rank by such a transport."""
    return {peer for _, peer, _, transport in communicator.transports if transport in INVISIBLE}


def hidden_on(communicator: Communicator, channel: int) -> set[int]:
    """Peers joined to this rank by such a transport on a channel, of which the device shim has not read all."""
    links = communicator.transports
    peers = {peer for on, peer, _, transport in links if transport in INVISIBLE and on == channel}
    return {peer for peer in peers if not is_seen(communicator, channel, peer)}


def veiled(group: Group, rank: int) -> set[int]:
    """Processes, by their number in the job, that such transports join to one rank of a communicator, also through others, and
    that one.
    """
    ranks = [rank]
    for one in filter(group.members.__contains__, ranks):
        own = group.members[one][1]
        peers = {peer for channel in {link[0] for link in own.transports} for peer in hidden_on(own, channel)}
        ranks += peers.difference(ranks)
    return {group.members[one][0].index for one in ranks if one in group.members}


def neighbours(communicator: Communicator) -> set[int]:
    """Those beside this rank in any of its rings."""
    return {neighbour for ring in communicator.rings for neighbour in (ring.prev, ring.next)}


def is_seen(communicator: Communicator, channel: int, peer: int) -> bool:
    """Whether all that joins this rank to a peer on a channel by P2P was read by the device shim."""
    wanted = {str(d) for c, p, d, transport in communicator.transports if (c, p, transport) == (channel, peer, Transport.P2P)}
    seen = {str(conn.direction) for conn in communicator.host_connections if (conn.channel, conn.peer) == (channel, peer)}
    return bool(wanted) and wanted <= seen


def beside_unobserved(job: Job, member: Member) -> bool:
    """Whether a transport nobody can look into joins a process to a rank that was not observed: it may wait for that one."""
    return any(unseen_peers(own) - group.members.keys() for group, own in job.held_by(member))


# --- what a completed send proves ---------------------------------------------------------------------------------------------

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
