"""How NCCL cuts an operation into steps, and which paths they take.

Facts: NCCL v2.27.5-1 ``src/enqueue.cc`` (``calcCollChunking``: chunk steps 4 and slice steps 2 for Ring/Simple, 1 and 1
otherwise; steps = loops × steps a loop × chunk steps; point-to-point: one step a chunk), ``src/include/device.h`` (8 slots,
``NCCL_STEPS``), ``src/graph/trees.cc`` (double binary tree).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ncclwatch.model.state import Transport
from ncclwatch.simulate.layout import node_of
from ncclwatch.simulate.scenario import Layout, Network

NCCL_STEPS = 8
RING_FUNCTIONS = ("AllReduce", "AllGather", "ReduceScatter")
_LL_FACTOR = {"Simple": 1.0, "LL": 0.5, "LL128": 120 / 128}
_BUFFER = {"Simple": 1.0, "LL": 1 / 8, "LL128": 1.0}


@dataclass(frozen=True, slots=True)
class Cut:
    """One channel's share of an operation. A *slice* is ``slice_steps`` steps: the unit in which counters rise.

    ``prims`` slices of work a rank and loop-chunk (see :mod:`steps`); ``slots`` slices fit into a connection; ``chunk_slices``
    make a chunk.
    """

    algorithm: str
    protocol: str
    channels: int
    loops: int
    chunk_slices: int
    slice_steps: int
    chunk_steps: int
    slice_bytes: float
    steps: int

    @property
    def slots(self) -> int:
        """Slices that a sender may be ahead of its receiver."""
        return NCCL_STEPS // self.slice_steps


@lru_cache(maxsize=4096)
def cut(network: Network, function: str, nranks: int, nbytes: int) -> Cut:
    """Cut an operation of ``nbytes`` over ``nranks``: for AllGather and ReduceScatter the size of the whole, for SendRecv of
    one message.
    """
    protocol = network.protocol
    channels = network.channels
    if function in ("SendRecv", "AlltoAll"):
        share = nbytes if function == "SendRecv" else max(1, nbytes // max(1, nranks))
        part = max(1, math.ceil(share / channels))
        steps = max(1, math.ceil(part / network.p2p_chunk_bytes))
        return Cut("Ring", "Simple", channels, steps, 1, 1, 1, part / steps, steps)
    # NCCL's tuner takes a Tree for small AllReduces over many ranks; a Ring's latency grows with their number.
    small_and_wide = nranks > 64 and nbytes < 1 << 20
    ring = function != "AllReduce" or (network.algorithm == "Ring" and not small_and_wide)
    simple_ring = ring and protocol == "Simple"
    chunk_steps, slice_steps = (4, 2) if simple_ring else (1, 1)
    chunk = network.buffer_bytes * _BUFFER[protocol] / NCCL_STEPS * chunk_steps * _LL_FACTOR[protocol]
    pieces = nranks if ring else 1
    loops = max(1, math.ceil(nbytes / (channels * pieces * chunk)))
    chunk_slices = chunk_steps // slice_steps
    slice_bytes = nbytes / (loops * channels * pieces * chunk_slices)
    per_loop = (2 * (nranks - 1) if function == "AllReduce" else nranks - 1) if ring else 1
    algorithm = "Ring" if ring else "Tree"
    return Cut(
        algorithm, protocol, channels, loops, chunk_slices, slice_steps, chunk_steps, slice_bytes, per_loop * loops * chunk_steps
    )


@dataclass(frozen=True, slots=True)
class Path:
    """From one rank to another: transport, bytes a second for one channel, seconds of latency.

    ``socket_buffer`` is what the kernel takes of a connection before the receiver asks for it, 0 for anything but sockets.
    """

    transport: Transport
    rate: float
    latency: float
    socket_buffer: int = 0


class Paths:
    """Paths between ranks of a layout. Channels of an operation share a NIC, so each has its part of the rate."""

    def __init__(self, layout: Layout, network: Network) -> None:
        self._layout = layout
        channels = network.channels
        buffer = network.socket_buffer_bytes if network.net == "socket" else 0
        self._net = Path(Transport.NET, network.nic_rate * 1e9 / channels, network.nic_latency_us / 1e6, buffer)
        local = Transport(network.intra_node)
        self._local = Path(local, network.local_rate * 1e9 / channels, network.local_latency_us / 1e6)
        if local is Transport.NET:
            self._local = self._net

    def __call__(self, source: int, destination: int) -> Path:
        """The path between two global ranks."""
        same = node_of(self._layout, source) == node_of(self._layout, destination)
        return self._local if same else self._net


@lru_cache(maxsize=64)
def binary_tree(nranks: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(parent or -1, children) of each rank in the first of NCCL's two trees: alternating leaves and nodes, root 0."""
    result: list[tuple[int, tuple[int, ...]]] = []
    for rank in range(nranks):
        bit = 1
        while bit < nranks and not bit & rank:
            bit <<= 1
        if rank == 0:
            result.append((-1, (bit >> 1,) if nranks > 1 else ()))
            continue
        up = (rank ^ bit) | (bit << 1)
        up = rank ^ bit if up >= nranks else up
        low = bit >> 1
        children = [rank - low] if low else []
        reach = low
        while reach and rank + reach >= nranks:
            reach >>= 1
        if reach:
            children.append(rank + reach)
        result.append((up, tuple(children)))
    return tuple(result)


def double_tree(nranks: int) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
    """Both trees; the second is the mirror (even number of ranks) or the shift by one (odd). Channels alternate between them."""
    first = binary_tree(nranks)
    odd = nranks % 2 == 1

    def place(rank: int) -> int:
        if rank < 0:
            return -1
        return (rank + 1) % nranks if odd else nranks - 1 - rank

    def origin(rank: int) -> int:
        return (rank - 1) % nranks if odd else nranks - 1 - rank

    second = tuple((place(first[origin(r)][0]), tuple(place(c) for c in first[origin(r)][1])) for r in range(nranks))
    return first, second
