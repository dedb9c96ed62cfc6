"""The NCCL version that a binary carries, from the text that NCCL prints at start."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ncclwatch.target.elf import ElfFile
from ncclwatch.target.layout import Version

# src/init.cc, VERSION_STRING: "NCCL version 2.21.5+cuda12.4" in every release from 2.18.1 to 2.32.3.
_PATTERN = re.compile(rb"NCCL version (\d{1,3})\.(\d{1,4})\.(\d{1,4})([^\0\n ]{0,40})")
SEARCH_LIMIT = 512 << 20
"""Bytes of a binary that are searched: the constants of libnccl are under 1 MB, those of libtorch_cuda under 300 MB."""


@dataclass(frozen=True, slots=True)
class NcclVersion:
    """``number`` is (major, minor, patch); ``suffix`` what follows it, such as ``+cuda12.4``."""

    number: Version
    suffix: str = ""

    @property
    def cuda(self) -> str:
        """The CUDA version it was built with (``12.4``), or ``""``."""
        return self.suffix.removeprefix("+cuda") if self.suffix.startswith("+cuda") else ""

    def __str__(self) -> str:
        return ".".join(map(str, self.number)) + self.suffix


def find_version(elf: ElfFile) -> NcclVersion | None:
    """The version in the constants of a binary that carries NCCL, or ``None``; raises :class:`ncclwatch.target.elf.ElfError`."""
    found = elf.search(_PATTERN, SEARCH_LIMIT)
    if found is None:
        return None
    major, minor, patch, suffix = found.groups()
    return NcclVersion((int(major), int(minor), int(patch)), suffix.decode("ascii", "replace"))
