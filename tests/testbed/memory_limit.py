"""A limit on the memory of some processes, by cgroup: both kinds of hierarchy, as containers are limited."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A cgroup of at most ``limit`` bytes; processes move in by its ``cgroup.procs``. Raises OSError where none can be made."""
    second = (_V2 / "cgroup.controllers").exists()
    folder = (_V2 if second else _V1) / f"ncclwatch-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(limit))
        yield folder
    finally:
        deadline = time.monotonic() + 10
        while True:
            try:
                folder.rmdir()
                break
            except OSError:  # a process that was killed is still on its way out
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
