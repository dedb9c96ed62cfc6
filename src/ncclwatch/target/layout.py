"""Layouts: where the members of NCCL's structures lie in one build of NCCL, as plain data that is independent of its source.

A layout comes from the debug information of a libnccl (:mod:`ncclwatch.target.dwarf`) or from the manifest of known releases
(:mod:`ncclwatch.target.manifest`). Readers ask it for members and handle :class:`MissingMemberError`; they never look at the
version, because members come and go between releases and vendors build their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ncclwatch.errors import TargetError
from ncclwatch.model.state import VersionSource

Version = tuple[int, int, int]

KINDS = ("int", "uint", "float", "bool", "pointer", "enum", "struct", "array", "other")
"""What a member can be. ``struct`` also stands for unions and classes; ``other`` is what nobody reads (function types)."""

FORMAT = "ncclwatch.layout/1"
"""Name of the JSON form; a change of meaning gets a new number, and files of another number are ignored."""

MAX_TYPE_SIZE = 1 << 30
"""No structure or member is larger: a layout that claims so is damaged."""


class LayoutError(TargetError):
    """The layout of a build could not be established, or its JSON form is damaged."""


class MissingMemberError(LayoutError):
    """This build of NCCL does not have the structure or member that a signal needs: the signal is unavailable.

    ``path`` is what was asked for, ``version`` the NCCL version of the layout.
    """

    def __init__(self, path: str, version: Version | None, missing: str) -> None:
        self.path = path
        self.version = version
        super().__init__(f"NCCL {format_version(version)} has no {missing}" + (f" (asked for {path})" if path != missing else ""))


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a structure.

    ``offset`` (bytes) counts from the start of the structure that was asked (absolute for a nested path), ``size`` is in bytes.
    ``kind`` is one of :data:`KINDS`. ``type_name`` is without ``struct``/``enum``: of a scalar its own name; of a struct or enum
    the key in ``Layout.structs``/``Layout.enums``; of a pointer that of what it points to (``ncclComm``, ``ncclProxyPeer*``,
    ``void``); of an array that of its innermost element. Arrays have ``count`` elements (all dimensions multiplied) of
    ``element`` kind every ``stride`` bytes; otherwise ``count`` is 1, ``stride`` is ``size`` and ``element`` is empty.
    ``bit_size`` is not 0 for a bit field, whose lowest bit is ``bit_offset`` of the little-endian integer at ``offset``.
    """

    name: str
    offset: int
    size: int
    kind: str
    type_name: str = ""
    count: int = 1
    stride: int = 0
    element: str = ""
    bit_offset: int = 0
    bit_size: int = 0

    @property
    def end(self) -> int:
        """First byte after the member."""
        return self.offset + self.size

    def at(self, index: int) -> int:
        """Offset of element ``index`` of an array; raises :class:`IndexError` outside of it."""
        if not 0 <= index < self.count:
            raise IndexError(f"{self.name}[{index}] of {self.count}")
        return self.offset + index * self.stride


@dataclass(frozen=True, slots=True)
class Struct:
    """A structure: its size in bytes and its members; those of anonymous inner structures and unions are its own."""

    name: str
    size: int
    members: Mapping[str, Member]


_STEP = re.compile(r"([A-Za-z_]\w*)(?:\[(\d+)\])?")


