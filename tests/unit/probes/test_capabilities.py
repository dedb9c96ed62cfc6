"""Capabilities that a child of a user other than root keeps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None)
libc.prctl(8, 1, 0, 0, 0)
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
sys.path[:0] = {path}
from ncclwatch.messaging import privileges
from ncclwatch.probes.capabilities import inherited
privileges._set(1 << 19 | 1 << 38)
show = ["grep", "CapEff", "/proc/self/status"]
with inherited():
    print(int(subprocess.run(show, capture_output=True, text=True).stdout.split()[1], 16))
print(int(subprocess.run(show, capture_output=True, text=True).stdout.split()[1], 16))
print(privileges.effective())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_child_keeps_what_its_parent_has_and_the_next_one_nothing() -> None:
    program = PROGRAM.format(path=[path for path in sys.path if path])
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    if "Permission" in result.stderr:
        pytest.skip("nobody may not read the sources here")
    kept = 1 << 19 | 1 << 38
    assert [int(line) for line in result.stdout.split()] == [kept, 0, kept], result.stderr
