"""Symbol tables of ELF files as arrays: rows are found through the bytes of their names, and no object is made for the others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

STT_OBJECT, STT_FUNC, STT_FILE, STT_GNU_IFUNC = 1, 2, 4, 10
MAX_NAME = 4096

ROW = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")])
"""``Elf64_Sym``: System V ABI, chapter 4."""

Table = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Symbol:
    """A defined symbol: address as linked, size in bytes; ``source_file`` (``net.cc``) only for those local to one."""

    name: str
    address: int
    size: int
    type: int
    source_file: str = ""

    @property
    def is_function(self) -> bool:
        """Whether it is code."""
        return self.type in (STT_FUNC, STT_GNU_IFUNC)


@dataclass(frozen=True)
class SymbolTable:
    """A symbol table as an array of rows and the bytes of its names."""

    rows: Table
    names: bytes

    @cached_property
    def _files(self) -> npt.NDArray[np.intp]:
        """Indices of the rows that open a source file's local symbols."""
        return np.flatnonzero((self.rows["info"] & 15) == STT_FILE)

    @cached_property
    def _local_count(self) -> int:
        """Local symbols come first; binding is the upper half of ``info`` and 0 for local."""
        nonlocal_rows = np.flatnonzero(self.rows["info"] >> 4)
        return int(nonlocal_rows[0]) if nonlocal_rows.size else len(self.rows)

    def _source_file(self, index: int) -> str:
        """The source file that a local symbol belongs to: the nearest file symbol before it; hidden globals have none."""
        if index >= self._local_count:
            return ""
        before = int(np.searchsorted(self._files, index)) - 1
        return text_at(self.names, int(self.rows["name"][self._files[before]])) if before >= 0 else ""

    def exact(self, name: str) -> Symbol | None:
        """The first defined symbol of exactly this name."""
        return next(iter(self._at_offsets(re.compile(rb"(?=" + re.escape(name.encode()) + rb"\0)"))), None)

    def matching(self, pattern: str) -> list[Symbol]:
        """Defined symbols whose whole name matches a regular expression (ASCII)."""
        # Not only behind a NUL: linkers let "ncclAllReduce" share the end of "pncclAllReduce".
        found = self._at_offsets(re.compile(rb"(?=(?:" + pattern.encode() + rb")\0)"))
        return [symbol for symbol in found if re.fullmatch(pattern, symbol.name, re.ASCII)]

    def named(self, name: str, source_file: str) -> list[Symbol]:
        """Defined symbols of a C name or of the C++ name of a global function or variable; see :meth:`ElfFile.find`."""
        if name.encode() not in self.names:
            return []
        plain = re.escape(name.encode())
        mangled = rb"_ZL?" + str(len(name)).encode() + plain + rb"[A-Za-z0-9_]*"
        found = self._at_offsets(re.compile(rb"(?=(?:" + plain + rb"|" + mangled + rb")\0)"))
        return [symbol for symbol in found if not source_file or symbol.source_file == source_file]

    def _at_offsets(self, pattern: re.Pattern[bytes]) -> list[Symbol]:
        """Defined functions and objects whose name begins where the pattern matches in the names."""
        offsets = [match.start() for match in pattern.finditer(self.names)]
        if not offsets:
            return []
        kind = self.rows["info"] & 15
        usable = (self.rows["section"] != 0) & ((kind == STT_FUNC) | (kind == STT_OBJECT) | (kind == STT_GNU_IFUNC))
        indices = np.flatnonzero(usable & np.isin(self.rows["name"], np.array(offsets, np.uint32)))
        return [self._symbol(int(index)) for index in indices]

    def _symbol(self, index: int) -> Symbol:
        row = self.rows[index]
        name = text_at(self.names, int(row["name"]))
        return Symbol(name, int(row["value"]), int(row["size"]), int(row["info"]) & 15, self._source_file(index))


def text_at(names: bytes, offset: int) -> str:
    """The NUL-terminated string at an offset, at most ``MAX_NAME`` bytes of it."""
    end = names.find(b"\0", offset, offset + MAX_NAME)
    return names[offset : end if end >= 0 else offset + MAX_NAME].decode("utf-8", "replace")
