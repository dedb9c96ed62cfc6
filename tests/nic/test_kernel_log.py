"""What the kernel's log says of processes that it ended: a real one that grew too large, and a real one that crashed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ncclwatch.collect.kernel_log import KernelNews
from ncclwatch.collect.network import NetworkWatch
from ncclwatch.model.network import KernelLogLine
from ncclwatch.model.state import ProcessSample
from testbed.memory_limit import memory_cgroup
from unit.synthetic import frozen_ring

pytestmark = [pytest.mark.attach, pytest.mark.skipif(os.geteuid() != 0, reason="the kernel's log is root's")]

LIMIT = 32 << 20
GROW = f"import sys; sys.stdin.read(1); bytearray({4 * LIMIT})"
CRASH = "import ctypes, sys, threading; threading.Thread(target=lambda: ctypes.string_at(8 * len(sys.stdin.read(1)))).start()"


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup with little memory; whoever is in it leaves it by ending."""
    try:
        with memory_cgroup(LIMIT) as folder:
            yield folder
    except OSError as error:
        pytest.skip(f"no cgroup with a limit on memory can be made here: {error}")


def started(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def until_threads(pid: int, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(list(Path(f"/proc/{pid}/task").iterdir())) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sample_of(process: subprocess.Popen[str]) -> ProcessSample:
    (sample,) = frozen_ring()[0].looks(1)
    ticks = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    key = replace(sample.process.key, pid=process.pid, start_time=ticks)
    return replace(sample, process=replace(sample.process, key=key))


def heard(network: NetworkWatch, pid: int) -> KernelLogLine:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for line in network.news().kernel:
            if line.pid == pid:
                return line
        time.sleep(0.05)
    raise AssertionError("the kernel logged nothing")


def test_a_process_that_is_killed_for_want_of_memory(small_cgroup: Path) -> None:
    process = started(GROW)
    (small_cgroup / "cgroup.procs").write_text(str(process.pid))
    sample, network = sample_of(process), NetworkWatch("node1")
    try:
        network.look([sample])
        process.communicate("x", timeout=20)
        line = heard(network, process.pid)
        assert (line.kind, line.host) == ("memory", "node1")
        assert abs(line.wall_ns / 1e9 - time.time()) < 30
    finally:
        network.close()
    # Who comes afterwards finds it, among the lines since the process began; once.
    late = KernelNews("node1")
    try:
        late.listen()
        assert late.lines() == ()
        late.watch([sample])
        assert [found.pid for found in late.lines()][-1] == process.pid
        assert late.lines() == ()
    finally:
        late.close()
    # To a process that began after it, it is nothing.
    newer = KernelNews("node1")
    try:
        newer.listen()
        key = replace(sample.process.key, start_time=sample.process.key.start_time + 120 * os.sysconf("SC_CLK_TCK"))
        newer.watch([replace(sample, process=replace(sample.process, key=key))])
        assert newer.lines() == ()
    finally:
        newer.close()


@pytest.mark.skipif(
    Path("/proc/sys/debug/exception-trace").exists() and Path("/proc/sys/debug/exception-trace").read_text().strip() == "0",
    reason="this kernel was told to log no crashes (debug.exception-trace)",
)
def test_a_thread_that_crashes_is_told_of_watched_processes_alone() -> None:
    watched, other = started(CRASH), started(CRASH)
    network = NetworkWatch("node1")
    try:
        until_threads(watched.pid, 2)
        network.look([sample_of(watched)])
        other.communicate("x", timeout=20)
        assert watched.stdin is not None
        watched.stdin.write("x")
        watched.stdin.close()
        deadline, lines = time.monotonic() + 20, list[KernelLogLine]()
        while not lines and time.monotonic() < deadline:
            lines += [line for line in network.news().kernel if line.kind == "crash"]
            time.sleep(0.05)
        assert [(line.kind, line.pid) for line in lines] == [("crash", watched.pid)]
    finally:
        network.close()
        watched.wait()
