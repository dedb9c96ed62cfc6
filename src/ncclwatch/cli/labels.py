"""How a process, a rank and a communicator are written in every command's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from ncclwatch.collect.batch import PlaneState
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.text import clean

RUN_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "disk sleep",
    "T": "stopped",
    "t": "traced",
    "Z": "zombie",
    "X": "dead",
    "I": "idle",
}
"""Letters of ``/proc/PID/stat`` (proc(5)) in words."""


def run_state(letter: str) -> str:
    """``T`` as ``stopped``; a letter the kernel adds later stays a letter."""
    return RUN_STATES.get(letter, clean(letter, 4) or "?")


def version(info: ProcessInfo) -> str:
    """The NCCL version as ``2.27.5``, or ``?``."""
    return ".".join(str(part) for part in info.version) if info.version else "?"


def planes_line(planes: Iterable[PlaneState]) -> str:
    """Which planes see the job, and why the others do not: ``state, no calls (switched off)``."""
    return ", ".join(p.name if p.running and not p.reason else f"no {p.name} ({p.reason})" for p in planes)


def rank(info: ProcessInfo) -> str:
    """``2/4``, ``2``, or ``-`` when the rank in the job is not known."""
    if info.rank is None:
        return "-"
    return f"{info.rank}/{info.world_size}" if info.world_size is not None else str(info.rank)


def command(info: ProcessInfo, limit: int = 200) -> str:
    """The command line on one line, the directory of the program left out."""
    words = list(info.command[:64])
    if words:
        words[0] = PurePath(words[0]).name or words[0]
    return clean(" ".join(words) or info.name, limit)


def sort_key(info: ProcessInfo) -> tuple[bool, int, str, int]:
    """Known ranks first and ascending, then by host and pid."""
    return (info.rank is None, info.rank if info.rank is not None else 0, info.host, info.pid)


def by_rank(samples: Sequence[ProcessSample]) -> list[ProcessSample]:
    """Samples in the order people expect: by rank, then host and pid."""
    return sorted(samples, key=lambda s: sort_key(s.process))
