"""A command of somebody else's, run in a process group of its own, bounded in time and output: whatever it does, it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

GRACE_S = 1.0
"""From being asked to end to being killed."""
NEVER = threading.Event()
"""For whoever does not end it early."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``status`` is the exit status, negative for a signal, ``None`` where it was never started. ``why`` says
    why it was ended or could not be started, and is empty where it ended by itself. ``output``: the first of what it wrote.
    """

    status: int | None
    seconds: float
    output: bytes
    why: str = ""


def run(
    command: Sequence[str], *, timeout_s: float, keep: int, flood: int, data: bytes = b"", extra: Mapping[str, str] | None = None,
    errors: bool = True, closing: threading.Event = NEVER,
) -> Outcome:  # fmt: skip
    """Run it with ``data`` on its standard input and ``extra`` in its environment; ``keep`` bytes of its output are kept (with
    ``errors`` of standard error too), after ``flood`` bytes it is ended, and when ``closing`` is set.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile() as file:
        # A file and no pipe: whoever does not read it must not keep us waiting.
        file.write(data)
        file.seek(0)
        try:
            process = subprocess.Popen(
                command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.STDOUT if errors else subprocess.DEVNULL,
                env={**os.environ, **(extra or {})}, process_group=0,
            )  # fmt: skip
        except OSError as error:
            return Outcome(None, 0.0, b"", f"could not be started ({error.strerror or error})")
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    with process.stdout as pipe:
        output, why = _watch(process, pipe, began + timeout_s, (keep, flood), closing)
        if why:
            _end(process)
    return Outcome(process.wait(), time.monotonic() - began, output, why)


def _watch(
    process: subprocess.Popen[bytes], pipe: IO[bytes], until: float, bounds: tuple[int, int], closing: threading.Event
) -> tuple[bytes, str]:
    """What it writes, and why it has to be ended; it may leave behind who still holds the pipe."""
    kept, total = bytearray(), 0
    while True:
        ended = process.poll() is not None
        readable = select.select([pipe], [], [], 0.0 if ended else 0.1)[0]
        part = os.read(pipe.fileno(), 1 << 16) if readable else b""
        total += len(part)
        kept += part[: max(bounds[0] - len(kept), 0)]
        if total > bounds[1]:
            return bytes(kept), f"ENDED: it wrote more than {bounds[1] >> 20} MiB"
        if ended and not part:
            return bytes(kept), ""
        if readable and not part:
            # It has closed its output; whether it ends shows by itself.
            closing.wait(0.05)
        if time.monotonic() > until:
            return bytes(kept), "ENDED: it took too long"
        if closing.is_set() and not ended:
            return bytes(kept), "ENDED: ncclwatch ends"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with its group: first asked, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    process.wait()
