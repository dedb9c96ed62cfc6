"""Capabilities for a child of ours: of a user other than root they would be lost when another program begins."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION_3 = 0x20080522
_PR_CAP_AMBIENT, _RAISE, _CLEAR_ALL = 47, 2, 4
_LAST = 63
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def inherited() -> Iterator[None]:
    """What this thread starts meanwhile keeps its capabilities. For root that is so anyway, and nothing is done."""
    held = None if os.geteuid() == 0 else _get()
    if held is None or not held[1]:
        yield
        return
    effective, permitted, before = held
    _set(effective, permitted, permitted)
    try:
        for number in range(_LAST + 1):
            if permitted >> number & 1:
                _libc.prctl(_PR_CAP_AMBIENT, _RAISE, number, 0, 0)
        yield
    finally:
        _libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
        _set(effective, permitted, before)


def _get() -> tuple[int, int, int] | None:
    """Effective, permitted and inheritable capabilities of this thread, one bit each."""
    data = ctypes.create_string_buffer(24)
    if _libc.capget(struct.pack("<Ii", _VERSION_3, 0), data) != 0:
        return None
    low, high = struct.unpack("<3I3I", data.raw)[:3], struct.unpack("<3I3I", data.raw)[3:]
    effective, permitted, inheritable = (a | b << 32 for a, b in zip(low, high, strict=True))
    return effective, permitted, inheritable


def _set(effective: int, permitted: int, inheritable: int) -> None:
    masks = (effective, permitted, inheritable)
    data = struct.pack("<6I", *(mask & 0xFFFFFFFF for mask in masks), *(mask >> 32 for mask in masks))
    _libc.capset(struct.pack("<Ii", _VERSION_3, 0), data)
