"""Functions of our own to try probes on: what one costs here, and what this kernel's probes can do."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from functools import lru_cache

from ncclwatch.errors import NcclwatchError
from ncclwatch.target.maps import mapping_at, read_maps
from ncclwatch.wire.sites import Site

_CODE = (bytes.fromhex("505931c0c3"), bytes.fromhex("4889f831c0c3"))
"""push rax; pop rcx; xor eax, eax; ret – and mov rax, rdi; xor eax, eax; ret."""
_SPACING = 64


@lru_cache(maxsize=1)
def own_functions() -> tuple[int, int]:
    """Addresses of two tiny functions in a mapped file: breakpoints are only put into files, and never where code can be
    written."""
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
    return address, address + _SPACING


def calibration_sites(address: int) -> tuple[Site, Site]:
    """Entry and return of one of :func:`own_functions`, with the programs of polling."""
    pid = os.getpid()
    mapping = mapping_at(read_maps(pid), address)
    if mapping is None:
        raise NcclwatchError("the code to measure the cost of a probe is gone", "try again")
    path, offset = f"/proc/{pid}/map_files/{mapping.range_name}", address - mapping.start + mapping.offset
    entry = Site(pid, mapping.inode, offset, "on_poll", False, "calibration", path, "")
    return entry, Site(pid, mapping.inode, offset, "on_poll_return", True, "calibration", path, "")
