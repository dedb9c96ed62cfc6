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
from ncclwatch.target.layout import MissingMemberError
from ncclwatch.target.lineflags import FLAG_BYTES, FLAG_MASK

STEPS = 8
"""Fact: slots of a buffer (NCCL_STEPS, all tags)."""
_FLAGS = ((4, FLAG_BYTES), (120, 2 * FLAG_BYTES))
"""Fact: of LL and of LL128, where the first line of a slot has its flag, and how many bytes this has."""
MAX_OFFSET = 64 << 20
"""Bound: bytes from NCCL's words in a segment of shared memory to a buffer in it; a connection's buffers have about 10 MB."""


Lines = tuple[tuple[int, ...], tuple[int, ...]]
"""Flags in the slots of a connection's LL and of its LL128 buffer."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One of the two segments of a connection: where this process has it, and what its GPU calls the same place."""

    host: int
    device: int


def newest_lines(
    decoder: Decoder, communicator: int, connectors: Sequence[Connector], segments: Sequence[Sequence[Segment]]
) -> list[Lines | None]:
    """Of each connection the flags in its LL and LL128 slots (0 where none was written yet); ``None`` where unreadable."""
    steps = _step_bytes(decoder, communicator)
    if steps is None or not connectors:
        return [None] * len(connectors)
    try:
        buffers = decoder.layout.member("ncclConnector.conn.buffs")
    except MissingMemberError:
        return [None] * len(connectors)
    pointers = decoder.reader.read_many([(c.address + buffers.offset, 16) for c in connectors])
    wanted: list[tuple[int, int] | None] = []
    for data, own in zip(pointers, segments, strict=True):
        for index, (offset, size) in enumerate(_FLAGS):
            start = _host_address(int.from_bytes((data or bytes(16))[8 * index : 8 * index + 8], "little"), own)
            for slot in range(STEPS):
                place = start + slot * steps[index] + offset
                good = bool(start) and decoder.is_readable(place, size, FLAG_BYTES)
                wanted.append((place, size) if good else None)
                if good:
                    decoder.lines[place - offset] = (steps[index], tuple(range(place, place + size, FLAG_BYTES)))
    found = iter(decoder.reader.read_many([place for place in wanted if place is not None]))
    values = [None if place is None else next(found) for place in wanted]
    result: list[Lines | None] = []
    for first in range(0, len(values), STEPS * len(_FLAGS)):
        slots = values[first : first + STEPS * len(_FLAGS)]
        flags = [int.from_bytes(data, "little") for data in slots if data is not None]
        result.append((tuple(flags[:STEPS]), tuple(flags[STEPS:])) if len(flags) == len(slots) else None)
    return result


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
