"""A small reader of 64-bit little-endian ELF files: build id, segments, sections, symbols by name.

Only the bytes that are needed are read, with ``pread``: a libnccl is 200-500 MB, and a mapped file that is truncated meanwhile
would kill the reader. Files are untrusted: every offset and count is checked against the file and a bound. Symbol tables stay
numpy arrays; no Python object is made per symbol. Format: System V ABI, chapters 4 and 5; ``.gnu.hash`` as the GNU linker
writes it.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ncclwatch.errors import TargetError
from ncclwatch.target.machine import OF_ELF, Machine
from ncclwatch.target.symbols import ROW, Symbol, SymbolTable, Table, text_at

__all__ = ["ElfError", "ElfFile", "Section", "Segment", "Symbol"]

MAX_HEADERS = 8192
"""Bound of section and of program headers; real files have under 100."""
MAX_TABLE = 1 << 29
"""Bound in bytes of one symbol or string table; those of libtorch_cuda stay under 200 MB."""
MAX_NOTE = 1 << 16

PT_LOAD, PT_NOTE = 1, 4
SHT_SYMTAB, SHT_NOTE, SHT_NOBITS, SHT_DYNSYM = 2, 7, 8, 11
NT_GNU_BUILD_ID = 3

_SECTION = np.dtype(
    [
        ("name", "<u4"),
        ("type", "<u4"),
        ("flags", "<u8"),
        ("address", "<u8"),
        ("offset", "<u8"),
        ("size", "<u8"),
        ("link", "<u4"),
        ("info", "<u4"),
        ("align", "<u8"),
        ("entry", "<u8"),
    ]
)
_SEGMENT = np.dtype(
    [
        ("type", "<u4"),
        ("flags", "<u4"),
        ("offset", "<u8"),
        ("address", "<u8"),
        ("physical", "<u8"),
        ("file_size", "<u8"),
        ("memory_size", "<u8"),
        ("align", "<u8"),
    ]
)


class ElfError(TargetError):
    """The file is not a 64-bit little-endian ELF file, or it is damaged."""


@dataclass(frozen=True, slots=True)
class Section:
    """One section: its name, address as linked, place in the file and size in bytes (``NOBITS`` sections occupy no file)."""

    name: str
    type: int
    address: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One program header: ``offset`` and ``file_size`` in the file, ``address`` and ``memory_size`` as linked, in bytes."""

    type: int
    flags: int
    offset: int
    address: int
    file_size: int
    memory_size: int


