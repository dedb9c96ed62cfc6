"""The little that the tracer asks ``/proc`` about a process."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from ncclwatch.errors import TargetGoneError

MAX_ANCESTORS = 64
"""Bound of the walk from a process to its ancestors."""


def _stat_fields(proc: Path, pid: int) -> list[str]:
    """``/proc/PID/stat`` from field 3 (state) on; the name before it may hold anything. Raises :class:`OSError`."""
    text = (proc / str(pid) / "stat").read_text("utf-8", "replace")
    return text[text.rindex(")") + 2 :].split()


def start_time(proc: Path, pid: int, *, missing: int | None = None) -> int:
    """Clock ticks from boot to the start of a process; ``missing``, or :class:`TargetGoneError`, when there is none."""
    try:
        return int(_stat_fields(proc, pid)[19])
    except (OSError, ValueError, IndexError):
        if missing is not None:
            return missing
        raise TargetGoneError(f"process {pid} is gone", "attach to a running process") from None


def is_descendant(proc: Path, pid: int, ancestors: Container[int]) -> bool:
    """Whether a process descends from one of ``ancestors``, as far as its parents still live."""
    for _ in range(MAX_ANCESTORS):
        try:
            pid = int(_stat_fields(proc, pid)[1])
        except (OSError, ValueError, IndexError):
            return False
        if pid in ancestors:
            return True
        if pid <= 1:
            return False
    return False
