"""Step counters of proxy operations: whether they make sense together, and how far the GPU has produced.

What each counter means: ``docs/state-plane.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ncclwatch.model.state import Direction, Transport
from ncclwatch.target.decode import Decoder, Values
from ncclwatch.target.lineflags import Slot, filled
from ncclwatch.target.proxyconn import ProxyConnection

MAX_STEPS = 1 << 40
"""No counter is larger; one that is comes from memory that was reused."""

_UNREADABLE = "some receive tails lie in memory that cannot be read from outside"
_UNREADABLE_LINES = "some LL buffers lie in memory that cannot be read from outside"


def counters_agree(sub: Values, connection: ProxyConnection | None, slice_steps: int) -> bool:
    """Whether the counters of a running sub can have stood together: each stage is at most as far as the one before it.

    They are copied in the order they lie in memory (posted first), so a later stage can seem ahead when the proxy ran in
    between: then the sub is read again. Only the network transport counts in this order. ``nsteps`` grows while a registered
    buffer is sent in pieces (v2.20 to v2.23), and a last slice may reach beyond it.
    """
    done, transmitted, posted = sub["done"] or 0, sub["transmitted"] or 0, sub["posted"] or 0
    nsteps, base = sub["nsteps"] or 0, sub["base"] or 0
    if not 0 <= nsteps <= MAX_STEPS or base > MAX_STEPS:
        return False
    stages = [done, transmitted, posted]
    if connection is not None and connection.transport is Transport.NET:
        if connection.direction is Direction.RECV:
            stages.insert(2, sub["received"] or 0)
        if any(low > high for low, high in pairwise(stages)):
            return False
    return max(stages) <= nsteps + max(slice_steps, 1)


def gpu_ready(decoder: Decoder, subs: Sequence[tuple[Values, ProxyConnection | None]], protocol: str) -> list[int | None]:
    """How far the GPU has produced, for sends over the network.

    Simple and LL128: the receive tail, which the GPU writes, minus base (LL128 moves it for a proxy alone, ``postSend`` of
    ``prims_ll128.h``). LL does not use the tail: the slots from ``transmitted`` on are counted that have a size in the FIFO
    (``connFifo[slot].size``, ``sizesFifo`` until 2.19) **and** the flags of their step. The size alone says nothing: the GPU sets
    it when it begins a step, before it waits for what it passes on in it (``waitSend`` of ``prims_ll.h``).
    """
    layout = decoder.layout
    if not layout.has("ncclRecvMem.tail"):
        decoder.unavailable["GPU-ready steps"] = "this build keeps no ncclRecvMem.tail"
        return [None] * len(subs)
    tail = layout.member("ncclRecvMem.tail")
    places = [(made.recv_mem + tail.offset if made and decoder.is_readable(made.recv_mem) else 0, tail.size) for _, made in subs]
    if protocol == "LL":
        return [_ready_slots(decoder, sub, made) for sub, made in subs]
    ready: list[int | None] = []
    for (sub, made), data in zip(subs, decoder.reader.read_many(places), strict=True):
        if data is None:
            if made is not None and made.recv_mem:
                decoder.unavailable["GPU-ready steps"] = _UNREADABLE
            ready.append(None)
            continue
        nsteps = sub["nsteps"] or 0
        produced = int.from_bytes(data, "little") - (sub["base"] or 0)
        if sub["reg"] and layout.has("ncclProxySubArgs.mhandle"):
            # v2.20 to v2.23: the GPU advances the tail once for a registered buffer, however many steps the proxy makes of it.
            produced = nsteps if produced > 0 else 0
        ready.append(max(0, min(produced, nsteps)))
    return ready


def _ready_slots(decoder: Decoder, sub: Values, made: ProxyConnection | None) -> int | None:
    layout = decoder.layout
    name = "connFifo" if layout.has("ncclRecvMem.connFifo") else "sizesFifo"
    if made is None or not made.recv_mem or not layout.has(f"ncclRecvMem.{name}"):
        return None
    fifo = layout.member(f"ncclRecvMem.{name}")
    data = decoder.reader.read_many([(made.recv_mem + fifo.offset, fifo.size)])[0]
    if data is None:
        return None
    inner = layout.member("ncclConnFifo.size").offset if fifo.element == "struct" and layout.has("ncclConnFifo.size") else 0
    done, transmitted, base = sub["done"] or 0, sub["transmitted"] or 0, sub["base"] or 0
    step_bytes = made.ll_bytes // fifo.count
    announced: list[Slot] = []
    for step in range(base + transmitted, base + min(done + fifo.count, sub["nsteps"] or 0)):
        slot = step % fifo.count
        size = int.from_bytes(data[fifo.stride * slot + inner : fifo.stride * slot + inner + 4], "little", signed=True)
        if size == -1:
            break
        announced.append(Slot(made.ll_buffer + slot * step_bytes, size, step))
    count = filled(decoder, announced, step_bytes) if made.ll_buffer and step_bytes > 0 else None
    if count is None:
        decoder.unavailable["GPU-ready steps"] = _UNREADABLE_LINES
        return None
    return transmitted + count
