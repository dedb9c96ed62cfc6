"""Tiny functions of our own to try probes on: what one costs here, and what this kernel's probes can do."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache

from ncclwatch.errors import NcclwatchError
from ncclwatch.target.maps import mapping_at, read_maps
from ncclwatch.wire.sites import Site

_EMULATED, _STEPPED = bytes.fromhex("50415889c8c3"), bytes.fromhex("4889f889c8c3")
"""push rax; pop r8; mov eax, ecx; ret – and mov rax, rdi; mov eax, ecx; ret: each returns its fourth argument."""
_CODE = (_EMULATED, _STEPPED, _EMULATED)
_SPACING = 64

COUNT = len(_CODE)
"""Functions there are."""


@lru_cache(maxsize=1)
def own_functions() -> tuple[int, int, int]:
    """Addresses of three tiny functions in a mapped file: breakpoints are only put into files, and never where code can be
    written. The second one begins with an instruction that must be single-stepped.
    """
    import tempfile

    code = b"".join(function.ljust(_SPACING, b"\x90") for function in _CODE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    with tempfile.TemporaryFile(prefix="ncclwatch-calibration-") as file:
        file.write(code)
        file.flush()
        address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, file.fileno(), 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise NcclwatchError(
            "cannot map code to measure the cost of a probe", "is the temporary folder mounted noexec? set TMPDIR"
        )
    return address, address + _SPACING, address + 2 * _SPACING


def own_function(which: int) -> Callable[[int, int, int, int], int]:
    """One of :func:`own_functions` as something to call; it returns its last argument."""
    word = ctypes.c_uint64
    function: Callable[[int, int, int, int], int] = ctypes.CFUNCTYPE(ctypes.c_int, word, word, word, ctypes.c_int)(
        own_functions()[which]
    )
    return function


class Program(StrEnum):
    """Programs of the data path that are tried."""

    POLL = "on_poll"
    POST = "on_post_send"


def calibration_sites(address: int, program: Program = Program.POLL) -> tuple[Site, Site]:
    """Entry and return of one of :func:`own_functions`."""
    pid = os.getpid()
    mapping = mapping_at(read_maps(pid), address)
    if mapping is None:
        raise NcclwatchError("the code to measure the cost of a probe is gone", "try again")
    path, offset = f"/proc/{pid}/map_files/{mapping.range_name}", address - mapping.start + mapping.offset
    entry = Site(pid, mapping.inode, offset, program, False, "calibration", path, "")
    return entry, Site(pid, mapping.inode, offset, f"{program}_return", True, "calibration", path, "")
