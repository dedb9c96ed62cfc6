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


SYS_BPF = {Machine.X86_64: 321, Machine.AARCH64: 280}
SYS_PERF_EVENT_OPEN = {Machine.X86_64: 298, Machine.AARCH64: 241}
"""Numbers of system calls that the C library has no function for (arch/x86/entry/syscalls/syscall_64.tbl;
include/uapi/asm-generic/unistd.h).
"""


def this_machine(name: str = "") -> Machine | None:
    """The architecture of this machine (or of the one with that name); ``None`` for any other."""
    try:
        return Machine(name or platform.machine())
    except ValueError:
        return None
