"""How a command ends: the one place where errors become a line on standard error and an exit status."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from ncclwatch.cli.output import OutputClosed
from ncclwatch.errors import ExitStatus, NcclwatchError
from ncclwatch.text import clean

INTERRUPTED = 130
OUTPUT_CLOSED = 141
BUG = 1


def prepare_streams() -> None:
    """A terminal whose encoding lacks a character shows "?" instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def ended(action: Callable[[], object], usage: Callable[[Exception], int | None] = lambda _: None) -> int:
    """Do something and return the exit status it ends with; ``usage`` tells of errors that the command line's library raises."""
    try:
        status = action()
        sys.stdout.flush()
    except NcclwatchError as error:
        return fail(str(error), error.status)
    except (OutputClosed, BrokenPipeError):
        return _output_closed()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        told = usage(error)
        return _bug(error) if told is None else told
    return int(status) if isinstance(status, int) else ExitStatus.OK


def fail(message: str, status: int) -> int:
    """Say why on standard error; returns the status."""
    with contextlib.suppress(OSError):
        print(f"ncclwatch: error: {clean(message, 2000)}", file=sys.stderr)
    return status


def _bug(error: Exception) -> int:
    if os.environ.get("NCCLWATCH_DEBUG") == "1":
        traceback.print_exception(error)
        return BUG
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return fail(
        f"internal error: {type(error).__name__}: {error}{where}: "
        "run again with NCCLWATCH_DEBUG=1 and report the traceback with the output of 'ncclwatch doctor --json'",
        BUG,
    )


def _output_closed() -> int:
    # What is still buffered would be flushed, and fail, once more at exit.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OUTPUT_CLOSED
