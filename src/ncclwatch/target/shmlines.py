"""How far a sender has written into shared memory by LL and LL128: these move no tail, but their buffers lie in host memory.

Both protocols write a chunk a step, into slot ``step % 8`` of a buffer of their own, and leave the step plus one in every line's
flag (:mod:`ncclwatch.target.lineflags`). The first line of each slot therefore tells the last step that was begun in it. Steps
without data, which rings have where a message is smaller than a piece for each rank, leave no lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ncclwatch.target.connectors import Connector
from ncclwatch.target.decode import Decoder
from ncclwatch.target.lineflags import FLAG_BYTES, FLAG_MASK

STEPS = 8
"""Fact: slots of a buffer (NCCL_STEPS, all tags)."""
_FLAGS = ((4, FLAG_BYTES), (120, 2 * FLAG_BYTES))
"""Fact: of LL and of LL128, where the first line of a slot has its flag, and how many bytes this has."""
MAX_OFFSET = 64 << 20
"""Bound: bytes from NCCL's words in a segment of shared memory to a buffer in it; a connection's buffers have about 10 MB."""


Lines = tuple[tuple[int, ...], tuple[int, ...]]
"""Flags in the slots of a connection's LL and of its LL128 buffer."""
_UNUSED: Lines = ((0,) * STEPS, (0,) * STEPS)


@dataclass(frozen=True, slots=True)
class Segment:
    """One of the two segments of a connection: where this process has it, and what its GPU calls the same place."""

    host: int
    device: int


def newest_lines(
    decoder: Decoder,
    communicator: int,
    connectors: Sequence[Connector],
    segments: Sequence[Sequence[Segment]],
    counters: Sequence[tuple[int | None, int | None]],
) -> list[Lines | None]:
    """Of each connection the flags in its LL and LL128 slots (0 where none was written yet); ``None`` where unreadable.

    ``counters`` are head and tail. Only the slot of the step after the head is read of a connection that has never been used by
    these protocols: three reads of a connection, 19 of one that has.
    """
    steps = _step_bytes(decoder, communicator)
    places: list[tuple[int, ...] | None] = [None] * len(connectors)
    if steps is not None and decoder.layout.has("ncclConnector.conn.buffs"):
        offset = decoder.layout.member("ncclConnector.conn.buffs").offset
        pointers = decoder.reader.read_many([(c.address + offset, 16) for c in connectors])
        places = [_buffers(decoder, data, own, steps) for data, own in zip(pointers, segments, strict=True)]
    heads = [head or 0 for head, _ in counters]
    first = _flags(decoder, [(own, steps, (head % STEPS,)) for own, head in zip(places, heads, strict=True)])
    used = [
        own if flags is not None and (any(map(any, flags)) or head > (tail or 0)) else None
        for own, flags, head, (_, tail) in zip(places, first, heads, counters, strict=True)
    ]
    whole = _flags(decoder, [(own, steps, range(STEPS)) for own in used])
    return [_UNUSED if own is None and flags is not None else lines for own, flags, lines in zip(used, first, whole, strict=True)]


def _flags(
    decoder: Decoder, wanted: Sequence[tuple[tuple[int, ...] | None, tuple[int, ...] | None, Sequence[int]]]
) -> list[Lines | None]:
    """Flags in these slots of the LL and LL128 buffers of many connections, in one batch."""
    asked: list[tuple[int, int]] = []
    for buffers, steps, slots in wanted:
        for start, step, (offset, size) in zip(buffers or (), steps or (), _FLAGS, strict=False):
            for slot in slots:
                place = start + slot * step + offset
                asked.append((place, size))
                decoder.lines[place - offset] = (step, tuple(range(place, place + size, FLAG_BYTES)))
    found = iter(decoder.reader.read_many(asked))
    result: list[Lines | None] = []
    for buffers, _, slots in wanted:
        data = [[next(found) for _ in slots] for _ in buffers or ()]
        flags = [tuple(int.from_bytes(one, "little") for one in own if one is not None) for own in data]
        result.append((flags[0], flags[1]) if flags and all(len(own) == len(slots) for own in flags) else None)
    return result


def _buffers(
    decoder: Decoder, pointers: bytes | None, segments: Sequence[Segment], steps: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Where this process has the LL and the LL128 buffer of a connection; ``None`` unless both are there, whole."""
    words = [int.from_bytes((pointers or bytes(16))[at : at + 8], "little") for at in (0, 8)]
    starts = tuple(_host_address(word, segments) for word in words)
    whole = all(start and decoder.is_readable(start, STEPS * step) for start, step in zip(starts, steps, strict=True))
    return starts if whole else None


def _step_bytes(decoder: Decoder, communicator: int) -> tuple[int, ...] | None:
    """Bytes of a slot of LL and of LL128; ``None`` where NCCL's numbers make no sense."""
    if not decoder.layout.has("ncclComm.buffSizes"):
        return None
    member = decoder.layout.member("ncclComm.buffSizes")
    sizes = decoder.words(communicator + member.offset, 2, 4, signed=True)
    if sizes is None or not all(0 < size <= MAX_OFFSET for size in sizes):
        return None
    return tuple(size // STEPS for size in sizes)


def _host_address(buffer: int, segments: Sequence[Segment]) -> int:
    """Where this process has a buffer that the GPU knows by that address; 0 if it is in neither segment."""
    near = [(buffer - one.device, one.host) for one in segments if one.host and one.device]
    offset, host = min((item for item in near if 0 < item[0] <= MAX_OFFSET), default=(0, 0))
    return host + offset if host else 0


def produced(head: int, tail: int, flags: Lines) -> int | None:
    """The step up to which a sender has begun to write, by any protocol; ``None`` where steps without data leave that open.

    ``head`` is what the receiver has consumed, ``tail`` what Simple counted last. The steps that lines tell of must have no gap
    among the last eight: a sender of messages that have gaps may have gone on past them unseen.
    """
    wide = [head + _signed(flag - head) if flag else 0 for flag in flags[0]]
    newest = [max(pair) for pair in zip(wide, flags[1], strict=True)]
    top = min(max(newest), head + STEPS)
    if not any(newest):
        return tail
    if top <= tail:
        return max(tail, head)
    recent = range(max(tail, top - STEPS) + 1, top + 1)
    whole = all(newest[(step - 1) % STEPS] >= step for step in recent)
    return top if whole and top >= head else None


def _signed(difference: int) -> int:
    """A difference of numbers that wrap at 32 bits."""
    return (difference + (1 << 31) & FLAG_MASK) - (1 << 31)
