"""NCCL's network connections as its own structures tell of them: which network, which NIC, how many steps, and where to read on.

From a connector of a communicator to its proxy connection, from there to the transport's resources (``sendNetResources`` and
``recvNetResources``, src/transport/net.cc of v2.18.3-1 to v2.30.7-1): ``netSendComm`` or ``netRecvComm`` is the network plugin's
own object, ``netDev`` the index of its device, ``step`` the step of the connection up to which operations have begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ncclwatch.model.state import Direction, Transport
from ncclwatch.target.commstate import CommState
from ncclwatch.target.connectors import Connector
from ncclwatch.target.decode import Decoder
from ncclwatch.target.layout import MissingMemberError
from ncclwatch.target.netdev import NetDevices

BUILT_IN = frozenset({"IB", "Socket"})
"""``ncclNet_t.name`` of the networks that come with NCCL (src/transport/net_ib.cc, net_socket.cc); any other is a plugin's."""

MAX_STEP = 1 << 62
"""A step count beyond is garbage."""


@dataclass(frozen=True, slots=True)
class NetConnection:
    """One connection over a network that this process's own proxy serves. ``communicator`` is the network's object (0: none yet).

    ``net_device`` is the network's number of the NIC, ``device`` its name where the network is one of NCCL's own. ``step`` is the
    step up to which operations on it have begun, which for an idle connection is what it has done.
    """

    comm_hash: int
    rank: int
    channel: int
    peer: int
    direction: Direction
    index: int
    address: int
    network: str
    communicator: int
    net_device: int | None
    device: str
    step: int | None


def network_name(decoder: Decoder, state: CommState) -> str:
    """The network a communicator uses (``ncclComm.ncclNet->name``), or ``""`` where it cannot be told."""
    layout = decoder.layout
    if not layout.has("ncclComm.ncclNet"):
        return ""
    table = decoder.words(state.record.address + layout.member("ncclComm.ncclNet").offset, 1)
    # The name is the first member of every version of ncclNet_t (src/include/nccl_net.h, plugin/nccl_net.h).
    name = decoder.words(table[0], 1) if table else None
    return decoder.string(name[0], 64) if name else ""


def network_communicators(decoder: Decoder, connectors: Sequence[Connector]) -> list[tuple[int, int | None, int | None]]:
    """(``netSendComm`` or ``netRecvComm``, device number, step) behind each connector; (0, None, None) where there is none.

    A connector that another process serves (PXN) gives none: its connection is an address of that process.
    """
    found: list[tuple[int, int | None, int | None]] = [(0, None, None)] * len(connectors)
    for direction, structure, member in (
        (Direction.SEND, "sendNetResources", "netSendComm"),
        (Direction.RECV, "recvNetResources", "netRecvComm"),
    ):
        places = [
            number
            for number, connector in enumerate(connectors)
            if connector.direction is direction and connector.same_process and connector.connection
        ]
        try:
            connection = decoder.fields("ncclProxyConnection", ("transportResources",))
            wanted = decoder.fields(structure, (member, "netDev", "step"))
        except MissingMemberError as error:
            decoder.unavailable.setdefault("flows", error.message)
            continue
        behind = decoder.structures(connection, [connectors[number].connection for number in places])
        resources = [(values or {}).get("transportResources") or 0 for values in behind]
        for number, values in zip(places, decoder.structures(wanted, resources), strict=True):
            if values is not None:
                step = values["step"]
                found[number] = (values[member] or 0, values["netDev"], step if step is not None and step < MAX_STEP else None)
    return found


def net_connections(decoder: Decoder, load_bias: int | None, states: Iterable[CommState]) -> list[NetConnection]:
    """The network connections of these communicators, in their order."""
    devices = NetDevices(decoder, load_bias)
    found: list[NetConnection] = []
    for state in states:
        connectors = [
            connector for connector in state.connectors if connector.transport is Transport.NET and connector.same_process
        ]
        if not connectors:
            continue
        network = network_name(decoder, state)
        for connector, (communicator, device, step) in zip(connectors, network_communicators(decoder, connectors), strict=True):
            found.append(
                NetConnection(
                    comm_hash=state.record.hash,
                    rank=state.record.rank,
                    channel=connector.channel,
                    peer=connector.peer,
                    direction=connector.direction,
                    index=connector.index,
                    address=connector.connection,
                    network=network,
                    communicator=communicator,
                    net_device=device,
                    device=devices.name(network, device),
                    step=step,
                )
            )
    return found
