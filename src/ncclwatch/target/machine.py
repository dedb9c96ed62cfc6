"""The processor architectures whose processes can be read: x86-64 and aarch64, both 64-bit and little-endian.

What differs between them here: system call numbers, layouts of NCCL's structures (the C library's mutex takes 40 bytes on one and
48 on the other), instructions, and the size of a page (4 or 64 KiB on aarch64).
"""

from __future__ import annotations

import platform
from enum import StrEnum


class Machine(StrEnum):
    """An architecture, by the name that ``uname -m`` gives it."""

    X86_64 = "x86_64"
    AARCH64 = "aarch64"


OF_ELF = {62: Machine.X86_64, 183: Machine.AARCH64}
"""By ``e_machine`` of an ELF header (EM_X86_64, EM_AARCH64 of elf.h)."""


def this_machine(name: str = "") -> Machine | None:
    """The architecture of this machine (or of the one with that name); ``None`` for any other."""
    try:
        return Machine(name or platform.machine())
    except ValueError:
        return None
