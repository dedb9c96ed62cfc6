"""Round trips of the sockets of a simulated job, as hosts list them from TCP_INFO; marked as simulated.

What delays segments or their acknowledgements shows in them. What only takes long because there is much of it does not: queues in
front of a slow link are not modelled. Connections are listed only while the job goes on: sockets of a hang send again, which is
not modelled. Over InfiniBand hosts list no round trips, so there is nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, NetworkLook, SocketFacts
from ncclwatch.model.state import Direction, Transport
from ncclwatch.simulate.disturbance import LinkEffect
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.timeline import Timeline

EVERY_S = 2.0
"""Seconds between two listings, as a collector makes them."""
SCATTER = 0.2
"""Standard deviation of the logarithm of a round trip, from listing to listing."""


def listings(timeline: Timeline, cast: Cast) -> Iterator[tuple[float, str, NetworkLook]]:
    """What each observed host lists: true time in seconds, host, and its connections that send data; in order of time."""
    scenario = timeline.scenario
    if scenario.network.net != "socket":
        return
    rng = np.random.default_rng([scenario.seed, 55])
    flows = [flow for rank in range(scenario.layout.world) if cast.observed(rank) for flow in _flows(cast, rank)]
    for time in np.arange(timeline.first_iteration_s, timeline.end, EVERY_S).tolist():
        found: dict[str, list[FlowRecord]] = defaultdict(list)
        for rank, peer, flow in flows:
            seconds = _round_trip_s(timeline, cast, rank, peer, time) * float(rng.lognormal(0.0, SCATTER))
            facts = SocketFacts(1, cast.info(rank).host, cast.info(peer).host, rtt_us=max(1, round(seconds * 1e6)))
            found[cast.info(rank).host].append(replace(flow, socket=facts))
        yield from ((time, host, NetworkLook(flows=tuple(listed))) for host, listed in found.items())


def _flows(cast: Cast, rank: int) -> Iterator[tuple[int, int, FlowRecord]]:
    """The connections over the network that a rank sends data on: rank, the other end, and what does not change of it."""
    for member in cast.memberships(rank):
        for channel, peer, direction, transport in member.transports:
            if transport is Transport.NET and direction == Direction.SEND:
                yield rank, member.members[peer], FlowRecord(
                    cast.info(rank).key.pid, FlowKind.SOCKET, "Socket", "eth0", 0, FlowState.ACTIVE, global_rank=rank,
                    comm_hash=member.hash, rank=member.rank, channel=channel, peer=peer, direction=Direction.SEND, role="data",
                )  # fmt: skip


def _round_trip_s(timeline: Timeline, cast: Cast, rank: int, peer: int, time: float) -> float:
    """There and back. What is lost is sent again, and times no round trip (Karn's rule, RFC 6298)."""
    disturbance = timeline.disturbance

    def at(effects: Iterable[LinkEffect]) -> list[LinkEffect]:
        return [effect for effect in effects if effect.start <= time < effect.end and effect.probability >= 1]

    links = at(chain(disturbance.links.get((rank, peer), ()), disturbance.links.get((peer, rank), ())))
    nics = at(chain(disturbance.nics.get(rank, ()), disturbance.nics.get(peer, ())))
    delays = sum(effect.delay for effect in links) + max((max(e.delay, e.acknowledgement_delay) for e in nics), default=0.0)
    return 2 * cast.paths(rank, peer).latency + delays
