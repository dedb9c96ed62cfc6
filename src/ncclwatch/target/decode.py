"""Typed reads of NCCL's structures: chosen members of a structure, fetched in as few ranges as make sense, decoded to plain
integers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ncclwatch.target.layout import Layout, Member, MissingMemberError
from ncclwatch.target.memory import AddressSpace, MemoryReader, Range, UnreadableError, plausible_pointer

GAP = 512
"""Members nearer than this many bytes are fetched as one range: a range costs the kernel more than the bytes between."""

MAX_GOOD = 1 << 15
"""Addresses that are remembered as readable, of one memory map."""

MAX_STRING = 256
"""Bytes of a C string that are read at most."""

_INTEGER_CODES = {("int", 1): "b", ("int", 2): "h", ("int", 4): "i", ("int", 8): "q"}
_UNSIGNED_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}

Values = dict[str, int | None]
"""Decoded members by path; ``None`` where this build has no such member."""


@dataclass(frozen=True, slots=True)
class Span:
    """One range of a structure: where it starts, how long it is, and how it unpacks into which names."""

    offset: int
    size: int
    unpacker: struct.Struct
    names: tuple[str, ...]


class Fields:
    """Chosen members of one structure of one layout.

    Paths are relative to the structure (``"progressState.active"``); integers, enums, bools and pointers only (arrays are read
    by their own span). A member this build lacks decodes to ``None`` and is in ``missing`` with the reason. ``spans`` are the
    ranges to fetch.
    """

    def __init__(self, layout: Layout, structure: str, paths: Sequence[str]) -> None:
        self.structure = structure
        self.size = layout.size(structure)
        self.missing: dict[str, str] = {}
        found: list[tuple[Member, str]] = []
        for path in paths:
            try:
                member = layout.member(f"{structure}.{path}")
            except MissingMemberError as error:
                self.missing[path] = error.message
                continue
            if member.bit_size or _code(member) is None:
                self.missing[path] = f"{structure}.{path} is not an integer in this build"
                continue
            found.append((member, path))
        self.spans = tuple(_spans(sorted(found, key=lambda item: item[0].offset)))
        self._absent: Values = dict.fromkeys(self.missing)
        self._only = self.spans[0] if len(self.spans) == 1 and not self._absent else None
        """The one range of a structure that has all its members in it, which most have."""

    def ranges(self, address: int) -> list[Range]:
        """What to read for the structure at ``address``."""
        return [(address + span.offset, span.size) for span in self.spans]

    def decode(self, parts: Sequence[bytes | None]) -> Values | None:
        """The members from what ``ranges`` brought, or ``None`` when a range could not be read."""
        if self._only is not None:
            (part,) = parts
            return None if part is None else dict(zip(self._only.names, self._only.unpacker.unpack(part), strict=True))
        values = dict(self._absent)
        for span, part in zip(self.spans, parts, strict=True):
            if part is None:
                return None
            values.update(zip(span.names, span.unpacker.unpack(part), strict=True))
        return values

    def decode_inside(self, data: bytes, offset: int = 0) -> Values:
        """The members of the structure that starts at ``offset`` of ``data``, which must hold all of it."""
        values = dict(self._absent)
        for span in self.spans:
            values.update(zip(span.names, span.unpacker.unpack_from(data, offset + span.offset), strict=True))
        return values


@lru_cache(maxsize=512)
def fields(layout: Layout, structure: str, paths: tuple[str, ...]) -> Fields:
    """A cached :class:`Fields`; raises :class:`MissingMemberError` when this build lacks the structure itself."""
    return Fields(layout, structure, paths)


class Decoder:
    """A reader and a layout together, with the checks that every pointer from a target must pass.

    ``torn`` counts structures dropped because they changed under the reading, ``truncated`` names the bounds that were hit,
    ``unavailable`` the signals that this build or this process does not give, with the reason. ``counters`` are the addresses of
    words that rise when NCCL works, as far as they were come upon: for :mod:`ncclwatch.target.pulse`. ``lines`` are the slots
    of LL buffers that were looked into (address → bytes, addresses of the flags read): the job's data lies around these flags.
    """

    def __init__(self, reader: MemoryReader, layout: Layout) -> None:
        self.reader = reader
        self.layout = layout
        self._take_mappings()
        self.begin()

    def begin(self) -> None:
        """Start the accounts of a new sample."""
        self.torn = 0
        self.truncated: dict[str, None] = {}
        self.unavailable: dict[str, str] = {}
        self.counters: list[int] = []
        self.lines: dict[int, tuple[int, tuple[int, ...]]] = {}

    def is_readable(self, address: int, size: int = 1, alignment: int = 8) -> bool:
        """Whether an address can be what a pointer of NCCL points to; the map is read again (rarely) when it seems outdated."""
        if size == 1 and alignment == 8 and address in self._good:
            return True
        if not plausible_pointer(address, alignment):
            return False
        if self._space.contains(address, size):
            if len(self._good) < MAX_GOOD and alignment == 8:
                self._good.add(address)
            return True
        if self.reader.mappings() is self._mappings and not self.reader.refresh_mappings():
            return False
        self._take_mappings()
        return self._space.contains(address, size)

    def _take_mappings(self) -> None:
        self._mappings = self.reader.mappings()
        self._space = AddressSpace(self._mappings)
        self._good: set[int] = set()
        """Addresses that were found in this map."""

    def structure(self, wanted: Fields, address: int, *, again: bool = False) -> Values | None:
        """One structure, or ``None`` when the pointer or the memory is bad."""
        if not self.is_readable(address):
            return None
        return wanted.decode(self.reader.read_many(wanted.ranges(address), again=again))

    def structures(self, wanted: Fields, addresses: Sequence[int], *, again: bool = False) -> list[Values | None]:
        """Many structures of one kind in one batch; ``None`` where the pointer or the memory is bad."""
        good = [address if self.is_readable(address) else 0 for address in addresses]
        if len(wanted.spans) == 1:
            offset, size = wanted.spans[0].offset, wanted.spans[0].size
            single = iter(self.reader.read_many([(address + offset, size) for address in good if address], again=again))
            return [wanted.decode((next(single),)) if address else None for address in good]
        ranges = [one for address in good if address for one in wanted.ranges(address)]
        parts = iter(self.reader.read_many(ranges, again=again))
        return [wanted.decode([next(parts) for _ in wanted.spans]) if address else None for address in good]

    def fields(self, structure: str, paths: Iterable[str]) -> Fields:
        """The compiled reading of these members; raises :class:`MissingMemberError` when the structure itself is missing."""
        return fields(self.layout, structure, tuple(paths))

    def words(self, address: int, count: int, size: int = 8, *, signed: bool = False) -> tuple[int, ...] | None:
        """An array of integers of ``size`` bytes, or ``None``; the caller bounds ``count``."""
        if count <= 0:
            return ()
        if not self.is_readable(address, count * size, size):
            return None
        try:
            data = self.reader.read(address, count * size)
        except UnreadableError:
            return None
        code = _UNSIGNED_CODES[size]
        return struct.unpack(f"<{count}{code.lower() if signed else code}", data)

    def string(self, address: int, limit: int = MAX_STRING) -> str:
        """A C string, cut at ``limit`` bytes and cleaned of what a terminal would obey; empty when unreadable."""
        return clean_text(self._bytes_at(address, limit))

    def name(self, address: int, limit: int = MAX_STRING) -> str:
        """A string to which NCCL keeps no more than the program's pointer: empty where what lies there now is no text.

        PyTorch's ``nccl2`` frees the name of a communicator that it has split (``ProcessGroupNCCL::split``).
        """
        data = self._bytes_at(address, limit).split(b"\0", 1)[0]
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            return ""
        return text if text.isprintable() else ""

    def _bytes_at(self, address: int, limit: int) -> bytes:
        if not self.is_readable(address, 1, 1):
            return b""
        first = min(limit, 4096 - address % 4096)
        data = self.reader.read_many([(address, first)])[0]
        if data is None:
            return b""
        if b"\0" not in data and first < limit:
            data += self.reader.read_many([(address + first, limit - first)])[0] or b""
        return data


def clean_text(data: bytes) -> str:
    """Text up to the first zero byte; bytes that are not printable become ``?``, because a target must not steer a terminal."""
    text = data.split(b"\0", 1)[0].decode("utf-8", "replace")
    return "".join(char if char.isprintable() else "?" for char in text)


def _code(member: Member) -> str | None:
    """How :mod:`struct` unpacks a member, or ``None`` for what is not a whole number."""
    if member.kind in ("pointer", "uint", "bool"):
        return _UNSIGNED_CODES.get(member.size)
    if member.kind in ("int", "enum"):
        return _INTEGER_CODES.get(("int", member.size))
    return None


def _spans(members: list[tuple[Member, str]]) -> list[Span]:
    """Group members (sorted by offset) into ranges; what overlaps a member before it (a union) starts a range of its own."""
    groups: list[list[tuple[Member, str]]] = []
    end = 0
    for member, path in members:
        if groups and end <= member.offset <= end + GAP:
            groups[-1].append((member, path))
        else:
            groups.append([(member, path)])
        end = member.end
    spans: list[Span] = []
    for group in groups:
        start = group[0][0].offset
        position = start
        pattern = "<"
        for member, _ in group:
            pattern += f"{member.offset - position}x{_code(member)}"
            position = member.end
        spans.append(Span(start, position - start, struct.Struct(pattern), tuple(path for _, path in group)))
    return spans
