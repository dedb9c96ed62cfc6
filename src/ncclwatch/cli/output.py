"""How commands write: lines and JSON to standard output, problems to standard error, a closed pipe without noise."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TextIO

from ncclwatch.text import clean

# 64-bit values that JSON readers would round to doubles are written as 16 hexadecimal digits.
_HEX_FIELDS = frozenset({"hash", "comm_hash", "parent_hash", "address", "host_hash", "pid_hash", "bus_id"})

# No text field of a record is longer than this in JSON; NCCL's and the kernel's own are far shorter.
_JSON_TEXT_LIMIT = 4096


class OutputClosed(Exception):  # noqa: N818 - not an error: whoever read our output has seen enough
    """The reader of standard output went away (``| head``)."""


def emit(line: str = "", *, stream: TextIO | None = None) -> None:
    """Write one line to standard output, or ``stream``, and raise ``OutputClosed`` when nobody reads it any more."""
    target = sys.stdout if stream is None else stream
    try:
        target.write(line + "\n")
    except BrokenPipeError as error:
        raise OutputClosed from error


def flush() -> None:
    """Push out what ``emit`` wrote; live output calls it after every batch."""
    try:
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise OutputClosed from error


def note(line: str) -> None:
    """Say something on standard error that is not part of the output (a process that could not be read, say)."""
    with contextlib.suppress(OSError):
        print(f"ncclwatch: {line}", file=sys.stderr, flush=True)


def emit_json(value: Any, *, indent: int | None = 2) -> None:
    """Write ``value`` (plain data or records) as JSON: indented for one-shot commands, one line for live ones."""
    emit(json.dumps(plain(value), indent=indent, allow_nan=False, separators=None if indent else (",", ":")))


def plain(value: Any, name: str = "") -> Any:
    """Records as plain JSON data: text cleaned, enumerations by value, identifiers of 64 bits in hexadecimal."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return clean(value, _JSON_TEXT_LIMIT)
    if isinstance(value, int):
        return f"{value:016x}" if name in _HEX_FIELDS and value >= 0 else int(value)
    if isinstance(value, float):
        # JSON has no infinities; a number that is none is not known.
        return value if value - value == 0 else None
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), field.name) for field in fields(value)}
    if isinstance(value, dict):
        return {clean(str(key)): plain(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, name) for item in value]
    return clean(str(value), _JSON_TEXT_LIMIT)
