"""Other work on the machine: processes that never rest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from testbed.job import die_with_parent


@contextmanager
def spinners(count: int) -> Iterator[None]:
    """So many endless loops for the length of a block."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command, preexec_fn=die_with_parent) for _ in range(count)]  # noqa: PLW1509
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()
