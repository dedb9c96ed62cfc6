"""How processes ended, and what failed first: the records of a node, and the order of a job's failures."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from enum import StrEnum

from ncclwatch.model.identity import ProcessKey


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The end of a watched process.

    ``time_ns`` is CLOCK_MONOTONIC of the moment the end was heard of, ``wall_ns`` CLOCK_REALTIME; ``late_ns`` is by how much the
    process may have ended earlier. ``order`` counts the ends on this host in the kernel's order. ``wait_status`` is as of
    wait(2), ``None`` where nobody could tell: its parent had asked for it before, on a kernel older than 6.15.
    """

    key: ProcessKey
    host: str
    rank: int | None
    time_ns: int
    wall_ns: int
    late_ns: int
    order: int
    wait_status: int | None = None

    @property
    def signal(self) -> int | None:
        """The signal that killed it."""
        status = self._word
        return os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None

    @property
    def status(self) -> int | None:
        """The exit status, where no signal killed it."""
        status = self._word
        return os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None

    @property
    def _word(self) -> int | None:
        # From a socket it may be any number.
        return None if self.wait_status is None else self.wait_status & 0xFFFF

    @property
    def words(self) -> str:
        """``killed by SIGKILL``, ``exit status 1``, ``ended, nobody saw how``."""
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        return "ended, nobody saw how" if self.status is None else f"exit status {self.status}"


def signal_name(number: int) -> str:
    """``SIGKILL``, or ``signal 40`` of one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class FailureKind(StrEnum):
    """What happened to a rank, or on its host."""

    EXIT = "exit"
    """It ended with a status other than 0."""
    SIGNAL = "signal"
    """A signal killed it."""
    MEMORY = "memory"
    """The kernel killed it for want of memory, its own or its control group's."""
    XID = "xid"
    """The driver reported an error of its GPU, or of one on its host."""
    NCCL_ERROR = "nccl-error"
    """NCCL reported an error in it."""
    ABORT = "abort"
    """Its communicators were aborted, as a watchdog does."""
    ENDED = "ended"
    """It ended with status 0, or nobody saw how."""


class Place(StrEnum):
    """Where in the order of a job's failures something stands, as far as clocks tell."""

    FIRST = "first"
    PERHAPS = "perhaps-first"
    """It may have been first: the clocks of two hosts are not near enough to each other to tell."""
    FOLLOWED = "followed"
    BEFORE = "before"
    """It ended with status 0 before anything failed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that went wrong in a job that came down; those of a job are in the order of time.

    ``rank`` and ``pid`` are ``None`` of what happened on the host (an Xid that names no process of the job). ``code`` is the
    exit status, the signal or the Xid. ``time`` is seconds since the epoch by the engine's clock, ``after_s`` seconds after the
    first failure; both are off by at most ``error_s`` in comparison with the first, ``None`` where nobody has compared the clocks
    of the hosts.
    """

    kind: FailureKind
    place: Place
    words: str
    host: str
    rank: int | None
    pid: int | None
    code: int | None
    time: float
    after_s: float
    error_s: float | None
