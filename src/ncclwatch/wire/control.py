"""The control path: the functions libibverbs does export, probed to hear of devices and queues as they are made."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

from ncclwatch.probes.bpf import Link
from ncclwatch.target.elf import ElfFile
from ncclwatch.target.maps import Mapping
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.sites import CONTROL_PATH, ENTRY_BYTES, cheapest_entry, is_libibverbs, openable_path

LIBRARY = "libibverbs.so.1"
"""The name by which every program asks for it (NCCL: ``src/misc/ibvsymbols.cc`` of v2.27.5-1)."""

MAX_CACHE = 16 << 20

_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEADER = 48
_CACHE_ENTRY = struct.Struct("<iIIIQ")


class ControlKind(IntEnum):
    """``enum nwv_control_kind``."""

    CONTEXT_USED = 1
    CONTEXT_CLOSED = 2
    QP_CREATED = 3
    QP_MODIFIED = 4
    QP_DESTROYED = 5
    DEVICE_OPENED = 6


def library_of(pid: int, mappings: Iterable[Mapping]) -> str | None:
    """The libibverbs that a process has loaded, as a path that the kernel can open; ``None`` when it has none."""
    for mapping in mappings:
        if mapping.executable and mapping.is_file and is_libibverbs(mapping.file_path):
            return openable_path(pid, mapping)
    return None


def library_below(root: Path) -> Path | None:
    """The libibverbs that programs below a root folder would load, by its ``/etc/ld.so.cache``; ``None`` when there is none."""
    try:
        with (root / "etc/ld.so.cache").open("rb") as file:
            data = file.read(MAX_CACHE)
    except OSError:
        return None
    for name, target in _cache_entries(data):
        if name == LIBRARY:
            path = root / target.lstrip("/")
            # x86-64 only: a 32-bit library of the same name has another ELF class.
            if path.is_file() and _is_64_bit(path):
                return path
    return None


def _cache_entries(data: bytes) -> Iterable[tuple[str, str]]:
    """(soname, path) pairs of glibc's cache (``sysdeps/generic/dl-cache.h``: struct cache_file_new, string offsets from its
    start)."""
    start = data.find(_CACHE_MAGIC)
    if start < 0 or start + _CACHE_HEADER > len(data):
        return
    count = struct.unpack_from("<I", data, start + len(_CACHE_MAGIC))[0]
    for index in range(min(count, (len(data) - start - _CACHE_HEADER) // _CACHE_ENTRY.size)):
        _, key, value, _, _ = _CACHE_ENTRY.unpack_from(data, start + _CACHE_HEADER + index * _CACHE_ENTRY.size)
        yield _text(data, start + key), _text(data, start + value)


def _text(data: bytes, offset: int) -> str:
    end = data.find(b"\0", offset, offset + 4096)
    return os.fsdecode(data[offset:end]) if 0 <= offset < len(data) and end >= 0 else ""


def _is_64_bit(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(5) == b"\x7fELF\x02"
    except OSError:
        return False


def attach_control_path(kernel: WireKernel, library: str | Path) -> list[Link]:
    """Probe libibverbs' exported functions in every process that uses this file; each version of a symbol.

    A function that this libibverbs lacks is left out. Raises :class:`ElfError` for a damaged file and what attaching raises.
    """
    links: list[Link] = []
    with ElfFile.open(library) as elf:
        for name, program in CONTROL_PATH.items():
            for symbol in elf.versions(name):
                offset = elf.file_offset(symbol.address)
                if offset is None:
                    continue
                delta, _ = cheapest_entry(elf.read_address(symbol.address, min(symbol.size, ENTRY_BYTES)), keep_stack=False)
                links.append(kernel.attach_control(str(library), offset + delta, program))
    return links
