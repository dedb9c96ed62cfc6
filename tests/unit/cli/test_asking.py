"""Asking a running ncclwatch for a verdict: by a file, by the command; never a process that the signal would end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclwatch.cli import options
from ncclwatch.cli.asking import ASK_SIGNAL, Bell, ask
from ncclwatch.engine import patience
from ncclwatch.errors import UsageError


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.getsignal(ASK_SIGNAL)
    yield
    signal.signal(ASK_SIGNAL, before)


def test_a_file_that_is_made_or_touched_asks_once(tmp_path: Path, handler: None) -> None:
    file = tmp_path / "ask"
    bell = Bell(file)
    assert not bell.rung()
    file.touch()
    assert bell.rung()
    assert not bell.rung()
    os.utime(file, ns=(1, time.time_ns() + 10**9))
    assert bell.rung()
    file.unlink()
    assert not bell.rung()


def test_a_signal_asks_once(handler: None) -> None:
    bell = Bell()
    os.kill(os.getpid(), ASK_SIGNAL)
    assert bell.rung()
    assert not bell.rung()


def test_a_process_that_would_die_of_the_signal_is_refused() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "ncclwatch"])
    try:
        with pytest.raises(UsageError, match="can be asked"):
            ask([child.pid])
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_the_floor_of_the_help_is_that_of_the_engine() -> None:
    assert options.HANG_FLOOR_S == patience.HANG_FLOOR_S
