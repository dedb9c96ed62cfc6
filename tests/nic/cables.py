"""Virtual cables of our own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PREFIX = "nwt"


def command(line: str) -> None:
    """Run one command of words without quoting; a failure raises."""
    subprocess.run(line.split(), check=True, timeout=20, capture_output=True)


@contextmanager
def virtual_cable() -> Iterator[tuple[str, str]]:
    """Both ends of a virtual cable, switched on; skips the test where the kernel has none."""
    ends = (f"{PREFIX}{os.getpid() % 100000}a", f"{PREFIX}{os.getpid() % 100000}b")
    made = subprocess.run(f"ip link add {ends[0]} type veth peer name {ends[1]}".split(), capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("this kernel has no veth devices")
    try:
        for end in ends:
            command(f"ip link set {end} up")
        yield ends
    finally:
        subprocess.run(f"ip link del {ends[0]}".split(), capture_output=True, check=False)
