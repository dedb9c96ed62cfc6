"""Names of the network devices that NCCL's own networks use: ``mlx5_0`` for InfiniBand and RoCE, ``eth0`` for sockets.

Both keep a static table of devices that ``netDev`` of a connection indexes (src/transport/net_ib.cc, net_socket.cc). External
plugins keep their own, out of sight: their devices stay numbers.
"""

from __future__ import annotations

from ncclwatch.target.decode import Decoder, clean_text

_TABLES = {
    # Devices that NCCL merges into one (2.21 and later) come first: then netDev counts those.
    "IB": (("ncclIbMergedDevs", "ncclIbMergedDev"), ("ncclIbDevs", "ncclIbDev")),
    "Socket": (("ncclNetSocketDevs", "ncclNetSocketDev"),),
}


class NetDevices:
    """Looks names up in the tables of one process; ``load_bias`` is what to add to symbols, ``None`` when unknown."""

    def __init__(self, decoder: Decoder, load_bias: int | None) -> None:
        self._decoder = decoder
        self._bias = load_bias
        self._names: dict[tuple[str, int], str] = {}

    def begin(self, *, keep: bool) -> None:
        """Start a sample; without ``keep`` names are read anew, so that a recorder sees it."""
        if not keep:
            self._names.clear()

    def name(self, network: str, device: int | None) -> str:
        """The name of device number ``device`` of a network (``ncclNet_t.name``), or ``""``."""
        if device is None:
            return ""
        key = (network, device)
        if key not in self._names:
            self._names[key] = self._read(network, device)
        return self._names[key]

    def _read(self, network: str, device: int) -> str:
        layout = self._decoder.layout
        for symbol, structure in _TABLES.get(network, ()):
            if self._bias is None or symbol not in layout.symbols or not layout.has(f"{structure}.devName"):
                continue
            address, size = layout.symbols[symbol]
            stride = layout.size(structure)
            if not 0 <= device < size // stride:
                return ""
            member = layout.member(f"{structure}.devName")
            start = self._bias + address + device * stride + member.offset
            (data,) = self._decoder.reader.read_many([(start, min(member.size, 128))])
            return clean_text(data or b"")
        return ""
