"""Verdicts on request: a signal, or a file that is touched, asks a running ``attach`` or ``engine`` to judge at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from ncclwatch.cli.output import emit
from ncclwatch.errors import ExitStatus, NcclwatchError, UsageError
from ncclwatch.text import clean

ASK_SIGNAL = signal.SIGUSR1

AskFileOption = Annotated[
    Path | None,
    typer.Option("--ask-file", metavar="FILE", help="Judge at once whenever this file is made or touched (so does SIGUSR1)."),
]


class Bell:
    """Whether somebody has asked since the last time. The file need not exist yet."""

    def __init__(self, file: Path | None = None) -> None:
        self._rings = 0
        self._answered = 0
        self._file = file
        self._seen = self._stamp()
        signal.signal(ASK_SIGNAL, self._ring)

    def rung(self) -> bool:
        """Whether it was; asking again is a new question."""
        stamp = self._stamp()
        touched, self._seen = stamp is not None and stamp != self._seen, stamp
        rings = self._rings
        signalled, self._answered = rings != self._answered, rings
        return signalled or touched

    def _ring(self, _number: int, _frame: FrameType | None) -> None:
        # A counter, no threading.Event: a handler may take no lock (see stopping.Stop).
        self._rings += 1

    def _stamp(self) -> int | None:
        try:
            return self._file.stat().st_mtime_ns if self._file is not None else None
        except OSError:
            return None


def ask(
    pids: Annotated[
        list[int] | None, typer.Argument(metavar="[PID]...", help="Running ncclwatch processes; default: all.")
    ] = None,
) -> int:
    """Ask running `ncclwatch attach` and `ncclwatch engine` processes for a verdict now, however short the standstill.

    They print it where they print everything else. Who knows that the job hangs need not wait for their patience.
    """
    chosen = pids or [pid for pid in _all_pids() if pid != os.getpid() and _listens(pid)]
    if not chosen:
        raise NcclwatchError(
            "no running ncclwatch was found", "start `ncclwatch attach --all`, or `ncclwatch diagnose --all` for one verdict"
        )
    for pid in chosen:
        if not _listens(pid):
            raise UsageError(
                f"pid {pid} is no ncclwatch that can be asked", "give the pid of `ncclwatch attach` or `ncclwatch engine`"
            )
        try:
            os.kill(pid, ASK_SIGNAL)
        except OSError as error:
            raise NcclwatchError(
                f"pid {pid} cannot be asked: {error.strerror}", "ask as the user it runs as, or as root"
            ) from error
        emit(f"asked pid {pid}")
    return ExitStatus.OK


def _all_pids() -> list[int]:
    return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _listens(pid: int) -> bool:
    """Whether a process is an ncclwatch that catches the signal: to any other it would be the end."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0)
    ours = any(clean(word.decode("utf-8", "replace"), 400).rstrip("/").endswith("ncclwatch") for word in words[:4])
    return ours and bool(caught >> (ASK_SIGNAL - 1) & 1)
