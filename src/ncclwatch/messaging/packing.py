"""Fixed numpy records as few bytes: rows as differences from the row before, bytes of equal weight together, then zlib.

zlib and not Zstandard or LZ4: it is in Python's standard library, which keeps the agent's image and its list of dependencies
small; at level 1 on batches of this shape it costs an agent well under a thousandth of a core.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ncclwatch.messaging.limits import APART, MAX_FRAME, MAX_RAW, MAX_ROW_BYTES, MAX_ROWS, FormatError, VersionError

MAGIC = b"ncwB"
VERSION = 1
"""Version of the format. A reader takes one more or less: fields it does not know are skipped, missing ones take defaults."""

_HEAD = struct.Struct("<4sHHI")
"""Magic, version, flags, decompressed size."""
KEY = 1
"""Flag: the batch builds on none before it."""

_FORMATS = frozenset({"<u8", "<i8", "<u4", "<i4", "<u2", "<i2", "|u1", "|i1", "<f8", "<f4"})


class Table(msgspec.Struct, array_like=True):
    """``rows`` records of a layout (a name in the stream's list of layouts)."""

    layout: str
    rows: int
    data: bytes


Layout = list[tuple[str, str]]
"""Names and numpy formats of the fields of a record, packed without gaps, padded to 8 bytes."""


def layout_of(dtype: np.dtype[Any]) -> Layout:
    """The layout a reader needs to take the records apart."""
    return [(name, dtype[name].str) for name in dtype.names or ()]


def dtype_of(layout: Layout) -> np.dtype[Any]:
    """The record of a layout that somebody sent; raises ``FormatError`` when it is none of ours."""
    return _dtype_of(tuple((name, fmt) for name, fmt in layout))


@lru_cache(maxsize=256)
def _dtype_of(layout: tuple[tuple[str, str], ...]) -> np.dtype[Any]:
    names = [name for name, _ in layout]
    if not 0 < len(layout) <= 256 or len(set(names)) != len(names) or not all(0 < len(name) <= 64 for name in names):
        raise FormatError("a layout of records makes no sense")
    if any(fmt not in _FORMATS for _, fmt in layout):
        raise FormatError("a layout has a field of an unknown format")
    dtype = padded(list(layout))
    if dtype.itemsize > MAX_ROW_BYTES:
        raise FormatError(f"records of {dtype.itemsize} bytes are more than the {MAX_ROW_BYTES} allowed")
    return dtype


def padded(layout: Layout) -> np.dtype[Any]:
    """Packed fields, widest first as given, the whole a multiple of 8 bytes."""
    packed = np.dtype(layout)
    size = (packed.itemsize + 7) // 8 * 8
    offsets = np.cumsum([0] + [packed[name].itemsize for name, _ in layout])[:-1].tolist()
    return np.dtype({"names": [n for n, _ in layout], "formats": [f for _, f in layout], "offsets": offsets, "itemsize": size})


def pack(name: str, records: NDArray[Any]) -> Table:
    """A table of records; its dtype must be a multiple of 8 bytes without hidden bytes that matter."""
    words = np.ascontiguousarray(np.ascontiguousarray(records).view("<u8").reshape(len(records), -1).T)
    differences = words.copy()
    differences[:, 1:] -= words[:, :-1]
    return Table(name, len(records), differences.view("u1").reshape(len(words), -1, 8).transpose(0, 2, 1).tobytes())


def check(table: Table, dtype: np.dtype[Any]) -> None:
    """Raise ``FormatError`` for a table whose bytes are not the records it declares."""
    if not 0 <= table.rows <= MAX_ROWS or table.rows * dtype.itemsize != len(table.data):
        raise FormatError(f"a table of {len(table.data)} bytes does not hold {table.rows} records of {dtype.itemsize} bytes")


def unpack(table: Table, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The records of a table."""
    check(table, dtype)
    if not table.rows:
        return np.zeros(0, dtype)
    turned = np.frombuffer(table.data, "u1").reshape(dtype.itemsize, table.rows)
    words = np.cumsum(np.ascontiguousarray(turned.T).view("<u8"), axis=0, dtype="<u8")
    records: NDArray[Any] = words.reshape(-1).view(dtype)
    return records


def frame(body: bytes, *, key: bool, version: int = VERSION, level: int = 1) -> bytes:
    """A body with its head, compressed (``level`` 0: not at all, for files that are compressed as a whole)."""
    return _HEAD.pack(MAGIC, version, KEY if key else 0, len(body)) + zlib.compress(body, level)


def is_key(data: bytes | memoryview) -> bool:
    """Whether an encoded batch builds on none before it."""
    return len(data) >= _HEAD.size and bool(_HEAD.unpack_from(data)[2] & KEY)


def version_of(data: bytes | memoryview) -> int:
    """The version in the head of an encoded batch."""
    return int(_HEAD.unpack_from(data)[1])


def unframe(data: bytes | memoryview) -> tuple[bytes, bool]:
    """Body of an encoded batch, and whether it is a key batch; never more than the bounds allow."""
    if len(data) > MAX_FRAME:
        raise FormatError(f"a batch of {len(data)} bytes is more than the {MAX_FRAME} allowed")
    if len(data) < _HEAD.size or bytes(data[:4]) != MAGIC:
        raise FormatError("this is no batch of ncclwatch")
    _, version, flags, size = _HEAD.unpack_from(data)
    if abs(version - VERSION) > 1:
        raise VersionError(
            f"a batch of format {version} cannot be read here (format {VERSION})",
            APART,
        )
    if size > MAX_RAW:
        raise FormatError(f"a batch of {size} bytes decompressed is more than the {MAX_RAW} allowed")
    inflate = zlib.decompressobj()
    try:
        # One byte more than declared, so that a longer stream is noticed without inflating it.
        body = inflate.decompress(data[_HEAD.size :], size + 1)
    except zlib.error as error:
        raise FormatError("a batch is damaged: it cannot be decompressed") from error
    if len(body) != size or not inflate.eof or inflate.unused_data:
        raise FormatError("a batch is damaged: its length is not the one it declares")
    return body, bool(flags & KEY)
