"""Starting on a node that has no CPU to spare: a word at once, and more priority for a moment, within a budget.

It is on a crowded node that somebody attaches. There a start, which takes a second of CPU time, would take a minute, and nobody
would see why. Imports nothing heavy: its word comes before the command line is even read.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence

NICE = -10
"""A quarter of a CPU against 25 busy processes on it, where nice 0 gets a twenty-sixth."""

BUDGET_S = 5.0
"""CPU time after which the priority is given back, whatever is done by then: three starts without anything cached."""

CROWDED = 4
"""Runnable threads for each CPU from which on a node is crowded."""

HURRIED = ("attach", "agent")
"""Commands that somebody waits for beside a job in trouble."""


def runnable() -> int:
    """Threads that run or wait for a CPU now (``/proc/loadavg``); 0 where that cannot be read."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:  # noqa: PTH123 - pathlib is not loaded yet
            return int(file.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 0


def tell(text: str) -> None:
    """Say on standard error what is being done."""
    with contextlib.suppress(OSError):
        print(f"ncclwatch: {text}", file=sys.stderr, flush=True)


def told(*, as_json: bool) -> bool:
    """Whether a start says what it does: not where whoever reads JSON may have joined standard error with standard output."""
    return not as_json or sys.stderr.isatty()


class Haste:
    """The priority of this process while it starts. One that was started with another priority than usual keeps its own."""

    def __init__(self) -> None:
        self.active = False

    def begin(self) -> bool:
        """Raise it, as far as the kernel allows; whether it is raised."""
        if os.getpriority(os.PRIO_PROCESS, 0) == 0:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, NICE)
                self.active = True
        return self.active

    def check(self) -> None:
        """Give it back when the budget is spent."""
        if self.active and time.process_time() > BUDGET_S:
            self.end()

    def end(self) -> None:
        """Give it back, in every thread."""
        if not self.active:
            return
        self.active = False
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - names only
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), 0)


HASTE = Haste()
"""That of this process."""


def at_start(words: Sequence[str]) -> None:
    """Before anything is loaded: hurry if a command that is waited for begins on a crowded node, and say so."""
    if words[:1] not in [[name] for name in HURRIED] or {"-h", "--help"} & set(words):
        return
    waiting, cpus = runnable(), os.cpu_count() or 1
    if waiting < CROWDED * cpus:
        return
    how = f"nice {NICE} meanwhile, for at most {BUDGET_S:.0f} s of CPU time" if HASTE.begin() else "this may take a while"
    if told(as_json="--json" in words):
        tell(f"starting on a crowded node ({waiting} runnable on {cpus} CPUs): {how}")
