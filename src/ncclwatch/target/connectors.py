"""The connectors of a communicator: every connection it has made, with its transport and what serves it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from ncclwatch.model.state import Direction, Transport
from ncclwatch.target.decode import Decoder, Fields, Values, clean_text
from ncclwatch.target.layout import Layout, MissingMemberError

MAX_CHANNELS = 256
"""Channels; MAXCHANNELS is 32 in 2.18 and 64 from 2.23."""

MAX_CONNECTORS = 8192
"""Connectors of one communicator that are looked at in one sample."""

MAX_WISHES = 512
"""Peers that are looked at first because operations use connections to them."""

_CONNECTOR = (
    "connected",
    "proxyConn.connection",
    "proxyConn.tpRank",
    "proxyConn.sameProcess",
    "transportComm",
    "transportResources",
)

_MARKS = ("connectSend", "connectRecv")

_TRANSPORT_NAMES = {
    "P2P": Transport.P2P,
    "SHM": Transport.SHM,
    "NET": Transport.NET,
    "COL": Transport.COLLNET,
    "NVLS": Transport.NVLS,
}
"""``ncclTransport.name`` of src/transport/*.cc, the same from v2.18.3-1 to v2.30.7-1."""


@dataclass(frozen=True, slots=True)
class Connector:
    """One end of a connection of a communicator (``ncclConnector``): where it lies, whom it joins, and what serves it.

    ``connection`` is the address of the ``ncclProxyConnection`` in the process whose proxy serves it: this one if
    ``same_process``.
    """

    channel: int
    peer: int
    direction: Direction
    index: int
    address: int
    transport: Transport
    connection: int
    resources: int
    same_process: bool


class ConnectorReader:
    """Reads connectors, the likeliest peers first; ``begin`` starts a sample that keeps nothing of those before."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._transport_names: dict[tuple[int, Direction], Transport] = {}
        self._wished: set[int] = set()

    def begin(self) -> None:
        """Forget transport names, so that a recorder sees them read."""
        self._transport_names.clear()

    def wish(self, peers: Iterable[int]) -> None:
        """Look at the connectors to these peers first: operations were seen that use connections not known yet."""
        self._wished.update(peers)
        while len(self._wished) > MAX_WISHES:
            self._wished.pop()

    def read(self, address: int, values: Values) -> tuple[Connector, ...]:
        """Every connection made (``ncclConnector.connected``), over channels and peers, within a bound a sample."""
        decoder, layout = self.decoder, self.decoder.layout
        nranks = values["nRanks"] or 0
        try:
            wanted = decoder.fields("ncclConnector", _CONNECTOR)
            channels = layout.member("ncclComm.channels")
            peers_member = layout.member("ncclChannel.peers")
            sides = [
                (Direction.SEND, layout.member("ncclChannelPeer.send")),
                (Direction.RECV, layout.member("ncclChannelPeer.recv")),
            ]
        except MissingMemberError as error:
            decoder.unavailable["connections"] = error.message
            return ()
        count = channel_count(layout, values)
        tables = decoder.reader.read_many([(address + channels.at(index) + peers_member.offset, 8) for index in range(count)])
        places: list[tuple[int, int, Direction, int, int]] = []
        budget = MAX_CONNECTORS // sum(side.count for _, side in sides)
        peers = sorted(self._likely_peers(address, values, nranks)[: budget // max(count, 1)])
        if len(peers) < nranks:
            decoder.truncated[f"connections: to {len(peers)} of {nranks} peers"] = None
        for channel, table in enumerate(tables):
            first = int.from_bytes(table, "little") if table else 0
            pointers = decoder.reader.read_many([(first + 8 * peer, 8) for peer in peers]) if decoder.is_readable(first) else []
            for peer, data in zip(peers, pointers, strict=False):
                pointer = int.from_bytes(data, "little") if data else 0
                if decoder.is_readable(pointer):
                    places += [
                        (channel, peer, direction, index, pointer + side.at(index))
                        for direction, side in sides
                        for index in range(side.count)
                    ]
        return self._decode(places, wanted)

    def connecting(self, address: int, values: Values) -> frozenset[int] | None:
        """Peers that a connection is being made with; ``None`` where this build, or the memory read, does not tell.

        NCCL marks a peer when a Send or Recv is called that has no connection yet, and clears the mark when it is made: a rank
        whose peer does not come stays marked. Source: ``connectSend``, ``connectRecv`` of ``ncclComm`` in ``src/enqueue.cc`` and
        ``ncclTransportP2pSetup`` of ``src/transport.cc``, v2.18.3-1 to v2.30.7-1.
        """
        nranks = values["nRanks"] or 0
        if nranks > MAX_CONNECTORS or not all(self.decoder.layout.has(f"ncclComm.{name}") for name in _MARKS):
            return None
        tables = self.decoder.structure(self.decoder.fields("ncclComm", _MARKS), address) or {}
        marks = [self.decoder.words(tables.get(name) or 0, nranks) for name in _MARKS]
        if None in marks:
            return None
        return frozenset(peer for words in marks if words for peer, mask in enumerate(words) if mask)

    def _likely_peers(self, address: int, values: Values, nranks: int) -> list[int]:
        """Peers in the order in which their connectors are looked at: neighbours in rings and trees, wishes, then everybody by
        distance.
        """
        decoder, layout = self.decoder, self.decoder.layout
        paths = [path for path in ("ring.prev", "ring.next", "tree.up") if layout.has(f"ncclChannel.{path}")]
        near: dict[int | None, None] = {}
        if paths:
            channels = layout.member("ncclComm.channels")
            wanted = decoder.fields("ncclChannel", paths)
            down = layout.member("ncclChannel.tree.down") if layout.has("ncclChannel.tree.down") else None
            places = [address + channels.at(index) for index in range(channel_count(layout, values))]
            for place, channel in zip(places, decoder.structures(wanted, places), strict=True):
                below = decoder.words(place + down.offset, down.count, 4, signed=True) if down else ()
                near.update(dict.fromkeys([*(channel or {}).values(), *(below or ())]))
        near.update(dict.fromkeys(self._wished))
        first = [peer for peer in near if peer is not None and 0 <= peer < nranks]
        rank = values["rank"] or 0
        rest = ((rank + sign * step) % nranks for step in range(nranks // 2 + 1) for sign in (1, -1))
        return list(dict.fromkeys([*first, *islice(rest, 2 * MAX_CONNECTORS)]))

    def _decode(self, places: Sequence[tuple[int, int, Direction, int, int]], wanted: Fields) -> tuple[Connector, ...]:
        found = self.decoder.structures(wanted, [place[4] for place in places])
        connectors = []
        for (channel, peer, direction, index, where), connector in zip(places, found, strict=True):
            if connector is None or connector["connected"] != 1:
                continue
            connectors.append(
                Connector(
                    channel=channel,
                    peer=peer,
                    direction=direction,
                    index=index,
                    address=where,
                    transport=self.transport_of(connector["transportComm"] or 0, direction),
                    connection=connector["proxyConn.connection"] or 0,
                    resources=connector["transportResources"] or 0,
                    same_process=connector["proxyConn.sameProcess"] != 0,
                )
            )
        return tuple(connectors)

    def transport_of(self, transport_comm: int, direction: Direction) -> Transport:
        """Which transport a ``ncclTransportComm`` belongs to: it is a member of a ``ncclTransport``, whose name lies in front
        of it.

        Works without symbols, and in builds whose transports moved.
        """
        key = (transport_comm, direction)
        known = self._transport_names.get(key)
        if known is None:
            known = self._transport_names[key] = self._name_of(transport_comm, direction)
        return known

    def _name_of(self, transport_comm: int, direction: Direction) -> Transport:
        layout = self.decoder.layout
        if not transport_comm or not layout.has(f"ncclTransport.{direction}"):
            return Transport.UNKNOWN
        name = layout.member("ncclTransport.name")
        start = transport_comm - layout.member(f"ncclTransport.{direction}").offset + name.offset
        if not self.decoder.is_readable(start, name.size):
            return Transport.UNKNOWN
        data = self.decoder.reader.read_many([(start, name.size)])[0]
        return _TRANSPORT_NAMES.get(clean_text(data or b""), Transport.UNKNOWN)


def channel_count(layout: Layout, values: Values) -> int:
    """Channels in use: those of collectives and of point-to-point, bounded by the array."""
    used = max(values["nChannels"] or 0, values["p2pnChannels"] or 0)
    return max(0, min(used, layout.member("ncclComm.channels").count, MAX_CHANNELS))
