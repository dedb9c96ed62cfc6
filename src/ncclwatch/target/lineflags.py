"""What the flags in LL and LL128 buffers say: how far a sender has filled them.

Data and flags share lines in these protocols, and the flags of a line are the step it was written in, plus one: 16 bytes with two
flags of 4 bytes (LL, ``NCCL_LL_FLAG``), 128 bytes with one of 8 at the end (LL128). Source: ``src/device/prims_ll.h``,
``prims_ll128.h`` of v2.19.3 to v2.30.7 (``src/collectives/device/`` before), ``src/include/device.h``.

The lines also hold the job's data. Only flags are read, and of the pages around them a recording keeps nothing else
(:func:`blank`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ncclwatch.target.decode import Decoder
from ncclwatch.target.recorded import BLOCK, pages_of

LL_LINE = 16
"""Fact: bytes of a line (``ncclLLFifoLine``); half of them are data."""
LL_FLAGS = (4, 12)
"""Fact: where a line's two flags stand."""
FLAG_BYTES = 4
FLAG_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of a connection's LL buffer: its address, how many bytes with flags the sender has announced for it, and the
    absolute step it is to be filled in.
    """

    address: int
    nbytes: int
    step: int


def filled(decoder: Decoder, slots: Sequence[Slot], step_bytes: int) -> int | None:
    """How many of the slots, from the first on, have the flags of their step in their first and last line.

    ``None`` where a buffer cannot be read. A slot that was announced empty is filled. O(slots), one batch of reads.
    """
    flags = [list(_flag_places(slot, step_bytes)) for slot in slots]
    if any(place and not decoder.is_readable(place, FLAG_BYTES, FLAG_BYTES) for places in flags for place in places):
        return None
    for slot, places in zip(slots, flags, strict=True):
        decoder.lines[slot.address] = (step_bytes, tuple(places))
    read = iter(decoder.reader.read_many([(place, FLAG_BYTES) for places in flags for place in places]))
    count = 0
    for slot, places in zip(slots, flags, strict=True):
        found = [next(read) for _ in places]
        if None in found:
            return None
        if any(int.from_bytes(data or b"", "little") != (slot.step + 1) & FLAG_MASK for data in found):
            break
        count += 1
    return count


def _flag_places(slot: Slot, step_bytes: int) -> Iterator[int]:
    """Addresses of the first flag of a slot's first line and the second of its last."""
    lines = -(-min(slot.nbytes, step_bytes) // LL_LINE)
    if lines > 0:
        yield slot.address + LL_FLAGS[0]
        yield slot.address + (lines - 1) * LL_LINE + LL_FLAGS[1]


def blank(pages: Mapping[int, bytes], lines: Mapping[int, tuple[int, Iterable[int]]]) -> dict[int, bytes]:
    """Pages by address without the job's data in them: of every slot (``lines``: address → bytes, flags read) only the flags."""
    kept = dict(pages)
    for start, (size, flags) in lines.items():
        places = list(flags)
        for page in {own for place in places for own in pages_of(place, FLAG_BYTES)} & kept.keys():
            content = bytearray(kept[page])
            low, high = max(start, page) - page, min(start + size, page + BLOCK) - page
            words = {
                place: bytes(content[place - page : place - page + FLAG_BYTES])
                for place in places
                if page <= place < page + BLOCK
            }
            content[low:high] = bytes(high - low)
            for place, word in words.items():
                content[place - page : place - page + FLAG_BYTES] = word
            kept[page] = bytes(content)
    return kept
