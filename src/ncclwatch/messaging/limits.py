"""Bounds on what is taken from a peer or a file. Whoever sends more is refused, with a line that says which bound it was."""

from __future__ import annotations

import msgspec

from ncclwatch.errors import NcclwatchError

MAX_FRAME = 16 << 20
"""Bytes of one encoded batch."""
MAX_RAW = 96 << 20
"""Bytes of it decompressed."""
MAX_ROWS = 1 << 20
"""Rows of one table in one batch."""
MAX_ROW_BYTES = 1024
MAX_VALUES = 1 << 17
"""Distinct values (names, processes, peer lists) a stream may hold between two key batches."""
MAX_VALUE_BYTES = 64 << 20
"""Bytes of these values."""
MAX_TEXT = 4096
"""Characters of one text."""
MAX_COUNT = 1 << 62
"""Times in nanoseconds, and counts."""
MAX_INTERVAL_S = 86_400.0
"""Between two looks of a node."""
MAX_RANKS = 1 << 20
"""Ranks of one communicator."""
MAX_PROCESSES = 4096
"""Processes of one node."""

UNDECODABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""What msgspec raises for bytes that are not the type asked for (text that is not UTF-8 is a ``ValueError``)."""

APART = "run versions of ncclwatch that are one apart at most"


class FormatError(NcclwatchError):
    """Bytes that are no batch, or one that breaks a bound."""

    def __init__(self, message: str, hint: str = "it was cut off, damaged, or not written by ncclwatch") -> None:
        super().__init__(message, hint)


class VersionError(FormatError):
    """A batch of a version that cannot be read here."""


class MissingBaseError(FormatError):
    """A batch that builds on one that was not received: the sender has to send a key batch."""
