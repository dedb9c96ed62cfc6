"""Where a process stood when a verdict wanted it looked at: run state, kernel functions, Python frames."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """One look at one process. ``time`` is seconds since the epoch by its host's clock.

    ``state`` is the letter of ``/proc/PID/stat``, ``thread_states`` those of its threads in words, each once. ``frames`` are of
    the main thread, (function, file, text), the innermost first; ``holder`` texts of the thread that holds the GIL while the main
    thread wants it (``gil_held``). ``kernel``: what the kernel shows of the main thread; ``problem``: why something is missing.
    """

    host: str
    pid: int
    time: float
    state: str
    thread_states: tuple[str, ...] = ()
    frames: tuple[tuple[str, str, str], ...] = ()
    gil_held: bool = False
    holder: tuple[str, ...] = ()
    kernel: str = ""
    problem: str = ""
    seconds: float = 0.0
    """How long the frames took to read."""
