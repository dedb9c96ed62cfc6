"""``ncclwatch paths move``: ask a process that allows it to have running queue pairs leave by other source ports."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from ncclwatch.cli.output import emit
from ncclwatch.errors import TargetError, UsageError
from ncclwatch.paths.ports import LOWEST, MAX_QUEUE_PAIR
from ncclwatch.text import clean

PATIENCE_S = 10.0
"""Seconds that an answer is waited for: a device takes far less."""
MOST_BYTES = 256
"""Bound: a secret, and an answer."""
_REASONS = {
    errno.EOPNOTSUPP: "its device or driver cannot",
    errno.ENOENT: "the process has no such queue pair that is ready to send",
    errno.EACCES: "the secret is another one than the process read when it began",
}


def move(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="What NCCLWATCH_PATH_LIVE is in the job; its secret is in 'key'.")
    ],
    pid: Annotated[int, typer.Argument(metavar="PID", min=1, help="The process, as in its own namespace.")],
    moves: Annotated[
        list[str],
        typer.Argument(metavar="QUEUE_PAIR:PORT...", help="A sender's queue pair, as in 'paths --json', and its new port."),
    ],
) -> None:
    """Move running queue pairs to other UDP source ports, in a job that preloads the library of pins and allows it."""
    failed = []
    for number, port in [_wanted(text) for text in moves]:
        code = ask(folder, pid, number, port)
        if code == 0:
            emit(f"queue pair {number} leaves by source port {port}")
        else:
            failed.append(f"queue pair {number} stays: {_REASONS.get(code) or os.strerror(code)}")
    if failed:
        raise TargetError("; ".join(failed[:8]), "a plan for the next communicator needs no such request: see 'paths plan'")


def _wanted(text: str) -> tuple[int, int]:
    number, _, port = text.partition(":")
    digits = number.isascii() and number.isdigit() and port.isascii() and port.isdigit()
    if not digits or not 0 < int(number[:10]) <= MAX_QUEUE_PAIR or not LOWEST <= int(port[:10]) <= 65535:
        raise UsageError(f"'{clean(text, 40)}' is no QUEUE_PAIR:PORT", f"RoCE's source ports are {LOWEST} to 65535: 1234:50001")
    return int(number), int(port)


def ask(folder: Path, pid: int, queue_pair: int, port: int) -> int:
    """One request to a process (``path_pins/live.c``): 0, or the errno that it answers.

    Raises :class:`UsageError` for a secret that cannot be read, :class:`TargetError` where nobody answers.
    """
    try:
        key = (folder / "key").read_bytes()[:MOST_BYTES].split()[0]
    except (OSError, IndexError):
        raise UsageError(
            f"{clean(str(folder))} holds no secret", "give the folder that the job has in NCCLWATCH_PATH_LIVE"
        ) from None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.settimeout(PATIENCE_S)
            end.connect(str(folder / f"{pid}.sock"))
            end.sendall(b"%s %d %d\n" % (key, queue_pair, port))
            return int(end.recv(MOST_BYTES))
    except (OSError, ValueError) as error:
        raise TargetError(
            f"process {pid} does not answer in {clean(str(folder))}: {getattr(error, 'strerror', None) or 'no answer'}",
            "it has to preload libncclwatch_pins.so, with NCCLWATCH_PATH_LIVE and a secret, and have a queue pair",
        ) from None
