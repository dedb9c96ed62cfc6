"""How far each network connection has been used: the step up to which operations on it have begun.

An operation that is done leaves the proxy's lists; whether a rank has finished a transfer or never began it is then only to be
told from ``step`` of the transport's resources (``sendNetResources``, ``recvNetResources``; src/transport/net.cc): the proxy sets
it to the end of an operation when it begins it (v2.20 and later; before, when it is done with it). It is in the same steps as
base + counter of an operation and means the same at both ends of a connection.
"""

from __future__ import annotations

from collections.abc import Sequence

from ncclwatch.model.state import Direction, NetStep, Transport
from ncclwatch.target.connectors import Connector
from ncclwatch.target.decode import Decoder
from ncclwatch.target.layout import MissingMemberError

_MAX_STEP = 1 << 62
"""A step beyond is garbage."""


def read_net_steps(decoder: Decoder, connectors: Sequence[Connector]) -> tuple[NetStep, ...]:
    """The steps of the network connections among ``connectors`` that this process's own proxy serves.

    Two vectored reads a direction. A connection that has not been used, or is being made, has none.
    """
    found = []
    for direction, structure in ((Direction.SEND, "sendNetResources"), (Direction.RECV, "recvNetResources")):
        mine = [c for c in connectors if c.transport is Transport.NET and c.direction is direction and c.same_process]
        if not mine:
            continue
        try:
            connection = decoder.fields("ncclProxyConnection", ("transportResources",))
            wanted = decoder.fields(structure, ("step",))
            offset = decoder.layout.member(f"{structure}.step").offset
        except MissingMemberError as error:
            decoder.unavailable["steps of finished transfers"] = error.message
            continue
        resources = [
            (values or {}).get("transportResources") or 0
            for values in decoder.structures(connection, [c.connection for c in mine])
        ]
        for connector, place, values in zip(mine, resources, decoder.structures(wanted, resources), strict=True):
            step = (values or {}).get("step")
            if step and step < _MAX_STEP:
                decoder.counters.append(place + offset)
                found.append(NetStep(connector.channel, connector.peer, direction, connector.index, step))
    return tuple(sorted(found, key=lambda one: (one.channel, one.peer, one.direction, one.connection_index)))
