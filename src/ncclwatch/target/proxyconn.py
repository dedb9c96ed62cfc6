"""Proxy connections: which transport and direction they are, and which communicator, rank and peer they serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ncclwatch.model.state import Direction, Transport
from ncclwatch.target.commstate import CommReader, CommState
from ncclwatch.target.connectors import Connector
from ncclwatch.target.decode import Decoder, Values
from ncclwatch.target.wanted import TRANSPORTS

_CONNECTION_PATHS = ("send", "transport", "tcomm", "transportResources")
_RESOURCE_PATHS = ("tpRank", "tpRemoteRank", "netDev", "connIndex", "recvMem", "buffers[0]", "buffSizes[0]")
_TRANSPORTS = {name: Transport(name) for name in TRANSPORTS if name in set(Transport)}


@dataclass(frozen=True, slots=True)
class ProxyConnection:
    """A proxy connection with what its transport's resources say; ranks are the top parent's (``tp``)."""

    direction: Direction
    transport: Transport
    tp_rank: int | None = None
    tp_remote_rank: int | None = None
    net_device: int | None = None
    index: int | None = None
    recv_mem: int = 0
    ll_buffer: int = 0
    """Address of the LL buffer, in host memory on every machine, and its size in bytes; 0 where there is none."""
    ll_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A connector and the communicator it was found in."""

    comm: CommState
    connector: Connector


class Connections:
    """The proxy connections of one process in one sample, and the connectors of its communicators that use them."""

    def __init__(self, decoder: Decoder, comms: Sequence[CommState], comm_reader: CommReader) -> None:
        self.decoder = decoder
        self._comms = comms
        self._comm_reader = comm_reader
        self._tells_peer = decoder.layout.has("ncclProxyOp.peer")
        self._connections: dict[int, ProxyConnection | None] = {}
        self._endpoints: dict[int, list[Endpoint]] = {}
        for comm in comms:
            for connector in comm.connectors:
                if connector.connection and connector.same_process:
                    self._endpoints.setdefault(connector.connection, []).append(Endpoint(comm, connector))

    def endpoints(self, sub: Values) -> list[Endpoint]:
        """The connectors that a sub can work for.

        Communicators that share resources share connections too. ``ncclProxyOp`` carries its communicator's rank and peer since
        v2.23.4-1, which mostly leaves one of them; before that ``ncclProxySubArgs.peer`` is the *root* of the collective
        (ProxyOpToArgs) and says nothing.
        """
        candidates = self._endpoints.get(sub["connection"] or 0, [])
        if len(candidates) > 1 and self._tells_peer:
            told = [e for e in candidates if (e.connector.peer, e.comm.record.rank) == (sub["peer"], sub["rank"])]
            return told or candidates
        return candidates

    def is_known(self, connection: int) -> bool:
        """Whether a connector names it."""
        return connection in self._endpoints

    def owners(self, proxy_state: int, subs: Iterable[Values]) -> list[CommState]:
        """The communicators an operation can belong to: whose connectors use its connections; with PXN, all of the same proxy."""
        candidates: dict[int, CommState] | None = None
        for sub in subs:
            here = {endpoint.comm.record.address: endpoint.comm for endpoint in self.endpoints(sub)}
            if here:
                candidates = here if candidates is None else {key: comm for key, comm in candidates.items() if key in here}
        if candidates:
            return list(candidates.values())
        return [comm for comm in self._comms if comm.proxy_state == proxy_state]

    def peer(self, sub: Values, made: ProxyConnection | None, owners: Sequence[CommState]) -> int:
        """The rank at the other end: of the connector that uses the connection, else as the sub or the transport's resources
        say.
        """
        for endpoint in self.endpoints(sub):
            return endpoint.connector.peer
        if self._tells_peer and sub["peer"] is not None:
            return sub["peer"]
        if made is not None and made.tp_remote_rank is not None:
            return from_parent(made.tp_remote_rank, owners)
        return -1

    def rank(self, sub: Values, made: ProxyConnection | None, owners: Sequence[CommState]) -> int | None:
        """The rank on whose behalf it runs: as the sub says (v2.23.4-1 and later), else the connector's, else the resources'."""
        if sub["rank"] is not None:
            return sub["rank"]
        for endpoint in self.endpoints(sub):
            return endpoint.comm.record.rank
        if made is not None and made.tp_rank is not None:
            return from_parent(made.tp_rank, owners)
        return None

    def at(self, address: int) -> ProxyConnection | None:
        """The connection at an address, read once a sample; ``None`` when it cannot be read."""
        if address not in self._connections:
            self._connections[address] = self._read(address)
        return self._connections[address]

    def _read(self, address: int) -> ProxyConnection | None:
        decoder, layout = self.decoder, self.decoder.layout
        values = decoder.structure(decoder.fields("ncclProxyConnection", _CONNECTION_PATHS), address) if address else None
        if values is None:
            return None
        direction = Direction.SEND if values["send"] else Direction.RECV
        transport = self._comm_reader.connectors.transport_of(values["tcomm"] or 0, direction)
        if transport is Transport.UNKNOWN:
            transport = _TRANSPORTS.get(name_of(TRANSPORTS, values["transport"]), Transport.UNKNOWN)
        plain = ProxyConnection(direction, transport)
        structure = "sendNetResources" if direction is Direction.SEND else "recvNetResources"
        if transport is not Transport.NET or not layout.has(structure):
            return plain
        resources = decoder.structure(decoder.fields(structure, _RESOURCE_PATHS), values["transportResources"] or 0)
        if resources is None:
            return plain
        return replace(
            plain,
            tp_rank=resources["tpRank"],
            tp_remote_rank=resources["tpRemoteRank"],
            net_device=resources["netDev"],
            index=resources["connIndex"],
            recv_mem=resources["recvMem"] or 0,
            ll_buffer=resources["buffers[0]"] or 0,
            ll_bytes=resources["buffSizes[0]"] or 0,
        )


def from_parent(tp_rank: int, owners: Sequence[CommState]) -> int:
    """A rank of the top parent as a rank of the communicator, where the only owner is known to map it."""
    if len(owners) == 1 and owners[0].top_parent_ranks:
        try:
            return owners[0].top_parent_ranks.index(tp_rank)
        except ValueError:
            return -1
    return tp_rank


def name_of(names: Sequence[str], index: int | None) -> str:
    """The name of a number that is a ``#define`` in NCCL, or the number; empty when this build does not keep it."""
    if index is None:
        return ""
    return names[index] if 0 <= index < len(names) else str(index)
