"""Layouts from debug information, read by drgn in a short-lived child process.

drgn indexes the DWARF of a libnccl in some 50 ms but needs 25-60 MB and maps the file, which dies by SIGBUS when the file is
truncated meanwhile. A child takes that risk and that memory, with limits on both, and hands plain JSON back; the agent stays
small. The child is this module run as a program, with the open file as its descriptor: no path is resolved twice.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ncclwatch.model.state import VersionSource
from ncclwatch.target.layout import (
    Layout,
    LayoutError,
    Member,
    Struct,
    enum_from_json,
    enum_to_json,
    struct_from_json,
    struct_to_json,
)
from ncclwatch.target.wanted import ENUMS, STRUCTS, SYMBOLS, WantedType

if TYPE_CHECKING:
    import drgn

    from ncclwatch.target.elf import ElfFile

TIMEOUT_S = 60.0
"""An extraction takes under a second; a child that takes longer is stuck on a damaged file."""
MAX_OUTPUT = 16 << 20
_MEMORY_LIMIT = 8 << 30
_MAX_DEPTH = 16
"""Bound of nested anonymous members, typedefs and array dimensions."""
_MAX_MEMBERS = 4096


def extract(elf: ElfFile, version: tuple[int, int, int] | None) -> Layout:
    """The layout of the build of NCCL that ``elf`` carries, from its own debug information.

    Takes about 0.4 s, most of it the start of the child. Raises :class:`LayoutError` when the file has no usable debug
    information.
    """
    if not elf.has_debug_info:
        raise LayoutError(f"{elf.name} has no debug information", "the manifest of known releases may know its layout")
    types = _run_child(elf)
    try:
        structs = {name: struct_from_json(name, value) for name, value in types["structs"].items()}
        enums = {name: enum_from_json(value) for name, value in types["enums"].items()}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise LayoutError(f"the debug information of {elf.name} makes no sense ({error})") from None
    if "ncclComm" not in structs:
        raise LayoutError(f"the debug information of {elf.name} does not describe NCCL", "is it a build of NCCL with -g?")
    return Layout(elf.build_id, version, VersionSource.DEBUG_INFO, structs, enums, find_symbols(elf))


def find_symbols(elf: ElfFile) -> dict[str, tuple[int, int]]:
    """Those of the wanted symbols that the file has: name → (address as linked, size in bytes)."""
    found = {}
    for wanted in SYMBOLS:
        source_file, _, name = wanted.rpartition(":")
        symbol = elf.find(name, source_file)
        if symbol is not None:
            found[wanted] = (symbol.address, symbol.size)
    return found


def _run_child(elf: ElfFile) -> Any:
    """Run this module on the open file and parse what it prints."""
    # -P: never import from the working directory, which may belong to somebody else.
    command = [sys.executable, "-P", "-m", __name__, str(elf.fd)]
    try:
        result = subprocess.run(
            command, pass_fds=[elf.fd], stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise LayoutError(f"the debug information of {elf.name} could not be read within {TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise LayoutError(f"cannot run {sys.executable}: {error.strerror}") from None
    if result.returncode:
        reason = result.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"status {result.returncode}"]
        raise LayoutError(f"the debug information of {elf.name} cannot be read: {reason[0][:200]}")
    try:
        return json.loads(result.stdout[:MAX_OUTPUT])
    except ValueError:
        raise LayoutError(f"the debug information of {elf.name} cannot be read: unexpected output") from None


# --- in the child ----------------------------------------------------------------------------------------------------


class _Extractor:
    """Turns drgn's types into ours; structures that are embedded without a name of their own are taken along."""

    def __init__(self, program: drgn.Program) -> None:
        import drgn as library

        self.program = program
        self.kind = library.TypeKind
        self.structs: dict[str, Struct] = {}
        self.wanted = {name: entry.key for entry in STRUCTS if not entry.source_file for name in entry.candidates}
        self.wanted_enums = {name: entry.key for entry in ENUMS for name in entry.candidates}

    def find(self, wanted: WantedType, keywords: Iterable[str]) -> drgn.Type | None:
        """The complete type behind a wanted entry, typedefs resolved."""
        for name in wanted.candidates:
            for keyword in keywords:
                try:
                    found = self.program.type(f"{keyword} {name}".strip(), filename=wanted.source_file or None)
                except (LookupError, SyntaxError):
                    continue
                found = self.resolve(found)[0]
                if found.kind in (self.kind.STRUCT, self.kind.UNION, self.kind.CLASS, self.kind.ENUM) and found.is_complete():
                    return found
        return None

    def resolve(self, found: drgn.Type) -> tuple[drgn.Type, list[str]]:
        """What is behind the typedefs, and the names on the way, outermost first."""
        names = []
        for _ in range(_MAX_DEPTH):
            if found.kind != self.kind.TYPEDEF:
                break
            names.append(found.name)
            found = found.type
        tag = getattr(found, "tag", None) or getattr(found, "name", None)
        return found, [*names, tag] if tag else names

    def add(self, key: str, found: drgn.Type) -> None:
        """Add a structure under a key."""
        members: dict[str, Member] = {}
        for member in self.flatten(found, 0, 0):
            described = self.describe(key, *member)
            if described is not None and len(members) < _MAX_MEMBERS:
                members.setdefault(described.name, described)
        self.structs[key] = Struct(key, int(found.size or 0), members)

    def flatten(self, found: drgn.Type, bits: int, depth: int) -> Iterator[tuple[str, drgn.Type, int, int]]:
        """(name, type, bit offset, bit field size) of every member; those of anonymous members as the structure's own."""
        for member in found.members or ():
            if member.name:
                yield member.name, member.type, bits + member.bit_offset, member.bit_field_size or 0
            elif depth < _MAX_DEPTH:
                inner, _ = self.resolve(member.type)
                if inner.kind in (self.kind.STRUCT, self.kind.UNION, self.kind.CLASS):
                    yield from self.flatten(inner, bits + member.bit_offset, depth + 1)

    def describe(self, owner: str, name: str, declared: drgn.Type, bits: int, bit_size: int) -> Member | None:
        """One member; ``None`` for what has no size (flexible arrays)."""
        kind, type_name, size = self.classify(f"{owner}.{name}", declared)
        if bit_size:
            # A bit field is read as the integer of its declared type at the aligned address that holds it.
            start = bits // 8 // max(size, 1) * size
            return Member(name, start, size, kind, type_name, 1, size, "", bits - start * 8, bit_size)
        if kind != "array":
            return Member(name, bits // 8, size, kind, type_name, 1, size)
        count, element = 1, declared
        for _ in range(_MAX_DEPTH):
            element = self.resolve(element)[0]
            if element.kind != self.kind.ARRAY:
                break
            count *= element.length or 0
            declared, element = element.type, element.type
        if not count:
            return None
        element_kind, type_name, stride = self.classify(f"{owner}.{name}", declared)
        return Member(name, bits // 8, count * stride, "array", type_name, count, stride, element_kind)

    def classify(self, path: str, declared: drgn.Type) -> tuple[str, str, int]:
        """(kind, type name, size in bytes) of a member's type; ``path`` names an embedded structure that has no name."""
        found, names = self.resolve(declared)
        kinds = self.kind
        size = int(getattr(found.type if found.kind == kinds.ENUM and found.type else found, "size", None) or 0)
        if found.kind == kinds.POINTER:
            return "pointer", self.pointee(found.type), size
        if found.kind == kinds.ENUM:
            return "enum", self.name_of(names, self.wanted_enums), size
        if found.kind in (kinds.STRUCT, kinds.UNION, kinds.CLASS):
            tag = names[-1] if names else ""
            if tag.startswith(("atomic<", "std::atomic<")) and size in (1, 2, 4, 8):
                return "uint", tag, size
            if not names and found.is_complete():
                self.add(path, found)
                return "struct", path, size
            return "struct", self.name_of(names, self.wanted), size
        if found.kind == kinds.ARRAY:
            return "array", "", 0
        if found.kind == kinds.INT:
            return "int" if found.is_signed else "uint", names[0], size
        if found.kind in (kinds.BOOL, kinds.FLOAT):
            return "bool" if found.kind == kinds.BOOL else "float", names[0], size
        return "other", "", size

    def pointee(self, target: drgn.Type) -> str:
        """What a pointer points to, as a type name; further levels of pointers as ``*``."""
        stars = ""
        for _ in range(_MAX_DEPTH):
            found, names = self.resolve(target)
            if found.kind != self.kind.POINTER:
                if found.kind == self.kind.FUNCTION:
                    return "function" + stars
                return (self.name_of(names, self.wanted) or "void") + stars
            target, stars = found.type, stars + "*"
        return "void" + stars

    @staticmethod
    def name_of(names: list[str], wanted: dict[str, str]) -> str:
        """The key under which the type is in the layout, if it is one of its names; else its tag or innermost typedef."""
        return next((wanted[name] for name in names if name in wanted), names[-1] if names else "")


def types_of(fd: int) -> dict[str, Any]:
    """Structures and enumerations of the file behind a descriptor, in JSON form; raises what drgn raises."""
    import drgn

    program = drgn.Program()
    module = program.extra_module("nccl", create=True)
    module.try_file(f"/proc/self/fd/{fd}", fd=os.dup(fd), force=True)
    if module.debug_file_status != drgn.ModuleFileStatus.HAVE:
        raise LookupError("no debug information that drgn can use")
    extractor = _Extractor(program)
    for entry in STRUCTS:
        found = extractor.find(entry, ("struct", "", "union", "class"))
        if found is not None and found.kind != drgn.TypeKind.ENUM:
            extractor.add(entry.key, found)
    enums = {}
    for entry in ENUMS:
        found = extractor.find(entry, ("enum", ""))
        if found is not None and found.kind == drgn.TypeKind.ENUM:
            values: dict[int, str] = {}
            for enumerator in found.enumerators or ():
                values.setdefault(enumerator.value, enumerator.name)  # aliases such as ncclChar come after the first name
            enums[entry.key] = enum_to_json(values)
    return {"structs": {key: struct_to_json(struct) for key, struct in extractor.structs.items()}, "enums": enums}


def _child(fd: int) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT, _MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CPU, (int(TIMEOUT_S), int(TIMEOUT_S)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        json.dump(types_of(fd), sys.stdout, separators=(",", ":"))
    except Exception as error:  # whatever drgn makes of a damaged file becomes one line for the parent
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_child(int(sys.argv[1])))