class ElfFile:
    """An open ELF file. Close it, or use it as a context manager.

    ``fd`` is taken over. Raises :class:`ElfError` when the file is not a 64-bit little-endian ELF file; later calls raise it when
    what they need is damaged.
    """

    def __init__(self, fd: int, name: str = "") -> None:
        self.fd = fd
        self.name = name or f"file descriptor {fd}"
        try:
            self._size = os.fstat(fd).st_size
            header = self._read(0, 64)
            if header[:6] != b"\x7fELF\x02\x01":
                raise ElfError(f"{self.name} is not a 64-bit little-endian ELF file")
            fields = struct.unpack_from("<HHIQQQIHHHHHH", header, 16)
            self.type, self.machine, self._phoff, self._shoff = (int(fields[n]) for n in (0, 1, 4, 5))
            self._phentsize, self._phnum, self._shentsize, self._shnum, self._shstrndx = (int(field) for field in fields[8:])
        except BaseException:
            os.close(fd)
            self.fd = -1
            raise

    @property
    def architecture(self) -> Machine | None:
        """The architecture it is for; ``None`` for one that ncclwatch does not know."""
        return OF_ELF.get(self.machine)

    @classmethod
    def open(cls, path: str | Path) -> ElfFile:
        """Open a regular file by path; raises :class:`ElfError` when it cannot be opened or is no ELF file."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ElfError(f"cannot open {path}: {error.strerror}") from None
        return cls(fd, str(path))

    def __enter__(self) -> ElfFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; it is safe to do so twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _read(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes of the file."""
        if offset < 0 or size < 0 or size > MAX_TABLE or offset + size > self._size:
            raise ElfError(f"{self.name} is damaged: {size} bytes at {offset} lie outside of it")
        try:
            data = os.pread(self.fd, size, offset)
        except OSError as error:
            raise ElfError(f"cannot read {self.name}: {error.strerror}") from None
        if len(data) != size:
            raise ElfError(f"{self.name} became shorter while it was read")
        return data

    def _table(self, kind: np.dtype[Any], offset: int, count: int) -> Table:
        return np.frombuffer(self._read(offset, count * kind.itemsize), kind)

    # --- headers ---------------------------------------------------------------------------------------------------------------

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All program headers in file order."""
        if (self._phnum and self._phentsize != _SEGMENT.itemsize) or self._phnum > MAX_HEADERS:
            raise ElfError(f"{self.name} is damaged: {self._phnum} program headers of {self._phentsize} bytes")
        rows = self._table(_SEGMENT, self._phoff, self._phnum)
        return tuple(
            Segment(*(int(row[key]) for key in ("type", "flags", "offset", "address", "file_size", "memory_size")))
            for row in rows
        )

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """All sections in file order; empty when the section headers were stripped."""
        if not self._shoff or not self._shnum:
            return ()
        if self._shentsize != _SECTION.itemsize or self._shnum > MAX_HEADERS or self._shstrndx >= self._shnum:
            raise ElfError(f"{self.name} is damaged: {self._shnum} section headers of {self._shentsize} bytes")
        rows = self._table(_SECTION, self._shoff, self._shnum)
        names_row = rows[self._shstrndx]
        names = self._read(int(names_row["offset"]), min(int(names_row["size"]), MAX_HEADERS * 64))
        return tuple(
            Section(text_at(names, int(row["name"])), *(int(row[key]) for key in ("type", "address", "offset", "size", "link")))
            for row in rows
        )

    def section(self, name: str) -> Section | None:
        """The first section of that name, or ``None``."""
        return next((section for section in self.sections if section.name == name), None)

    @cached_property
    def has_debug_info(self) -> bool:
        """Whether the file itself carries DWARF."""
        info = self.section(".debug_info") or self.section(".zdebug_info")
        return info is not None and info.type != SHT_NOBITS and info.size > 0

    @cached_property
    def build_id(self) -> str:
        """The GNU build id in hexadecimal, ``""`` when the file has none."""
        # Segments first: they survive stripping of the section headers.
        places = [(segment.offset, segment.file_size) for segment in self.segments if segment.type == PT_NOTE]
        places += [(section.offset, section.size) for section in self.sections if section.type == SHT_NOTE]
        for offset, size in places:
            found = _note(self._read(offset, min(size, MAX_NOTE)))
            if found:
                return found
        return ""

    def file_offset(self, address: int) -> int | None:
        """The place in the file of an address as linked, or ``None`` when no bytes of the file are loaded there."""
        for segment in self.segments:
            if segment.type == PT_LOAD and 0 <= address - segment.address < segment.file_size:
                return address - segment.address + segment.offset
        return None

    def address_at(self, file_offset: int) -> int | None:
        """The address as linked of a place in the file; the inverse of :meth:`file_offset`."""
        for segment in self.segments:
            if segment.type == PT_LOAD and 0 <= file_offset - segment.offset < segment.file_size:
                return file_offset - segment.offset + segment.address
        return None

    def load_bias(self, start: int, file_offset: int) -> int | None:
        """What to add to an address as linked, given that ``file_offset`` (page-aligned) is mapped at ``start``.

        A mapping's first page may begin before its segment does: segments are compared by page.
        """
        for segment in self.segments:
            first = segment.offset & ~0xFFF
            if segment.type == PT_LOAD and first <= file_offset < max(segment.offset + segment.file_size, first + 1):
                return start - (file_offset - segment.offset + segment.address)
        return None

    def read_address(self, address: int, size: int) -> bytes:
        """Bytes of the file that are loaded at an address as linked (code, constants); raises :class:`ElfError`."""
        offset = self.file_offset(address)
        if offset is None:
            raise ElfError(f"{self.name} has no bytes for address {address:#x}")
        return self._read(offset, size)

    # --- symbols ---------------------------------------------------------------------------------------------------------------

    @cached_property
    def _dynamic(self) -> SymbolTable | None:
        return self._symbol_table(SHT_DYNSYM)

    @cached_property
    def _static(self) -> SymbolTable | None:
        return self._symbol_table(SHT_SYMTAB)

    def _symbol_table(self, kind: int) -> SymbolTable | None:
        section = next((found for found in self.sections if found.type == kind), None)
        if section is None or section.link >= len(self.sections):
            return None
        strings = self.sections[section.link]
        table = self._table(ROW, section.offset, section.size // ROW.itemsize)
        return SymbolTable(table, self._read(strings.offset, strings.size))

    @property
    def is_stripped(self) -> bool:
        """Whether there is no symbol table besides the dynamic one: static functions cannot be found."""
        return not any(section.type == SHT_SYMTAB for section in self.sections)

    @property
    def static_names_size(self) -> int:
        """Bytes of names behind ``.symtab``: what :meth:`find` reads at the first call; 0 when stripped."""
        symbols = next((section for section in self.sections if section.type == SHT_SYMTAB), None)
        return self.sections[symbols.link].size if symbols and symbols.link < len(self.sections) else 0

    def exported(self, name: str) -> Symbol | None:
        """A defined dynamic symbol by its exact name; uses ``.gnu.hash``, so that a huge table is not read."""
        if self.section(".gnu.hash"):
            return self._hashed(name)
        return self._dynamic.exact(name) if self._dynamic else None

    def exports(self, pattern: str) -> dict[str, Symbol]:
        """All defined dynamic symbols whose whole name matches a regular expression (ASCII, no ``\\0``)."""
        return {symbol.name: symbol for symbol in self._dynamic.matching(pattern)} if self._dynamic else {}

    def versions(self, name: str) -> list[Symbol]:
        """Every version of a defined dynamic symbol (libibverbs exports most functions twice), in the table's order."""
        return self._dynamic.matching(re.escape(name)) if self._dynamic else []

    def find(self, name: str, source_file: str = "") -> Symbol | None:
        """A defined symbol of ``.symtab`` (else ``.dynsym``) by its C name or the C++ name of a function or variable.

        ``name`` is unqualified, as in the source (``sendProxyProgress``); C++ mangling (Itanium ABI) of names in the global
        namespace is known. ``source_file`` (``net.cc``) restricts to symbols local to that file. ``None`` when there is none, or
        when several at different addresses answer to the name. Clones that the compiler split off (``.cold``, ``.part.0``) do
        not count.
        """
        for table in (self._static, self._dynamic if not source_file else None):
            if table is None:
                continue
            found = {symbol.address: symbol for symbol in table.named(name, source_file)}
            if len(found) == 1:
                return next(iter(found.values()))
            if found:
                return None
        return None

    def symbols(self, pattern: str) -> dict[str, Symbol]:
        """All defined symbols of ``.symtab`` whose whole name matches, hidden ones too; see :meth:`exports`."""
        return {symbol.name: symbol for symbol in self._static.matching(pattern)} if self._static else {}

    def parts(self, name: str) -> list[Symbol]:
        """Pieces of the function of that C name which the compiler moved away (``name.cold.3``); known to ``.symtab`` only."""
        return self._static.matching(re.escape(name) + r"\.cold(?:\.\d+)?") if self._static else []

    def _hashed(self, name: str) -> Symbol | None:
        """Look a name up in ``.gnu.hash``."""
        section, symbols = self.section(".gnu.hash"), next((s for s in self.sections if s.type == SHT_DYNSYM), None)
        if section is None or symbols is None or symbols.link >= len(self.sections) or section.size < 16:
            return None
        buckets, first, bloom, _ = struct.unpack("<IIII", self._read(section.offset, 16))
        base = section.offset + 16 + bloom * 8
        if not buckets or bloom > MAX_TABLE // 8 or base + buckets * 4 > section.offset + section.size:
            return None
        wanted = 5381
        for byte in name.encode():
            wanted = (wanted * 33 + byte) & 0xFFFFFFFF
        index = int.from_bytes(self._read(base + wanted % buckets * 4, 4), "little")
        strings = self.sections[symbols.link]
        while first <= index < symbols.size // ROW.itemsize:
            entry = int.from_bytes(self._read(base + buckets * 4 + (index - first) * 4, 4), "little")
            if entry | 1 == wanted | 1:
                row = self._table(ROW, symbols.offset + index * ROW.itemsize, 1)[0]
                if self._name_at(strings, int(row["name"]), len(name)) == name and row["section"] != 0:
                    return Symbol(name, int(row["value"]), int(row["size"]), int(row["info"]) & 15)
            if entry & 1:
                return None
            index += 1
        return None

    def _name_at(self, strings: Section, offset: int, length: int) -> str:
        if offset + length + 1 > strings.size:
            return ""
        return text_at(self._read(strings.offset + offset, length + 1), 0)

    # --- contents --------------------------------------------------------------------------------------------------------------

    def search(self, pattern: re.Pattern[bytes], limit: int, *, longest: int = 256) -> re.Match[bytes] | None:
        """The first match of a bytes pattern in the constants of the file, reading at most ``limit`` bytes.

        ``.rodata`` is searched first, else the loaded segments from their start. A match is at most ``longest`` bytes.
        """
        rodata = self.section(".rodata")
        if rodata is not None and rodata.type != SHT_NOBITS:
            places = [(rodata.offset, rodata.size)]
        else:
            places = [(segment.offset, segment.file_size) for segment in self.segments if segment.type == PT_LOAD]
        for start, size in places:
            end = min(start + size, self._size, start + limit)
            limit -= max(end - start, 0)
            for offset in range(start, end, 1 << 22):
                found = pattern.search(self._read(offset, min((1 << 22) + longest, end - offset)))
                if found:
                    return found
        return None


def _note(data: bytes) -> str:
    """The build id among the notes in ``data``, or ``""``."""
    position = 0
    while position + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<III", data, position)
        start = position + 12 + (name_size + 3 & ~3)
        if name_size > MAX_NOTE or size > MAX_NOTE or start + size > len(data):
            break
        if kind == NT_GNU_BUILD_ID and data[position + 12 : position + 12 + name_size] == b"GNU\0":
            return data[start : start + size].hex()
        position = start + (size + 3 & ~3)
    return ""
