"""Asking a loop to end: from threads, and from signal handlers at every moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from ncclwatch.stopping import Stop

# A handler runs between two steps of the main thread: here at every line of Python that a waiting loop executes, one a try.
AT_EVERY_LINE = """
import signal, sys
from types import FrameType
from ncclwatch.stopping import Stop, stop_on_signals

def interrupted_at(line: int) -> bool:
    stop, seen = stop_on_signals(), 0

    def trace(frame: FrameType, event: str, argument: object):
        nonlocal seen
        if event == "line":
            if seen == line:
                sys.settrace(None)
                frame.f_trace = None
                signal.raise_signal(signal.SIGTERM)
            seen += 1
        return trace

    sys.settrace(trace)
    for _ in range(3):
        stop.wait(0.001)
    sys.settrace(None)
    assert stop.is_set() == (seen > line) and (not stop.is_set() or stop.wait(60))
    return seen > line

lines = 0
while interrupted_at(lines):
    lines += 1
print(lines)
"""


def test_a_signal_may_come_at_every_moment_of_a_wait() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EVERY_LINE], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 6


def test_a_signal_wakes_who_waits_for_ever() -> None:
    code = "from ncclwatch.stopping import stop_on_signals; s = stop_on_signals(); print('ready', flush=True); print(s.wait())"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=120)[0] == "True\n"


@pytest.mark.parametrize("waiters", [1, 3])
def test_every_thread_that_waits_wakes(waiters: int) -> None:
    stop, woken = Stop(), list[bool]()
    threads = [threading.Thread(target=lambda: woken.append(stop.wait(60))) for _ in range(waiters)]
    for thread in threads:
        thread.start()
    stop.set()
    for thread in threads:
        thread.join(60)
    assert woken == [True] * waiters


def test_it_waits_no_longer_than_it_is_told() -> None:
    stop = Stop()
    began = time.monotonic()
    assert not stop.wait(0.01)
    assert not stop.wait(-1)
    assert time.monotonic() - began >= 0.01
    stop.set()
    assert stop.wait(60)
    assert stop.is_set()
