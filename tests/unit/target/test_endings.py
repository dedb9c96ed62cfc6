"""Ends of processes that are not waited for as a parent does: when, in which order, and how."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclwatch.model.failure import ProcessEnd
from ncclwatch.model.identity import ProcessKey
from ncclwatch.target.endings import End, Endings
from ncclwatch.target.process import read_stat


@pytest.fixture
def endings() -> Iterator[Endings]:
    made = Endings()
    yield made
    made.close()


def sleeper(code: str = "import time; time.sleep(600)") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


def taken(endings: Endings, number: int) -> dict[int, End]:
    """The ends of so many processes, by pid."""
    found: dict[int, End] = {}
    deadline = time.monotonic() + 60
    while len(found) < number:
        found |= {pid: end for (pid, _), end in endings.take().items()}
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def watch(endings: Endings, process: subprocess.Popen[bytes]) -> None:
    endings.watch(process.pid, read_stat(process.pid).start_time)


def words(end: End) -> str:
    return ProcessEnd(ProcessKey("", 1, 1, ""), "", None, end.time_ns, end.wall_ns, end.late_ns, end.order, end.wait_status).words


def test_how_processes_ended_and_in_which_order(endings: Endings) -> None:
    killed, left = sleeper(), sleeper("import sys; sys.stdin.read(); sys.exit(7)")
    for process in (killed, left):
        watch(endings, process)
    assert not endings.take()
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    killed.kill()
    killed.wait()
    left.communicate()
    ends = taken(endings, 2)
    assert [words(ends[one.pid]) for one in (killed, left)] == ["killed by SIGKILL", "exit status 7"]
    assert ends[killed.pid].order < ends[left.pid].order
    assert all(before - end.late_ns < end.time_ns and end.late_ns > 0 for end in ends.values())


def test_a_zombie_has_ended_though_nobody_has_asked_for_its_status(endings: Endings) -> None:
    process = sleeper()
    watch(endings, process)
    endings.take()
    process.send_signal(signal.SIGSEGV)
    assert words(taken(endings, 1)[process.pid]) == "killed by SIGSEGV"
    assert read_stat(process.pid).state == "Z"
    process.wait()


def test_who_is_forgotten_or_another_process_or_gone_is_not_told(endings: Endings) -> None:
    one, other = sleeper(), sleeper()
    watch(endings, one)
    start_time = read_stat(one.pid).start_time
    endings.forget(one.pid, start_time)
    endings.watch(other.pid, read_stat(other.pid).start_time + 1)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    endings.take()
    for process in (one, other):
        process.kill()
        process.wait()
    endings.watch(one.pid, start_time)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    third = sleeper()
    watch(endings, third)
    third.kill()
    third.wait()
    assert set(taken(endings, 1)) == {third.pid}


def test_whoever_sleeps_is_woken() -> None:
    woken = threading.Event()
    endings = Endings(woken.set)
    process = sleeper()
    watch(endings, process)
    endings.take()
    process.kill()
    assert woken.wait(60) and endings.has_news
    process.wait()
    endings.close()