@dataclass(frozen=True, eq=False)
class Layout:
    """Structures, enumerations and symbols of one build of NCCL.

    ``build_id`` is hexadecimal, ``""`` when the binary has none. ``source`` says how the layout was matched to the binary.
    ``structs`` and ``enums`` (value → enumerator name) hold what :mod:`ncclwatch.target.wanted` lists, under NCCL's names; a
    structure that is local to one source file and whose name is not unique is ``"coll_net.cc:sendResources"``. ``symbols`` maps a
    name, or ``"net.cc:sendProxyProgress"`` for a static function or variable, to (address as linked, size in bytes): add the load
    bias. It holds only the symbols that this tool asks for; matched by version only, it holds what the binary exports.
    Two layouts are equal only when they are the same object.
    """

    build_id: str
    version: Version | None
    source: VersionSource
    structs: Mapping[str, Struct]
    enums: Mapping[str, Mapping[int, str]]
    symbols: Mapping[str, tuple[int, int]]

    def struct(self, name: str) -> Struct:
        """The structure of that name; raises :class:`MissingMemberError`."""
        found = self.structs.get(name)
        if found is None:
            raise MissingMemberError(name, self.version, f"structure {name}")
        return found

    def size(self, name: str) -> int:
        """Size of a structure in bytes; raises :class:`MissingMemberError`."""
        return self.struct(name).size

    def member(self, path: str) -> Member:
        """The member at ``"ncclComm.proxyState"``, ``"ncclChannel.ring.prev"`` or, of an array, ``"ncclComm.channels[2].ring"``.

        The offset counts from the start of the first structure named. Pointers are not followed. Raises
        :class:`MissingMemberError`.
        """
        # Paths are few and asked for again and again: the cache is per layout object and bounded.
        return _resolve(self, path)

    def has(self, path: str) -> bool:
        """Whether this build has the structure (``"ncclRing"``) or member."""
        if "." not in path:
            return path in self.structs
        try:
            self.member(path)
        except MissingMemberError:
            return False
        return True

    def enum_name(self, enum: str, value: int) -> str:
        """The enumerator's name, or the value in decimal when this build has no such enumerator or enumeration."""
        return self.enums.get(enum, {}).get(value, str(value))

    def with_source(self, source: VersionSource, *, build_id: str | None = None) -> Layout:
        """This layout as matched to another binary: symbol addresses hold only for the build they came from."""
        same_build = build_id is None or build_id == self.build_id
        return replace(
            self,
            source=source,
            build_id=self.build_id if build_id is None else build_id,
            symbols=self.symbols if same_build else {},
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data, see :meth:`from_json`."""
        return {
            "format": FORMAT,
            "build_id": self.build_id,
            "version": list(self.version) if self.version else None,
            "source": str(self.source),
            "structs": {name: struct_to_json(struct) for name, struct in sorted(self.structs.items())},
            "enums": {name: enum_to_json(values) for name, values in sorted(self.enums.items())},
            "symbols": {name: list(place) for name, place in sorted(self.symbols.items())},
        }

    @staticmethod
    def from_json(data: Any) -> Layout:
        """The layout of which ``data`` is the JSON form; raises :class:`LayoutError` when it is damaged or of another format."""
        try:
            if data["format"] != FORMAT:
                raise LayoutError(f"layout of format {str(data['format'])[:40]!r}", f"this version reads {FORMAT}")
            major_minor_patch = data["version"]
            return Layout(
                build_id=str(data["build_id"]),
                version=None if major_minor_patch is None else _version(major_minor_patch),
                source=VersionSource(data["source"]),
                structs={str(name): struct_from_json(str(name), value) for name, value in data["structs"].items()},
                enums={str(name): enum_from_json(value) for name, value in data["enums"].items()},
                symbols={str(name): (int(address), int(size)) for name, (address, size) in data["symbols"].items()},
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise LayoutError(f"damaged layout ({type(error).__name__}: {error})", "delete the file it came from") from None


@lru_cache(maxsize=4096)
def _resolve(layout: Layout, path: str) -> Member:
    """Follow a member path; cached by the identity of the layout."""
    head, *steps = _split(path)
    if not steps:
        raise MissingMemberError(path, layout.version, f"member path {path!r}")
    if head not in layout.structs:
        raise MissingMemberError(path, layout.version, f"structure {head}")
    struct = layout.structs[head]
    offset = 0
    walked = head
    member: Member | None = None
    for number, step in enumerate(steps):
        match = _STEP.fullmatch(step)
        name = match[1] if match else step
        walked += "." + step
        member = struct.members.get(name) if match else None
        if member is None:
            raise MissingMemberError(path, layout.version, walked)
        if match and match[2] is not None:
            member = _element(member, int(match[2]), path, layout)
        offset += member.offset
        if number + 1 < len(steps):
            if member.kind != "struct":
                raise MissingMemberError(path, layout.version, f"structure at {walked}")
            if member.type_name not in layout.structs:
                raise MissingMemberError(path, layout.version, f"structure {member.type_name}")
            struct = layout.structs[member.type_name]
    assert member is not None  # noqa: S101 - the loop ran at least once
    return replace(member, offset=offset)


def _split(path: str) -> list[str]:
    """Split a path at its dots, but leave the one of a file name such as ``coll_net.cc:`` alone."""
    prefix, colon, rest = path.rpartition(":")
    first, *others = rest.split(".")
    return [prefix + colon + first, *others]


def _element(array: Member, index: int, path: str, layout: Layout) -> Member:
    """Element ``index`` of an array member as a member of its own."""
    if array.kind != "array" or index >= array.count:
        raise MissingMemberError(path, layout.version, f"element {array.name}[{index}]")
    return Member(f"{array.name}[{index}]", array.at(index), array.stride, array.element, array.type_name, 1, array.stride)


def format_version(version: Version | None) -> str:
    """``2.21.5``, or ``of unknown version``."""
    return ".".join(map(str, version)) if version else "of unknown version"


def struct_to_json(struct: Struct) -> list[Any]:
    """``[size, [member, …]]``; a member is ``[name, offset, size, kind, …]`` with defaults cut off at its end."""
    return [struct.size, [_member_to_json(member) for member in struct.members.values()]]


def struct_from_json(name: str, data: Any) -> Struct:
    """The inverse of :func:`struct_to_json`; raises :class:`ValueError` and the like when damaged."""
    size, members = data
    parsed = [_member_from_json(item, int(size)) for item in members]
    return Struct(name, _bounded(size), {member.name: member for member in parsed})


def enum_to_json(values: Mapping[int, str]) -> list[list[Any]]:
    """``[[value, name], …]``: JSON has no integer keys."""
    return [[value, name] for value, name in sorted(values.items())]


def enum_from_json(data: Any) -> dict[int, str]:
    """The inverse of :func:`enum_to_json`."""
    return {int(value): str(name) for value, name in data}


def _member_to_json(member: Member) -> list[Any]:
    row: list[Any] = [member.name, member.offset, member.size, member.kind, member.type_name]
    if member.kind == "array":
        row += [member.count, member.stride, member.element]
    elif member.bit_size:
        row += [member.bit_offset, member.bit_size]
    return row


def _member_from_json(row: Any, struct_size: int) -> Member:
    name, offset, size, kind, type_name, *rest = row
    if kind not in KINDS:
        raise ValueError(f"member kind {str(kind)[:20]!r}")
    count, stride, element, bit_offset, bit_size = 1, int(size), "", 0, 0
    if kind == "array":
        count, stride, element = int(rest[0]), int(rest[1]), str(rest[2])
    elif rest:
        bit_offset, bit_size = int(rest[0]), int(rest[1])
    if not 0 <= int(offset) <= int(offset) + _bounded(size) <= struct_size or count < 0 or count * stride > max(int(size), 0):
        raise ValueError(f"member {str(name)[:40]!r} lies outside its structure")
    return Member(str(name), int(offset), int(size), kind, str(type_name), count, stride, element, bit_offset, bit_size)


def _bounded(size: Any) -> int:
    if not 0 <= int(size) <= MAX_TYPE_SIZE:
        raise ValueError(f"size {size}")
    return int(size)


def _version(parts: Any) -> Version:
    major, minor, patch = parts
    return int(major), int(minor), int(patch)
